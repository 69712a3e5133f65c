"""Autocast made explicit before capture.

Capture before autograd evaluates ops without autocast, whether it was entered outside the model or inside: values get
the wrong dtype, and a ``.float()`` after a linear layer, a no-op then, is lost. So where autocast is on, the casts
that it makes are written into a copy of the Dynamo graph first. What autocast casts is not taken from a list but
observed: each call runs on fake values under the same autocast state, and the conversions of its own arguments are
recorded. Casting explicitly what autocast would cast is idempotent, so the result stays right when the downstream
compiler traces it under autocast again.

Every call is checked: with explicit casts and autocast off it must give the dtypes that Dynamo saw with autocast on.
Where it does not, the graph is left alone with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["AutocastUnclear", "make_explicit", "switched_off", "uses_autocast"]

_DEVICES = ("cpu", "cuda", "npu")
# Composite calls whose tensor arguments reach a matmul through views only: casting the arguments is the same.
_MATMUL_LIKE = ("einsum", "tensordot")


class AutocastUnclear(Exception):
    """What autocast does to a call could not be told. The message is a full sentence."""


def make_explicit(gm: fx.GraphModule) -> fx.GraphModule:
    """``gm`` if autocast is off for all of it, else a copy in which the casts of autocast are nodes.

    Raises:
        AutocastUnclear: a call's casts could not be observed.
    """
    if not uses_autocast(gm):
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    with ExitStack() as stack:
        open_regions: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            new = graph.node_copy(node, lambda n: copies[n])
            copies[node] = new
            if hasattr(node, "_dynamo_source"):
                new._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
            name = getattr(node.target, "__name__", "")
            if name == "_enter_autocast":
                region = torch.autocast(node.args[0], dtype=node.args[1], enabled=node.args[2])
                open_regions[node] = region
                region.__enter__()
                stack.push(_closer(open_regions, node))
            elif name == "_exit_autocast":
                open_regions.pop(node.args[0]).__exit__(None, None, None)
            elif node.op in ("call_function", "call_method") and _active():
                with graph.inserting_before(new):
                    _cast_arguments(node, new, copies, casts)
    return fx.GraphModule(gm, graph)


@contextmanager
def switched_off() -> Iterator[None]:
    """Autocast off for every device."""
    with ExitStack() as stack:
        for device in _active():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


# -- details --------------------------------------------------------------------------------------------------------
def _closer(regions: dict[fx.Node, Any], node: fx.Node) -> Any:
    def close(*exc: Any) -> bool:
        region = regions.pop(node, None)
        if region is not None:
            region.__exit__(None, None, None)
        return False

    return close


def _active() -> list[str]:
    return [d for d in _DEVICES if _known(d) and torch.is_autocast_enabled(d)]


def _known(device: str) -> bool:
    return device != "npu" or hasattr(torch, "npu")


def uses_autocast(gm: fx.GraphModule) -> bool:
    """Whether autocast is on now, or is entered in the graph."""
    if _active():
        return True
    return any(getattr(n.target, "__name__", "") == "_enter_autocast" for n in gm.graph.nodes)


def _value(a: Any) -> Any:
    return a.meta.get("example_value", a.meta.get("val")) if isinstance(a, fx.Node) else a


def _cast_arguments(
    node: fx.Node,
    new: fx.Node,
    copies: dict[fx.Node, fx.Node],
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node],
) -> None:
    """Give the copy ``new`` of ``node`` the arguments that autocast would have given it."""
    operands = [n for n in node.all_input_nodes if _castable(_value(n))]
    expected = _dtypes(_value(node))
    if not operands or expected is None or isinstance(node.target, torch._ops.HigherOrderOperator):
        return
    if (node.op == "call_method" and str(node.target).endswith("_")) or _is_cast(node):
        return
    wanted = _observe(node, operands)
    if _result(node, wanted) != expected:
        name = getattr(node.target, "__name__", str(node.target))
        lower = next(torch.get_autocast_dtype(d) for d in _active())
        wanted = {n: lower for n in operands if _value(n).dtype == torch.float32} if name in _MATMUL_LIKE else {}
        if _result(node, wanted) != expected:
            raise AutocastUnclear(f"autocast casts inside {name}, where it cannot be made explicit.")
    replaced: dict[fx.Node, fx.Node] = {}
    for operand, dtype in wanted.items():
        source = copies[operand]
        if (source, dtype) not in casts:
            cast = new.graph.call_method("to", (source, dtype))
            cast.meta.update({k: v for k, v in node.meta.items() if k != "example_value"})
            cast.meta["example_value"] = _run(lambda o=operand, d=dtype: _value(o).to(d), _value(operand), off=True)
            casts[(source, dtype)] = cast
        replaced[source] = casts[(source, dtype)]
    new.args = fx.map_arg(new.args, lambda n: replaced.get(n, n))
    new.kwargs = fx.map_arg(new.kwargs, lambda n: replaced.get(n, n))


def _castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_cast(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in ("to", "float", "bfloat16", "half", "double", "type", "type_as")


def _dtypes(value: Any) -> list[torch.dtype] | None:
    found = [v.dtype for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor)]
    return found or None


class _Watch(TorchDispatchMode):
    """Records which of the given tensors are converted, and to what."""

    def __init__(self, tensors: dict[int, fx.Node]) -> None:
        super().__init__()
        self._tensors = tensors
        self.casts: dict[fx.Node, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self._tensors:
            dtype = (kwargs or {}).get("dtype")
            if dtype is not None:
                self.casts[self._tensors[id(args[0])]] = dtype
        return func(*args, **(kwargs or {}))


def _observe(node: fx.Node, operands: list[fx.Node]) -> dict[fx.Node, torch.dtype]:
    watch = _Watch({id(_value(n)): n for n in operands})

    def call() -> Any:
        with watch:
            return _call(node, {})

    _run(call, _value(operands[0]), off=False)
    return {n: d for n, d in watch.casts.items() if d != _value(n).dtype}


def _result(node: fx.Node, casts: dict[fx.Node, torch.dtype]) -> list[torch.dtype] | None:
    """dtypes of ``node`` with explicit casts and without autocast; None if it does not run that way."""
    try:
        return _dtypes(_run(lambda: _call(node, casts), _value(node.all_input_nodes[0]), off=True))
    except (RuntimeError, TypeError, ValueError):
        return None


def _call(node: fx.Node, casts: dict[fx.Node, torch.dtype]) -> Any:
    def value(a: Any) -> Any:
        v = _value(a)
        return v.to(casts[a]) if isinstance(a, fx.Node) and a in casts else v

    args, kwargs = tree_map(value, (node.args, node.kwargs))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _run(call: Any, tensor: Any, off: bool) -> Any:
    mode = getattr(tensor, "fake_mode", None)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_no_cast_cache())
        if off:
            stack.enter_context(_autocast_off())
        if mode is not None:
            stack.enter_context(mode)
        return call()


@contextmanager
def _autocast_off() -> Iterator[None]:
    with ExitStack() as stack:
        for device in _active():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def _no_cast_cache() -> Iterator[None]:
    """Autocast remembers the casts of weights; a remembered cast is not seen again."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
