"""The last graph pass before Inductor lowers a graph: ops become the kernels that would run them.

An op finds its kernel at run time: dispatcher, autograd kernel, argument checks, choice of a provider. In a compiled
graph dtypes, strides and scalars are known, so the choice is made once, here, and the graph calls the kernel, if the
provider has it as a torch op of its own (``Provider.direct``). Ops that no such provider takes stay as they are.
Providers then rewrite the calls of their kernels as they like them best (``Provider.finish``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ascend_deep.lowering import _torch_compat
from ascend_deep.native import table

__all__ = ["KernelPass", "replace"]

_OPS = {"ascend_deep::" + name: name for row in table.PRIORITY.values() for p in row for name in p.direct}


def replace(graph: fx.Graph) -> int:
    """Replace what can be replaced, in place; returns the number of nodes."""
    if os.environ.get("ASCEND_DEEP_DEBUG") == "1":
        return 0  # the ops check ids then
    count = 0
    finish: dict[str, Callable[[fx.Graph], None]] = {}
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.name() not in _OPS:
            continue
        name = _OPS[target.name()]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        if not isinstance(args[0], torch.Tensor):
            continue
        choice = table.choose(name, args[0].device.type, args, kwargs)
        if choice.provider is not None and name in choice.provider.direct:
            node.target = choice.provider.direct[name]()
            if choice.provider.finish is not None:
                finish[choice.provider.name] = choice.provider.finish
            count += 1
    for rewrite in finish.values():
        rewrite(graph)
    return count


class KernelPass(_torch_compat.CustomGraphPass):
    """``replace`` as a pass with a cache key."""

    def __call__(self, graph: fx.Graph) -> None:
        replace(graph)

    def uuid(self) -> Any:
        return f"ascend_deep kernels 2 {table.fingerprint()} {os.environ.get('ASCEND_DEEP_DEBUG') == '1'}"
