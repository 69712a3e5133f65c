"""Number formats and scale factors once more, from their written definitions, one number at a time.

Nothing here uses the code under test: codes are decoded from their bits with plain Python numbers (which hold every
float32 exactly), words are taken apart byte by byte.
"""

from __future__ import annotations

import bisect
import ctypes
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep import ops

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)


def f32(x: float) -> float:
    """The float32 nearest to ``x``; of the result of one operation on float32 numbers, what float32 hardware gives."""
    return ctypes.c_float(x).value


def e4m3(byte: int) -> float:
    """E4M3 without infinities: 1 sign, 4 exponent bits with bias 7, 3 mantissa bits, 0x7F and 0xFF are NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e2m1(code: int) -> float:
    """Four bits: a sign and an index into the grid."""
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def ue8m0(code: int) -> float:
    """A biased exponent and nothing else; 255 is NaN."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


_E4M3_POSITIVE = [e4m3(byte) for byte in range(127)]


def _nearest(x: float, grid: Sequence[float]) -> int:
    """Index of the nearest number of an ascending grid, ties to the even index, saturating."""
    at = bisect.bisect_left(grid, x)
    if at == 0 or at == len(grid):
        return min(at, len(grid) - 1)
    below, above = x - grid[at - 1], grid[at] - x
    if below != above:
        return at - 1 if below < above else at
    return at - 1 if (at - 1) % 2 == 0 else at


def to_e4m3(x: float) -> int:
    """The byte of the nearest E4M3 number."""
    if math.isnan(x):
        return 0x7F
    return _nearest(abs(x), _E4M3_POSITIVE) | (0x80 if math.copysign(1.0, x) < 0 else 0)


def to_e2m1(x: float) -> int:
    """The code of the nearest E2M1 number; no minus zero; NaN is the largest."""
    if math.isnan(x):
        return 7
    code = _nearest(abs(x), E2M1)
    return code | 8 if x < 0 and code else code


def pow2_ceil(s: float) -> float:
    """The least power of two that is not below ``s``, from 2^-126 to 2^127."""
    if not math.isfinite(s):
        return 2.0**127
    mantissa, exponent = math.frexp(s)
    return 2.0 ** min(max(exponent - 1 if mantissa == 0.5 else exponent, -126), 127)


def quantise(
    x: Sequence[Sequence[float]], gran: tuple[int, int], largest: float, powers: bool
) -> tuple[list[list[float]], list[list[float]]]:
    """A matrix of float32 numbers divided by its scales, not yet rounded, and the scales."""
    rows, columns = len(x), len(x[0]) if x else 0
    scales = []
    for top in range(0, rows, gran[0]):
        scales.append([])
        for left in range(0, columns, gran[1]):
            block = [v for row in x[top : top + gran[0]] for v in row[left : left + gran[1]]]
            amax = math.nan if any(map(math.isnan, block)) else max(map(abs, block))
            s = f32((amax if math.isnan(amax) else max(amax, f32(1e-4))) / largest)
            scales[-1].append(pow2_ceil(s) if powers else s)
    divided = []
    for i, row in enumerate(x):
        reciprocals = [0.0 if math.isinf(s) else f32(1.0 / s) for s in scales[i // gran[0]]]
        # Infinity times zero is an error nowhere in Python: it is NaN, as in float32.
        divided.append([f32(v * reciprocals[k // gran[1]]) for k, v in enumerate(row)])
    return divided, scales


def words(codes: Sequence[int], per: int) -> list[int]:
    """Signed little-endian words of ``per`` bytes; what is missing at the end is 127."""
    filled = [*codes, *[127] * (-len(codes) % per)]
    return [int.from_bytes(bytes(filled[at : at + per]), "little", signed=True) for at in range(0, len(filled), per)]


_BYTES = {torch.int32: 4, torch.int16: 2}


def scale_of(sf: Tensor, mn: int, k: int, gran: Sequence[int]) -> Tensor:
    """float64 [mn, k], the scale of every element of one matrix."""
    out = torch.empty(mn, k, dtype=torch.float64)
    for i in range(mn):
        if sf.dtype == torch.float32:
            row = sf[i // gran[0]].tolist()
        else:
            n = _BYTES[sf.dtype]
            row = [ue8m0(b) for w in sf[i].tolist() for b in int(w).to_bytes(n, "little", signed=True)]
        out[i] = torch.tensor([row[j // gran[1]] for j in range(k)], dtype=torch.float64)
    return out


def numbers(x: Tensor) -> Tensor:
    """float64 numbers of FP8 data or of FP4 pairs along the last dimension."""
    if x.dtype in FP4:
        table = torch.tensor([[e2m1(b & 15), e2m1(b >> 4)] for b in range(256)], dtype=torch.float64)
        return table[x.view(torch.uint8).long()].flatten(-2)
    return torch.tensor([e4m3(b) for b in range(256)], dtype=torch.float64)[x.view(torch.uint8).long()]


def operand(x: Tensor, sf: Tensor, gran: Sequence[int], transposed: bool = False) -> Tensor:
    """float64 [mn, k] of one operand; ``transposed``: its data is stored [k, mn]."""
    data = numbers(x).t() if transposed else numbers(x)
    return data * scale_of(sf, *data.shape, gran)


def product(
    a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, recipe_a: Sequence[int], recipe_b: Sequence[int], layout: str
) -> Tensor:
    """float64 A B^T."""
    return operand(a, sfa, recipe_a, layout[0] == "t") @ operand(b, sfb, recipe_b, layout[1] == "n").t()


def run(runner: str, name: str, sample: ops.Sample) -> Any:
    """A sample through the op, which takes a kernel where there is one, or through the body that defines it."""
    definition = ops.op(name)
    call = definition.overload if runner == "op" else definition.reference
    return call(*sample.args, **sample.kwargs)


def cases(name: str) -> list[Any]:
    """All samples of an op, both ways."""
    return [pytest.param(r, s, id=f"{r}-{s.name}") for s in ops.op(name).samples() for r in ("op", "reference")]


def calc_diff(x: Tensor, y: Tensor) -> float:
    """DeepGEMM's measure of how different two tensors are: 1 - 2 sum(xy) / sum(x^2 + y^2)."""
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())
