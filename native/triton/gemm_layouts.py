"""Small kernels around grouped products: layouts as libraries want them, and zeros in padding rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_deep.native.triton.launch import key_of, launch, repeat
from ascend_deep.native.triton.plan import power_of_two

__all__ = ["block_labels", "blocks_of", "clear_padding", "ends"]

_LABELS, _PSUM, _MASKED = range(3)
_KINDS = {"labels": _LABELS, "psum": _PSUM, "masked": _MASKED}


@triton.jit
def ends_kernel(psum, out, groups, rows, alignment, GP: tl.constexpr):
    g = tl.arange(0, GP)
    end = tl.load(psum + g, mask=g < groups, other=0)
    before = tl.load(psum + tl.maximum(g - 1, 0), mask=(g > 0) & (g < groups), other=0)
    end = tl.minimum(tl.maximum(end, 0), rows).to(tl.int32)
    before = tl.minimum(tl.maximum(before, 0), rows).to(tl.int32)
    start = tl.minimum((before + alignment - 1) // alignment * alignment, rows)
    tl.store(out + g, tl.maximum(end, start), mask=g < groups)


@triton.jit
def labels_kernel(labels, out, rows, groups, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + m, mask=m < rows, other=-1).to(tl.int32)
    label = tl.where((label >= 0) & (label < groups), label, -1)
    block = tl.zeros((BLOCK,), tl.int32) + tl.max(label, 0)
    tl.store(out + m, block)


@triton.jit
def blocks_kernel(psum, out, rows, groups, alignment, GP: tl.constexpr, BLOCK: tl.constexpr):
    """Group and end of its rows of the BLOCK rows from ``BLOCK * program_id`` on; -1 and 0 if no group has some."""
    first = tl.program_id(0) * BLOCK
    g = tl.arange(0, GP)
    end = tl.load(psum + g, mask=g < groups, other=0)
    end = tl.minimum(tl.maximum(end, 0), rows).to(tl.int32)
    before = tl.load(psum + tl.maximum(g - 1, 0), mask=(g > 0) & (g < groups), other=0)
    before = tl.minimum(tl.maximum(before, 0), rows).to(tl.int32)
    start = (before + alignment - 1) // alignment * alignment
    mine = (g < groups) & (start <= first) & (first < end)
    group = tl.max(tl.where(mine, g, -1), 0)
    tl.store(out + 2 * tl.program_id(0), group)
    tl.store(out + 2 * tl.program_id(0) + 1, tl.max(tl.where(mine & (g == group), end, 0), 0))


@triton.jit
def padding_kernel(
    out,
    layout,
    rows,
    columns,
    groups,
    alignment,
    KIND: tl.constexpr,
    GP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Zeros in the rows of ``out`` [rows, columns] (masked: of each of ``groups``) that belong to no group."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = m < rows
    base = tl.program_id(1).to(tl.int64) * rows
    if KIND == 0:
        label = tl.load(layout + m, mask=inside, other=0)
        used = (label >= 0) & (label < groups)
    elif KIND == 1:
        g = tl.arange(0, GP)
        end = tl.load(layout + g, mask=g < groups, other=0)
        before = tl.load(layout + tl.maximum(g - 1, 0), mask=(g > 0) & (g < groups), other=0)
        start = (tl.maximum(before, 0) + alignment - 1) // alignment * alignment
        start = tl.where(g < groups, start, rows)
        of_row = (m[:, None] >= start[None, :]) & (m[:, None] < end[None, :])
        used = tl.max(of_row.to(tl.int32), 1) > 0
    else:
        used = m < tl.load(layout + tl.program_id(1))
    padding = inside & (used == 0)
    if tl.max(padding.to(tl.int32), 0) == 0:
        return
    at = out + (base + m) * columns
    nothing = tl.zeros((BM, BN), out.dtype.element_ty)
    for n0 in range(0, columns, BN):
        n = n0 + tl.arange(0, BN)
        tl.store(at[:, None] + n[None, :], nothing, mask=padding[:, None] & (n < columns)[None, :])


def ends(psum: Tensor, rows: int, alignment: int) -> Tensor:
    """int32 [G]: the end of each group, not below its start and not above ``rows``."""
    psum = psum.contiguous()
    out = torch.empty(psum.shape, dtype=torch.int32, device=psum.device)
    key = key_of((psum, out), "ends", rows, alignment)
    if not repeat(key, (psum, out)):
        groups = psum.shape[0]
        options = {"GP": power_of_two(groups), "num_warps": 1}
        launch(ends_kernel, (1, 1, 1), (psum, out, groups, rows, alignment), options, (key, (psum, out)))
    return out


def blocks_of(psum: Tensor, rows: int, alignment: int, block: int) -> Tensor:
    """int32 [ceil(rows / block), 2]: group and end of its rows for each ``block`` rows; -1 and 0 where there are none.

    ``alignment`` is a multiple of ``block``.
    """
    psum = psum.contiguous()
    count = -(-rows // block)
    out = torch.empty((count, 2), dtype=torch.int32, device=psum.device)
    groups = psum.shape[0]
    options = {"GP": power_of_two(groups), "BLOCK": block, "num_warps": 1}
    launch(blocks_kernel, (count, 1, 1), (psum, out, rows, groups, alignment), options)
    return out


def block_labels(labels: Tensor, groups: int, block: int) -> Tensor:
    """int32 [M]: for all rows of a block of ``block`` (a power of two) the group of those that have one, or -1.

    Behind the result lies more of the kind: the library looks at the block beside the last one.
    """
    rows = labels.shape[0]
    blocks = 2 * -(-rows // (2 * block))
    out = torch.empty((blocks * block,), dtype=torch.int32, device=labels.device)
    options = {"BLOCK": block, "num_warps": 1}
    launch(labels_kernel, (blocks, 1, 1), (labels.contiguous(), out, rows, groups), options)
    return out[:rows]


def clear_padding(out: Tensor, layout: Tensor, grouping: str, alignment: int, groups: int) -> None:
    """Zeros in the rows of contiguous ``out`` [M, N], or [G, M, N] if ``masked``, that belong to no group."""
    layout = layout.contiguous()
    key = key_of((out, layout), grouping, alignment, groups)
    if repeat(key, (out, layout)):
        return
    rows, columns = out.shape[-2:]
    options = {
        "KIND": _KINDS[grouping],
        "GP": power_of_two(groups) if grouping == "psum" else 1,
        "BM": 64,
        "BN": 128,
        "num_warps": 4,
    }
    grid = (-(-rows // 64), groups if grouping == "masked" else 1, 1)
    launch(padding_kernel, grid, (out, layout, rows, columns, groups, alignment), options, (key, (out, layout)))
