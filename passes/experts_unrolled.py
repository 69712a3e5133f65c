"""Recogniser of loops over all experts that the graph holds unrolled: one copy of the expert for each of them.

    for e in range(E):  out = out + score[:, e, None] * (act(x @ w1[e]) * (x @ w3[e])) @ w2[e]

A loop whose body is the same for every token has no data-dependent branch, so Dynamo unrolls it, and the graph grows
with the number of experts. Where the experts' weights are parts of stacked tensors, the copies are one ``moe_experts``
call. What a copy does is not compared with the next: the region from tokens, routing and stacked weights to the sum is
run as a whole, like the dense form whose mathematics it has (``experts_dense.py``). Experts with parameters of their
own are left, since the op reads them from one tensor: ``prepare`` gives them one before the compile.

Contract: ``ops/moe_experts.py``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.experts_cut import between, bias_role, read_by, settle
from ascend_deep.passes.experts_dense import choices, distinct_ids, per_token
from ascend_deep.passes.experts_family import ExpertsRecogniser
from ascend_deep.passes.experts_products import Pair, Product, arrangements, below, divide, fused_product
from ascend_deep.passes.experts_scores import prove_scores
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.normal_form import Term
from ascend_deep.passes.region import Region, slice_region

__all__ = ["RECOGNISER", "ExpertsUnrolled"]

_CALLS = ("aten.linear", "aten.mm", "aten.matmul", "aten.addmm", "aten.einsum", "aten.bmm")
_STORED = ("placeholder", "get_attr")
_FEWEST = 3  # copies with parameters of their own that make a loop rather than a few MLPs side by side
_MOST_TRIED, _MOST_REGIONS = 24, 4


@dataclass(frozen=True)
class _Copy:
    """One expert: its products, and its place in the stacked tensors (``None`` if it has tensors of its own)."""

    pair: Pair
    place: int | None


class ExpertsUnrolled(ExpertsRecogniser):
    """See the module."""

    name = "experts_unrolled"

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """The last second product of every loop."""
        return [_last(view, copies) for copies in _loops(view)]

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """From tokens, ids and weights (or scores) and stacked weights to the sum over the experts."""
        copies = next((loop for loop in _loops(view) if _last(view, loop) is anchor), None)
        if copies is None:
            return Refusal("no loop over experts ends in this product.", anchor)
        if copies[0].place is None:
            return Refusal(
                f"the graph holds {len(copies)} copies of an expert, each with weights of its own; the op reads them "
                "from one tensor, and joining them on every call would copy them.",
                anchor,
                "Call ascend_deep.prepare(model) before the compile: it keeps the experts' weights in one tensor.",
            )
        cuts: list[Region | Refusal] = []
        for order in range(len(arrangements(copies[0].pair))):
            turned = [replace(c, pair=_turned(copies[0].pair, c.pair, order)) for c in copies]
            found = self._cut(view, turned)
            if isinstance(found, Refusal):
                cuts.append(found)
            else:
                cuts.extend(found)
        good = [c for c in cuts if isinstance(c, Region)]
        return good or next(c for c in cuts if isinstance(c, Refusal))

    def _cut(self, view: GraphView, copies: Sequence[_Copy]) -> Sequence[Region] | Refusal:
        pair = copies[0].pair
        first, second = pair.first, pair.second
        experts = first.stored.shape[0]
        missing = sorted(set(range(experts)) - {c.place for c in copies})
        if missing:
            return Refusal(f"the loop leaves out {len(missing)} of {experts} experts, number {missing[0]} first.", None)
        if len(copies) != experts:
            return Refusal(f"the loop runs {len(copies)} times for {experts} experts.", second.term.node)
        hidden = second.term.shape[-1]
        tokens = divide(second.term.numel, hidden)
        x = _tokens(_unweighed(first.rows), hidden, tokens)
        if x is None:
            return Refusal("the tokens that enter the experts were not found.", first.term.node)
        outputs = _sum(view, copies, tokens, hidden, x)
        if isinstance(outputs, Refusal):
            return outputs
        known = {"x": x, "w13": first.stored, "w2": second.stored}
        if pair.others:
            known["w3"] = pair.others[0].stored
        biases = _biases(view, pair, outputs[0], experts)
        if isinstance(biases, Refusal):
            return biases
        known.update(biases)
        return self._regions(view, outputs, known, experts, tokens, str(first.weight.dtype))

    def _regions(
        self,
        view: GraphView,
        outputs: Sequence[fx.Node],
        known: Mapping[str, Term],
        experts: int,
        tokens: Any,
        dtype: str,
    ) -> Sequence[Region] | Refusal:
        """Regions for every routing that determines the result: ids and weights, or else scores."""
        out = outputs[0]
        hints = {"compute": dtype.removeprefix("torch.")}
        ids, floats = _routing(view, out, known, tokens, experts)
        found: list[Region] = []
        pairs = ((i, w) for i in ids for w in floats if w.numel == i.numel)
        for i, weights in itertools.islice(pairs, _MOST_TRIED):
            slots = choices(i, tokens)
            if slots is None:
                continue
            more = {"kind": "dense", "slots": slots, "score": json.dumps([]), "repeats": not distinct_ids(i, slots)}
            found += self._slices(view, outputs, {**known, "idx": i, "weights": weights}, {**hints, **more})
            if len(found) >= _MOST_REGIONS:
                break
        if found and not any(region.hints["repeats"] for region in found):
            return found
        refusal = None
        for scores in (s for s in floats if s.numel == tokens * experts and s.shape[-1:] == (experts,)):
            cuts = self._slices(view, outputs, {**known, "scores": scores}, {**hints, "kind": "scores", "slots": 1})
            if not cuts:
                continue
            assert scores.node is not None
            count = prove_scores(view, scores.node, experts, tokens)
            if isinstance(count, int):
                return [*found, *(replace(c, hints={**c.hints, "slots": count}) for c in cuts)]
            refusal = refusal or count
        return (
            found
            or refusal
            or Refusal("no ids and weights, or scores, were found that decide which experts a token has.", out)
        )

    def _slices(
        self, view: GraphView, outputs: Sequence[fx.Node], roles: Mapping[str, Term], hints: Mapping[str, Any]
    ) -> list[Region]:
        inputs = read_by(view, outputs[0], roles)
        if isinstance(inputs, Refusal):
            return []
        cuts = [slice_region(view, self.name, inputs, [out], hints) for out in outputs]
        return [c for c in cuts if isinstance(c, Region)]


# -- loops ----------------------------------------------------------------------------------------------------------
def _loops(view: GraphView) -> list[list[_Copy]]:
    """Copies of an expert that read the same tokens, weighed and summed; each list in the order of the graph."""
    found: dict[tuple[Any, ...], list[_Copy]] = {}
    for node in view.calls(*_CALLS):
        copy = _copy(view.terms.term(node))
        if copy is None:
            continue
        first, second = copy.pair.first, copy.pair.second
        own = copy.place is None
        key = (
            _unweighed(first.rows).number,
            own,
            *((p.stored.shape if own else p.stored.number) for p in (first, second)),
        )
        same = found.setdefault(key, [])
        if all(c.pair.second.term is not second.term for c in same):
            same.append(copy)
    loops = []
    for copies in found.values():
        own = copies[0].place is None
        enough = len(copies) >= (_FEWEST if own else 2)
        if enough and (not own or all(_is_weighed(view, c.pair) for c in copies)):
            loops.append(copies)
    return loops


def _last(view: GraphView, copies: Sequence[_Copy]) -> fx.Node:
    return max((n for c in copies for n in c.pair.second.term.nodes), key=view.order.__getitem__)


def _copy(term: Term) -> _Copy | None:
    """The expert whose second product is ``term``."""
    found = _product(term)
    if found is None:
        return None
    second, place = found
    inner: list[Product] = []
    for other in below(second.rows):
        product = _product(other)
        if product is None or product[1] != place or (inner and product[0].rows is not inner[0].rows):
            continue
        inner.append(product[0])
    return _Copy(Pair(inner[0], second, tuple(inner[1:])), place) if inner and len(inner) < 3 else None


def _product(term: Term) -> tuple[Product, int | None] | None:
    """``term`` as a product with the weights of one expert, and its place in the stacked tensor."""
    gemm = fused_product(term) or term
    if gemm.op not in ("Gemm", "Einsum"):
        return None
    for rows, weight in (gemm.args, gemm.args[::-1]):
        stored, place = _part(weight, 3)
        if stored is not None:
            return Product(term, rows, weight, stored), place
    stored = _own(gemm.args[1])
    rows, weight = gemm.args
    return None if stored is None else (Product(term, rows, weight, stored), None)


def _part(term: Term, dims: int) -> tuple[Term | None, int | None]:
    """The stored tensor of which ``term`` is row e of the first dim, and e."""
    while term.op in ("Reshape", "Permute", "Cast"):
        term = term.args[0]
    if term.op != "Part" or len(term.args[0].shape) != dims or not term.args[0].nodes:
        return None, None
    dim, start, _, count = term.attrs
    stored = term.args[0]
    # A model may transpose or cast the whole for every expert: copies of one value, of which none makes the others.
    while stored.op == "Cast" or (stored.op == "Permute" and stored.attrs == (0, 2, 1)):
        stored = stored.args[0]
    if dim != 0 or count != 1 or not isinstance(start, int) or not isinstance(stored.shape[0], int):
        return None, None
    return (stored, start) if _is_input(stored) and stored.is_float else (None, None)


def _own(term: Term) -> Term | None:
    """A stored matrix, transposed or cast perhaps."""
    while term.op in ("Permute", "Cast"):
        term = term.args[0]
    return term if term.op in _STORED and len(term.shape) == 2 and term.is_float else None


def _is_input(term: Term) -> bool:
    while term.op in ("Cast", "Reshape"):
        term = term.args[0]
    return term.op in _STORED


def _unweighed(rows: Term) -> Term:
    """The tokens of which ``rows`` are multiples, token by token."""
    while rows.op == "aten.mul":
        wide = [t for t in rows.args if not _is_column(t)]
        if len(wide) != 1 or wide[0].shape != rows.shape:
            break
        rows = wide[0]
    return rows


def _is_column(term: Term) -> bool:
    return term.shape[-1:] == (1,) or term.op == "Expand"


def _is_weighed(view: GraphView, pair: Pair) -> bool:
    """Whether the tokens, or the result before anything else is done with it, are multiplied by a column."""
    if _unweighed(pair.first.rows) is not pair.first.rows:
        return True
    for node in pair.second.term.nodes:
        for user in node.users:
            value = view.terms.term(user)
            if value.op == "aten.mul" and any(_is_column(t) for t in value.args):
                return True
    return False


def _turned(model: Pair, pair: Pair, order: int) -> Pair:
    """``pair`` in arrangement ``order`` of ``model``, the first copy's pair: all copies are turned alike."""
    wanted = arrangements(model)[order].first.stored
    return next((p for p in arrangements(pair) if p.first.stored is wanted), pair)


# -- the cut --------------------------------------------------------------------------------------------------------
def _tokens(rows: Term, hidden: Any, tokens: Any) -> Term | None:
    fits = rows.shape[-1:] == (hidden,) and rows.numel == tokens * hidden and rows.nodes
    return rows if fits else None


def _sum(view: GraphView, copies: Sequence[_Copy], tokens: Any, hidden: Any, x: Term) -> list[fx.Node] | Refusal:
    """Where the results of all experts have come together as tokens × hidden."""
    reached: dict[fx.Node, int] = {}
    for bit, copy in enumerate(copies):
        for node in copy.pair.second.term.nodes:
            reached[node] = 1 << bit
    everything = (1 << len(copies)) - 1
    pending = sorted(reached, key=view.order.__getitem__)
    first = view.order[pending[0]]
    for node in view.graph.nodes:
        if view.order.get(node, -1) < first:
            continue
        bits = reached.get(node, 0)
        for read in node.all_input_nodes:
            bits |= reached.get(read, 0)
        if not bits:
            continue
        reached[node] = bits
        if bits == everything and view.tensor(node) is not None and view.terms.term(node).numel == tokens * hidden:
            return settle(view, node, (tokens, hidden), x)
    return Refusal("the results of the experts are not summed per token.", copies[0].pair.second.term.node)


def _biases(view: GraphView, pair: Pair, out: fx.Node, experts: int) -> dict[str, Term] | Refusal:
    """Stored tensors [E, n] whose rows are added to the products of one expert; running shows if others differ."""
    before = between(view, pair.starts, pair.second.term.nodes[0])
    found: dict[str, Term] = {}
    for node in sorted(between(view, pair.starts, out), key=view.order.__getitem__):
        for read in node.all_input_nodes:
            if view.tensor(read) is None:
                continue
            stored, _ = _part(view.terms.term(read), 2)
            if stored is None or stored.shape[0] != experts:
                continue
            role = bias_role(view, pair, node, before)
            if isinstance(role, Refusal):
                return role
            if found.setdefault(role, stored) is not stored:
                return Refusal(f"the block adds two different biases to its {role[1:]} product.", node)
    return found


def _routing(
    view: GraphView, out: fx.Node, known: Mapping[str, Term], tokens: Any, experts: int
) -> tuple[list[Term], list[Term]]:
    """Ids [.., K], and float tensors that may be weights or scores, nearest to the result first."""
    stop = {term.number for term in known.values()}
    ids: dict[int, Term] = {}
    floats: dict[int, Term] = {}
    for node in _above(view, out, stop):
        term = view.terms.term(node)
        if term.dtype in (torch.int64, torch.int32):
            if per_token(term, tokens, experts):
                ids.setdefault(term.number, term)
        elif term.is_float and term.op not in ("Expand", "Mask"):
            floats.setdefault(term.number, term)

    def shared_first(terms: Iterable[Term]) -> list[Term]:
        # What all copies read has many users; each copy makes tensors of the same size that have one.
        return sorted(terms, key=lambda t: sum(len(n.users) for n in t.nodes) < 2)

    return shared_first(ids.values()), shared_first(floats.values())


def _above(view: GraphView, out: fx.Node, stop: set[int]) -> Iterator[fx.Node]:
    """Tensors that ``out`` is made of, latest first, not looking behind the terms ``stop``."""
    seen = {out}
    pending = [out]
    found: list[fx.Node] = []
    while pending:
        node = pending.pop()
        for read in node.all_input_nodes:
            if read in seen or (view.tensor(read) is None and op_name(read) == ""):
                continue
            seen.add(read)
            if view.terms.term(read).number not in stop:
                pending.append(read)
                if view.tensor(read) is not None:
                    found.append(read)
    yield from sorted(found, key=view.order.__getitem__, reverse=True)


RECOGNISER = ExpertsUnrolled()
