"""Who sends which row where, and where it lies on arrival: the index arithmetic of expert parallelism.

Names: R ranks, E experts, of which rank q holds [q E/R, (q+1) E/R); T tokens of this rank, K choices each; M, the most
tokens of a rank. A token goes once to every rank that holds one of its experts. Everything here is tensor code on
static shapes: no value is read on the host, and no rank is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Lanes",
    "aligned",
    "compaction",
    "expanded_rows",
    "gather_rows",
    "layout",
    "owners",
    "positions",
    "row_of_lane",
    "scattering",
    "send_slots",
]


def aligned(count: Tensor, alignment: int) -> Tensor:
    """``count`` rounded up to multiples of ``alignment``."""
    return (count + (alignment - 1)) // alignment * alignment


def owners(topk_idx: Tensor, num_experts: int, group_size: int) -> Tensor:
    """Rank that holds the expert of each choice, [T, K] i64; ``group_size`` where there is no expert of that id."""
    idx = topk_idx.to(torch.int64)
    valid = (idx >= 0) & (idx < num_experts)
    return torch.where(valid, idx // (num_experts // group_size), group_size)


def layout(topk_idx: Tensor, num_experts: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens per rank [R] and per expert [E], i64, and whether token t goes to rank q, bool [T, R]."""
    owner = owners(topk_idx, num_experts, group_size)
    tokens = topk_idx.shape[0]
    hit = torch.zeros((tokens, group_size + 1), dtype=torch.bool, device=topk_idx.device)
    hit = hit.scatter(1, owner, True)[:, :group_size].clone(memory_format=torch.contiguous_format)
    expert = torch.where(owner < group_size, topk_idx.to(torch.int64), num_experts).reshape(-1)
    count = torch.zeros(num_experts + 1, dtype=torch.int64, device=topk_idx.device)
    count = count.scatter_add(0, expert, torch.ones_like(expert))[:num_experts]
    return hit.sum(0, dtype=torch.int64), count, hit


def send_slots(owner: Tensor, hit: Tensor, max_tokens: int) -> Tensor:
    """Where each row goes, [T, K] i64: rank * M + its place among the rows for that rank, in token order.

    It stands in the master lane, the last choice of a token that goes to that rank; all other lanes hold -1.
    """
    ranks = hit.shape[1]
    lanes = torch.arange(owner.shape[1], device=owner.device)
    again = (owner.unsqueeze(2) == owner.unsqueeze(1)) & (lanes.unsqueeze(0) > lanes.unsqueeze(1))
    master = (owner < ranks) & ~again.any(2)
    place = (hit.to(torch.int64).cumsum(0) - 1).gather(1, owner.clamp(max=ranks - 1))
    return torch.where(master, owner * max_tokens + place, -1)


def positions(dst_slot: Tensor, starts: Tensor, max_tokens: int) -> Tensor:
    """``dst_slot`` as rows of the buffer in which rank q's rows begin at ``starts[q]`` [R]; -1 stays."""
    slot = dst_slot.to(torch.int64)
    rank = (slot // max_tokens).clamp(min=0)
    return torch.where(slot >= 0, starts[rank] + slot % max_tokens, -1)


def scattering(position: Tensor, rows: int) -> Tensor:
    """Token of each row of the send buffer, [rows] i64, from the rows of the tokens [T, K]; -1 for rows of none."""
    tokens, lanes = position.shape
    token = torch.arange(tokens, device=position.device).unsqueeze(1).expand(tokens, lanes).reshape(-1)
    target = torch.where(position >= 0, position, rows).reshape(-1)
    return torch.full((rows + 1,), -1, dtype=torch.int64, device=position.device).scatter(0, target, token)[:rows]


def compaction(psum_rank: Tensor, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Between R blocks of M rows, filled from the front, and the same rows without gaps.

    Args:
        psum_rank: [R], inclusive prefix sum of the rows of each block.

    Returns:
        For each packed row its row in the blocks, -1 behind the last; for each row of the blocks its packed row, -1
        for the unfilled. Both [R M] i64.
    """
    ends = psum_rank.to(torch.int64)
    counts = torch.diff(ends, prepend=torch.zeros_like(ends[:1]))
    ranks = ends.shape[0]
    row = torch.arange(ranks * max_tokens, device=ends.device)
    block = row // max_tokens
    inside = row % max_tokens
    packed = torch.where(inside < counts[block], (ends - counts)[block] + inside, -1)
    source = torch.searchsorted(ends, row, right=True).clamp(max=ranks - 1)
    spread = torch.where(row < ends[-1], source * max_tokens + row - (ends - counts)[source], -1)
    return spread, packed


@dataclass(frozen=True)
class Lanes:
    """Received rows by expert: ``count`` [E/R] i64 rows of each, ``start`` [E/R] i64 of its block, and ``slot`` [N, K]
    i64, the expanded row of each lane or -1."""

    count: Tensor
    start: Tensor
    slot: Tensor


def expanded_rows(local: Tensor, experts: int, alignment: int) -> Lanes:
    """Blocks of expanded rows, one per expert, each begun at a multiple of ``alignment``; rows of a block in order.

    Args:
        local: [N, K] i64, expert of each lane among the ``experts`` of this rank, or -1.
    """
    flat = local.reshape(-1)
    valid = flat >= 0
    key = torch.where(valid, flat, experts)
    count = torch.zeros(experts + 1, dtype=torch.int64, device=local.device)
    count = count.scatter_add(0, key, torch.ones_like(key))[:experts]
    sizes = aligned(count, alignment)
    start = sizes.cumsum(0) - sizes
    order = torch.argsort(key, stable=True)
    rank = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=local.device))
    safe = flat.clamp(min=0)
    slot = torch.where(valid, start[safe] + rank - (count.cumsum(0) - count)[safe], -1)
    return Lanes(count, start, slot.view(local.shape))


def gather_rows(rows: Tensor, index: Tensor, holes: bool = True) -> Tensor:
    """``rows[index]`` along dimension 0 with zeros where ``index`` is -1; what lies elsewhere is never looked at.

    Args:
        index: i64, of any shape.
        holes: ``False`` promises that no index is -1.

    Returns:
        ``index.shape + rows.shape[1:]``, contiguous.
    """
    raw = rows.contiguous().view(torch.uint8) if rows.dtype.itemsize == 1 and rows.dtype != torch.uint8 else rows
    if raw.shape[0] == 0:
        out = raw.new_zeros((*index.shape, *raw.shape[1:]))
    elif not holes:
        out = raw[index]
    else:
        keep = (index >= 0).view(*index.shape, *(1 for _ in raw.shape[1:]))
        taken = raw[index.clamp(min=0)]
        out = torch.where(keep, taken, torch.zeros((), dtype=raw.dtype, device=raw.device))
    return out if out.dtype == rows.dtype else out.view(rows.dtype)


def row_of_lane(position: Tensor, dst_slot: Tensor, owner: Tensor, group_size: int, max_tokens: int) -> Tensor:
    """Row of the send buffer that carries each choice [T, K]: that of the master lane of the same rank; -1 for none."""
    slot = dst_slot.to(torch.int64)
    rank = torch.where(slot >= 0, slot // max_tokens, group_size)
    table = torch.full((slot.shape[0], group_size + 1), -1, dtype=torch.int64, device=slot.device)
    table = table.scatter(1, rank, torch.where(slot >= 0, position, -1))
    return torch.where(owner < group_size, table.gather(1, owner), -1)
