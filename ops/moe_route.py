"""``moe_route``: router logits to expert ids and routing weights.

    score  = scoring(logits)                                  softmax over experts, sigmoid, or sqrt(softplus)
    choice = (score or logits, see ``select``) + bias         the bias takes part in the choice only
    idx    = the topk largest of choice, within the topk_group best of n_group groups of consecutive experts
    w      = score[idx]   |   scoring applied to logits[idx]
    w      = w / (sum w + eps)   |   w / max(sum w, eps)   |   w,   then times scale, once

Rules that callers may rely on (``torch.topk`` gives none of them):

* Ties go to the lowest index, for experts and for groups; -0.0 equals 0.0. ``idx`` is ordered by descending choice
  score, ties by ascending index.
* The ids of a row are distinct and in [0, E), whatever the logits: a NaN choice score ranks below every number, -inf
  included. With ``group_fill="neg_inf"`` experts of groups that were not kept rank below everything else,
  among themselves by index.
* Inside a group score a NaN counts as -inf. A group whose score is NaN all the same (inf - inf) ranks last.
* Weights are computed without cleaning: a NaN logit makes the softmax of its row NaN; with elementwise scoring a NaN
  reaches the weights only if its expert had to be chosen, or through the sum.

Arithmetic is in f32 (f64 for f64 logits); bf16 and f16 logits are converted first, exactly. The weights are f32 (f64).
Contract: the families of Hugging Face routers (softmax before or after top-k, DeepSeek-V2/V3/V4, Ernie 4.5, Llama-4,
GPT-OSS) and the gate of DeepGEMM, which is ``sqrtsoftplus`` with a bias, ``renorm="sum"`` and eps 1e-20.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import MoeRoute
from ascend_deep.ops import _check
from ascend_deep.ops._moe_route_samples import GROUP_FILLS, GROUP_SCORES, RENORMS, SCORINGS, SELECTS, samples
from ascend_deep.ops._op import OpDef, Tolerance

__all__ = ["MOE_ROUTE", "moe_route"]

_OP = "moe_route"


def moe_route(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    topk: int,
    scoring: str = "softmax",
    select: str = "scores",
    renorm: str = "none",
    eps: float = 0.0,
    scale: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
    group_score: str = "top2",
    group_fill: str = "neg_inf",
) -> tuple[Tensor, Tensor]:
    """Choose ``topk`` experts per token and weigh them; see the module for ties and NaN.

    Args:
        logits: [T, E], f32, bf16, f16 or f64.
        bias: [E], floating, added for the choice only; ``None``: no bias. Gets no gradient.
        topk: experts per token, 1 <= topk <= E.
        scoring: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        select: ``"scores"`` chooses by score + bias and gathers the scores; ``"logits"`` chooses by logits + bias and
            scores the chosen logits (softmax over the topk chosen).
        renorm: ``"none"``, ``"sum"`` (w / (sum + eps)) or ``"clamp"`` (w / max(sum, eps)).
        eps: the epsilon of ``renorm``.
        scale: multiplied once, after ``renorm``.
        n_group, topk_group: experts in ``n_group`` equal groups, of which the best ``topk_group`` are kept.
        group_score: a group's score is the sum of its two largest choice scores (``"top2"``; of a group of one
            expert, that one) or its largest (``"max"``).
        group_fill: choice scores of the other groups become -inf (``"neg_inf"``) or 0 (``"zero"``).

    Returns:
        weights [T, topk] f32 (f64 for f64 logits) and idx [T, topk] i64. The gradient of weights goes to logits,
        and can be differentiated again; idx has none.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return torch.ops.ascend_deep.moe_route.default(
        logits,
        bias,
        topk=topk,
        scoring=scoring,
        select=select,
        renorm=renorm,
        eps=eps,
        scale=scale,
        n_group=n_group,
        topk_group=topk_group,
        group_score=group_score,
        group_fill=group_fill,
    )


@takes(MoeRoute)
def _check_args(args: MoeRoute) -> None:
    logits, bias, topk, n_group, topk_group = args.logits, args.bias, args.topk, args.n_group, args.topk_group
    _check.dtypes(_OP, "logits", logits, _check.FLOATING)
    _check.rank(_OP, "logits", logits, "[T, E]", 2)
    _check.choice(_OP, "scoring", args.scoring, SCORINGS)
    _check.choice(_OP, "select", args.select, SELECTS)
    _check.choice(_OP, "renorm", args.renorm, RENORMS)
    _check.choice(_OP, "group_score", args.group_score, GROUP_SCORES)
    _check.choice(_OP, "group_fill", args.group_fill, GROUP_FILLS)
    experts = logits.shape[1]
    torch._check_value(topk >= 1, lambda: f"{_OP}: topk is {topk}; it must be at least 1.")
    torch._check_value(topk <= experts, lambda: f"{_OP}: topk is {topk}, but logits have only {experts} experts.")
    if n_group != 1:
        torch._check_value(
            n_group >= 1 and experts % n_group == 0,
            lambda: f"{_OP}: n_group is {n_group}; it must divide the {experts} experts of logits.",
        )
        torch._check_value(
            1 <= topk_group <= n_group,
            lambda: f"{_OP}: topk_group is {topk_group}; it must be between 1 and n_group, which is {n_group}.",
        )
    if bias is not None:
        _check.dtypes(_OP, "bias", bias, _check.FLOATING)
        _check.rank(_OP, "bias", bias, "[E]", 1)
        _check.size(_OP, "the size of bias", bias.shape[0], experts, "the number of experts of logits")
        _check.same_device(_OP, "logits", logits, bias=bias)


def _score(logits: Tensor, scoring: str) -> Tensor:
    if scoring == "softmax":
        return logits.softmax(-1)
    if scoring == "sigmoid":
        return logits.sigmoid()
    return torch.nn.functional.softplus(logits).sqrt()


def _d_score(logits: Tensor, scoring: str) -> Tensor:
    """Derivative of the elementwise scorings."""
    s = logits.sigmoid()
    if scoring == "sigmoid":
        return s * (1 - s)
    root = torch.nn.functional.softplus(logits).sqrt()
    # softplus(x) underflows with its root at x < -103, where the derivative exp(x/2)/2 is 0 to f32 precision as well.
    return torch.where(root > 0, 0.5 * s / torch.where(root > 0, root, 1.0), 0.0)


def _order_key(values: Tensor) -> Tensor:
    """Integers in the order of the f32 or f64 ``values``, NaN below all: i64, from -2^31 + 1 on for f32."""
    bits_dtype, low = (torch.int64, -(2**63)) if values.dtype == torch.float64 else (torch.int32, -(2**31))
    # + 0.0 turns -0.0 into 0.0. Negative floats order backwards by their bits: flip all but the sign.
    bits = (values + 0.0).view(bits_dtype)
    key = torch.where(bits < 0, bits ^ (-low - 1), bits)
    return torch.where(values.isnan(), low + 1, key).to(torch.int64)


def _topk(values: Tensor, k: int, last: Tensor | None = None) -> Tensor:
    """Indices of the k largest along the last dim, descending, ties to the lowest index; ``last`` ranks below NaN."""
    key = _order_key(values)
    if values.dtype == torch.float64:
        if last is not None:
            key = key.masked_fill(last, -(2**63))
        return key.argsort(dim=-1, descending=True, stable=True).narrow(-1, 0, k).contiguous()
    if last is not None:
        key = key.masked_fill(last, -(2**31))
    # Key and index in one integer: all different, so torch.topk, which promises nothing about ties, meets none.
    size = values.shape[-1]
    position = torch.arange(size - 1, -1, -1, device=values.device)
    return ((key << 32) | position).topk(k, -1).indices


def _dropped(choice: Tensor, n_group: int, topk_group: int, group_score: str) -> Tensor:
    """Mask [T, E] of the experts whose group was not kept."""
    grouped = choice.unflatten(-1, (n_group, -1))
    grouped = torch.where(grouped.isnan(), -torch.inf, grouped)
    size = grouped.shape[-1]
    top2 = group_score == "top2" and size >= 2
    score = grouped.topk(2, -1).values.sum(-1) if top2 else grouped.amax(-1)
    dropped = torch.ones_like(score, dtype=torch.bool)
    dropped.scatter_(-1, _topk(score, topk_group), False)
    return dropped.repeat_interleave(size, -1)


@takes(MoeRoute)
def _reference(args: MoeRoute) -> tuple[Tensor, Tensor]:
    logits = args.logits.to(_check.compute_dtype(args.logits.dtype))
    scores = _score(logits, args.scoring) if args.select == "scores" else logits
    choice = scores if args.bias is None else scores + args.bias.to(scores.dtype)
    last = None
    if args.n_group != 1:
        dropped = _dropped(choice, args.n_group, args.topk_group, args.group_score)
        if args.group_fill == "zero":
            choice = choice.masked_fill(dropped, 0.0)
        else:
            last = dropped
    idx = _topk(choice, args.topk, last)
    weights = scores.gather(-1, idx)
    if args.select == "logits":
        weights = _score(weights, args.scoring)
    if args.renorm == "sum":
        weights = weights / (weights.sum(-1, keepdim=True) + args.eps)
    elif args.renorm == "clamp":
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=args.eps)
    return (weights * args.scale).contiguous(), idx


def _fake(logits: Tensor, bias: Tensor | None, *, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], topk)
    return logits.new_empty(shape, dtype=_check.compute_dtype(logits.dtype)), logits.new_empty(shape, dtype=torch.int64)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    _, idx = output
    ctx.mark_non_differentiable(idx)
    ctx.save_for_backward(inputs[0], idx)
    ctx.attributes = keyword_only_inputs


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, None]:
    """Plain torch, so that the compiler fuses it and autograd can differentiate it again."""
    logits, idx = ctx.saved_tensors
    a = ctx.attributes
    x = logits.to(_check.compute_dtype(logits.dtype))
    grad = grad.contiguous() * a["scale"]
    softmax = a["scoring"] == "softmax"
    probabilities = x.softmax(-1) if softmax and a["select"] == "scores" else None
    chosen = x.gather(-1, idx)
    scores = _score(chosen, a["scoring"]) if probabilities is None else probabilities.gather(-1, idx)

    if a["renorm"] != "none":
        total = scores.sum(-1, keepdim=True)
        inside = total >= a["eps"] if a["renorm"] == "clamp" else None
        divisor = total + a["eps"] if inside is None else total.clamp(min=a["eps"])
        through_sum = (grad * scores).sum(-1, keepdim=True) / divisor
        if inside is not None:
            through_sum = torch.where(inside, through_sum, 0.0)
        grad = (grad - through_sum) / divisor
    if not softmax:
        d_chosen = grad * _d_score(chosen, a["scoring"])
    else:
        d_chosen = scores * (grad - (grad * scores).sum(-1, keepdim=True)) if probabilities is None else grad * scores
    d_logits = torch.zeros_like(x).scatter(-1, idx, d_chosen)
    if probabilities is not None:
        d_logits = d_logits - probabilities * d_chosen.sum(-1, keepdim=True)
    return d_logits.to(logits.dtype), None


_REASON = "f32 exp, log and one sum over at most E terms, in any order"

MOE_ROUTE = OpDef(
    name=_OP,
    schema=(
        "(Tensor logits, Tensor? bias, *, SymInt topk, str scoring, str select, str renorm, float eps, float scale, "
        "SymInt n_group, SymInt topk_group, str group_score, str group_fill) -> (Tensor, Tensor)"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    tolerance={
        torch.float64: Tolerance(1e-12, 1e-15, _REASON),
        torch.float32: Tolerance(1e-5, 1e-7, _REASON),
        torch.bfloat16: Tolerance(1e-5, 1e-7, _REASON + "; bf16 logits are converted exactly and the result is f32"),
        torch.float16: Tolerance(1e-5, 1e-7, _REASON + "; f16 logits are converted exactly and the result is f32"),
    },
    samples=samples,
    differentiable=("logits",),
)
