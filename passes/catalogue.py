"""The recognisers there are, in the order in which they run: one table, no registration on import.

Larger blocks come first: once the experts of a layer are one op, the router that feeds them is a clean cut, and
activations that remain are not part of either. A choice of keys is a choice of experts to a router, so indexers come
before it.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from ascend_deep.passes._types import Recogniser
from ascend_deep.passes.graph_view import op_name

__all__ = ["NAMES", "TRIGGERS", "is_candidate", "load", "products"]

# name: (module, attribute)
_TABLE: Mapping[str, tuple[str, str]] = {
    "experts_grouped": ("ascend_deep.passes.experts_grouped", "RECOGNISER"),
    "experts_batched": ("ascend_deep.passes.experts_batched", "RECOGNISER"),
    "experts_unrolled": ("ascend_deep.passes.experts_unrolled", "RECOGNISER"),
    "mqa_indexer": ("ascend_deep.passes.mqa_indexer", "RECOGNISER"),
    "router": ("ascend_deep.passes.router", "RECOGNISER"),
    "sparse_attention": ("ascend_deep.passes.sparse_attention", "RECOGNISER"),
    "swiglu_quant": ("ascend_deep.passes.swiglu_quant", "RECOGNISER"),
    "swiglu": ("ascend_deep.passes.swiglu", "RECOGNISER"),
    "grouped_mm": ("ascend_deep.passes.grouped_mm", "RECOGNISER"),
    "grouped_loop": ("ascend_deep.passes.grouped_loop", "RECOGNISER"),
    "quantise": ("ascend_deep.passes.quantise", "RECOGNISER"),
    "fp8_linear": ("ascend_deep.passes.fp8_linear", "RECOGNISER"),
    "scaled_mm": ("ascend_deep.passes.fp8_linear", "SCALED_MM"),
    "upcast_matmul": ("ascend_deep.passes.upcast_matmul", "RECOGNISER"),
    "linear": ("ascend_deep.passes.linear", "RECOGNISER"),
}

NAMES: tuple[str, ...] = tuple(_TABLE)

# Names of calls in a Dynamo graph without any of which no recogniser can match: the gate before capture. Choices of
# experts or keys; products with the weights of experts or with keys; parts of a tensor that may be its halves (a slice
# is one only if it is a half, see ``is_candidate``).
TRIGGERS = frozenset(
    {
        "topk", "sort", "argsort", "argmax", "max", "grouped_mm", "_grouped_mm", "grouped_mm_fallback", "bmm",
        "baddbmm", "baddbmm_", "einsum", "matmul", "imatmul", "__matmul__", "__rmatmul__", "silu",
        "gelu", "sigmoid", "chunk", "unsafe_chunk", "split", "unsafe_split", "split_with_sizes",
        "unsafe_split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "narrow", "unbind",
    }
)  # fmt: skip


# Calls that the recognisers of single products look at, if the operands have the right dtype.
_PRODUCTS = frozenset({"linear", "mm", "matmul", "__matmul__", "__rmatmul__", "addmm", "bmm", "einsum"})
_HALF = (torch.bfloat16, torch.float16)
_UPCASTS = frozenset({"float", "to", "type"})


def is_candidate(node: fx.Node, names: Collection[str] = ()) -> bool:
    """True if a recogniser may have something to find at this node of a Dynamo graph.

    Args:
        names: recognisers of single products that run; others always count.
    """
    if node.op not in ("call_function", "call_method"):
        return False
    name = _call_name(node)
    if name in TRIGGERS or (name in ("getitem", "__getitem__", "slice") and _is_half(node)):
        return True
    if any(n in ("fp8_linear", "quantise", "swiglu_quant") for n in names) and _reads_fp8(node, name):
        return True
    return any(_is_product(node, n) for n in names if n in ("linear", "upcast_matmul", "scaled_mm", "grouped_loop"))


def products(gm: fx.GraphModule, names: Collection[str]) -> dict[str, int]:
    """For each recogniser of single products in ``names``, the calls of a Dynamo graph that it would look at."""
    return {n: sum(_is_product(node, n) for node in gm.graph.nodes) for n in names}


def _call_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else op_name(node).rsplit(".", 1)[-1]


def _is_product(node: fx.Node, recogniser: str) -> bool:
    """A product of bfloat16 tensors (``linear``), or of one that was converted just before (``upcast_matmul``)."""
    if recogniser == "scaled_mm":
        return node.op == "call_function" and _call_name(node) == "_scaled_mm"
    if recogniser == "grouped_loop":
        joined = node.all_input_nodes if _call_name(node) in ("stack", "cat", "concat") else []
        return len(joined) > 1 and all(_is_product(n, "linear") for n in joined)
    if node.op not in ("call_function", "call_method") or _call_name(node) not in _PRODUCTS:
        return False
    operands = node.all_input_nodes[:2]
    if recogniser == "linear":
        return any(_dtype(n) == torch.bfloat16 for n in (node, *operands))  # the result: under autocast
    return recogniser == "upcast_matmul" and any(_was_half(n) for n in operands)


def _reads_fp8(node: fx.Node, name: str) -> bool:
    """A conversion to FP8 or from it."""
    if name not in _UPCASTS:
        return False
    return any(_dtype(n) == torch.float8_e4m3fn for n in (node, *node.all_input_nodes[:1]))


def _was_half(node: fx.Node) -> bool:
    for _ in range(8):
        parents = node.all_input_nodes
        if not parents:
            return False
        if _call_name(node) in _UPCASTS and _dtype(node) == torch.float32 and _dtype(parents[0]) in _HALF:
            return True
        node = parents[0]
    return False


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("example_value")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _is_half(node: fx.Node) -> bool:
    """A slice that takes half of the last dim of a tensor; models slice all the time, and capture takes a while."""
    base = node.args[0] if node.args else None
    whole = base.meta.get("example_value") if isinstance(base, fx.Node) else None
    part = node.meta.get("example_value")
    if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor):
        return False
    if whole.dim() == 0 or whole.dim() != part.dim():
        return False
    wide, half = whole.shape[-1], part.shape[-1]
    return isinstance(wide, int) and isinstance(half, int) and 0 < wide == 2 * half


def load(names: Sequence[str]) -> list[Recogniser]:
    """The recognisers of the given names, in table order."""
    found = []
    for name in NAMES:
        if name in names:
            module, attribute = _TABLE[name]
            found.append(getattr(importlib.import_module(module), attribute))
    return found
