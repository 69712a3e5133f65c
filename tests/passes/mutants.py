"""Copies of a captured graph with one thing changed, for tests that whatever is accepted still computes the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
INF = float("inf")


def mutants(gm: fx.GraphModule, swaps: Mapping[Any, Sequence[Any]]) -> Iterator[fx.GraphModule]:
    """Graphs with one op exchanged, one scalar changed, or one dim moved, that still run with the same result sizes."""
    for i, node in enumerate(gm.graph.nodes):
        if node.op != "call_function":
            continue
        changes = [("target", t) for t in swaps.get(node.target, [])]
        for j, a in enumerate(node.args):
            if isinstance(a, float):
                # The lowest number stays finite.
                changes += (
                    [(j, -7.0)] if abs(a) == INF else [(j, a / 1.5)] if abs(a) > 1e30 else [(j, a * 1.5), (j, a * a)]
                )
            elif (
                isinstance(a, int) and not isinstance(a, bool) and node.target in (aten.transpose.int, aten.select.int)
            ):
                changes.append((j, a + 1))
            elif isinstance(a, list) and node.target is aten.sum.dim_IntList:
                changes.append((j, [1]))
        for where, what in changes:
            mutant = copy.deepcopy(gm)
            changed = list(mutant.graph.nodes)[i]
            if where == "target":
                changed.target = what
            else:
                changed.args = tuple(what if k == where else a for k, a in enumerate(changed.args))
            if _refresh(mutant):
                mutant.recompile()
                yield mutant


def _refresh(gm: fx.GraphModule) -> bool:
    """New fake values after a change; False if the graph no longer runs, or gives other sizes."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        values = torch.utils._pytree.tree_map(
            lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, dict(node.kwargs))
        )
        old = node.meta["val"]
        mode = next(n.meta["val"].fake_mode for n in gm.graph.nodes if n.op == "placeholder")
        try:
            with mode:
                node.meta["val"] = node.target(*values[0], **values[1])
        except Exception:
            return False
        if isinstance(old, torch.Tensor) and node.meta["val"].shape != old.shape:
            return False
    return True
