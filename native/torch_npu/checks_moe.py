"""Calls of the vendor's MoE and activation ops: one function per op, with the vendor's own signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ascend_deep.native.torch_npu._call import Call, T, known, listed, named

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


CHECKS: Mapping[str, Callable[..., None]] = {
    "npu_moe_gating_top_k": _moe_gating_top_k,
    "npu_moe_gating_top_k_softmax_v2": _moe_gating_top_k_softmax_v2,
    "npu_moe_init_routing_v2": _moe_init_routing_v2,
    "npu_moe_finalize_routing": _moe_finalize_routing,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": _swiglu_backward,
    "npu_clipped_swiglu": _clipped_swiglu,
}
