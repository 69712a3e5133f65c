"""CPU kernels under the vendor's matrix products and quantisation, written from the vendor's public formulas.

Operands are logical: whether one is transposed in memory shows in its strides only. What is wrong is an error here, not
a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["KERNELS"]

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_DTYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


def _numbers(x: Tensor, four: bool, along: int) -> Tensor:
    """FP8, or FP4 pairs along dimension ``along``, as float32."""
    if not four:
        return x.to(torch.float32)
    assert x.dtype == torch.uint8
    codes = torch.stack((x & 15, x >> 4), along).flatten(along - 1, along)
    magnitude = _E2M1[(codes & 7).long()]
    return torch.where(codes > 7, -magnitude, magnitude)


def _swapped(x: Tensor) -> bool:
    return x.stride(-2) == 1 and x.stride(-1) != 1


def _power(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponent.shape), exponent)


def _e8m0(codes: Tensor) -> Tensor:
    assert codes.dtype == torch.uint8
    return _power(codes.to(torch.int32) - 127)


def _spread(scale: Tensor, sizes: tuple[int, int], gran: tuple[int, int]) -> Tensor:
    rows, columns = sizes
    assert scale.shape == (math.ceil(rows / gran[0]), math.ceil(columns / gran[1])), (scale.shape, sizes, gran)
    return scale.repeat_interleave(gran[0], 0)[:rows].repeat_interleave(gran[1], 1)[:, :columns]


def _mx_columns(pairs: Tensor, k: int) -> Tensor:
    """[R, ceil(K / 64), 2] bytes as one number per element [R, K]."""
    assert pairs.shape[1:] == (math.ceil(k / 64), 2)
    blocks = _e8m0(pairs).flatten(1)
    return blocks.repeat_interleave(32, 1)[:, :k]


def _quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    **_: Any,
) -> Tensor:
    assert pertoken_scale is not None
    four = x1_dtype == 296
    a = _numbers(x1, four, -1)
    b = _numbers(x2, four, -2 if _swapped(x2) else -1)
    (m, k), n = a.shape, b.shape[1]
    if group_sizes is None:
        product = (a @ b) * scale.float() * pertoken_scale.unsqueeze(1)
    else:
        gm, gn, gk = group_sizes
        if gk == 32:
            assert (pertoken_scale_dtype, scale_dtype) == (293, 293)
            left, right = _mx_columns(pertoken_scale, k), _mx_columns(scale.transpose(0, 1), k).t()
        else:
            left, right = _spread(pertoken_scale, (m, k), (gm, gk)), _spread(scale, (k, n), (gk, gn))
        product = (a * left) @ (b * right)
    return product.to(torch.int8 if output_dtype is None else _DTYPES[output_dtype])


def grouped_scaled(
    a: Tensor,
    w: Tensor,
    sizes: list[int],
    scale: Tensor,
    own: Tensor,
    dtype: int | None,
    four: bool,
    mx: bool,
) -> Tensor:
    """The quantised product of one x [M, K] and one weight [G, K, N], grouped along M; rows behind are NaN."""
    assert dtype is not None
    x = _numbers(a, four, -1)
    weight = _numbers(w, four, -2 if _swapped(w) else -1)
    k, n = weight.shape[1:]
    assert x.shape[1] == k and not _swapped(a)
    out = torch.full((x.shape[0], n), math.nan, dtype=_DTYPES[dtype])
    start = 0
    for g, size in enumerate(sizes):
        part = slice(start, start + size)
        if mx:
            left, right = _mx_columns(own[part], k), _mx_columns(scale[g].transpose(0, 1), k).t()
        elif own.dim() == 1:
            left, right = own[part].unsqueeze(1), scale[g].unsqueeze(0)
        else:
            left, right = _spread(own[part], (size, k), (1, 128)), _spread(scale[g], (k, n), (128, 128))
        out[part] = ((x[part] * left) @ (weight[g] * right)).to(out.dtype)
        start += size
    return out


def _dynamic_mx_quant(
    input: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    assert (axis, round_mode, dst_type, scale_alg, dst_type_max) == (-1, "rint", 292, 1, 0.0)
    size = input.shape[-1]
    blocks = math.ceil(size / block_size)
    padded = torch.nn.functional.pad(input.float(), (0, blocks * block_size - size))
    grouped = padded.unflatten(-1, (blocks, block_size))
    most = grouped.abs().amax(-1)
    if max_low_bound > 0:
        most = most.clamp(min=max_low_bound)
    mantissa, exponent = torch.frexp(most / 448.0)  # mantissa in [0.5, 1)
    power = torch.where(mantissa > 0.5, exponent, exponent - 1)
    data = (grouped * _power(-power).unsqueeze(-1)).flatten(-2)[..., :size]
    codes = torch.nn.functional.pad((power + 127).to(torch.uint8), (0, blocks % 2))
    return data.to(torch.float8_e4m3fn), codes.unflatten(-1, (-1, 2))


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_quant_matmul": _quant_matmul,
    "npu_dynamic_mx_quant": _dynamic_mx_quant,
}
