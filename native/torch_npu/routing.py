"""``moe_route`` by the vendor's gating ops.

    npu_moe_gating_top_k             softmax or sigmoid, then bias, groups and choice; sigmoid is always renormalised
    npu_moe_gating_top_k_softmax_v2  choice by logits, softmax over the chosen; in graphs torch's own topk and softmax

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
    if select == "logits":
        if _in_graph():
            values, idx = x.topk(int(topk), -1)
            weights = values.softmax(-1)
        else:
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


def _in_graph() -> bool:
    """True where torchair converts the call: it cannot convert the vendor's op for a choice by logits."""
    target = soc.current()
    return target is not None and target.graph


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
    """Why the vendor's ops do not compute this call of ``moe_route``; ``None`` if they do."""
    if logits.dtype == torch.float64:
        return "logits has dtype float64; the vendor's gating ops compute in float32."
    if scoring not in _NORM:
        return f"scoring is {scoring!r}; the vendor's gating ops have softmax and sigmoid."
    x = Spec(tuple(logits.shape), torch.float32)
    if select == "logits":
        if scoring != "softmax" or bias is not None or n_group != 1:
            what = "a bias" if bias is not None else "groups" if n_group != 1 else scoring
            return f"the experts are chosen by logits, with {what}; the vendor's op for that has softmax alone."
        return None if target.graph else refusal("npu_moe_gating_top_k_softmax_v2", target, x, k=topk, renorm=1)
    if group_fill == "zero" and n_group != 1 and topk_group != n_group:
        return "group_fill is 'zero'; the vendor's op never chooses from a group that was not kept."
    extra: dict[str, Any] = {} if bias is None else {"bias": Spec(tuple(bias.shape), torch.float32)}
    groups = _groups(n_group, topk_group, group_score)
    return refusal("npu_moe_gating_top_k", target, x, topk, norm_type=_NORM[scoring], **groups, **extra)
