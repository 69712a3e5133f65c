"""``mqa_logits``: the scores of the lightning indexer of DeepSeek-V3.2 / V4 and GLM-DSA.

    logits[b,s,t] = sum over h of weights[b,s,h] * relu(scale * (q[b,s,h,:] . kv[b,t,:]))     ks[b,s] <= t < ke[b,s]

``ops/_mqa.py`` defines operand formats, ranges and masks. Rules:

* One key head for all query heads; any H >= 1 and D >= 1; products of bf16, fp8 and fp4 are exact, sums are f32.
* Bounds below 0 count as 0, bounds above T as T; a range that ends where it starts, or before, is empty. S, T and B may
  be 0.
* Dense output (``max_seqlen_k = 0``): [B, S, T]. Compressed output (``max_seqlen_k = L``): [B, S, L], column c is key
  ks + c; keys of a range beyond the first L are dropped.
* With ``clean`` everything that is excluded, and every column behind the range, is -inf, whatever q, kv and the mask
  hold there. Without it, it is unspecified (what DeepGEMM returns), and reading it is an error of the caller.
* The result is contiguous, but for dense f32 scores of fp8 operands on CUDA: whichever provider runs, their rows are
  ``native.logits_rows.pitch(T)`` elements apart, which is what DeepGEMM writes. ``view`` wants ``contiguous()`` there.
* NaN and infinities of used operands reach the logits as IEEE arithmetic says; relu(NaN) is NaN.

Contract: DeepGEMM ``fp8_fp4_mqa_logits`` (B = 1 there; its range operands are our ``ks`` and ``ke``), with the scale,
the batch dimension and the mask that models have and DeepGEMM leaves to the caller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native import logits_rows
from ascend_deep.ops import _check, _mqa
from ascend_deep.ops._mqa_samples import logits_samples
from ascend_deep.ops._op import OpDef, Tolerance, call

__all__ = ["FP8_ON_CUDA", "MQA_LOGITS", "REASON", "compress", "mqa_logits"]

_OP = "mqa_logits"


def mqa_logits(
    q: Tensor,
    kv: Tensor,
    weights: Tensor,
    ks: Tensor | None = None,
    ke: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    q_sf: Tensor | None = None,
    kv_sf: Tensor | None = None,
    scale: float = 1.0,
    max_seqlen_k: int = 0,
    clean: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Indexer scores of every key for every query.

    Args:
        q: [B, S, H, D], or [S, H, D] for B = 1 (then no operand and no result has the B dimension).
        kv: [B, T, D], the keys.
        weights: [B, S, H], f32, bf16 or f16 (f64 with f64 operands); head scales belong in here.
        ks, ke: [B, S] or [1, S], i32 or i64; ``None``: 0 and T.
        mask: [B or 1, S or 1, T]; bool (True takes part) or floating (added after the sum over heads).
        q_sf, kv_sf: f32 scales of fp8 or fp4 operands, [B, S, H, G] and [B, T, G], neither negative nor infinite.
        scale: multiplied to the products before the ReLU; finite.
        max_seqlen_k: 0 for dense output, else the number of columns of compressed output.
        clean: write -inf to what is excluded.
        out_dtype: floating; ``None``: f32 (f64 with f64 operands).

    Returns:
        [B, S, T] or [B, S, max_seqlen_k], with padded rows for fp8 on CUDA (see the module). Differentiable in q, kv
        and weights unless q or kv is fp8 or fp4, and in a floating mask; excluded keys get and give exactly zero
        gradient.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    if isinstance(q, Tensor) and q.dim() == 3:
        single = mqa_logits(
            q.unsqueeze(0),
            kv.unsqueeze(0),
            weights.unsqueeze(0),
            *map(_mqa.with_batch, (ks, ke, mask)),
            q_sf=_mqa.with_batch(q_sf),
            kv_sf=_mqa.with_batch(kv_sf),
            scale=scale,
            max_seqlen_k=max_seqlen_k,
            clean=clean,
            out_dtype=out_dtype,
        )
        return single.squeeze(0)
    out: Tensor = call(
        _OP,
        q,
        q_sf,
        kv,
        kv_sf,
        weights,
        ks,
        ke,
        mask,
        scale=scale,
        max_seqlen_k=max_seqlen_k,
        clean=clean,
        out_dtype=out_dtype,
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
    scale: float,
    max_seqlen_k: int,
    clean: bool,
    out_dtype: torch.dtype | None,
) -> None:
    _mqa.check_scale(_OP, scale)
    _mqa.check_operands(_OP, q, q_sf, kv, kv_sf, weights)
    _mqa.check_ranges(_OP, q, ks=ks, ke=ke)
    _mqa.check_mask(_OP, q, kv, mask)
    torch._check_value(max_seqlen_k >= 0, lambda: f"{_OP}: max_seqlen_k is {max_seqlen_k}; it must be 0 or positive.")
    if out_dtype is not None and out_dtype not in _check.FLOATING:
        raise TypeError(f"{_OP}: out_dtype is {out_dtype}; accepted: f32, bf16, f16, f64.")


def compress(q: Tensor, dense: Tensor, ks: Tensor | None, columns: int) -> Tensor:
    """Column c of the result is key ks + c of ``dense`` [B, S, T], -inf behind the last key."""
    keys = dense.shape[2]
    start, _ = _mqa.bounds(q, keys, ks, None)
    at = start.unsqueeze(-1) + torch.arange(columns, device=q.device)
    padded = torch.nn.functional.pad(dense, (0, 1), value=-torch.inf)
    return padded.gather(2, at.clamp(max=keys))


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
    scale: float,
    max_seqlen_k: int,
    clean: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    out = _mqa.scores(_mqa.dequantise(q, q_sf), _mqa.dequantise(kv, kv_sf), weights, scale)
    out = _mqa.add_mask(out, mask)
    hidden = _mqa.excluded(q, kv.shape[1], ks, ke, mask)
    if hidden is not None:
        out = out.masked_fill(hidden, -torch.inf)
    if max_seqlen_k:
        out = compress(q, out, ks, max_seqlen_k)
    out = out.to(out_dtype) if out_dtype is not None else out
    if logits_rows.padded(q.device.type, q.dtype, kv.dtype, max_seqlen_k, out_dtype):
        return logits_rows.empty_scores(q, kv, max_seqlen_k, out_dtype).copy_(out)
    return out


def _fake(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    max_seqlen_k: int,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> Tensor:
    return logits_rows.empty_scores(q, kv, max_seqlen_k, out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    q, _, kv, _, weights, ks, ke, mask = inputs
    ctx.save_for_backward(q, kv, weights, ks, ke, mask)
    ctx.attributes = keyword_only_inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, kv, weights, ks, ke, mask = ctx.saved_tensors
    if _mqa.is_quantised(q) or _mqa.is_quantised(kv):
        raise RuntimeError(f"{_OP} has no backward through fp8 or fp4 operands; pass q and kv in bf16 or f32 to train.")
    needs = ctx.needs_input_grad
    dq, dkv, dw, dmask = torch.ops.ascend_deep.mqa_logits_backward.default(
        grad,
        q,
        kv,
        weights,
        ks,
        ke,
        mask,
        scale=ctx.attributes["scale"],
        max_seqlen_k=ctx.attributes["max_seqlen_k"],
        output_mask=[needs[0], needs[2], needs[4], needs[7]],
    )
    return (
        dq if needs[0] else None,
        None,
        dkv if needs[2] else None,
        None,
        dw if needs[4] else None,
        None,
        None,
        dmask if needs[7] else None,
    )


def _autocast(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """Both matmuls of the eager form run in the autocast dtype; the sum over heads and the result stay in f32 here."""
    q, q_sf, kv, kv_sf, weights, *rest = args

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.dtype in (torch.float32, torch.bfloat16, torch.float16) else t

    return (cast(q), q_sf, cast(kv), kv_sf, cast(weights), *rest), kwargs


REASON = "f32 products and sums over D and then H terms, in any order; relative to the largest score of the call"

# Products of 32 terms and the running sum are aligned to the largest addend and cut off at 2^-13 of it, so each addend
# loses less than that: D + D/32 of them lose up to (D + D/32) 2^-13 of the largest partial sum, 1.6e-2 for D = 128, if
# all cuts go one way. In random products they do not: such sums, computed bit by bit, are off by 3e-4 of the largest
# product of the call, and scores, which are sums of them, by less.
FP8_ON_CUDA = Tolerance(
    3e-3, 3e-3, "fp8 tensor cores of SM90 sum with 14 bits; ten times what random products lose, a fifth of the bound"
)
"""For fp8 operands on CUDA, in place of the figure of the table, which is that of f32 sums (CPU and reference)."""

MQA_LOGITS = OpDef(
    name=_OP,
    schema=(
        "(Tensor q, Tensor? q_sf, Tensor kv, Tensor? kv_sf, Tensor weights, Tensor? ks, Tensor? ke, Tensor? mask, *, "
        "float scale, SymInt max_seqlen_k, bool clean, ScalarType? out_dtype) -> Tensor"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_autocast,
    tolerance={
        torch.float64: Tolerance(1e-12, 1e-13, REASON),
        torch.float32: Tolerance(1e-5, 1e-5, REASON),
        torch.bfloat16: Tolerance(1e-5, 1e-5, REASON + "; products of bf16 are exact in f32"),
        torch.float16: Tolerance(1e-5, 1e-5, REASON + "; products of f16 are exact in f32"),
        torch.float8_e4m3fn: Tolerance(1e-5, 1e-5, REASON + "; a kernel may apply scales after the product"),
        torch.int8: Tolerance(1e-5, 1e-5, REASON + "; a kernel may apply scales after the product"),
        torch.uint8: Tolerance(1e-5, 1e-5, REASON + "; a kernel may apply scales after the product"),
    },
    samples=logits_samples,
    tolerance_on={"cuda": {_mqa.FP8: FP8_ON_CUDA}},
    differentiable=("q", "kv", "weights", "mask"),
    debug=lambda q, q_sf, kv, kv_sf, *_, **__: _mqa.debug_scales(_OP, q_sf, kv_sf),
)
