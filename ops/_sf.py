"""Scale factors and the number formats they scale: UE8M0, E2M1 (FP4), E4M3 (FP8), packed words, blocks.

One scale belongs to a block of ``gran`` = (gran_mn, gran_k) elements of an operand [..., MN, K]. The canonical form is
*logical*: float32 [..., ceil(MN / gran_mn), ceil(K / gran_k)], any strides. Blocks at the end may be smaller.

Packed forms hold UE8M0 codes, one byte each, c = 2^(c - 127), 0 = 2^-127, 255 = NaN. They have one row per row of the
operand, so gran_mn is 1:

    "ue8m0x4"   int32 [..., MN, ceil(G / 4)], byte i of word j is the code of K-group 4 j + i     (SM100)
    "ue8m0x2"   int16 [..., MN, ceil(G / 2)], low byte: even K-group, high byte: odd K-group       (Ascend)

with G = ceil(K / gran_k); codes behind the last group are 127. Ops take packed words with any strides and return them
as those libraries want them, with the rows of the operand next to each other in memory: strides (1, MN rounded up to a
multiple of 4) for int32, (1, MN) for int16, matrices of a batch without gaps.

FP4 tensors hold two codes per byte along their last dimension, the low nibble first, in int8, uint8 or
float4_e2m1fn_x2. Contract: A.2 and B.1 of the DeepGEMM operator list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check

__all__ = [
    "E2M1",
    "FORMATS",
    "FP4",
    "FP8",
    "QUANTISED",
    "SF_DTYPES",
    "WORDS",
    "align",
    "ceil_div",
    "check_format",
    "check_gran",
    "check_sf",
    "decode_ue8m0",
    "dequantise",
    "e2m1_codes",
    "empty_mn_major",
    "empty_packed",
    "encode_ue8m0",
    "expand",
    "fill_storage",
    "is_fp4",
    "last_size",
    "logical",
    "owned",
    "pack",
    "pack_fp4",
    "pow2_ceil",
    "values",
]

FP8 = torch.float8_e4m3fn
FP4 = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
QUANTISED = (FP8, *FP4)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Codes per word, by the dtype of the words.
WORDS = {torch.int32: 4, torch.int16: 2}
FORMATS = {"fp32": torch.float32, "ue8m0x4": torch.int32, "ue8m0x2": torch.int16}
SF_DTYPES = tuple(FORMATS.values())
_ONE = 127
_NAN = 255


def ceil_div(a: Any, b: Any) -> Any:
    """a / b rounded up; sizes may be symbolic."""
    return (a + b - 1) // b


def align(a: Any, b: int) -> Any:
    """``a`` rounded up to a multiple of ``b``; ``a`` may be symbolic."""
    return ceil_div(a, b) * b


def decode_ue8m0(codes: Tensor) -> Tensor:
    """uint8 codes to float32: 2^(code - 127), 0 is the subnormal 2^-127, 255 is NaN."""
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, 0x00400000, bits)
    return torch.where(codes == _NAN, 0x7FC00000, bits).view(torch.float32)


def encode_ue8m0(scales: Tensor) -> Tensor:
    """float32 to uint8 codes. Exact for 2^-127 ... 2^127; everything else (0, infinity, 0.3, -2) becomes NaN, 255."""
    bits = scales.contiguous().view(torch.int32)
    exact = ((bits & 0x7FFFFF) == 0) & (bits > 0) & (bits < 0x7F800000)
    codes = torch.where(exact, bits >> 23, _NAN)
    return torch.where(bits == 0x00400000, 0, codes).to(torch.uint8)


def pow2_ceil(scales: Tensor) -> Tensor:
    """The least power of two that is not below a positive float32: exponent + (mantissa != 0), kept in 1 ... 254."""
    bits = scales.contiguous().view(torch.int32)
    exponent = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0)
    return (exponent.clamp(1, 254).to(torch.int32) << 23).view(torch.float32)


def is_fp4(x: Tensor) -> bool:
    """True if ``x`` holds pairs of FP4 codes."""
    return x.dtype in FP4


def last_size(x: Tensor) -> Any:
    """Number of elements along the last dimension; FP4 has two per byte."""
    return x.shape[-1] * 2 if is_fp4(x) else x.shape[-1]


def e2m1_codes(x: Tensor) -> Tensor:
    """Round to nearest, ties to the even code; saturates at 6; -0 becomes +0; NaN becomes the largest number, 6."""
    magnitude = x.abs()
    code = torch.full(x.shape, 7, dtype=torch.uint8, device=x.device)
    # Midpoints between neighbours of the grid; an odd code below a midpoint gives way to the even one above it.
    for n, middle in reversed(tuple(enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)))):
        below = magnitude <= middle if n % 2 == 0 else magnitude < middle
        code = torch.where(below, n, code)
    return torch.where((x < 0) & (code > 0), code | 8, code).to(torch.uint8)


def pack_fp4(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] to int8 pairs [..., K / 2]."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).view(torch.int8)


def values(x: Tensor) -> Tensor:
    """The numbers of an FP8 or FP4 tensor as float32, exact, without scales."""
    if not is_fp4(x):
        return x.to(torch.float32)
    pairs = x.view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).to(torch.int32)
    # By bits, since a table would be copied to the device at every call. Exponents 1 to 3 have bias 1; 1 is one half.
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    bits = torch.where(exponent == 0, mantissa * 0x3F000000, ((exponent + 126) << 23) | (mantissa << 22))
    magnitude = bits.view(torch.float32)
    return torch.where(codes > 7, -magnitude, magnitude)


def owned(x: Tensor) -> Tensor:
    """``x`` itself, unless autograd knows it as a view: what an op returns is a tensor of its own."""
    return x if x._base is None else x.clone()


def check_gran(op: str, name: str, gran: Sequence[Any]) -> tuple[int, int]:
    """The pair of block sizes, each at least 1, as plain numbers."""
    if len(gran) != 2 or any(int(g) < 1 for g in gran):
        raise ValueError(f"{op}: {name} is {list(gran)}; it must be two block sizes of at least 1, such as (1, 128).")
    return int(gran[0]), int(gran[1])


def check_format(op: str, sf_format: str, gran: tuple[int, int], powers_of_two: bool = True) -> None:
    """A format to write: packed words need powers of two and a scale for every row."""
    _check.choice(op, "sf_format", sf_format, FORMATS)
    if sf_format == "fp32":
        return
    if not powers_of_two:
        raise ValueError(f"{op}: sf_format is {sf_format!r}, which holds powers of two only, but ue8m0 is False.")
    if gran[0] != 1:
        raise ValueError(
            f"{op}: sf_format is {sf_format!r}, which has one scale per row, but a scale covers {gran[0]} rows; "
            "it must be 1, or the format 'fp32', which pack_sf packs."
        )


def check_sf(
    op: str, name: str, sf: Tensor, lead: Sequence[Any], mn: Any, k: Any, gran: Sequence[Any], recipe: str
) -> None:
    """``sf`` has a known dtype and the shape that belongs to an operand [*lead, mn, k] with blocks ``gran``.

    ``recipe`` is the name of the argument that ``gran`` comes from.
    """
    gran_mn, gran_k = check_gran(op, recipe, gran)
    _check.dtypes(op, name, sf, SF_DTYPES)
    packed = WORDS.get(sf.dtype)
    rows, columns = ceil_div(mn, gran_mn), ceil_div(k, gran_k)
    if packed:
        if gran_mn != 1:
            raise ValueError(
                f"{op}: {name} has packed scales, {_name(sf.dtype)}, one per row, but {recipe} says {gran_mn} rows per "
                f"scale; it must be 1, or {name} float32."
            )
        columns = ceil_div(columns, packed)
    wanted = (*lead, rows, columns)
    # The ordinary case, before any message is made up. Comparing symbolic sizes like this would add guards.
    if all(type(size) is int for size in (*sf.shape, *wanted)) and tuple(sf.shape) == wanted:
        return
    last = f"ceil(ceil(K / gran_k) / {packed})" if packed else "ceil(K / gran_k)"
    shape = f"[{', '.join((*('G' for _ in lead), 'MN' if packed else 'ceil(MN / gran_mn)', last))}]"
    _check.rank(op, name, sf, shape, len(wanted))
    for dim, size in enumerate(lead):
        _check.size(op, f"size {dim} of {name}", sf.shape[dim], size, "that of its operand")
    source = f"{recipe} = ({gran_mn}, {gran_k}) wants {shape}, which"
    _check.size(op, f"size {len(lead)} of {name}", sf.shape[-2], rows, source)
    _check.size(op, f"size {len(lead) + 1} of {name}", sf.shape[-1], columns, source)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def empty_packed(like: Tensor, lead: Sequence[Any], mn: Any, groups: Any, sf_format: str) -> Tensor:
    """An uninitialised packed tensor for G = ``groups``, with the strides that the module describes."""
    dtype = FORMATS[sf_format]
    pitch = align(mn, 4) if dtype == torch.int32 else mn
    return empty_mn_major(like, lead, mn, ceil_div(groups, WORDS[dtype]), dtype, pitch)


def empty_mn_major(like: Tensor, lead: Sequence[Any], mn: Any, columns: Any, dtype: torch.dtype, pitch: Any) -> Tensor:
    """Uninitialised [*lead, mn, columns] with strides (1, pitch), matrices of a batch without gaps."""
    strides = [1, pitch]
    step = pitch * columns
    for size in reversed(lead):
        strides.insert(0, step)
        step = step * size
    return like.new_empty_strided((*lead, mn, columns), strides, dtype=dtype)


def fill_storage(x: Tensor, value: int) -> None:
    """Write ``value`` to all of the memory of a tensor that owns it, what lies between its columns included."""
    if x.numel():
        torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,)).fill_(value)


def pack(codes: Tensor, sf_format: str) -> Tensor:
    """uint8 codes [..., MN, G] to packed words; what lies between columns in memory is zero."""
    *lead, mn, groups = codes.shape
    out = empty_packed(codes, lead, mn, groups, sf_format)
    per = WORDS[out.dtype]
    filled = torch.nn.functional.pad(codes, (0, -groups % per), value=_ONE)
    fill_storage(out, 0)
    if out.numel():
        out.copy_(filled.clone(memory_format=torch.contiguous_format).view(out.dtype))
    return out


def logical(sf: Tensor, groups: Any) -> Tensor:
    """Scales as float32 [..., rows, groups]: packed ones decoded, float32 ones as they are."""
    if sf.dtype not in WORDS:
        return sf
    # Not contiguous(): where a dimension has size 1 or 0 that keeps strides which view refuses.
    words = sf.clone(memory_format=torch.contiguous_format)
    return decode_ue8m0(words.view(torch.uint8)[..., :groups].contiguous())


def expand(sf: Tensor, mn: int, k: int, gran: Sequence[int]) -> Tensor:
    """One float32 scale per element, [..., mn, k]."""
    scales = logical(sf, ceil_div(k, gran[1]))
    scales = scales.repeat_interleave(gran[0], -2)[..., :mn, :]
    return scales.repeat_interleave(gran[1], -1)[..., :k]


def dequantise(x: Tensor, sf: Tensor, gran: Sequence[int]) -> Tensor:
    """float32 [..., MN, K]: the numbers of an FP8 or FP4 tensor times their scales, one rounding."""
    numbers = values(x)
    return numbers * expand(sf, numbers.shape[-2], numbers.shape[-1], gran)
