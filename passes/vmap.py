"""``torch.vmap`` in a Dynamo graph, written out as plain calls on batches.

Dynamo records a ``vmap`` as calls that enter and leave it, with the function's own calls on single items between. A
part of such a graph cannot be run, so nothing in it could be recognised. Here each stretch from entering the outermost
``vmap`` to leaving it is traced below functorch, on the fake values of the graph: what it gives are the ATen calls on
whole batches that would run anyway. All other nodes stay.

Other transforms (grad, jvp) are not written out, nor is a ``vmap`` with random numbers, with autocast or with a change
of grad mode inside: tracing below autograd would lose what these do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ascend_deep.lowering import _torch_compat

__all__ = ["NotFlat", "has_transforms", "written_out"]

_ENTER, _LEAVE = "_vmap_increment_nesting", "_vmap_decrement_nesting"
_OF_VMAP = frozenset({_ENTER, _LEAVE, "_add_batch_dim", "_remove_batch_dim", "lazy_load_decompositions"})
_MODES = frozenset(
    {"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode"}
)


class NotFlat(Exception):
    """The graph's transforms cannot be written out; the message is a full sentence for the report."""


def has_transforms(gm: fx.GraphModule) -> bool:
    """Whether the graph enters, leaves or handles the tensors of a ``torch.func`` transform."""
    return any(_is_transform(n) for n in gm.graph.nodes)


def written_out(gm: fx.GraphModule) -> fx.GraphModule:
    """``gm`` without ``vmap``, another module; ``gm`` stays as it is.

    Args:
        gm: a Dynamo graph whose nodes have ``example_value``.

    Raises:
        NotFlat: it holds another transform, or a ``vmap`` that cannot be traced below autograd.
    """
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise NotFlat("the graph runs torch.vmap under autocast; it is handed over as it is.")
    graph = fx.Graph()
    new: dict[fx.Node, Any] = {}
    stretch: list[fx.Node] = []
    depth = 0
    for node in gm.graph.nodes:
        name = _name(node)
        if _is_transform(node) and name not in _OF_VMAP:
            raise NotFlat("the graph runs a torch.func transform (grad, jvp); it is handed over as it is.")
        if name == _ENTER:
            if len(node.args) > 1 and node.args[1] != "error":
                raise NotFlat("the graph runs torch.vmap with random numbers; it is handed over as it is.")
            depth += 1
        if depth or (_is_transform(node) and name != _LEAVE):
            if name in _MODES:
                raise NotFlat("a function under torch.vmap changes grad mode or autocast; it is handed over as it is.")
            stretch.append(node)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
            if hasattr(node, "_dynamo_source"):
                new[node]._dynamo_source = node._dynamo_source
        if name == _LEAVE:
            depth -= 1
            if depth == 0:
                _inline(gm, stretch, graph, new)
                stretch = []
    flat = fx.GraphModule(gm, graph)
    flat.meta = dict(gm.meta)
    return flat


# -- details --------------------------------------------------------------------------------------------------------
def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _is_transform(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    module = getattr(node.target, "__module__", None) or ""
    return module.startswith("torch._functorch") or module == "torch._C._functorch"


def _inline(gm: fx.GraphModule, stretch: Sequence[fx.Node], graph: fx.Graph, new: dict[fx.Node, Any]) -> None:
    """Trace ``stretch`` and append its calls to ``graph``; ``new`` learns what its results became."""
    inside = set(stretch)
    outer = list(dict.fromkeys(a for n in stretch for a in n.all_input_nodes if a not in inside))
    results = [n for n in stretch if any(u not in inside for u in n.users)]
    alone = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {n: alone.placeholder(f"outer_{i}") for i, n in enumerate(outer)}
    for node in stretch:
        copies[node] = alone.node_copy(node, copies.__getitem__)
    alone.output(tuple(copies[n] for n in results))
    module = fx.GraphModule(gm, alone)
    values = [n.meta.get("example_value", n.meta.get("val")) for n in outer]
    mode = next((v.fake_mode for v in values if isinstance(v, torch._subclasses.FakeTensor)), None)
    if mode is None or any(v is None for v in values):
        raise NotFlat("the graph runs torch.vmap on inputs without example values; it is handed over as it is.")
    # A product of tensors that need gradients is written by torch as one of reshaped copies, which no recogniser knows.
    values = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]
    try:
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            traced = _torch_compat.trace(lambda *a: fx.Interpreter(module).run(*a), values, mode)
    except _torch_compat.RestartAnalysis:
        raise
    except Exception as error:  # any op may lack a batching rule or a fake
        text = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {text[0][:200] if text else ''}"
        raise NotFlat(f"torch.vmap in the graph could not be written out ({reason}); it is handed over.") from error
    env: dict[fx.Node, Any] = {}
    given = iter(outer)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            env[node] = new[next(given)]
        elif node.op == "get_attr":
            raise NotFlat("a function under torch.vmap makes a constant tensor; it is handed over as it is.")
        elif node.op == "output":
            outputs = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            new.update(zip(results, (env[o] for o in outputs), strict=True))
        else:
            copy = env[node] = graph.node_copy(node, env.__getitem__)
            copy.meta = {k: v for k, v in stretch[-1].meta.items() if k in ("nn_module_stack", "stack_trace")}
            copy.meta["example_value"] = node.meta.get("val")
