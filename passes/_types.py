"""The vocabulary of the passes: what a recogniser finds, why it refuses, and what a rewrite leaves behind.

A recogniser works in four steps, each a method of its own so that a failure has one place and one reason:

``find``   anchors: nodes at which a block of this kind may sit;
``cut``    the region around an anchor: inputs by role, outputs, and every node between, or a ``Refusal``;
``solve``  the member of the op's family that the region computes, found by running it, or a ``Refusal``;
``emit``   the replacement, written through a ``Builder``.

The pipeline calls them, runs the gates between them and keeps the certificate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

if TYPE_CHECKING:
    from ascend_deep.passes.builder import Builder
    from ascend_deep.passes.graph_view import GraphView
    from ascend_deep.passes.region import Dims, Region

__all__ = ["Certificate", "Match", "Miss", "Outcome", "Probe", "Recogniser", "Refusal", "Solution"]


@dataclass(frozen=True)
class Refusal:
    """Why a candidate is left as it is. ``reason`` and ``hint`` are full sentences a model's author understands."""

    reason: str
    node: fx.Node | None = None
    hint: str = ""


@dataclass(frozen=True)
class Solution:
    """The member of an op's family that a region computes: op name and the value of every scalar attribute."""

    op: str
    attrs: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """Short form for reports: the attributes that are not at their neutral value."""
        neutral = (None, False, "none", 1, 0, "")
        grouped = self.attrs.get("n_group", 1) != 1
        shown = [
            f"{k}={v}"
            for k, v in self.attrs.items()
            if k == "topk" or v is True or (v not in neutral and (grouped or "group" not in k))
        ]
        return f"{self.op}({', '.join(shown)})"


@dataclass(frozen=True)
class Probe:
    """One run of region and replacement: sizes, a tensor per role (real, CPU), and what the case is about."""

    case: str
    seed: int
    dims: Dims
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Certificate:
    """Tested equivalence of one rewrite: what was run, with which seeds, and how far apart the results were.

    Attributes:
        key: content hash of the region, the solution and the versions involved; file name of the stored form.
        op, attrs: the replacement.
        seeds: seeds of the probes; ``cases`` names them ("ties", "one token", …).
        max_error: largest |replacement - region| / (atol + rtol·|region|) over all probes, times rtol: an error
            relative to the size of the region's result.
        tolerance: the op's tolerance for the region's dtype, with its reason.
        program: serialised region (see ``region.Program.to_dict``), so that ``ascend-deep replay`` can run again.
    """

    key: str
    recogniser: str
    op: str
    attrs: Mapping[str, Any]
    seeds: tuple[int, ...]
    cases: tuple[str, ...]
    max_error: float
    tolerance: Mapping[str, Any]
    verify: str
    program: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """One accepted rewrite, as reports show it."""

    recogniser: str
    op: str
    count: int
    module: str
    source: str
    provider: str
    max_error: float
    certificate: str
    spec: str
    outside_users: int = 0
    notes: tuple[str, ...] = ()
    provider_refusals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Miss:
    """One place that looked like a block of a kind and was left alone."""

    recogniser: str
    module: str
    source: str
    reason: str
    hint: str = ""


@dataclass(frozen=True)
class Outcome:
    """What the passes did to one graph."""

    matches: tuple[Match, ...] = ()
    misses: tuple[Miss, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    unclaimed: Mapping[str, int] = field(default_factory=dict)
    untouched: str = ""
    notes: tuple[str, ...] = ()


class Recogniser(Protocol):
    """One kind of block. Implementations are frozen dataclasses or plain classes without state."""

    name: str
    """Option name: ``options={"disable": [name]}``."""

    op: str
    """Name of the op it rewrites to."""

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """Anchors in graph order. Cheap: looks at targets only."""

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """Regions to try around ``anchor``, largest first."""

    def solve(self, region: Region) -> Solution | Refusal:
        """The family member that ``region`` computes. Runs the region; called once per distinct region."""

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """Inputs for the final comparison, with at least three different seeds."""

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """Write the replacement; returns one node per region output, same order."""
