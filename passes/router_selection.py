"""A choice of experts in a graph, in any spelling: a node whose value is the ids of the K best along the last dim.

* ``topk(s, K)[1]``, sorted or not; ``max(s, -1)[1]`` and ``argmax(s, -1)`` for K = 1,
* the first K columns of ``argsort(s, descending=True)`` or ``sort(s, descending=True)[1]``, or the last K of an
  ascending sort,
* a ``cat`` or ``stack`` of K ``argmax`` results.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ascend_deep.passes.graph_view import GraphView, op_name

__all__ = ["Selection", "named_args", "selection"]


_JOINS = frozenset({"aten.cat", "aten.concat", "aten.concatenate", "aten.stack"})


@dataclass(frozen=True)
class Selection:
    """One choice of K experts.

    Attributes:
        ids: the node of the ids, [.., K] i64, or [..] if ``squeezed``.
        scores: what is chosen from, [.., E].
        roots: the ``topk``, ``sort`` or ``argmax`` calls.
        order: of the columns: ``"descending"``, ``"ascending"`` or ``"open"``.
        squeezed: K is 1 and has no dim of its own.
        hidden: nobody reads the ids of the ``topk``, so they have no node: ``ids`` is the node of its values instead.
    """

    ids: fx.Node
    scores: fx.Node
    roots: tuple[fx.Node, ...]
    order: str
    squeezed: bool = False
    hidden: bool = False


def named_args(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call to an OpOverload by name, defaults included."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    found: dict[str, Any] = {}
    for i, argument in enumerate(node.target._schema.arguments):
        if i < len(node.args):
            found[argument.name] = node.args[i]
        else:
            found[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return found


def _along_last(view: GraphView, scores: Any, dim: Any) -> bool:
    tensor = view.tensor(scores)
    if tensor is None or not tensor.is_floating_point() or tensor.dim() == 0 or dim is None:
        return False
    return int(dim) % tensor.dim() == tensor.dim() - 1


def _sorted_ids(node: Any) -> fx.Node | None:
    """The ``sort`` or ``argsort`` call whose ids ``node`` is."""
    if op_name(node) == "aten.argsort":
        return node
    if isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == 1:
        parent = node.args[0]
        return parent if op_name(parent) == "aten.sort" else None  # type: ignore[return-value]
    return None


def selection(view: GraphView, node: fx.Node) -> Selection | None:
    """``node`` as a selection over the last dim, or None."""
    if node.op != "call_function":
        return None
    if view.dtype(node) != torch.int64:
        return _values_alone(view, node)
    name = op_name(node)
    if node.target is operator.getitem and node.args[1] == 1:
        parent = node.args[0]
        args = named_args(parent)  # type: ignore[arg-type]
        if op_name(parent) == "aten.topk" and _along_last(view, args["self"], args["dim"]):
            order = "descending" if args["sorted"] else "open"
            return Selection(node, args["self"], (parent,), order)  # type: ignore[arg-type]
        if op_name(parent) == "aten.max" and "keepdim" in args and _along_last(view, args["self"], args["dim"]):
            return Selection(node, args["self"], (parent,), "descending", not args["keepdim"])  # type: ignore[arg-type]
    if name == "aten.argmax":
        args = named_args(node)
        if _along_last(view, args["self"], args["dim"]):
            return Selection(node, args["self"], (node,), "descending", not args["keepdim"])
    if name in ("aten.slice", "aten.narrow"):
        return _sorted_slice(view, node)
    if name in _JOINS:
        return _joined(view, node)
    return None


def _values_alone(view: GraphView, node: fx.Node) -> Selection | None:
    parent = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    if op_name(parent) != "aten.topk" or any(u.args[1] == 1 and u.users for u in parent.users):  # type: ignore[union-attr]
        return None
    args = named_args(parent)  # type: ignore[arg-type]
    if not _along_last(view, args["self"], args["dim"]):
        return None
    return Selection(node, args["self"], (parent,), "descending" if args["sorted"] else "open", hidden=True)  # type: ignore[arg-type]


def _sorted_slice(view: GraphView, node: fx.Node) -> Selection | None:
    args = named_args(node)
    whole = args["self"]
    while op_name(whole) == "aten.slice" and named_args(whole)["dim"] != args["dim"]:
        whole = whole.args[0]  # x[:, :k] also slices the dims that it leaves whole; running the region tells
    call = _sorted_ids(whole)
    shape = view.shape(node)
    if call is None or int(args["dim"]) % len(shape) != len(shape) - 1:
        return None
    how = named_args(call)
    if not _along_last(view, how["self"], how["dim"]):
        return None
    start, width, total = args["start"] or 0, shape[-1], view.shape(how["self"])[-1]
    if not isinstance(start, int) or not isinstance(width, int) or not isinstance(total, int) or width == total:
        return None
    start += total if start < 0 else 0
    if start not in (0, total - width) or args.get("step", 1) != 1:
        return None
    # The end of a descending sort is a choice of the smallest: an anchor all the same, so that it gets its reason.
    order = "descending" if start == 0 else "ascending"
    return Selection(node, how["self"], (call,), order)


def _joined(view: GraphView, node: fx.Node) -> Selection | None:
    args = named_args(node)
    shape = view.shape(node)
    if int(args["dim"]) % len(shape) != len(shape) - 1 or not isinstance(args["tensors"], Sequence):
        return None
    members: list[Selection] = []
    for part in args["tensors"]:
        while op_name(part) in ("aten.unsqueeze", "aten.view", "aten.reshape"):
            part = part.args[0]
        member = selection(view, part) if op_name(part) not in _JOINS else None
        if member is None or not (member.squeezed or view.shape(part)[-1] == 1):
            return None
        members.append(member)
    if len(members) < 2:
        return None
    return Selection(node, members[0].scores, tuple(r for m in members for r in m.roots), "descending")
