"""What the GEMM ops on bfloat16 share: layouts, checks, the one rounding, and how a float32 gradient goes through them.

    D = C + alpha * op(A) @ op(B)

Products of bfloat16 are exact in float32; sums are float32; the result is rounded once.

``layout`` says how the operands are stored, first letter A, second letter B, as in BLAS: A is [M, K] (``n``) or [K, M]
(``t``), B is [K, N] (``n``) or [N, K] (``t``). ``nt`` is a linear layer. Strides are free in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check
from ascend_deep.ops._op import Tolerance
from ascend_deep.ops._present import check_own_places

__all__ = [
    "DEBUG_HINT",
    "LAYOUTS",
    "OUT_DTYPES",
    "TOLERANCE",
    "as_float32",
    "autocast",
    "check_accumulator",
    "check_dense",
    "check_operand",
    "finish",
    "parts",
    "result_dtype",
    "sizes",
    "widened",
]

LAYOUTS = ("nt", "nn", "tn", "tt")
OUT_DTYPES = (torch.bfloat16, torch.float32)
DEBUG_HINT = "with ASCEND_DEEP_DEBUG=1"

_REASON = (
    "exact products, summed in float32 in any order (K * 2^-24 of the largest), then rounded to bfloat16 once: one "
    "unit in the last place, 2^-8"
)
TOLERANCE: Mapping[torch.dtype, Tolerance] = {
    torch.bfloat16: Tolerance(8e-3, 2e-4, _REASON),
    torch.float32: Tolerance(8e-3, 2e-4, _REASON),
}


def sizes(a: Tensor, b: Tensor, layout: str) -> tuple[Any, Any, Any, Any]:
    """M, N, K of A, and K of B, from the last two dimensions."""
    m, ka = (a.shape[-2], a.shape[-1]) if layout[0] == "n" else (a.shape[-1], a.shape[-2])
    n, kb = (b.shape[-2], b.shape[-1]) if layout[1] == "t" else (b.shape[-1], b.shape[-2])
    return m, n, ka, kb


def check_operand(op: str, name: str, tensor: Tensor, shape: str, dims: int) -> None:
    """A bfloat16 operand of ``dims`` dimensions."""
    _check.dtypes(op, name, tensor, (torch.bfloat16,))
    _check.rank(op, name, tensor, shape, dims)


def check_dense(op: str, a: Tensor, b: Tensor, layout: str) -> None:
    """Dtype, rank, layout and common K of two matrices."""
    _check.choice(op, "layout", layout, LAYOUTS)
    check_operand(op, "a", a, "[M, K]" if layout[0] == "n" else "[K, M]", 2)
    check_operand(op, "b", b, "[N, K]" if layout[1] == "t" else "[K, N]", 2)
    _, _, ka, kb = sizes(a, b, layout)
    _check.size(op, f"K of b in layout {layout!r}", kb, ka, "K of a")
    _check.same_device(op, "a", a, b=b)


def check_accumulator(
    op: str, a: Tensor, c: Tensor | None, shape: tuple[Any, ...], out_dtype: torch.dtype | None, name: str = "c"
) -> None:
    """``c`` (or ``d``, by ``name``): the shape of the result and a dtype that the op can write; and ``out_dtype``.

    ``d`` is written, so its elements must each have a place of their own.
    """
    if out_dtype is not None and out_dtype not in OUT_DTYPES:
        raise TypeError(f"{op}: out_dtype is {str(out_dtype).removeprefix('torch.')}; accepted: bfloat16, float32.")
    if c is None:
        return
    _check.dtypes(op, name, c, OUT_DTYPES if out_dtype is None else (out_dtype,))
    _check.rank(op, name, c, "[M, N]" if len(shape) == 2 else "of the shape of the result", len(shape))
    for i, (found, wanted) in enumerate(zip(c.shape, shape, strict=True)):
        _check.size(op, f"size {i} of {name}", found, wanted, "that of the result")
    _check.same_device(op, "a", a, **{name: c})
    if name == "d":
        check_own_places(op, name, c)


def result_dtype(c: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    """``out_dtype``, else the dtype of ``c``, else bfloat16."""
    if out_dtype is not None:
        return out_dtype
    return torch.bfloat16 if c is None else c.dtype


def widened(a: Tensor, b: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """float32 copies, A as [..., M, K] and B as [..., K, N]."""
    left = a.to(torch.float32)
    right = b.to(torch.float32)
    return (left if layout[0] == "n" else left.mT), (right if layout[1] == "n" else right.mT)


def finish(product: Tensor, c: Tensor | None, alpha: float | None, dtype: torch.dtype) -> Tensor:
    """``c + alpha * product`` in float32, rounded once, contiguous. ``product`` may be used up."""
    if alpha is not None:
        product = product * alpha
    if c is not None:
        product = product + c.to(torch.float32)
    return product.to(dtype).contiguous()


def parts(grad: Tensor) -> tuple[Tensor, ...]:
    """``grad`` as bfloat16 tensors whose sum it is, smallest first.

    A bfloat16 gradient is its own only part. A float32 one is cut into three of 8 bits each, which is exact unless the
    smallest falls below the range of bfloat16: so the gradient of a float32 result is not rounded before it is used.
    Infinities and NaN stay in the largest part alone.
    """
    if grad.dtype == torch.bfloat16:
        return (grad.contiguous(),)
    largest = grad.to(torch.bfloat16)
    rest = torch.where(largest.isfinite(), grad - largest.to(torch.float32), 0.0)
    middle = rest.to(torch.bfloat16)
    smallest = (rest - middle.to(torch.float32)).to(torch.bfloat16)
    return smallest.contiguous(), middle.contiguous(), largest.contiguous()


def as_float32(grad: Tensor) -> bool:
    """Whether a gradient is better multiplied as the float32 that it is than in ``parts``.

    So it is on a CPU, where a product of bfloat16 costs as much as one of float32, and three cost three times as much.
    """
    return grad.dtype == torch.float32 and grad.device.type == "cpu"


def autocast(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What autocast to bfloat16 does to a matmul: float32 and float16 operands (the first two) become bfloat16.

    Under another autocast dtype nothing is cast, and operands that are not bfloat16 are refused by the check.
    """
    if dtype != torch.bfloat16:
        return args, kwargs
    a, b, *rest = args
    cast = (torch.float32, torch.float16)
    return (a.to(dtype) if a.dtype in cast else a, b.to(dtype) if b.dtype in cast else b, *rest), kwargs
