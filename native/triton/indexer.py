"""Launches of the indexer kernels: ``mqa_logits`` and ``mqa_topk`` on CUDA through Triton.

Arguments are those of the ops; ``provider`` checks the limits before a call gets here. ``mqa_topk`` computes the scores
of a block of queries into a workspace of at most ``WORKSPACE_BYTES`` and selects from it, so its memory does not grow
with the number of queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl

from ascend_deep.native.logits_rows import empty_scores
from ascend_deep.native.triton.launch import Rows, key_of, launch, on_device, repeat
from ascend_deep.native.triton.mqa_logits import logits_kernel
from ascend_deep.native.triton.plan import (
    MAX_BLOCK,
    Block,
    Long,
    Tile,
    block_for,
    long_for,
    power_of_two,
    tile_for,
)
from ascend_deep.native.triton.select import select_kernel
from ascend_deep.native.triton.select_long import mark_kernel, pick_kernel, sample_kernel

__all__ = [
    "RANK_LAST_KEY",
    "WORKSPACE_BYTES",
    "Values",
    "cut",
    "launch_logits",
    "mqa_logits",
    "mqa_topk",
    "select_rows",
    "topk_of_blocks",
]

WORKSPACE_BYTES = 256 << 20
RANK_LAST_KEY = 0x007FFFFF  # the key of -inf


def _pitch(t: Tensor | None, dims: int, broadcast: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Strides of the first ``dims`` dimensions, 0 for those of size 1 that broadcast, zeros for ``None``."""
    if t is None:
        return (0,) * dims
    return tuple(0 if d in broadcast and t.shape[d] == 1 else t.stride(d) for d in range(dims))


def _flat_keys(kv: Tensor) -> Tensor:
    """kv [B, T, D] as [B * T, D] that the copy engine can read: base and rows on 16 bytes. Copies if it has to."""
    flat = kv.reshape(-1, kv.shape[2])
    unit = 16 // kv.element_size()
    if flat.stride(1) != 1 or flat.stride(0) % unit or flat.data_ptr() % 16:
        flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % unit)).contiguous()
        if flat.data_ptr() % 16:
            flat = flat.clone()
    return flat


def launch_logits(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    *,
    scale: float,
    compressed: bool = False,
    clean: bool = True,
    tile: Tile | None = None,
) -> None:
    """Writes the scores into ``out`` [B, S, columns]; int32 ``out`` is the workspace of the selection (see the kernel).

    ``out`` must be contiguous in its last dimension. ``tile`` overrides the plan (for measurements).
    """
    batch, queries, heads, depth = q.shape
    keys = kv.shape[1]
    if out.numel() == 0:
        return
    if keys == 0:
        out.fill_(-torch.inf)
        return
    tensors = (q, q_sf, kv, kv_sf, weights, ks, ke, mask, out)
    key = key_of(tensors, "logits", scale, compressed, clean, tile)
    if repeat(key, tensors):
        return
    if q.stride(3) != 1:
        q = q.contiguous()
    tile = tile or tile_for(q.element_size(), depth)
    block_h = power_of_two(heads)
    per_tile = min(max(tile.columns // block_h, 1), power_of_two(queries))
    per_tile = max(per_tile, 16 // block_h)  # the smallest tile of the tensor cores
    block_d = power_of_two(depth, 32)
    flat = _flat_keys(kv)
    blocks = triton.cdiv(queries, per_tile)
    span = max(keys, out.shape[2]) if compressed else keys
    pieces = max(min(tile.programs // max(blocks * batch, 1), triton.cdiv(span, 8 * tile.keys)), 1)
    chunk = triton.cdiv(triton.cdiv(span, pieces), tile.keys) * tile.keys
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    q_sf_2 = None if q_sf is None else q_sf[..., 0]
    kv_sf_2 = None if kv_sf is None else kv_sf[..., 0].contiguous()
    bits = out.dtype == torch.int32
    args = (
        q,
        q_sf_2,
        Rows(flat, flat.shape[0], flat.shape[1], flat.stride(0), (tile.keys, block_d)),
        kv_sf_2,
        weights,
        ks,
        ke,
        mask.view(torch.uint8) if mask is not None and kind == 1 else mask,
        out,
        float(scale),
        queries,
        keys,
        out.shape[2],
        chunk,
        *_pitch(q, 3),
        *_pitch(q_sf_2, 3),
        *_pitch(kv_sf_2, 1),
        *_pitch(weights, 3),
        *_pitch(ks, 2, (0,)),
        *_pitch(ke, 2, (0,)),
        *_pitch(mask, 3, (0, 1)),
        *_pitch(out, 2),
    )
    options = {
        "H": heads,
        "D": depth,
        "QUERIES": per_tile,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "BLOCK_T": tile.keys,
        "NEGATIVE": scale < 0,
        "HAS_QSF": q_sf is not None,
        "HAS_KVSF": kv_sf is not None,
        "HAS_KS": ks is not None,
        "HAS_KE": ke is not None,
        "MASK": kind,
        "COMPRESSED": compressed,
        "CLEAN": clean and not bits,
        "BITS": bits,
        "EVEN": ks is None and ke is None and not compressed and keys % chunk == 0,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "ieee",
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }
    launch(logits_kernel, (blocks, triton.cdiv(span, chunk), batch), args, options, (key, tensors))


def mqa_logits(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    scale: float,
    max_seqlen_k: int,
    clean: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """The op ``mqa_logits`` (its docstring has the contract)."""
    out = empty_scores(q, kv, max_seqlen_k, out_dtype)
    with on_device(q):
        launch_logits(
            q, q_sf, kv, kv_sf, weights, ks, ke, mask, out, scale=scale, compressed=max_seqlen_k > 0, clean=clean
        )
    return out


@dataclass(frozen=True)
class Values:
    """Scores of some rows: int32 [B, S, T], the bits of f32; -1 where a mask excludes, if ``masked``. T contiguous."""

    data: Tensor
    masked: bool


def select_rows(
    values: Values,
    ks: Tensor | None,
    ke: Tensor | None,
    scores: Tensor | None,
    idx: Tensor,
    *,
    rank_last: bool,
    plan: Block | Long | None = None,
) -> None:
    """The ``idx.shape[2]`` largest of each row of ``values`` into ``scores`` and ``idx``, in order of index.

    Args:
        ks, ke: [B or 1, S] bounds; what ``values`` holds outside them is not read.
        scores: f32 [B, S, topk] or ``None``.
        idx: i64 or i32 [B, S, topk].
        rank_last: keys outside the bounds count as -inf; otherwise they are never chosen.
        plan: overrides the launch (for measurements).
    """
    batch, rows, columns = values.data.shape
    topk = idx.shape[2]
    if idx.numel() == 0:
        return
    # An unused pointer has to be one all the same.
    out = (idx if scores is None else scores, idx)
    given = (values.data, ks, ke)
    key = key_of((*given, *out), "select", values.masked, scores is None, rank_last, plan)
    if plan is None:
        plan = block_for(columns) if columns <= MAX_BLOCK else long_for(columns, topk)
    options = {
        "HAS_KS": ks is not None,
        "HAS_KE": ke is not None,
        "MASKED": values.masked,
        "BARRED": RANK_LAST_KEY if rank_last else 0,
    }
    pitches = (*_pitch(values.data, 2), *_pitch(ks, 2, (0,)), *_pitch(ke, 2, (0,)))
    programs = batch * rows
    wanted = {"SCORES": scores is not None}
    if isinstance(plan, Block):
        tensors = (*given, *out)
        if not repeat(key, tensors):
            args: tuple[Any, ...] = (*tensors, columns, topk, rows, *pitches, *_pitch(scores, 2), *_pitch(idx, 2))
            constants = {**_layouts(plan), **options, **wanted, "EVEN": columns == plan.keys}
            launch(select_kernel, (programs, 1, 1), args, constants, (key, tensors))
        return
    parts = triton.cdiv(columns, plan.mark.keys)
    words = parts * plan.mark.keys // 32
    bounds = torch.empty(programs, dtype=torch.int32, device=idx.device)
    marks = torch.empty(programs, words, dtype=torch.int32, device=idx.device)
    names = torch.empty(programs, plan.pick.keys, dtype=torch.int32, device=idx.device)
    sampled, marked = (*given, bounds), (*given, bounds, marks)
    picked = (*marked, names, *out)
    if repeat((*key, 1), sampled) and repeat((*key, 2), marked) and repeat((*key, 3), picked):
        return
    launch(
        sample_kernel,
        (programs, 1, 1),
        (*sampled, columns, topk, rows, *pitches),
        {**_sample_options(plan.sample, plan.pick.keys), **options},
        ((*key, 1), sampled),
    )
    launch(
        mark_kernel,
        (programs, parts, 1),
        (*marked, columns, rows, *pitches, words),
        {**_mark_options(plan.mark), **options, "EVEN": columns % plan.mark.keys == 0},
        ((*key, 2), marked),
    )
    launch(
        pick_kernel,
        (programs, 1, 1),
        (*picked, columns, topk, rows, words, *pitches, words, *_pitch(scores, 2), *_pitch(idx, 2)),
        {**_pick_options(plan.pick, min(power_of_two(words), 2048)), **options, **wanted},
        ((*key, 3), picked),
    )


@functools.cache
def _layouts(block: Block) -> dict[str, Any]:
    """Launch options of a block: neighbouring keys in a thread to compute with, one key per lane to write."""
    each = max(block.keys // (32 * block.warps), 1)
    return {
        "BLOCK": block.keys,
        "HELD": gl.BlockedLayout([min(each, 16)], [32], [block.warps], [0]),
        "SPREAD": gl.BlockedLayout([1], [32], [block.warps], [0]),
        "num_warps": block.warps,
        "maxnreg": block.registers or None,
    }


@functools.cache
def _mark_options(block: Block) -> dict[str, Any]:
    """Four neighbouring keys in a thread, 32 in eight of them: loads of a warp are side by side."""
    tile = gl.BlockedLayout([1, 4], [4, 8], [block.warps, 1], [1, 0])
    return {"WORDS": block.keys // 32, "TILE": tile, "num_warps": block.warps, "launch_pdl": True}


@functools.cache
def _pick_options(block: Block, words: int) -> dict[str, Any]:
    """``words`` of marks at a time."""
    each = max(words // (32 * block.warps), 1)
    sparse = gl.BlockedLayout([each], [32], [block.warps], [0])
    return {**_layouts(block), "WORDS": words, "SPARSE": sparse, "launch_pdl": True}


@functools.cache
def _sample_options(block: Block, capacity: int) -> dict[str, Any]:
    pairs = gl.BlockedLayout([2], [32], [block.warps], [0])
    return {"SAMPLE": block.keys, "CAPACITY": capacity, "PAIRS": pairs, "num_warps": block.warps, "launch_pdl": True}


def topk_of_blocks(
    fill: Callable[[slice, slice], Values],
    q: Tensor,
    keys: int,
    ks: Tensor | None,
    ke: Tensor | None,
    *,
    topk: int,
    outside: str,
    sorted: bool,
    return_scores: bool,
    index_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """``mqa_topk`` from the scores that ``fill(batch rows, queries)`` returns, block by block."""
    batch, queries = q.shape[0], q.shape[1]
    wanted = return_scores or sorted
    scores = torch.empty(batch, queries, topk, dtype=torch.float32, device=q.device) if wanted else None
    idx = torch.empty(batch, queries, topk, dtype=index_dtype or torch.int64, device=q.device)
    rank_last = outside == "rank_last"
    if topk and queries and batch:
        limit = max(WORKSPACE_BYTES // (4 * max(keys, 1)), 1)
        step_b = max(limit // queries, 1)
        # An even split: the last block should not be a small one.
        step_s = queries if limit >= queries else triton.cdiv(queries, triton.cdiv(queries, limit))
        for b in range(0, batch, step_b):
            for s in range(0, queries, step_s):
                at = (slice(b, b + step_b), slice(s, s + step_s))
                select_rows(
                    fill(*at),
                    _part(ks, *at),
                    _part(ke, *at),
                    cut(scores, *at),
                    cut(idx, *at),
                    rank_last=rank_last,
                )
    if sorted and scores is not None:
        scores, idx = _by_score(scores, idx)
    return scores if scores is not None and return_scores else torch.empty(0, device=q.device), idx


def cut(t: Any, b: slice, s: slice) -> Any:
    """``t[b, s]`` of a tensor or ``None``; ``t`` itself where that is all of it."""
    if t is None or (b.start == s.start == 0 and b.stop >= t.shape[0] and s.stop >= t.shape[1]):
        return t
    return t[b, s]


def _part(t: Tensor | None, b: slice, s: slice, wide: int = 1) -> Tensor | None:
    """Block of a [B, S, …] tensor in which size 1 broadcasts (in B always, in S if ``wide`` is 2)."""
    if t is None:
        return None
    if t.shape[0] > b.stop - b.start:
        t = t[b]
    return t if s.stop - s.start >= t.shape[1] or (wide == 2 and t.shape[1] == 1) else t[:, s]


def _by_score(scores: Tensor, idx: Tensor) -> tuple[Tensor, Tensor]:
    """Descending score, ties by ascending index (the order they are in), padding last."""
    bits = (scores + 0.0).view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = torch.where(scores.isnan(), -(2**31) + 1, key)
    key = torch.where(idx < 0, -(2**31), key)
    order = key.argsort(dim=-1, descending=True, stable=True)
    return scores.gather(-1, order), idx.gather(-1, order)


def mqa_topk(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    scale: float,
    **attributes: Any,
) -> tuple[Tensor, Tensor]:
    """The op ``mqa_topk`` (its docstring has the contract)."""
    keys = kv.shape[1]

    def fill(b: slice, s: slice) -> Values:
        part = cut(q, b, s)
        whole = b.stop - b.start >= kv.shape[0]
        work = torch.empty(part.shape[0], part.shape[1], keys, dtype=torch.int32, device=q.device)
        launch_logits(
            part,
            cut(q_sf, b, s),
            kv if whole else kv[b],
            kv_sf if whole or kv_sf is None else kv_sf[b],
            cut(weights, b, s),
            _part(ks, b, s),
            _part(ke, b, s),
            _part(mask, b, s, wide=2),
            work,
            scale=scale,
        )
        return Values(work, masked=mask is not None)

    with on_device(q):
        return topk_of_blocks(fill, q, keys, ks, ke, **attributes)
