"""Says in a sentence what a router does that ``moe_route`` does not.

Each check is a hypothesis about the region: it is tested on the runs that ``router_solve`` made, and named only if it
explains them. Structure (the dim of a softmax, ``largest=False``) is used where it says more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import op_name
from ascend_deep.passes.region import Region
from ascend_deep.passes.router_bench import Bench
from ascend_deep.passes.router_family import SCORINGS, Groups, Observation, Weighting, choice_tensors, explains_choice
from ascend_deep.passes.router_selection import named_args
from ascend_deep.passes.router_solve import Evidence, explained, group_candidates, observe_all

__all__ = ["diagnose"]


def diagnose(
    region: Region,
    bench: Bench,
    evidence: Evidence,
    choices: Sequence[tuple[str, Groups]],
    fits: Sequence[Weighting | float],
) -> Refusal:
    """Why no member of the family fits: ``choices`` explain the ids, ``fits`` the weights (either may be empty)."""
    where = region.outputs[0]
    if not region.hints.get("largest"):
        return Refusal("no member of the op's family computes this smaller part of the block.", where)
    if region.hints.get("uncut"):
        return Refusal(str(region.hints["uncut"]), where)  # a larger region may fit, but cannot be cut out
    structural = _from_structure(region, bench)
    if structural is not None:
        return structural
    if _mixes_tokens(bench, evidence):
        return Refusal(
            "the routing of a token depends on the other tokens of the batch.",
            where,
            "Normalise over the experts of one token (dim=-1), not over tokens.",
        )
    if not choices:
        reason, hint = _choice(region, bench, evidence)
        return Refusal(reason, where, hint)
    good = [f for f in fits if isinstance(f, Weighting)]
    if good:
        scored = " and ".join(sorted({f.kind for f in good}))
        chosen = " or ".join(sorted({kind for kind, _ in choices}))
        return Refusal(f"experts are chosen by {chosen}, but the weights are {scored}; the op uses one scoring.", where)
    reason, hint = _weights(bench, evidence, fits)
    return Refusal(reason, where, hint)


# -- structure ------------------------------------------------------------------------------------------------------
def _from_structure(region: Region, bench: Bench) -> Refusal | None:
    nodes = [n for n in region.nodes if n.op == "call_function"]
    for node in nodes:
        name = op_name(node)
        args = named_args(node)
        if name in ("aten.softmax", "aten._softmax", "aten.log_softmax"):
            value = node.meta["val"]
            dim = int(args["dim"]) % max(value.dim(), 1)
            if dim != value.dim() - 1:
                what = "tokens" if value.shape[-1] in (bench.experts, bench.chosen) else "something else"
                return Refusal(
                    f"softmax is over dim {dim} ({what}); experts are on dim {value.dim() - 1}.",
                    node,
                    "Use softmax(dim=-1).",
                )
        if name == "aten.topk" and not args["largest"]:
            return Refusal(
                "the smallest scores are chosen (largest=False); the op chooses the largest.",
                node,
                "Negate the scores, or choose with largest=True.",
            )
        if name in ("aten.cumsum", "aten.logcumsumexp") and node.meta["val"].is_floating_point():
            return Refusal(
                "the number of experts of a token depends on a cumulative probability (top-p); the op takes topk.", node
            )
    if _is_sparsemixer(nodes):
        return Refusal(
            "each chosen expert is weighed by a softmax over its own thresholded set of experts (sparsemixer); the op "
            "applies one scoring to all experts.",
            region.outputs[0],
        )
    return None


def _is_sparsemixer(nodes: Sequence[fx.Node]) -> bool:
    """A comparison whose result masks the input of a softmax, more than once."""
    masked = 0
    for node in nodes:
        if op_name(node) in ("aten.softmax", "aten._softmax"):
            source = node.args[0]
            if op_name(source) in ("aten.masked_fill", "aten.where"):
                mask = [a for a in source.all_input_nodes if op_name(a) in _COMPARISONS]  # type: ignore[union-attr]
                masked += bool(mask)
    return masked >= 2


_COMPARISONS = frozenset({"aten.gt", "aten.lt", "aten.ge", "aten.le"})


def _mixes_tokens(bench: Bench, evidence: Evidence) -> bool:
    """Does the result for a token change when the others do?"""
    seen = evidence.plain[0]
    rows = int(torch.Size(bench.plan(seen.logits.shape[0])[1]).numel())
    if rows < 2:
        return False
    other = seen.logits.clone()
    other[1:] = other[1:].flip(-1) * 1.5 - 2.0
    again = bench.observe(other, seen.bias)
    if not torch.equal(again.ids[0], seen.ids[0]):
        return True
    if seen.weights is None or again.weights is None:
        return False
    return bool((again.weights[0] - seen.weights[0]).abs().max() > 1e-4 * seen.weights[0].abs().max())


# -- tensors that hypotheses are about --------------------------------------------------------------------------------
def _biased(seen: Observation, kind: str) -> Tensor:
    return choice_tensors(seen)[kind]


def _unbiased(seen: Observation, kind: str) -> Tensor:
    return choice_tensors(Observation(seen.logits, None, None, seen.ids))[kind]


def _negated(seen: Observation, kind: str) -> Tensor:
    return -choice_tensors(seen)[kind]


def _less_bias(seen: Observation, kind: str) -> Tensor:
    assert seen.bias is not None
    return _unbiased(seen, kind) - seen.bias


def _times_bias(seen: Observation, kind: str) -> Tensor:
    assert seen.bias is not None
    return _unbiased(seen, kind) * seen.bias


def _rounded(seen: Observation, kind: str, dtype: torch.dtype) -> Tensor:
    bias = 0.0 if seen.bias is None else seen.bias
    return (_unbiased(seen, kind).to(dtype).float() + bias).to(dtype).float()


# -- the choice -----------------------------------------------------------------------------------------------------
_SUBTRACTED = ("the bias is subtracted from the scores; the op adds it.", "Pass the negated bias.")
_MULTIPLIED = ("the bias multiplies the scores; the op adds it.", "")
_UNUSED = ("the vector per expert takes no part in the choice; the op's bias does nothing else.", "")


def _choice(region: Region, bench: Bench, evidence: Evidence) -> tuple[str, str]:
    ordered = str(region.hints["order"]) != "open"
    groups = group_candidates(region, bench.experts)
    kinds = (*SCORINGS, "logits")
    if any(_explains(evidence, partial(_negated, kind=k), [Groups()], False) for k in kinds):
        return "the smallest scores are chosen; the op chooses the largest.", "Choose with descending=True or negate."
    rounded = _rounding(bench, evidence, groups)
    if rounded:
        return rounded, "Compute the scores in float32: softmax(logits, dtype=torch.float32), or logits.float() first."
    if ordered and any(_explains(evidence, partial(_biased, kind=k), groups, False) for k in kinds):
        return (
            "the chosen experts are not in descending order of their score; the op returns them so.",
            "Take the first columns of a descending sort, or topk(sorted=True).",
        )
    if bench.bias_dtype is not None:
        for tensor, sentence in ((_less_bias, _SUBTRACTED), (_times_bias, _MULTIPLIED), (_unbiased, _UNUSED)):
            if any(_explains(evidence, partial(tensor, kind=k), groups, ordered) for k in kinds):
                return sentence
    if len(groups) > 1:
        counts = ", ".join(str(c) for c in sorted({g.count for g in groups if g.count > 1}))
        return (
            f"experts are chosen within groups ({counts} of them, by the shapes), but by no group score that the op "
            "knows: the sum of a group's two best scores, or its best.",
            "",
        )
    return (
        "the chosen experts are not the K largest of softmax, sigmoid or sqrt(softplus) of the logits, nor of the "
        "logits themselves.",
        "",
    )


_ROUNDED = "the scores are rounded to {} before the choice, which makes ties; the op chooses in float32."


def _rounding(bench: Bench, evidence: Evidence, groups: Sequence[Groups]) -> str:
    """The sentence for a choice that half-precision rounding decides."""
    if bench.dtype in (torch.bfloat16, torch.float16):
        exact = Bench(bench.region, torch.float32)
        try:
            explains = bool(explained(observe_all(exact), exact, groups))
        except RuntimeError:  # the block has casts of its own that do not go together with float32
            explains = False
        if explains:
            return _ROUNDED.format(str(bench.dtype).removeprefix("torch."))
    for dtype in (torch.bfloat16, torch.float16):
        for kind in SCORINGS:
            if _explains(evidence, partial(_rounded, kind=kind, dtype=dtype), groups, False):
                return _ROUNDED.format(str(dtype).removeprefix("torch."))
    return ""


def _explains(
    evidence: Evidence, tensor: Callable[[Observation], Tensor], groups: Sequence[Groups], ordered: bool
) -> bool:
    """Does ``tensor`` explain the ids of all runs within one of ``groups``?"""
    return any(all(bool(explains_choice(tensor(o), o.ids, g, ordered).all()) for o in evidence.choices) for g in groups)


# -- the weights ----------------------------------------------------------------------------------------------------
def _one(w: Tensor) -> Tensor:
    return torch.ones_like(w)


def _sum(w: Tensor) -> Tensor:
    return w.sum(-1, keepdim=True)


def _largest(w: Tensor) -> Tensor:
    return w.amax(-1, keepdim=True)


def _length(w: Tensor) -> Tensor:
    return w.norm(dim=-1, keepdim=True)


def _weights(bench: Bench, evidence: Evidence, fits: Sequence[Weighting | float]) -> tuple[str, str]:
    scales = [f for f in fits if isinstance(f, float)]
    if scales:
        return (
            f"the weights are scaled by {scales[0]:.6g}, which is no constant of the block.",
            "The op multiplies by a constant; scale the output of the experts instead.",
        )
    if any(o.weights is None or bool(o.weights.isnan().any()) for o in evidence.plain):
        return "the weights are not finite, or not zero beside the chosen experts.", ""
    if bench.bias_dtype is not None:
        for kind in (*SCORINGS, "logits"):
            biased = partial(_biased, kind=kind)
            if any(_proportional(evidence, biased, d) for d in (_one, _sum, _largest)):
                return (
                    "the biased scores are used as weights; the op weights with unbiased scores.",
                    "Gather the weights from the scores before the bias: scores.gather(-1, ids).",
                )
    for kind in SCORINGS:
        for what, divisor in (("largest weight", _largest), ("length", _length)):
            if _proportional(evidence, partial(_unbiased, kind=kind), divisor):
                return f"the weights of a token are divided by their {what}; the op divides by their sum or not.", ""
    temperature = _temperature(evidence)
    if temperature is not None:
        return (
            f"the logits are divided by {temperature:.4g} before the softmax; the op has no temperature.",
            "Scale the logits before the router, or fold the factor into the gate's weight.",
        )
    if any(_proportional_by_row(evidence, kind) for kind in SCORINGS):
        return "the scale of the weights depends on the token; the op has one constant scale.", ""
    return (
        "the weights are not softmax, sigmoid or sqrt(softplus) of the logits, divided by their sum or not, times a "
        "constant.",
        "",
    )


def _proportional(
    evidence: Evidence, tensor: Callable[[Observation], Tensor], divisor: Callable[[Tensor], Tensor]
) -> bool:
    """Are the weights ``tensor`` at the ids, over ``divisor`` of it, times one constant?"""
    ratios = []
    for o in evidence.plain:
        assert o.weights is not None
        u = tensor(o).gather(-1, o.ids).double()
        ratios.append((o.weights / (u / divisor(u))).flatten())
    ratio = torch.cat(ratios)
    return bool(((ratio / ratio.median() - 1).abs() < 2e-2).all())


def _proportional_by_row(evidence: Evidence, kind: str) -> bool:
    for o in evidence.plain:
        assert o.weights is not None
        ratio = o.weights / _unbiased(o, kind).gather(-1, o.ids).double()
        if not bool(((ratio / ratio.mean(-1, keepdim=True) - 1).abs() < 1e-2).all()):
            return False
    return True


def _temperature(evidence: Evidence) -> float | None:
    """The temperature of a softmax, if the logarithms of the weights are linear in the logits."""
    slopes = []
    for o in evidence.plain:
        assert o.weights is not None
        if o.ids.shape[-1] < 2 or bool((o.weights <= 0).any()):
            return None
        x, y = o.logits.gather(-1, o.ids).double(), o.weights.log()
        apart = (x[:, :1] - x[:, 1:]).abs() > 0.05
        slopes.append(((y[:, :1] - y[:, 1:]) / (x[:, :1] - x[:, 1:]))[apart])
    slope = torch.cat(slopes)
    if not slope.numel():
        return None
    middle = float(slope.median())
    steady = bool(((slope / middle - 1).abs() < 5e-2).all())
    return 1 / middle if steady and middle > 0 and abs(middle - 1) > 1e-2 else None
