"""A region of a graph: the part between given inputs and outputs that one op could replace.

Recognisers decide by running what they found: ``Region.program`` is the region as a program of its own
(``program.Program``), which runs at small sizes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.grad_modes import modes_conflict
from ascend_deep.passes.graph_view import GraphView, clean_module_path, op_name
from ascend_deep.passes.program import Program, reads_shape_only, small_constant
from ascend_deep.passes.purity import is_pure
from ascend_deep.passes.sizes import Dims, Ref, Size

__all__ = ["Dims", "Program", "Ref", "Region", "Size", "slice_region"]


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a graph that one op could replace.

    Attributes:
        recogniser: name of the recogniser that cut it.
        view: the graph.
        inputs: role to node. Roles are the tensor arguments of the op ("x", "idx", …).
        outputs: the nodes that the replacement will stand for.
        nodes: every node between, outputs included, in graph order.
        hints: what the recogniser learned while cutting (constants, layouts); not part of the mathematics.
    """

    recogniser: str
    view: GraphView
    inputs: Mapping[str, fx.Node]
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    hints: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def program(self) -> Program:
        """The region as a program."""
        return Program.of(self)

    @cached_property
    def outside_users(self) -> tuple[fx.Node, ...]:
        """Interior nodes (not outputs) whose results are also used outside the region."""
        inside = set(self.nodes)
        kept = set(self.outputs)
        return tuple(n for n in self.nodes if n not in kept and any(u not in inside for u in n.users))

    def constants(self) -> tuple[float, ...]:
        """Every number literal of the region that is not a size, in graph order, without duplicates."""
        found: dict[float, None] = {}
        for step in self.program.steps:
            for i, arg in enumerate(step.args):
                if i not in step.sizes:
                    _numbers(arg, found)
            _numbers(list(step.kwargs.values()), found)
        return tuple(found)

    def portable_hints(self) -> dict[str, Any]:
        """``hints`` with names of the region's nodes replaced by ``Ref`` to their position."""
        position = {node.name: Ref(i) for i, node in enumerate(self.nodes)}
        return {k: position.get(v, v) if isinstance(v, str) else v for k, v in self.hints.items()}

    def fingerprint(self) -> str:
        """Equal for regions that compute the same function of their inputs at the same shapes and dtypes."""
        ins = [
            (role, str(n.meta["val"].dtype), [str(s) for s in n.meta["val"].shape], str(n.meta["val"].device.type))
            for role, n in self.inputs.items()
        ]
        hints = sorted(map(str, self.portable_hints().items()))
        text = json.dumps([self.recogniser, ins, self.program.to_dict(), hints])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def slice_region(
    view: GraphView,
    recogniser: str,
    inputs: Mapping[str, fx.Node],
    outputs: Sequence[fx.Node],
    hints: Mapping[str, Any] | None = None,
) -> Region | Refusal:
    """Everything between ``inputs`` and ``outputs``, or why that is not a region.

    Refused are: a tensor from elsewhere that is not one of the inputs, an op that is not known to be pure, and
    nodes under different grad modes or autocast, where that matters.
    """
    stop = set(inputs.values())
    inside: set[fx.Node] = set()
    pending = [o for o in outputs if o not in stop]
    while pending:
        node = pending.pop()
        if node in inside:
            continue
        if node.op == "get_attr" and small_constant(node) is not None:
            inside.add(node)
            continue
        value = view.val(node)
        if isinstance(value, torch.SymBool) or (isinstance(value, torch.SymFloat) and not value.node.has_hint()):
            return Refusal("the block depends on a number that is only known at run time.", node)
        if isinstance(value, (torch.SymInt, int, torch.SymFloat, float)):
            continue  # a size, also one that Dynamo passes as an input of its own: evaluated, not computed
        if node.op != "call_function":
            return Refusal(f"the block also reads {_readable(node)}, which is not one of its known inputs.", node)
        if not is_pure(node):
            return Refusal(f"{op_name(node)} inside the block is not on the list of pure ops.", node)
        inside.add(node)
        if not reads_shape_only(node):
            pending.extend(a for a in node.all_input_nodes if a not in stop)
    if modes_conflict(view, inside, outputs):
        return Refusal("the block spans a change of grad mode or autocast.", outputs[0])
    nodes = tuple(sorted(inside, key=view.order.__getitem__))
    return Region(recogniser, view, dict(inputs), tuple(outputs), nodes, dict(hints or {}))


def _readable(node: fx.Node) -> str:
    """What a node is called in the model, as far as that is known: path of a parameter, else name in the graph."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", node.name)
    name = str(name() if callable(name) else name)
    argument = re.fullmatch(r"L\['(\w+)'\]", name)
    if argument:
        return argument[1]
    return re.sub(r"\._(?:parameters|buffers)\b", "", clean_module_path(name)) or node.name


def _numbers(a: Any, found: dict[float, None]) -> None:
    if isinstance(a, (list, tuple)):
        for x in a:
            _numbers(x, found)
    elif isinstance(a, (int, float)) and not isinstance(a, bool):
        found.setdefault(float(a))
    elif isinstance(a, torch.Tensor) and a.numel() <= 64:
        for x in a.flatten().tolist():
            found.setdefault(float(x))
