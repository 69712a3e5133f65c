"""``paged_kv_write_``: keys into a paged cache, in place, quantised for the format of the cache.

Key i goes to slot ``slot_mapping[i]`` = page * block_kv + row. Slots outside [0, P * block_kv), -1 above all, are
skipped. Slots must be distinct. ``ops/_paged_cache.py`` defines the formats and the one rule of quantisation, so that
every provider writes the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_deep.ops import _check, _paged_cache
from ascend_deep.ops._mqa_samples import paged_write_samples
from ascend_deep.ops._op import OpDef, Tolerance, call
from ascend_deep.ops._present import check_own_places

__all__ = ["PAGED_KV_WRITE", "paged_kv_write_"]


def paged_kv_write_(kv_cache: Tensor, kv: Tensor, slot_mapping: Tensor, *, fmt: str = "plain") -> None:
    """Write keys into a paged cache, in place; see the module.

    Args:
        kv_cache: [P, block_kv, 1, W] in format ``fmt``; changed in place.
        kv: [N, D], floating.
        slot_mapping: [N] i32 or i64, page * block_kv + row, negative: skip.
        fmt: ``"plain"``, ``"fp8"``, ``"fp8_ue8m0"`` or ``"fp4_ue8m0"``. With ``"fp8"`` the pages of ``kv_cache`` are a
            multiple of 4 bytes apart (its ``stride(0)``), because the scales in a page have 4 bytes each.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    call("paged_kv_write_", kv_cache, kv, slot_mapping, fmt=fmt)


def _check_write(kv_cache: Tensor, kv: Tensor, slot_mapping: Tensor, *, fmt: str) -> None:
    op = "paged_kv_write_"
    _check.dtypes(op, "kv", kv, _check.FLOATING)
    _check.rank(op, "kv", kv, "[N, D]", 2)
    _paged_cache.check_cache(op, kv_cache, fmt, kv.shape[1])
    _check.dtypes(op, "slot_mapping", slot_mapping, _check.INDEX)
    _check.rank(op, "slot_mapping", slot_mapping, "[N]", 1)
    _check.size(op, "the size of slot_mapping", slot_mapping.shape[0], kv.shape[0], "the number of keys of kv")
    _check.same_device(op, "kv_cache", kv_cache, kv=kv, slot_mapping=slot_mapping)
    check_own_places(op, "kv_cache", kv_cache)


def _reference_write(kv_cache: Tensor, kv: Tensor, slot_mapping: Tensor, *, fmt: str) -> None:
    pages, block = kv_cache.shape[:2]
    kept = ((slot_mapping >= 0) & (slot_mapping < pages * block)).nonzero().squeeze(1)
    slots, kv = slot_mapping[kept].long(), kv[kept]
    page, row = slots // max(block, 1), slots % max(block, 1)
    if fmt == "plain":
        kv_cache[page, row, 0] = kv.to(kv_cache.dtype)
        return
    width = _paged_cache.storage_width(fmt, kv.shape[1])
    data, scales = _paged_cache.quantise(kv, fmt, kv_cache.shape[3] - width)
    flat = _paged_cache.pages_of(kv_cache)
    flat[:, : block * width].unflatten(1, (block, width))[page, row] = data
    flat[:, block * width :].unflatten(1, (block, -1))[page, row] = scales


def _fake_write(kv_cache: Tensor, kv: Tensor, slot_mapping: Tensor, *, fmt: str) -> None:
    return None


PAGED_KV_WRITE = OpDef(
    name="paged_kv_write_",
    schema="(Tensor(a!) kv_cache, Tensor kv, Tensor slot_mapping, *, str fmt) -> ()",
    check=_check_write,
    reference=_reference_write,
    fake=_fake_write,
    no_backward="a paged cache is for inference; write detached keys.",
    tolerance={
        dtype: Tolerance(0.0, 0.0, "data is copied, or quantised by one rule to the last bit")
        for dtype in (*_check.FLOATING, torch.uint8)
    },
    samples=paged_write_samples,
)
