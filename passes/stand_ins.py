"""What runs in place of an op when a region runs on the CPU at probe sizes, and regions in exact arithmetic.

Two ops of real graphs do not run on every CPU input: ``histc`` of integers (what CUDA and NPU graphs hold) and
``_grouped_mm`` with strides that are no multiple of 16 bytes. Their stand-ins have the same contract; rows that
``_grouped_mm`` leaves unwritten are NaN here, so that a block which reads them shows it.

``widened`` turns a program into the same mathematics in f64: recognisers that compare it with a family can then tell
functions apart that a bf16 result would hide (gelu from its tanh form), and rounding never decides a match. What the
rounding does is left to the final probes, which run the program as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ascend_deep.passes.region import Program

__all__ = ["STAND_INS", "widened"]


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """``aten.histc`` that also takes integers on the CPU and returns them."""
    if x.is_floating_point():
        return torch.histc(x, bins, min, max)
    return torch.histc(x.double(), bins, min, max).to(x.dtype)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``aten._grouped_mm`` with a [S, k], b [E, k, n]: rows up to ``offs[-1]`` are products, the rest NaN; or with
    a [m, S], b [S, n]: sums over the rows of each group [E, m, n]."""
    if a.dim() != 2 or bias is not None:
        raise ValueError("only [S, k] × [E, k, n] and [m, S] × [S, n] grouped products without bias run here")
    if b.dim() == 2:
        starts = [0, *offs.tolist()[:-1]]
        sums = [a[:, s:e] @ b[s:e] for s, e in zip(starts, offs.tolist(), strict=True)]
        return torch.stack(sums).to(out_dtype or a.dtype)
    return _by_group(a, b, offs, float("nan")).to(out_dtype or a.dtype)


def _grouped_mm_fallback(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """``transformers::grouped_mm_fallback``: as above, with zeros in the rest."""
    return _by_group(input, weight, offs, 0.0)


def _by_group(a: Tensor, b: Tensor, offs: Tensor, rest: float) -> Tensor:
    out = a.new_full((a.shape[0], b.shape[2]), rest)
    start = 0
    for e, end in enumerate(offs.tolist()):
        if end > start:
            out[start:end] = a[start:end] @ b[e]
            start = end
    return out


STAND_INS: Mapping[str, Callable[..., Any]] = {
    "aten.histc": _histc,
    "aten._grouped_mm": _grouped_mm,
    "transformers.grouped_mm_fallback": _grouped_mm_fallback,
}


def widened(program: Program) -> Program:
    """``program`` with every floating dtype replaced by f64. Run it on f64 tensors."""
    from dataclasses import replace

    def wide(a: Any) -> Any:
        if isinstance(a, torch.dtype):
            return torch.float64 if a.is_floating_point else a
        if isinstance(a, Tensor):
            return a.double() if a.is_floating_point() else a
        if isinstance(a, (list, tuple)):
            return type(a)(wide(x) for x in a)
        return a

    steps = tuple(
        replace(s, args=tuple(wide(a) for a in s.args), kwargs={k: wide(v) for k, v in s.kwargs.items()})
        for s in program.steps
    )
    return replace(program, steps=steps)
