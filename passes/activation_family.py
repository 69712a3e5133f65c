"""The finite family of activations between the products of an MLP, and its evaluation on small tensors.

A member is a row of ``ops.ACTIVATIONS`` with its scalars. Scalars are never fitted: a limit or an alpha is one of the
constants that the block itself contains, so it is exact or it is not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import ACTIVATIONS

__all__ = ["EXACT", "Activated", "limits_of", "members", "scales"]

# Region and family are compared in f64; constants of hand-written activations have ten digits or so.
EXACT = 1e-7

_MAX_LIMIT = 1e4


@dataclass(frozen=True)
class Activated:
    """One member: activation, scalars and where gate and up lie."""

    act: str
    alpha: float
    limit: float | None
    interleaved: bool

    def apply(self, h: Tensor, gated: bool) -> Tensor:
        """h [.., N] (gate and up, or without a gate the input) to [.., I]."""
        if not gated:
            gate, up = h, None
        elif self.interleaved:
            gate, up = h[..., ::2], h[..., 1::2]
        else:
            gate, up = h.chunk(2, dim=-1)
        return ACTIVATIONS[self.act].forward(gate, up, self.alpha, self.limit)

    def attrs(self) -> dict[str, Any]:
        """As attributes of an op."""
        return {"act": self.act, "alpha": self.alpha, "limit": self.limit, "interleaved": self.interleaved}


def limits_of(constants: Iterable[float]) -> list[float]:
    """Which of a block's constants may be a clamp limit: positive and finite, without sign, ascending."""
    return sorted({abs(c) for c in constants if c and math.isfinite(c) and abs(c) <= _MAX_LIMIT})


def members(constants: Sequence[float], gated: bool) -> list[Activated]:
    """Every member that a block with these constants could be, plainest first."""
    limits: list[float | None] = [None, *limits_of(constants)]
    found = []
    for limit in limits:
        for interleaved in (False, True) if gated else (False,):
            for activation in ACTIVATIONS.values():
                if (activation.gated_only and not gated) or (activation.clamp_after and limit is None):
                    continue
                if activation.softcap and not limits_of(constants):
                    continue  # a cap is a number of the block
                alphas = [1.0]
                if activation.uses_alpha:
                    alphas += [c for c in dict.fromkeys(abs(c) for c in constants) if c not in (0.0, 1.0) and c < 100]
                found += [Activated(activation.name, alpha, limit, interleaved) for alpha in alphas]
    return found


def scales(constants: Sequence[float]) -> list[float]:
    """Magnitudes at which an activation must be looked at: order 1, and beyond each limit it may have."""
    limits = limits_of(constants)
    return [1.0, *dict.fromkeys(1.7 * limit for limit in (limits[:1] + limits[len(limits) // 2 :][:1] + limits[-1:]))]


def fits(candidates: Tensor, want: Tensor) -> list[int]:
    """Indices of the candidates [C, ..] that equal ``want`` [..] to ``EXACT`` of its size."""
    if want.numel() == 0:
        return []
    scale = float(want.abs().max()) or 1.0
    errors = (candidates - want).abs().flatten(1).amax(1)
    return [i for i, e in enumerate(errors.tolist()) if e <= EXACT * scale]


def match(family: Sequence[Activated], cases: Iterable[tuple[Tensor, Tensor]], gated: bool) -> list[Activated]:
    """Members whose value of h equals the wanted one in every case (h [.., N], wanted [.., I], f64)."""
    left = list(family)
    for h, want in cases:
        if not left:
            break
        got = torch.stack([member.apply(h, gated) for member in left])
        left = [left[i] for i in fits(got, want)]
    return left
