"""Calls of the MoE and expert-parallel ops, each as one value; see ``native/calls.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "AlltoallvGmm",
    "EpCombine",
    "EpDispatch",
    "EpDispatchCached",
    "LlCombine",
    "LlDispatch",
    "MoeExperts",
    "MoeExpertsBackward",
    "MoePermute",
    "MoeRoute",
    "SwigluQuant",
]


class MoeRoute(NamedTuple):
    """A call of ``moe_route``."""

    logits: Tensor
    bias: Tensor | None
    topk: int
    scoring: str
    select: str
    renorm: str
    eps: float
    scale: float
    n_group: int
    topk_group: int
    group_score: str
    group_fill: str


class MoePermute(NamedTuple):
    """A call of ``moe_permute``."""

    x: Tensor
    x_sf: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    num_experts: int
    expert_offset: int
    alignment: int


class SwigluQuant(NamedTuple):
    """A call of ``swiglu_quant``."""

    h: Tensor
    row_weight: Tensor | None
    act: str
    alpha: float
    limit: float | None
    interleaved: bool
    gran_k: int
    ue8m0: bool
    sf_format: str


class MoeExperts(NamedTuple):
    """A call of ``moe_experts``."""

    x: Tensor
    idx: Tensor
    weights: Tensor
    w13: Tensor
    b13: Tensor | None
    w2: Tensor
    b2: Tensor | None
    w3: Tensor | None
    act: str
    alpha: float
    limit: float | None
    interleaved: bool
    weight_layout: str
    weight_on_input: bool
    expert_offset: int
    out_dtype: torch.dtype | None


class MoeExpertsBackward(NamedTuple):
    """A call of ``moe_experts_backward``."""

    grad: Tensor
    x: Tensor
    idx: Tensor
    weights: Tensor
    w13: Tensor
    b13: Tensor | None
    w2: Tensor
    b2: Tensor | None
    w3: Tensor | None
    act: str
    alpha: float
    limit: float | None
    interleaved: bool
    weight_layout: str
    weight_on_input: bool
    expert_offset: int
    output_mask: list[bool]


class EpDispatch(NamedTuple):
    """A call of ``ep_dispatch``."""

    x: Tensor
    x_sf: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    num_experts: int
    max_tokens_per_rank: int
    expert_alignment: int
    expand: bool
    cpu_sync: bool
    group_size: int
    group: str


class EpDispatchCached(NamedTuple):
    """A call of ``ep_dispatch_cached``."""

    x: Tensor
    x_sf: Tensor | None
    topk_weights: Tensor | None
    topk_idx: Tensor
    psum_rank: Tensor
    psum_expert: Tensor
    src_meta: Tensor
    dst_slot: Tensor
    aux: Tensor
    splits: Tensor
    num_experts: int
    max_tokens_per_rank: int
    num_recv: int
    expand: bool
    cpu_sync: bool
    group_size: int
    group: str


class EpCombine(NamedTuple):
    """A call of ``ep_combine``."""

    y: Tensor
    topk_weights: Tensor | None
    bias0: Tensor | None
    bias1: Tensor | None
    topk_idx: Tensor
    psum_rank: Tensor
    psum_expert: Tensor
    src_meta: Tensor
    dst_slot: Tensor
    aux: Tensor
    splits: Tensor
    num_experts: int
    max_tokens_per_rank: int
    expand: bool
    cpu_sync: bool
    group_size: int
    group: str


class LlDispatch(NamedTuple):
    """A call of ``ll_dispatch``."""

    x: Tensor
    topk_idx: Tensor
    max_tokens_per_rank: int
    num_experts: int
    quant: str
    layout: str
    group_size: int
    group: str


class LlCombine(NamedTuple):
    """A call of ``ll_combine``."""

    y: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    src_info: Tensor
    layout_range: Tensor
    aux: Tensor
    max_tokens_per_rank: int
    num_experts: int
    layout: str
    group_size: int
    group: str


class AlltoallvGmm(NamedTuple):
    """A call of ``alltoallv_gmm`` or ``gmm_alltoallv``."""

    x: Tensor
    weight: Tensor | None
    send_counts: Sequence[int]
    recv_counts: Sequence[int]
    least_rows: int
    layout: str
    group_size: int
    group: str
