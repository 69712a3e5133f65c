"""Regions of attention under a mask of chosen keys: where to cut, and which dim and which polarity is what.

``sparse_attention_trace`` names the operands. Polarity of masks, head groups and the order of dims are hypotheses, one
region each, and running a region tells whether one holds (``sparse_attention_family``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

import torch
from torch import fx

from ascend_deep.native import table
from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.mqa_cut import chain
from ascend_deep.passes.mqa_family import assignments, expr
from ascend_deep.passes.mqa_walk import CASTS, tensors_of
from ascend_deep.passes.region import Region, slice_region
from ascend_deep.passes.router_selection import named_args
from ascend_deep.passes.sparse_attention_trace import Attention, reads_shape, trace

__all__ = ["cuts"]

_OP = "sparse_mqa_attention"
_MAX_REGIONS = 48
# Layouts that leave each row of chosen keys in one piece if the last size stays, and slices.
_ROWS_STAY = frozenset(
    f"aten.{n}"
    for n in (
        "view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "clone", "contiguous",
        "alias", "expand", "slice", "narrow",
    )
)  # fmt: skip
_IN_ORDER = frozenset({"BSK", "BS", "BK", "SK", "B", "S", "K", ""})
_HIDING = frozenset({"aten.masked_fill", "aten.__or__", "aten.bitwise_or", "aten.logical_or"})
# From how many keys per chosen key on the gather beats a dense product, with one key head per query head (measured).
_WORTH = 4


def cuts(view: GraphView, scatter: fx.Node, name: str) -> list[Region] | Refusal:
    """Regions of the attention that the mask of ``scatter`` feeds, one per hypothesis, likely ones first."""
    found = trace(view, scatter)
    if found is None or isinstance(found, Refusal):
        return found or []
    idx = _choice(view, named_args(scatter)["index"])
    if isinstance(idx, Refusal):
        return idx
    refusal = _left_behind(view, found) or _not_worth(view, found, idx)
    if refusal is not None:
        return refusal
    refusal = Refusal(
        "the sizes of queries, keys, values and chosen keys do not belong to one attention.", found.output
    )
    made: list[Region] = []
    for hints, inputs in islice(_hypotheses(view, found, idx), _MAX_REGIONS):
        region = slice_region(view, name, inputs, [found.output], hints)
        if isinstance(region, Refusal):
            refusal = region
        else:
            made.append(region)
    return made or refusal


def _choice(view: GraphView, index: Any) -> fx.Node | Refusal:
    """The chosen keys before integer casts, or why they may hold a key twice.

    Probes list every key once, so this is read off the graph: a row of the index has to be (part of) a row of one
    top-k.
    """
    idx = index
    while op_name(idx) in CASTS and view.dtype(idx.args[0]) in (torch.int32, torch.int64):
        idx = idx.args[0]
    node = idx
    while op_name(node) in CASTS or op_name(node) in _ROWS_STAY:
        parent = node.args[0]
        same = expr(view.shape(node)[-1]) == expr(view.shape(parent)[-1])
        if not same and op_name(node) not in ("aten.slice", "aten.narrow"):
            return Refusal("rows of chosen keys are joined or repeated, so a key may be listed twice.", node)
        node = parent
    call = node.args[0] if isinstance(node, fx.Node) and node.target is operator.getitem else node
    position = 1 if call is node else node.args[1]
    ranked = named_args(call) if isinstance(call, fx.Node) else {}
    rank = len(view.shape(node))
    if op_name(call) == "ascend_deep.mqa_topk" and position == 1:
        return idx  # type: ignore[no-any-return]
    known = op_name(call) in ("aten.topk", "aten.sort", "aten.argsort") and position == 1
    if known and (call is not node or op_name(call) == "aten.argsort") and int(ranked["dim"]) % rank == rank - 1:
        return idx  # type: ignore[no-any-return]
    return Refusal("the keys of the mask do not come from a top-k, so one may be listed twice.", index)


def _left_behind(view: GraphView, found: Attention) -> Refusal | None:
    """Scores that something outside reads are computed anyway."""
    inside = {*found.spine, *found.inner, found.output}
    for node in (*found.spine, *found.inner):
        for user in node.users:
            if user not in inside and not reads_shape(view, user):
                return Refusal(
                    "the attention scores or weights are used outside as well, so they are needed anyway.", node
                )
    return None


def _not_worth(view: GraphView, found: Attention, idx: fx.Node) -> Refusal | None:
    device = view.tensor(found.q).device.type  # type: ignore[union-attr]
    if not any(_OP in provider.kernels for provider in table.PRIORITY.get(device, ())):
        return Refusal(
            f"there is no kernel of {_OP} for {device}; dense attention with the mask is faster than its reference.",
            found.output,
        )
    keys, chosen = _hint(view.shape(found.scatter)[-1]), _hint(view.shape(idx)[-1])
    if keys is None or chosen is None:
        return None
    if keys <= chosen:
        return Refusal(
            f"all {keys} keys are chosen, so attending to the chosen ones alone saves nothing.", found.output
        )
    # Key heads that are repeated for a group of query heads are read once by the op.
    sizes = [_numel_hint(view, n) for n in chain(view, found.k, True)]
    one_each = view.shape(found.k)[1:2] == view.shape(found.q)[1:2] and min(sizes) == sizes[0]
    queries = _hint(view.shape(idx)[-2])
    if one_each and (queries is None or queries > 1) and keys < _WORTH * chosen:
        return Refusal(
            f"{chosen} of {keys} keys are chosen; with fewer than {_WORTH} keys for each chosen one, dense attention "
            "is as fast as gathering them.",
            found.output,
        )
    return None


def _hint(size: Any) -> int | None:
    """An int, or the size that a symbolic one had when the graph was traced; adds no guard."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else None
    return int(size)


def _numel_hint(view: GraphView, node: fx.Node) -> int:
    total = 1
    for s in view.shape(node):
        total *= _hint(s) or 1
    return total


def _hypotheses(view: GraphView, found: Attention, idx: fx.Node) -> Iterator[tuple[dict[str, Any], dict[str, fx.Node]]]:
    """Hints and inputs of each region: all polarities of the masks for a layout of the operands before the next one."""
    if len(view.shape(idx)) < 3:
        return
    batch, queries, columns = (expr(view.shape(idx)[i]) for i in (0, -2, -1))
    sizes: dict[str, Any] = {"B": batch, "S": queries, "K": columns, "T": expr(view.shape(found.scatter)[-1])}
    casts = view.dtype(found.q) != torch.float64
    dtype = view.dtype(found.v)
    q_nodes = [n for n in chain(view, found.q, casts) if view.dtype(n) == dtype]
    k_nodes = [n for n in reversed(chain(view, found.k, casts)) if view.dtype(n) == dtype]
    v_nodes = list(reversed(chain(view, found.v, False)))
    rounds = dtype in (torch.bfloat16, torch.float16) and view.dtype(found.frame) == dtype and bool(found.inner)
    fixed = {"overwritten": found.overwritten, "rounds": rounds}
    for order, heads in _frames(view.shape(found.frame), sizes, view.shape(found.output)):
        sink = {} if found.sink is None else {"sink": _column(view, found.sink, heads)}
        if None in sink.values():
            return
        for q, depth in _with_depth(view, q_nodes, sizes, heads):
            known = {**sizes, "H": heads, "D": depth}
            masks = list(islice(_mask_layouts(view, found, order, known), 8))
            for k, v in product(k_nodes, v_nodes):
                for layout in _layouts(view, idx, q, k, v, found.output, known):
                    for kinds in masks:
                        sides = {f"mask{i}": (mask, text) for i, (_, mask, text) in enumerate(kinds)}
                        more = {**sink, **sides}
                        texts = {**layout, **{role: text for role, (_, text) in more.items()}}  # type: ignore[misc]
                        yield (
                            {
                                "layout": ";".join(f"{role}={text}" for role, text in texts.items()),
                                "masks": ",".join(kind for kind, _, _ in kinds),
                                **fixed,
                            },
                            {"q": q, "k": k, "v": v, "idx": idx, **{r: node for r, (node, _) in more.items()}},  # type: ignore[misc]
                        )


def _frames(shape: Sequence[Any], sizes: dict[str, Any], out: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Order of the dims of the scores, and the number of heads, which the output tells where the mask has none."""
    dims = [expr(s) for s in shape]
    if len(dims) != 4 or dims[-1] != sizes["T"] or len(out) != 4:
        return
    for order in ("BHST", "BSHT"):
        at = order.index("H")
        heads = dims[at] if dims[at] != 1 else expr(out[at])
        if all(d in (expr(1), sizes.get(n, heads)) for d, n in zip(dims, order, strict=True)):
            yield order, heads


def _with_depth(
    view: GraphView, nodes: Sequence[fx.Node], sizes: dict[str, Any], heads: Any
) -> Iterator[tuple[fx.Node, Any]]:
    """Queries and what is left of their dims without batch, heads and tokens."""
    for node in nodes:
        left = [expr(s) for s in view.shape(node) if s != 1]
        for size in (sizes["B"], heads, sizes["S"]):
            if size != 1 and size in left:
                left.remove(size)
        if len(left) <= 1:
            yield node, left[0] if left else expr(1)


def _layouts(
    view: GraphView, idx: fx.Node, q: fx.Node, k: fx.Node, v: fx.Node, out: fx.Node, known: dict[str, Any]
) -> Iterator[dict[str, str]]:
    groups = _rest(view, k, known, "BTD")
    if groups is None:
        return
    sizes = {**known, "G": groups}
    depth = _rest(view, v, sizes, "BGT")
    if depth is None:
        return
    sizes["E"] = depth
    # The choice has its keys last, and batch and tokens as the mask has them; the output has the depth last.
    choices = [t for t in assignments(view.shape(idx), "BSK", sizes) if t.replace("1", "") in _IN_ORDER]
    outs = [t for t in assignments(view.shape(out), "BHSE", sizes) if t[-1] in "E1"]
    texts = (
        assignments(view.shape(q), "BHSD", sizes), assignments(view.shape(k), "BGTD", sizes),
        assignments(view.shape(v), "BGTE", sizes), choices, outs,
    )  # fmt: skip
    for found in product(*texts):
        yield dict(zip(("q", "k", "v", "idx", "out"), found, strict=True))


def _rest(view: GraphView, node: fx.Node, sizes: dict[str, Any], names: str) -> Any:
    """The one size of ``node`` that is none of ``names``, 1 if there is none; None if it does not fit."""
    left = [expr(s) for s in view.shape(node) if s != 1]
    for n in names:
        if sizes[n] != 1:
            if sizes[n] not in left:
                return None
            left.remove(sizes[n])
    return (left[0] if left else expr(1)) if len(left) <= 1 else None


def _column(view: GraphView, sink: fx.Node, heads: Any) -> tuple[fx.Node, str] | None:
    """The sink as one number per head: the node furthest back that holds those, and its layout."""
    for node in reversed(chain(view, sink, False)):
        big = [i for i, s in enumerate(view.shape(node)) if expr(s) != 1]
        if len(big) == 1 and expr(view.shape(node)[big[0]]) == heads:
            return node, "".join("H" if i in big else "1" for i in range(len(view.shape(node))))
    return None


def _mask_layouts(
    view: GraphView, found: Attention, frame: str, sizes: dict[str, Any]
) -> Iterator[list[tuple[str, fx.Node, str]]]:
    """Kinds, nodes and layouts of the masks: boolean ones of both polarities, floating ones cut before a fill first."""
    options: list[list[tuple[str, fx.Node, str]]] = []
    for side, join in found.masks:
        letters = {4: frame, 3: frame.replace("H", ""), 2: "ST"}.get(len(view.shape(join)))
        text = None if letters is None else _aligned(view, side, letters, sizes)
        if text is None:
            return
        kinds = ["hide", "keep"] if op_name(join) in _HIDING else ["keep", "hide"]
        dtype = view.dtype(side)
        if dtype == torch.bool:
            options.append([(kind, side, text) for kind in kinds])
            continue
        if dtype is None or not dtype.is_floating_point:
            return
        ways: list[tuple[str, fx.Node, str]] = []
        source = _filled_from(view, side, text)
        if source is not None:
            filled, deeper = source
            likely = ("hide", "keep") if op_name(filled) in _HIDING else ("keep", "hide")
            ways.extend((kind, *deeper) for kind in likely)
        options.append([*ways, ("add", side, text)])
    for chosen in product(*options):
        yield list(chosen)


def _aligned(view: GraphView, mask: fx.Node, letters: str, sizes: dict[str, Any]) -> str | None:
    """Layout of a mask that broadcasts, from the right, against dims called ``letters``."""
    own = view.shape(mask)
    if len(own) > len(letters) or not own:
        return None
    text = "".join("1" if expr(s) == 1 else n for s, n in zip(own, letters[-len(own) :], strict=True))
    fits = all(n == "1" or expr(s) == sizes[n] for s, n in zip(own, text, strict=True))
    return text if fits else None


def _filled_from(view: GraphView, mask: fx.Node, text: str) -> tuple[fx.Node, tuple[fx.Node, str]] | None:
    """The fill that makes a floating mask of layout ``text`` from a boolean one and two numbers; that, its layout."""
    node = mask
    while True:
        name = op_name(node)
        if name == "aten.unsqueeze":
            at = int(node.args[1]) % len(text)  # type: ignore[arg-type]
            text = text[:at] + text[at + 1 :]
        elif name == "aten.expand":
            text = text[len(text) - len(view.shape(node.args[0])) :]
        elif name not in CASTS and name != "aten.clone" and not (name == "aten.slice" and _whole(view, node)):
            break
        node = node.args[0]  # type: ignore[assignment]
    if name not in ("aten.where", "aten.masked_fill"):
        return None
    operands = tensors_of(view, node)
    if len(operands) != 1 or view.dtype(operands[0]) != torch.bool:
        return None
    own = view.shape(operands[0])
    text = text[len(text) - len(own) :]
    return node, (operands[0], "".join("1" if expr(s) == 1 else n for s, n in zip(own, text, strict=True)))


def _whole(view: GraphView, node: fx.Node) -> bool:
    return view.shape(node) == view.shape(node.args[0])
