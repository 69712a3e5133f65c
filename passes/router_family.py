"""The finite family of ``moe_route``, in a form that makes solving quick.

A member is a choice (which tensor experts are chosen by, and within which groups) and a weighting (which scores are
taken at the chosen ids, and how they are normalised). The two are solved apart from each other: given the ids that a
region returned, ``explains_choice`` asks whether a choice tensor explains them, and ``fit_weights`` asks which
weightings explain the weights. Ties need no care that way: ids are right if nothing outside them is larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "CHOSEN",
    "SCORINGS",
    "Groups",
    "Observation",
    "Weighting",
    "choice_tensors",
    "explains_choice",
    "fit_weights",
    "score",
    "weigh",
]

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
# Scores of the chosen logits alone: softmax over K. (The other scorings are elementwise: it makes no difference.)
CHOSEN = "softmax of the chosen"

_TINY = 1e-33  # below, f32 products lose digits to denormals


@dataclass(frozen=True)
class Observation:
    """One run of a region: logits [R, E] f32 (exactly what ran), bias [E] f32, weights [R, K] f64, ids [R, K]."""

    logits: Tensor
    bias: Tensor | None
    weights: Tensor | None
    ids: Tensor


@dataclass(frozen=True)
class Groups:
    """Choice within the ``keep`` best of ``count`` groups; ``count=1``: no groups."""

    count: int = 1
    keep: int = 1
    score: str = "top2"
    fill: str = "neg_inf"


@dataclass(frozen=True)
class Weighting:
    """Scores u at the ids: ``scale * u``, ``scale * u / (sum u + eps)`` or ``scale * u / max(sum u, eps)``."""

    kind: str
    renorm: str = "none"
    eps: float = 0.0
    scale: float = 1.0


def score(kind: str, logits: Tensor) -> Tensor:
    """``logits`` f32 as scores; ``kind`` "logits" leaves them as they are."""
    if kind == "softmax":
        return logits.softmax(-1)
    if kind == "sigmoid":
        return logits.sigmoid()
    if kind == "sqrtsoftplus":
        return torch.nn.functional.softplus(logits).sqrt()
    return logits


def choice_tensors(seen: Observation) -> dict[str, Tensor]:
    """What experts may be chosen by, before groups: each scoring, and the logits, plus the bias."""
    bias = 0.0 if seen.bias is None else seen.bias
    return {kind: score(kind, seen.logits) + bias for kind in (*SCORINGS, "logits")}


def explains_choice(choice: Tensor, ids: Tensor, groups: Groups, ordered: bool) -> Tensor:
    """Per row: are ``ids`` a right top K of ``choice`` within ``groups``, in descending order if ``ordered``?

    Rows in which the groups themselves are a close call count as right.
    """
    close = torch.zeros(choice.shape[0], dtype=torch.bool)
    if groups.count > 1:
        grouped = choice.unflatten(-1, (groups.count, -1))
        size = grouped.shape[-1]
        best = grouped.topk(2, -1).values.sum(-1) if groups.score == "top2" and size > 1 else grouped.amax(-1)
        ranked, kept = best.sort(dim=-1, descending=True)
        if groups.keep < groups.count:
            gap = ranked[:, groups.keep - 1] - ranked[:, groups.keep]
            close = gap <= 2e-6 * ranked.abs().amax(-1)
        dropped = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept[:, : groups.keep], False)
        fill = 0.0 if groups.fill == "zero" else -torch.inf
        choice = choice.masked_fill(dropped.repeat_interleave(size, -1), fill)
    margin = 1e-6 * choice.abs().masked_fill(choice.isinf(), 0.0).amax(-1)
    chosen = choice.gather(-1, ids)
    others = choice.scatter(-1, ids, -torch.inf).amax(-1)
    right = chosen.amin(-1) >= others - margin
    if ordered and ids.shape[-1] > 1:
        falling = chosen[:, :-1] >= chosen[:, 1:] - margin[:, None]
        right &= falling.all(-1)
    return right | close


def weigh(how: Weighting, logits: Tensor, ids: Tensor) -> Tensor:
    """Weights [R, K] of ``logits`` [R, E] at ``ids``. Differentiable."""
    u = _scores_at(how.kind, logits, ids)
    total = u.sum(-1, keepdim=True)
    if how.renorm == "sum":
        u = u / (total + how.eps)
    elif how.renorm == "clamp":
        u = u / total.clamp(min=how.eps)
    return u * how.scale


# -- weights --------------------------------------------------------------------------------------------------------
def fit_weights(
    seen: Sequence[Observation], constants: Sequence[float], rtol: float, tiny: float
) -> Iterator[Weighting | float]:
    """Weightings that explain all observed weights, simplest first.

    A scale that fits but is no constant of the region (nor product, quotient or reciprocal of such) is yielded as a
    plain number: the caller may say so, and must refuse.

    Args:
        constants: number literals of the region: candidates for eps and scale.
        rtol: relative rounding of the weights.
        tiny: weights below are not used to find the scale.
    """
    observed = torch.cat([o.weights for o in seen if o.weights is not None])
    epsilons = sorted({abs(c) for c in constants if 0 < abs(c) <= 1.0})
    forms = [("none", 0.0), ("sum", 0.0)]
    forms += [(renorm, e) for renorm in ("sum", "clamp") for e in epsilons]
    for kind in (CHOSEN, *SCORINGS):
        u = torch.cat([_scores_at(kind, o.logits, o.ids).double() for o in seen])
        steady = (u.amin(-1) > _TINY) & (observed.amin(-1) > tiny) & observed.isfinite().all(-1)
        if not bool(steady.any()):
            continue
        # Whatever the normalisation, within a row the weights are in proportion to the scores.
        ratio = observed[steady] / u[steady]
        if bool(((ratio / ratio.mean(-1, keepdim=True) - 1).abs() > rtol).any()):
            continue
        total = u.sum(-1, keepdim=True)
        divisors = torch.stack([_divisor(renorm, eps, total) for renorm, eps in forms])
        scales = observed[steady] / (u[steady] / divisors[:, steady])
        middle = scales.flatten(1).median(-1).values
        spread = (scales / middle[:, None, None] - 1).abs().flatten(1).amax(-1)
        # A small eps may stay within rounding; the form that fits best by far is the region's own.
        enough = min(rtol, max(4 * float(spread.nan_to_num(torch.inf).amin()), rtol / 50))
        for i, (renorm, eps) in enumerate(forms):
            if not spread[i] <= enough:
                continue
            if kind == CHOSEN and renorm != "none" and (eps == 0.0 or renorm == "clamp"):
                continue  # the weights sum to one already
            scale = _snap(float(middle[i]), constants, rtol)
            if scale is None:
                yield float(middle[i])
            elif _agrees(u / divisors[i] * scale, observed, rtol, tiny):
                yield Weighting(kind, renorm, eps, scale)


def _scores_at(kind: str, logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids).softmax(-1) if kind == CHOSEN else score(kind, logits).gather(-1, ids)


def _divisor(renorm: str, eps: float, total: Tensor) -> Tensor:
    if renorm == "none":
        return torch.ones_like(total)
    return total + eps if renorm == "sum" else total.clamp(min=eps)


def _agrees(wanted: Tensor, observed: Tensor, rtol: float, tiny: float) -> bool:
    """All rows, underflow included: NaN at the same places, and equal within rounding (of denormals, where tiny)."""
    if not torch.equal(wanted.isnan(), observed.isnan()):
        return False
    error = (wanted - observed).abs().nan_to_num(0.0)
    size = wanted.abs().nan_to_num(0.0)
    loose = torch.where(size > 1e-28, rtol, 0.05)
    return bool((error <= torch.clamp(loose * size, min=tiny)).all())


def _snap(value: float, constants: Sequence[float], rtol: float) -> float | None:
    """The constant that ``value`` is: 1, a literal of the region, or a product, quotient or reciprocal of two."""
    literals = [c for c in constants if c > 0 and c != float("inf")]
    simple = [1.0, *literals]
    products = [f(a, b) for a in literals for b in simple for f in (_times, _over, _under)]
    for candidates in (simple, products):
        near = [c for c in candidates if abs(c / value - 1) <= rtol / 2]
        if near:
            return min(near, key=lambda c: abs(c / value - 1))
    return None


def _times(a: float, b: float) -> float:
    return a * b


def _over(a: float, b: float) -> float:
    return a / b


def _under(a: float, b: float) -> float:
    return b / a


def describe_groups(groups: Groups) -> dict[str, Any]:
    """The attributes of ``moe_route`` for ``groups``."""
    return {
        "n_group": groups.count,
        "topk_group": groups.keep,
        "group_score": groups.score,
        "group_fill": groups.fill,
    }
