"""Runs a region and its replacement on the same inputs and compares them.

Everything here happens inside a compiler: fake modes, autocast and grad mode of the trace are switched off while
probes run, and the random state of the program is never touched (probes use their own generators).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import fx

from ascend_deep.lowering import _torch_compat
from ascend_deep.passes._types import Probe, Recogniser, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.region import Region

__all__ = ["Comparison", "compare", "isolated", "replacement"]


@contextmanager
def isolated() -> Iterator[None]:
    """Real tensors on the CPU, no gradients, no autocast (capture made its casts explicit).

    A compile may start inside ``torch.utils.checkpoint``, whose hooks count the tensors that autograd saves, or in
    inference mode, where nothing can be differentiated: probes that differentiate see neither.
    """
    with ExitStack() as stack:
        stack.enter_context(_torch_compat.unset_fake_temporarily())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        # Of nested hooks only the innermost are called.
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is))
        yield


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def replacement(recogniser: Recogniser, region: Region, solution: Solution) -> fx.GraphModule:
    """The replacement alone, as a module of the region's inputs in role order."""
    graph = fx.Graph()
    inputs = {role: graph.placeholder(role) for role in region.inputs}
    outputs = recogniser.emit(Builder(graph), region, inputs, solution)
    graph.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


@dataclass(frozen=True)
class Comparison:
    """Result of one probe: the largest error relative to the result's size, and the sentence if it is too large."""

    error: float
    failure: str = ""


def compare(
    got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], rtol: float, atol: float, case: str
) -> Comparison:
    """Compare outputs of replacement and region.

    Integer outputs must be equal. Float outputs must agree within ``atol·scale + rtol·|want|`` where ``scale`` is
    the largest finite magnitude of ``want`` (at least 1e-30), and be NaN or infinite at the same places.
    """
    worst = 0.0
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape or g.dtype != w.dtype:
            return Comparison(
                float("inf"),
                f"output {i} is {g.dtype} {tuple(g.shape)} where the block gives {w.dtype} {tuple(w.shape)} ({case}).",
            )
        if not w.is_floating_point():
            if not torch.equal(g, w):
                return Comparison(float("inf"), f"output {i} holds other integers than the block's ({case}).")
            continue
        a, b = g.double(), w.double()
        finite = torch.isfinite(b)
        if not torch.equal(torch.isnan(a), torch.isnan(b)) or (
            not torch.equal(a[~finite], b[~finite]) and bool((~finite & ~torch.isnan(b)).any())
        ):
            return Comparison(float("inf"), f"output {i} is not finite at other places than the block's ({case}).")
        if not bool(finite.any()):
            continue
        a, b = a[finite], b[finite]
        scale = max(float(b.abs().max()), 1e-30)
        gap = (a - b).abs()
        # Without an absolute tolerance nothing is allowed where the block gives zero, and 0 / 0 is no difference.
        error = float(torch.where(gap == 0, 0.0, gap / (atol * scale + rtol * b.abs())).max())
        worst = max(worst, float(gap.max()) / scale)
        if not error <= 1.0:
            return Comparison(worst, f"output {i} differs by {worst:.2e} of its size in the case “{case}”.")
    return Comparison(worst)


def run_probe(
    recogniser: Recogniser, region: Region, module: fx.GraphModule, probe: Probe, rtol: float, atol: float
) -> Comparison:
    """Run region and replacement on one probe. Call inside ``isolated``."""
    tensors: Mapping[str, torch.Tensor] = probe.tensors
    want = region.program.run(probe.dims, tensors)
    got = module(*(tensors[role].clone() for role in region.inputs))
    canonical = getattr(recogniser, "canonical", None)
    if canonical is not None:  # results equal up to an order that the block leaves open
        want, got = canonical(region, want), canonical(region, got)
    return compare(tuple(got), tuple(want), rtol, atol, probe.case)
