"""What the rest of a graph may not do with a router's scores and weights: compare the ones with the others.

    p = softmax(logits);  w, i = topk(p);  mask = p >= w[:, -1:]

In eager mode ``w`` are elements of ``p``, bit for bit. After the rewrite ``w`` comes from ``moe_route``, and ``p``,
needed elsewhere, from the ops of the model: equal to rounding, and a comparison for equality or order loses the expert
that sits on the threshold. No probe shows that, so it is read off the graph.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.region import Region

__all__ = ["compared_outside"]

_STEPS = frozenset(
    f"aten.{name}"
    for name in (
        "eq", "ne", "lt", "le", "gt", "ge", "isclose", "searchsorted", "bucketize", "isin", "sign", "sgn", "heaviside",
        "floor", "ceil", "round", "trunc", "frac", "fmod", "remainder", "floor_divide", "nextafter",
    )
)  # fmt: skip
# Behind these a value is no score any more.
_ENDS = frozenset(
    f"aten.{name}"
    for name in (
        "mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "einsum", "convolution", "_grouped_mm", "embedding",
        "mean", "scaled_dot_product_attention", "native_layer_norm", "layer_norm", "rms_norm", "topk", "sort",
        "argsort", "argmax",
    )
)  # fmt: skip


def compared_outside(view: GraphView, region: Region) -> Refusal | None:
    """The refusal of a region whose weights meet its scores in a comparison or another step function."""
    inside, outputs = set(region.nodes), set(region.outputs)
    first = {*region.inputs.values(), *(n for n in region.nodes if n not in outputs)}
    weights = {n for n in outputs if _floating(view, n)}
    scores = first | _reached(first, inside, view)
    chosen = weights | _reached(weights, inside, view)
    for node in sorted(chosen, key=view.order.__getitem__):
        for user in node.users:
            if user in inside or op_name(user) not in _STEPS:
                continue
            if any(n in scores and _floating(view, n) for n in user.all_input_nodes):
                return Refusal(
                    f"{op_name(user)} compares the chosen scores with all of them outside the block, and they would no "
                    "longer be equal to the last bit.",
                    user,
                    "Compare expert ids, or build the mask by scatter from the ids.",
                )
    return None


def _reached(starts: Iterable[fx.Node], inside: set[fx.Node], view: GraphView) -> set[fx.Node]:
    """Floating nodes outside the region that are made of ``starts`` without an op of ``_ENDS``."""
    found: set[fx.Node] = set()
    pending = list(starts)
    while pending:
        for user in pending.pop().users:
            name = op_name(user)
            if user in inside or user in found or name in _ENDS or name.startswith("ascend_deep."):
                continue
            if _floating(view, user):
                found.add(user)
                pending.append(user)
    return found


def _floating(view: GraphView, node: fx.Node) -> bool:
    """True for floating tensors, and for calls with several results, of which one may be."""
    tensor = view.tensor(node)
    return tensor.is_floating_point() if tensor is not None else isinstance(node.meta.get("val"), (tuple, list))
