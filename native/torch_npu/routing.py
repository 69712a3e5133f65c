"""``moe_route`` by the vendor's gating ops.

    npu_moe_gating_top_k             softmax or sigmoid, then bias, groups and choice; sigmoid is always renormalised
    npu_moe_gating_top_k_softmax_v2  choice by logits, softmax over the chosen

In graphs, choices that these ops do not make are written out in torch's own ops.
Where the vendor's weights are not those that are asked for, its normalised scores are read at the chosen ids and the
rest is done here. Logits go in as f32, so that the weights come out as f32. Ties: the vendor's documents name no rule;
ours is the lowest index, so this is one of the points to be looked at on hardware.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import MoeRoute
from ascend_deep.native.torch_npu import soc
from ascend_deep.native.torch_npu._call import Spec
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.soc import Target

__all__ = ["limits", "moe_route"]

_NORM = {"softmax": 0, "sigmoid": 1}


@takes(MoeRoute)
def moe_route(args: MoeRoute) -> tuple[Tensor, Tensor]:
    """As the op says."""
    x, bias = args.logits.to(torch.float32), args.bias
    target = soc.current()
    assert target is not None  # the limits refuse where there is none
    if target.graph and _vendor_refusal(target, args) is not None:
        weights, ids = _written_out(x, args)
        return _renormalised(weights, args).contiguous(), ids
    if args.select == "logits":
        weights, idx, _ = torch.ops.npu.npu_moe_gating_top_k_softmax_v2(x, k=int(args.topk), renorm=1)
        # The chosen weights already sum to one; what is left of renormalising is the epsilon.
        return _renormalised(weights, args), idx.to(torch.int64)
    direct = args.renorm == ("sum" if args.scoring == "sigmoid" else "none")
    weights, idx, scores = torch.ops.npu.npu_moe_gating_top_k(
        x,
        int(args.topk),
        bias=None if bias is None else bias.to(torch.float32),
        **_groups(args),
        renorm=0,
        norm_type=_NORM[args.scoring],
        out_flag=not direct,
        routed_scaling_factor=float(args.scale) if direct else 1.0,
        eps=float(args.eps) if direct else 0.0,
    )
    ids = idx.to(torch.int64)
    if not direct:
        weights = _renormalised(scores.gather(1, ids), args)
    return weights.contiguous(), ids


def _written_out(x: Tensor, args: MoeRoute) -> tuple[Tensor, Tensor]:
    """Weights before renormalising and ids, in ops that torchair converts; its topk, like torch's, breaks ties freely.

    ``x`` are the logits in f32. The op's own reference body sorts keys of bits, which the graph engine has no converter
    for.
    """
    by_logits, n_group = args.select == "logits", args.n_group
    scores = x if by_logits else _score(x, args.scoring)
    choice = scores if args.bias is None else scores + args.bias.to(torch.float32)
    choice = torch.where(choice == choice, choice, -torch.inf)  # NaN ranks last
    if n_group != 1:
        grouped = choice.view(x.shape[0], n_group, x.shape[1] // n_group)
        size = grouped.shape[2]
        top2 = args.group_score == "top2" and size >= 2
        score = grouped.topk(2, -1).values.sum(-1) if top2 else grouped.amax(-1)
        kept = torch.zeros_like(score).scatter(1, score.topk(int(args.topk_group), -1).indices, 1.0)
        fill = 0.0 if args.group_fill == "zero" else -torch.inf
        choice = torch.where(kept.unsqueeze(2) > 0, grouped, fill).view(x.shape)
    ids = choice.topk(int(args.topk), -1).indices
    weights = scores.gather(1, ids)
    return (_score(weights, args.scoring) if by_logits else weights), ids


def _score(x: Tensor, scoring: str) -> Tensor:
    return x.softmax(-1) if scoring == "softmax" else x.sigmoid()


def _groups(args: MoeRoute) -> dict[str, int]:
    if args.n_group == 1:
        return {"k_group": 1, "group_count": 1, "group_select_mode": 0}
    top2 = args.group_score == "top2"
    return {"k_group": int(args.topk_group), "group_count": int(args.n_group), "group_select_mode": int(top2)}


def _renormalised(weights: Tensor, args: MoeRoute) -> Tensor:
    if args.renorm == "sum":
        weights = weights / (weights.sum(-1, keepdim=True) + args.eps)
    elif args.renorm == "clamp":
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=args.eps)
    return weights if args.scale == 1.0 else weights * args.scale


@takes(MoeRoute)
def limits(target: Target, args: MoeRoute) -> str | None:
    """Why this provider does not compute this call of ``moe_route``; ``None`` if it does."""
    if args.logits.dtype == torch.float64:
        return "logits has dtype float64; the vendor's gating ops compute in float32."
    if args.scoring not in _NORM:
        return f"scoring is {args.scoring!r}; the vendor's gating ops have softmax and sigmoid."
    return None if target.graph else _vendor_refusal(target, args)  # in graphs, what the vendor lacks is written out


def _vendor_refusal(target: Target, args: MoeRoute) -> str | None:
    """Why no gating op of the vendor computes the choice; ``None`` if one does."""
    bias, grouped = args.bias, args.n_group != 1
    x = Spec(tuple(args.logits.shape), torch.float32)
    if args.select == "logits":
        if args.scoring != "softmax" or bias is not None or grouped:
            what = "a bias" if bias is not None else "groups" if grouped else args.scoring
            return f"the experts are chosen by logits, with {what}; the vendor's op for that has softmax alone."
        return refusal("npu_moe_gating_top_k_softmax_v2", target, x, k=args.topk, renorm=1)
    if args.group_fill == "zero" and grouped and args.topk_group != args.n_group:
        return "group_fill is 'zero'; the vendor's op never chooses from a group that was not kept."
    extra: dict[str, Any] = {} if bias is None else {"bias": Spec(tuple(bias.shape), torch.float32)}
    how = {"norm_type": _NORM[args.scoring], **_groups(args), **extra}
    return refusal("npu_moe_gating_top_k", target, x, args.topk, **how)
