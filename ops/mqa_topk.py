"""``mqa_topk``: the keys with the largest indexer scores of each query, without materialising the scores.

The scores are those of ``mqa_logits``. Selection is by the pair (score, lowest index), which is a total order, so the
result is one set, and the same in training and inference, for any number of threads:

* every key whose score is strictly greater than the topk-th is in; the rest are the tied keys of lowest index;
* scores are compared as f32 (f64) numbers, bit by bit: two keys tie only if their sums are equal to the last bit. What
  is equal in exact arithmetic may differ there, and differently on another device or provider; exact zeros, the scores
  of keys for which every ReLU is off, are ties everywhere;
* -0.0 equals 0.0; a NaN score ranks below every number, -inf included, and above nothing;
* ``outside="pad"``: excluded keys (see ``ops/_mqa.py``) are never chosen. A row with fewer than topk keys ends in -1.
  ``outside="rank_last"``: excluded keys have score -inf and can be chosen, as by ``torch.topk`` of masked scores, so -1
  appears only behind T keys. An excluded key is -inf even where its own score is NaN;
* ``sorted``: by descending score, ties by ascending index. Otherwise by ascending index, which costs less and suits a
  gather. Padding (index -1, score -inf) comes last in both.

Memory is O(B * S * topk). Negative, empty and overlong ranges are as in ``mqa_logits``. ``torch.topk`` differs in two
ways: it breaks ties as it likes and takes NaN for the largest number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check, _mqa
from ascend_deep.ops._mqa_samples import topk_samples
from ascend_deep.ops._op import OpDef, Tolerance, call
from ascend_deep.ops.mqa_logits import FP8_ON_CUDA, REASON

__all__ = ["MQA_TOPK", "OUTSIDE", "mqa_topk", "order_keys", "select"]

_OP = "mqa_topk"
OUTSIDE = ("pad", "rank_last")
_ROWS = 4096 * 64  # scores that the reference holds at a time


def mqa_topk(
    q: Tensor,
    kv: Tensor,
    weights: Tensor,
    ks: Tensor | None = None,
    ke: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    topk: int,
    q_sf: Tensor | None = None,
    kv_sf: Tensor | None = None,
    scale: float = 1.0,
    outside: str = "pad",
    sorted: bool = False,
    return_scores: bool = True,
    index_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``topk`` best keys per query; see the module for ties, NaN and order.

    Args:
        topk: columns of the result, at least 0, may exceed T.
        outside: ``"pad"`` or ``"rank_last"``.
        sorted: by descending score instead of ascending index.
        return_scores: otherwise the first result is an empty [0] tensor.
        index_dtype: ``torch.int64`` (``None``) or ``torch.int32``.
        others: as for ``mqa_logits``, [S, H, D] queries included.

    Returns:
        scores [B, S, topk] f32 (f64 with f64 operands), -inf where the index is -1, and idx [B, S, topk]. Scores are
        differentiable as those of ``mqa_logits`` are (the backward takes O(B * S * T) memory); idx is not.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    if isinstance(q, Tensor) and q.dim() == 3:
        scores, idx = mqa_topk(
            q.unsqueeze(0),
            kv.unsqueeze(0),
            weights.unsqueeze(0),
            *map(_mqa.with_batch, (ks, ke, mask)),
            topk=topk,
            q_sf=_mqa.with_batch(q_sf),
            kv_sf=_mqa.with_batch(kv_sf),
            scale=scale,
            outside=outside,
            sorted=sorted,
            return_scores=return_scores,
            index_dtype=index_dtype,
        )
        return scores.squeeze(0) if return_scores else scores, idx.squeeze(0)
    out: tuple[Tensor, Tensor] = call(
        _OP,
        q,
        q_sf,
        kv,
        kv_sf,
        weights,
        ks,
        ke,
        mask,
        topk=topk,
        scale=scale,
        outside=outside,
        sorted=sorted,
        return_scores=return_scores,
        index_dtype=index_dtype,
    )
    return out


def _check_args(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    topk: int,
    scale: float,
    outside: str,
    sorted: bool,
    return_scores: bool,
    index_dtype: torch.dtype | None,
) -> None:
    _mqa.check_scale(_OP, scale)
    _mqa.check_operands(_OP, q, q_sf, kv, kv_sf, weights)
    _mqa.check_ranges(_OP, q, ks=ks, ke=ke)
    _mqa.check_mask(_OP, q, kv, mask)
    _check.choice(_OP, "outside", outside, OUTSIDE)
    torch._check_value(topk >= 0, lambda: f"{_OP}: topk is {topk}; it must be 0 or positive.")
    if index_dtype is not None and index_dtype not in _check.INDEX:
        raise TypeError(f"{_OP}: index_dtype is {index_dtype}; accepted: int64, int32.")


def order_keys(values: Tensor) -> Tensor:
    """i64 in the order of the f32 or f64 ``values``: -0.0 equals 0.0, NaN lies below -inf."""
    bits_dtype, low = (torch.int64, -(2**63)) if values.dtype == torch.float64 else (torch.int32, -(2**31))
    bits = (values + 0.0).view(bits_dtype)
    key = torch.where(bits < 0, bits ^ (-low - 1), bits)
    return torch.where(values.isnan(), low + 1, key).to(torch.int64)


def select(values: Tensor, eligible: Tensor | None, topk: int, sorted: bool) -> tuple[Tensor, Tensor]:
    """The rule of the module on rows of scores [..., T]: (scores, i64 indices), both [..., topk].

    ``eligible`` is bool, broadcastable to ``values``; ``None``: every key can be chosen.
    """
    key = order_keys(values)
    if eligible is not None:
        key = key.masked_fill(~eligible, -(2**63))
    keys = values.shape[-1]
    columns = min(topk, keys)
    # A stable sort keeps the lower index first among equal keys.
    idx = key.argsort(dim=-1, descending=True, stable=True)[..., :columns]
    if not sorted:
        chosen = torch.zeros_like(key, dtype=torch.bool).scatter(-1, idx, True)
        if eligible is not None:
            chosen &= eligible
        # Ascending index, the keys that were not chosen behind all others.
        at = torch.arange(keys, device=values.device)
        idx = torch.where(chosen, at, keys).sort(-1).values[..., :columns].clamp(max=max(keys - 1, 0))
        count = chosen.sum(-1, keepdim=True)
    else:
        count = torch.full((1,), keys, device=values.device) if eligible is None else eligible.sum(-1, keepdim=True)
    real = torch.arange(columns, device=values.device) < count
    scores = torch.where(real, values.gather(-1, idx), -torch.inf)
    idx = torch.where(real, idx, -1)
    missing = topk - columns
    return (
        torch.nn.functional.pad(scores, (0, missing), value=-torch.inf),
        torch.nn.functional.pad(idx, (0, missing), value=-1),
    )


def _rows(t: Tensor | None, begin: int, end: int) -> Tensor | None:
    """Rows of a tensor with S in dim 1, unless it broadcasts there."""
    return t if t is None or t.shape[1] == 1 else t[:, begin:end]


def _reference(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    topk: int,
    scale: float,
    outside: str,
    sorted: bool,
    return_scores: bool,
    index_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    batch, rows, keys = q.shape[0], q.shape[1], kv.shape[1]
    scores = q.new_empty((batch, rows, topk), dtype=_check.compute_dtype(q.dtype))
    idx = q.new_empty((batch, rows, topk), dtype=index_dtype or torch.int64)
    step = max(_ROWS // max(keys * batch, 1), 1)
    k = _mqa.dequantise(kv, kv_sf)
    for begin in range(0, rows if batch else 0, step):
        end = min(begin + step, rows)
        part = _mqa.dequantise(q[:, begin:end], None if q_sf is None else q_sf[:, begin:end])
        part_mask = _rows(mask, begin, end)
        values = _mqa.add_mask(_mqa.scores(part, k, weights[:, begin:end], scale), part_mask)
        hidden = _mqa.excluded(part, keys, _rows(ks, begin, end), _rows(ke, begin, end), part_mask)
        if hidden is not None:
            values = values.masked_fill(hidden, -torch.inf)
        eligible = ~hidden.expand(values.shape) if hidden is not None and outside == "pad" else None
        scores[:, begin:end], idx[:, begin:end] = select(values, eligible, topk, sorted)
    return scores if return_scores else scores.new_empty(0), idx


def _fake(
    q: Tensor, *args: Tensor | None, topk: int, return_scores: bool, index_dtype: torch.dtype | None, **_: Any
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[1], topk)
    dtype = _check.compute_dtype(q.dtype)
    return (
        q.new_empty(shape if return_scores else (0,), dtype=dtype),
        q.new_empty(shape, dtype=index_dtype or torch.int64),
    )


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    q, _, kv, _, weights, ks, ke, mask = inputs
    scores, idx = output
    ctx.mark_non_differentiable(idx)
    ctx.save_for_backward(q, kv, weights, ks, ke, mask, idx)
    ctx.attributes = keyword_only_inputs
    if not keyword_only_inputs["return_scores"]:
        ctx.mark_non_differentiable(scores)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, kv, weights, ks, ke, mask, idx = ctx.saved_tensors
    if _mqa.is_quantised(q) or _mqa.is_quantised(kv):
        raise RuntimeError(f"{_OP} has no backward through fp8 or fp4 operands; pass q and kv in bf16 or f32 to train.")
    keys = kv.shape[1]
    # Padding goes to one column more than there are keys.
    at = torch.where(idx < 0, keys, idx.long())
    dense = grad.new_zeros(grad.shape[0], grad.shape[1], keys + 1).scatter(2, at, grad)[:, :, :keys]
    needs = ctx.needs_input_grad
    dq, dkv, dw, dmask = torch.ops.ascend_deep.mqa_logits_backward.default(
        dense,
        q,
        kv,
        weights,
        ks,
        ke,
        mask,
        scale=ctx.attributes["scale"],
        max_seqlen_k=0,
        output_mask=[needs[0], needs[2], needs[4], needs[7]],
    )
    grads = (dq, None, dkv, None, dw, None, None, dmask)
    return tuple(g if g is not None and need else None for g, need in zip(grads, needs, strict=True))


def _autocast(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """As for ``mqa_logits``."""
    q, q_sf, kv, kv_sf, weights, *rest = args

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.dtype in (torch.float32, torch.bfloat16, torch.float16) else t

    return (cast(q), q_sf, cast(kv), kv_sf, cast(weights), *rest), kwargs


_REASON = REASON + "; keys whose scores differ by less may change places, and those at the boundary may be exchanged"

MQA_TOPK = OpDef(
    name=_OP,
    schema=(
        "(Tensor q, Tensor? q_sf, Tensor kv, Tensor? kv_sf, Tensor weights, Tensor? ks, Tensor? ke, Tensor? mask, *, "
        "SymInt topk, float scale, str outside, bool sorted, bool return_scores, ScalarType? index_dtype) "
        "-> (Tensor, Tensor)"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_autocast,
    tolerance={
        dtype: Tolerance(1e-12 if dtype == torch.float64 else 1e-5, 1e-12 if dtype == torch.float64 else 1e-5, _REASON)
        for dtype in (*_check.FLOATING, _mqa.FP8, *_mqa.FP4_STORAGE)
    },
    samples=topk_samples,
    tolerance_on={"cuda": {_mqa.FP8: FP8_ON_CUDA}},
    differentiable=("q", "kv", "weights", "mask"),
    debug=lambda q, q_sf, kv, kv_sf, *_, **__: _mqa.debug_scales(_OP, q_sf, kv_sf),
)
