"""``sparse_mqa_attention``: attention over the keys that an indexer selected.

    logit[b,h,s,j] = scale * (q[b,h,s,:] . k[b,g,t,:]) + mask[b,h,s,t]       t = idx[b,s,j],  g = h // (Hq / Hk)
    out[b,h,s,:]   = sum over j of softmax over j (logit)[j] * v[b,g,t,:]
    lse[b,h,s]     = log(sum over j of exp(logit) + exp(sink[h]))

It equals ``scaled_dot_product_attention`` with a mask that hides every key that is not in ``idx``, and takes
O(S * topk) work instead of O(S * T). There is one key head (MQA, the absorbed form of MLA), several (GQA), or one per
query head. Rules:

* Indices outside [0, T), -1 above all, are skipped; their rows of k and v are not read. The valid indices of a row must
  be distinct: a key listed twice counts twice.
* A boolean mask hides keys where it is False; a floating one is added, and hides keys where it is -inf. Keys that are
  hidden from all heads do not count, though their k or v be NaN.
* A row in which no selected key is visible gives what a dense softmax gives under a mask of the same kind:
  ``empty="zero"``: out = 0 and lse = -inf (lse = sink with a sink), as SDPA; ``"nan"``: NaN, as a softmax of -inf;
  ``"mean"``: hidden keys have the finite number ``fill`` (at most -1e30, far below any logit), so the softmax is equal
  over all keys, except selected ones whose mask is below ``fill``. With ``"mean"`` a floating mask hides at ``fill``
  and below.
* ``sink`` is a logit without a value (the attention sink of GPT-OSS and DeepSeek-V4): it counts in the softmax only.

Arithmetic in f32 (f64); the result has the dtype of q, lse is f32 (f64).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.sparse_rows import fill_empty, hide_filled
from ascend_deep.ops import _check
from ascend_deep.ops._mqa import check_scale
from ascend_deep.ops._mqa_samples import attention_samples
from ascend_deep.ops._op import OpDef, Tolerance, call

__all__ = ["EMPTY", "FILL", "SPARSE_MQA_ATTENTION", "check_arguments", "sparse_mqa_attention"]

_OP = "sparse_mqa_attention"
EMPTY = ("zero", "nan", "mean")
FILL = torch.finfo(torch.float32).min
_ELEMENTS = 1 << 22  # gathered key elements that the reference holds at a time


def sparse_mqa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    *,
    scale: float,
    empty: str = "zero",
    fill: float = FILL,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over its own list of keys.

    Args:
        q: [B, Hq, S, D], f32, bf16, f16 or f64.
        k: [B, Hk, T, D] in the dtype of q; Hk divides Hq.
        v: [B, Hk, T, Dv] in the dtype of q; may be a view of k.
        idx: [B, S, K], i32 or i64.
        mask: [B or 1, Hq or 1, S or 1, T], bool or floating, or ``None``.
        sink: [Hq] floating, or ``None``.
        scale: multiplied to the products; finite.
        empty: what rows without a visible key give: ``"zero"``, ``"nan"`` or ``"mean"``; see the module.
        fill: with ``"mean"``, the mask value of hidden keys, at most -1e30.

    Returns:
        out [B, Hq, S, Dv] in the dtype of q and lse [B, Hq, S] f32 (f64), contiguous. Differentiable in q, k, v, sink
        and a floating mask.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    out: tuple[Tensor, Tensor] = call(_OP, q, k, v, idx, mask, sink, scale=scale, empty=empty, fill=fill)
    return out


def check_arguments(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    *,
    scale: float,
    empty: str,
    fill: float,
) -> None:
    """Raise ``ValueError`` or ``TypeError`` with one sentence that names the argument; ``op`` is for the sentence."""
    check_scale(op, scale)
    _check.dtypes(op, "q", q, _check.FLOATING)
    _check.rank(op, "q", q, "[B, Hq, S, D]", 4)
    for name, tensor in (("k", k), ("v", v)):
        _check.dtypes(op, name, tensor, (q.dtype,))
        _check.rank(op, name, tensor, f"[B, Hk, T, {'D' if name == 'k' else 'Dv'}]", 4)
        _check.size(op, f"B of {name}", tensor.shape[0], q.shape[0], "B of q")
    _check.size(op, "Hk of v", v.shape[1], k.shape[1], "Hk of k")
    _check.size(op, "T of v", v.shape[2], k.shape[2], "T of k")
    _check.size(op, "D of k", k.shape[3], q.shape[3], "D of q")
    torch._check_value(
        k.shape[1] >= 1 and q.shape[1] % k.shape[1] == 0,
        lambda: f"{op}: k has {k.shape[1]} heads; that must divide the {q.shape[1]} heads of q.",
    )
    _check.dtypes(op, "idx", idx, _check.INDEX)
    _check.rank(op, "idx", idx, "[B, S, K]", 3)
    _check.size(op, "B of idx", idx.shape[0], q.shape[0], "B of q")
    _check.size(op, "S of idx", idx.shape[1], q.shape[2], "S of q")
    if mask is not None:
        _check.dtypes(op, "mask", mask, (torch.bool, *_check.FLOATING))
        _check.rank(op, "mask", mask, "[B or 1, Hq or 1, S or 1, T]", 4)
        for dim, what in ((0, "B"), (1, "Hq"), (2, "S")):
            if not (type(mask.shape[dim]) is int and mask.shape[dim] == 1):
                _check.size(op, f"{what} of mask", mask.shape[dim], q.shape[dim], f"{what} of q (or 1)")
        _check.size(op, "T of mask", mask.shape[3], k.shape[2], "T of k")
    if sink is not None:
        _check.dtypes(op, "sink", sink, _check.FLOATING)
        _check.rank(op, "sink", sink, "[Hq]", 1)
        _check.size(op, "the size of sink", sink.shape[0], q.shape[1], "Hq of q")
    _check.same_device(op, "q", q, k=k, v=v, idx=idx, mask=mask, sink=sink)
    if empty not in EMPTY:
        raise ValueError(f"{op}: empty is {empty!r}; accepted: {', '.join(EMPTY)}.")
    if empty != "zero" and sink is not None:
        raise ValueError(f'{op}: empty is {empty!r} and there is a sink; a row with a sink takes empty="zero".')
    if empty == "mean" and not -math.inf < fill <= -1e30:
        raise ValueError(f"{op}: fill is {fill}; it must be finite and at most -1e30.")


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    *,
    scale: float,
    empty: str,
    fill: float,
) -> tuple[Tensor, Tensor]:
    listed, masks = hide_filled(idx, mask, fill) if empty == "mean" else (idx, mask)
    out, lse = _attend(q, k, v, listed, masks, sink, scale)
    fill_empty(out, lse, k, v, idx, mask, empty, fill)
    return out, lse


def _attend(
    q: Tensor, k: Tensor, v: Tensor, idx: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    dtype = _check.compute_dtype(q.dtype)
    batch, heads, rows, _ = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    out = torch.zeros(batch, heads, rows, v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.full((batch, heads, rows), -torch.inf, dtype=dtype, device=q.device)
    if sink is not None:
        lse[:] = sink.to(dtype).unsqueeze(1)
    if keys == 0 or idx.shape[2] == 0:
        return out, lse
    step = max(_ELEMENTS // max(idx.shape[2] * (k.shape[3] + v.shape[3]) * key_heads, 1), 1)
    for b in range(batch):
        for begin in range(0, rows, step):
            part = slice(begin, min(begin + step, rows))
            at = idx[b, part].long()
            hidden = (at < 0) | (at >= keys)
            at = at.clamp(0, keys - 1)
            # [heads, s, D] against [key heads, s, K, D], query heads of a group side by side.
            query = q[b, :, part].to(dtype).unflatten(0, (key_heads, -1)).transpose(1, 2)
            logits = (query @ k[b][:, at].to(dtype).transpose(2, 3)).transpose(1, 2).flatten(0, 1) * scale
            hidden = hidden.expand(logits.shape)
            if mask is not None:
                plane = mask[b % mask.shape[0]].expand(heads, rows, keys)[:, part]
                chosen = plane.gather(2, at.expand(heads, *at.shape))
                if mask.dtype == torch.bool:
                    hidden = hidden | ~chosen
                else:
                    hidden = hidden | (chosen == -torch.inf)
                    logits = logits + chosen.to(dtype)
            logits = logits.masked_fill(hidden, -torch.inf)
            total = logits.logsumexp(2)
            if sink is not None:
                total = torch.logaddexp(total, sink.to(dtype).unsqueeze(1))
            p = torch.where(hidden, 0.0, (logits - total.unsqueeze(2)).exp())
            p = p.unflatten(0, (key_heads, -1)).transpose(1, 2)
            # 0 * NaN is NaN: rows of hidden keys become zeros before the product, if no head sees them.
            unseen = hidden.all(0).unsqueeze(-1)
            values = v[b][:, at].to(dtype).masked_fill(unseen, 0.0)
            out[b, :, part] = (p @ values).transpose(1, 2).flatten(0, 1).to(q.dtype)
            lse[b, :, part] = total
    return out, lse


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[1], q.shape[2])
    return q.new_empty((*shape, v.shape[3])), q.new_empty(shape, dtype=_check.compute_dtype(q.dtype))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.attributes = keyword_only_inputs


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, idx, mask, sink, lse = ctx.saved_tensors
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4, 5)]
    grads = torch.ops.ascend_deep.sparse_mqa_attention_backward.default(
        grad, grad_lse, q, k, v, idx, mask, sink, lse, output_mask=needs, **ctx.attributes
    )
    dq, dk, dv, dmask, dsink = (g if need else None for g, need in zip(grads, needs, strict=True))
    return dq, dk, dv, None, dmask, dsink


def _autocast(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """Scaled dot product attention runs in the autocast dtype."""
    q, k, v, *rest = args
    if q.dtype == torch.float64:
        return args, kwargs
    return (q.to(dtype), k.to(dtype), v.to(dtype), *rest), kwargs


_REASON = "f32 products, one softmax over at most K terms, sums in any order, one rounding to the dtype of q"

SPARSE_MQA_ATTENTION = OpDef(
    name=_OP,
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor idx, Tensor? mask, Tensor? sink, *, float scale, str empty, float fill) "
        "-> (Tensor, Tensor)"
    ),
    check=functools.partial(check_arguments, _OP),
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_autocast,
    tolerance={
        torch.float64: Tolerance(1e-11, 1e-12, _REASON),
        torch.float32: Tolerance(1e-4, 1e-5, _REASON),
        torch.bfloat16: Tolerance(1.6e-2, 1e-2, _REASON),
        torch.float16: Tolerance(2e-3, 2e-3, _REASON),
    },
    samples=attention_samples,
    differentiable=("q", "k", "v", "mask", "sink"),
)
