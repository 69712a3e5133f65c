"""A graph-engine graph read back: nodes, edges, and our own check that they hang together; as text, list and picture.

Works on the protobuf message that torchair builds (``GraphDef``), without importing torchair.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Edge", "Node", "counts", "dot", "listing", "mermaid", "problems", "read"]

_PLUMBING = frozenset({"Const", "Data", "NetOutput", "RefData"})


@dataclass(frozen=True)
class Edge:
    """Output ``index`` of node ``source``; index -1 is a control edge. ``name`` is the input it feeds."""

    source: str
    index: int
    name: str


@dataclass(frozen=True)
class Node:
    """One op: its inputs (``None``: an optional input that is not fed), number of outputs, and plain attributes."""

    name: str
    type: str
    inputs: tuple[Edge | None, ...]
    outputs: int
    attributes: tuple[tuple[str, str], ...]
    shapes: tuple[str, ...] = ()


def read(graph: Any) -> tuple[Node, ...]:
    """The nodes of a ``GraphDef``, in its order."""
    return tuple(_node(op) for op in graph.op)


def _node(op: Any) -> Node:
    names = [d.name for d in op.input_desc]
    inputs: list[Edge | None] = []
    data = 0
    for reference in op.input:
        if not reference:
            inputs.append(None)
            data += 1
            continue
        source, _, index = reference.rpartition(":")
        control = int(index) < 0
        name = "control" if control else names[data] if data < len(names) else f"input {data}"
        inputs.append(Edge(source, int(index), name))
        data += not control
    shapes = tuple(f"[{', '.join(map(str, d.shape.dim))}]" for d in op.output_desc if op.type in ("Data", "RefData"))
    attributes = tuple((k, _value(op.attr[k])) for k in sorted(op.attr) if not k.startswith("_"))
    return Node(op.name, op.type, tuple(inputs), len(op.output_desc), attributes, shapes)


def _value(attribute: Any) -> str:
    """An attribute as a short text; tensors and other large values by their kind."""
    kind = attribute.WhichOneof("value")
    if kind in ("i", "f", "b"):
        return str(getattr(attribute, kind))
    if kind == "s":
        return repr(attribute.s.decode(errors="replace"))[:80]
    if kind == "list":
        items = [*attribute.list.i, *attribute.list.f, *attribute.list.b, *(s.decode() for s in attribute.list.s)]
        return f"[{', '.join(map(str, items[:16]))}{', …' if len(items) > 16 else ''}]"
    return f"<{kind}>"


def problems(nodes: Sequence[Node]) -> list[str]:
    """What is wrong with the edges: unknown sources, outputs that do not exist, names used twice, cycles, no result."""
    found = [f"the name {name!r} is used {n} times." for name, n in Counter(x.name for x in nodes).items() if n > 1]
    outputs = {n.name: n.outputs for n in nodes}
    for node in nodes:
        for edge in node.inputs:
            if edge is None:
                continue
            if edge.source not in outputs:
                found.append(f"{node.name} reads {edge.source}, which is not in the graph.")
            elif edge.index >= outputs[edge.source]:
                found.append(
                    f"{node.name} reads output {edge.index} of {edge.source}, which has {outputs[edge.source]} outputs."
                )
    if not any(n.type == "NetOutput" for n in nodes):
        found.append("the graph has no NetOutput.")
    return [*found, *_cycles(nodes)]


def _cycles(nodes: Sequence[Node]) -> list[str]:
    waiting = {n.name: {e.source for e in n.inputs if e is not None} for n in nodes}
    while True:
        ready = [name for name, sources in waiting.items() if not sources & waiting.keys()]
        if not ready:
            break
        for name in ready:
            del waiting[name]
    return [f"{len(waiting)} nodes lie on a cycle, {sorted(waiting)[0]} among them."] if waiting else []


def counts(nodes: Sequence[Node], plumbing: bool = False) -> Counter[str]:
    """How often each op type occurs; inputs, constants and the result are left out unless ``plumbing``."""
    return Counter(n.type for n in nodes if plumbing or n.type not in _PLUMBING)


def listing(nodes: Sequence[Node]) -> str:
    """One line per node: name, type, where its inputs come from, attributes. Constants are left out."""
    lines = []
    for node in nodes:
        if node.type == "Const":
            continue
        sources = [f"{e.name}={e.source}:{e.index}" for e in node.inputs if e is not None and e.index >= 0]
        plain = ", ".join(f"{k}={v}" for k, v in node.attributes)
        shape = " ".join(["", *node.shapes])
        lines.append(f"{node.name}: {node.type}{shape}({', '.join(sources)})" + (f" {{{plain}}}" if plain else ""))
    total = counts(nodes)
    lines += ["", f"{sum(total.values())} ops besides inputs and constants:"]
    lines += [f"  {n:4d} {kind}" for kind, n in sorted(total.items(), key=lambda x: (-x[1], x[0]))]
    return "\n".join(lines) + "\n"


def _drawn(nodes: Sequence[Node]) -> list[Node]:
    return [n for n in nodes if n.type != "Const"]


def mermaid(nodes: Sequence[Node]) -> str:
    """The graph as a Mermaid flow chart, constants left out."""
    drawn = _drawn(nodes)
    ids = {n.name: f"n{i}" for i, n in enumerate(drawn)}
    lines = ["flowchart TD"]
    for node in drawn:
        left, right = ("[(", ")]") if node.type in ("Data", "RefData") else ("[", "]")
        label = re.sub(r'["<>\[\]]', "", f"{node.type}<br/>{node.name}".replace("<br/>", "\n")).replace("\n", "<br/>")
        lines.append(f'    {ids[node.name]}{left}"{label}"{right}')
    for node in drawn:
        for edge in node.inputs:
            if edge is not None and edge.source in ids:
                arrow = "-.->" if edge.index < 0 else "-->"
                lines.append(f"    {ids[edge.source]} {arrow} {ids[node.name]}")
    return "\n".join(lines) + "\n"


def dot(nodes: Sequence[Node]) -> str:
    """The graph in Graphviz's language, constants left out."""
    drawn = _drawn(nodes)
    names = {n.name for n in drawn}

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    lines = ["digraph ge {", "    node [shape=box, fontname=monospace];"]
    for node in drawn:
        shape = ", shape=ellipse" if node.type in ("Data", "RefData", "NetOutput") else ""
        lines.append(f"    {quoted(node.name)} [label={quoted(f'{node.type} {node.name}')}{shape}];")
    for node in drawn:
        for edge in node.inputs:
            if edge is not None and edge.source in names:
                style = "[style=dashed]" if edge.index < 0 else f"[label={quoted(edge.name)}]"
                lines.append(f"    {quoted(edge.source)} -> {quoted(node.name)} {style};")
    return "\n".join([*lines, "}"]) + "\n"
