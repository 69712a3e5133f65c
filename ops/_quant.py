"""The one rule of quantisation, shared by every op that quantises.

    s = max(amax of |x| over the block, 1e-4) / largest            largest = 448 (FP8), 6 (FP4); f32
    s = 2^ceil(log2 s) for UE8M0, by its bits: exponent + (mantissa != 0), kept in 1 ... 254
    q = round(x (1 / s))                                           reciprocal first, to nearest even, saturating

A block of zeros has the scale of the lower bound and stays zero. NaN: with f32 scales the scale of the block is NaN and
so is all of it; with powers of two the scale is 2^127, FP8 keeps the NaN and FP4, which has none, writes 6; every
number beside it becomes zero. An infinity likewise makes its block NaN or, with powers of two, comes out as 448 (6)
2^127 and all else as zero. Contract: B.1 of the DeepGEMM operator list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _sf

__all__ = ["check_gran_k", "check_matrix", "empty_scales", "fp4", "fp8", "scaled", "write_scales"]

LARGEST_FP8 = 448.0
LARGEST_FP4 = 6.0
_LEAST = 1e-4


def scaled(x: Tensor, gran: Sequence[int], largest: float, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``x`` [..., M, K] divided by its scales, in float32, and the scales [..., ceil(M / gran), ceil(K / gran)]."""
    *lead, rows, columns = x.shape
    gran_m, gran_k = gran
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, -columns % gran_k, 0, -rows % gran_m))
    blocks = padded.reshape(*lead, _sf.ceil_div(rows, gran_m), gran_m, _sf.ceil_div(columns, gran_k), gran_k)
    amax = blocks.abs().amax((-3, -1)).clamp(min=_LEAST)
    # By a tensor: CUDA multiplies by the reciprocal of a number, which is not the same to the last bit.
    scale = amax / amax.new_full((), largest)
    if ue8m0:
        scale = _sf.pow2_ceil(scale)
    divided = blocks * (1.0 / scale)[..., :, None, :, None]
    return divided.reshape(padded.shape)[..., :rows, :columns], scale


def fp8(x: Tensor, gran: Sequence[int], ue8m0: bool) -> tuple[Tensor, Tensor]:
    """E4M3 data and logical scales. Clamped by hand: older torch turns what is too large into NaN."""
    divided, scale = scaled(x, gran, LARGEST_FP8, ue8m0)
    return divided.clamp(-LARGEST_FP8, LARGEST_FP8).to(_sf.FP8).contiguous(), scale


def fp4(x: Tensor, gran: Sequence[int]) -> tuple[Tensor, Tensor]:
    """E2M1 pairs in int8 and logical scales, always powers of two: no library takes others."""
    divided, scale = scaled(x, gran, LARGEST_FP4, True)
    return _sf.pack_fp4(_sf.e2m1_codes(divided)), scale


def write_scales(scale: Tensor, sf_format: str) -> Tensor:
    """Logical scales, new and contiguous, or packed."""
    # Not contiguous(), which keeps strange strides where a size is 1 or 0.
    fresh = torch.contiguous_format
    return scale.clone(memory_format=fresh) if sf_format == "fp32" else _sf.pack(_sf.encode_ue8m0(scale), sf_format)


def empty_scales(like: Tensor, lead: Sequence[Any], rows: Any, columns: Any, gran: Sequence[int], fmt: str) -> Tensor:
    """What ``write_scales`` returns for an operand [*lead, rows, columns], on fake tensors."""
    groups = _sf.ceil_div(columns, gran[1])
    if fmt != "fp32":
        return _sf.empty_packed(like, lead, rows, groups, fmt)
    return like.new_empty((*lead, _sf.ceil_div(rows, gran[0]), groups), dtype=torch.float32)


def check_matrix(op: str, name: str, x: Tensor) -> None:
    """A matrix or a batch of them."""
    if x.dim() < 2:
        raise ValueError(f"{op}: {name} has {x.dim()} dimensions; it must be [..., M, K].")


def check_gran_k(op: str, gran_k: Any) -> tuple[int, int]:
    """The block (1, gran_k)."""
    if int(gran_k) < 1:
        raise ValueError(f"{op}: gran_k is {gran_k}; it must be at least 1, such as 32.")
    return 1, int(gran_k)
