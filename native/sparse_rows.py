"""Rows of ``sparse_mqa_attention`` in which no chosen key is visible, for every implementation of the op.

What a dense softmax gives there depends on how the mask hides: 0 (the safe softmax of SDPA), NaN (a softmax of nothing
but -inf), or, where hidden keys get a finite number, a softmax that is equal over all keys with that number.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["counted", "empty_rows", "fill_empty", "hide_filled"]

_ELEMENTS = 1 << 22


def hide_filled(idx: Tensor, mask: Tensor | None, fill: float) -> tuple[Tensor, Tensor | None]:
    """``idx`` and ``mask`` such that chosen keys whose floating mask is at most ``fill`` are hidden by -1 or -inf.

    Args:
        idx: [B, S, K].
        mask: [B or 1, Hq or 1, S or 1, T], or ``None``; a boolean one stays as it is.
    """
    if mask is None or mask.dtype == torch.bool or mask.shape[3] == 0:
        return idx, mask
    if mask.shape[1] != 1:
        return idx, mask.masked_fill(mask <= fill, -torch.inf)
    keys = mask.shape[3]
    at = idx.long().clamp(0, keys - 1)
    chosen = mask[:, 0].expand(at.shape[0], at.shape[1], keys).gather(2, at)
    return torch.where(chosen <= fill, -1, idx), mask


def empty_rows(lse: Tensor, k: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(b, g, heads, rows) of the rows without a visible key, batch by batch and key head by key head, in pieces.

    Args:
        lse: [B, Hq, S] as the op returns it, before rows are filled.
        k: [B, Hk, T, D].
    """
    nothing = lse == -torch.inf
    if not bool(nothing.any()):
        return
    group = lse.shape[1] // k.shape[1]
    for b in range(lse.shape[0]):
        for g in range(k.shape[1]):
            heads, rows = nothing[b, g * group : (g + 1) * group].nonzero(as_tuple=True)
            step = max(_ELEMENTS // max(k.shape[2], 1), 1)
            for begin in range(0, heads.shape[0], step):
                part = slice(begin, begin + step)
                yield b, g, heads[part] + g * group, rows[part]


def counted(
    b: int, heads: Tensor, rows: Tensor, idx: Tensor, mask: Tensor | None, keys: int, fill: float, dtype: torch.dtype
) -> Tensor:
    """Weights [n, T] of the keys in rows without a visible key: equal, and 0 for chosen keys that the mask excludes.

    A chosen key is excluded where a floating mask is below ``fill``; keys that are not chosen have ``fill`` itself.
    Rows in which every key is excluded are NaN.
    """
    weights = torch.ones(heads.shape[0], keys + 1, dtype=dtype, device=idx.device)
    if mask is not None and mask.dtype != torch.bool and keys:
        plane = mask[b if mask.shape[0] > 1 else 0]
        values = plane[heads if plane.shape[0] > 1 else heads * 0, rows if plane.shape[1] > 1 else rows * 0]
        at = idx[b, rows].long()
        inside = (at >= 0) & (at < keys)
        excluded = inside & (values.gather(1, at.clamp(0, keys - 1)) < fill)
        weights.scatter_(1, torch.where(excluded, at, keys), 0.0)
    weights = weights[:, :keys]
    return weights / weights.sum(1, keepdim=True)


def fill_empty(
    out: Tensor, lse: Tensor, k: Tensor, v: Tensor, idx: Tensor, mask: Tensor | None, empty: str, fill: float
) -> None:
    """Write the rows without a visible key of ``out`` [B, Hq, S, Dv] (and ``lse``) in place; ``"zero"`` is there."""
    if empty == "zero":
        return
    if empty == "nan":
        nothing = lse == -torch.inf
        out.masked_fill_(nothing.unsqueeze(-1), torch.nan)
        lse.masked_fill_(nothing, torch.nan)
        return
    for b, g, heads, rows in empty_rows(lse.clone(), k):
        weights = counted(b, heads, rows, idx, mask, k.shape[2], fill, lse.dtype)
        out[b, heads, rows] = (weights @ v[b, g].to(lse.dtype)).to(out.dtype)
        lse[b, heads, rows] = lse.new_full(rows.shape, fill).masked_fill(weights.isnan().any(1), torch.nan)
