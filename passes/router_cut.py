"""Where a router sits in a graph: the choice of experts, the logits before it and the weights after it.

Nothing here decides what a router computes. A group-limited router holds two selections (``router_selection``), the
second one made from the first. The last one is the anchor.

Around an anchor there are several places to cut. The logits may be any [.., E] tensor on the way from the gate matmul
to the scores, the weights any [.., K] tensor computed from the chosen scores, or a dense [.., E] tensor that is zero
where an expert was not chosen. ``cuts`` lists them, largest region first, so that what a model does around its router
(a temperature, a softcap, a scale per expert, a mask) stays outside when the op cannot express it.

The order of the K columns. ``topk(sorted=False)`` promises none (torch documents it so), which leaves the op free to
return its own, descending by choice; a sorted selection keeps its order exactly. Either way all users of the ids and
of the weights see one and the same order. An interior tensor that is used outside keeps the old order, so a region
with such a user is listed only if that order is the op's as well: a sorted selection, and values that come straight
from it (at ties the positions of equal values agree, those of gathered ones may not).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.purity import is_pure
from ascend_deep.passes.region import Region, slice_region
from ascend_deep.passes.router_selection import Selection, selection

__all__ = ["anchors", "cuts"]

# A router has at most this many experts; a topk over more (a vocabulary, a key cache) is something else.
MAX_EXPERTS = 2048
MAX_CHOSEN = 128
_MAX_CONE = 400
_MAX_REGIONS = 16

# Where scores come from. The walk from a selection back to the logits ends here.
_SOURCES = frozenset(
    {
        "aten.linear", "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.matmul", "aten.mv", "aten.einsum",
        "aten.convolution", "aten.embedding", "aten._grouped_mm", "aten._scaled_mm", "aten.layer_norm",
        "aten.native_layer_norm", "aten.rms_norm", "aten.scaled_dot_product_attention", "aten.histc",
    }
)  # fmt: skip

# Ops that can turn logits into scores. A region without one is not a router.
_SCORING = frozenset(
    {
        "aten.softmax", "aten._softmax", "aten.log_softmax", "aten.sigmoid", "aten.softplus", "aten.exp", "aten.tanh",
        "aten.relu", "aten.logsumexp", "aten.log_sigmoid", "aten.log_sigmoid_forward", "aten.exp2",
    }
)  # fmt: skip


# -- cones ----------------------------------------------------------------------------------------------------------
def _walkable(node: fx.Node) -> bool:
    return is_pure(node) and op_name(node) not in _SOURCES and not op_name(node).startswith("ascend_deep.")


def _is_size(view: GraphView, node: fx.Node) -> bool:
    return isinstance(view.val(node), (torch.SymInt, int, torch.SymFloat, float))


def _cone(view: GraphView, ends: Iterable[fx.Node], start: fx.Node | None = None) -> set[fx.Node]:
    """Everything that ``ends`` are computed from up to the sources, or to ``start``, these included."""
    seen: set[fx.Node] = set()
    pending = list(ends)
    while pending and len(seen) < _MAX_CONE:
        node = pending.pop()
        if node in seen or _is_size(view, node):
            continue
        seen.add(node)
        if node is not start and node.op == "call_function" and _walkable(node):
            pending.extend(node.all_input_nodes)
    return seen


def _expr(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _rows(shape: Sequence[Any]) -> sympy.Expr:
    return sympy.Mul(*(_expr(s) for s in shape))


def _same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(_expr(x) == _expr(y) for x, y in zip(a, b, strict=True))


def _sizes(view: GraphView, found: Selection) -> tuple[int, int] | None:
    """(E, K) if the selection may be a router's."""
    shape, scores = view.shape(found.ids), view.shape(found.scores)
    experts, chosen = scores[-1], 1 if found.squeezed else shape[-1]
    if not isinstance(experts, int) or not isinstance(chosen, int):
        return None
    if not (2 <= experts <= MAX_EXPERTS and 1 <= chosen <= min(experts, MAX_CHOSEN)):
        return None
    return (experts, chosen) if len(scores) >= 2 else None


def anchors(view: GraphView) -> list[fx.Node]:
    """The last selection of every router of the graph."""
    found = [s for n in view.graph.nodes if (s := selection(view, n)) is not None and _sizes(view, s) is not None]
    ids = {s.ids for s in found}
    inner: set[fx.Node] = set()
    kept: list[Selection] = []
    for candidate in found:
        cone = _cone(view, [candidate.ids])
        inner |= (cone & ids) - {candidate.ids}
        if _scored_before(view, candidate, cone) or _scored_later(view, candidate):
            kept.append(candidate)
    return [s.ids for s in kept if s.ids not in inner and not _only_compared(view, s)]


def _only_compared(view: GraphView, found: Selection) -> bool:
    """True if all that is asked of the ids is whether they are other ids: a test of a choice, and no choice."""
    users = list(found.ids.users)
    return bool(users) and all(
        op_name(user) in ("aten.eq", "aten.ne")
        and all(isinstance(a, fx.Node) and _same_shape(view.shape(a), view.shape(found.ids)) for a in user.args[:2])
        for user in users
    )


def _scored_before(view: GraphView, found: Selection, cone: Iterable[fx.Node]) -> bool:
    """True if a softmax or the like of all experts leads to the choice."""
    shape = view.shape(found.scores)
    rows, experts = _rows(shape[:-1]), shape[-1]
    for node in cone:
        if op_name(node) in _SCORING:
            own = view.shape(node)
            if len(own) >= 2 and _rows(own[:-1]) == rows and isinstance(own[-1], int) and own[-1] >= experts:
                return True
    return False


def _scored_later(view: GraphView, found: Selection) -> bool:
    """True if a softmax or the like follows the choice, on tensors of tokens by experts."""
    rank = len(view.shape(found.scores))
    widths = {view.shape(found.scores)[-1], 1 if found.squeezed else view.shape(found.ids)[-1]}
    seen: set[fx.Node] = set()
    pending = [*found.roots, found.ids, found.scores]
    while pending and len(seen) < 60:
        node = pending.pop()
        for user in node.users:
            if user in seen or not _walkable(user):
                continue
            seen.add(user)
            shape = view.shape(user)
            if op_name(user) in _SCORING and len(shape) <= rank and shape and shape[-1] in widths:
                return True
            if len(shape) <= rank:
                pending.append(user)
    return False


# -- cuts -----------------------------------------------------------------------------------------------------------
def cuts(view: GraphView, found: Selection, recogniser: str) -> list[Region] | Refusal:
    """Regions around a selection, largest first, or why there is none."""
    sizes = _sizes(view, found)
    assert sizes is not None
    experts, _ = sizes
    rows = _rows(view.shape(found.scores)[:-1])
    cone = _cone(view, [found.ids])
    logits = [
        n
        for n in sorted(cone, key=view.order.__getitem__)
        if (t := view.tensor(n)) is not None
        and t.is_floating_point()
        and t.dim() >= 2
        and t.shape[-1] == experts
        and _rows(t.shape[:-1]) == rows
    ]
    regions: list[Region] = []
    refusal: Refusal | None = None
    for returns, outputs in _outputs(view, found, cone, experts, rows):
        for n in logits:
            region = _region(view, recogniser, found, n, returns, outputs, experts)
            if isinstance(region, Refusal):
                refusal = refusal or region
            elif region is not None:
                if not regions:
                    region = replace(region, hints={**region.hints, "largest": True})
                    if refusal is not None:
                        region = replace(region, hints={**region.hints, "uncut": refusal.reason})
                else:
                    region = _with_note(region, regions[0])
                regions.append(region)
            if len(regions) == _MAX_REGIONS:
                return regions
    if regions:
        return regions
    return refusal or Refusal(
        "experts are chosen, but not from a tensor of scores per token and expert.",
        found.ids,
        "The op takes logits of shape [tokens, experts], straight from the gate's matmul.",
    )


def _outputs(
    view: GraphView, found: Selection, cone: set[fx.Node], experts: int, rows: sympy.Expr
) -> Iterator[tuple[str, tuple[fx.Node, ...]]]:
    """What the op may have to return, largest region first: (names, nodes)."""
    after = _after(view, found, cone, experts)
    shape = view.shape(found.ids)
    ordered = sorted(after, key=view.order.__getitem__, reverse=True)
    floats = [n for n in ordered if (t := view.tensor(n)) is not None and t.is_floating_point()]
    weights = [n for n in floats if _same_shape(view.shape(n), shape)]
    if found.hidden:
        for n in [*(w for w in weights if w is not found.ids), found.ids]:
            yield "weights", (n,)
        return
    for n in floats:
        dense = view.shape(n)[-1:] == (experts,) and _rows(view.shape(n)[:-1]) == rows and n not in weights
        if dense and not _escapes([*found.roots, found.ids], after | {found.ids}, n):
            yield "dense", (n,)
    for n in weights:
        yield "weights,ids", (n, found.ids)
    if _shared_columns(view, found, after) or not _escapes(weights, after, found.ids):
        yield "ids", (found.ids,)


def _shared_columns(view: GraphView, found: Selection, after: set[fx.Node]) -> bool:
    """True if what was chosen is joined with scores that belong to no choice: experts that every token takes.

    Their weights are normalised together, which the op does not do; the choice is its own nevertheless.
    """
    for node in after:
        if op_name(node) != "aten.cat" or not isinstance(node.args[0], (list, tuple)):
            continue
        parts = [p for p in node.args[0] if isinstance(p, fx.Node)]
        chosen = [p for p in parts if p in after and _same_shape(view.shape(p), view.shape(found.ids))]
        others = [p for p in parts if p not in after]
        if chosen and others and view.shape(node)[-1] != view.shape(found.ids)[-1]:
            return True
    return False


def _escapes(starts: Iterable[fx.Node], after: set[fx.Node], stop: fx.Node) -> bool:
    """True if something computed from ``starts``, but not through ``stop``, is used outside ``after``."""
    reached: set[fx.Node] = set()
    pending = list(starts)
    while pending:
        for user in pending.pop().users:
            if user is stop or user in reached:
                continue
            if user not in after:
                return True
            reached.add(user)
            pending.append(user)
    return False


def _after(view: GraphView, found: Selection, cone: set[fx.Node], experts: int) -> set[fx.Node]:
    """Nodes computed from the selection, from what it is made of, and from per-expert vectors, and nothing else."""
    rows = _rows(view.shape(found.scores)[:-1])
    before = [n for n in cone if len(view.shape(n)) >= 2 and _rows(view.shape(n)[:-1]) == rows]
    pending = [*found.roots, found.ids, *sorted(before, key=view.order.__getitem__)]
    chosen = {*found.roots, found.ids}
    seen: set[fx.Node] = set()
    while pending and len(seen) < _MAX_CONE:
        node = pending.pop(0)
        for user in sorted(node.users, key=view.order.__getitem__):
            if user in seen or not _walkable(user):
                continue
            tensors = [a for a in user.all_input_nodes if not _is_size(view, a)]
            if not all(a in cone or a in seen or _vector(view, a, experts) for a in tensors):
                continue  # comes again when its other inputs have been seen
            seen.add(user)
            if any(a in chosen for a in tensors):
                chosen.add(user)
            pending.append(user)
    return {n for n in chosen if n not in found.roots and n is not found.ids}


def _vector(view: GraphView, node: fx.Node, experts: int) -> bool:
    """True for a constant, or for a tensor with one number per expert."""
    tensor = view.tensor(node)
    if tensor is None:
        return False
    if _constant(view, node):
        return True
    numel = tensor.numel()
    return isinstance(numel, int) and numel in (1, experts) and tensor.dim() <= 2


def _region(
    view: GraphView,
    recogniser: str,
    found: Selection,
    logits: fx.Node,
    returns: str,
    outputs: tuple[fx.Node, ...],
    experts: int,
) -> Region | Refusal | None:
    """The region from ``logits`` to ``outputs``. None: no router; a refusal: one that reads something else."""
    shape = view.shape(outputs[0] if returns == "dense" else found.ids)
    lead = shape if found.squeezed and returns != "dense" else shape[:-1]
    if len(lead) != 1 and not _same_shape(lead, view.shape(logits)[:-1]):
        return None
    if logits in outputs:
        return None
    depends = {logits}
    biases: dict[fx.Node, None] = {}
    cone = sorted(_cone(view, outputs, logits), key=view.order.__getitem__)
    for node in cone:
        if any(a in depends for a in node.all_input_nodes):
            depends.add(node)
    if any(o not in depends for o in outputs):
        return None
    for node in cone:
        if node in depends and node is not logits:
            for a in node.all_input_nodes:
                if a not in depends and not _is_size(view, a) and not _constant(view, a):
                    if not _per_expert(view, a, experts):
                        return Refusal(
                            f"the choice or the weights also use {_say(view, a)} besides one tensor of logits and one "
                            "bias per expert.",
                            node,
                            "Add noise or masks to the logits before both the choice and the weights read them.",
                        )
                    biases[a] = None
    if len(biases) > 1:
        return None
    if not any(op_name(n) in _SCORING for n in cone if n in depends and n is not logits):
        return None
    if returns == "dense" and found.ids not in cone:
        return None
    inputs = {"logits": logits}
    if biases:
        inputs["bias"] = next(iter(biases))
    hints: dict[str, Any] = {
        "returns": returns,
        "order": found.order,
        "squeezed": found.squeezed,
        "ids": (found.roots[0] if found.hidden else found.ids).name,
        "topk": 1 if found.squeezed else int(view.shape(found.ids)[-1]),
    }
    region = slice_region(view, recogniser, inputs, outputs, hints)
    if isinstance(region, Region) and returns != "dense":
        return _order_conflict(view, found, region) or region
    return region


def _constant(view: GraphView, node: fx.Node) -> bool:
    """True if ``node`` is made of literals and sizes alone."""
    if node.op != "call_function" or not _walkable(node):
        return False
    return all(_is_size(view, a) or _constant(view, a) for a in node.all_input_nodes)


def _per_expert(view: GraphView, node: fx.Node, experts: int) -> bool:
    tensor = view.tensor(node)
    return (
        tensor is not None
        and tensor.is_floating_point()
        and tensor.shape[-1:] == (experts,)
        and all(s == 1 for s in tensor.shape[:-1])
    )


def _order_conflict(view: GraphView, found: Selection, region: Region) -> Refusal | None:
    """Why a tensor in the block's own column order that is used outside would no longer fit the op's ids."""
    inside, outputs = set(region.nodes), set(region.outputs)
    by_ids: set[fx.Node] = set() if found.hidden else {found.ids}
    by_choice: set[fx.Node] = set(found.roots)
    for node in region.nodes:
        if node in by_ids or any(a in by_ids for a in node.all_input_nodes):
            by_ids.add(node)
        if any(a in by_choice for a in node.all_input_nodes):
            by_choice.add(node)
    for node in region.nodes:
        if node in outputs or node not in by_choice:
            continue
        for user in node.users:
            if user in inside:
                continue
            second_ids = user.target is operator.getitem and user.args[1] == 1 and bool(user.users)
            if node in found.roots and not (second_ids or (user.target is operator.getitem and user.users)):
                continue
            if found.order == "descending" and node not in by_ids and not second_ids:
                continue
            return Refusal(
                f"the result of {op_name(node)} is in the column order of the block's own choice and is used outside "
                "the block as well.",
                node,
                "Compute it from the returned ids, or choose with topk(sorted=True).",
            )
    return None


def _say(view: GraphView, node: fx.Node) -> str:
    """``node`` in words that are the same for every layer of a model."""
    tensor = view.tensor(node)
    if tensor is None:
        what = "a number"
    else:  # numbers of tokens are left out: they differ between calls
        width = f" [..., {tensor.shape[-1]}]" if tensor.dim() and isinstance(tensor.shape[-1], int) else ""
        what = f"{str(tensor.dtype).removeprefix('torch.')}{width}"
    return f"the result of {op_name(node)}, {what}," if node.op == "call_function" else f"an input, {what},"


def _with_note(region: Region, largest: Region) -> Region:
    """``region`` with what it leaves outside compared with ``largest``."""
    left = [n for n in largest.nodes if n not in set(region.nodes) and n.op == "call_function"]
    names = ", ".join(dict.fromkeys(op_name(n).split(".")[-1] for n in left if n.target is not operator.getitem))
    return replace(region, hints={**region.hints, "left": f"{names}."}) if names else region
