"""``moe_experts`` composed of vendor ops: init routing, grouped matmul, activation, grouped matmul, finalize routing.

Rows behind the last local slot are undefined all the way through: the grouped matmul does not write them, and finalize
routing skips the slots that have none. Biases of bf16 experts are passed as f32, which every processor takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import MoeExperts, MoeExpertsBackward
from ascend_deep.native.torch_npu import soc
from ascend_deep.native.torch_npu._call import Spec, known
from ascend_deep.native.torch_npu.activation import PLAIN, activate
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.permute import (
    finalize,
    finalize_refusal,
    row_values,
    scales_with,
    sort_refusal,
    sorted_rows,
)
from ascend_deep.native.torch_npu.soc import Target

__all__ = ["grouped_matmul", "limits", "moe_experts", "product_refusal", "weights_of"]


def grouped_matmul(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """``rows`` [M, K] times ``weight`` [E, K, N], expert by expert; ``counts`` [E] i64 rows each. [M, N]."""
    if bias is not None and bias.dtype == torch.bfloat16:
        bias = bias.to(torch.float32)
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weight],
        bias=None if bias is None else [bias],
        group_list=counts,
        split_item=3,
        group_type=0,
        group_list_type=1,
        act_type=0,
    )
    return out


def product_refusal(target: Target, rows: Spec, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why ``grouped_matmul`` would be refused; ``None`` if not."""
    if not (weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()):
        return (
            f"expert weights have the strides {tuple(weight.stride())}; the vendor's grouped matmul takes them "
            "contiguous or transposed."
        )
    dtype = rows.dtype if rows.dtype != torch.bfloat16 else torch.float32
    return refusal(
        "npu_grouped_matmul",
        target,
        [rows],
        [weight],
        bias=None if bias is None else [Spec(tuple(bias.shape), dtype)],
        group_list=Spec((weight.shape[0],), torch.int64),
        split_item=3,
        group_type=0,
        group_list_type=1,
    )


def weights_of(args: MoeExperts | MoeExpertsBackward) -> tuple[Tensor, Tensor, Tensor | None]:
    """The expert weights w13, w2 and w3 as [E, inner, outer] views."""
    if args.weight_layout != "enk":
        return args.w13, args.w2, args.w3
    return args.w13.transpose(1, 2), args.w2.transpose(1, 2), None if args.w3 is None else args.w3.transpose(1, 2)


@takes(MoeExperts)
def moe_experts(args: MoeExperts) -> Tensor:
    """As the op says."""
    target = soc.current()
    assert target is not None  # the limits refuse where there is none
    x, weights, out_dtype, on_input = args.x, args.weights, args.out_dtype, args.weight_on_input
    first, second, up = weights_of(args)
    rows, row_map, counts = sorted_rows(x, args.idx, first.shape[0], args.expert_offset)
    if on_input:
        rows = (rows * row_values(weights.to(torch.float32), row_map).unsqueeze(1)).to(x.dtype)
    if up is None:
        h = grouped_matmul(rows, first, args.b13, counts)
    else:  # the halves of the hidden rows are joined, not the weights
        b1, b3 = _halves(args.b13)
        h = torch.cat((grouped_matmul(rows, first, b1, counts), grouped_matmul(rows, up, b3, counts)), -1)
    gated = up is not None or first.shape[2] != second.shape[1]
    hidden = activate(h, args.act, args.alpha, args.limit, args.interleaved, gated, target)
    y = grouped_matmul(hidden, second, args.b2, counts)
    scales = weights.new_ones(weights.shape) if on_input else weights
    wide = y.dtype if out_dtype is None or out_dtype.itemsize <= y.dtype.itemsize else torch.float32
    row_dtype, scale_dtype = scales_with(target, wide, scales.dtype)
    out = finalize(y.to(row_dtype), row_map, scales.to(scale_dtype).contiguous())
    return out.to(out_dtype or x.dtype)


def _halves(bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The biases of gate and up, contiguous."""
    if bias is None:
        return None, None
    gate, up = bias.chunk(2, -1)
    return gate.contiguous(), up.contiguous()


@takes(MoeExperts)
def limits(target: Target, args: MoeExperts) -> str | None:
    """Why the vendor's ops do not compute this call of ``moe_experts``; ``None`` if they do."""
    x, idx, weights = args.x, args.idx, args.weights
    if torch.float64 in (x.dtype, weights.dtype, args.out_dtype):
        return "float64 is asked for; the vendor's ops have 16 and 32 bits."
    if args.act not in (*PLAIN, "swiglu_oai", "silu_clamp"):
        return f"act is {args.act!r}, which this provider does not compute."
    first, second, up = weights_of(args)
    b1, b3 = (args.b13, None) if up is None else _halves(args.b13)
    slots = idx.shape[0] * idx.shape[1]
    rows = Spec((slots, x.shape[1]), x.dtype)
    hidden = Spec((slots, second.shape[1]), x.dtype)
    row_dtype, scale_dtype = scales_with(target, x.dtype, weights.dtype)
    out = Spec((slots, second.shape[2]), row_dtype)
    return (
        sort_refusal(target, x, idx, first.shape[0])
        or product_refusal(target, rows, first, b1)
        or (None if up is None else product_refusal(target, rows, up, b3))
        or product_refusal(target, hidden, second, args.b2)
        or finalize_refusal(target, out, (idx.shape[0], idx.shape[1]), scale_dtype)
        or _empty(x)
    )


def _empty(x: Tensor) -> str | None:
    if any(known(size) and size == 0 for size in x.shape):
        return "x is empty; the vendor's documents do not allow empty tensors."
    return None
