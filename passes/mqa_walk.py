"""The way from the scores of an indexer back to its products q . k, and the places where one may sit."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.mqa_family import expr
from ascend_deep.passes.router_selection import named_args

__all__ = [
    "CASTS", "CONSTANTS", "LAYOUT", "PRODUCTS", "UNARY", "anchors", "cone", "is_relu", "numel", "product_behind",
    "products_behind", "ranked_by", "tensors_of",
]  # fmt: skip

_MAX_CONE = 500
PRODUCTS = frozenset({"aten.matmul", "aten.bmm", "aten.einsum"})
_SOURCES = frozenset(
    {
        "aten.linear", "aten.mm", "aten.addmm", "aten.convolution", "aten.embedding", "aten._grouped_mm",
        "aten.layer_norm", "aten.native_layer_norm", "aten.rms_norm", "aten.scaled_dot_product_attention",
        "aten.cat", "aten.index_copy", "aten.index_put", "aten.slice_scatter", "aten.cos", "aten.sin", "aten.rsqrt",
    }
)  # fmt: skip
LAYOUT = frozenset(
    f"aten.{name}"
    for name in (
        "transpose", "permute", "unsqueeze", "squeeze", "expand", "clone", "view", "reshape", "_unsafe_view", "flatten",
        "unflatten", "t", "contiguous", "select", "slice", "narrow", "alias", "movedim", "swapaxes", "swapdims",
        "view_as", "expand_as", "mT", "matrix_H", "numpy_T", "unbind", "split", "split_with_sizes", "chunk",
    )
)  # fmt: skip
CASTS = frozenset({"aten._to_copy", "aten.to", "aten.type_as", "prims.convert_element_type"})
UNARY = frozenset({"aten.mul", "aten.div", "aten.relu", "aten.clamp_min", "aten.clamp", "aten.neg", "aten.maximum"})
# What may stand between a product and its ReLU; those that are not in the op get their reason.
_PASSED = UNARY | {"aten.add", "aten.sub", "aten.rsub", "aten.masked_fill", "aten.where", "getitem"}
# Fills: they read the shape of a tensor at most.
CONSTANTS = frozenset(
    f"aten.{name}"
    for name in (
        "full", "scalar_tensor", "zeros", "ones", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros",
        "new_ones", "new_full",
    )
)  # fmt: skip


def tensors_of(view: GraphView, node: fx.Node) -> list[fx.Node]:
    """Tensor operands that are not constants."""
    return [
        n
        for n in node.all_input_nodes
        if view.tensor(n) is not None and n.op != "get_attr" and op_name(n) not in CONSTANTS
    ]


def is_relu(node: fx.Node) -> bool:
    name = op_name(node)
    if name in ("aten.relu", "aten.threshold"):
        return True
    if name in ("aten.clamp", "aten.clamp_min"):
        args = named_args(node)
        return args.get("min") == 0 and args.get("max") is None
    return name == "aten.maximum" and len([n for n in node.all_input_nodes if op_name(n) in CONSTANTS]) == 1


def cone(view: GraphView, end: fx.Node) -> list[fx.Node]:
    """What ``end`` is computed from, up to projections and norms, nearest first."""
    seen: dict[fx.Node, None] = {}
    pending = [end]
    while pending and len(seen) < _MAX_CONE:
        node = pending.pop(0)
        if node in seen or node.op != "call_function":
            continue
        seen[node] = None
        name = op_name(node)
        if name not in _SOURCES and not name.startswith("ascend_deep."):
            pending.extend(node.all_input_nodes)
    return list(seen)


def product_behind(view: GraphView, relu: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The product that a ReLU takes, and a node on the way that joins another tensor to it (a mask before the ReLU)."""
    node: fx.Node = relu
    joined: fx.Node | None = None
    for _ in range(16):
        operands = tensors_of(view, node) if node.target is not operator.getitem else node.all_input_nodes
        if not operands:
            return None, None
        if node is not relu and op_name(node) in PRODUCTS:
            return node, joined
        name = op_name(node)
        if name in _SOURCES or (node is not relu and name not in _PASSED | LAYOUT | CASTS):
            return None, None
        if len(operands) > 1 and name not in LAYOUT:
            joined = node
            floats = [n for n in operands if view.tensor(n).is_floating_point()]  # type: ignore[union-attr]
            operands = sorted(floats, key=lambda n: len(view.shape(n)), reverse=True)
            if not operands:
                return None, None
        node = operands[0]
    return None, None


def numel(view: GraphView, node: fx.Node) -> Any:
    total = expr(1)
    for s in view.shape(node):
        total = total * expr(s)
    return total


def products_behind(
    view: GraphView, scores: fx.Node, behind: Sequence[fx.Node]
) -> tuple[list[fx.Node], fx.Node | None]:
    """The products q . k behind ``scores``, and a node that joins a mask before the ReLU."""
    found: dict[fx.Node, None] = {}
    early: fx.Node | None = None
    for node in behind:
        if is_relu(node) and len(view.shape(node)) >= 2:
            product, joined = product_behind(view, node)
            if product is not None:
                found[product] = None
                early = early or joined
    if found:
        return sorted(found, key=view.order.__getitem__), early
    # Without a ReLU: products of heads by keys that the scores are made from, so that the reason can be given.
    keys = view.shape(scores)[-1]
    for node in behind:
        shape = view.shape(node)
        ranked = len(shape) >= 4 and expr(shape[-1]) == expr(keys) and expr(shape[-2]) != 1
        if op_name(node) in PRODUCTS and ranked and all(len(view.shape(n)) >= 3 for n in tensors_of(view, node)):
            return [node], None
    return [], None


def anchors(view: GraphView) -> list[fx.Node]:
    """The choice of keys of every indexer, and the ReLU of those whose scores nobody ranks."""
    found: list[fx.Node] = []
    covered: set[fx.Node] = set()
    for node in view.graph.nodes:
        scores = ranked_by(view, node)
        if scores is None:
            continue
        behind = cone(view, scores)
        if products_behind(view, scores, behind)[0]:
            found.append(node)
            covered.update(behind)
    for node in view.graph.nodes:
        free = is_relu(node) and node not in covered and len(view.shape(node)) >= 3
        if free and product_behind(view, node)[0] is not None:
            found.append(node)
    return sorted(found, key=view.order.__getitem__)


def ranked_by(view: GraphView, node: fx.Node) -> fx.Node | None:
    """The scores that ``node`` ranks: a topk along the last dim, or the first columns of a descending sort."""
    if op_name(node) == "aten.topk":
        args = named_args(node)
        tensor = view.tensor(args["self"])
        last = tensor is not None and tensor.dim() > 0 and int(args["dim"]) % tensor.dim() == tensor.dim() - 1
        return args["self"] if last and args["largest"] and tensor.is_floating_point() else None  # type: ignore[union-attr,no-any-return]
    return None
