"""``paged_mqa_topk``: the keys with the largest indexer scores, over a paged key cache: the decode step of an indexer.

Scores, lengths, page ids and formats are those of ``paged_mqa_logits``; the choice is that of ``mqa_topk`` with
``outside="pad"``: by (score, lowest index), NaN below every number, -1 only where a context has fewer than topk keys.
An index is a position in the context, t, not a slot of the cache. Memory is O(Q * next_n * topk).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check, _mqa
from ascend_deep.ops._mqa_samples import paged_samples
from ascend_deep.ops._op import OpDef, Sample, Tolerance, call
from ascend_deep.ops.mqa_logits import REASON
from ascend_deep.ops.mqa_topk import select
from ascend_deep.ops.paged_mqa import check_paged, paged_scores

__all__ = ["PAGED_MQA_TOPK", "paged_mqa_topk"]

_OP = "paged_mqa_topk"


def paged_mqa_topk(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None = None,
    indices: Tensor | None = None,
    *,
    topk: int,
    max_context_len: int,
    q_sf: Tensor | None = None,
    scale: float = 1.0,
    sorted: bool = False,
    return_scores: bool = True,
    index_dtype: torch.dtype | None = None,
    fmt: str = "plain",
) -> tuple[Tensor, Tensor]:
    """The ``topk`` best keys of each token.

    Args:
        topk: columns of the result, at least 0.
        max_context_len: keys behind this one are not looked at.
        sorted, return_scores, index_dtype: as for ``mqa_topk``.
        others: as for ``paged_mqa_logits``.

    Returns:
        scores [Q, next_n, topk] f32 (f64), -inf where the index is -1, and idx [Q, next_n, topk]. Not differentiable.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    out: tuple[Tensor, Tensor] = call(
        _OP,
        q,
        q_sf,
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        indices,
        topk=topk,
        max_context_len=max_context_len,
        scale=scale,
        sorted=sorted,
        return_scores=return_scores,
        index_dtype=index_dtype,
        fmt=fmt,
    )
    return out


def _check_args(
    q: Tensor,
    q_sf: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    indices: Tensor | None,
    *,
    topk: int,
    max_context_len: int,
    scale: float,
    sorted: bool,
    return_scores: bool,
    index_dtype: torch.dtype | None,
    fmt: str,
) -> None:
    check_paged(
        _OP,
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
    torch._check_value(topk >= 0, lambda: f"{_OP}: topk is {topk}; it must be 0 or positive.")
    if index_dtype is not None and index_dtype not in _check.INDEX:
        raise TypeError(f"{_OP}: index_dtype is {index_dtype}; accepted: int64, int32.")


def _reference(
    q: Tensor,
    q_sf: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    indices: Tensor | None,
    *,
    topk: int,
    max_context_len: int,
    scale: float,
    sorted: bool,
    return_scores: bool,
    index_dtype: torch.dtype | None,
    fmt: str,
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[1], topk)
    scores = torch.full(shape, -torch.inf, dtype=_check.compute_dtype(q.dtype), device=q.device)
    idx = torch.full(shape, -1, dtype=index_dtype or torch.int64, device=q.device)
    for i, values, seen in paged_scores(
        q, q_sf, kv_cache, weights, context_lens, block_table, indices, max_context_len, scale, fmt
    ):
        scores[i], idx[i] = select(values, seen, topk, sorted)
    return scores if return_scores else scores.new_empty(0), idx


def _fake(
    q: Tensor, *args: Tensor | None, topk: int, return_scores: bool, index_dtype: torch.dtype | None, **_: Any
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[1], topk)
    return (
        q.new_empty(shape if return_scores else (0,), dtype=_check.compute_dtype(q.dtype)),
        q.new_empty(shape, dtype=index_dtype or torch.int64),
    )


def _samples() -> Iterator[Sample]:
    for n, sample in enumerate(paged_samples()):
        kwargs = {
            "topk": (7, 1, 60, 16)[n % 4],
            "max_context_len": sample.kwargs["max_context_len"],
            "scale": sample.kwargs["scale"],
            "sorted": n % 2 == 0,
            "return_scores": n % 5 != 3,
            "index_dtype": torch.int32 if n % 3 == 0 else None,
            "fmt": sample.kwargs["fmt"],
        }
        yield Sample(sample.name, sample.args, kwargs)


_REASON = REASON + "; keys whose scores differ by less may change places, and those at the boundary may be exchanged"

PAGED_MQA_TOPK = OpDef(
    name=_OP,
    schema=(
        "(Tensor q, Tensor? q_sf, Tensor kv_cache, Tensor weights, Tensor context_lens, Tensor block_table, "
        "Tensor? schedule_meta, Tensor? indices, *, SymInt topk, SymInt max_context_len, float scale, bool sorted, "
        "bool return_scores, ScalarType? index_dtype, str fmt) -> (Tensor, Tensor)"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward="a paged cache is for inference; train with mqa_topk on the keys themselves.",
    tolerance={
        dtype: Tolerance(1e-12 if dtype == torch.float64 else 1e-5, 1e-12 if dtype == torch.float64 else 1e-5, _REASON)
        for dtype in (*_check.FLOATING, _mqa.FP8, *_mqa.FP4_STORAGE)
    },
    samples=_samples,
)
