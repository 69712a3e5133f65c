"""Predicted times of our ops in a rewritten graph, for the report of a plan: formula, figure, bound. Never measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from ascend_deep.lowering import targets

__all__ = ["notes"]

_PRECISION = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "fp8"}


def notes(gm: fx.GraphModule, target: str) -> tuple[str, ...]:
    """One sentence per op and sizes; none for a target without a table, or an op without a formula."""
    table = targets.TARGETS.get(target)
    if table is None:
        return ()
    found: Counter[str] = Counter()
    for node in gm.graph.nodes:
        name = _ours(node)
        if name in _SIZES:
            found[_sentence(name, node, table)] += 1
    return tuple(text if n == 1 else f"{n} times: {text}" for text, n in found.items())


def _ours(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "ascend_deep":
        return target._schema.name.split("::")[1]
    return ""


def _sentence(name: str, node: fx.Node, table: targets.Target) -> str:
    shapes = [_value(a) for a in node.args]
    first = shapes[0]
    sizes = {k: _plain(v) for k, v in _SIZES[name](shapes, node.kwargs).items()}
    sizes["W"] = first.dtype.itemsize
    # f32 products run on the vector units or as several bf16 ones; there is no rate for them, and that of bf16 is a
    # lower bound of the time.
    precision = _PRECISION.get(first.dtype, "bf16")
    if precision not in table.flops_per_cycle:
        precision = "bf16"
    what = targets.cost(name, **sizes)
    given = ", ".join(f"{k} = {v}" for k, v in sizes.items())
    prediction, formula = targets.predict(what, table, precision), targets.cost(name).flops
    return (
        f"{name} on {table.device}: at least {prediction}, from {formula} operations and its operands read once, with "
        f"{given}."
    )


def _value(argument: Any) -> Any:
    return argument.meta.get("val", argument.meta.get("example_value")) if isinstance(argument, fx.Node) else argument


def _plain(size: Any) -> Any:
    """A size as a number, or as the symbol that Dynamo has for it."""
    if isinstance(size, torch.SymInt):
        return sympy.Symbol(str(size.node.expr), positive=True)
    return int(size)


def _experts(v: list[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    x, idx, w2, enk = v[0], v[1], v[5], kwargs["weight_layout"] == "enk"
    return {"T": x.shape[0], "K": idx.shape[1], "E": w2.shape[0], "H": x.shape[1], "I": w2.shape[2 if enk else 1]}


_SIZES: Mapping[str, Callable[[list[Any], Mapping[str, Any]], dict[str, Any]]] = {
    "moe_experts": _experts,
    "moe_route": lambda v, k: {"T": v[0].shape[0], "E": v[0].shape[1], "K": k["topk"]},
    "mqa_topk": lambda v, k: {
        **{"S": v[0].shape[0] * v[0].shape[1], "T": v[2].shape[1], "N": v[0].shape[2], "D": v[0].shape[3]},
        "K": k["topk"],
    },
    "sparse_mqa_attention": lambda v, k: {
        **{"S": v[0].shape[0] * v[0].shape[2], "K": v[3].shape[2], "N": v[0].shape[1], "D": v[0].shape[3]},
    },
}
