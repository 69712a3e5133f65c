"""Low-latency dispatch and combine over ``all_to_all_single``; ``ops/ll_*.py`` say what they compute.

Every rank sends M slots for every expert of every rank, filled from the front, so all sizes are static and nothing is
read on the host. One exchange there (rows, and beside them tokens), one back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_deep.native.c10d.plan import compaction, gather_rows
from ascend_deep.native.c10d.transport import exchange, require_group
from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import LlCombine, LlDispatch

__all__ = ["flat_problem", "ll_combine", "ll_dispatch", "ll_rows"]

_FP8 = torch.float8_e4m3fn


def ll_rows(ranks: int, max_tokens: int, topk: int, local_experts: int) -> int:
    """Rows of the flat layout: every token of every rank on as many local experts as it can."""
    return ranks * max_tokens * min(topk, local_experts)


def refuse_flat(op: str, x: Tensor, layout: str) -> None:
    """Raise where rows lie in the vendor's layout, whose handle only the vendor can read."""
    problem = flat_problem(x, layout)
    if problem is not None:
        raise ValueError(f"{op}: {problem}")


def flat_problem(x: Tensor, layout: str) -> str | None:
    """Why this engine does not serve ``layout`` on the device of ``x``; ``None`` if it does."""
    if x.device.type == "npu" and layout == "flat":
        return "layout is 'flat', which on NPUs the vendor's ops serve, and they refuse this call; use 'padded'."
    return None


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 rows and their scales, one per 128 columns: max(amax, 1e-4) / 448, as low-latency DeepEP has them."""
    blocks = x.to(torch.float32).unflatten(1, (-1, 128))
    scale = blocks.abs().amax(2).clamp(min=1e-4) / 448.0
    return (blocks / scale.unsqueeze(2)).to(_FP8).flatten(1), scale


def _by_expert(topk_idx: Tensor, experts: int, most: int) -> Tensor:
    """Place of each choice among the choices of its expert, as expert * M + place, [T, K] i64; -1 for none."""
    tokens, topk = topk_idx.shape
    flat = topk_idx.to(torch.int64).reshape(-1)
    valid = (flat >= 0) & (flat < experts)
    key = torch.where(valid, flat, experts)
    order = torch.argsort(key, stable=True)
    rank = torch.empty_like(order).scatter(0, order, torch.arange(tokens * topk, device=flat.device))
    count = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device).scatter_add(0, key, torch.ones_like(key))
    return torch.where(valid, key * most + rank - (count.cumsum(0) - count)[key], -1).view(tokens, topk)


@takes(LlDispatch)
def ll_dispatch(args: LlDispatch) -> tuple[Tensor, ...]:
    """As the op says."""
    x, topk_idx, quant, layout, group = args.x, args.topk_idx, args.quant, args.layout, args.group
    ranks, most, experts = int(args.group_size), int(args.max_tokens_per_rank), int(args.num_experts)
    require_group("ll_dispatch", group, ranks)
    refuse_flat("ll_dispatch", x, layout)
    local_experts = experts // ranks
    tokens, topk = topk_idx.shape
    slot = _by_expert(topk_idx, experts, most)
    target = torch.where(slot >= 0, slot, experts * most).reshape(-1)
    source = torch.arange(tokens, device=x.device).unsqueeze(1).expand(tokens, topk).reshape(-1)
    token = torch.full((experts * most + 1,), -1, dtype=torch.int64, device=x.device)
    token = token.scatter(0, target, source)[: experts * most]
    rows, scales = (x, None) if quant == "none" else _quantised(x)

    each = [local_experts * most] * ranks
    # From rank q: its slots for expert 0 here, then for expert 1; wanted are all ranks' slots of expert 0 first.
    order = torch.arange(ranks * local_experts * most, device=x.device).view(ranks, local_experts, most)
    order = order.transpose(0, 1).reshape(-1)

    def received(t: Tensor) -> Tensor:
        return exchange(t, each, each, group, ranks).view(torch.uint8 if t.dtype == _FP8 else t.dtype)[order]

    origin = received(token)
    counts = (origin >= 0).view(local_experts, ranks, most).sum(2)
    ends = counts.reshape(-1).cumsum(0)
    # Over all experts at once: block (e, q) of M slots. Inside an expert its rows lie together, in rank order.
    if layout == "flat":
        total = ll_rows(ranks, most, topk, local_experts)
        spread = compaction(ends, most)[0][:total]
        begins = (ends - counts.reshape(-1)).view(local_experts, ranks)
    else:
        inner = counts.cumsum(1)
        spread = torch.stack([compaction(inner[e], most)[0] for e in range(local_experts)])
        base = torch.arange(local_experts, device=x.device).unsqueeze(1) * (ranks * most)
        spread = torch.where(spread >= 0, spread + base, -1)
        begins = inner - counts

    def placed(t: Tensor) -> Tensor:
        return gather_rows(received(gather_rows(t, token)), spread)

    out = placed(rows)
    sf = x.new_empty((0,) * (spread.dim() + 1), dtype=torch.float32) if scales is None else placed(scales)
    src = gather_rows(origin + 1, spread) - 1
    return (
        out if quant == "none" else out.view(_FP8),
        sf,
        counts.sum(1).to(torch.int32),
        src.to(torch.int32),
        (begins << 32) | counts,
        x.new_empty(0, dtype=torch.int32),
    )


@takes(LlCombine)
def ll_combine(args: LlCombine) -> Tensor:
    """As the op says."""
    y, topk_idx = args.y, args.topk_idx
    ranks, most, experts = int(args.group_size), int(args.max_tokens_per_rank), int(args.num_experts)
    require_group("ll_combine", args.group, ranks)
    refuse_flat("ll_combine", y, args.layout)
    local_experts = experts // ranks
    begins, counts = args.layout_range >> 32, args.layout_range & 0xFFFFFFFF
    slot = torch.arange(most, device=y.device)
    where = begins.unsqueeze(2) + slot
    if args.layout == "padded":
        where = where + torch.arange(local_experts, device=y.device).view(-1, 1, 1) * (ranks * most)
    where = torch.where(slot < counts.unsqueeze(2), where, -1)  # [E/R, R, M]
    hidden = y.shape[-1]
    rows = gather_rows(y.reshape(-1, hidden), where.transpose(0, 1).reshape(-1))
    each = [local_experts * most] * ranks
    back = exchange(rows, each, each, args.group, ranks)  # [E, M, H] in the order of the experts
    position = _by_expert(topk_idx, experts, most)
    out = torch.zeros((topk_idx.shape[0], hidden), dtype=torch.float32, device=y.device)
    for k in range(topk_idx.shape[1]):
        row = gather_rows(back, position[:, k]).to(torch.float32)
        weight = torch.where(position[:, k] >= 0, args.topk_weights[:, k].to(torch.float32), 0.0)
        out = out + weight.unsqueeze(1) * row
    return out.to(y.dtype)
