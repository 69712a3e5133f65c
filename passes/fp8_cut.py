"""Finds products of two FP8 tensors that are scaled back before or after they are multiplied, and what they read.

Behind each factor of a product the walk looks for E4M3 data, through conversions, views and products with a scale, and
for the scale behind what spreads it over its block. What the region computes is decided by running it
(``fp8_family.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ascend_deep.lowering._torch_compat import statically_known_true
from ascend_deep.passes._types import Refusal
from ascend_deep.passes.gemm_cut import Product, product_of
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.region import Region, slice_region

__all__ = ["FP8", "Operand", "cut", "gradient_reaches", "products"]

FP8 = torch.float8_e4m3fn
SCALED_MM = "aten._scaled_mm"

_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "permute", "transpose", "t",
        "contiguous", "clone", "alias", "expand", "slice", "repeat_interleave", "numpy_T", "mT",
    )
)  # fmt: skip
_CASTS = frozenset({"aten._to_copy", "aten.to"})
_SCALINGS = frozenset({"aten.mul", "aten.div"})
_DEEPEST = 40


@dataclass
class Operand:
    """One factor: its E4M3 data, nearest first, and the nodes that may be its scale, nearest first."""

    data: list[fx.Node]
    scales: list[list[fx.Node]] = field(default_factory=list)


def products(view: GraphView, names: Sequence[str]) -> Iterator[fx.Node]:
    """Products, of the given ops, that have FP8 data behind a factor."""
    for node in view.calls(*names):
        product = factors(node)
        if product is not None and (_behind(view, product.left) or _behind(view, product.right)):
            yield node


def factors(node: fx.Node) -> Product | None:
    """The tensors that a product multiplies; ``_scaled_mm`` included."""
    if op_name(node) == SCALED_MM:
        left, right = node.args[:2]
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        added = node.args[4] if len(node.args) > 4 else node.kwargs.get("bias")
        return Product(node, left, right, added if isinstance(added, fx.Node) else None)
    return product_of(node)


def cut(view: GraphView, name: str, node: fx.Node) -> Sequence[Region] | Refusal:
    """Regions from data and scales to the product and what scales, adds to or rounds it, largest first."""
    product = factors(node)
    assert product is not None
    left, right = _behind(view, product.left), _behind(view, product.right)
    if left is None or right is None:
        which = "second" if left is not None else "first"
        return Refusal(
            f"only one factor is FP8, and gemm_scaled multiplies two quantised ones; the {which} is not.",
            node,
            "prepare(model, quantize='fp8') quantises the activations too.",
        )
    if op_name(node) == SCALED_MM:
        for operand, scale in zip((left, right), node.args[2:4], strict=True):
            operand.scales.append(_spread(view, scale))
    outputs = [node]
    while len(outputs) < 8:
        (user, *others) = outputs[-1].users or (None,)
        if user is None or others or not _goes_on(view, user, outputs[-1], left, right):
            break
        outputs.append(user)
    depth = view.shape(product.left)[-1]
    a, b = _data(view, left, depth), _data(view, right, depth)
    if a is None or b is None:
        return Refusal("the FP8 data of a factor have another shape than the factor, block by block.", node)
    for which, operand in (("first", left), ("second", right)):
        if len(operand.scales) != 1:
            count = len(operand.scales) or "no"
            return Refusal(f"the {which} factor has {count} scales; gemm_scaled takes one for each.", node)
    regions: list[Region] = []
    refusal: Refusal | None = None
    for output in reversed(outputs):
        for sfa in reversed(left.scales[0]):
            for sfb in reversed(right.scales[0]):
                inputs = {"a": a, "sfa": sfa, "b": b, "sfb": sfb}
                if product.added is not None:
                    inputs["bias"] = product.added
                found = slice_region(view, name, inputs, [output])
                if isinstance(found, Region):
                    regions.append(found)
                else:
                    refusal = refusal or found
    return regions or refusal or Refusal("nothing was found to replace.", node)


def gradient_reaches(view: GraphView, region: Region) -> bool:
    """True if a gradient may be asked for a tensor that the region reads."""
    recorded = view.modes[region.outputs[0]].grad
    if not (torch.is_grad_enabled() if recorded is None else recorded):
        return False
    pending, seen = list(region.inputs.values()), set()
    while pending:
        node = pending.pop()
        if node in seen or op_name(node) == "aten.detach":
            continue
        seen.add(node)
        value = view.val(node)
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            continue
        if node.op in ("placeholder", "get_attr"):
            held = node.meta.get("example_value", value)
            if isinstance(held, torch.Tensor) and held.requires_grad:
                return True
        if view.modes[node].grad is False:
            continue
        pending.extend(node.all_input_nodes)
    return False


# -- walking --------------------------------------------------------------------------------------------------------
def _behind(view: GraphView, node: Any) -> Operand | None:
    """The FP8 data behind ``node`` and the scales on the way."""
    scales: list[list[fx.Node]] = []
    for _ in range(_DEEPEST):
        if not isinstance(node, fx.Node):
            return None
        if view.dtype(node) == FP8:
            return Operand(_chain(view, node), scales)
        name = op_name(node)
        if name in _SCALINGS:
            first, second = node.args[:2]
            found = _behind(view, first)
            if found is not None:
                other = second
            elif name == "aten.mul":
                found, other = _behind(view, second), first
            if found is None or not isinstance(other, fx.Node) or name == "aten.div":
                return None
            found.scales = [_spread(view, other), *found.scales, *scales]
            return found
        if name not in _VIEWS and name not in _CASTS:
            return None
        node = node.args[0]
    return None


def _chain(view: GraphView, node: fx.Node) -> list[fx.Node]:
    """``node`` and what it is a view of, nearest first."""
    found = [node]
    while op_name(found[-1]) in _VIEWS and isinstance(found[-1].args[0], fx.Node) and len(found) < _DEEPEST:
        found.append(found[-1].args[0])
    return found


def _spread(view: GraphView, node: Any) -> list[fx.Node]:
    """``node`` and what it repeats or reshapes, as long as it is float32, nearest first."""
    assert isinstance(node, fx.Node)
    return [n for n in _chain(view, node) if view.dtype(n) == torch.float32] or [node]


def _data(view: GraphView, operand: Operand, depth: Any) -> fx.Node | None:
    """The nearest form of the data that is a matrix along ``depth``, or rows of it."""
    for node in operand.data:
        shape = view.shape(node)
        if len(shape) >= 2 and (statically_known_true(shape[-1] == depth) or _is_turned(shape, depth)):
            return node
    return None


def _is_turned(shape: Sequence[Any], depth: Any) -> bool:
    return len(shape) == 2 and bool(statically_known_true(shape[0] == depth))


def _goes_on(view: GraphView, user: fx.Node, before: fx.Node, left: Operand, right: Operand) -> bool:
    """True if ``user`` scales or converts ``before``; a scale is then that of the factor that it goes along with."""
    name = op_name(user)
    if name in _CASTS:
        return bool(view.dtype(user) in (torch.bfloat16, torch.float32))
    if name != "aten.mul":
        return False
    others = [a for a in user.args[:2] if a is not before]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or view.dtype(others[0]) != torch.float32:
        return False
    scale = others[0]
    shape = view.shape(scale)
    rows = len(shape) == len(view.shape(before)) and statically_known_true(shape[-1] == 1)
    target = left if rows and not left.scales else right
    if target.scales:
        return False
    target.scales.append(_spread(view, scale))
    return True
