"""Data of the expert-parallel tests, and what must come out, written without the package."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS = ([5, 7, 6, 3], [0, 4, 0, 2], [0, 0, 0, 0], [18, 24, 30, 12])
"""Tokens of each rank: uneven, some without, none at all, up to the most that are allowed."""


@dataclass(frozen=True)
class Case:
    """Routing of every rank; every rank can make all of it."""

    x: list[Tensor]
    idx: list[Tensor]
    weights: list[Tensor]


def case(
    tokens: list[int], experts: int, topk: int, hidden: int, seed: int, dtype: torch.dtype = torch.float32
) -> Case:
    g = torch.Generator().manual_seed(seed)
    xs, ids, ws = [], [], []
    for count in tokens:
        xs.append(torch.randn(count, hidden, generator=g).to(dtype))
        # Uneven: low ids are frequent. A fifth of the choices is void.
        score = torch.rand(count, experts, generator=g) / torch.arange(1, experts + 1).sqrt()
        idx = score.argsort(1, descending=True)[:, :topk]
        ids.append(torch.where(torch.rand(count, topk, generator=g) < 0.2, -1, idx))
        ws.append(torch.rand(count, topk, generator=g) + 0.2)
    return Case(xs, ids, ws)


def dense(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Every expert is one product x @ w[e]; sums over the choices of each token, one at a time."""
    rows = []
    for t in range(x.shape[0]):
        row = bias[t]
        for k in range(idx.shape[1]):
            if idx[t, k] >= 0:
                row = row + weights[t, k] * (x[t] @ w[idx[t, k]])
        rows.append(row)
    return torch.stack(rows) if rows else x.new_zeros(0, w.shape[2]) + 0 * bias.sum()
