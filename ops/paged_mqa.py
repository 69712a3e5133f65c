"""The indexer on a paged key cache: ``paged_mqa_logits`` and its metadata.

    logits[q,n,t] = sum over h of weights[q,n,h] * relu(scale * (q[q,n,h,:] . key(r, t)))     t < context_lens[q,n]
    key(r, t)     = row t % block_kv of page block_table[r, t // block_kv],   r = indices[q], or q

``ops/_paged_cache.py`` defines the cache formats. Each query carries ``next_n`` tokens (speculative decoding), each
with a context length of its own. Rules:

* Lengths below 0 count as 0, lengths above ``max_context_len`` as that. The last page need not be full.
* Pages behind a context are not read, whatever ids stand there. A page id outside [0, P), or a column that
  ``block_table`` does not have, makes its keys absent: -inf, without a memory access.
* With ``clean`` everything behind a context is -inf; without it, it is unspecified.
* The metadata is what the provider that made it needs to share out its work; pass it to the logits of the same device,
  or pass ``None``. It never changes the result. Ours: row c is (query, page) where core c starts, and the last row is
  (Q, 0); pages are counted over the longest context of each query and split evenly.

Contract: DeepGEMM ``fp8_fp4_paged_mqa_logits`` and ``get_paged_mqa_logits_metadata``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check, _mqa, _paged_cache
from ascend_deep.ops._mqa_samples import paged_metadata_samples, paged_samples
from ascend_deep.ops._op import OpDef, Tolerance, call
from ascend_deep.ops.mqa_logits import REASON

__all__ = [
    "PAGED_MQA_LOGITS",
    "PAGED_MQA_LOGITS_METADATA",
    "check_paged",
    "paged_mqa_logits",
    "paged_mqa_logits_metadata",
    "paged_scores",
]


def paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None = None,
    indices: Tensor | None = None,
    *,
    max_context_len: int,
    q_sf: Tensor | None = None,
    scale: float = 1.0,
    clean: bool = True,
    out_dtype: torch.dtype | None = None,
    fmt: str = "plain",
) -> Tensor:
    """Indexer scores over a paged cache.

    Args:
        q: [Q, next_n, H, D], any operand format of ``ops/_mqa.py``; in the dtype of a plain cache unless quantised.
        kv_cache: [P, block_kv, 1, W] in format ``fmt``.
        weights: [Q, next_n, H], f32, bf16 or f16 (f64 with f64 operands).
        context_lens: [Q, next_n], i32 or i64.
        block_table: [R, columns], i32 or i64, page ids; R = Q without ``indices``.
        schedule_meta: from ``paged_mqa_logits_metadata``, or ``None``.
        indices: [Q] i32 or i64, the row of ``block_table`` of each query; rows outside [0, R) have no keys.
        max_context_len: columns of the result.
        q_sf: [Q, next_n, H, G] f32, scales of an fp8 or fp4 ``q``.
        scale, clean, out_dtype: as for ``mqa_logits``.
        fmt: ``"plain"``, ``"fp8"``, ``"fp8_ue8m0"`` or ``"fp4_ue8m0"``.

    Returns:
        [Q, next_n, max_context_len]. Not differentiable.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    out: Tensor = call(
        "paged_mqa_logits",
        q,
        q_sf,
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        indices,
        max_context_len=max_context_len,
        scale=scale,
        clean=clean,
        out_dtype=out_dtype,
        fmt=fmt,
    )
    return out


def paged_mqa_logits_metadata(
    context_lens: Tensor, indices: Tensor | None = None, *, block_kv: int, num_heads: int, num_cores: int
) -> Tensor:
    """The work plan for ``paged_mqa_logits``: i32 [num_cores + 1, 2], to be passed on and not looked into.

    Args:
        context_lens: [Q, next_n] i32 or i64, as for the logits.
        indices: as for the logits, or ``None``.
        block_kv: keys per page.
        num_heads: H.
        num_cores: how many cores or multiprocessors the kernel will use.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    plan: Tensor = call(
        "paged_mqa_logits_metadata",
        context_lens,
        indices,
        block_kv=block_kv,
        num_heads=num_heads,
        num_cores=num_cores,
    )
    return plan


def check_paged(
    op: str,
    q: Tensor,
    q_sf: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    indices: Tensor | None,
    max_context_len: int,
    scale: float,
    fmt: str,
) -> None:
    """The argument checks that logits and top-k share."""
    _mqa.check_scale(op, scale)
    _mqa.check_operands(op, q, q_sf, q if kv_cache.dtype == torch.uint8 else kv_cache, None, weights, batched_kv=False)
    _paged_cache.check_cache(op, kv_cache, fmt, _mqa.head_dim(q))
    _check.dtypes(op, "context_lens", context_lens, _check.INDEX)
    _check.rank(op, "context_lens", context_lens, "[Q, next_n]", 2)
    _check.size(op, "Q of context_lens", context_lens.shape[0], q.shape[0], "Q of q")
    _check.size(op, "next_n of context_lens", context_lens.shape[1], q.shape[1], "next_n of q")
    _check.dtypes(op, "block_table", block_table, _check.INDEX)
    _check.rank(op, "block_table", block_table, "[R, columns]", 2)
    if schedule_meta is not None:
        _check.dtypes(op, "schedule_meta", schedule_meta, (torch.int32,))
        _check.rank(op, "schedule_meta", schedule_meta, "[num_cores + 1, 2], from paged_mqa_logits_metadata", 2)
    if indices is None:
        _check.size(op, "R of block_table", block_table.shape[0], q.shape[0], "Q of q (no indices are given)")
    else:
        _check_indices(op, indices, q.shape[0], "Q of q")
    torch._check_value(
        max_context_len >= 0, lambda: f"{op}: max_context_len is {max_context_len}; it must be 0 or positive."
    )
    _check.same_device(
        op,
        "q",
        q,
        kv_cache=kv_cache,
        context_lens=context_lens,
        block_table=block_table,
        schedule_meta=schedule_meta,
        indices=indices,
    )


def _check_indices(op: str, indices: Tensor, queries: Any, source: str) -> None:
    _check.dtypes(op, "indices", indices, _check.INDEX)
    _check.rank(op, "indices", indices, "[Q]", 1)
    _check.size(op, "the size of indices", indices.shape[0], queries, source)


def _check_logits(
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
) -> None:
    op = "paged_mqa_logits"
    check_paged(
        op,
        q,
        q_sf,
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        indices,
        max_context_len,
        scale,
        fmt,
    )
    if out_dtype is not None and out_dtype not in _check.FLOATING:
        raise TypeError(f"{op}: out_dtype is {out_dtype}; accepted: f32, bf16, f16, f64.")


def paged_scores(
    q: Tensor,
    q_sf: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    indices: Tensor | None,
    max_context_len: int,
    scale: float,
    fmt: str,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(query, scores [next_n, keys], bool [next_n, keys] of the keys that exist) of every query; keys may be 0.

    ``keys`` is what the columns of ``block_table`` can hold of ``max_context_len``.
    """
    pages, block = kv_cache.shape[:2]
    rows, columns = block_table.shape
    columns = min((max_context_len + block - 1) // max(block, 1), columns) if pages and rows else 0
    keys = min(columns * block, max_context_len)
    depth = _mqa.head_dim(q)
    x = _mqa.dequantise(q, q_sf)
    at = torch.arange(keys, device=q.device)
    for i in range(q.shape[0] if keys else 0):
        row = i if indices is None else indices[i].long().clamp(0, rows - 1)
        ids = block_table[row, :columns].long()
        present = ((ids >= 0) & (ids < pages)).repeat_interleave(block)[:keys]
        if indices is not None:
            present = present & (indices[i] >= 0) & (indices[i] < rows)
        context = _paged_cache.decode(kv_cache[ids.clamp(0, pages - 1)], fmt, depth).flatten(0, 1)[:keys]
        values = _mqa.scores(x[i : i + 1], context.unsqueeze(0), weights[i : i + 1], scale)[0]
        yield i, values, present & (at < context_lens[i].unsqueeze(1))


def _reference_logits(
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
    out = torch.full(
        (q.shape[0], q.shape[1], max_context_len), -torch.inf, dtype=_check.compute_dtype(q.dtype), device=q.device
    )
    for i, values, seen in paged_scores(
        q, q_sf, kv_cache, weights, context_lens, block_table, indices, max_context_len, scale, fmt
    ):
        out[i, :, : values.shape[1]] = torch.where(seen, values, -torch.inf)
    return out.to(out_dtype) if out_dtype is not None else out


def _fake_logits(
    q: Tensor, *args: Tensor | None, max_context_len: int, out_dtype: torch.dtype | None, **_: Any
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], max_context_len), dtype=out_dtype or _check.compute_dtype(q.dtype))


def _check_metadata(
    context_lens: Tensor, indices: Tensor | None, *, block_kv: int, num_heads: int, num_cores: int
) -> None:
    op = "paged_mqa_logits_metadata"
    _check.dtypes(op, "context_lens", context_lens, _check.INDEX)
    _check.rank(op, "context_lens", context_lens, "[Q, next_n]", 2)
    if indices is not None:
        _check_indices(op, indices, context_lens.shape[0], "Q of context_lens")
    for name, value in (("block_kv", block_kv), ("num_heads", num_heads), ("num_cores", num_cores)):
        torch._check_value(value >= 1, lambda n=name, v=value: f"{op}: {n} is {v}; it must be at least 1.")
    _check.same_device(op, "context_lens", context_lens, indices=indices)


def _reference_metadata(
    context_lens: Tensor, indices: Tensor | None, *, block_kv: int, num_heads: int, num_cores: int
) -> Tensor:
    queries, next_n = context_lens.shape
    longest = context_lens.long().clamp(min=0).amax(1) if next_n else context_lens.new_zeros(queries).long()
    pages = (longest + block_kv - 1) // block_kv
    ends = pages.cumsum(0)
    total = ends[-1] if queries else torch.zeros((), dtype=torch.int64, device=context_lens.device)
    starts = torch.arange(num_cores + 1, device=context_lens.device) * total // num_cores
    query = torch.searchsorted(ends, starts, right=True)
    begin = torch.nn.functional.pad(ends, (1, 0))
    inside = (query < queries) & (starts < total)
    page = torch.where(inside, starts - begin[query], 0)
    return torch.stack((torch.where(inside, query, queries), page), 1).to(torch.int32)


_EXACT = "integers"

PAGED_MQA_LOGITS = OpDef(
    name="paged_mqa_logits",
    schema=(
        "(Tensor q, Tensor? q_sf, Tensor kv_cache, Tensor weights, Tensor context_lens, Tensor block_table, "
        "Tensor? schedule_meta, Tensor? indices, *, SymInt max_context_len, float scale, bool clean, "
        "ScalarType? out_dtype, str fmt) -> Tensor"
    ),
    check=_check_logits,
    reference=_reference_logits,
    fake=_fake_logits,
    no_backward="a paged cache is for inference; train with mqa_logits on the keys themselves.",
    tolerance={
        dtype: Tolerance(1e-12 if dtype == torch.float64 else 1e-5, 1e-13 if dtype == torch.float64 else 1e-5, REASON)
        for dtype in (*_check.FLOATING, _mqa.FP8, *_mqa.FP4_STORAGE)
    },
    samples=paged_samples,
)

PAGED_MQA_LOGITS_METADATA = OpDef(
    name="paged_mqa_logits_metadata",
    schema="(Tensor context_lens, Tensor? indices, *, SymInt block_kv, SymInt num_heads, SymInt num_cores) -> Tensor",
    check=_check_metadata,
    reference=_reference_metadata,
    fake=lambda context_lens, indices, *, num_cores, **_: context_lens.new_empty((num_cores + 1, 2), dtype=torch.int32),
    no_backward="it is a plan of integers.",
    tolerance={dtype: Tolerance(0.0, 0.0, _EXACT) for dtype in _check.INDEX},
    samples=paged_metadata_samples,
)
