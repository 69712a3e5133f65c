"""Where an indexer sits in a graph: the products q . k, the weights of the heads, the masks, the choice of keys.

Structure only says where to cut; what the cut-out region computes is found by running it (``mqa_family``). The way
goes back from a ``topk`` (or from a ReLU whose scores nobody ranks) to the products behind it. What joins on the way
forward is a role: the first factor the weights, a sum or a fill a mask. Each operand is cut as far back as transposes,
views and exact upcasts go, so that RoPE, norms, projections and caches stay outside.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.mqa_family import assignments, expr
from ascend_deep.passes.region import Region, slice_region
from ascend_deep.passes.router_selection import named_args, selection

__all__ = ["anchors", "cuts"]

_MAX_CONE = 500
_MAX_LAYOUTS = 24
_PRODUCTS = frozenset({"aten.matmul", "aten.bmm", "aten.einsum"})
_SOURCES = frozenset(
    {
        "aten.linear", "aten.mm", "aten.addmm", "aten.convolution", "aten.embedding", "aten._grouped_mm",
        "aten.layer_norm", "aten.native_layer_norm", "aten.rms_norm", "aten.scaled_dot_product_attention",
        "aten.cat", "aten.index_copy", "aten.index_put", "aten.slice_scatter", "aten.cos", "aten.sin", "aten.rsqrt",
    }
)  # fmt: skip
_LAYOUT = frozenset(
    f"aten.{name}"
    for name in (
        "transpose", "permute", "unsqueeze", "squeeze", "expand", "clone", "view", "reshape", "_unsafe_view", "flatten",
        "unflatten", "t", "contiguous", "select", "slice", "narrow", "alias", "movedim", "swapaxes", "swapdims",
        "view_as", "expand_as", "mT", "matrix_H", "numpy_T", "unbind", "split", "split_with_sizes", "chunk",
    )
)  # fmt: skip
_CASTS = frozenset({"aten._to_copy", "aten.to", "aten.type_as", "prims.convert_element_type"})
_UNARY = frozenset({"aten.mul", "aten.div", "aten.relu", "aten.clamp_min", "aten.clamp", "aten.neg", "aten.maximum"})
_CONSTANTS = frozenset(
    {"aten.full", "aten.scalar_tensor", "aten.zeros", "aten.ones", "aten.zeros_like", "aten.full_like"}
)
_NOT = frozenset({"aten.bitwise_not", "aten.logical_not"})


@dataclass
class Found:
    """One indexer: its products, how the scores come from them, and what joins on the way.

    ``spine`` holds everything between products and scores that depends on the products, in graph order.
    """

    products: list[fx.Node]
    scores: fx.Node
    spine: list[fx.Node] = field(default_factory=list)
    weights: list[fx.Node] = field(default_factory=list)
    masks: list[tuple[str, fx.Node, fx.Node]] = field(default_factory=list)  # kind, mask, the scores that it meets


# -- walking --------------------------------------------------------------------------------------------------------
def _tensors(view: GraphView, node: fx.Node) -> list[fx.Node]:
    """Tensor operands that are not constants."""
    return [
        n
        for n in node.all_input_nodes
        if view.tensor(n) is not None and n.op != "get_attr" and op_name(n) not in _CONSTANTS
    ]


def _is_relu(node: fx.Node) -> bool:
    name = op_name(node)
    if name in ("aten.relu", "aten.threshold"):
        return True
    if name in ("aten.clamp", "aten.clamp_min"):
        args = named_args(node)
        return args.get("min") == 0 and args.get("max") is None
    return name == "aten.maximum" and len([n for n in node.all_input_nodes if op_name(n) in _CONSTANTS]) == 1


def _cone(view: GraphView, end: fx.Node) -> list[fx.Node]:
    """What ``end`` is computed from, up to projections and norms, nearest first."""
    seen: dict[fx.Node, None] = {}
    pending = [end]
    while pending and len(seen) < _MAX_CONE:
        node = pending.pop(0)
        if node in seen or node.op != "call_function":
            continue
        seen[node] = None
        name = op_name(node)
        if name not in _SOURCES and not name.startswith("ascend_deep."):
            pending.extend(node.all_input_nodes)
    return list(seen)


def _product_behind(view: GraphView, relu: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The product that a ReLU takes, and a node on the way that joins another tensor to it (a mask before the ReLU)."""
    node: fx.Node = relu
    joined: fx.Node | None = None
    for _ in range(16):
        operands = _tensors(view, node) if node.target is not operator.getitem else node.all_input_nodes
        if not operands:
            return None, None
        if node is not relu and op_name(node) in _PRODUCTS:
            return node, joined
        name = op_name(node)
        if len(operands) > 1 or (name not in _UNARY | _LAYOUT | _CASTS and node is not relu):
            if name in _SOURCES or name not in ("aten.add", "aten.sub", "aten.masked_fill", "aten.where", "aten.mul"):
                return None, None
            joined = node
            floats = [n for n in operands if view.tensor(n).is_floating_point()]  # type: ignore[union-attr]
            operands = sorted(floats, key=lambda n: len(view.shape(n)), reverse=True)
            if not operands:
                return None, None
        node = operands[0]
    return None, None


def _numel(view: GraphView, node: fx.Node) -> Any:
    total = expr(1)
    for s in view.shape(node):
        total = total * expr(s)
    return total


def _products(view: GraphView, scores: fx.Node, cone: Sequence[fx.Node]) -> tuple[list[fx.Node], fx.Node | None]:
    """The products q . k behind ``scores``, and a node that joins a mask before the ReLU."""
    found: dict[fx.Node, None] = {}
    early: fx.Node | None = None
    for node in cone:
        if _is_relu(node) and len(view.shape(node)) >= 2:
            product, joined = _product_behind(view, node)
            if product is not None:
                found[product] = None
                early = early or joined
    if found:
        return sorted(found, key=view.order.__getitem__), early
    # Without a ReLU: products of heads by keys that the scores are made from, so that the reason can be given.
    keys = view.shape(scores)[-1]
    for node in cone:
        shape = view.shape(node)
        ranked = len(shape) >= 4 and expr(shape[-1]) == expr(keys) and expr(shape[-2]) != 1
        if op_name(node) in _PRODUCTS and ranked and all(len(view.shape(n)) >= 3 for n in _tensors(view, node)):
            return [node], None
    return [], None


def anchors(view: GraphView) -> list[fx.Node]:
    """The choice of keys of every indexer, and the ReLU of those whose scores nobody ranks."""
    found: list[fx.Node] = []
    covered: set[fx.Node] = set()
    for node in view.graph.nodes:
        scores = _ranked(view, node)
        if scores is None:
            continue
        cone = _cone(view, scores)
        if _products(view, scores, cone)[0]:
            found.append(node)
            covered.update(cone)
    for node in view.graph.nodes:
        if _is_relu(node) and node not in covered and len(view.shape(node)) >= 3:
            if _product_behind(view, node)[0] is not None:
                found.append(node)
    return sorted(found, key=view.order.__getitem__)


def _ranked(view: GraphView, node: fx.Node) -> fx.Node | None:
    """The scores that ``node`` ranks: a topk along the last dim, or the first columns of a descending sort."""
    if op_name(node) == "aten.topk":
        args = named_args(node)
        tensor = view.tensor(args["self"])
        last = tensor is not None and tensor.dim() > 0 and int(args["dim"]) % tensor.dim() == tensor.dim() - 1
        return args["self"] if last and args["largest"] and tensor.is_floating_point() else None  # type: ignore[union-attr,no-any-return]
    if op_name(node) in ("aten.slice", "aten.narrow"):
        chosen = selection(view, node)
        return chosen.scores if chosen is not None and chosen.order == "descending" else None
    return None


# -- roles ----------------------------------------------------------------------------------------------------------
def _follow(view: GraphView, products: list[fx.Node], scores: fx.Node) -> Found | Refusal:
    """What joins the products on the way to ``scores``."""
    cone = set(_cone(view, scores))
    reached: set[fx.Node] = set(products)
    found = Found(products, scores)
    factors: list[fx.Node] = []
    for node in sorted(cone, key=view.order.__getitem__):
        if node in reached or reached.isdisjoint(node.all_input_nodes):
            continue
        reached.add(node)
        found.spine.append(node)
        name = op_name(node)
        inside = [n for n in node.all_input_nodes if n in reached]
        sides = [n for n in _tensors(view, node) if n not in reached]
        if name in _LAYOUT:
            continue  # the size of another tensor at most
        for side in sides:
            if name in _PRODUCTS or name == "aten.mul":
                factors.append(node)
                found.weights.append(side)
            elif name in ("aten.add", "aten.masked_fill", "aten.where"):
                kind = "add" if name == "aten.add" else "hide"
                if name == "aten.where":
                    if side is not node.args[0]:
                        return Refusal("hidden keys get scores from another tensor.", node)
                    kind = "keep" if node.args[1] in reached else "hide"
                if name == "aten.add" and named_args(node).get("alpha", 1) != 1:
                    return Refusal("the mask is scaled as it is added.", node)
                if name == "aten.masked_fill" and side is not node.args[1]:
                    return Refusal("hidden keys get a score that is only known at run time.", node)
                found.masks.append((kind, side, inside[0]))
            else:
                return Refusal(f"{name.removeprefix('aten.')} joins another tensor to the scores.", node)
    refusal = _order_of_roles(view, found, factors)
    return refusal if refusal is not None else found


def _order_of_roles(view: GraphView, found: Found, factors: Sequence[fx.Node]) -> Refusal | None:
    if not factors:
        if _numel(view, found.scores) == sum(_numel(view, p) for p in found.products):
            return Refusal(
                "every head ranks the keys on its own: there is no sum over the heads before the top-k, and the op "
                "chooses one set of keys for all heads.",
                found.scores,
            )
        return Refusal("no weights of the heads are multiplied to the products.", found.scores)
    relus = [n for n in found.spine if _is_relu(n)]
    for kind, _, met in found.masks:
        if any(_depends(f, met, found.spine) for f in factors):
            early = any(_depends(r, met, found.spine) for r in relus)
            what = "before the ReLU, which turns -inf into a score of 0" if early else "to each head"
            how = "added" if kind == "add" else "applied"
            return Refusal(
                f"a mask is {how} {what}; the op hides keys after the sum over the heads.",
                met,
                "Mask the scores after the sum over the heads.",
            )
    for f in factors:
        if relus and not any(_depends(f, r, found.spine) for r in relus):
            return Refusal("a tensor is multiplied to the products before the ReLU; its sign is not known.", f)
    return None


def _depends(node: fx.Node, on: fx.Node, spine: Iterable[fx.Node]) -> bool:
    inside = set(spine)
    pending, seen = [node], set()
    while pending:
        n = pending.pop()
        if n is on:
            return True
        if n in seen or n not in inside:
            continue
        seen.add(n)
        pending.extend(n.all_input_nodes)
    return False


def _chain(view: GraphView, node: fx.Node, casts: bool) -> list[fx.Node]:
    """``node`` and what it is a view or an exact upcast of, nearest first."""
    found: list[fx.Node] = []
    for _ in range(24):
        if view.tensor(node) is not None:
            found.append(node)
        name = op_name(node)
        if name in _CASTS:
            parent = node.args[0]
            low, high = view.dtype(parent), view.dtype(node)
            if not casts or not _exact(low, high):
                break
        elif name not in _LAYOUT and node.target is not operator.getitem:
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
    chains = [_chain(view, n, casts) for n in nodes]
    return [n for n in reversed(chains[0]) if all(n in c for c in chains[1:])]


# -- cuts -----------------------------------------------------------------------------------------------------------
def cuts(view: GraphView, anchor: fx.Node, name: str) -> list[Region] | Refusal:
    """Regions around an anchor, one per hypothesis about its layout; empty if it is no indexer at all."""
    ranked = _ranked(view, anchor)
    if ranked is None:
        return _unranked(view, anchor, name)
    products, early = _products(view, ranked, _cone(view, ranked))
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
    found = _follow(view, products, ranked)
    if isinstance(found, Refusal):
        return found
    regions: list[Region] = []
    refusal: Refusal | None = None
    if all(u is anchor or u in anchor.all_input_nodes or _feeds(u, anchor) for u in ranked.users):
        chosen = _choice(view, anchor)
        if isinstance(chosen, Refusal):
            refusal = chosen
        else:
            outputs, hints = chosen
            made = _regions(view, found, outputs, hints, name)
            if isinstance(made, Refusal):
                refusal = made
            else:
                regions.extend(made)
    if not regions:
        hints = {"topk": 0, "capped": False, "order": "descending", "returns": "scores", "index_dtype": ""}
        made = _regions(view, found, [ranked], hints, name)
        if isinstance(made, Refusal):
            return refusal or made
        regions.extend(made)
    return regions


def _feeds(node: fx.Node, anchor: fx.Node) -> bool:
    """A sort whose first columns are the anchor."""
    return op_name(node) in ("aten.sort", "aten.argsort") and any(
        u is anchor or anchor in u.users or any(anchor in v.users for v in u.users) for u in (node, *node.users)
    )


def _choice(view: GraphView, anchor: fx.Node) -> tuple[list[fx.Node], dict[str, Any]] | Refusal:
    """Outputs of a choice that anybody uses, and how it is made."""
    hints: dict[str, Any] = {"capped": False, "index_dtype": "int64"}
    if op_name(anchor) == "aten.topk":
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
    else:
        used, hints["order"] = {1: anchor}, "descending"
        hints["topk"] = int(view.shape(anchor)[-1])
    if not used:
        return Refusal("nobody uses the chosen keys.", anchor)
    outputs, returns = [], []
    if 1 in used:
        ids = used[1]
        user = next(iter(ids.users))
        if len(ids.users) == 1 and op_name(user) in _CASTS and view.dtype(user) == torch.int32:
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
                f"the scores are computed and rounded in {str(dtype).removeprefix('torch.')}; the op sums in float32 and "
                "would choose other keys.",
                node,
                "Write q.float() @ k.float(): products of half precision are exact in float32 and cost nothing here.",
            )
        heads_outside = node is not found.scores and _outside(node, inside, outputs, view)
        if heads_outside and _numel(view, node) != _numel(view, found.scores):
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
    return view.tensor(node) is not None and node not in outputs and any(u not in inside for u in node.users)


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
        terms, result = str(product.args[0]).replace(" ", "").split("->")
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
    for kind, mask, met in found.masks:
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
        if "T" not in text or kind == "add" and not view.tensor(mask).is_floating_point():  # type: ignore[union-attr]
            return Refusal("a mask does not run over the keys, or adds integers.", met)
        made.append((kind, mask, text))
    return made


# -- scores that nobody ranks ---------------------------------------------------------------------------------------
def _unranked(view: GraphView, relu: fx.Node, name: str) -> list[Region] | Refusal:
    """Regions from the products to the scores, masks included first; empty unless sizes fit an indexer."""
    product, early = _product_behind(view, relu)
    assert product is not None
    ends: list[fx.Node] = []
    node, weighted = relu, False
    for _ in range(16):
        users = list(node.users)
        if weighted and _numel(view, node) != _numel(view, relu) and view.shape(node):
            ends.append(node)
        if len(users) != 1 or view.tensor(users[0]) is None:
            break
        user = users[0]
        known = _LAYOUT | _CASTS | _PRODUCTS | _UNARY | {"aten.sum", "aten.add", "aten.masked_fill", "aten.where"}
        if op_name(user) not in known:
            break
        weighted |= len(_tensors(view, user)) > 1
        node = user
    hints = {"topk": 0, "capped": False, "order": "descending", "returns": "scores", "index_dtype": ""}
    regions: list[Region] = []
    for end in reversed(ends):
        found = _follow(view, [product], end)
        if isinstance(found, Refusal):
            continue
        made = _regions(view, found, [end], hints, name)
        if not isinstance(made, Refusal):
            regions.extend(made)
    return regions if early is None else []
