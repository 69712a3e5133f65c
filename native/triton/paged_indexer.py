"""Launches of the indexer over a paged key cache: ``paged_mqa_logits`` and ``paged_mqa_topk`` on CUDA through Triton.

Arguments are those of the ops; ``paged_limits`` are checked before a call gets here. The metadata of other providers is
not looked at: work is shared out by a grid over queries and pieces of the longest context.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ascend_deep.native.triton.indexer import Values, cut, topk_of_blocks
from ascend_deep.native.triton.launch import Rows, key_of, launch, on_device, repeat
from ascend_deep.native.triton.paged import paged_kernel
from ascend_deep.native.triton.plan import Tile, paged_tile_for, power_of_two

__all__ = ["launch_paged", "paged_mqa_logits", "paged_mqa_topk"]


def _rows(kv_cache: Tensor, depth: int, planar: bool, tile: Tile) -> Rows | None:
    """The cache in rows of keys for the copy engine; ``None`` where tiles are not parts of pages, or not aligned."""
    pages, page = kv_cache.shape[:2]
    size = kv_cache.element_size()
    apart = kv_cache.stride(0)
    aligned = depth * size % 16 == 0 and apart % depth == 0 and kv_cache.data_ptr() % 16 == 0
    dense = planar or kv_cache.stride(1) == depth
    rows = apart // depth * (pages - 1) + page
    if page % tile.keys or not aligned or not dense or depth != power_of_two(depth, 32) or rows >= 2**31:
        return None
    base = kv_cache.view(torch.float8_e4m3fn) if planar else kv_cache
    return Rows(base, rows, depth, depth, (tile.keys, depth))


def launch_paged(
    q: Tensor,
    q_sf: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    indices: Tensor | None,
    out: Tensor,
    *,
    scale: float,
    fmt: str,
    clean: bool = True,
    tile: Tile | None = None,
) -> None:
    """Writes the scores into ``out`` [Q, next_n, columns], contiguous in the last dimension; int32 ``out`` is the
    workspace of the selection (see the kernel). ``tile`` overrides the plan (for measurements)."""
    queries, next_n, heads, depth = q.shape
    columns = out.shape[2]
    if out.numel() == 0:
        return
    bits = out.dtype == torch.int32
    if kv_cache.numel() == 0 or block_table.numel() == 0:
        out.fill_(-1 if bits else -torch.inf)
        return
    planar = fmt == "fp8"
    tile = tile or paged_tile_for(q.element_size(), depth, kv_cache.shape[1])
    keys = _rows(kv_cache, depth, planar, tile)
    tensors = (
        q,
        q_sf,
        kv_cache,
        None if keys is None else kv_cache,
        weights,
        context_lens,
        block_table,
        indices,
        out,
    )
    key = key_of(tensors, "paged", scale, fmt, clean, tile)
    if repeat(key, tensors):
        return
    if q.stride(3) != 1:
        q = q.contiguous()
    block_h = power_of_two(heads)
    tokens = max(min(max(tile.columns // block_h, 1), power_of_two(next_n)), 16 // block_h)
    groups = triton.cdiv(next_n, tokens)
    pieces = max(min(tile.programs // (queries * groups), triton.cdiv(columns, 8 * tile.keys)), 1)
    chunk = triton.cdiv(triton.cdiv(columns, pieces), tile.keys) * tile.keys
    args = (
        q,
        None if q_sf is None else q_sf[..., 0],
        kv_cache,
        keys,
        weights,
        context_lens,
        block_table,
        indices,
        out,
        float(scale),
        next_n,
        kv_cache.shape[0],
        kv_cache.shape[1],
        *block_table.shape,
        columns,
        chunk,
        *q.stride()[:3],
        *((0, 0, 0) if q_sf is None else q_sf.stride()[:3]),
        kv_cache.stride(0),
        depth if planar else kv_cache.stride(1),
        kv_cache.stride(0) // depth,
        *weights.stride(),
        *context_lens.stride(),
        *block_table.stride(),
        0 if indices is None else indices.stride(0),
        *out.stride()[:2],
    )
    options = {
        "H": heads,
        "D": depth,
        "TOKENS": tokens,
        "BLOCK_H": block_h,
        "BLOCK_D": power_of_two(depth, 32),
        "BLOCK_T": tile.keys,
        "NEGATIVE": scale < 0,
        "HAS_QSF": q_sf is not None,
        "HAS_INDICES": indices is not None,
        "PLANAR": planar,
        "WHOLE": keys is not None,
        "CLEAN": clean and not bits,
        "BITS": bits,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "ieee",
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }
    launch(paged_kernel, (queries, triton.cdiv(columns, chunk), groups), args, options, (key, tensors))


def paged_mqa_logits(
    q: Tensor,
    q_sf: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    indices: Tensor | None,
    *,
    max_context_len: int,
    scale: float,
    clean: bool,
    out_dtype: torch.dtype | None,
    fmt: str,
) -> Tensor:
    """The op ``paged_mqa_logits`` (its docstring has the contract)."""
    out = q.new_empty((q.shape[0], q.shape[1], max_context_len), dtype=out_dtype or torch.float32)
    with on_device(q):
        launch_paged(
            q, q_sf, kv_cache, weights, context_lens, block_table, indices, out, scale=scale, fmt=fmt, clean=clean
        )
    return out


def paged_mqa_topk(
    q: Tensor,
    q_sf: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    indices: Tensor | None,
    *,
    max_context_len: int,
    scale: float,
    fmt: str,
    **attributes: Any,
) -> tuple[Tensor, Tensor]:
    """The op ``paged_mqa_topk`` (its docstring has the contract). A context is a range that ends at its length."""

    def fill(b: slice, s: slice) -> Values:
        part = cut(q, b, s)
        whole = b.stop - b.start >= q.shape[0]
        rows = block_table if whole or indices is not None else block_table[b]
        names = indices if whole or indices is None else indices[b]
        work = torch.empty(part.shape[0], part.shape[1], max_context_len, dtype=torch.int32, device=q.device)
        launch_paged(
            part,
            cut(q_sf, b, s),
            kv_cache,
            cut(weights, b, s),
            cut(context_lens, b, s),
            rows,
            names,
            work,
            scale=scale,
            fmt=fmt,
        )
        return Values(work, masked=True)

    with on_device(q):
        return topk_of_blocks(fill, q, max_context_len, None, context_lens, outside="pad", **attributes)
