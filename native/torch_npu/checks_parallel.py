"""Calls of the vendor's expert-parallel ops, dispatch, combine and products: their limits, per processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ascend_deep.native.torch_npu._call import Call, Spec, T, known

__all__ = ["CHECKS"]


def _common(
    c: Call,
    rows: T,
    expert_ids: T,
    ranks: int,
    rank: int,
    experts: int,
    shared_ranks: int,
    mask: T | None,
    global_bs: int,
) -> None:
    """What both ops ask: of the group, the experts, the tokens of a rank and their choices."""
    c.rank("expert_ids", expert_ids, 2)
    c.within("dtypes", rows.dtype, "the rows")
    c.dtype("expert_ids", expert_ids, torch.int32)
    c.within("ranks", ranks, "ep_world_size")
    c.need(0 <= rank < ranks, f"takes a rank below {ranks}, not {rank}")
    routed = ranks - shared_ranks
    c.need(routed >= 1, f"needs ranks for routed experts, and all {ranks} hold shared ones")
    c.need(experts >= 1 and experts % routed == 0, f"takes experts that divide over the {routed} ranks, not {experts}")
    c.at_most("experts_max", experts, "moe_expert_num")
    c.at_most("local_experts_max", experts // routed, "the experts of a rank")
    hidden = rows.shape[1]
    c.at_least("hidden_min", hidden, "the columns of the rows")
    c.at_most("hidden_max", hidden, "the columns of the rows")
    multiple = c.row("hidden_multiple")
    if multiple is not None and known(hidden):
        ok = hidden % multiple.value == 0
        c.need(ok, f"takes columns in multiples of {multiple.value}, not {hidden}", multiple.source)
    tokens, topk = expert_ids.shape
    c.need(not known(tokens) or tokens >= 1, "takes at least one token")
    c.at_most("tokens_max", tokens, "the tokens of a rank")
    c.need(not known(topk) or 1 <= topk <= experts, f"takes 1 to {experts} choices of a token, not {topk}")
    c.at_most("topk_max", topk, "the choices of a token")
    if mask is not None:
        c.dtype("x_active_mask", mask, torch.bool)
        c.within("mask_dims", len(mask.shape), "the dimensions of x_active_mask")
        c.same("the rows of x_active_mask", mask.shape[0], "the tokens", tokens)
        if len(mask.shape) == 2:
            c.same("the columns of x_active_mask", mask.shape[1], "the choices", topk)
    ok = global_bs == 0 or (global_bs % ranks == 0 and (not known(tokens) or global_bs // ranks >= tokens))
    c.need(ok, f"takes 0 or {ranks} times the most tokens of a rank for global_bs, not {global_bs}")


def _dispatch_v2(
    c: Call,
    x: T,
    expert_ids: T,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: T | None = None,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    **_: Any,
) -> None:
    c.rank("x", x, 2)
    _common(
        c, x, expert_ids, ep_world_size, ep_rank_id, moe_expert_num, shared_expert_rank_num, x_active_mask, global_bs
    )  # fmt: skip
    c.same("the rows of expert_ids", expert_ids.shape[0], "the rows of x", x.shape[0])
    c.need(1 <= len(group_ep) < 128, f"takes group names of 1 to 127 characters, not {len(group_ep)}")
    c.need(quant_mode == 0, f"is used without quantisation here, not with mode {quant_mode}")
    c.need(expert_token_nums_type in (0, 1), f"takes 0 or 1 for expert_token_nums_type, not {expert_token_nums_type}")


def _combine_v2(
    c: Call,
    expand_x: T,
    expert_ids: T,
    assist_info_for_combine: T,
    ep_send_counts: T,
    expert_scales: T,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: T | None = None,
    expand_scales: T | None = None,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    **_: Any,
) -> None:
    c.rank("expand_x", expand_x, 2)
    _common(
        c, expand_x, expert_ids, ep_world_size, ep_rank_id, moe_expert_num, shared_expert_rank_num, x_active_mask,
        global_bs,
    )  # fmt: skip
    for name, tensor in (("assist_info_for_combine", assist_info_for_combine), ("ep_send_counts", ep_send_counts)):
        c.rank(name, tensor, 1)
        c.dtype(name, tensor, torch.int32)
    c.dtype("expert_scales", expert_scales, torch.float32)
    c.rank("expert_scales", expert_scales, 2)
    c.same("the rows of expert_scales", expert_scales.shape[0], "the tokens", expert_ids.shape[0])
    c.same("the columns of expert_scales", expert_scales.shape[1], "the choices", expert_ids.shape[1])
    rows, info = expand_x.shape[0], assist_info_for_combine.shape[0]
    if known(rows) and known(info):
        c.need(info >= 128 * rows, f"takes 128 numbers of assist_info_for_combine for a row, not {info} for {rows}")
    if expand_scales is not None:
        c.rank("expand_scales", expand_scales, 1)
        c.dtype("expand_scales", expand_scales, torch.float32)
        c.same("the length of expand_scales", expand_scales.shape[0], "the rows of expand_x", rows)
    needs = c.row("needs_expand_scales")
    if needs is not None and expand_scales is None:
        c.refuse("needs the expand_scales of its dispatch", needs.source)
    c.need(1 <= len(group_ep) < 128, f"takes group names of 1 to 127 characters, not {len(group_ep)}")
    c.need(comm_quant_mode == 0, f"is used without quantisation here, not with mode {comm_quant_mode}")


def _product(
    c: Call, x: T, weight: T, hcom: str, ranks: int, sent: list[int], received: list[int], transposed: bool, moved: T
) -> None:
    """What both fused products ask; ``moved`` [.., columns] are the rows that travel."""
    c.rank("gmm_x", x, 2)
    c.rank("gmm_weight", weight, 3)
    c.within("dtypes", x.dtype, "gmm_x")
    c.dtype("gmm_weight", weight, x.dtype)
    c.contiguous("gmm_x", x)
    local, inner, outer = weight.shape[0], weight.shape[2 if transposed else 1], weight.shape[1 if transposed else 2]
    c.same("the inner size of gmm_weight", inner, "the columns of gmm_x", x.shape[1])
    for name, size in (("the inner size", inner), ("the columns of the result", outer)):
        c.need(not known(size) or size >= 1, f"takes at least 1 for {name}, not {size}")
        c.at_most("columns_max", size, name)
    c.need(1 <= len(hcom) < 128, f"takes group names of 1 to 127 characters, not {len(hcom)}")
    c.within("ranks", ranks, "ep_world_size")
    c.at_most("local_experts_max", local, "the experts of a rank")
    c.at_most("counts_max", len(sent), "the numbers of send_counts")
    for name, counts in (("send_counts", sent), ("recv_counts", received)):
        c.same(f"the length of {name}", len(counts), "the experts of all ranks", local * ranks)
        if not all(map(known, counts)):
            continue
        c.need(min(counts) >= 0, f"takes numbers from 0 on for {name}, not {min(counts)}")
        c.at_least("rows_min", sum(counts), f"the sum of {name}")
        c.at_most("rows_max", sum(counts), f"the sum of {name}")
        c.at_least("bytes_min", sum(counts) * moved.shape[1] * moved.dtype.itemsize, f"the bytes that {name} move")
    c.same("the rows of gmm_x", x.shape[0], "the sum of send_counts", sum(sent))


def _alltoallv_gmm(
    c: Call,
    gmm_x: T,
    gmm_weight: T,
    hcom: str,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    *,
    trans_gmm_weight: bool = False,
    permute_out_flag: bool = False,
    comm_mode: str | None = None,
    **_: Any,
) -> None:
    _product(c, gmm_x, gmm_weight, hcom, ep_world_size, send_counts, recv_counts, trans_gmm_weight, gmm_x)


def _gmm_alltoallv(
    c: Call,
    gmm_x: T,
    gmm_weight: T,
    hcom: str,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    *,
    trans_gmm_weight: bool = False,
    comm_mode: str | None = None,
    **_: Any,
) -> None:
    c.rank("gmm_weight", gmm_weight, 3)
    moved = Spec((0, gmm_weight.shape[1 if trans_gmm_weight else 2]), gmm_x.dtype)
    _product(c, gmm_x, gmm_weight, hcom, ep_world_size, send_counts, recv_counts, trans_gmm_weight, moved)


CHECKS: Mapping[str, Callable[..., None]] = {
    "npu_moe_distribute_dispatch_v2": _dispatch_v2,
    "npu_moe_distribute_combine_v2": _combine_v2,
    "npu_alltoallv_gmm": _alltoallv_gmm,
    "npu_gmm_alltoallv": _gmm_alltoallv,
}
