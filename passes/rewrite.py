"""Puts replacements into the captured graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from ascend_deep import ops
from ascend_deep.lowering._torch_compat import stable_topological_sort
from ascend_deep.native import table
from ascend_deep.native._provider import Choice
from ascend_deep.passes._types import Recogniser, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.gates import Proof, same_metadata
from ascend_deep.passes.graph_view import op_name
from ascend_deep.passes.region import Region

__all__ = ["SHADOWED", "apply", "give_example_values", "provider_of", "tidy"]

SHADOWED = "ascend_deep_shadowed"
"""Node metadata: part of an original that stays to be compared with; no recogniser may touch it."""


def apply(
    recogniser: Recogniser,
    region: Region,
    solution: Solution,
    replaced: dict[fx.Node, fx.Node],
    shadow: Proof | None,
) -> fx.Node | Refusal:
    """Replace ``region`` by ``solution``; returns the node that calls the op.

    Args:
        replaced: outputs of earlier rewrites and the nodes that stand for them now; extended here. Inputs of this
            region are looked up in it.
        shadow: with a proof, keep the region and select between both results at run time.
    """
    graph = region.view.graph
    inputs = {role: replaced.get(node, node) for role, node in region.inputs.items()}
    last = max(region.outputs, key=region.view.order.__getitem__)
    fake_mode = getattr(last.meta["val"], "fake_mode", None)
    build = Builder(graph, origin=last, fake_mode=fake_mode)
    refusal: Refusal | None = None
    try:
        with graph.inserting_before(last):
            outputs = list(recogniser.emit(build, region, inputs, solution))
        refusal = same_metadata(region.outputs, outputs)
    except Exception:
        _undo(build)
        raise
    if refusal is not None:
        _undo(build)
        return refusal
    call = next(n for n in build.created if op_name(n) == f"ascend_deep.{solution.op}")
    _shield_from_autocast(region, solution, build)
    if shadow is not None:
        with graph.inserting_after(last):
            outputs = _select(graph, region, outputs, shadow, fake_mode)
    # Inside the region, and where both results are compared, the original stays.
    keep = {*region.nodes, *build.created}
    if shadow is not None:
        for node in region.nodes:
            node.meta[SHADOWED] = True
        keep.update(n for n in region.outputs[0].users if op_name(n) == "ascend_deep.shadow_select")
    for old, new in zip(region.outputs, outputs, strict=True):
        old.replace_all_uses_with(new, lambda user: user not in keep)
        replaced[old] = new
    for node in reversed(region.nodes):
        if not node.users and node.op == "call_function":
            graph.erase_node(node)
    return call


def _undo(build: Builder) -> None:
    for node in reversed(build.created):
        build.graph.erase_node(node)


def _shield_from_autocast(region: Region, solution: Solution, build: Builder) -> None:
    """Switch autocast off around a replacement whose op would cast.

    The casts that the model's own ops get are explicit by now (``passes.autocast``). A block that autocast leaves in
    float32, grouped matmuls for one, must stay there, so the op's rule for eager calls may not apply.
    """
    device = region.outputs[0].meta["val"].device.type
    inside = any(name == "_enter_autocast" for name, _ in region.view.modes[region.outputs[0]].entered)
    if ops.op(solution.op).autocast is None or not (inside or torch.is_autocast_enabled(device)):
        return
    dtype = torch.get_autocast_dtype(device)
    with region.view.graph.inserting_before(build.created[0]):
        enter = region.view.graph.call_function(_enter_autocast, (device, dtype, False, None))
    with region.view.graph.inserting_after(build.created[-1]):
        region.view.graph.call_function(_exit_autocast, (enter,))


def _select(graph: fx.Graph, region: Region, outputs: list[fx.Node], shadow: Proof, fake_mode: Any) -> list[fx.Node]:
    """``shadow_select`` of replacement and region, after both."""
    build = Builder(graph, origin=outputs[0], fake_mode=fake_mode)
    site = f"{region.recogniser} at {region.view.module(region.outputs[-1]) or region.view.source(region.outputs[-1])}"
    chosen = build.call(
        torch.ops.ascend_deep.shadow_select.default,
        outputs,
        list(region.outputs),
        site=site,
        rtol=shadow.rtol,
        atol=shadow.atol,
    )
    results = build.item(chosen, 0)
    return [build.item(results, i) for i in range(len(outputs))]


def tidy(module: fx.GraphModule) -> None:
    """Order, check and recompile after all rewrites."""
    seen: set[fx.Node] = set()
    for node in module.graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            stable_topological_sort(module.graph)
            break
        seen.add(node)
    module.graph.lint()
    module.recompile()


def provider_of(op: str, call: fx.Node, device: str) -> Choice:
    """Which provider will run ``call`` on ``device`` (``""``: the device its inputs are on)."""

    def value(a: Any) -> Any:
        return a.meta.get("val") if isinstance(a, fx.Node) else a

    args = tuple(value(a) for a in call.args)
    kwargs: Mapping[str, Any] = {k: value(v) for k, v in call.kwargs.items()}
    where = device or next(a.device.type for a in args if isinstance(a, torch.Tensor))
    return table.choose(op, where, args, kwargs)


def give_example_values(body: fx.GraphModule, caller: fx.Node) -> None:
    """Placeholders of a higher-order op's body get the values of the arguments it is called with."""
    operands = [a for a in caller.args if not (isinstance(a, fx.Node) and a.op == "get_attr")]
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    for node, operand in zip(placeholders, operands, strict=False):
        if "example_value" not in node.meta and isinstance(operand, fx.Node):
            node.meta["example_value"] = operand.meta.get("example_value", operand.meta.get("val"))
