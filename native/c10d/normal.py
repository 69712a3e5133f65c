"""Dispatch and combine over ``all_to_all_single``; the ops in ``ops/ep_*.py`` say what they compute.

With ``cpu_sync`` the ranks tell each other, in one small exchange, how many rows will come; sizes are exact and the
host waits for them once per dispatch. In the same message travel the sizes that have to be the same everywhere, so that
a rank which differs is an error on all ranks instead of a hang. Without it every rank sends M rows to every rank, and
nothing is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_deep.native.c10d.plan import (
    aligned,
    compaction,
    expanded_rows,
    gather_rows,
    layout,
    owners,
    positions,
    row_of_lane,
    scattering,
    send_slots,
)
from ascend_deep.native.c10d.transport import exchange, require_group
from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import EpCombine, EpDispatch, EpDispatchCached

__all__ = ["ep_combine", "ep_dispatch", "ep_dispatch_cached", "ep_layout", "expanded_bound"]


def expanded_bound(ranks: int, max_tokens: int, topk: int, local_experts: int, alignment: int) -> int:
    """Most rows that an expanded dispatch can return: every token of every rank on as many local experts as it can."""
    most = ranks * max_tokens * min(topk, local_experts) + (alignment - 1) * local_experts
    return -(-most // alignment) * alignment


def ep_layout(topk_idx: Tensor, *, num_experts: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """As the op says."""
    per_rank, per_expert, hit = layout(topk_idx, int(num_experts), int(group_size))
    return per_rank.to(torch.int32), per_expert.to(torch.int32), hit


def _agree(sent: Tensor, told: dict[str, int], group: str, size: int) -> Tensor:
    """Rows that every rank will send here, [R] i64; raises on every rank if the ranks call with different arguments."""
    values = list(told.values())
    message = torch.empty((size, 1 + len(values)), dtype=torch.int64, device=sent.device)
    message[:, 0] = sent
    message[:, 1:] = torch.tensor(values, dtype=torch.int64, device=sent.device)
    answer = exchange(message, [1] * size, [1] * size, group, size).cpu()
    for at, name in enumerate(told, 1):
        if name == "tokens":
            continue
        found = answer[:, at].tolist()
        if len(set(found)) > 1:
            ranks = ", ".join(f"{v} on rank {q}" for q, v in enumerate(found))
            raise ValueError(f"ep_dispatch: {name} must be the same on all ranks of the group; it is {ranks}.")
    tokens = answer[:, 1 + list(told).index("tokens")].tolist()
    over = [f"rank {q} has {t}" for q, t in enumerate(tokens) if t > told["max_tokens_per_rank"]]
    if over:
        raise ValueError(
            f"ep_dispatch: max_tokens_per_rank is {told['max_tokens_per_rank']}, but {' and '.join(over)} tokens."
        )
    return answer[:, 0].clone()


def _told(args: EpDispatch) -> dict[str, int]:
    """What the ranks tell each other: sizes that have to agree, by their names in sentences, and the tokens of each."""
    x, x_sf, weights = args.x, args.x_sf, args.topk_weights
    return {
        "max_tokens_per_rank": int(args.max_tokens_per_rank),
        "num_experts": int(args.num_experts),
        "expert_alignment": int(args.expert_alignment),
        "the number of columns of topk_idx": args.topk_idx.shape[1],
        "the number of columns of x": x.shape[1],
        "the number of bytes of an element of x": x.dtype.itemsize,
        "the number of columns of x_sf (-1: no x_sf)": -1 if x_sf is None else x_sf.shape[1],
        "whether there are topk_weights (bytes of one)": 0 if weights is None else weights.dtype.itemsize,
        "tokens": x.shape[0],
    }


def _master(slots: Tensor, owner: Tensor, token: Tensor, target: Tensor, ranks: int) -> Tensor:
    """The last choice that takes each row to its rank, [rows, 1]; -1 for rows without a token.

    ``slots`` and ``owner`` [T, K] are of tokens, ``token`` and ``target`` [rows] of what is sent.
    """
    device = slots.device
    lane = torch.where(slots >= 0, torch.arange(slots.shape[1], device=device), -1)
    lane_to = torch.full((slots.shape[0], ranks + 1), -1, dtype=torch.int64, device=device)
    lane_to = lane_to.scatter(1, torch.where(slots >= 0, owner, ranks), lane)
    master = gather_rows(lane_to, token).gather(1, target.unsqueeze(1))
    return torch.where(token.unsqueeze(1) >= 0, master, -1)


@takes(EpDispatch)
def ep_dispatch(args: EpDispatch) -> tuple[Tensor, ...]:
    """As the op says."""
    x, x_sf, topk_idx, topk_weights, *_ = args
    expand, cpu_sync, group = args.expand, args.cpu_sync, args.group
    experts, most, ranks = int(args.num_experts), int(args.max_tokens_per_rank), int(args.group_size)
    alignment = int(args.expert_alignment)
    require_group("ep_dispatch", group, ranks)
    local_experts, device = experts // ranks, x.device
    topk = topk_idx.shape[1]
    owner = owners(topk_idx, experts, ranks)
    per_rank, _, hit = layout(topk_idx, experts, ranks)
    slots = send_slots(owner, hit, most)
    if cpu_sync:
        splits = torch.stack((per_rank.cpu(), _agree(per_rank, _told(args), group, ranks)))
        sent, received = splits.tolist()
        starts = per_rank.cumsum(0) - per_rank
        token = scattering(positions(slots, starts, most), sum(sent))
        source = torch.arange(ranks, device=device).repeat_interleave(splits[1].to(device), output_size=sum(received))
        target = torch.arange(ranks, device=device).repeat_interleave(per_rank, output_size=sum(sent))
    else:
        splits = torch.full((2, ranks), most, dtype=torch.int64)
        sent = received = [most] * ranks
        token = scattering(slots, ranks * most)
        source = target = torch.arange(ranks, device=device).repeat_interleave(most)

    mine = (gather_rows(owner + 1, token) - 1) == target.unsqueeze(1)
    local = torch.where(mine, gather_rows(topk_idx.to(torch.int64), token) - target.unsqueeze(1) * local_experts, -1)
    # What a row says about itself: its token, the master lane, and the experts it is for, as the receiver counts them.
    about = torch.cat((token.unsqueeze(1), _master(slots, owner, token, target, ranks), local), 1).to(torch.int32)
    about = exchange(about, received, sent, group, ranks)
    rows = exchange(gather_rows(x, token, not cpu_sync), received, sent, group, ranks)
    scales = None if x_sf is None else exchange(gather_rows(x_sf, token, not cpu_sync), received, sent, group, ranks)
    weights = None
    if topk_weights is not None:
        weights = torch.where(mine, gather_rows(topk_weights, token), _zero(topk_weights))
        weights = exchange(weights, received, sent, group, ranks)

    counts = splits[1].to(device) if cpu_sync else (about[:, 0] >= 0).view(ranks, most).sum(1)
    psum_rank = counts.cumsum(0)
    if not cpu_sync:
        spread, _ = compaction(psum_rank, most)
        about = gather_rows(about + 1, spread) - 1
        source = gather_rows(source, spread)
        rows = gather_rows(rows, spread)
        scales = None if scales is None else gather_rows(scales, spread)
        weights = None if weights is None else gather_rows(weights, spread)
    filled = about[:, 0] >= 0
    local = about[:, 2:].to(torch.int64)
    lanes = expanded_rows(local, local_experts, alignment)
    if expand:
        psum_expert = lanes.start + lanes.count
        if cpu_sync:
            total = int(aligned(lanes.count, alignment).sum())
        else:
            total = expanded_bound(ranks, most, topk, local_experts, alignment)
    else:
        psum_expert, total = aligned(lanes.count, alignment).cumsum(0), 0
    src_meta = torch.cat(
        (
            torch.where(filled, about[:, 0] + source * most, -1).unsqueeze(1),
            torch.where(filled, about[:, 1] + source * topk, -1).unsqueeze(1),
            lanes.slot if expand else local,
        ),
        1,
    ).to(torch.int32)
    handle = (
        psum_rank.to(torch.int32),
        psum_expert.to(torch.int32),
        src_meta,
        slots.to(torch.int32),
        x.new_empty(0, dtype=torch.int32),
        torch.cat((splits, torch.full((1, ranks), _how(most, expand, cpu_sync)))),
    )
    rows, scales, weights = _delivered(rows, scales, weights, lanes.slot, total, expand)
    idx = local.new_empty((0, topk)) if expand else local.clone()
    return (rows, *_or_empty(x, scales, weights, topk, expand, idx), lanes.count.to(torch.int32), *handle)


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device)


def _delivered(
    rows: Tensor, scales: Tensor | None, weights: Tensor | None, slot: Tensor, total: int, expand: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Received rows as the caller wants them: as they are, or one per (row, expert) at ``slot`` of ``total``."""
    if not expand:
        return rows, scales, weights
    origin = scattering(slot, total)
    if weights is not None:
        target = torch.where(slot >= 0, slot, total).reshape(-1)
        weights = weights.new_zeros(total + 1).scatter(0, target, weights.reshape(-1))[:total].clone()
    return gather_rows(rows, origin), None if scales is None else gather_rows(scales, origin), weights


def _or_empty(
    x: Tensor, scales: Tensor | None, weights: Tensor | None, topk: int, expand: bool, idx: Tensor | None
) -> tuple[Tensor, ...]:
    """Scales, ids and weights, with an empty tensor for what is not there."""
    sf = x.new_empty((0, 0), dtype=torch.float32) if scales is None else scales
    if weights is None:
        weights = x.new_empty((0,) if expand else (0, topk), dtype=torch.float32)
    return (sf, weights) if idx is None else (sf, idx, weights)


def _how(most: int, expand: bool, cpu_sync: bool) -> int:
    """Attributes of a dispatch in one number, which its handle carries."""
    return 4 * most + 2 * cpu_sync + expand


def _splits(op: str, args: EpDispatchCached | EpCombine) -> tuple[list[int], list[int]]:
    """Rows sent to, and received from, every rank in the dispatch; raises if that had other attributes."""
    ranks, most = int(args.group_size), int(args.max_tokens_per_rank)
    static = [most] * ranks
    # The type is exact: fake tensors, of a graph that is being made, have no values.
    if not args.cpu_sync and type(args.splits) is not Tensor:
        return static, static
    sent, received, (how, *_) = args.splits.tolist()
    if how < 4:  # every dispatch has room for a token
        raise ValueError(
            f"{op}: splits is not that of a handle, whose third row is never {how}; ep_dispatch returns one."
        )
    for name, given, made in (
        ("expand", args.expand, bool(how & 1)),
        ("cpu_sync", args.cpu_sync, bool(how & 2)),
        ("max_tokens_per_rank", most, how >> 2),
    ):
        if given != made:
            raise ValueError(f"{op}: {name} is {given}, but the handle is of a dispatch where it was {made}.")
    if not args.cpu_sync:
        return static, static
    if sum(received) != args.src_meta.shape[0]:
        raise ValueError(
            f"{op}: splits is of a dispatch that received {sum(received)} rows, src_meta of one that received "
            f"{args.src_meta.shape[0]}; both must be of the same handle."
        )
    return sent, received


def _positions(args: EpDispatchCached | EpCombine) -> Tensor:
    """Row of every choice in the send buffer of the dispatch, [T, K] i64; -1 for none."""
    most, device = int(args.max_tokens_per_rank), args.dst_slot.device
    if args.cpu_sync:
        sizes = args.splits[0].to(device)
        starts = sizes.cumsum(0) - sizes
    else:
        starts = torch.arange(int(args.group_size), device=device) * most
    return positions(args.dst_slot, starts, most)


@takes(EpDispatchCached)
def ep_dispatch_cached(args: EpDispatchCached) -> tuple[Tensor, Tensor, Tensor]:
    """As the op says."""
    ranks, most, expand = int(args.group_size), int(args.max_tokens_per_rank), args.expand
    require_group("ep_dispatch_cached", args.group, ranks)
    sent, received = _splits("ep_dispatch_cached", args)
    token = scattering(_positions(args), sum(sent))

    def move(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        out = exchange(gather_rows(t, token, not args.cpu_sync), received, sent, args.group, ranks)
        return out if args.cpu_sync else gather_rows(out, compaction(args.psum_rank, most)[0])

    rows, scales, weights = move(args.x), move(args.x_sf), move(args.topk_weights)
    assert rows is not None
    lanes = args.src_meta[:, 2:].to(torch.int64)
    if weights is not None:
        weights = torch.where(lanes >= 0, weights, _zero(weights))
    rows, scales, weights = _delivered(rows, scales, weights, lanes, int(args.num_recv), expand)
    sf, w = _or_empty(args.x, scales, weights, args.dst_slot.shape[1], expand, None)
    return rows, sf, w


@takes(EpCombine)
def ep_combine(args: EpCombine) -> tuple[Tensor, Tensor]:
    """As the op says."""
    ranks, most, y, group = int(args.group_size), int(args.max_tokens_per_rank), args.y, args.group
    require_group("ep_combine", group, ranks)
    sent, received = _splits("ep_combine", args)
    tokens, topk = args.dst_slot.shape
    compute = torch.float64 if y.dtype == torch.float64 else torch.float32
    lanes = args.src_meta[:, 2:].to(torch.int64)
    rows, weights = y, args.topk_weights
    if args.expand:
        total = torch.zeros((lanes.shape[0], y.shape[1]), dtype=compute, device=y.device)
        for k in range(topk):
            total = total + gather_rows(y, lanes[:, k]).to(compute)
        rows = total.to(y.dtype)
        if weights is not None:
            weights = gather_rows(weights, lanes)
    elif weights is not None:
        weights = torch.where(lanes >= 0, weights, _zero(weights))
    if not args.cpu_sync:
        packed = compaction(args.psum_rank, most)[1]
        rows = gather_rows(rows, packed)
        weights = None if weights is None else gather_rows(weights, packed)
    back = exchange(rows, sent, received, group, ranks)
    position = _positions(args)
    out = torch.zeros((tokens, y.shape[1]), dtype=compute, device=y.device)
    for bias in (args.bias0, args.bias1):
        if bias is not None:
            out = out + bias.to(compute)
    for k in range(topk):
        out = out + gather_rows(back, position[:, k]).to(compute)
    if weights is None:
        return out.to(y.dtype), y.new_empty((0, topk), dtype=torch.float32)
    owner = owners(args.topk_idx, int(args.num_experts), ranks)
    carrier = row_of_lane(position, args.dst_slot, owner, ranks, most)
    returned = exchange(weights, sent, received, group, ranks)
    lane = torch.arange(topk, device=y.device)
    return out.to(y.dtype), gather_rows(returned.reshape(-1), torch.where(carrier >= 0, carrier * topk + lane, -1))
