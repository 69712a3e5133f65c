"""``module.to(dtype)`` in a forward, where the module has that dtype already: nothing, written as a mutation.

Switch Transformers and NLLB-MoE call ``self.classifier = self.classifier.to(self.dtype)`` on every forward. Dynamo
traces what ``Module.to`` does to each parameter: ``p.set_(p.to(None, dtype, False))``. Where dtype and device are
those of the parameter, ``to`` returns the parameter itself and nothing is set. The calls are dropped, since capture
accepts no ``set_`` on an input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["copied", "without_moves"]


def without_moves(gm: fx.GraphModule) -> fx.GraphModule:
    """``gm`` (a Dynamo graph), or a copy of it without such calls. ``gm`` is unchanged."""
    if not any(_sets_itself(n) for n in gm.graph.nodes):
        return gm
    new, twins = copied(gm)
    for old in gm.graph.nodes:
        if not _sets_itself(old):
            continue
        node = twins[old]
        tensor, moved = node.args
        for user in list(node.users):  # it lowers the version of the parameter again
            new.graph.erase_node(user)
        new.graph.erase_node(node)
        moved.replace_all_uses_with(tensor)  # type: ignore[union-attr, arg-type]
        new.graph.erase_node(moved)  # type: ignore[arg-type]
    new.graph.lint()
    new.recompile()
    return new


def copied(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy of ``gm`` that shares its tensors and sub-modules, and the node that stands for each of its nodes."""
    graph = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, twins))
    for old, twin in twins.items():
        if hasattr(old, "_dynamo_source"):  # where an input comes from; AOT Autograd asks for it
            twin._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    new = fx.GraphModule(gm, graph)
    new.meta.update(gm.meta)
    return new, twins


def _sets_itself(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not torch.Tensor.set_ or len(node.args) != 2 or node.kwargs:
        return False
    tensor, moved = node.args
    if not isinstance(tensor, fx.Node) or not isinstance(moved, fx.Node):
        return False
    if (moved.op, moved.target) != ("call_method", "to") or moved.args[0] is not tensor or moved.kwargs:
        return False
    if len(moved.args) > 4 or any(u.users for u in node.users):  # a fifth argument asks for a copy
        return False
    before: Any = tensor.meta.get("example_value")
    after: Any = moved.meta.get("example_value")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)
