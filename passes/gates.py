"""The checks between "solved" and "rewritten". A rewrite happens only if every one of them passes.

1. Every argument of every node is part of the region's program, so nothing is dropped in silence
   (``region.Program`` holds all positional and keyword arguments, and ``solve`` runs exactly that).
2. The replacement's fake outputs equal the originals in shape (symbolically), dtype, device and strides.
3. Dims are positive by the time a recogniser compares them (normal form).
4. Interior results that others use stay where they are; they are counted.
5. One grad-mode and autocast segment, no mutation (``region.slice_region``).
6. Region and replacement agree on probe inputs (``prove``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ascend_deep import ops
from ascend_deep.lowering._torch_compat import statically_known_true
from ascend_deep.passes import safeguards
from ascend_deep.passes._types import Recogniser, Refusal, Solution
from ascend_deep.passes.probe import replacement, run_probe
from ascend_deep.passes.region import Region

__all__ = ["Proof", "prove", "same_metadata", "tolerance_on"]


@dataclass(frozen=True)
class Proof:
    """What the probes of one rewrite found."""

    max_error: float
    seeds: tuple[int, ...]
    cases: tuple[str, ...]
    rtol: float
    atol: float
    reason: str


def same_metadata(originals: Sequence[fx.Node], replacements: Sequence[fx.Node]) -> Refusal | None:
    """Gate 2: the fake outputs agree, or why not."""
    for old, new in zip(originals, replacements, strict=True):
        a, b = old.meta.get("val"), new.meta.get("val")
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return Refusal(f"the value of {old.name} is not known at compile time.", old)
        if a.dtype != b.dtype:
            return Refusal(f"the replacement gives {b.dtype} where the block gives {a.dtype}.", old)
        if a.device != b.device:
            return Refusal(f"the replacement is on {b.device} where the block is on {a.device}.", old)
        if a.dim() != b.dim() or not all(_same(x, y) for x, y in zip(a.shape, b.shape, strict=True)):
            return Refusal(
                f"the replacement has shape {list(b.shape)} where the block has {list(a.shape)}.",
                old,
            )
        if not _same_strides(a, b):
            return Refusal(
                f"the replacement has strides {list(b.stride())} where the block has {list(a.stride())}.",
                old,
            )
    return None


def prove(recogniser: Recogniser, region: Region, solution: Solution) -> Proof | Refusal:
    """Gate 6: run region and replacement on the recogniser's probes. Call inside ``probe.isolated``."""
    probes = recogniser.probes(region, solution)
    if len({p.seed for p in probes}) < 3:
        raise AssertionError(f"recogniser {recogniser.name} must probe with at least three seeds")
    blind = safeguards.beyond_probes(region, [p.dims for p in probes])
    if blind is not None:
        return blind
    known = ops.op(solution.op).tolerance
    tolerance = known[_float_dtype(region, known)]
    # Results in half precision may round to another neighbour, once in the op and once in the block.
    coarse = max(torch.finfo(d).eps for d in _float_dtypes(region.outputs)) if _float_dtypes(region.outputs) else 0.0
    rtol = max(tolerance.rtol, 2 * coarse)
    module = replacement(recogniser, region, solution)
    worst = 0.0
    for probe in probes:
        try:
            result = run_probe(recogniser, region, module, probe, rtol, tolerance.atol)
        except Exception as error:
            return Refusal(
                f"region or replacement did not run on the probe “{probe.case}”: {type(error).__name__}: "
                f"{str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}",
                region.outputs[0],
            )
        if result.failure:
            return Refusal(f"the replacement does not compute the same: {result.failure}", region.outputs[0])
        worst = max(worst, result.error)
    return Proof(
        worst,
        tuple(sorted({p.seed for p in probes})),
        tuple(p.case for p in probes),
        rtol,
        tolerance.atol,
        tolerance.reason,
    )


def tolerance_on(region: Region, solution: Solution, device: str) -> ops.Tolerance:
    """How far the op may be from the block on ``device``, by the lowest precision among the block's numbers."""
    op = ops.op(solution.op)
    return op.tolerance_for(_float_dtype(region, op.tolerance), device)


def _same(a: Any, b: Any) -> bool:
    return bool(statically_known_true(a == b))


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(_same(x, y) or _same(n, 1) for x, y, n in zip(a.stride(), b.stride(), a.shape, strict=True)) or _same(
        a.numel(), 0
    )


def _float_dtype(region: Region, known: Collection[torch.dtype]) -> torch.dtype:
    """The lowest-precision float dtype among inputs, outputs and operands: the one whose rounding the results show.

    A recogniser whose block casts between its inputs and its products says so in the hint "compute". Dtypes that the op
    has no tolerance for (``known``) are what it returns codes in.
    """
    dtypes = _float_dtypes([*region.inputs.values(), *region.outputs])
    if "compute" in region.hints:
        dtypes.append(getattr(torch, region.hints["compute"]))
    return max([d for d in dtypes if d in known] or dtypes, key=lambda d: torch.finfo(d).eps)


def _float_dtypes(nodes: Sequence[fx.Node]) -> list[torch.dtype]:
    return [n.meta["val"].dtype for n in nodes if n.meta["val"].dtype.is_floating_point]
