"""Which member of the routing family a region computes, found by running it.

The region runs on a handful of inputs, each made to tell some members apart:

* ordinary logits with small and with large biases: the scoring, the groups, what the bias is added to;
* very negative logits: eps, and whether it is added or a lower bound;
* saturated logits, where scores tie and logits do not: what the choice looks at;
* logits closer together than the rounding of half precision: probabilities rounded before the choice;
* a backward pass: a detached path would keep its value and lose its gradient.

Exactly one member is left (or several that no input tells apart; the plainest is taken), or the region is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_deep.passes._types import Refusal, Solution
from ascend_deep.passes.graph_view import op_name
from ascend_deep.passes.region import Region
from ascend_deep.passes.router_bench import Bench, TiedTokens
from ascend_deep.passes.router_family import (
    CHOSEN,
    SCORINGS,
    Groups,
    Observation,
    Weighting,
    choice_tensors,
    describe_groups,
    explains_choice,
    fit_weights,
    weigh,
)
from ascend_deep.passes.router_selection import named_args

__all__ = ["Evidence", "group_candidates", "observe_all", "solve"]

_ROWS = 24
# Relative rounding of weights by their dtype: a few roundings in a row for half precision, f32 exp and sums else.
ROUNDING = {torch.float32: 5e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float64: 5e-5}
_TINY = {torch.float16: 1e-3}


@dataclass(frozen=True)
class Evidence:
    """Everything observed about one region."""

    plain: tuple[Observation, ...]
    tiny: Observation
    saturated: Observation
    close: Observation

    @property
    def choices(self) -> tuple[Observation, ...]:
        """Runs that the ids must be explained on."""
        return (*self.plain, self.close)

    @property
    def weights(self) -> tuple[Observation, ...]:
        """Runs that the weights must be explained on."""
        return (*self.plain, self.tiny)


def observe_all(bench: Bench) -> Evidence:
    """Run the region on every kind of input. Errors of the region propagate."""
    g = torch.Generator().manual_seed(20240)
    experts = bench.experts
    bias: Tensor | None = None

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    plain = []
    for spread, shift in ((2.0 / experts, 0.0), (0.3, 0.0), (0.4, -0.9)):
        if bench.bias_dtype is not None:
            bias = randn(experts) * spread + shift
        plain.append(bench.observe(randn(_ROWS, experts) * (1.0 + 4 * spread), bias))
        if bench.bias_dtype is None and len(plain) == 2:
            break
    # Small scores: rows at falling levels; rows of wide spread, in which a bias chooses experts that softmax gives next
    # to nothing; rows so low that every elementwise score is zero.
    half = _ROWS // 2
    low = randn(half, experts) + torch.linspace(-3, -70, half)[:, None]
    sparse = randn(half - 3, experts) * 30 - 60
    if bench.bias_dtype is not None:
        bias = randn(experts) * 0.5
    tiny = bench.observe(torch.cat([low, sparse, randn(3, experts) - 230]), bias)
    if bench.bias_dtype is not None:
        bias = torch.zeros(experts)
    high = 20 + 40 * torch.rand(half, experts, generator=g)
    wide = randn(half, experts) * 400
    saturated = bench.observe(torch.cat([high, wide]), bias)
    # Neighbours: steps that f32 scores resolve and half-precision scores do not.
    step = 2e-4 if bench.dtype in (torch.float32, torch.float64) else float(torch.finfo(bench.dtype).eps) / 2
    ranks = torch.rand(_ROWS, experts, generator=g).argsort(-1)
    close = bench.observe(0.5 + (60 - ranks.clamp(max=60)) * step, bias)
    return Evidence(tuple(plain), tiny, saturated, close)


def group_candidates(region: Region, experts: int) -> list[Groups]:
    """No groups, then the groups that the region's shapes allow."""
    counts: dict[int, None] = {}
    widths: dict[int, set[int]] = {}
    for node in region.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            a, b = value.shape[-2:]
            if isinstance(a, int) and isinstance(b, int) and a * b == experts and a > 1 and value.dim() >= 3:
                counts.setdefault(a)
        if op_name(node) == "aten.topk":
            args = named_args(node)
            source = args["self"].meta.get("val")
            if isinstance(source, torch.Tensor) and isinstance(args["k"], int):
                widths.setdefault(source.shape[-1], set()).add(args["k"])
    found = [Groups()]
    for count in counts:
        keeps = sorted(k for k in widths.get(count, set()) if k < count) or list(range(1, count))
        for keep in keeps:
            for fill in ("neg_inf", "zero"):
                scores = ("top2", "max") if count < experts else ("max",)
                found.extend(Groups(count, keep, score, fill) for score in scores)
    return found


def solve(region: Region) -> Solution | Refusal:
    """The member of ``moe_route`` that ``region`` computes, or a sentence that says what differs."""
    bench = Bench(region)
    if torch.float64 in (bench.dtype, bench.out_dtype):
        return Refusal("the router runs in float64; the op computes in float32.", region.outputs[0])
    try:
        evidence = observe_all(bench)
    except TiedTokens:
        return Refusal(
            "the number of tokens cannot be chosen without changing another size of the block, so it cannot be run on "
            "tokens of its own.",
            region.outputs[0],
        )
    except Exception as error:
        return Refusal(f"the block does not run on its own: {_first_line(error)}.", region.outputs[0])
    invalid = _invalid_ids(evidence, bench)
    if invalid:
        return Refusal(invalid, region.outputs[0])
    choices = explained(evidence, bench, group_candidates(region, bench.experts))
    fits = weightings(evidence, bench)
    members = list(_members(bench, choices, [f for f in fits if isinstance(f, Weighting)], evidence))
    if not members:
        from ascend_deep.passes.router_diagnosis import diagnose

        return diagnose(region, bench, evidence, choices, fits)
    attrs, weighting = members[0]
    refusal = _check_gradient(bench, weighting, evidence) if weighting is not None else None
    if refusal is not None:
        return refusal
    notes = []
    if region.hints.get("uncut"):
        notes.append(f"a larger part stays outside the op: {region.hints['uncut']}")
    if region.hints.get("left"):
        notes.append(f"left outside the op: {region.hints['left']}")
    if region.hints["order"] == "open":
        notes.append("the block leaves the order of the chosen experts open; the op returns them in descending order.")
    return Solution("moe_route", attrs, tuple(notes))


def _invalid_ids(evidence: Evidence, bench: Bench) -> str:
    for seen in (*evidence.choices, evidence.tiny):
        ordered = seen.ids.sort(-1).values
        if bool((ordered[:, :1] < 0).any()) or bool((ordered[:, -1:] >= bench.experts).any()):
            return "some chosen ids are no experts: the block marks or shifts ids, which the op does not do."
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            return "the block may choose an expert twice for a token; the op's ids are distinct."
    return ""


def explained(evidence: Evidence, bench: Bench, groups: Sequence[Groups]) -> list[tuple[str, Groups]]:
    """(what is chosen by, within which groups) for every way that explains the ids of all runs."""
    order = str(bench.region.hints["order"])
    left = [(kind, g) for g in groups for kind in (*SCORINGS, "logits")]
    for seen in evidence.choices:
        tensors = choice_tensors(seen)
        ids = seen.ids.flip(-1) if order == "ascending" else seen.ids
        left = [(k, g) for k, g in left if bool(explains_choice(tensors[k], ids, g, order != "open").all())]
        if not left:
            break
    return left


def weightings(evidence: Evidence, bench: Bench) -> list[Weighting | float]:
    """Weightings that explain the weights of all runs; empty for a region that returns ids only."""
    if bench.out_dtype is None:
        return []
    rtol, tiny = ROUNDING[bench.out_dtype], _TINY.get(bench.out_dtype, 1e-33)
    return list(fit_weights(evidence.weights, bench.region.constants(), rtol, tiny))


def _members(
    bench: Bench, choices: Sequence[tuple[str, Groups]], fits: Sequence[Weighting], evidence: Evidence
) -> Iterator[tuple[dict[str, Any], Weighting | None]]:
    """Members of the family that explain everything, the preferred one first."""
    found: list[tuple[tuple[int, int], dict[str, Any], Weighting | None]] = []
    for position, (kind, groups) in enumerate(choices):
        exact = _exact_when_saturated(evidence, bench, kind, groups)
        base = {"topk": bench.chosen, **describe_groups(groups)}
        if bench.out_dtype is None:
            select = {"scoring": "softmax" if kind == "logits" else kind, "select": "logits"}
            if kind != "logits":
                select["select"] = "scores"
            found.append(((not exact, position), {**base, **select, "renorm": "none", "eps": 0.0, "scale": 1.0}, None))
        for fit in fits:
            scoring = "softmax" if fit.kind == CHOSEN else fit.kind
            if kind == "logits" and fit.kind != "softmax":
                select = {"scoring": scoring, "select": "logits"}
            elif kind == fit.kind:
                select = {"scoring": scoring, "select": "scores"}
            else:
                continue
            attrs = {**base, **select, "renorm": fit.renorm, "eps": fit.eps, "scale": fit.scale}
            found.append(((not exact, position), attrs, fit))
    for _, attrs, weighting in sorted(found, key=lambda f: f[0]):
        order = ("topk", "scoring", "select", "renorm", "eps", "scale", *describe_groups(Groups()))
        yield {name: attrs[name] for name in order}, weighting


def _exact_when_saturated(evidence: Evidence, bench: Bench, kind: str, groups: Groups) -> bool:
    """Does ``kind`` explain the ids where scores tie and logits do not?

    If the logits do, the block chooses by logits (by scores it would have met ties and broken them some other way);
    then a scoring that ties there is not exact, although its own ties hide it.
    """
    seen = evidence.saturated
    ordered = str(bench.region.hints["order"])
    ids = seen.ids.flip(-1) if ordered == "ascending" else seen.ids
    tensors = choice_tensors(seen)
    by_logits = bool(explains_choice(tensors["logits"], ids, groups, ordered != "open").all())
    if kind == "logits":
        return by_logits
    own = bool(explains_choice(tensors[kind], ids, groups, ordered != "open").all())
    return own and (not by_logits or kind == "sqrtsoftplus")


def _check_gradient(bench: Bench, how: Weighting, evidence: Evidence) -> Refusal | None:
    """The backward of the region must be that of the op: the same to the logits, none to the bias."""
    seen = evidence.plain[0]
    g = torch.Generator().manual_seed(7)
    grad = torch.randn(seen.ids.shape, generator=g)
    where = bench.region.outputs[0]
    try:
        found = bench.differentiate(seen.logits, seen.bias, grad)
    except Exception as error:
        return Refusal(f"the block cannot be differentiated: {_first_line(error)}.", where)
    if found is None:
        return Refusal(
            "the weights are detached from the logits; the op would pass a gradient back.",
            where,
            "Leave out detach() or no_grad() around the routing weights, or freeze the gate instead.",
        )
    d_logits, d_bias = found
    rows = d_logits.shape[0]
    with torch.inference_mode(False), torch.enable_grad():
        logits = seen.logits.repeat(-(-rows // seen.logits.shape[0]), 1)[:rows].clone().requires_grad_()
        ids = seen.ids.repeat(-(-rows // seen.ids.shape[0]), 1)[:rows].clone()
        weights = weigh(how, logits, ids)
        (wanted,) = torch.autograd.grad(weights, logits, grad.repeat(-(-rows // grad.shape[0]), 1)[:rows].clone())
    assert bench.out_dtype is not None
    coarse = max(torch.finfo(bench.dtype).eps, torch.finfo(bench.out_dtype).eps)
    size = float(wanted.abs().max())
    if float((d_logits - wanted).abs().max()) > max(2e-4, 16 * coarse) * size:
        return Refusal(
            "the weights have the op's values but another gradient: part of the way from the logits is detached.",
            where,
        )
    if d_bias is not None and float(d_bias.abs().max()) > 1e-6 * max(size, 1e-6):
        return Refusal("a gradient flows into the bias; in the op the bias takes part in the choice only.", where)
    return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160].rstrip('.')}" if lines else type(error).__name__
