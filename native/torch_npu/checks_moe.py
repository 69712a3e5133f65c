"""Calls of the vendor's MoE, matmul and activation ops: one function per op, with the vendor's own signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ascend_deep.native.torch_npu._call import Call, T, known, listed, named, transposed

__all__ = ["CHECKS"]


def _moe_gating_top_k(
    c: Call,
    x: T,
    k: int,
    *,
    bias: T | None = None,
    input_ids: T | None = None,
    tid2eid: T | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> None:
    c.rank("x", x, 2)
    c.within("dtypes", x.dtype, "x")
    experts = x.shape[1]
    c.at_most("experts_max", experts, "the number of experts")
    if bias is not None:
        c.rank("bias", bias, 1)
        c.same("bias", bias.shape[0], "the experts of x", experts)
        c.dtype("bias", bias, x.dtype)
    c.need(input_ids is None and tid2eid is None, "is used without its hash mode here")
    c.within("group_select_mode", group_select_mode, "group_select_mode")
    c.within("renorm", renorm, "renorm")
    c.within("norm_type", norm_type, "norm_type")
    c.need(k >= 1, f"takes k from 1 on, not {k}")
    c.need(1 <= k_group <= group_count, f"takes k_group from 1 to group_count, not {k_group} of {group_count}")
    if known(experts):
        c.need(experts % group_count == 0, f"takes a group_count that divides the {experts} experts, not {group_count}")
        size = experts // group_count
        c.at_least("group_size_min", size, "the number of experts in a group")
        c.at_most(
            "aligned_experts_max",
            -(-size // 32) * 32 * group_count,
            "the number of experts with each group rounded up to a multiple of 32",
        )
        c.need(k <= size * k_group, f"takes k up to the {size * k_group} experts of the kept groups, not {k}")


def _moe_gating_top_k_softmax_v2(
    c: Call,
    x: T,
    *,
    k: int = 1,
    finished: T | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> None:
    c.rank("x", x, 2, 3)
    c.within("dtypes", x.dtype, "x")
    c.at_most("k_max", k, "k")
    c.within("renorm", renorm, "renorm")
    experts = x.shape[-1]
    c.need(k >= 1 and (not known(experts) or k <= experts), f"takes k from 1 to the {experts} experts, not {k}")


def _moe_init_routing_v2(
    c: Call,
    x: T,
    expert_idx: T,
    *,
    scale: T | None = None,
    offset: T | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> None:
    c.rank("x", x, 2)
    c.rank("expert_idx", expert_idx, 2)
    c.within("dtypes", x.dtype, "x")
    c.dtype("expert_idx", expert_idx, torch.int32)
    c.same("the rows of expert_idx", expert_idx.shape[0], "the rows of x", x.shape[0])
    c.need(expert_num >= 1, f"takes expert_num from 1 on, not {expert_num}")
    c.at_most("experts_max", expert_num, "expert_num")
    c.within("drop_pad_mode", drop_pad_mode, "drop_pad_mode")
    c.within("tokens_num_type", expert_tokens_num_type, "expert_tokens_num_type")
    c.within("tokens_num_flag", expert_tokens_num_flag, "expert_tokens_num_flag")
    c.within("quant_mode", quant_mode, "quant_mode")
    c.within("row_idx_type", row_idx_type, "row_idx_type")
    if len(active_expert_range):
        first, last = active_expert_range
        ok = 0 <= first < last <= expert_num
        c.need(ok, f"takes an active_expert_range inside [0, {expert_num}], not [{first}, {last}]")


def _moe_finalize_routing(
    c: Call,
    expanded_permuted_rows: T,
    skip1: T | None,
    skip2: T | None,
    bias: T | None,
    scales: T | None,
    expanded_src_to_dst_row: T,
    export_for_source_row: T | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> None:
    rows_ = expanded_permuted_rows
    c.within("drop_pad_mode", drop_pad_mode, "drop_pad_mode")
    c.rank("expanded_permuted_rows", rows_, 3 if drop_pad_mode in (1, 3) else 2)
    c.within("dtypes", rows_.dtype, "expanded_permuted_rows")
    c.dtype("expanded_src_to_dst_row", expanded_src_to_dst_row, torch.int32)
    c.rank("expanded_src_to_dst_row", expanded_src_to_dst_row, 1)
    c.need(skip2 is None or skip1 is not None, "takes skip2 only together with skip1")
    c.need(bias is None or export_for_source_row is not None, "takes bias only together with export_for_source_row")
    for name, other in (("skip1", skip1), ("skip2", skip2), ("bias", bias)):
        if other is not None:
            c.dtype(name, other, rows_.dtype)
            c.same(f"the columns of {name}", other.shape[1], "those of the rows", rows_.shape[-1])
    if scales is None:
        c.need(k == 1, f"takes k = 1 where there are no scales, not {k}")
        return
    c.rank("scales", scales, 2)
    row = c.row("scales")
    if row is not None:
        accepted = row.value[rows_.dtype]
        c.need(
            scales.dtype in accepted,
            f"takes scales of {listed(accepted)} with rows of {named(rows_.dtype)}, not {named(scales.dtype)}",
            row.source,
        )
    slots = expanded_src_to_dst_row.shape[0]
    c.same("expanded_src_to_dst_row", slots, "the elements of scales", scales.shape[0] * scales.shape[1])


def _grouped_matmul(
    c: Call,
    x: Sequence[T],
    weight: Sequence[T],
    *,
    bias: Sequence[T] | None = None,
    scale: Sequence[T] | None = None,
    offset: Sequence[T] | None = None,
    antiquant_scale: Sequence[T] | None = None,
    antiquant_offset: Sequence[T] | None = None,
    per_token_scale: Sequence[T] | None = None,
    group_list: T | None = None,
    activation_input: Sequence[T] | None = None,
    activation_quant_scale: Sequence[T] | None = None,
    activation_quant_offset: Sequence[T] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> None:
    c.need(len(x) == 1 and len(weight) == 1, f"is used with one x and one weight here, not {len(x)} and {len(weight)}")
    quantised = (scale, offset, antiquant_scale, antiquant_offset, per_token_scale)
    c.need(all(q is None for q in quantised), "is used without quantisation here")
    a, w = x[0], weight[0]
    c.within("dtypes", a.dtype, "x")
    c.dtype("weight", w, a.dtype)
    for what, found in (
        ("split_item", split_item),
        ("group_type", group_type),
        ("group_list_type", group_list_type),
        ("act_type", act_type),
    ):
        if found is None:
            c.refuse(f"needs {what}")
        c.within(what, found, what)
    if group_list is None:
        c.refuse("needs a group_list for one x and one weight")
        return
    c.rank("x", a, 2)
    c.rank("group_list", group_list, 1)
    c.dtype("group_list", group_list, torch.int64)
    groups = group_list.shape[0]
    c.at_least("groups_min", groups, "the number of groups")
    c.at_most("groups_max", groups, "the number of groups")
    if group_type == 2:
        c.rank("weight", w, 2)
        c.same("the inner size of x", a.shape[1], "the inner size of weight", w.shape[0])
        c.need(bias is None, "takes no bias when it groups the inner dimension")
        c.need(transposed(a), "takes x transposed when it groups the inner dimension")
    else:
        c.rank("weight", w, 3)
        c.same("the columns of x", a.shape[1], "the inner size of weight", w.shape[1])
        c.same("the entries of group_list", groups, "the experts of weight", w.shape[0])
        c.need(not transposed(a) or 1 in a.shape, "does not take x transposed")
    last = w.shape[-2] if transposed(w) else w.shape[-1]
    c.at_most("inner_max", last, "the innermost size of weight")
    c.at_most("inner_max", a.shape[0] if group_type == 2 else a.shape[1], "the innermost size of x")
    if bias is not None:
        c.need(len(bias) == 1, f"takes one bias with one weight, not {len(bias)}")
        row = c.row("bias")
        if row is not None:
            accepted = row.value[a.dtype]
            c.need(
                bias[0].dtype in accepted,
                f"takes a bias of {listed(accepted)} with x of {named(a.dtype)}, not {named(bias[0].dtype)}",
                row.source,
            )
        c.rank("bias", bias[0], 2)
        c.same("the rows of bias", bias[0].shape[0], "the experts of weight", w.shape[0])
        c.same("the columns of bias", bias[0].shape[1], "those of the result", w.shape[2])


def _swiglu(c: Call, input: T, dim: int = -1) -> None:
    c.within("dtypes", input.dtype, "input")
    c.at_most("rank_max", len(input.shape), "the number of dimensions")
    size = input.shape[dim]
    c.need(not known(size) or size % 2 == 0, f"takes an even size, which it halves, not {size}")


def _swiglu_backward(c: Call, grad_output: T, input: T, dim: int = -1) -> None:
    _swiglu(c, input, dim)
    c.dtype("grad_output", grad_output, input.dtype)
    c.rank("grad_output", grad_output, len(input.shape))
    half, size = grad_output.shape[dim], input.shape[dim]
    ok = not (known(half) and known(size)) or 2 * half == size
    c.need(ok, f"takes a grad_output half as wide as input, not {half} of {size}")
    row = c.row("row_bytes")
    if row is not None and known(size):
        bytes_ = size * input.dtype.itemsize
        c.need(bytes_ % row.value == 0, f"takes rows of a multiple of {row.value} bytes, not {bytes_}", row.source)


def _clipped_swiglu(
    c: Call,
    x: T,
    *,
    group_index: T | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> None:
    c.within("dtypes", x.dtype, "x")
    c.at_least("rank_min", len(x.shape), "the number of dimensions")
    size = x.shape[dim]
    c.need(not known(size) or size % 2 == 0, f"takes an even size, which it halves, not {size}")
    c.contiguous("x", x)
    c.need(limit > 0, f"takes a limit above 0, not {limit}")


def _quant_matmul(
    c: Call,
    x1: T,
    x2: T,
    scale: T,
    *,
    offset: T | None = None,
    pertoken_scale: T | None = None,
    bias: T | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: T | None = None,
) -> None:
    c.rank("x1", x1, 2, 3, 4, 5, 6)
    c.rank("x2", x2, 2, 3, 4, 5, 6)
    c.within("dtypes", x1.dtype, "x1")
    c.dtype("x2", x2, x1.dtype)
    c.same("the columns of x1", x1.shape[-1], "the rows of x2", x2.shape[-2])
    c.rank("scale", scale, 1)
    c.within("scale", scale.dtype, "scale")
    size = scale.shape[0]
    ok = not known(size) or size in (1, x2.shape[-1])
    c.need(ok, f"takes 1 or {x2.shape[-1]} scales, as many as columns, not {size}")
    if pertoken_scale is not None:
        c.dtype("pertoken_scale", pertoken_scale, torch.float32)
        c.same("pertoken_scale", pertoken_scale.shape[0], "the rows of x1", x1.shape[-2])


def _moe_distribute_dispatch_v2(
    c: Call,
    x: T,
    expert_ids: T,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    shared_expert_rank_num: int = 0,
    **_: Any,
) -> None:
    c.rank("x", x, 2)
    c.rank("expert_ids", expert_ids, 2)
    c.within("dtypes", x.dtype, "x")
    c.dtype("expert_ids", expert_ids, torch.int32)
    c.same("the rows of expert_ids", expert_ids.shape[0], "the rows of x", x.shape[0])
    c.need(0 <= ep_rank_id < ep_world_size, f"takes a rank below {ep_world_size}, not {ep_rank_id}")
    ranks = ep_world_size - shared_expert_rank_num
    c.need(ranks >= 1, f"needs ranks for routed experts, and all {ep_world_size} hold shared ones")
    c.need(moe_expert_num % ranks == 0, f"takes experts that divide over the {ranks} ranks, not {moe_expert_num}")


CHECKS: Mapping[str, Callable[..., None]] = {
    "npu_moe_gating_top_k": _moe_gating_top_k,
    "npu_moe_gating_top_k_softmax_v2": _moe_gating_top_k_softmax_v2,
    "npu_moe_init_routing_v2": _moe_init_routing_v2,
    "npu_moe_finalize_routing": _moe_finalize_routing,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": _swiglu_backward,
    "npu_clipped_swiglu": _clipped_swiglu,
    "npu_quant_matmul": _quant_matmul,
    "npu_moe_distribute_dispatch_v2": _moe_distribute_dispatch_v2,
}
