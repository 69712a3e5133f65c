"""Sample inputs of the expert-parallel ops: a group of one rank, which needs no process group.

Sizes are static here (``cpu_sync=False``); exact sizes, and more ranks, are in ``tests/ep``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.c10d import low_latency, normal
from ascend_deep.ops._op import Sample

__all__ = ["cached_samples", "combine_samples", "dispatch_samples", "ll_combine_samples", "ll_dispatch_samples"]

_ONE: dict[str, Any] = {"group_size": 1, "group": ""}


def _routing(seed: int, tokens: int, hidden: int, topk: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g)
    # Uneven: low ids are frequent; some choices are void.
    idx = (torch.rand(tokens, experts, generator=g).add(1) / torch.arange(1, experts + 1)).topk(topk, 1).indices
    idx = torch.where(torch.rand(tokens, topk, generator=g) < 0.2, -1, idx)
    return x, idx, torch.rand(tokens, topk, generator=g) + 0.3


def dispatch_samples() -> Iterator[Sample]:
    """Compact and expanded, quantised, transposed."""
    x, idx, weights = _routing(41, 7, 12, 3, 6)
    how = {"num_experts": 6, "max_tokens_per_rank": 9, "expert_alignment": 4, "cpu_sync": False, **_ONE}
    yield Sample("compact", (x, None, idx, weights), {**how, "expand": False})
    yield Sample("expanded", (x.t().contiguous().t(), None, idx, weights.bfloat16()), {**how, "expand": True})
    sf = torch.rand(7, 3, generator=torch.Generator().manual_seed(42))
    eight = x.to(torch.float8_e4m3fn)
    yield Sample("fp8 with scales", (eight, sf, idx.to(torch.int32), None), {**how, "expand": True})


def _handle(expand: bool) -> tuple[tuple[Tensor, ...], Tensor, dict[str, Any], int]:
    x, idx, weights = _routing(43, 6, 8, 2, 4)
    how = {"num_experts": 4, "max_tokens_per_rank": 7, "expand": expand, "cpu_sync": False, **_ONE}
    out = normal.ep_dispatch(x, None, idx, weights, expert_alignment=3, **how)
    return (idx, *out[5:]), weights, how, out[0].shape[0]


def cached_samples() -> Iterator[Sample]:
    """Other rows, of another width, along a handle."""
    g = torch.Generator().manual_seed(44)
    handle, weights, how, rows = _handle(True)
    yield Sample(
        "expanded, weights", (torch.randn(6, 5, generator=g), None, weights, *handle), {**how, "num_recv": rows}
    )


def combine_samples() -> Iterator[Sample]:
    """With and without weights and biases, compact and expanded."""
    g = torch.Generator().manual_seed(45)
    for expand, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        handle, _, how, rows = _handle(expand)
        y = torch.randn(rows, 5, generator=g).to(dtype)
        bias = torch.randn(6, 5, generator=g)
        weights = torch.rand(rows, 2, generator=g) if not expand else None
        yield Sample("expanded, bias" if expand else "compact, weights", (y, weights, bias, None, *handle), how)


def ll_dispatch_samples() -> Iterator[Sample]:
    """Both layouts, plain and quantised."""
    x, idx, _ = _routing(46, 5, 128, 2, 4)
    how = {"num_experts": 4, "max_tokens_per_rank": 6, **_ONE}
    yield Sample("padded", (x.bfloat16(), idx), {**how, "quant": "none", "layout": "padded"})
    yield Sample("flat, fp8", (x.bfloat16(), idx), {**how, "quant": "fp8", "layout": "flat"})


def ll_combine_samples() -> Iterator[Sample]:
    """Rows of experts that scale by 1.7."""
    x, idx, weights = _routing(47, 5, 8, 2, 4)
    how = {"num_experts": 4, "max_tokens_per_rank": 6, "layout": "padded", **_ONE}
    out = low_latency.ll_dispatch(x.bfloat16(), idx, quant="none", **how)
    yield Sample("padded", ((out[0].float() * 1.7).bfloat16(), idx, weights, *out[3:]), how)
