"""Blocks whose parts run under different modes: where a switch of grad mode inside a block makes no difference.

A router may choose under ``no_grad`` and weigh outside of it. The ids that cross over are integers, which have no
gradient anyway, so the block is what it would be without the switch. A floating value that crosses from a part without
gradients into one with them is a ``detach``, and that is another function.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from ascend_deep.passes.graph_view import GraphView

__all__ = ["modes_conflict"]


def modes_conflict(view: GraphView, inside: Collection[fx.Node], outputs: Sequence[fx.Node]) -> bool:
    """True if the modes that the nodes of a block run under may matter to what the block computes or differentiates."""
    calls = [n for n in inside if n.op == "call_function"]
    modes = {view.modes[n] for n in calls}
    if len(modes) < 2:
        return False
    if len({m.entered for m in modes}) > 1:  # autocast or inference mode
        return True
    usual = torch.is_grad_enabled()  # Dynamo compiles under the caller's mode, and guards on it

    def tracks(node: fx.Node) -> bool:
        grad = view.modes[_origin(node)].grad
        return usual if grad is None else grad

    if not any(tracks(n) for n in calls):
        return False
    last = max(outputs, key=view.order.__getitem__)
    if not tracks(last):  # the replacement would stand where nothing is tracked
        return True
    for node in calls:
        crosses = node in outputs or any(user in inside and tracks(user) for user in node.users)
        if crosses and not tracks(node) and _floating(view, node):
            return True
    # Users of an output that run before the last one would be moved behind it, perhaps into another mode.
    return any(
        user not in inside and view.order[user] < view.order[last] and user.op != "output"
        for output in outputs
        for user in output.users
    )


def _origin(node: fx.Node) -> fx.Node:
    """The call that computed ``node``: taking an item of its results is no computation."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _floating(view: GraphView, node: fx.Node) -> bool:
    tensor = view.tensor(node)
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())
