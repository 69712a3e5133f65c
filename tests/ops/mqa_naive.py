"""The indexer in float64 and Python loops, written from the formulae and sharing no code with the ops."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def e2m1(code: int) -> float:
    """One FP4 code: sign, two bits of exponent with bias 1, one bit of mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def numbers(operand: Tensor, sf: Tensor | None) -> Tensor:
    """The operand in f64."""
    if operand.dtype in (torch.int8, torch.uint8):
        flat = [v for byte in operand.view(torch.uint8).flatten().tolist() for v in (e2m1(byte & 15), e2m1(byte >> 4))]
        values = torch.tensor(flat, dtype=torch.float64).view(*operand.shape[:-1], operand.shape[-1] * 2)
    else:
        values = operand.double()
    if sf is not None:
        values = values * sf.double().repeat_interleave(values.shape[-1] // sf.shape[-1], -1)
    return values


def scores(q: Tensor, kv: Tensor, weights: Tensor, scale: float) -> Tensor:
    """[B, S, T] from f64 q [B, S, H, D], kv [B, T, D], weights [B, S, H]: materialises [B, S, H, T]."""
    p = torch.einsum("bshd,btd->bsht", q, kv) * scale
    return torch.einsum("bsht,bsh->bst", p.clamp(min=0), weights.double())


def keep(q: Tensor, keys: int, ks: Tensor | None, ke: Tensor | None, mask: Tensor | None) -> Tensor:
    """Bool [B, S, T]: the key counts."""
    out = torch.ones(q.shape[0], q.shape[1], keys, dtype=torch.bool)
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            low = 0 if ks is None else int(ks[b % ks.shape[0], s])
            high = keys if ke is None else int(ke[b % ke.shape[0], s])
            for t in range(keys):
                out[b, s, t] = low <= t < high
                if mask is not None:
                    m = mask[b % mask.shape[0], s % mask.shape[1], t]
                    out[b, s, t] &= bool(m) if mask.dtype == torch.bool else float(m) != -math.inf
    return out


def logits(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Dense f64 scores with -inf where a key is excluded, and where that is not so."""
    out = scores(numbers(q, q_sf), numbers(kv, kv_sf), weights, scale)
    if mask is not None and mask.dtype != torch.bool:
        out = out + mask.double()
    counts = keep(q, kv.shape[1], ks, ke, mask)
    return out.masked_fill(~counts, -math.inf), counts


def compressed(dense: Tensor, counts: Tensor, ks: Tensor | None, columns: int) -> Tensor:
    """Column c of row (b, s) is key max(ks, 0) + c."""
    out = torch.full((*dense.shape[:2], columns), -math.inf, dtype=dense.dtype)
    for b in range(dense.shape[0]):
        for s in range(dense.shape[1]):
            first = 0 if ks is None else max(int(ks[b % ks.shape[0], s]), 0)
            for c in range(columns):
                if first + c < dense.shape[2] and counts[b, s, first + c]:
                    out[b, s, c] = dense[b, s, first + c]
    return out


def topk_row(row: list[float], eligible: list[bool], k: int, by_score: bool) -> list[int]:
    """The k best by (score, lowest index), NaN last, padded with -1."""

    def rank(t: int) -> tuple[bool, float, int]:
        return (row[t] != row[t], 0.0 if row[t] != row[t] else -row[t], t)

    chosen = sorted((t for t in range(len(row)) if eligible[t]), key=rank)[:k]
    return (chosen if by_score else sorted(chosen)) + [-1] * (k - len(chosen))
