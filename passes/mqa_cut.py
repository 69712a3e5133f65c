"""Where an indexer sits in a graph: the products q . k, the weights of the heads, the masks, the choice of keys.

Structure only says where to cut; what the cut-out region computes is found by running it (``mqa_family``). The way
goes back from a ``topk`` (or from a ReLU whose scores nobody ranks) to the products behind it. What joins on the way
forward is a role: the first factor the weights, a sum or a fill a mask. Each operand is cut as far back as transposes,
views and exact upcasts go, so that RoPE, norms, projections and caches stay outside.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import fx

from ascend_deep.passes import mqa_walk as walk
from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.mqa_family import assignments, expr
from ascend_deep.passes.mqa_roles import Found, depends, follow
from ascend_deep.passes.mqa_walk import CASTS, CONSTANTS, LAYOUT, PRODUCTS, UNARY, numel, tensors_of
from ascend_deep.passes.region import Region, slice_region
from ascend_deep.passes.router_selection import named_args

__all__ = ["chain", "cuts"]

_MAX_LAYOUTS = 24
_NOT = frozenset({"aten.bitwise_not", "aten.logical_not"})

# Functions of the scores that a block may rank instead of them; they are none of the op's.
_RANKED_BY = frozenset(
    f"aten.{name}" for name in ("softmax", "_softmax", "log_softmax", "_log_softmax", "exp", "sigmoid", "tanh")
)

# Hints of a region that returns scores.
_SCORES = {"topk": 0, "capped": False, "order": "descending", "returns": "scores", "index_dtype": ""}


def chain(view: GraphView, node: fx.Node, casts: bool) -> list[fx.Node]:
    """``node`` and what it is a view or an exact upcast of, nearest first."""
    found: list[fx.Node] = []
    for _ in range(24):
        if view.tensor(node) is not None:
            found.append(node)
        name = op_name(node)
        if name in CASTS:
            parent = node.args[0]
            low, high = view.dtype(parent), view.dtype(node)
            if not casts or not _exact(low, high):
                break
        elif name not in LAYOUT and node.target is not operator.getitem:
            break
        parent = node.args[0]
        if not isinstance(parent, fx.Node):
            break
        node = parent
    return found


def _exact(low: torch.dtype | None, high: torch.dtype | None) -> bool:
    return low == high or (low in (torch.bfloat16, torch.float16) and high == torch.float32)


def _common(view: GraphView, nodes: Sequence[fx.Node], casts: bool) -> list[fx.Node]:
    """Where one role may be cut: what all ``nodes`` are views of, furthest back first."""
    chains = [chain(view, n, casts) for n in nodes]
    return [n for n in reversed(chains[0]) if all(n in c for c in chains[1:])]


# -- cuts -----------------------------------------------------------------------------------------------------------
def cuts(view: GraphView, anchor: fx.Node, name: str) -> list[Region] | Refusal:
    """Regions around an anchor, one per hypothesis about its layout; empty if it is no indexer at all."""
    ranked = walk.ranked_by(view, anchor)
    if ranked is None:
        return _unranked(view, anchor, name)
    products, early = walk.products_behind(view, ranked, walk.cone(view, ranked))
    if early is not None:
        mask = op_name(early) != "aten.mul"
        return Refusal(
            "a mask is applied before the ReLU, which turns -inf into a score of 0; the op hides keys after the sum "
            "over the heads."
            if mask
            else "a tensor is multiplied to the products before the ReLU; the sign of that scale is not known.",
            early,
            "Mask the scores after the sum over the heads." if mask else "Multiply q by it instead.",
        )
    found = follow(view, products, ranked)
    if isinstance(found, Refusal):
        return found
    # Scores that others read, or that go through another function, are computed anyway: the op is their sum then, and
    # what ranks them stays.
    ends = [n for n in (*found.spine, ranked) if _shared(view, n, found, anchor) or _transformed(view, n, found)]
    ends = ends or [ranked]
    regions: list[Region] = []
    refusal: Refusal | None = None
    if not _shared(view, ends[0], found, anchor) and not _transformed(view, ends[0], found):
        chosen = _choice(view, anchor)
        made = chosen if isinstance(chosen, Refusal) else _regions(view, found, chosen[0], chosen[1], name)
        if isinstance(made, Refusal):
            refusal = made
        else:
            regions.extend(made)
    if not regions:
        for end in dict.fromkeys((ends[0], ranked)):
            upto = follow(view, products, end)
            made = upto if isinstance(upto, Refusal) else _regions(view, upto, [end], dict(_SCORES), name)
            if not isinstance(made, Refusal):
                return [*regions, *made]
            refusal = refusal or made
        assert refusal is not None
        return refusal
    return regions


def _is_summed(view: GraphView, node: fx.Node, found: Found) -> bool:
    """True for scores: one number for each query and key, behind all weights."""
    return numel(view, node) == numel(view, found.scores) and all(depends(node, f, found.spine) for f in found.factors)


def _shared(view: GraphView, node: fx.Node, found: Found, anchor: fx.Node) -> bool:
    """True for scores (summed over the heads) whose values something outside the block reads."""
    inside = {*found.spine, anchor}
    read = any(u not in inside and op_name(u) not in CONSTANTS for u in node.users)
    return read and _is_summed(view, node, found)


def _transformed(view: GraphView, node: fx.Node, found: Found) -> bool:
    """True for scores of which a function of another kind is ranked."""
    return any(op_name(u) in _RANKED_BY for u in node.users) and _is_summed(view, node, found)


def _choice(view: GraphView, anchor: fx.Node) -> tuple[list[fx.Node], dict[str, Any]] | Refusal:
    """Outputs of a choice that anybody uses, and how it is made."""
    hints: dict[str, Any] = {"capped": False, "index_dtype": "int64"}
    args = named_args(anchor)
    hints["order"] = "descending" if args["sorted"] else "open"
    used = {int(u.args[1]): u for u in anchor.users if u.users}  # type: ignore[arg-type]
    k = args["k"]
    keys = expr(view.shape(args["self"])[-1])
    if isinstance(k, fx.Node):
        operands = list(k.args)
        cap = next((int(a) for a in operands if isinstance(a, int)), None)
        sizes = [view.val(a) for a in operands if isinstance(a, fx.Node)]
        if getattr(k.target, "__name__", "") not in ("sym_min", "min") or cap is None or len(sizes) != 1:
            return Refusal("the number of chosen keys is neither a constant nor min(constant, number of keys).", k)
        if expr(sizes[0]) != keys:
            return Refusal("the number of chosen keys is capped by another size than the number of keys.", k)
        k, hints["capped"] = cap, True
    hints["topk"] = int(k)
    if not used:
        return Refusal("nobody uses the chosen keys.", anchor)
    outputs, returns = [], []
    if 1 in used:
        ids = used[1]
        user = next(iter(ids.users))
        if len(ids.users) == 1 and op_name(user) in CASTS and view.dtype(user) == torch.int32:
            ids, hints["index_dtype"] = user, "int32"
        outputs.append(ids)
        returns.append("idx")
    if 0 in used:
        outputs.append(used[0])
        returns.append("scores")
    hints["returns"] = ",".join(returns)
    return outputs, hints


def _regions(
    view: GraphView, found: Found, outputs: list[fx.Node], hints: dict[str, Any], name: str
) -> list[Region] | Refusal:
    """One region per layout of the operands that the sizes allow."""
    inside = {*found.products, *found.spine}
    for node in (*found.products, *found.spine):
        dtype = view.dtype(node)
        if dtype in (torch.bfloat16, torch.float16):
            return Refusal(
                f"the scores are rounded to {str(dtype).removeprefix('torch.')}; the op sums in float32 and would "
                "choose other keys.",
                node,
                "Write q.float() @ k.float(): products of half precision are exact in float32 and cost nothing here.",
            )
        heads_outside = node is not found.scores and _outside(node, inside, outputs, view)
        if heads_outside and numel(view, node) != numel(view, found.scores):
            return Refusal("the products of each head are used outside as well, so they are computed anyway.", node)
    refusal: Refusal = Refusal("the sizes of q, k, weights and scores do not belong to one indexer.", found.scores)
    made: list[Region] = []
    for layout, nodes in islice(_layouts(view, found), _MAX_LAYOUTS):
        masks = _mask_roles(view, found, layout["scores"])
        if isinstance(masks, Refusal):
            return masks
        inputs = dict(nodes)
        kinds = []
        for i, (kind, mask, text) in enumerate(masks):
            inputs[f"mask{i}"], layout[f"mask{i}"] = mask, text
            kinds.append(kind)
        known = {
            **hints,
            "scores": found.scores.name,
            "layout": ";".join(f"{r}={t}" for r, t in layout.items()),
            "masks": ",".join(kinds),
        }
        region = slice_region(view, name, inputs, outputs, known)
        if isinstance(region, Refusal):
            refusal = region
        else:
            made.append(region)
    return made or refusal


def _outside(node: fx.Node, inside: set[fx.Node], outputs: Sequence[fx.Node], view: GraphView) -> bool:
    """True if a tensor that is not an output is used by a node that is not part of the block."""
    return (
        view.tensor(node) is not None
        and node not in outputs
        and any(u not in inside and op_name(u) not in CONSTANTS for u in node.users)
    )


def _layouts(view: GraphView, found: Found) -> Iterator[tuple[dict[str, str], dict[str, fx.Node]]]:
    """Layouts by role and the nodes to cut at, the plainest first."""
    first = found.products[0]
    operands = [_operands(p) for p in found.products]
    if any(o is None for o in operands):
        return
    for swapped in (False, True):
        sides = [(b, a) if swapped else (a, b) for a, b in operands]  # type: ignore[misc]
        depths = [expr(view.shape(sides[0][0])[i]) for i in _contracted(first, swapped, view, sides[0][0])]
        for depth in depths:
            yield from _with_sides(view, found, [q for q, _ in sides], [k for _, k in sides], depth)


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    args = product.args[1] if op_name(product) == "aten.einsum" else product.args
    nodes = [a for a in args if isinstance(a, fx.Node)]  # type: ignore[union-attr]
    return (nodes[0], nodes[1]) if len(nodes) == 2 else None


def _contracted(product: fx.Node, swapped: bool, view: GraphView, q: fx.Node) -> list[int]:
    """Dims of q that the product sums over."""
    if op_name(product) == "aten.einsum":
        terms, _, result = str(product.args[0]).replace(" ", "").partition("->")
        letters = terms.split(",")[1 if swapped else 0]
        return [i for i, c in enumerate(letters) if c not in result]
    return [len(view.shape(q)) - 2 if swapped else len(view.shape(q)) - 1]


def _with_sides(
    view: GraphView, found: Found, qs: list[fx.Node], ks: list[fx.Node], depth: Any
) -> Iterator[tuple[dict[str, str], dict[str, fx.Node]]]:
    wide = view.dtype(found.products[0]) == torch.float64
    q_cuts, kv_cuts = _common(view, qs, not wide), _common(view, ks, not wide)
    w_cuts = _common(view, found.weights, not wide)
    shape = [expr(s) for s in view.shape(found.scores)]
    keys = shape[-1]
    for frame in _frames(shape[:-1]):
        sizes = {"T": keys, "D": depth, "B": expr(1), "S": expr(1)}
        sizes.update({n: s for n, s in zip(frame, shape, strict=False) if n != "1"})
        for q in q_cuts:
            heads = _heads(view, q, sizes)
            if heads is None:
                continue
            sizes["H"] = heads
            for kv in kv_cuts:
                if view.dtype(kv) != view.dtype(q):
                    continue
                for w in w_cuts:
                    for q_text in assignments(view.shape(q), "BSHD", sizes):
                        for kv_text in assignments(view.shape(kv), "BTD", sizes):
                            for w_text in assignments(view.shape(w), "BSH", sizes):
                                layout = {"q": q_text, "kv": kv_text, "weights": w_text, "scores": frame + _t(keys)}
                                yield layout, {"q": q, "kv": kv, "weights": w}


def _t(keys: Any) -> str:
    return "1" if keys == 1 else "T"


def _frames(lead: Sequence[Any]) -> Iterator[str]:
    """Which leading dims of the scores are B and S; others must be 1."""
    big = [i for i, s in enumerate(lead) if s != 1]
    if len(big) > 2:
        return
    names = {2: ["BS"], 1: ["S", "B"], 0: [""]}[len(big)]
    for chosen in names:
        letters = iter(chosen)
        yield "".join(next(letters) if i in big else "1" for i in range(len(lead)))


def _heads(view: GraphView, q: fx.Node, sizes: dict[str, Any]) -> Any:
    """What is left of q's dims without batch, queries and depth, or None."""
    left = [expr(s) for s in view.shape(q) if s != 1]
    for n in "BSD":
        if sizes[n] != 1:
            if sizes[n] not in left:
                return None
            left.remove(sizes[n])
    return (left[0] if left else expr(1)) if len(left) <= 1 else None


def _mask_roles(view: GraphView, found: Found, scores: str) -> list[tuple[str, fx.Node, str]] | Refusal:
    """Kind, node and layout of every mask."""
    made = []
    names = [n for n in scores if n != "1"]
    for kind, mask, met, _ in found.masks:
        shape = view.shape(met)
        big = [i for i, s in enumerate(shape) if not (isinstance(s, int) and s == 1)]
        own = view.shape(mask)
        if len(big) != len(names) or len(own) > len(shape) or not own:
            return Refusal("a mask meets the scores in a shape that is not [B, S, T].", met)
        of = dict(zip(big, names, strict=True))
        shift = len(shape) - len(own)
        text = "".join("1" if isinstance(s, int) and s == 1 else of.get(i + shift, "?") for i, s in enumerate(own))
        if "?" in text:
            return Refusal("a mask makes the scores larger.", met)
        if kind != "add" and op_name(mask) in _NOT and view.tensor(mask.args[0]) is not None:
            mask, kind = mask.args[0], {"hide": "keep", "keep": "hide"}[kind]  # type: ignore[assignment]
        if kind != "add" and view.dtype(mask) != torch.bool:
            return Refusal("a mask is not boolean.", met)
        dtype = view.dtype(mask)
        if kind == "add" and dtype == torch.float64 and view.dtype(met) != torch.float64:
            return Refusal("a mask is added in float64 to scores of float32; the op adds it in float32.", met)
        if "T" not in text or (kind == "add" and (dtype is None or not dtype.is_floating_point)):
            return Refusal("a mask does not run over the keys, or adds integers.", met)
        made.append((kind, mask, text))
    return made


# -- scores that nobody ranks ---------------------------------------------------------------------------------------
def _unranked(view: GraphView, relu: fx.Node, name: str) -> list[Region] | Refusal:
    """Regions from the products to the scores, masks included first; empty unless sizes fit an indexer."""
    product, early = walk.product_behind(view, relu)
    assert product is not None
    ends: list[fx.Node] = []
    node, weighted = relu, False
    for _ in range(16):
        users = list(node.users)
        if weighted and numel(view, node) != numel(view, relu) and view.shape(node):
            ends.append(node)
        if len(users) != 1 or view.tensor(users[0]) is None:
            break
        user = users[0]
        known = LAYOUT | CASTS | PRODUCTS | UNARY | {"aten.sum", "aten.add", "aten.masked_fill", "aten.where"}
        if op_name(user) not in known:
            break
        weighted |= len(tensors_of(view, user)) > 1
        node = user
    regions: list[Region] = []
    for end in reversed(ends):
        found = follow(view, [product], end)
        if isinstance(found, Refusal):
            continue
        made = _regions(view, found, [end], dict(_SCORES), name)
        if not isinstance(made, Refusal):
            regions.extend(made)
    return regions if early is None else []
