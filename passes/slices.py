"""Slices of scores become scores of slices, where a choice of experts follows.

A router whose logits also hold columns for shared experts (Inkling) scores all of them, ``sigmoid(logits)``, and
chooses from a slice, ``sigmoid(logits)[..., :E]``. The op takes the logits of the experts that are chosen from. An
elementwise function of a slice is the slice of that function, value by value and gradient by gradient, so the slice is
taken first: of the scores that the choice reads, and of nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ascend_deep.passes.builder import Builder
from ascend_deep.passes.graph_view import op_name

__all__ = ["slice_first"]

_ELEMENTWISE = ("aten.sigmoid",)
_CHOICES = ("aten.topk", "aten.sort", "aten.argsort", "aten.argmax", "aten.max")
_BETWEEN = (
    "aten.slice",
    "aten.add",
    "aten.view",
    "aten.reshape",
    "aten.to",
    "aten._to_copy",
    "aten.alias",
    "aten.detach",
)
_STEPS = 4


def slice_first(graph: fx.Graph) -> int:
    """Rewrite ``graph`` (functional ATen, values in ``meta["val"]``) in place; how often."""
    changed = 0
    for node in [n for n in graph.nodes if op_name(n) == "aten.slice"]:
        scores = node.args[0]
        if not isinstance(scores, fx.Node) or op_name(scores) not in _ELEMENTWISE or not _cuts_columns(node, scores):
            continue
        if not _leads_to_choice(node):
            continue
        source, fake_mode = scores.args[0], getattr(node.meta["val"], "fake_mode", None)
        with graph.inserting_before(node):
            build = Builder(graph, origin=scores, fake_mode=fake_mode)
            target: Any = node.target
            columns = build.call(target, source, *node.args[1:], **node.kwargs)
            function: Any = scores.target
            new = build.call(function, columns)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        if not scores.users:
            graph.erase_node(scores)
        changed += 1
    return changed


def _cuts_columns(node: fx.Node, scores: fx.Node) -> bool:
    """True if the slice is one of the last dimension, of a matrix of fixed width."""
    value = scores.meta.get("val")
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or not isinstance(value.shape[-1], int):
        return False
    return dim in (-1, value.dim() - 1)


def _leads_to_choice(node: fx.Node) -> bool:
    pending = [node]
    for _ in range(_STEPS):
        users = [u for n in pending for u in n.users]
        if any(op_name(u) in _CHOICES for u in users):
            return True
        pending = [u for u in users if op_name(u) in _BETWEEN]
    return False
