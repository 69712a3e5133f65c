"""``ll_dispatch`` and ``ll_combine``, flat layout, by the vendor's ``npu_moe_distribute_dispatch_v2`` / ``combine_v2``.

The vendor's ops know no choice without an expert: such choices are masked, which takes one flag per choice, and get ids
that their row does not have (ids of a row must differ). A mask is allowed only where all ranks pass equally many
tokens, so every rank passes M, the rest masked. What dispatch tells combine (``assist_info_for_combine``,
``ep_recv_counts``) may have any meaning, so it travels in ``aux`` as it is, and nothing is read from it.

Both ops have to take a call before either is made: a combine of another engine could not read the vendor's handle.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import LlCombine, LlDispatch
from ascend_deep.native.torch_npu._call import Spec
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.soc import Target

__all__ = ["aux_size", "combine_limits", "communicator", "dispatch_limits", "ll_combine", "ll_dispatch"]

DISPATCH, COMBINE = "npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"
_BUFFER = 200
"""MB of a communicator's buffer where HCCL_BUFFSIZE is not set."""


def aux_size(rows: Any, num_experts: Any) -> Any:
    """128 numbers a row, and one for each of this rank's experts and every rank."""
    return rows * 128 + num_experts


def communicator(group: str) -> tuple[str, int]:
    """HCCL's own name of a process group, and this process's rank in it."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    process_group: Any = resolve(group)
    backend = process_group._get_backend(torch.device("npu"))
    # HCCL asks for the rank in the world.
    return str(backend.get_hccl_comm_name(dist.get_rank())), int(process_group.rank())


def _choices(topk_idx: Tensor, most: int, experts: int) -> tuple[Tensor, Tensor]:
    """Ids i32 [M, K], distinct in a row, and which of them count, bool [M, K], from ids [T, K]."""
    tokens, topk = topk_idx.shape
    ids = torch.cat((topk_idx.to(torch.int64), topk_idx.new_full((most - tokens, topk), -1, dtype=torch.int64)))
    active = (ids >= 0) & (ids < experts)
    # Experts that the row does not have come first; the n-th void choice gets the n-th of them.
    taken = torch.zeros((most, experts + 1), dtype=torch.int32, device=ids.device)
    taken = taken.scatter(1, torch.where(active, ids, experts), 1)[:, :experts]
    free = taken.argsort(dim=1, stable=True)
    place = ((~active).to(torch.int64).cumsum(1) - 1).clamp(min=0)
    return torch.where(active, ids, free.gather(1, place)).to(torch.int32), active


@takes(LlDispatch)
def ll_dispatch(args: LlDispatch) -> tuple[Tensor, ...]:
    """As the op says."""
    x, most, experts, ranks = args.x, int(args.max_tokens_per_rank), int(args.num_experts), int(args.group_size)
    name, rank = communicator(args.group)
    ids, active = _choices(args.topk_idx, most, experts)
    padded = torch.cat((x, x.new_zeros((most - x.shape[0], x.shape[1]))))
    rows, _, info, counts, received, *_ = torch.ops.npu.npu_moe_distribute_dispatch_v2(
        padded, ids, name, ranks, rank, experts, x_active_mask=active, global_bs=most * ranks, expert_token_nums_type=1
    )
    local = experts // ranks
    # Behind the last row the vendor leaves anything.
    filled = torch.arange(rows.shape[0], device=x.device) < counts.sum()
    return (
        torch.where(filled.unsqueeze(1), rows, torch.zeros((), dtype=rows.dtype, device=x.device)),
        x.new_empty((0, 0), dtype=torch.float32),
        counts.to(torch.int32),
        x.new_full((rows.shape[0],), -1, dtype=torch.int32),
        x.new_zeros((local, ranks), dtype=torch.int64),
        torch.cat((info.to(torch.int32), received.to(torch.int32))),
    )


@takes(LlCombine)
def ll_combine(args: LlCombine) -> Tensor:
    """As the op says."""
    most, experts, ranks = int(args.max_tokens_per_rank), int(args.num_experts), int(args.group_size)
    name, rank = communicator(args.group)
    ids, active = _choices(args.topk_idx, most, experts)
    tokens, topk = args.topk_idx.shape
    weights = args.topk_weights.to(torch.float32)
    scales = torch.cat((weights, weights.new_zeros((most - tokens, topk))))
    scales = torch.where(active, scales, torch.zeros_like(scales))  # void choices may have any weight, NaN too
    info, received = args.aux[: args.aux.shape[0] - experts], args.aux[args.aux.shape[0] - experts :]
    out = torch.ops.npu.npu_moe_distribute_combine_v2(
        args.y, ids, info, received, scales, name, ranks, rank, experts, x_active_mask=active, global_bs=most * ranks
    )
    return out[:tokens].clone()


def _pair(target: Target, x: Tensor, args: LlDispatch | LlCombine) -> str | None:
    """Why the vendor's dispatch or its combine would not take a call, or both; ``None``: both do. ``x`` [.., H]."""
    if args.layout != "flat":
        return f"layout is {args.layout!r}; the vendor's ops have the flat one."
    most, experts, ranks = int(args.max_tokens_per_rank), int(args.num_experts), int(args.group_size)
    hidden, topk = x.shape[-1], args.topk_idx.shape[1]
    local = max(experts // ranks, 1)
    rows = ranks * most * min(topk, local)
    ids, mask = Spec((most, topk), torch.int32), Spec((most, topk), torch.bool)
    given: dict[str, Any] = {"x_active_mask": mask, "global_bs": most * ranks}
    group = ("name", ranks, 0, experts)
    first = refusal(DISPATCH, target, Spec((most, hidden), x.dtype), ids, *group, **given)
    if first is not None:
        return first
    second = refusal(
        COMBINE,
        target,
        Spec((rows, hidden), x.dtype),
        ids,
        Spec((rows * 128,), torch.int32),
        Spec((experts,), torch.int32),
        Spec((most, topk), torch.float32),
        *group,
        **given,
    )
    return second or _buffer(most, ranks, local, topk, hidden)


def _buffer(most: int, ranks: int, local: int, topk: int, hidden: int) -> str | None:
    """Why the communicator's buffer is too small, by the formula of the vendor's documents; ``None``: it is not."""

    def up(value: int, multiple: int) -> int:
        return -(-value // multiple) * multiple

    row = up(up(2 * hidden, 32) + 64, 512)  # the documents add 44 or 64 bytes
    needed = 2 * (local * most * ranks * row + (topk + 1) * most * up(2 * hidden, 512))
    given = os.environ.get("HCCL_BUFFSIZE", "")
    size = int(given) if given.isdecimal() else _BUFFER
    if needed <= size * 2**20:
        return None
    return (
        f"HCCL_BUFFSIZE is {size} MB, and the vendor's dispatch needs {up(needed, 2**20) // 2**20} MB for these sizes "
        "(aclnnMoeDistributeCombineV2, environment variables)."
    )


@takes(LlDispatch)
def dispatch_limits(target: Target, args: LlDispatch) -> str | None:
    """Why the vendor's ops do not compute this call of ``ll_dispatch``; ``None`` if they do."""
    if args.quant != "none":
        return f"quant is {args.quant!r}; the vendor's op has no FP8 with one scale per 128 columns."
    return _pair(target, args.x, args)


@takes(LlCombine)
def combine_limits(target: Target, args: LlCombine) -> str | None:
    """Why the vendor's ops do not compute this call of ``ll_combine``; ``None`` if they do."""
    return _pair(target, args.y, args)
