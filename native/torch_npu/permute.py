"""``moe_permute`` and ``moe_combine`` by the vendor's init and finalize routing, and the sort that the experts share.

Ids outside the local range become one more expert, E, which is not in the active range: the vendor leaves its rows
undefined and marks its slots by -1. On the way back, rows are summed in the vendor's drop-and-pad mode, the one that is
documented to skip -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import MoePermute
from ascend_deep.native.torch_npu import rows
from ascend_deep.native.torch_npu._call import Spec, known
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.soc import Target

__all__ = [
    "combine_limits",
    "finalize",
    "finalize_refusal",
    "moe_combine",
    "moe_permute",
    "permute_limits",
    "row_values",
    "sort_refusal",
    "sorted_rows",
]


def sorted_rows(x: Tensor, idx: Tensor, experts: int, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of ``x`` [T, H] in the order of their experts.

    Returns:
        rows [T K, H], undefined behind the last slot of a local expert; row_map [T K] i32, the row of slot t K + k or
        -1; counts [E] i64. Within an expert the order is that of the slots.
    """
    local = idx - offset
    inside = (local >= 0) & (local < experts)
    key = torch.where(inside, local, experts).to(torch.int32)
    slots = idx.shape[0] * idx.shape[1]
    ordered, row_map, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        key,
        # All slots. A symbolic number would be fixed to a constant by the schema's int; -1 means the same.
        active_num=slots if known(slots) else -1,
        expert_num=experts + 1,
        drop_pad_mode=0,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, experts],
        row_idx_type=0,
    )
    return ordered, row_map, counts


def sort_refusal(target: Target, x: Tensor, idx: Tensor, experts: int) -> str | None:
    """Why ``sorted_rows`` would be refused; ``None`` if not."""
    if known(idx.shape[0]) and idx.shape[0] * idx.shape[1] == 0:
        return "there are no slots to route; the vendor's documents do not allow empty tensors."
    return refusal(
        "npu_moe_init_routing_v2",
        target,
        x,
        Spec(tuple(idx.shape), torch.int32),
        expert_num=experts + 1,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, experts],
    )


def row_values(values: Tensor, row_map: Tensor) -> Tensor:
    """One value per row [T K] from one per slot [T, K]; zero for rows that hold no slot."""
    slots = row_map.shape[0]
    target = torch.where(row_map < 0, slots, row_map.to(torch.int64))
    return values.new_zeros(slots + 1).scatter(0, target, values.reshape(-1))[:slots]


def finalize(y: Tensor, row_map: Tensor, scales: Tensor, skip: Tensor | None = None) -> Tensor:
    """Sum over k of ``scales[t,k] * y[row_map[t K + k]]``, plus ``skip``; negative entries of the map are skipped.

    Args:
        y: [M, H]; every row is an expert of capacity one to the vendor's op.
        row_map: [T K] i32.
        scales: [T, K].
    """
    out: Tensor = torch.ops.npu.npu_moe_finalize_routing(
        y.unsqueeze(1), skip, None, None, scales, row_map, None, drop_pad_mode=3
    )
    return out


def finalize_refusal(target: Target, y: Spec, slots: tuple[int, int], scales: torch.dtype) -> str | None:
    """Why ``finalize`` would be refused for rows like ``y`` [M, H] and scales of that dtype; ``None`` if not."""
    return refusal(
        "npu_moe_finalize_routing",
        target,
        Spec((y.shape[0], 1, y.shape[1]), y.dtype),
        None,
        None,
        None,
        Spec(slots, scales),
        Spec((slots[0] * slots[1],), torch.int32),
        None,
        drop_pad_mode=3,
    )


def scales_with(target: Target, y: torch.dtype, scales: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes in which rows and scales have to be passed so that neither is rounded."""
    row = rows.limit("npu_moe_finalize_routing", "scales", target)
    accepted = row.value.get(y, ()) if row is not None else ()
    if scales in accepted:
        return y, scales
    return (y, torch.float32) if torch.float32 in accepted else (torch.float32, torch.float32)


@takes(MoePermute)
def moe_permute(args: MoePermute) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the op says."""
    x, idx, weights = args.x, args.topk_idx, args.topk_weights
    ordered, row_map, counts = sorted_rows(x, idx, args.num_experts, args.expert_offset)
    psum = counts.cumsum(0)
    filled = torch.arange(ordered.shape[0], device=x.device) < psum[-1]
    return (
        torch.where(filled.unsqueeze(1), ordered, torch.zeros((), dtype=x.dtype, device=x.device)),
        x.new_empty(0),
        x.new_empty(0, dtype=torch.float32) if weights is None else row_values(weights, row_map),
        psum.to(torch.int32),
        row_map.view(idx.shape),
    )


@takes(MoePermute)
def permute_limits(target: Target, args: MoePermute) -> str | None:
    """Why the vendor's op does not compute this call of ``moe_permute``; ``None`` if it does."""
    if args.alignment != 1:
        return f"alignment is {args.alignment}; the vendor's op packs the blocks without gaps."
    if args.x_sf is not None:
        return "there are scale factors; the vendor's op moves one float per row at most."
    return sort_refusal(target, args.x, args.topk_idx, args.num_experts)


def moe_combine(y: Tensor, row_map: Tensor, bias: Tensor | None, *, order: str) -> Tensor:
    """As the op says; the schema's arguments."""
    return finalize(y, row_map.reshape(-1).to(torch.int32), y.new_ones(row_map.shape), bias)


def combine_limits(target: Target, y: Tensor, row_map: Tensor, bias: Tensor | None, *, order: str) -> str | None:
    """Why the vendor's op does not compute this call of ``moe_combine``; ``None`` if it does."""
    if bias is not None and bias.dtype != y.dtype:
        return f"bias has dtype {bias.dtype} and y {y.dtype}; the vendor's op takes the same for both."
    for name, tensor in (("y", y), ("row_map", row_map)):
        if any(known(size) and size == 0 for size in tensor.shape):
            return f"{name} is empty; the vendor's documents do not allow empty tensors."
    slots = (row_map.shape[0], row_map.shape[1])
    return finalize_refusal(target, Spec((y.shape[0], y.shape[1]), y.dtype), slots, y.dtype)
