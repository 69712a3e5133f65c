"""``mqa_logits_backward``: the gradients of ``mqa_logits`` for q, kv, weights and a floating mask.

With G the gradient of the logits, zero where a key is excluded (whatever G holds there), and p the scaled products
(keys that no query sees, and queries that see no key, may hold anything; otherwise NaN spreads as in matmul):

    gs[s,h,t] = G[s,t] * weights[s,h] * scale * (p[s,h,t] > 0)      the ReLU has slope 0 at 0
    dq[s,h,:] = sum over t of gs[s,h,t] * kv[t,:]                   dkv[t,:] = sum over s, h of gs[s,h,t] * q[s,h,:]
    dw[s,h]   = sum over t of G[s,t] * relu(p[s,h,t])               dmask    = G, summed where the mask was broadcast

Arithmetic in f32 (f64), one rounding to the dtype of each input. It is not differentiable again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check, _mqa
from ascend_deep.ops._mqa_samples import logits_samples
from ascend_deep.ops._op import OpDef, Sample, Tolerance

__all__ = ["MQA_LOGITS_BACKWARD", "mqa_logits_backward"]

_OP = "mqa_logits_backward"


def mqa_logits_backward(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    weights: Tensor,
    ks: Tensor | None = None,
    ke: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    max_seqlen_k: int = 0,
    output_mask: tuple[bool, ...] = (True, True, True, False),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``mqa_logits`` for (q, kv, weights, mask), in the dtypes of those.

    Args:
        grad: [B, S, T], or [B, S, max_seqlen_k], any floating dtype.
        output_mask: which gradients to compute; the others come back as empty [0] tensors. The gradient of the mask
            needs a floating mask.
        others: as for ``mqa_logits``, q and kv not quantised.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return torch.ops.ascend_deep.mqa_logits_backward.default(
        grad,
        q,
        kv,
        weights,
        ks,
        ke,
        mask,
        scale=scale,
        max_seqlen_k=max_seqlen_k,
        output_mask=list(output_mask),
    )


def _check_args(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    scale: float,
    max_seqlen_k: int,
    output_mask: list[bool],
) -> None:
    _check.dtypes(_OP, "q", q, _check.FLOATING)
    _check.dtypes(_OP, "kv", kv, _check.FLOATING)
    _mqa.check_scale(_OP, scale)
    _mqa.check_operands(_OP, q, None, kv, None, weights)
    _mqa.check_ranges(_OP, q, ks=ks, ke=ke)
    _mqa.check_mask(_OP, q, kv, mask)
    _check.dtypes(_OP, "grad", grad, _check.FLOATING)
    _check.rank(_OP, "grad", grad, "[B, S, T] or [B, S, max_seqlen_k]", 3)
    dense = type(max_seqlen_k) is int and max_seqlen_k == 0
    _check.size(_OP, "B of grad", grad.shape[0], q.shape[0], "B of q")
    _check.size(_OP, "S of grad", grad.shape[1], q.shape[1], "S of q")
    columns, source = (kv.shape[1], "T of kv") if dense else (max_seqlen_k, "max_seqlen_k")
    _check.size(_OP, "the number of columns of grad", grad.shape[2], columns, source)
    _check.same_device(_OP, "q", q, grad=grad)
    if len(output_mask) != 4:
        raise ValueError(f"{_OP}: output_mask has {len(output_mask)} entries; it must have 4, one per gradient.")
    if output_mask[3] and (mask is None or mask.dtype == torch.bool):
        raise TypeError(f"{_OP}: the gradient of mask is asked for, but mask is not floating.")


def expand(q: Tensor, grad: Tensor, ks: Tensor | None, keys: int) -> Tensor:
    """The inverse of ``mqa_logits.compress``: [B, S, L] to [B, S, T], zero where no column is."""
    start, _ = _mqa.bounds(q, keys, ks, None)
    at = start.unsqueeze(-1) + torch.arange(grad.shape[2], device=grad.device)
    dense = grad.new_zeros(grad.shape[0], grad.shape[1], keys + 1)
    return dense.scatter(2, at.clamp(max=keys), grad)[:, :, :keys]


def _reference(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    scale: float,
    max_seqlen_k: int,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = _check.compute_dtype(q.dtype)
    need_q, need_kv, need_w, need_mask = output_mask
    if max_seqlen_k:
        grad = expand(q, grad, ks, kv.shape[1])
    grad = grad.to(dtype)
    hidden = _mqa.excluded(q, kv.shape[1], ks, ke, mask)
    keys, queries = kv.to(dtype), q.to(dtype)
    if hidden is not None:
        hidden = hidden.expand(grad.shape)
        grad = grad.masked_fill(hidden, 0.0)
        # 0 * NaN is NaN: what no query sees, and queries that see nothing, may hold anything.
        keys = keys.masked_fill(hidden.all(1).unsqueeze(-1), 0.0)
        queries = queries.masked_fill(hidden.all(2)[:, :, None, None], 0.0)
    dq = torch.zeros(q.shape if need_q else (0,), dtype=dtype, device=q.device)
    dkv = torch.zeros(kv.shape if need_kv else (0,), dtype=dtype, device=q.device)
    dw = torch.zeros(weights.shape if need_w else (0,), dtype=dtype, device=q.device)
    if need_q or need_kv or need_w:
        for h in range(q.shape[2]):
            head = queries[:, :, h]
            p = torch.bmm(head, keys.transpose(1, 2)) * scale
            if need_w:
                # Where no gradient is, the product does not count, though it be infinite or NaN.
                dw[:, :, h] = torch.where(grad == 0, 0.0, grad * p.relu()).sum(-1)
            gs = torch.where(p > 0, grad * (weights[:, :, h].to(dtype) * scale).unsqueeze(-1), 0.0)
            if need_q:
                dq[:, :, h] = torch.bmm(gs, keys)
            if need_kv:
                dkv += torch.bmm(gs.transpose(1, 2), head)
    dmask = q.new_empty(0) if mask is None else mask.new_empty(0)
    if need_mask and mask is not None:
        dmask = grad.sum_to_size(mask.shape).to(mask.dtype)
    return dq.to(q.dtype), dkv.to(kv.dtype), dw.to(weights.dtype), dmask.contiguous()


def _fake(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    output_mask: list[bool],
    **_: Any,
) -> tuple[Tensor, ...]:
    inputs = (q, kv, weights, q if mask is None else mask)
    return tuple(t.new_empty(t.shape if w else (0,)) for t, w in zip(inputs, output_mask, strict=True))


def _samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(6)
    n = 0
    for sample in logits_samples():
        q, _, kv, _, weights, ks, ke, mask = sample.args
        if _mqa.is_quantised(q) or _mqa.is_quantised(kv):
            continue
        columns = sample.kwargs["max_seqlen_k"] or kv.shape[1]
        grad = torch.randn(q.shape[0], q.shape[1], columns, generator=g).to(sample.kwargs["out_dtype"] or torch.float32)
        floating = mask is not None and mask.dtype != torch.bool
        wanted = [True, True, True, floating] if n % 3 else [n % 2 == 0, n % 4 < 2, n % 5 < 3, floating]
        n += 1
        kwargs = {
            "scale": sample.kwargs["scale"],
            "max_seqlen_k": sample.kwargs["max_seqlen_k"],
            "output_mask": wanted,
        }
        yield Sample(sample.name, (grad, q, kv, weights, ks, ke, mask), kwargs)


_REASON = "f32 sums over T or S * H terms, in any order; relative to the largest entry of the gradient"

MQA_LOGITS_BACKWARD = OpDef(
    name=_OP,
    schema=(
        "(Tensor grad, Tensor q, Tensor kv, Tensor weights, Tensor? ks, Tensor? ke, Tensor? mask, *, float scale, "
        "SymInt max_seqlen_k, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward="mqa_logits can be differentiated once; second derivatives need the unfused indexer.",
    tolerance={
        torch.float64: Tolerance(1e-11, 1e-12, _REASON),
        torch.float32: Tolerance(1e-4, 2e-5, _REASON),
        torch.bfloat16: Tolerance(1e-2, 5e-3, _REASON + "; rounded to bf16 once"),
        torch.float16: Tolerance(2e-3, 1e-3, _REASON + "; rounded to f16 once"),
    },
    samples=_samples,
)
