"""The key cache of the indexer in pages: formats, decoding, quantisation.

A cache is one tensor [P, block_kv, 1, W] of P pages. Its formats (``fmt``) are

    "plain"       f32, bf16, f16 or f64, W = D: key t of a page is its row t
    "fp8"         uint8, W = D + 4: e4m3 data, one f32 scale per key
    "fp8_ue8m0"   uint8, W = D + n: e4m3 data, one UE8M0 byte (2^(byte - 127), 255 is NaN) per 32 elements
    "fp4_ue8m0"   uint8, W = D/2 + n: E2M1 codes, low nibble first, scales as above

In the uint8 formats a page is *planar* whatever its shape says: first block_kv keys of data, then block_kv keys of
scale bytes. n >= D/32; bytes behind the D/32 scales are 127. n = 4 is the layout of DeepGEMM on SM100, n = D/32 that of
DeepGEMM-Ascend. Pages may be further apart than their size: stride(0) is free, the rest of a page must be contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check, _mqa, _sf

__all__ = ["FORMATS", "check_cache", "decode", "pages_of", "quantise", "storage_width"]

FORMATS = ("plain", "fp8", "fp8_ue8m0", "fp4_ue8m0")
GRAN = 32


def storage_width(fmt: str, depth: int) -> int:
    """Data bytes per key (elements for ``"plain"``)."""
    return depth // 2 if fmt == "fp4_ue8m0" else depth


def check_cache(op: str, cache: Tensor, fmt: str, depth: Any) -> None:
    """The cache has the shape, dtype and strides of ``fmt`` for keys of ``depth`` elements."""
    _check.choice(op, "fmt", fmt, FORMATS)
    _check.rank(op, "kv_cache", cache, "[P, block_kv, 1, W]", 4)
    _check.size(op, "size 2 of kv_cache", cache.shape[2], 1, "the number of key heads of an indexer")
    block = cache.shape[1]
    torch._check_value(block >= 1, lambda: f"{op}: pages of kv_cache hold {block} keys; it must be at least 1.")
    width = cache.shape[3]
    if fmt == "plain":
        _check.dtypes(op, "kv_cache", cache, _check.FLOATING)
        _check.size(op, "the last size of kv_cache", width, depth, "D")
        return
    _check.dtypes(op, "kv_cache", cache, (torch.uint8,))
    if fmt == "fp8":
        _check.size(op, "the last size of kv_cache", width, depth + 4, "D + 4 (e4m3 data and an f32 scale)")
        torch._check_value(
            cache.stride(0) % 4 == 0,
            lambda: (
                f"{op}: pages of kv_cache are {cache.stride(0)} bytes apart; fp8 needs a multiple of 4, because the "
                "scales in a page have 4 bytes each."
            ),
        )
    else:
        torch._check_value(depth % GRAN == 0, lambda: f"{op}: D is {depth}; format {fmt} needs a multiple of {GRAN}.")
        needed = (depth // 2 if fmt == "fp4_ue8m0" else depth) + depth // GRAN
        torch._check_value(
            width >= needed,
            lambda: f"{op}: the last size of kv_cache is {width}; {fmt} needs at least {needed} for D = {depth}.",
        )
    inner = cache.stride(1) == width and cache.stride(3) == 1
    torch._check_value(inner, lambda: f"{op}: the pages of kv_cache are not contiguous inside.")


def pages_of(cache: Tensor) -> Tensor:
    """[P, block_kv * W] view of a cache in a uint8 format."""
    return cache.view(cache.shape[0], cache.shape[1] * cache.shape[3])


def decode(pages: Tensor, fmt: str, depth: int) -> Tensor:
    """Pages [N, block_kv, 1, W] to keys [N, block_kv, D], f32 (f64 for a plain f64 cache)."""
    count, block = pages.shape[0], pages.shape[1]
    if fmt == "plain":
        return pages.squeeze(2).to(_check.compute_dtype(pages.dtype))
    flat = pages.reshape(count, block * pages.shape[3])
    width = storage_width(fmt, depth)
    data = flat[:, : block * width].reshape(count, block, width)
    scales = flat[:, block * width :].reshape(count, block, -1).contiguous()
    if fmt == "fp8":
        return _mqa.dequantise(data.view(_mqa.FP8), scales.view(torch.float32))
    sf = _sf.decode_ue8m0(scales[:, :, : depth // GRAN])
    return _mqa.dequantise(data if fmt == "fp4_ue8m0" else data.view(_mqa.FP8), sf)


def quantise(kv: Tensor, fmt: str, scale_bytes: int) -> tuple[Tensor, Tensor]:
    """Keys [N, D] to data bytes [N, width] and scale bytes [N, scale_bytes] of a uint8 format.

    s = max(amax, 1e-4) / 448 (6 for FP4), rounded up to a power of two for UE8M0; data = round(x (1 / s)), saturating.
    """
    x = kv.float()
    count, depth = x.shape
    largest = 6.0 if fmt == "fp4_ue8m0" else 448.0
    gran = depth if fmt == "fp8" else GRAN
    grouped = x.unflatten(1, (-1, gran))
    amax = grouped.abs().amax(-1).clamp(min=1e-4)
    scale = amax / amax.new_full((), largest)  # not by a number: see ops/_quant.py
    if fmt == "fp8":
        scales = scale.contiguous().view(torch.uint8)
    else:
        bits = scale.view(torch.int32)
        exponent = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0)
        exponent = exponent.clamp(1, 254)
        scale = (exponent << 23).view(torch.float32)
        scales = torch.full((count, scale_bytes), 127, dtype=torch.uint8, device=x.device)
        scales[:, : depth // GRAN] = exponent.to(torch.uint8)
    values = (grouped * (1.0 / scale).unsqueeze(-1)).flatten(1)
    if fmt == "fp4_ue8m0":
        codes = _sf.e2m1_codes(values)
        return codes[:, 0::2] | (codes[:, 1::2] << 4), scales
    return values.clamp(-448.0, 448.0).to(_mqa.FP8).view(torch.uint8), scales
