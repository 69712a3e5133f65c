"""Formats that the vendor names by numbers, and E8M0 scales as bytes.

The vendor's MX ops take scales as uint8 [..., MN, ceil(K / 64), 2]: the codes of two neighbouring blocks of 32 lie next
to each other, and a missing one is padding. Packed scales of our ops hold the same bytes in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["E8M0", "FP4_PAIRS", "FP8", "NUMBER", "dtype_of", "is_fp4", "last_size", "mx_pairs", "packed", "scales_of"]

E8M0, FP8, FP4_PAIRS = 293, 292, 296
"""``torch_npu.float8_e8m0fnu``, ``.float8_e4m3fn`` and ``.float4_e2m1fn_x2``; ``tests/npu/wheel`` compares them."""

NUMBER: Mapping[torch.dtype, int] = {
    torch.int8: 1,
    torch.int32: 3,
    torch.float16: 5,
    torch.float32: 6,
    torch.bfloat16: 15,
}
"""What the vendor's ``output_dtype`` calls a dtype."""

_WORDS = {torch.int32: 4, torch.int16: 2}
_FORMATS = {"ue8m0x4": torch.int32, "ue8m0x2": torch.int16}
_ONE = 127  # the code of 1.0; our packed words hold it behind the last group


def dtype_of(number: int | None) -> torch.dtype | None:
    """The dtype that ``output_dtype`` names; ``None`` for a number that we do not use."""
    return next((dtype for dtype, n in NUMBER.items() if n == number), None)


def is_fp4(x: Any) -> bool:
    """True if ``x`` holds pairs of FP4 codes, as our ops have them."""
    return x.dtype.itemsize == 1 and x.dtype != torch.float8_e4m3fn


def last_size(x: Any) -> Any:
    """Number of elements along the last dimension; FP4 has two per byte."""
    return x.shape[-1] * 2 if is_fp4(x) else x.shape[-1]


def mx_pairs(sf: Tensor, groups: Any) -> Tensor:
    """Packed scales [..., MN, words] of ``groups`` blocks as uint8 [..., MN, ceil(groups / 2), 2], contiguous."""
    # Not contiguous(): where a dimension has size 1 it keeps strides that view refuses.
    codes = sf.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    pairs = (groups + 1) // 2
    return codes[..., : 2 * pairs].reshape(*sf.shape[:-1], pairs, 2)


def scales_of(pairs: Tensor, groups: Any) -> Tensor:
    """uint8 [..., MN, P, 2] as float32 [..., MN, groups]; codes 1 to 254, the ones that finite numbers give."""
    codes = pairs.flatten(-2)[..., :groups].to(torch.int32)
    return (codes * (1 << 23)).view(torch.float32).contiguous()


def packed(pairs: Tensor, groups: Any, sf_format: str) -> Tensor:
    """uint8 [..., MN, P, 2] as the packed words that our ops return: [..., MN, W], the rows next to each other.

    Written without a change in place, so that it can be traced.
    """
    dtype = _FORMATS[sf_format]
    per = _WORDS[dtype]
    codes = pairs.flatten(-2)[..., :groups]
    words = torch.nn.functional.pad(codes, (0, -groups % per), value=_ONE).contiguous().view(dtype)
    rows = words.shape[-2]
    columns = words.mT.contiguous()
    if per == 4:  # rows start at multiples of four words, and what lies between is zero
        columns = torch.nn.functional.pad(columns, (0, -rows % 4))[..., :rows]
    return columns.mT
