"""Capture before autograd: a Dynamo graph as functional ATen that can still be differentiated.

Dynamo's graph has in-place ops, three spellings of every call and mutations whose result nobody uses. The capture
runs ``aot_export_module(pre_dispatch=True, trace_joint=False, decompositions={})`` on the placeholders' own fake
values: mutation becomes dataflow, spellings become ATen overloads, and ``linear``, ``softmax``, ``silu``, ``topk``
survive because nothing is decomposed. Inputs that the model mutates (a KV cache) get a ``copy_`` at the end, so that
the downstream compiler updates the same storage.

The captured module takes the same inputs in the same order and returns the same outputs as the Dynamo graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ascend_deep.lowering import _torch_compat
from ascend_deep.passes import held, vmap
from ascend_deep.passes.autocast import AutocastUnclear, make_explicit, switched_off
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.graph_view import op_name
from ascend_deep.passes.moves import without_moves
from ascend_deep.passes.purity import IGNORABLE
from ascend_deep.passes.slices import slice_first

__all__ = ["NotCaptured", "capture", "higher_order_bodies", "install", "release"]

_PLACEHOLDER_META_KEPT = ("example_value", "tensor_dict", "grapharg", "steal_arg", "unbacked_bindings")

_LARGEST_CONSTANT = 4096
_CALLS = "ascend_deep_calls"  # in the meta of a captured module: calls that are held


class NotCaptured(Exception):
    """The graph cannot be captured. The message is a full sentence for the report."""


def capture(gm: fx.GraphModule) -> fx.GraphModule:
    """``gm`` (a Dynamo graph, placeholders with ``example_value``) as functional ATen before autograd.

    Raises:
        NotCaptured: there is no tensor input, or the graph holds something that cannot be functionalised before
            autograd (a checkpointed region, an op without a fake). ``gm`` is unchanged then.
    """
    try:
        if vmap.has_transforms(gm):
            gm = vmap.written_out(gm)
    except vmap.NotFlat as reason:
        raise NotCaptured(str(reason)) from reason
    gm = without_moves(gm)
    try:
        gm, calls = held.hold(gm)
    except held.NotHeld as reason:
        raise NotCaptured(f"{str(reason)[:-1]}; the graph is left as it is.") from reason
    try:
        captured = _captured(gm)
    except BaseException:
        held.forget(calls)
        raise
    captured.meta[_CALLS] = calls
    return captured


def _captured(gm: fx.GraphModule) -> fx.GraphModule:
    try:
        gm = make_explicit(gm)
    except AutocastUnclear as reason:
        raise NotCaptured(str(reason)) from reason
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values = [_fake_value(n) for n in placeholders]
    fake_mode = next((v.fake_mode for v in values if isinstance(v, torch._subclasses.FakeTensor)), None)
    if fake_mode is None:
        raise NotCaptured("the graph has no tensor inputs.")
    own = dict(gm.named_parameters(remove_duplicate=False)) | dict(gm.named_buffers(remove_duplicate=False))
    try:
        with (
            torch._guards.tracing(torch._guards.TracingContext(fake_mode)),
            fake_mode,
            torch.fx.traceback.preserve_node_meta(),
            switched_off(),  # its casts are explicit now, and regions that switch it off must not get any
        ):
            captured, signature = _torch_compat.aot_export_module(
                gm, values, trace_joint=False, pre_dispatch=True, decompositions={}
            )
    except _torch_compat.RestartAnalysis:
        raise
    except Exception as error:
        raise NotCaptured(f"capture before autograd failed: {type(error).__name__}: {_first_line(error)}") from error
    assert isinstance(captured, fx.GraphModule)
    _reattach_held(captured, signature, own)
    _reattach_mutations(captured, signature)
    _spell_out_constants(captured, {n.removeprefix("L__self___") for n in own})
    _make_copies_differentiable(captured.graph)
    _drop_checks(captured.graph)
    slice_first(captured.graph)
    new = [n for n in captured.graph.nodes if n.op == "placeholder"]
    if len(new) != len(placeholders):
        raise NotCaptured(f"capture changed the number of inputs from {len(placeholders)} to {len(new)}.")
    for old, node in zip(placeholders, new, strict=True):
        node.meta.update({k: v for k, v in old.meta.items() if k in _PLACEHOLDER_META_KEPT or k not in node.meta})
        if hasattr(old, "_dynamo_source"):  # where the input comes from; AOT Autograd asks for it
            node._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    captured.graph.lint()
    captured.recompile()
    return captured


def install(gm: fx.GraphModule, captured: fx.GraphModule) -> None:
    """Make ``gm`` compute what ``captured`` computes, in place, so that whoever holds ``gm`` sees the new graph."""
    release(captured)
    for name, child in captured.named_children():
        setattr(gm, name, child)
    gm.graph = captured.graph
    gm.recompile()


def release(captured: fx.GraphModule) -> None:
    """Put the autograd functions of the model back that were held during capture; nothing else is changed."""
    held.put_back(captured, captured.meta.pop(_CALLS, {}))


def higher_order_bodies(gm: fx.GraphModule) -> list[tuple[str, fx.GraphModule, fx.Node]]:
    """Sub-graphs that higher-order ops of ``gm`` run: (name of the op, body, calling node)."""
    bodies = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        for arg in node.args:
            if isinstance(arg, fx.Node) and arg.op == "get_attr":
                body = getattr(gm, str(arg.target), None)
                if isinstance(body, fx.GraphModule):
                    bodies.append((node.target.name(), body, node))
    return bodies


# -- details --------------------------------------------------------------------------------------------------------
def _fake_value(node: fx.Node) -> Any:
    value = node.meta.get("example_value", node.meta.get("val"))
    if value is None:
        raise NotCaptured(f"input {node.name} has no example value.")
    return value


def _first_line(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return text.splitlines()[0][:300]


def _reattach_held(captured: fx.GraphModule, signature: Any, held: Mapping[str, torch.Tensor]) -> None:
    """Parameters and buffers that the graph module holds itself come back as attributes instead of inputs."""
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    placeholders = [n for n in captured.graph.nodes if n.op == "placeholder"]
    for node in placeholders:
        name = lifted.get(node.name)
        if name is None:
            continue
        _set_nested(captured, name, held[name])
        with captured.graph.inserting_before(placeholders[0]):
            attr = captured.graph.get_attr(name)
        attr.meta = dict(node.meta)
        node.replace_all_uses_with(attr)
        captured.graph.erase_node(node)
        signature.inputs_to_buffers.pop(node.name, None)
        for mutated, buffer in list(signature.buffers_to_mutate.items()):
            if buffer == name:
                signature.user_inputs_to_mutate[mutated] = attr.name


def _reattach_mutations(captured: fx.GraphModule, signature: Any) -> None:
    """New values of mutated inputs are outputs of the export; write them back with ``copy_`` instead."""
    mutated = dict(signature.user_inputs_to_mutate)
    if not mutated:
        return
    graph = captured.graph
    nodes = {n.name: n for n in graph.nodes}
    output = next(n for n in graph.nodes if n.op == "output")
    kept = []
    with graph.inserting_before(output):
        for value in output.args[0]:  # type: ignore[union-attr]
            if isinstance(value, fx.Node) and value.name in mutated:
                destination = nodes[mutated.pop(value.name)]
                copy = graph.call_function(torch.ops.aten.copy_.default, (destination, value))
                copy.meta.update(value.meta)
            else:
                kept.append(value)
    output.args = (tuple(kept),)


def _set_nested(module: torch.nn.Module, path: str, tensor: torch.Tensor) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        if not hasattr(module, parent):
            module.add_module(parent, torch.nn.Module())
        module = getattr(module, parent)
    if isinstance(tensor, torch.nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor)


def _spell_out_constants(captured: fx.GraphModule, held: set[str]) -> None:
    """Literal tensors of the model (``torch.tensor(-1e30)``) become calls that make them.

    Capture stores them as attributes; AOT Autograd accepts no attribute on a Dynamo graph that Dynamo did not put
    there, and a call is also what a recogniser can read.
    """
    graph = captured.graph
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        if str(node.target) in held:
            continue
        value = getattr(captured, str(node.target), None)
        if not isinstance(value, torch.Tensor):
            continue
        if value.numel() > _LARGEST_CONSTANT:
            raise NotCaptured(f"the model builds a constant of {value.numel()} elements while it runs.")
        device = value.device
        with graph.inserting_before(node), torch.no_grad():
            if value.dim() == 0:
                target: Any = torch.ops.aten.scalar_tensor.default
                new = graph.call_function(target, (value.item(),), {"dtype": value.dtype, "device": device})
            else:
                new = graph.call_function(torch.tensor, (value.tolist(),), {"dtype": value.dtype, "device": device})
        new.meta = dict(node.meta)
        for user in list(node.users):
            if op_name(user) in ("aten.lift_fresh_copy", "aten.lift_fresh"):
                new.meta.update(user.meta)
                user.replace_all_uses_with(new)
                graph.erase_node(user)
        if node.users:
            node.replace_all_uses_with(new)
        graph.erase_node(node)


def _make_copies_differentiable(graph: fx.Graph) -> None:
    """``aten.copy``, which functionalisation makes of ``copy_``, has no derivative: spell it as broadcast and cast."""
    aten = torch.ops.aten
    for node in [n for n in graph.nodes if op_name(n) == "aten.copy"]:
        destination, source = node.args[:2]
        assert isinstance(destination, fx.Node) and isinstance(source, fx.Node)
        value = node.meta["val"]
        fake_mode = value.fake_mode
        with graph.inserting_before(node):
            build = Builder(graph, origin=node, fake_mode=fake_mode)
            wide = build.call(aten.expand_as.default, source, destination)
            kwargs = {"dtype": value.dtype, "device": value.device, "memory_format": torch.contiguous_format}
            new = build.call(aten._to_copy.default, wide, **kwargs)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _drop_checks(graph: fx.Graph) -> None:
    """Remove the metadata assertions that capture adds; no result depends on them."""
    for node in reversed(list(graph.nodes)):
        if op_name(node) in IGNORABLE and not node.users and "assert_tensor_metadata" in op_name(node):
            graph.erase_node(node)
