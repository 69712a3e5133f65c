"""Writes replacement nodes into a graph, with fake values and the metadata of what they replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

__all__ = ["Builder"]


class Builder:
    """Inserts ``call_function`` nodes before a given node and computes their fake value.

    ``meta`` (stack_trace, nn_module_stack, …) of ``origin`` is copied to each node, so that later tools can still
    say which line of the model a kernel came from.
    """

    def __init__(self, graph: fx.Graph, origin: fx.Node | None = None, fake_mode: Any = None) -> None:
        self.graph = graph
        self.fake_mode = fake_mode
        self.created: list[fx.Node] = []
        keep = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "seq_nr")
        self._meta = {k: origin.meta[k] for k in keep if k in origin.meta} if origin is not None else {}

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """One call of ``target``; returns its node, whose ``meta["val"]`` is set when the inputs have values."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self._meta)
        value = self._evaluate(target, args, kwargs)
        if value is not None:
            node.meta["val"] = value
        self.created.append(node)
        return node

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """``node[index]`` for an op with several results."""
        import operator

        return self.call(operator.getitem, node, index)

    def _evaluate(self, target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        missing = False

        def value(a: Any) -> Any:
            nonlocal missing
            if not isinstance(a, fx.Node):
                return a
            v = a.meta.get("val")
            missing |= v is None
            return v

        fake_args, fake_kwargs = tree_map(value, (args, dict(kwargs)))
        if missing:
            return None
        with self._mode():
            return target(*fake_args, **fake_kwargs)

    @contextmanager
    def _mode(self) -> Iterator[None]:
        with torch.no_grad():
            if self.fake_mode is None:
                yield
            else:
                with self.fake_mode:
                    yield
