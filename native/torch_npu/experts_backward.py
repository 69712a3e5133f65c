"""``moe_experts_backward`` composed of vendor ops, for the case that is trained: silu with a gate in halves, no biases.

The forward's rows and hidden activation are computed again. Products with the weights group the rows, products for the
weights' gradients group the inner dimension; an expert without rows gets zero there by our hand, because the vendor's
documents do not say what an empty group gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import MoeExpertsBackward
from ascend_deep.native.torch_npu._call import Spec
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.experts import grouped_matmul, product_refusal, weights_of
from ascend_deep.native.torch_npu.permute import (
    finalize,
    finalize_refusal,
    row_values,
    scales_with,
    sort_refusal,
    sorted_rows,
)
from ascend_deep.native.torch_npu.soc import Target

__all__ = ["limits", "moe_experts_backward"]


@takes(MoeExpertsBackward)
def moe_experts_backward(args: MoeExpertsBackward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the op says."""
    x, idx, weights, enk = args.x, args.idx, args.weights, args.weight_layout == "enk"
    need_x, need_weights, need_w13, _, need_w2, _, _ = args.output_mask
    first, second, _ = weights_of(args)
    experts = first.shape[0]
    rows, row_map, counts = sorted_rows(x, idx, experts, args.expert_offset)
    g, _, _ = sorted_rows(args.grad.to(x.dtype), idx, experts, args.expert_offset)
    p = row_values(weights.to(torch.float32), row_map).unsqueeze(1)
    h = grouped_matmul(rows, first, None, counts)
    d_a = grouped_matmul(g, second.transpose(1, 2), None, counts)
    empty = x.new_empty(0)
    d_x = d_weights = d_w13 = d_w2 = empty
    if need_w2 or need_weights:
        a = torch.ops.npu.npu_swiglu(h, -1)
        if need_weights:
            d_p = (a.to(torch.float32) * d_a.to(torch.float32)).sum(1)
            d_weights = _per_slot(d_p, row_map, idx).to(weights.dtype)
        if need_w2:
            weighted = (g * p).to(x.dtype)
            left, right = (weighted, a) if enk else (a, weighted)
            d_w2 = _outer(left, right, counts)
    if need_x or need_w13:
        d_h = torch.ops.npu.npu_swiglu_backward((d_a * p).to(x.dtype), h, -1)
        if need_w13:
            left, right = (d_h, rows) if enk else (rows, d_h)
            d_w13 = _outer(left, right, counts)
        if need_x:
            d_rows = grouped_matmul(d_h, first.transpose(1, 2), None, counts)
            d_x = finalize(d_rows, row_map, d_rows.new_ones(idx.shape))
    no_weights = weights.new_empty(0)
    d_weights = d_weights if need_weights else no_weights
    return d_x, d_weights, d_w13, empty.clone(), d_w2, empty.clone(), empty.clone()


def _outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """Per expert, the sum over its rows of left^T right: [E, N, K] from [M, N] and [M, K]."""
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [left.t()], [right], group_list=counts, split_item=3, group_type=2, group_list_type=1, act_type=0
    )
    return torch.where((counts > 0).view(-1, 1, 1), out, torch.zeros((), dtype=out.dtype, device=out.device))


def _per_slot(values: Tensor, row_map: Tensor, idx: Tensor) -> Tensor:
    """One value per slot [T, K] from one per row; zero for slots without a row, whatever lies behind the last row."""
    picked = values.index_select(0, row_map.clamp(min=0).to(torch.int64))
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    return torch.where(row_map < 0, zero, picked).view(idx.shape)


@takes(MoeExpertsBackward)
def limits(target: Target, args: MoeExpertsBackward) -> str | None:
    """Why the vendor's ops do not compute this call of ``moe_experts_backward``; ``None`` if they do."""
    x, idx, grad, act = args.x, args.idx, args.grad, args.act
    if torch.float64 in (x.dtype, args.weights.dtype, grad.dtype):
        return "float64 is asked for; the vendor's ops have 16 and 32 bits."
    if grad.dtype.itemsize > x.dtype.itemsize:
        return f"grad has dtype {grad.dtype} and x {x.dtype}; the gradient would be rounded before the products."
    first, second, up = weights_of(args)
    if up is not None:
        return "gate and up have separate weights; this provider's backward takes them in one tensor."
    if act != "silu" or args.limit is not None or args.interleaved or first.shape[2] == second.shape[1]:
        return f"act is {act!r} with limit {args.limit}; the vendor has a backward for silu with a gate in halves."
    if args.b13 is not None or args.b2 is not None or args.weight_on_input:
        what = "weights on the input" if args.weight_on_input else "biases"
        return f"the experts have {what}, whose gradients the vendor has no grouped op for."
    slots = idx.shape[0] * idx.shape[1]
    hidden, outer = second.shape[1], first.shape[2]
    wide = Spec((slots, outer), x.dtype)
    narrow = Spec((slots, hidden), x.dtype)
    rows = Spec((slots, x.shape[1]), x.dtype)
    row_dtype, _ = scales_with(target, x.dtype, x.dtype)
    return (
        sort_refusal(target, x, idx, first.shape[0])
        or product_refusal(target, rows, first, None)
        or product_refusal(target, rows, second.transpose(1, 2), None)
        or product_refusal(target, wide, first.transpose(1, 2), None)
        or refusal("npu_swiglu", target, wide, -1)
        or refusal("npu_swiglu_backward", target, narrow, wide, -1)
        or finalize_refusal(target, Spec(rows.shape, row_dtype), (idx.shape[0], idx.shape[1]), x.dtype)
    )
