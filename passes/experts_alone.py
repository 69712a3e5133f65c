"""Graphs that begin behind a router: tokens, ids and weights come in on their own, each with its own number of rows.

Where a graph break, a hook or the user separates the experts from their router, Dynamo gives the three inputs three
symbols, and nothing in the experts' own code says that these are equal: weights with more rows than there are tokens
would be read in part. In every call that was made they are equal, so the graph is made for that case: a guard says so,
and a call with other sizes compiles anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ascend_deep.passes.graph_view import op_name

__all__ = ["agree"]

_GROUPED = ("aten._grouped_mm", "transformers.grouped_mm_fallback")


def agree(graph: fx.Graph) -> bool:
    """Add the guards that tokens, ids and weights have equally many rows. Returns whether any were added.

    Only in a graph with one tensor of ids [T, K] among its inputs and with grouped products or two tensors [E, ..] with
    more experts than a token has choices, for inputs [T', K'] and [T'', H] whose sizes are other symbols with the same
    value now, where H is a size of the experts' weights.
    """
    inputs = [n.meta.get("val") for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
    ids = [v for v in tensors if _is_matrix(v) and v.dtype in (torch.int64, torch.int32)]
    stored = [v for v in tensors if v.dim() == 3 and v.is_floating_point() and isinstance(v.shape[0], int)]
    if len(ids) != 1:
        return False
    (idx,) = ids
    stacks = [v for v in stored if _hint(idx.shape[1]) < v.shape[0]]
    if not any(op_name(n) in _GROUPED for n in graph.nodes) and not _pair(stacks):
        return False
    widths = {int(s) for v in stored for s in v.shape[1:] if isinstance(s, int)}
    found = False
    for value in tensors:
        if not _is_matrix(value) or not value.is_floating_point():
            continue
        if _hint(value.shape[1]) == _hint(idx.shape[1]):  # weights
            found |= _equal(idx.shape[0], value.shape[0]) | _equal(idx.shape[1], value.shape[1])
        elif isinstance(value.shape[1], int) and value.shape[1] in widths:
            found |= _equal(idx.shape[0], value.shape[0])
    return found


def _pair(stacks: Sequence[torch.Tensor]) -> bool:
    """Whether two stacks have the same number of experts."""
    counts = [v.shape[0] for v in stacks]
    return len(set(counts)) < len(counts)


def _hint(size: torch.SymInt | int) -> int:
    """A size as it is now; -1 if that is not known."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else -1
    return size


def _is_matrix(value: torch.Tensor) -> bool:
    return value.dim() == 2 and isinstance(value.shape[0], torch.SymInt)


def _equal(a: torch.SymInt | int, b: torch.SymInt | int) -> bool:
    """Guard on two sizes that have the same value now and may differ. Whether a guard was added."""
    if not isinstance(a, torch.SymInt) or not isinstance(b, torch.SymInt) or a.node.expr == b.node.expr:
        return False
    if not a.node.has_hint() or not b.node.has_hint() or a.node.hint != b.node.hint:
        return False
    return bool(a == b)
