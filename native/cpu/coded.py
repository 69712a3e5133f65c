"""Calls of our kernels in a compiled graph, in the form that costs least.

In a decode step gigabytes of weights pass between two calls, so each call finds its code and data out of the caches and
takes four times as long as in a loop over itself. What counts is how much of it there is: attributes as names, and
tensors that only carry ids and weights from one call to the next, cost as much as reading half a megabyte. Therefore,
once a graph calls our kernels,

* ``moe_route`` and the ``moe_experts`` that alone uses its ids and weights become one ``moe_layer``;
* attributes become numbers, ``*_coded``. The numbers say everything: a graph with them may come from another process.

The arithmetic stays the same, bit by bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["code_calls"]

# Arguments as they were before autograd: what Inductor hands to an op has their strides. Without it, it has any.
_STRIDES = "eager_input_vals"
_LARGEST = 2**16 - 1  # what a coded count holds, see coded.cpp


def code_calls(graph: fx.Graph) -> None:
    """Join and code the calls of moe_route and moe_experts in ``graph``, in place.

    The graph is Inductor's, after its own passes: functional, with ``meta["val"]`` on every node.
    """
    for node in list(graph.nodes):
        if _is(node, "moe_experts"):
            _code_experts(graph, node)
    for node in list(graph.nodes):
        if _is(node, "moe_route"):
            code = _route_code(node)
            if code is not None:
                _replace(graph, node, "moe_route_coded", code)


def _code_experts(graph: fx.Graph, node: fx.Node) -> None:
    attributes = dict(node.kwargs)
    offset = attributes.pop("expert_offset")
    if not isinstance(offset, int):
        return
    alpha, limit = attributes["alpha"], attributes["limit"]
    code = torch.ops.ascend_deep_cpu.experts_code.default(**attributes)
    numbers = (code, alpha, 0.0 if limit is None else limit, offset)
    between = _from_route(node)
    if between:
        *carriers, route = between
        routing = _route_code(route, rounded=len(carriers) == 3)
        if routing is not None:
            _replace(graph, node, "moe_layer", (*routing, *numbers), route)
            for gone in (*carriers, route):
                graph.erase_node(gone)
            return
    _replace(graph, node, "moe_experts_coded", numbers)


def _from_route(node: fx.Node) -> list[fx.Node]:
    """The nodes that bring ids and weights of a moe_route to ``node``, last first, if nobody else uses any of them.

    On the way weights may be rounded to bfloat16, and nothing else. Empty if there is no such way.
    """
    idx, weights = _tensors(node, node.args)[1:3]
    if not isinstance(idx, fx.Node) or not isinstance(weights, fx.Node) or not idx.args:
        return []
    route = idx.args[0]
    ways = [[weights], [idx]]
    if weights.target is torch.ops.prims.convert_element_type.default and weights.args[1] is torch.bfloat16:
        ways[0].append(weights.all_input_nodes[0])
    for output, way in enumerate(ways):
        if way[-1].target is not operator.getitem or way[-1].args != (route, output):
            return []
        if any(set(n.users) != {user} for n, user in zip(way, [node, *way], strict=False)):
            return []
    if not isinstance(route, fx.Node) or not _is(route, "moe_route") or _something_written(route, node):
        return []
    return [*ways[0], *ways[1], route] if set(route.users) == {ways[0][-1], idx} else []


def _something_written(first: fx.Node, last: fx.Node) -> bool:
    """Whether a node between these two writes to a tensor, which might be the logits: they are read later then."""
    node = first.next
    while node is not last:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return True
        node = node.next
    return False


def _route_code(node: fx.Node, rounded: bool = False) -> tuple[int, Any, Any] | None:
    """The numbers of a moe_route: code, eps, scale. ``None`` if a count is symbolic or too large for a code."""
    attributes = dict(node.kwargs)
    eps, scale = attributes.pop("eps"), attributes.pop("scale")
    counts = [attributes[name] for name in ("topk", "n_group", "topk_group")]
    if not all(isinstance(n, int) and n <= _LARGEST for n in counts):
        return None
    return torch.ops.ascend_deep_cpu.route_code.default(**attributes, rounded=rounded), eps, scale


def _is(node: fx.Node, name: str) -> bool:
    return node.op == "call_function" and node.target is getattr(torch.ops.ascend_deep_cpu, name).default


def _tensors(node: fx.Node, args: Sequence[Any]) -> list[Any]:
    """The positional arguments of a call, ``None`` for those that are left out: only optional tensors may be."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    names = [a.name for a in target._schema.arguments if not a.kwarg_only]
    return [*args, *(None for _ in names[len(args) :])]


def _replace(graph: fx.Graph, node: fx.Node, name: str, numbers: tuple[Any, ...], route: fx.Node | None = None) -> None:
    """Put the coded op in the place of ``node``: its tensors, those of ``route`` for ids and weights, and numbers."""

    def joined(of: Callable[[fx.Node], Sequence[Any]]) -> tuple[Any, ...]:
        own = _tensors(node, of(node))
        return (*(own if route is None else (own[0], *_tensors(route, of(route)), *own[3:])), *numbers)

    with graph.inserting_before(node):
        new = graph.call_function(getattr(torch.ops.ascend_deep_cpu, name).default, joined(lambda n: n.args))
    new.meta = {key: value for key, value in node.meta.items() if key != _STRIDES}
    if all(_STRIDES in n.meta for n in (node, route) if n is not None):
        new.meta[_STRIDES] = (joined(lambda n: n.meta[_STRIDES][0]), {})
    node.replace_all_uses_with(new)
    graph.erase_node(node)
