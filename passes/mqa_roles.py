"""What joins the products of an indexer on the way to its scores: weights of the heads, masks, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from ascend_deep.passes import mqa_walk as walk
from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.mqa_family import expr
from ascend_deep.passes.mqa_walk import CONSTANTS, LAYOUT, PRODUCTS, is_relu, numel, tensors_of
from ascend_deep.passes.router_selection import named_args

__all__ = ["Found", "depends", "follow"]


@dataclass
class Found:
    """One indexer: its products, how the scores come from them, and what joins on the way.

    ``spine`` holds everything between products and scores that depends on the products, in graph order.
    """

    products: list[fx.Node]
    scores: fx.Node
    spine: list[fx.Node] = field(default_factory=list)
    weights: list[fx.Node] = field(default_factory=list)
    factors: list[fx.Node] = field(default_factory=list)
    """The nodes that multiply the weights."""
    masks: list[tuple[str, fx.Node, fx.Node, fx.Node]] = field(default_factory=list)
    """Kind, mask, the scores that it meets, the node that joins them."""


def follow(view: GraphView, products: list[fx.Node], scores: fx.Node) -> Found | Refusal:
    """What joins the products on the way to ``scores``."""
    behind = set(walk.cone(view, scores))
    reached: set[fx.Node] = set(products)
    found = Found(products, scores)
    for node in sorted(behind, key=view.order.__getitem__):
        if node in reached or reached.isdisjoint(node.all_input_nodes) or op_name(node) in CONSTANTS:
            continue
        reached.add(node)
        found.spine.append(node)
        name = op_name(node)
        inside = [n for n in node.all_input_nodes if n in reached]
        sides = [n for n in tensors_of(view, node) if n not in reached]
        if name in LAYOUT:
            continue  # the size of another tensor at most
        for side in sides:
            if name in PRODUCTS or name == "aten.mul":
                found.factors.append(node)
                found.weights.append(side)
            elif name in ("aten.add", "aten.masked_fill", "aten.where"):
                kind = "add" if name == "aten.add" else "hide"
                if name == "aten.where":
                    if side is not node.args[0]:
                        return Refusal("hidden keys get scores from another tensor.", node)
                    kind = "keep" if node.args[1] in reached else "hide"
                if name == "aten.add" and named_args(node).get("alpha", 1) != 1:
                    return Refusal("the mask is scaled as it is added.", node)
                if name == "aten.masked_fill" and side is not node.args[1]:
                    return Refusal("hidden keys get a score that is only known at run time.", node)
                found.masks.append((kind, side, inside[0], node))
            else:
                return Refusal(f"{name.removeprefix('aten.')} joins another tensor to the scores.", node)
    refusal = _order_of_roles(view, found)
    return refusal if refusal is not None else found


def _order_of_roles(view: GraphView, found: Found) -> Refusal | None:
    factors = found.factors
    lead = [s for s in view.shape(found.scores)[:-1] if expr(s) != 1]
    if len(lead) > 2 and numel(view, found.scores) == numel(view, found.products[0]):
        return Refusal(
            "every head ranks the keys on its own: there is no sum over the heads before the top-k, and the op chooses "
            "one set of keys for all heads.",
            found.scores,
        )
    if not factors:
        return Refusal("no weights of the heads are multiplied to the products.", found.scores)
    relus = [n for n in found.spine if is_relu(n)]
    for kind, _, met, join in found.masks:
        if any(depends(f, join, found.spine) for f in factors):
            early = any(depends(r, join, found.spine) for r in relus)
            what = "before the ReLU, which turns -inf into a score of 0" if early else "to each head"
            how = "added" if kind == "add" else "applied"
            return Refusal(
                f"a mask is {how} {what}; the op hides keys after the sum over the heads.",
                met,
                "Mask the scores after the sum over the heads.",
            )
    for f in factors:
        if relus and not any(depends(f, r, found.spine) for r in relus):
            if all(numel(view, r) != numel(view, found.products[0]) for r in relus):
                what = "the ReLU follows the sum over the heads; the op has it before, on each head."
            else:
                what = "the weights are multiplied before the ReLU; the op has them after it, where their sign counts."
            return Refusal(what, f)
    return None


def depends(node: fx.Node, on: fx.Node, spine: Iterable[fx.Node]) -> bool:
    inside = set(spine)
    pending, seen = [node], set()
    while pending:
        n = pending.pop()
        if n is on:
            return True
        if n in seen or n not in inside:
            continue
        seen.add(n)
        pending.extend(n.all_input_nodes)
    return False
