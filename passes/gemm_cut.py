"""Finds where a matrix product begins: the operands behind views and exact upcasts, and the region between.

Used by the recognisers of dense products. What the region computes is decided by running it (``gemm_family.py``), so
the walk here may be generous: it only chooses the nodes that the region starts from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.region import Region, slice_region

__all__ = ["PRODUCTS", "Product", "cuts", "is_batch", "is_upcast", "name_of", "product_of", "source_of", "unfit"]

PRODUCTS = ("aten.linear", "aten.mm", "aten.matmul", "aten.addmm", "aten.bmm", "aten.einsum")

_CASTS = frozenset({"aten._to_copy", "aten.to"})
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "permute", "transpose", "t",
        "contiguous", "clone", "alias", "numpy_T", "mT",
    )
)  # fmt: skip
_DEEPEST = 24


@dataclass(frozen=True)
class Product:
    """A product node and its tensors: two factors, and what is added (``None``: nothing)."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    added: fx.Node | None = None


def product_of(node: fx.Node) -> Product | None:
    """``node`` as a product of two tensors, or ``None`` if it is none."""
    name, args = op_name(node), node.args
    if name == "aten.einsum":
        operands = args[1]
        if not isinstance(operands, (list, tuple)) or len(operands) != 2:
            return None
        left, right, added = operands[0], operands[1], None
    elif name == "aten.addmm":
        added, left, right = args[:3]
    elif name in PRODUCTS:
        left, right = args[:2]
        added = args[2] if name == "aten.linear" and len(args) > 2 else node.kwargs.get("bias")
    else:
        return None
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    return Product(node, left, right, added if isinstance(added, fx.Node) else None)


def is_upcast(view: GraphView, node: fx.Node) -> bool:
    """True for a conversion to a wider floating dtype, which loses nothing."""
    if op_name(node) not in _CASTS or not isinstance(node.args[0], fx.Node):
        return False
    low, high = view.dtype(node.args[0]), view.dtype(node)
    return low in (torch.bfloat16, torch.float16) and high == torch.float32


def source_of(view: GraphView, node: fx.Node) -> fx.Node:
    """What ``node`` is made of by views and one exact upcast: the tensor before the upcast, else ``node`` itself."""
    current = node
    for _ in range(_DEEPEST):
        if is_upcast(view, current):
            return current.args[0]  # type: ignore[return-value]
        parent = current.args[0] if current.args else None
        if op_name(current) not in _VIEWS or not isinstance(parent, fx.Node):
            return node
        if view.dtype(parent) != view.dtype(current):
            return node
        current = parent
    return node


def name_of(dtype: torch.dtype | None) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def is_batch(view: GraphView, product: Product) -> bool:
    """True if the second factor holds more than one matrix."""
    return any(not (isinstance(s, int) and s == 1) for s in view.shape(product.right)[:-2])


def unfit(view: GraphView, product: Product) -> Refusal | None:
    """Why ``product`` is no product of two matrices whatever its dtypes are, or ``None``."""
    left, right = view.shape(product.left), view.shape(product.right)
    name = op_name(product.node).removeprefix("aten.")
    if len(right) < 2 or not left:
        return Refusal(f"{name} multiplies by a vector, and gemm_bf16 multiplies matrices.", product.node)
    if is_batch(view, product):
        return Refusal(f"{name} multiplies batches of matrices, and gemm_bf16 takes one pair.", product.node)
    beta = product.node.kwargs.get("beta", 1)
    if name == "addmm" and beta != 1:
        return Refusal(f"addmm has beta={beta}, and gemm_bf16 adds its third operand as it is.", product.node)
    if product.added is not None and view.dtype(product.added) not in (torch.bfloat16, torch.float32):
        return Refusal(
            f"what is added is {name_of(view.dtype(product.added))}; gemm_bf16 adds bfloat16 or float32.", product.node
        )
    return None


def cuts(
    view: GraphView,
    name: str,
    product: Product,
    a: fx.Node,
    b: fx.Node,
    hints: Mapping[str, Any] | None = None,
) -> Sequence[Region] | Refusal:
    """Regions from ``a``, ``b`` and what is added to the product; with a final rounding to the operands' dtype first.

    The rounding is taken along only if nobody else reads the unrounded product: there would be two products then.
    """
    inputs = {"a": a, "b": b}
    if product.added is not None:
        inputs["bias"] = product.added
    outputs = [product.node]
    users = list(product.node.users)
    if len(users) == 1 and op_name(users[0]) in _CASTS and view.dtype(users[0]) == view.dtype(a):
        outputs.insert(0, users[0])
    found = [slice_region(view, name, inputs, [output], hints) for output in outputs]
    regions = [r for r in found if isinstance(r, Region)]
    return regions or next(r for r in found if isinstance(r, Refusal))
