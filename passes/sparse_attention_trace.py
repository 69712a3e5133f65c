"""From a mask made of chosen keys to the attention that it feeds, and what goes away with it.

The way goes forward from the ``scatter`` of the choice, through whatever joins other masks, to
``scaled_dot_product_attention`` or a softmax, and for a softmax on to the product with the values and back to the
product of queries and keys. Everything here is structure; what it computes is found by running it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.mqa_walk import CASTS, CONSTANTS, LAYOUT, PRODUCTS, tensors_of
from ascend_deep.passes.router_selection import named_args

__all__ = ["SDPA", "Attention", "masks_of_choices", "reads_shape", "trace"]

SDPA = "aten.scaled_dot_product_attention"
_SOFTMAX = frozenset({"aten.softmax", "aten._softmax", "aten._safe_softmax"})
_SCATTER = frozenset({"aten.scatter"})
_LOGIC = frozenset(
    f"aten.{n}"
    for n in (
        "bitwise_not", "logical_not", "bitwise_and", "logical_and", "__and__", "bitwise_or", "logical_or", "__or__",
        "add", "sub", "rsub", "mul", "div", "masked_fill", "where", "eq", "ne", "gt", "ge", "lt", "le", "cat",
        "minimum", "maximum", "constant_pad_nd", "amax", "max",
    )
) | {"getitem"}  # fmt: skip
_SCALING = frozenset({"aten.mul", "aten.div"})


@dataclass
class Attention:
    """One attention under a mask of chosen keys.

    ``spine`` holds what depends on the scatter up to the softmax or SDPA; ``masks`` the other tensors that join it,
    each with the node where it does; ``overwritten`` says that scores themselves are overwritten where keys are hidden.
    """

    scatter: fx.Node
    spine: list[fx.Node]
    q: fx.Node
    k: fx.Node
    v: fx.Node
    frame: fx.Node
    """A node of the shape of the scores [B, H, S, T], in the block's own order of dims."""
    output: fx.Node
    inner: list[fx.Node] = field(default_factory=list)
    """Other nodes that go away: products, scaled scores, softmax, dropout."""
    masks: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    overwritten: bool = False
    sink: fx.Node | None = None
    """A column of logits without values behind the scores."""


# -- the way forward ------------------------------------------------------------------------------------------------
def masks_of_choices(view: GraphView) -> list[fx.Node]:
    """Scatters of a constant along the last dim whose result masks attention."""
    return [n for n in view.calls(*_SCATTER) if _is_choice(view, n) and trace(view, n) is not None]


def _is_choice(view: GraphView, node: fx.Node) -> bool:
    args = named_args(node)
    index, shape = view.tensor(args["index"]), view.shape(node)
    written = args.get("src", args.get("value"))
    constant = not isinstance(written, fx.Node) or op_name(written) in CONSTANTS
    return constant and index is not None and len(shape) >= 2 and int(args["dim"]) % len(shape) == len(shape) - 1


def trace(view: GraphView, scatter: fx.Node) -> Attention | Refusal | None:
    """The attention that the mask feeds, a refusal, or None if there is none."""
    spine: dict[fx.Node, None] = {scatter: None}
    ends: dict[fx.Node, None] = {}
    strangers: list[fx.Node] = []
    for node in _growing(spine):
        for user in node.users:
            name = op_name(user)
            if user in spine or reads_shape(view, user):
                continue
            if name == SDPA or name in _SOFTMAX:
                ends[user] = None
            elif name in _LOGIC or name in LAYOUT or name in CASTS:
                spine[user] = None
            else:
                strangers.append(user)
    if not ends:
        return None
    end = next(iter(ends))
    found = (
        _sdpa(view, scatter, list(spine), end) if op_name(end) == SDPA else _spelled(view, scatter, list(spine), end)
    )
    if not isinstance(found, Attention):
        return found
    if strangers:
        what = "the result" if strangers[0].op == "output" else op_name(strangers[0]).removeprefix("aten.")
        return Refusal(f"the mask of the chosen keys is also used by {what}, so it is needed anyway.", strangers[0])
    if len(ends) > 1:
        return Refusal("the mask of the chosen keys feeds more than one attention.", scatter)
    joins = [n for n in spine if op_name(n) in ("aten.cat", "aten.constant_pad_nd")]
    if joins and not _take_sink(view, found, joins):
        return Refusal(
            "the mask of the chosen keys is joined with that of other keys, which are attended to whether chosen or "
            "not; the op reads chosen keys only.",
            end,
        )
    return found


def _growing(spine: dict[fx.Node, None]) -> Iterator[fx.Node]:
    """The nodes of ``spine`` in the order in which they come in, while it grows."""
    at = 0
    while at < len(spine):
        yield next(islice(spine, at, None))
        at += 1


def reads_shape(view: GraphView, user: fx.Node) -> bool:
    """True for a node that reads the shape of its operand at most."""
    value = view.val(user)
    numbers = user.op != "output" and not isinstance(value, (torch.Tensor, tuple, list))
    return numbers or op_name(user) in CONSTANTS


def _take_sink(view: GraphView, found: Attention, joins: list[fx.Node]) -> bool:
    """True if the one join puts a column behind the scores; it moves from the masks to ``sink``."""
    cat = joins[0]
    if len(joins) > 1 or op_name(cat) != "aten.cat" or found.output in joins or op_name(found.output) == SDPA:
        return False
    parts, dim = named_args(cat)["tensors"], int(named_args(cat)["dim"])
    rank = len(view.shape(cat))
    behind = len(parts) == 2 and parts[0] in found.spine and parts[1] not in found.spine
    if not behind or dim % rank != rank - 1 or view.shape(parts[1])[-1] != 1:
        return False
    found.masks = [(mask, join) for mask, join in found.masks if join is not cat]
    found.sink = parts[1]
    return True


def _sides(view: GraphView, spine: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """(tensor, node where it joins) of what joins the spine behind the scatter."""
    inside = set(spine)
    return [
        (side, node)
        for node in spine[1:]
        if op_name(node) not in LAYOUT
        for side in tensors_of(view, node)
        if side not in inside
    ]


def _sdpa(view: GraphView, scatter: fx.Node, spine: list[fx.Node], end: fx.Node) -> Attention | Refusal:
    args = named_args(end)
    if not isinstance(args["attn_mask"], fx.Node) or args["attn_mask"] not in spine:
        return Refusal("the chosen keys reach the attention as more than its mask.", end)
    if args["dropout_p"] != 0:
        return Refusal("the attention weights go through dropout; the op has none.", end)
    if any(len(view.shape(args[n])) != 4 for n in ("query", "key", "value")):
        return Refusal("the attention is not over [batch, heads, tokens, depth].", end)
    return Attention(
        scatter, spine, args["query"], args["key"], args["value"], args["attn_mask"], end, masks=_sides(view, spine)
    )


def _spelled(view: GraphView, scatter: fx.Node, spine: list[fx.Node], softmax: fx.Node) -> Attention | Refusal | None:
    """Attention written as product, softmax and product."""
    sides = _sides(view, spine)
    behind = [(side, join, _product_behind(view, side)) for side, join in sides]
    logits = [(side, join, way) for side, join, way in behind if way is not None]
    if not logits or not spine:
        return None
    side, join, (inner, product_node, early) = logits[0]
    last = _product_after(view, softmax)
    if last is None:
        return None
    if isinstance(last, Refusal):
        return last
    output, after = last
    if len(logits) > 1:
        return Refusal("more than one product of queries and keys goes into the scores.", join)
    dim = named_args(softmax)["dim"]
    rank = len(view.shape(softmax))
    if int(dim) % rank != rank - 1:
        return Refusal("the softmax is not over the keys.", softmax)
    q, k = _operands(product_node)
    weights_first, v = _operands(output)
    if weights_first not in after:
        weights_first, v = v, weights_first
    if weights_first not in after:
        return Refusal("the attention weights are not what the values are multiplied by.", output)
    masks = [(s, j) for s, j in sides if s is not side] + early
    overwritten = op_name(join) in ("aten.masked_fill", "aten.where")
    return Attention(scatter, spine, q, k, v, join, output, [*inner, product_node, *after], masks, overwritten)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    args = node.args[1] if op_name(node) == "aten.einsum" else node.args
    nodes = [a for a in args if isinstance(a, fx.Node)]  # type: ignore[union-attr]
    return nodes[0], nodes[1]


def _product_behind(
    view: GraphView, node: fx.Node
) -> tuple[list[fx.Node], fx.Node, list[tuple[fx.Node, fx.Node]]] | None:
    """The product that ``node`` is a scaled (and masked) form of: nodes on the way, the product, masks on the way."""
    way: list[fx.Node] = []
    masks: list[tuple[fx.Node, fx.Node]] = []
    for _ in range(16):
        name = op_name(node)
        operands = tensors_of(view, node)
        if name in PRODUCTS:
            wide = len(operands) == 2 and all(len(view.shape(n)) >= 3 for n in operands)
            return (way, node, masks) if wide else None
        if name not in LAYOUT | CASTS | _SCALING | {"aten.add", "aten.masked_fill", "aten.where"} or not operands:
            return None
        way.append(node)
        if len(operands) > 1 and name not in LAYOUT:
            if name in _SCALING:
                return None
            floats = [n for n in operands if view.tensor(n).is_floating_point()]  # type: ignore[union-attr]
            main = max(floats, key=lambda n: (len(view.shape(n)), _product_behind(view, n) is not None), default=None)
            if main is None:
                return None
            masks.extend((n, node) for n in operands if n is not main)
            node = main
        else:
            node = operands[0]
    return None


def _product_after(view: GraphView, softmax: fx.Node) -> tuple[fx.Node, list[fx.Node]] | Refusal | None:
    """The product with the values, and the nodes from the softmax to it."""
    way, node = [softmax], softmax
    for _ in range(8):
        users = [
            u for u in node.users if u.op == "output" or (view.tensor(u) is not None and op_name(u) not in CONSTANTS)
        ]
        products = [u for u in users if op_name(u) in PRODUCTS]
        if len(users) > 1:
            return Refusal("the attention weights are used elsewhere as well, so they are needed anyway.", node)
        if products:
            return products[0], way
        if not users or users[0].op == "output":
            return None
        user = users[0]
        name = op_name(user)
        if name in ("aten.dropout", "aten.native_dropout"):
            if user.args[1] != 0 and user.args[2]:
                return Refusal("the attention weights go through dropout; the op has none.", user)
        elif name not in CASTS and name not in LAYOUT:
            return None
        way.append(user)
        node = user
    return None
