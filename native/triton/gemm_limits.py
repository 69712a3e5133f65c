"""Which calls of the GEMM ops the Triton kernels take: one sentence, or ``None``. No Triton needed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "gemm_bf16",
    "gemm_bf16_acc_",
    "gemm_bf16_out",
    "gemm_scaled",
    "k_grouped_gemm_bf16",
    "k_grouped_gemm_bf16_acc_",
    "m_grouped_gemm_bf16",
    "m_grouped_gemm_bf16_masked",
    "m_grouped_gemm_scaled",
    "m_grouped_gemm_scaled_masked",
]

_FP8 = torch.float8_e4m3fn
_LEAST_LABELS = 16
_MOST_GROUPS = 1024


def _empty(*sizes: Any) -> str | None:
    return f"a size is 0 in {tuple(sizes)}; there is nothing to launch." if 0 in sizes else None


def _small(*tensors: Tensor) -> str | None:
    for t in tensors:
        if max(t.shape) >= 2**31 - 2**16:
            return f"a dimension of {tuple(t.shape)} is too long; the kernel counts in 32 bits."
    return None


def gemm_bf16(a: Tensor, b: Tensor, c: Tensor | None, **_: Any) -> str | None:
    """Limits of ``gemm_bf16``: any strides, C, factors and dtypes of the op."""
    return _empty(*a.shape, *b.shape) or _small(a, b)


def _rows_contiguous(d: Tensor) -> str | None:
    if d.stride(-1) != 1 and d.shape[-1] > 1:
        return f"d has the strides {tuple(d.stride())}; the kernel writes rows that are contiguous."
    return None


def gemm_bf16_out(d: Tensor, a: Tensor, b: Tensor, c: Tensor | None, **_: Any) -> str | None:
    """Limits of ``gemm_bf16_out``."""
    return gemm_bf16(a, b, c) or _rows_contiguous(d)


def gemm_bf16_acc_(d: Tensor, a: Tensor, b: Tensor, **_: Any) -> str | None:
    """Limits of ``gemm_bf16_acc_``."""
    return gemm_bf16(a, b, d) or _rows_contiguous(d)


def _scaled(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
) -> str | None:
    if a.dtype != _FP8 or b.dtype != _FP8:
        return f"the operands are {a.dtype} and {b.dtype}; the kernel takes float8_e4m3fn for both."
    if sfa.dtype != torch.float32 or sfb.dtype != torch.float32:
        return f"the scales are {sfa.dtype} and {sfb.dtype}; the kernel takes float32."
    found = tuple(map(int, recipe_a)), tuple(map(int, recipe_b))
    if found[0] != (1, 128) or found[1] not in ((1, 128), (128, 128)):
        return (
            f"the recipes are {found[0]} and {found[1]}; the kernel takes (1, 128) for a, and that or (128, 128) for b."
        )
    return _empty(*a.shape, *b.shape) or _small(a, b)


def gemm_scaled(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    c: Tensor | None,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    **_: Any,
) -> str | None:
    """Limits of ``gemm_scaled``."""
    return _scaled(a, sfa, b, sfb, recipe_a, recipe_b)


def _grouped(grouping: str, alignment: int, groups: int) -> str | None:
    if groups > _MOST_GROUPS:
        return f"there are {groups} groups; the kernel takes {_MOST_GROUPS}."
    if grouping == "labels" and alignment % _LEAST_LABELS:
        return f"groups are aligned to {alignment} rows; with labels the kernel takes multiples of {_LEAST_LABELS}."
    return None


def m_grouped_gemm_bf16(
    a: Tensor, b: Tensor, grouped_layout: Tensor, *, grouping: str, alignment: int, **_: Any
) -> str | None:
    """Limits of ``m_grouped_gemm_bf16``."""
    return _grouped(grouping, alignment, b.shape[0]) or _empty(*a.shape, *b.shape) or _small(a, b)


def m_grouped_gemm_scaled(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    grouped_layout: Tensor,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    grouping: str,
    alignment: int,
    **_: Any,
) -> str | None:
    """Limits of ``m_grouped_gemm_scaled``."""
    return _scaled(a, sfa, b, sfb, recipe_a, recipe_b) or _grouped(grouping, alignment, b.shape[0])


def m_grouped_gemm_bf16_masked(a: Tensor, b: Tensor, masked_m: Tensor, **_: Any) -> str | None:
    """Limits of ``m_grouped_gemm_bf16_masked``."""
    if a.shape[0] > 65535:
        return f"there are {a.shape[0]} groups; a launch takes 65535."
    if a.shape[0] * a.shape[1] >= 2**31:
        return f"a has {a.shape[0] * a.shape[1]} rows; the kernel counts them in 32 bits."
    return _empty(*a.shape, *b.shape) or _small(a, b)


def m_grouped_gemm_scaled_masked(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    masked_m: Tensor,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    **_: Any,
) -> str | None:
    """Limits of ``m_grouped_gemm_scaled_masked``."""
    return _scaled(a, sfa, b, sfb, recipe_a, recipe_b) or m_grouped_gemm_bf16_masked(a, b, masked_m)


def k_grouped_gemm_bf16(a: Tensor, b: Tensor, grouped_layout: Tensor, c: Tensor | None, **_: Any) -> str | None:
    """Limits of ``k_grouped_gemm_bf16``."""
    groups = grouped_layout.shape[0]
    if groups > 65535:
        return f"there are {groups} groups; a launch takes 65535."
    return _empty(*a.shape, *b.shape, groups) or _small(a, b)


def k_grouped_gemm_bf16_acc_(d: Tensor, a: Tensor, b: Tensor, grouped_layout: Tensor, **_: Any) -> str | None:
    """Limits of ``k_grouped_gemm_bf16_acc_``."""
    return k_grouped_gemm_bf16(a, b, grouped_layout, d) or _rows_contiguous(d)
