"""``sparse_mqa_attention_backward``: gradients of ``sparse_mqa_attention`` for q, k, v, a floating mask, the sink.

With p the softmax, recomputed from lse, G the gradient of out and L that of lse, per head and row over its list:

    dp[j] = G . v[t]        delta = sum over j of p[j] * dp[j]        ds[j] = p[j] * (dp[j] - delta + L)
    dq = scale * sum over j of ds[j] * k[t]     dk[t] += scale * ds[j] * q     dv[t] += p[j] * G     dmask[t] += ds[j]
    dsink = sum over b, s of exp(sink - lse) * (L - delta)

Keys that no row sees get exactly zero. Rows without a visible key: nothing with ``empty="zero"``; NaN with ``"nan"``
(what a softmax of -inf passes back to its row of q and to all keys); with ``"mean"`` those of the equal softmax, where
hidden keys have a number *added* to their logit. Lists of one row hold distinct keys.

Arithmetic in f32 (f64), one rounding to the dtype of each input. It is not differentiable again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.sparse_rows import counted, empty_rows, hide_filled
from ascend_deep.ops import _check
from ascend_deep.ops._mqa_samples import attention_samples
from ascend_deep.ops._op import OpDef, Sample, Tolerance
from ascend_deep.ops.sparse_mqa_attention import FILL, check_arguments, sparse_mqa_attention

__all__ = ["SPARSE_MQA_ATTENTION_BACKWARD", "sparse_mqa_attention_backward"]

_OP = "sparse_mqa_attention_backward"
_ELEMENTS = 1 << 22  # gathered key elements that are held at a time


def sparse_mqa_attention_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    lse: Tensor,
    *,
    scale: float,
    empty: str = "zero",
    fill: float = FILL,
    output_mask: tuple[bool, ...] = (True, True, True, False, False),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``sparse_mqa_attention`` for (q, k, v, mask, sink), in the dtypes of those.

    Args:
        grad: [B, Hq, S, Dv], any floating dtype.
        grad_lse: [B, Hq, S], or ``None``.
        lse: [B, Hq, S], as the op returned it.
        output_mask: which gradients to compute; the others come back as empty [0] tensors.
        others: as for ``sparse_mqa_attention``.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return torch.ops.ascend_deep.sparse_mqa_attention_backward.default(
        grad,
        grad_lse,
        q,
        k,
        v,
        idx,
        mask,
        sink,
        lse,
        scale=scale,
        empty=empty,
        fill=fill,
        output_mask=list(output_mask),
    )


def _check_args(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    lse: Tensor,
    *,
    scale: float,
    empty: str,
    fill: float,
    output_mask: list[bool],
) -> None:
    check_arguments(_OP, q, k, v, idx, mask, sink, scale=scale, empty=empty, fill=fill)
    _check.dtypes(_OP, "grad", grad, _check.FLOATING)
    _check.rank(_OP, "grad", grad, "[B, Hq, S, Dv]", 4)
    _check.size(_OP, "Dv of grad", grad.shape[3], v.shape[3], "Dv of v")
    for name, tensor in (("grad", grad), ("grad_lse", grad_lse), ("lse", lse)):
        if tensor is None:
            continue
        if name != "grad":
            _check.dtypes(_OP, name, tensor, _check.FLOATING)
            _check.rank(_OP, name, tensor, "[B, Hq, S]", 3)
        for dim, what in ((0, "B"), (1, "Hq"), (2, "S")):
            _check.size(_OP, f"{what} of {name}", tensor.shape[dim], q.shape[dim], f"{what} of q")
    _check.same_device(_OP, "q", q, grad=grad, grad_lse=grad_lse, lse=lse)
    if len(output_mask) != 5:
        raise ValueError(f"{_OP}: output_mask has {len(output_mask)} entries; it must have 5, one per gradient.")
    if output_mask[3] and (mask is None or mask.dtype == torch.bool):
        raise TypeError(f"{_OP}: the gradient of mask is asked for, but mask is not floating.")
    if output_mask[4] and sink is None:
        raise TypeError(f"{_OP}: the gradient of sink is asked for, but there is no sink.")


def _reference(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    lse: Tensor,
    *,
    scale: float,
    empty: str,
    fill: float,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = _check.compute_dtype(q.dtype)
    batch, heads, rows = lse.shape
    key_heads, keys = k.shape[1], k.shape[2]
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v))
    need_mask = output_mask[3] and mask is not None
    # One column more than there are keys takes what is hidden.
    dmask = torch.zeros(batch, heads, rows, keys + 1 if need_mask else 0, dtype=dtype, device=q.device)
    delta = torch.zeros(batch, heads, rows, dtype=dtype, device=q.device)
    listed, masks = hide_filled(idx, mask, fill) if empty == "mean" else (idx, mask)
    step = max(_ELEMENTS // max(idx.shape[2] * (k.shape[3] + v.shape[3]) * key_heads, 1), 1)
    if keys == 0 or idx.shape[2] == 0:
        rows = 0
    for b in range(batch):
        for begin in range(0, rows, step):
            part = slice(begin, min(begin + step, rows))
            at = listed[b, part].long()
            hidden = ((at < 0) | (at >= keys)).expand(heads, *at.shape)
            at = at.clamp(0, keys - 1)
            group = _Grouped(key_heads)
            query, g = group.rows(q[b, :, part].to(dtype)), group.rows(grad[b, :, part].to(dtype))
            chosen_k, chosen_v = k[b][:, at].to(dtype), v[b][:, at].to(dtype)  # [Hk, s, K, D]
            logits = group.heads(query @ chosen_k.transpose(2, 3)) * scale
            if masks is not None:
                plane = masks[b % masks.shape[0]].expand(heads, lse.shape[2], keys)[:, part]
                chosen = plane.gather(2, at.expand(heads, *at.shape))
                if masks.dtype == torch.bool:
                    hidden = hidden | ~chosen
                else:
                    hidden = hidden | (chosen == -torch.inf)
                    logits = logits + chosen.to(dtype)
            p = torch.where(hidden, 0.0, (logits - lse[b, :, part].to(dtype).unsqueeze(2)).exp())
            # 0 * NaN is NaN: rows of keys that no head sees become zeros before the products.
            unseen = hidden.all(0).unsqueeze(-1)
            chosen_k, chosen_v = chosen_k.masked_fill(unseen, 0.0), chosen_v.masked_fill(unseen, 0.0)
            dp = group.heads(g @ chosen_v.transpose(2, 3)).masked_fill(hidden, 0.0)
            delta[b, :, part] = (p * dp).sum(2)
            ds = dp - delta[b, :, part].unsqueeze(2)
            if grad_lse is not None:
                ds = ds + grad_lse[b, :, part].to(dtype).unsqueeze(2)
            ds = torch.where(hidden, 0.0, p * ds)
            if need_mask:
                dmask[b, :, part].scatter_(2, torch.where(hidden, keys, at.expand_as(hidden)), ds)
            grouped_ds, grouped_p = group.rows(ds) * scale, group.rows(p)
            dq[b, :, part] = group.heads(grouped_ds @ chosen_k)
            dk[b].index_add_(1, at.flatten(), (grouped_ds.transpose(2, 3) @ query).flatten(1, 2))
            dv[b].index_add_(1, at.flatten(), (grouped_p.transpose(2, 3) @ g).flatten(1, 2))
    if empty != "zero":
        rest = (grad.to(dtype), None if grad_lse is None else grad_lse.to(dtype))
        _empty(*rest, q, k, v, idx, mask, lse, dq, dk, dv, dmask if need_mask else None, scale, empty, fill)
    # Results never share memory, not even empty ones.
    dsink = (q if sink is None else sink).new_empty(0)
    if output_mask[4] and sink is not None:
        wide = sink.to(dtype)[:, None]
        missing = -delta if grad_lse is None else grad_lse.to(dtype) - delta
        share = torch.where(lse == -torch.inf, 0.0, (wide - lse.to(dtype)).exp())
        dsink = (share * missing).sum((0, 2)).to(sink.dtype)
    masked = (q if mask is None else mask).new_empty(0)
    if need_mask and mask is not None:
        masked = dmask[..., :keys].sum_to_size(mask.shape).to(mask.dtype).contiguous()
    results = [
        t.to(x.dtype) if w else x.new_empty(0) for t, x, w in zip((dq, dk, dv), (q, k, v), output_mask, strict=False)
    ]
    return results[0], results[1], results[2], masked, dsink


class _Grouped:
    """[Hq, s, X] as [Hk, s, Hq / Hk, X] and back."""

    def __init__(self, key_heads: int) -> None:
        self.key_heads = key_heads

    def rows(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.key_heads, -1)).transpose(1, 2)

    @staticmethod
    def heads(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)


def _empty(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    mask: Tensor | None,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dmask: Tensor | None,
    scale: float,
    empty: str,
    fill: float,
) -> None:
    """Add the gradients of rows without a visible key."""
    # The forward has written its own value into the lse of these rows.
    nothing = lse.isnan() if empty == "nan" else (lse <= fill) | lse.isnan()
    marked = torch.where(nothing, -torch.inf, 0.0)
    for b, g, heads, rows in empty_rows(marked, k):
        if empty == "nan":
            weights = torch.full((heads.shape[0], k.shape[2]), torch.nan, dtype=dq.dtype, device=q.device)
        else:
            weights = counted(b, heads, rows, idx, mask, k.shape[2], fill, dq.dtype)
        here = grad[b, heads, rows]
        dp = here @ v[b, g].to(dq.dtype).t()
        ds = dp - (weights * dp).sum(1, keepdim=True)
        if grad_lse is not None:
            ds = ds + grad_lse[b, heads, rows].unsqueeze(1)
        ds = weights * ds
        dq[b, heads, rows] = scale * ds @ k[b, g].to(dq.dtype)
        dk[b, g] += scale * ds.t() @ q[b, heads, rows].to(dq.dtype)
        dv[b, g] += weights.t() @ here
        if dmask is not None:
            # The mask of keys that are not chosen is overwritten by the fill.
            at = torch.where((idx[b, rows] < 0) | (idx[b, rows] >= k.shape[2]), k.shape[2], idx[b, rows].long())
            chosen = torch.zeros(rows.shape[0], dmask.shape[3], dtype=ds.dtype, device=ds.device).scatter_(1, at, 1.0)
            dmask[b, heads, rows, : k.shape[2]] = ds * chosen[:, : k.shape[2]]


def _fake(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    lse: Tensor,
    *,
    output_mask: list[bool],
    **_: Any,
) -> tuple[Tensor, ...]:
    inputs = (q, k, v, q if mask is None else mask, q if sink is None else sink)
    return tuple(t.new_empty(t.shape if w else (0,)) for t, w in zip(inputs, output_mask, strict=True))


def _samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(26)
    for n, sample in enumerate(attention_samples()):
        if n % 2 and not sample.name.startswith(("empty", "sink", "mask")):
            continue  # each of these takes opcheck half a second
        q, k, v, idx, mask, sink = sample.args
        _, lse = sparse_mqa_attention(q, k, v, idx, mask, sink, **sample.kwargs)
        grad = torch.randn(*lse.shape, v.shape[3], generator=g).to(q.dtype)
        grad_lse = torch.randn(lse.shape, generator=g).to(lse.dtype) if n % 2 else None
        wanted = [n % 4 != 1, n % 4 != 2, True, mask is not None and mask.dtype != torch.bool, sink is not None]
        kwargs = {**sample.kwargs, "output_mask": wanted}
        yield Sample(sample.name, (grad, grad_lse, q, k, v, idx, mask, sink, lse), kwargs)


_REASON = "f32 sums over K or S * Hq / Hk terms, in any order; relative to the largest entry of the gradient"

SPARSE_MQA_ATTENTION_BACKWARD = OpDef(
    name=_OP,
    schema=(
        "(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor idx, Tensor? mask, Tensor? sink, "
        "Tensor lse, *, float scale, str empty, float fill, bool[5] output_mask) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward="sparse_mqa_attention can be differentiated once; second derivatives need attention with the mask.",
    tolerance={
        torch.float64: Tolerance(1e-10, 1e-11, _REASON),
        torch.float32: Tolerance(1e-4, 2e-5, _REASON),
        torch.bfloat16: Tolerance(1.6e-2, 8e-3, _REASON + "; rounded to bf16 once"),
        torch.float16: Tolerance(2e-3, 2e-3, _REASON + "; rounded to f16 once"),
    },
    samples=_samples,
)
