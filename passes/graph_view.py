"""Read access to a captured graph: values, order, fences and origin of every node."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

__all__ = ["FENCES", "GraphView", "Modes", "is_fence"]

# Nodes that change a thread-local mode for what comes after them.
FENCES = (
    "_set_grad_enabled",
    "_enter_autocast",
    "_exit_autocast",
    "_enter_inference_mode",
    "_exit_inference_mode",
)


def is_fence(node: fx.Node) -> bool:
    """True for a node that switches grad mode, inference mode or autocast."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in FENCES


@dataclass(frozen=True)
class Modes:
    """The thread-local modes that a node runs under, as far as the graph sets them.

    ``grad`` is what the last ``_set_grad_enabled`` set (None: the caller's mode), ``entered`` the open autocast and
    inference-mode regions, outermost first, each as (name, arguments).
    """

    grad: bool | None = None
    entered: tuple[tuple[str, str], ...] = ()

    def after(self, node: fx.Node) -> Modes:
        """The modes after ``node``."""
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            return replace(self, grad=bool(node.args[0]))
        if name.startswith("_enter"):
            return replace(self, entered=(*self.entered, (name, str(node.args))))
        return replace(self, entered=self.entered[:-1])


class GraphView:
    """A functional ATen graph as the recognisers read it. The graph must not change while a view is in use.

    Attributes:
        graph: the graph.
        order: position of each node.
        modes: the modes that each node runs under; nodes of one region share them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.order: dict[fx.Node, int] = {}
        self.modes: dict[fx.Node, Modes] = {}
        modes = Modes()
        for i, node in enumerate(graph.nodes):
            self.order[node] = i
            if is_fence(node):
                modes = modes.after(node)
            self.modes[node] = modes

    # -- values -------------------------------------------------------------------------------------------------
    @staticmethod
    def val(node: Any) -> Any:
        """The fake value of ``node``: FakeTensor, SymInt, tuple of them, or None."""
        if not isinstance(node, fx.Node):
            return node
        return node.meta.get("val", node.meta.get("example_value"))

    def tensor(self, node: Any) -> torch.Tensor | None:
        """The fake tensor of ``node``, or None if it is not a tensor."""
        value = self.val(node)
        return value if isinstance(value, torch.Tensor) else None

    def shape(self, node: Any) -> tuple[Any, ...]:
        """Shape (ints and SymInts) of a tensor node; ``()`` for anything else."""
        value = self.tensor(node)
        return tuple(value.shape) if value is not None else ()

    def dtype(self, node: Any) -> torch.dtype | None:
        """dtype of a tensor node, or None."""
        value = self.tensor(node)
        return value.dtype if value is not None else None

    # -- structure ----------------------------------------------------------------------------------------------
    def calls(self, *names: str) -> Iterator[fx.Node]:
        """Nodes that call an op of the given names, e.g. ``"aten.topk"`` or ``"transformers.grouped_mm_fallback"``.

        The overload is not part of the name.
        """
        wanted = set(names)
        for node in self.graph.nodes:
            if op_name(node) in wanted:
                yield node

    @cached_property
    def terms(self) -> Any:
        """The normal form of every node (``normal_form.ValueTable``), computed on first use."""
        from ascend_deep.passes.normal_form import ValueTable

        return ValueTable(self)

    # -- origin -------------------------------------------------------------------------------------------------
    @staticmethod
    def module(node: fx.Node) -> str:
        """Path of the innermost module that ran ``node``, e.g. ``"model.layers.0.mlp.experts"``; ``""`` if unknown."""
        stack = node.meta.get("nn_module_stack") or {}
        path = ""
        for entry in stack.values():
            path = str(entry[0])
        return clean_module_path(path)

    @staticmethod
    def source(node: fx.Node) -> str:
        """``file.py:line`` of the innermost Python frame outside torch that ran ``node``; ``""`` if unknown."""
        trace = node.meta.get("stack_trace") or ""
        frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
        for file, line in reversed(frames):
            if f"{os.sep}torch{os.sep}" not in file:
                return f"{os.path.basename(file)}:{line}"
        return ""


def op_name(node: Any) -> str:
    """``"namespace.op"`` of a call to an OpOverload (no overload name), the function's name else, ``""`` if no call."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[-1]}"
    return getattr(target, "__name__", str(target))


def clean_module_path(path: str) -> str:
    """Dynamo's ``L['self'].model.layers[0].mlp`` as ``model.layers.0.mlp``."""
    path = re.sub(r"^L\['(\w+)'\]\.?", "", path)
    path = re.sub(r"_modules\['([^']+)'\]", r"\1", path)
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    return path.strip(".")
