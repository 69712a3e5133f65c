"""Autograd functions of the model are held while a graph is captured, and come back as they were.

A ``torch.autograd.Function`` is in Dynamo's graph as a higher-order op with two sub-graphs, its forward and its
backward. Capture before autograd cannot express it: it would trace the forward and lose the backward. Nothing inside it
is rewritten either. So each call is replaced by one opaque op during capture and recognition, which takes the same
tensors and gives tensors of the same sizes, and is put back before the graph is handed over. The parts of the graph
before and behind it can be captured and rewritten as in any other graph; no region crosses the op, since no recogniser
knows it and probes may not run it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ascend_deep.passes.autocast import uses_autocast
from ascend_deep.passes.moves import copied

__all__ = ["HELD", "Held", "NotHeld", "forget", "hold", "put_back"]

HELD = "autograd_function_apply"
_KEY = "ascend_deep_held"  # in the meta of the graph module
_IN_PLACE = frozenset({"iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "setitem", "iand", "ior", "ixor"})
_VIEWS = frozenset(
    {
        "view", "reshape", "squeeze", "unsqueeze", "transpose", "permute", "t", "T", "expand", "getitem", "select",
        "narrow", "slice", "chunk", "split", "unbind", "flatten", "unflatten", "detach", "alias", "view_as",
        "contiguous", "to", "float", "double", "type_as", "getattr", "swapaxes", "movedim", "diagonal", "as_strided",
    }
)  # fmt: skip
_LIBRARY: list[torch.library.Library] = []
_RESULTS: dict[int, Sequence[Tensor]] = {}


class NotHeld(Exception):
    """A call cannot be held. The message is a full sentence for the report."""


@dataclass(frozen=True)
class Held:
    """One call.

    Attributes:
        target, kwargs: of the call.
        args: as they were; tensors and sizes are replaced by their place among the opaque op's operands.
        bodies: sub-graphs by the name that the graph knows them under.
        value: what Dynamo noted of its result.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    bodies: Mapping[str, fx.GraphModule]
    value: Any


@dataclass(frozen=True)
class _Place:
    """Where an argument stands among the tensors of the opaque op, or among its sizes."""

    index: int
    size: bool  # among the sizes


@dataclass(frozen=True)
class _Body:
    """A graph inside the graph, by its name."""

    name: str


def hold(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[int, Held]]:
    """A copy of ``gm`` in which calls of autograd functions are opaque, and what they were. ``gm`` is unchanged.

    Raises:
        NotHeld: a call takes or gives something else than tensors.
    """
    if not any(_is_call(n) for n in gm.graph.nodes):
        return gm, {}
    found: dict[int, Held] = {}
    try:
        return _held(gm, found), found
    except BaseException:
        forget(found)
        raise


def _held(gm: fx.GraphModule, found: dict[int, Held]) -> fx.GraphModule:
    if uses_autocast(gm):  # its casts are written into the graph, but not into the function
        raise NotHeld("a torch.autograd.Function of the model runs under autocast.")
    op = _opaque()
    new, twins = copied(gm)
    graph = new.graph
    for old in gm.graph.nodes:
        if not _is_call(old):
            continue
        node = twins[old]
        operands: list[fx.Node] = []
        sizes: list[fx.Node] = []
        args: list[Any] = []
        bodies: dict[str, fx.GraphModule] = {}
        for arg in node.args:
            body = getattr(gm, str(arg.target), None) if isinstance(arg, fx.Node) and arg.op == "get_attr" else None
            if isinstance(arg, fx.Node) and isinstance(body, fx.GraphModule):
                bodies[str(arg.target)] = body
                args.append(_Body(str(arg.target)))
            elif isinstance(arg, fx.Node):
                given = arg.meta.get("example_value")
                if not isinstance(given, (Tensor, int, torch.SymInt)) or isinstance(given, bool):
                    raise NotHeld("a torch.autograd.Function of the model takes a list or a number from the graph.")
                among = operands if isinstance(given, Tensor) else sizes
                args.append(_Place(len(among), among is sizes))
                among.append(arg)
            else:
                args.append(arg)
        wrong = _unfit(bodies.values(), operands, old.meta.get("example_value"))
        if wrong is not None:
            raise NotHeld(f"a torch.autograd.Function of the model {wrong}.")
        value = old.meta.get("example_value")
        results = list(value) if isinstance(value, (tuple, list)) else []
        items = [u for u in node.users if u.target is operator.getitem]
        if not results or len(items) != len(node.users) or not all(isinstance(r, Tensor) for r in results):
            raise NotHeld("a torch.autograd.Function of the model gives something else than tensors.")
        number = _number(results)
        with graph.inserting_before(node):
            opaque = graph.call_function(op, (operands, sizes, number))
        opaque.meta.update(node.meta)
        node.replace_all_uses_with(opaque)
        graph.erase_node(node)
        found[number] = Held(old.target, tuple(args), dict(old.kwargs), bodies, value)
    graph.eliminate_dead_code(lambda n: n.op != "get_attr")
    new.recompile()
    return new


def put_back(captured: fx.GraphModule, held: Mapping[int, Held]) -> None:
    """The calls again, in place of the opaque ops. The values that the opaque ops borrowed are let go."""
    graph = captured.graph
    for node in [n for n in graph.nodes if n.target is _opaque_target()]:
        operands, sizes, number = node.args
        call = held[number]
        for name, body in call.bodies.items():
            captured.add_module(name, body)
        with graph.inserting_before(node):
            args = [_given(graph, arg, operands, sizes) for arg in call.args]
            new = graph.call_function(call.target, tuple(args), dict(call.kwargs))
        new.meta.update(node.meta)
        new.meta["example_value"] = call.value
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    forget(held)
    if held:
        graph.lint()
        captured.recompile()


def forget(held: Mapping[int, Held]) -> None:
    """Let go of what ``hold`` keeps for opaque ops that will not run any more."""
    for number in held:
        _RESULTS.pop(number, None)


def _unfit(bodies: Iterable[fx.GraphModule], operands: Sequence[fx.Node], value: Any) -> str | None:
    """What keeps a call from being opaque: it must be a function of its operands that gives new tensors."""
    for body in bodies:
        for node in (n for m in body.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            schema = getattr(node.target, "_schema", None)
            mutable = bool(getattr(schema, "is_mutable", False)) or "out" in node.kwargs
            in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
            # Writing into a tensor that the body made is its own affair.
            if node.op in ("call_function", "call_method") and (mutable or in_place) and _reaches_input(node.args[:1]):
                return "writes in place"
    given = {_storage(o.meta.get("example_value")) for o in operands}
    results = value if isinstance(value, (tuple, list)) else ()
    if any(_storage(r) in given for r in results if isinstance(r, Tensor)):
        return "gives a view of what it takes"
    return None


def _reaches_input(args: Any) -> bool:
    """True if the first operand is an input of the body, or is made from inputs by views only, as far as is known."""
    pending = [a for a in args if isinstance(a, fx.Node)]
    while pending:
        node = pending.pop()
        if node.op in ("placeholder", "get_attr"):
            return True
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name.split(".")[0] in _VIEWS:
            pending += [a for a in node.args[:1] if isinstance(a, fx.Node)]
    return False


def _storage(value: Any) -> Any:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else object()


def _given(graph: fx.Graph, arg: Any, operands: Any, sizes: Any) -> Any:
    if isinstance(arg, _Place):
        return (sizes if arg.size else operands)[arg.index]
    return graph.get_attr(arg.name) if isinstance(arg, _Body) else arg


def _is_call(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() == HELD


# -- the opaque op --------------------------------------------------------------------------------------------------
def _number(results: Sequence[Tensor]) -> int:
    number = max(_RESULTS, default=-1) + 1
    _RESULTS[number] = results
    return number


def _fake(tensors: Sequence[Tensor], sizes: Sequence[Any], number: int) -> list[Tensor]:
    return [torch.empty_strided(r.size(), r.stride(), dtype=r.dtype, device=r.device) for r in _RESULTS[number]]


def _opaque_target() -> Any:
    return torch.ops.ascend_deep_held.call.default if _LIBRARY else None


def _opaque() -> Any:
    """The op, defined once per process. It only ever runs on fake tensors.

    It has a namespace of its own: what is in ``ascend_deep`` is pure and may stand inside a region.
    """
    if not _LIBRARY:
        library = torch.library.Library("ascend_deep_held", "DEF")
        library.define("call(Tensor[] tensors, SymInt[] sizes, int number) -> Tensor[]")
        library.impl("call", _fake, "CompositeExplicitAutograd")
        torch.library.register_fake("ascend_deep_held::call", _fake, lib=library)
        _LIBRARY.append(library)
    return _opaque_target()
