"""Blocks before and after normal form, so that a contributor sees why a spelling did not match.

While ``recording()`` is open, the pipeline tells ``record`` about every place that a recogniser looked at. Each becomes
a text of three parts: what was decided, the nodes as they stand in the graph, and their values in normal form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import fx

from ascend_deep.passes.graph_view import GraphView

__all__ = ["record", "recording"]

_SHOWN: ContextVar[list[str] | None] = ContextVar("ascend_deep_shown", default=None)
# How much is shown of what leads to an anchor around which no block could be cut.
_NEAR = 32


@contextmanager
def recording() -> Iterator[list[str]]:
    """Collect one text per place that recognisers look at in this context; equal texts once."""
    texts: list[str] = []
    token = _SHOWN.set(texts)
    try:
        yield texts
    finally:
        _SHOWN.reset(token)


def record(name: str, view: GraphView, anchor: fx.Node, nodes: Sequence[fx.Node], decision: str) -> None:
    """Note a place if someone is recording.

    Args:
        name: the recogniser.
        anchor: where it looked.
        nodes: the block that it cut; empty: none could be cut, and what leads to the anchor is shown.
        decision: what it was fused to, or the reason why not.
    """
    texts = _SHOWN.get()
    if texts is None:
        return
    shown = [n for n in (nodes or _leading_to(view, anchor)) if n.op == "call_function"]
    where = view.module(anchor) or view.source(anchor) or anchor.name
    before = [str(n.format_node()) for n in shown]
    after = view.terms.show(shown).splitlines()
    lines = [f"{name} at {where}: {decision}", "  before", *(f"    {b}" for b in before)]
    text = "\n".join([*lines, "  normal form", *(f"    {a}" for a in after)])
    if text not in texts:
        texts.append(text)


def _leading_to(view: GraphView, anchor: fx.Node) -> list[fx.Node]:
    """``anchor`` and the calls nearest to it that it is made of, in graph order."""
    found: dict[fx.Node, None] = {}
    pending = [anchor]
    while pending and len(found) < _NEAR:
        node = pending.pop(0)
        if node not in found and node.op == "call_function":
            found[node] = None
            pending.extend(node.all_input_nodes)
    return sorted(found, key=view.order.__getitem__)
