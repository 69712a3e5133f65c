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

from ascend_deep.native.torch_npu import soc
from ascend_deep.native.torch_npu._call import Spec
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.soc import Target

__all__ = ["limits", "moe_route"]

_NORM = {"softmax": 0, "sigmoid": 1}


def moe_route(
    logits: Tensor,
    bias: Tensor | None,
    *,
    topk: int,
    scoring: str,
    select: str,
    renorm: str,
    eps: float,
    scale: float,
    n_group: int,
    topk_group: int,
    group_score: str,
    group_fill: str,
) -> tuple[Tensor, Tensor]:
    """As the op says; the schema's arguments."""
    x = logits.to(torch.float32)
    target = soc.current()
    assert target is not None  # the limits refuse where there is none
    attributes = (topk, scoring, select, n_group, topk_group, group_score, group_fill)
    if target.graph and _vendor_refusal(target, x, bias, *attributes) is not None:
        weights, ids = _written_out(x, bias, *attributes)
        return _renormalised(weights, renorm, eps, scale).contiguous(), ids
    if select == "logits":
        weights, idx, _ = torch.ops.npu.npu_moe_gating_top_k_softmax_v2(x, k=int(topk), renorm=1)
        # The chosen weights already sum to one; what is left of renormalising is the epsilon.
        return _renormalised(weights, renorm, eps, scale), idx.to(torch.int64)
    direct = renorm == ("sum" if scoring == "sigmoid" else "none")
    weights, idx, scores = torch.ops.npu.npu_moe_gating_top_k(
        x,
        int(topk),
        bias=None if bias is None else bias.to(torch.float32),
        **_groups(n_group, topk_group, group_score),
        renorm=0,
        norm_type=_NORM[scoring],
        out_flag=not direct,
        routed_scaling_factor=float(scale) if direct else 1.0,
        eps=float(eps) if direct else 0.0,
    )
    ids = idx.to(torch.int64)
    if not direct:
        weights = _renormalised(scores.gather(1, ids), renorm, eps, scale)
    return weights.contiguous(), ids


def _written_out(
    x: Tensor,
    bias: Tensor | None,
    topk: int,
    scoring: str,
    select: str,
    n_group: int,
    topk_group: int,
    group_score: str,
    group_fill: str,
) -> tuple[Tensor, Tensor]:
    """Weights before renormalising and ids, in ops that torchair converts; its topk, like torch's, breaks ties freely.

    The op's own reference body sorts keys of bits, which the graph engine has no converter for.
    """
    scores = x if select == "logits" else _score(x, scoring)
    choice = scores if bias is None else scores + bias.to(torch.float32)
    choice = torch.where(choice == choice, choice, -torch.inf)  # NaN ranks last
    if n_group != 1:
        grouped = choice.view(x.shape[0], n_group, x.shape[1] // n_group)
        size = grouped.shape[2]
        top2 = group_score == "top2" and size >= 2
        score = grouped.topk(2, -1).values.sum(-1) if top2 else grouped.amax(-1)
        kept = torch.zeros_like(score).scatter(1, score.topk(int(topk_group), -1).indices, 1.0)
        fill = 0.0 if group_fill == "zero" else -torch.inf
        choice = torch.where(kept.unsqueeze(2) > 0, grouped, fill).view(x.shape)
    ids = choice.topk(int(topk), -1).indices
    weights = scores.gather(1, ids)
    return (_score(weights, scoring) if select == "logits" else weights), ids


def _score(x: Tensor, scoring: str) -> Tensor:
    return x.softmax(-1) if scoring == "softmax" else x.sigmoid()


def _groups(n_group: int, topk_group: int, group_score: str) -> dict[str, int]:
    if n_group == 1:
        return {"k_group": 1, "group_count": 1, "group_select_mode": 0}
    return {"k_group": int(topk_group), "group_count": int(n_group), "group_select_mode": int(group_score == "top2")}


def _renormalised(weights: Tensor, renorm: str, eps: float, scale: float) -> Tensor:
    if renorm == "sum":
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    elif renorm == "clamp":
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=eps)
    return weights if scale == 1.0 else weights * scale


def limits(
    target: Target,
    logits: Tensor,
    bias: Tensor | None,
    *,
    topk: int,
    scoring: str,
    select: str,
    renorm: str,
    eps: float,
    scale: float,
    n_group: int,
    topk_group: int,
    group_score: str,
    group_fill: str,
) -> str | None:
    """Why this provider does not compute this call of ``moe_route``; ``None`` if it does."""
    if logits.dtype == torch.float64:
        return "logits has dtype float64; the vendor's gating ops compute in float32."
    if scoring not in _NORM:
        return f"scoring is {scoring!r}; the vendor's gating ops have softmax and sigmoid."
    if target.graph:
        return None  # what the vendor's op does not compute is written out
    return _vendor_refusal(target, logits, bias, topk, scoring, select, n_group, topk_group, group_score, group_fill)


def _vendor_refusal(
    target: Target,
    logits: Tensor,
    bias: Tensor | None,
    topk: int,
    scoring: str,
    select: str,
    n_group: int,
    topk_group: int,
    group_score: str,
    group_fill: str,
) -> str | None:
    """Why no gating op of the vendor computes the choice; ``None`` if one does."""
    x = Spec(tuple(logits.shape), torch.float32)
    if select == "logits":
        if scoring != "softmax" or bias is not None or n_group != 1:
            what = "a bias" if bias is not None else "groups" if n_group != 1 else scoring
            return f"the experts are chosen by logits, with {what}; the vendor's op for that has softmax alone."
        return refusal("npu_moe_gating_top_k_softmax_v2", target, x, k=topk, renorm=1)
    if group_fill == "zero" and n_group != 1 and topk_group != n_group:
        return "group_fill is 'zero'; the vendor's op never chooses from a group that was not kept."
    extra: dict[str, Any] = {} if bias is None else {"bias": Spec(tuple(bias.shape), torch.float32)}
    groups = _groups(n_group, topk_group, group_score)
    return refusal("npu_moe_gating_top_k", target, x, topk, norm_type=_NORM[scoring], **groups, **extra)
