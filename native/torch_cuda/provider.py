"""The ``torch`` provider of CUDA: ``mm``, ``bmm``, ``_grouped_mm`` and ``_scaled_mm`` where they are the best there is.

It stands behind DeepGEMM and before our Triton kernels, so its limits also say where those are faster. The sums of the
ops are float32, but by default torch lets cuBLAS add parts of a bfloat16 product in bfloat16
(``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction``). While that is so, products are computed with a
float32 result, which cannot lose anything, and rounded afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native._provider import Provider
from ascend_deep.native.deep_gemm import gemm_layouts

__all__ = ["DETOUR_COLUMNS", "DETOUR_ROWS", "LEAST_GROUP", "LEAST_ROWS", "TORCH_CUDA"]

_FP8 = torch.float8_e4m3fn
LEAST_ROWS = 65
"""Fewer rows are bound by reading the weight, which our Triton kernel does faster."""
DETOUR_ROWS, DETOUR_COLUMNS = 1024, 4096
"""Sizes of a result that is too large to be written in float32 first (measured at 128 and 4096 rows)."""
LEAST_GROUP = 512
"""Rows of an average group from which ``_grouped_mm`` is the faster one."""


@functools.cache
def _unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device."
    if torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 0):
        return "the device is not an NVIDIA GPU of compute capability 8.0 (Ampere) or newer."
    return None


def _logical(a: Tensor, b: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """A as [.., M, K] and B as [.., K, N]."""
    return (a if layout[0] == "n" else a.mT), (b if layout[1] == "n" else b.mT)


def _exact() -> bool:
    return not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def gemm_bf16_limits(
    a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, out_dtype: torch.dtype | None, alpha: float | None
) -> str | None:
    """Why torch does not take a call of ``gemm_bf16``."""
    left, right = _logical(a, b, layout)
    if left.shape[0] < LEAST_ROWS:
        return f"it has {left.shape[0]} rows; our own kernel is the faster one below {LEAST_ROWS}."
    if 0 in (*left.shape, right.shape[1]):
        return "a size is 0; the reference has nothing to compute either."
    dtype = out_dtype or (torch.bfloat16 if c is None else c.dtype)
    if dtype == torch.bfloat16 and not _exact() and left.shape[0] >= DETOUR_ROWS and right.shape[1] >= DETOUR_COLUMNS:
        return (
            "torch may sum bfloat16 products in bfloat16 (allow_bf16_reduced_precision_reduction); the way around it "
            f"is slower than our own kernel from {DETOUR_ROWS} rows and {DETOUR_COLUMNS} columns on."
        )
    return None


def gemm_bf16(
    a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, out_dtype: torch.dtype | None, alpha: float | None
) -> Tensor:
    """The op ``gemm_bf16``."""
    left, right = _logical(a, b, layout)
    dtype = out_dtype or (torch.bfloat16 if c is None else c.dtype)
    scale = 1.0 if alpha is None else alpha
    if dtype == torch.bfloat16 and _exact():
        if c is not None:
            return torch.addmm(c, left, right, alpha=scale)
        if scale == 1.0:
            return torch.mm(left, right)
    out: Tensor = torch.mm(left, right, out_dtype=torch.float32)
    if scale != 1.0:
        out *= scale
    if c is not None:
        out += c
    return out.to(dtype)


def m_grouped_limits(
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    *,
    layout: str,
    grouping: str,
    alignment: int,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> str | None:
    """Why torch does not take a call of ``m_grouped_gemm_bf16``."""
    left, right = _logical(a, b, layout)
    if torch.cuda.get_device_capability(a.device) != (9, 0):
        return "the device is not SM90; _grouped_mm has its kernel for that one only."
    if grouping != "psum":
        return f"grouping is {grouping!r}; _grouped_mm takes ends of groups."
    if out_dtype not in (None, torch.bfloat16):
        return f"out_dtype is {out_dtype}; _grouped_mm writes bfloat16."
    rows = left.shape[0] // max(right.shape[0], 1)
    if rows < LEAST_GROUP:
        return f"groups have about {rows} rows; our own kernel is the faster one below {LEAST_GROUP}."
    for name, x in (("a", left), ("b", right)):
        inner = -1 if x.stride(-1) == 1 else -2
        outer = x.stride(-3 - inner)
        if x.stride(inner) != 1 or outer % 8 or (name == "a" and inner == -2):
            return f"{name} has the strides {tuple(x.stride())}; _grouped_mm takes rows at multiples of 16 bytes."
        if x.dim() == 3 and x.stride(0) % 8:
            return f"{name} has the strides {tuple(x.stride())}; _grouped_mm takes groups at multiples of 16 bytes."
    if 0 in (*left.shape, *right.shape) or right.shape[2] % 8:
        return f"B is {tuple(right.shape)}; _grouped_mm gets sizes that are not 0 and N in multiples of 8."
    return None


def m_grouped_gemm_bf16(
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    *,
    layout: str,
    grouping: str,
    alignment: int,
    zero_padding: bool,
    **_: Any,
) -> Tensor:
    """The op ``m_grouped_gemm_bf16``: padding rows are computed with the group before them and overwritten."""
    left, right = _logical(a, b, layout)
    left, right = (x.clone() if x.data_ptr() % 16 else x for x in (left, right))
    ends = gemm_layouts.ends(grouped_layout, left.shape[0], alignment)
    if alignment > 1:
        ends = ((ends + (alignment - 1)) // alignment * alignment).clamp(max=left.shape[0]).to(torch.int32)
    out: Tensor = torch._grouped_mm(left, right, offs=ends)
    if zero_padding:
        gemm_layouts.clear_padding(out, grouped_layout, grouping, alignment, right.shape[0])
    return out


_EQUATIONS = {
    # Dimensions of a and of b as [batch, rows, K] and [batch, K, columns], and of the product as the result.
    "bhr,hdr->bhd": ((1, 0, 2), (0, 2, 1), (1, 0, 2)),
    "bhd,hdr->bhr": ((1, 0, 2), (0, 1, 2), (1, 0, 2)),
    "bhd,bhr->hdr": ((1, 2, 0), (1, 0, 2), (0, 1, 2)),
}


def einsum_limits(a: Tensor, b: Tensor, c: Tensor | None, *, eq: str, out_dtype: torch.dtype | None) -> str | None:
    """Why torch does not take a call of ``einsum_bf16``."""
    if eq not in _EQUATIONS:
        return f"eq is {eq!r}; bmm sums over no batch."
    return "a size is 0." if 0 in (*a.shape, *b.shape) else None


def einsum_bf16(a: Tensor, b: Tensor, c: Tensor | None, *, eq: str, out_dtype: torch.dtype | None) -> Tensor:
    """The op ``einsum_bf16`` for the equations that are one ``bmm``."""
    of_a, of_b, of_d = _EQUATIONS[eq]
    dtype = out_dtype or (torch.bfloat16 if c is None else c.dtype)
    left, right = a.permute(of_a), b.permute(of_b)
    if dtype == torch.bfloat16 and c is None and _exact():
        out = torch.bmm(left, right).permute(of_d)
    else:
        out = torch.bmm(left, right, out_dtype=torch.float32).permute(of_d)
        if c is not None:
            out = out + c
    return out.to(dtype).contiguous()


def scaled_limits(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    c: Tensor | None,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    layout: str,
    out_dtype: torch.dtype | None,
    alpha: float | None,
) -> str | None:
    """Why torch does not take a call of ``gemm_scaled``."""
    if torch.cuda.get_device_capability(a.device) != (9, 0):
        return "the device is not SM90; blocks of 128 have been tried there only."
    if a.dtype != _FP8 or b.dtype != _FP8 or sfa.dtype != torch.float32 or sfb.dtype != torch.float32:
        return "the operands are not float8_e4m3fn with float32 scales, which are what _scaled_mm takes here."
    if tuple(map(int, recipe_a)) != (1, 128) or tuple(map(int, recipe_b)) != (128, 128):
        return f"the recipes are {tuple(recipe_a)} and {tuple(recipe_b)}; _scaled_mm gets (1, 128) and (128, 128)."
    if c is not None or alpha not in (None, 1.0) or out_dtype not in (None, torch.bfloat16):
        return "there is a c, an alpha or an out_dtype that is not bfloat16, which _scaled_mm does not take."
    left, right = _logical(a, b, layout)
    m, k, n = *left.shape, right.shape[1]
    if m < LEAST_ROWS:
        return f"it has {m} rows; our own kernel is the faster one below {LEAST_ROWS}."
    if m % 4 or k % 128 or n % 128:
        return f"M, N and K are {m}, {n} and {k}; _scaled_mm gets multiples of 4, 128 and 128."
    return None


def gemm_scaled(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, c: Tensor | None, *, layout: str, **_: Any) -> Tensor:
    """The op ``gemm_scaled`` for fp8 operands with scales of 1 x 128 and 128 x 128, f32 sums."""
    left, right = _logical(a, b, layout)
    left = left.contiguous()
    right = right if right.stride(0) == 1 and right.stride(1) == right.shape[0] else right.t().contiguous().t()
    left, right = (x.clone(memory_format=torch.preserve_format) if x.data_ptr() % 16 else x for x in (left, right))
    rows_first = sfa if sfa.stride(0) == 1 and sfa.stride(1) == sfa.shape[0] else sfa.t().contiguous().t()
    # The scales of b with columns of blocks, as b itself is seen: [K / 128, N / 128].
    out: Tensor = torch._scaled_mm(
        left, right, scale_a=rows_first, scale_b=sfb.contiguous().t(), out_dtype=torch.bfloat16
    )
    return out


TORCH_CUDA = Provider(
    name="torch",
    device="cuda",
    unavailable=_unavailable,
    kernels={
        "gemm_bf16": gemm_bf16,
        "gemm_scaled": gemm_scaled,
        "m_grouped_gemm_bf16": m_grouped_gemm_bf16,
        "einsum_bf16": einsum_bf16,
    },
    limits={
        "gemm_bf16": gemm_bf16_limits,
        "gemm_scaled": scaled_limits,
        "m_grouped_gemm_bf16": m_grouped_limits,
        "einsum_bf16": einsum_limits,
    },
    version="1",
)
