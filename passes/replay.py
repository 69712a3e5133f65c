"""Certificates that can be run again: a region described at probe sizes, and its re-run in another process."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ascend_deep.passes import catalogue, certificates, gates
from ascend_deep.passes._types import Recogniser, Refusal, Solution
from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.probe import isolated
from ascend_deep.passes.region import Dims, Program, Ref, Region, Size

__all__ = ["Replayed", "describe", "replay"]


@dataclass(frozen=True)
class Replayed:
    """Result of a replay: ``ok``, and the sentence that says what was found."""

    ok: bool
    text: str
    max_error: float
    recorded_error: float


def describe(recogniser: Recogniser, region: Region, solution: Solution) -> dict[str, Any]:
    """JSON form of a region: its program, and sizes, shapes and dtypes of one probe."""
    with isolated():
        probe = recogniser.probes(region, solution)[0]
    return {
        "program": region.program.to_dict(),
        "symbols": dict(probe.dims.symbols),
        "literals": {str(k): v for k, v in probe.dims.literals.items()},
        "roles": {r: [str(t.dtype).removeprefix("torch."), list(t.shape)] for r, t in probe.tensors.items()},
        "hints": {
            k: {"node": v.index} if isinstance(v, Ref) else v
            for k, v in region.portable_hints().items()
            if isinstance(v, (bool, int, float, str, Ref))
        },
    }


def replay(name: str) -> Replayed:
    """Run the region and the replacement of a stored certificate again.

    Args:
        name: path of a certificate, or its key.

    Raises:
        FileNotFoundError, ValueError: no such certificate, or not one of this version.
    """
    certificate = certificates.load(name)
    recogniser = catalogue.load([certificate.recogniser])[0]
    region = _region(certificate.recogniser, certificate.program)
    solution = Solution(certificate.op, certificate.attrs)
    with isolated():
        proof = gates.prove(recogniser, region, solution)
    recorded = certificate.max_error
    if isinstance(proof, Refusal):
        return Replayed(False, f"{certificate.op} no longer matches its region: {proof.reason}", float("inf"), recorded)
    text = (
        f"{certificate.op} matches its region on {len(proof.cases)} probes with seeds {list(proof.seeds)}: "
        f"largest error {proof.max_error:.2e} of the result's size (recorded {recorded:.2e}). "
        "This is tested equivalence, not a proof."
    )
    return Replayed(True, text, proof.max_error, recorded)


def _region(recogniser: str, data: Mapping[str, Any]) -> Region:
    """The region of ``describe``, rebuilt as a graph of its own at the probe's sizes."""
    program = Program.from_dict(data["program"])
    dims = Dims(data["symbols"], {int(k): v for k, v in data["literals"].items()})
    graph = fx.Graph()
    fake_mode = torch._subclasses.FakeTensorMode()
    inputs: dict[str, fx.Node] = {}
    for role in program.roles:
        dtype, shape = data["roles"][role]
        inputs[role] = graph.placeholder(role)
        with fake_mode:
            inputs[role].meta["val"] = torch.empty(shape, dtype=getattr(torch, dtype))
    env: list[fx.Node] = []

    def decode(a: Any, resize: bool) -> Any:
        if isinstance(a, Ref):
            return list(inputs.values())[-1 - a.index] if a.index < 0 else env[a.index]
        if isinstance(a, Size):
            return dims.size_of_text(a.expr)
        if isinstance(a, (list, tuple)):
            return [decode(x, resize) for x in a]
        return dims.size(a) if resize and isinstance(a, int) and not isinstance(a, bool) else a

    for step in program.steps:
        args = tuple(decode(a, i in step.sizes) for i, a in enumerate(step.args))
        kwargs = {k: decode(v, False) for k, v in step.kwargs.items()}
        node = graph.call_function(step.target, args, kwargs)
        values = torch.utils._pytree.tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (args, kwargs))
        with fake_mode, torch.no_grad():
            node.meta["val"] = (
                operator.getitem(*values[0])
                if step.target is operator.getitem
                else step.target(*values[0], **values[1])
            )
        env.append(node)
    outputs = tuple(env[r] if r >= 0 else list(inputs.values())[-1 - r] for r in program.results)
    graph.output(outputs)
    hints = {k: env[v["node"]].name if isinstance(v, dict) else v for k, v in data["hints"].items()}
    return Region(recogniser, GraphView(graph), inputs, outputs, tuple(env), hints)
