"""Where a block begins and ends in which every expert runs on every token, or on slots filled up to a capacity.

dense     y[t] = sum over e of  score[t, e] * expert e (x[t])          scores that are zero for experts not chosen
capacity  slots[e, c] = the token that mask[t, e, c] puts there;  y[t] = sum over e, c of  score[t, e, c] * expert e
          (slots[e, c])                                                tokens beyond the capacity C get nothing

Two cuts are made of a dense block. If the scores are a function of ids and weights [T, K] alone (scatter, one-hot, a
comparison with the ids), the block is cut there and the scores vanish with it. Else the scores stay in the graph, it is
proved that no more than K of them can differ from zero (``experts_scores.py``), and the block reads the K largest. The
same is done with capacity: who is dropped is decided as before, by the graph.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.experts_cut import between, bias_role, outputs_of, read_by
from ascend_deep.passes.experts_products import MOVES, Pair, arrangements, divide, moved, stored_problem
from ascend_deep.passes.experts_scores import prove_scores
from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.normal_form import Term
from ascend_deep.passes.region import Region, slice_region

__all__ = ["choices", "cut_dense", "distinct_ids", "is_weighed", "per_token"]

# Functions of one score that may stand between the scatter of the chosen scores and the experts.
_SCORE_CALLS = frozenset({"aten.sigmoid", "aten._to_copy", "aten.tanh", "aten.exp", "aten.relu"})
_ID_TYPES = (torch.int64, torch.int32)


def is_weighed(view: GraphView, pair: Pair) -> bool:
    """True if tokens enter the pair and something weighs its results: else it is no block of experts at all."""
    found = _tokens(pair)
    if found is None:
        return False
    x, dispatch, tokens, hidden, rows = found
    outputs = outputs_of(view, pair.second, tokens, hidden, rows, x)
    if isinstance(outputs, Refusal):
        return False
    experts = pair.first.stored.shape[0]
    wanted = tokens * experts if dispatch is None else dispatch.numel
    return any(True for _ in _weighing(view, pair, outputs[0], wanted, x))


def cut_dense(view: GraphView, name: str, pair: Pair) -> Sequence[Region] | Refusal:
    """The regions of a dense block or one with capacity, best first."""
    problem = stored_problem(pair)
    if problem is not None:
        return problem
    cuts = [_cut_pair(view, name, turned) for turned in arrangements(pair)]
    return [region for cut in cuts if not isinstance(cut, Refusal) for region in cut] or cuts[0]


def _cut_pair(view: GraphView, name: str, pair: Pair) -> Sequence[Region] | Refusal:
    found = _tokens(pair)
    if found is None:
        return Refusal("the tokens that enter the first product were not found.", pair.first.term.node)
    x, dispatch, tokens, hidden, rows = found
    experts = pair.first.stored.shape[0]
    outputs = outputs_of(view, pair.second, tokens, hidden, rows, x)
    if isinstance(outputs, Refusal):
        return outputs
    out = outputs[0]
    roles = _biases(view, pair, out, experts)
    if isinstance(roles, Refusal):
        return roles
    wanted = tokens * experts if dispatch is None else dispatch.numel
    scores = _scores(view, pair, out, wanted, experts, x)
    if isinstance(scores, Refusal):
        return scores
    known = {"x": x, "w13": pair.first.stored, "w2": pair.second.stored, **roles}
    if pair.others:
        known["w3"] = pair.others[0].stored
    hints = {"compute": str(pair.first.weight.dtype).removeprefix("torch.")}
    cuts: list[Region | Refusal] = []
    if dispatch is None:
        for ids, weights, chain in _leaves(view, scores, tokens, experts):
            slots = choices(ids, tokens)
            if slots is None:
                continue
            more = {"kind": "dense", "slots": slots, "score": json.dumps(chain)}
            more["repeats"] = not distinct_ids(ids, slots)
            cuts += _cut(view, name, outputs, {**known, "idx": ids, "weights": weights}, {**hints, **more})
    assert scores.node is not None
    if dispatch is not None and scores.shape[:1] != (tokens,):
        return Refusal(
            "the results of the experts' slots are weighed by a tensor whose first dim is not the tokens.", out
        )
    capacity = divide(rows, experts) if dispatch is not None else None
    transposed = dispatch is None and not _ends_with(scores, experts)
    if transposed:
        count: int | Refusal = Refusal("the scores are stored experts first, and no ids and weights lead to them.", out)
    else:
        mask = dispatch.node if dispatch is not None else None
        count = prove_scores(view, scores.node, experts, tokens, capacity, mask)
    if isinstance(count, Refusal):
        cuts.append(count)
    else:
        more = {"kind": "scores", "slots": count}
        roles = {**known, "scores": scores}
        if dispatch is not None:
            more, roles = {"kind": "capacity", "slots": count}, {**roles, "dispatch": dispatch}
        cuts += _cut(view, name, outputs, roles, {**hints, **more})
    good = [c for c in cuts if isinstance(c, Region)]
    return good or next(c for c in reversed(cuts) if isinstance(c, Refusal))


def _cut(
    view: GraphView, name: str, outputs: Sequence[fx.Node], roles: Mapping[str, Term], hints: Mapping[str, Any]
) -> list[Region | Refusal]:
    inputs = read_by(view, outputs[0], roles)
    if isinstance(inputs, Refusal):
        return [inputs]
    return [slice_region(view, name, inputs, [out], hints) for out in outputs]


# -- tokens ---------------------------------------------------------------------------------------------------------
def _tokens(pair: Pair) -> tuple[Term, Term | None, Any, Any, Any] | None:
    """Tokens, the mask of a block with capacity, number of tokens, hidden size, rows of the products."""
    w13 = pair.first.stored
    for hidden in dict.fromkeys((w13.shape[2], w13.shape[1])):
        wide = divide(w13.numel, w13.shape[0] * hidden)
        rows = divide(pair.first.term.numel, wide) if wide else None
        each = divide(rows, w13.shape[0]) if rows else None
        if not each:
            continue
        x = _base(pair.first.rows, each, hidden)
        if x is not None:
            return x, None, each, hidden, rows
        for product in moved(pair.first.rows):
            if product.op not in ("Einsum", "Gemm") or product.numel != rows * hidden:
                continue
            for tokens, mask in (product.args[::-1], product.args):
                count = divide(tokens.numel, hidden)
                x = _base(tokens, count, hidden) if count else None
                if x is not None and mask.numel == count * rows:
                    mask = _unmoved(mask, count * rows)
                    if mask.nodes and mask.shape[0] == count:
                        return x, mask, count, hidden, rows
    return None


def _base(rows: Term, tokens: Any, hidden: Any) -> Term | None:
    """The tokens [.., H] of which ``rows`` are copies, weighted ones included, or ``None``."""
    term = rows
    while True:
        fits = term.numel == tokens * hidden and term.shape[-1:] == (hidden,) and bool(term.nodes)
        inner = None
        if term.op in MOVES:
            inner = term.args[0]
        elif term.op == "aten.mul" and not fits:
            inner = max(term.args, key=lambda t: (t.shape[-1:] == (hidden,), t.op in MOVES))
        if inner is None or (fits and not (term.op == "Reshape" and inner.shape[-1:] == (hidden,))):
            return term if fits else None
        if fits and inner.numel != term.numel:
            return term
        term = inner


def _unmoved(term: Term, elements: Any) -> Term:
    """``term`` before reshapes, transposes and casts that keep all its elements."""
    while term.op in ("Reshape", "Permute", "Cast", "Expand") and term.args[0].numel == elements:
        if term.op == "Cast" and term.args[0].is_float and not term.is_float:
            return term  # 0.3 becomes True: not a copy
        term = term.args[0]
    return term


def _ends_with(term: Term, size: Any) -> bool:
    return bool(term.shape) and term.shape[-1] == size


# -- scores ---------------------------------------------------------------------------------------------------------
def _reads(view: GraphView, pair: Pair, out: fx.Node) -> Iterator[tuple[fx.Node, Term]]:
    """What the nodes from the first product to ``out`` read from elsewhere, and the factors of its input."""
    inside = between(view, pair.starts, out)
    for term in moved_through_products(pair.first.rows):
        inside |= set(term.nodes)
    for node in sorted(inside, key=view.order.__getitem__):
        for read in node.all_input_nodes:
            if read not in inside and view.tensor(read) is not None:
                yield node, view.terms.term(read)


def moved_through_products(rows: Term) -> Iterator[Term]:
    """The multiplications that ``rows`` went through on the way from the tokens."""
    term = rows
    while term.op in (*MOVES, "aten.mul"):
        if term.op == "aten.mul":
            yield term
        term = max(term.args, key=lambda t: (len(t.shape), t.op in MOVES)) if term.op == "aten.mul" else term.args[0]


def _scores(view: GraphView, pair: Pair, out: fx.Node, wanted: Any, experts: Any, x: Term) -> Term | Refusal:
    """The one tensor of ``wanted`` elements that weighs the experts' results."""
    found = {base.number: base for base in _weighing(view, pair, out, wanted, x)}
    if not found:
        return Refusal("every expert runs on every token, and nothing was found that weighs their results.", out)
    if len(found) > 1:
        return Refusal("the results of the experts are weighed more than once.", out)
    return next(iter(found.values()))


def _weighing(view: GraphView, pair: Pair, out: fx.Node, wanted: Any, x: Term) -> Iterator[Term]:
    products = (pair.first, pair.second, *pair.others)
    for _, term in _reads(view, pair, out):
        if term is pair.first.rows or term in [p.weight for p in products] or not term.is_float:
            continue
        base = _shrunk(term, wanted)
        if base is not None and base is not x and base.op not in ("placeholder", "get_attr"):
            yield base


def _shrunk(term: Term, wanted: Any) -> Term | None:
    """What ``term`` is moved from, if that has ``wanted`` elements."""
    while term.op in MOVES and term.op != "Mask" and (term.numel != wanted or term.args[0].numel == wanted):
        if term.op == "Cast" and not term.args[0].is_float:
            break
        term = term.args[0]
    return term if term.numel == wanted and term.nodes else None


def _leaves(view: GraphView, scores: Term, tokens: Any, experts: Any) -> Iterator[tuple[Term, Term, list[Any]]]:
    """Ids and weights [.., K] that determine the scores, and the calls between the weights and the scores."""
    scattered = _scattered(scores, experts)
    if scattered is not None:
        yield scattered
    terms = [t for t, _ in zip(scores.walk(), range(120), strict=False) if t.nodes and t is not scores]
    ids = [t for t in terms if t.dtype in _ID_TYPES and per_token(t, tokens, experts)]
    found = 0
    for i in ids:
        for weights in terms:
            if found == 2 or not weights.is_float or weights.numel != i.numel or weights.op in ("Expand", "Mask"):
                continue
            assert scores.node is not None and i.node is not None and weights.node is not None
            cut = slice_region(view, "scores", {"idx": i.node, "weights": weights.node}, [scores.node])
            if isinstance(cut, Region):
                found += 1
                yield i, weights, []


def per_token(term: Term, tokens: Any, experts: Any) -> bool:
    """True if ``term`` may hold the ids of one or more experts for each token. Their number may be symbolic."""
    if term.numel == tokens:
        return True
    last = term.shape[-1] if term.shape else None
    fits = last < experts if isinstance(last, int) else len(term.shape) == 2
    return fits and bool(term.numel == tokens * last)


def choices(ids: Term, tokens: Any) -> int | None:
    """Experts per token as the hint ``slots`` says it: 0 for as many as ids [T, K] have columns, if K is symbolic."""
    slots = 1 if ids.numel == tokens else ids.shape[-1]
    if isinstance(slots, int):
        return slots
    return 0 if len(ids.shape) == 2 else None


def _scattered(scores: Term, experts: Any) -> tuple[Term, Term, list[Any]] | None:
    """Scores that are functions of scattered ones, as Llama-4 has them: ``sigmoid(scatter(-inf, 1, ids, chosen))``."""
    calls: list[list[Any]] = []
    term = scores
    while term.op in ("Reshape", "Permute", "Expand", "Cast") or term.op in _SCORE_CALLS:
        if term.op not in ("Reshape", "Permute", "Expand"):
            text = _call_text(term)
            if text is None:
                return None
            calls.insert(0, text)
        term = term.args[0]
    if term.op != "aten.scatter" or len(term.args) != 3 or len(term.shape) != 2 or term.shape[1] != experts:
        return None
    _, ids, chosen = term.args
    fits = dict(term.attrs).get("dim") == 1 and ids.nodes and chosen.nodes and chosen.shape == ids.shape
    return (ids, chosen, calls) if fits and chosen.is_float else None


def _call_text(term: Term) -> list[Any] | None:
    """One call of the score function: name of the overload and keyword arguments."""
    if term.op == "Cast":
        return ["aten._to_copy.default", {"dtype": str(term.dtype).removeprefix("torch.")}]
    node = term.node
    if node is None or len(node.args) != 1 or node.kwargs or not isinstance(node.target, torch._ops.OpOverload):
        return None
    return [str(node.target), {}]


def distinct_ids(ids: Term, slots: int) -> bool:
    """True if no row of ``ids`` can hold an id twice."""
    term = ids
    while term.op in ("Reshape", "Cast"):
        term = term.args[0]
    routed = term.op == "getitem" and term.args and term.args[0].op == "ascend_deep.moe_route"
    return slots == 1 or bool(routed) or (term.op == "TopIds" and term.attrs[1] == len(term.args[0].shape) - 1)


# -- biases ---------------------------------------------------------------------------------------------------------
def _biases(view: GraphView, pair: Pair, out: fx.Node, experts: Any) -> dict[str, Term] | Refusal:
    """Stored tensors [E, n] that are added to the products."""
    before = between(view, pair.starts, pair.second.term.nodes[0])
    found: dict[str, Term] = {}
    for node, read in _reads(view, pair, out):
        term = read
        while term.op in ("Reshape", "Expand", "Cast") and len(term.shape) != 2:
            term = term.args[0]
        stored = _unmoved(term, term.numel)
        if stored.op not in ("placeholder", "get_attr") or len(term.shape) != 2 or term.shape[0] != experts:
            continue
        if not term.nodes or not term.is_float:
            continue
        role = bias_role(view, pair, node, before)
        if isinstance(role, Refusal):
            return role
        if found.setdefault(role, term) is not term:
            return Refusal(f"the block adds two different biases to its {role[1:]} product.", node)
    return found
