"""Recogniser of experts in the batched and the dense form.

Batched: each pair of token and expert gathers the weights of its expert.

    h = w13[idx] @ x[:, None];  y = (w2[idx] @ act(h)) * weights;  out[t] = sum over k

Covers bmm, matmul, baddbmm and einsum, rows flat or [T, K], biases gathered by the ids, clamped ids (expert parallel).

Dense: every expert runs on every token; the scores [T, E] are zero, or minus infinity before a sigmoid, for the experts
that were not chosen (Llama-4 multiplies them onto the input). The chosen ids and scores are those that the scores were
scattered from, so only the chosen experts are computed afterwards:

    scores = f(scatter(fill, dim 1, idx, chosen))   ->   moe_experts(x, idx, f(chosen), …)

The mathematics is decided in ``experts_family.py``. Contract: ``ops/moe_experts.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ascend_deep.passes import experts_family
from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.experts_cut import cut_routed, moved_tokens, regions
from ascend_deep.passes.experts_products import Pair, divide, moved, pair_of, stored_problem
from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.normal_form import Term
from ascend_deep.passes.region import Region

__all__ = ["RECOGNISER", "ExpertsBatched"]

_CALLS = ("aten.bmm", "aten.matmul", "aten.baddbmm", "aten.einsum")

# Functions of one score that may stand between the scatter of the chosen scores and the experts.
_SCORE_CALLS = frozenset({"aten.sigmoid", "aten._to_copy", "aten.tanh", "aten.exp", "aten.relu"})


class ExpertsBatched:
    """See the module."""

    name = "experts_batched"
    op = "moe_experts"

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """Products with gathered or per-expert weights that another such product feeds."""
        found = []
        for node in view.calls(*_CALLS):
            pair = self._pair(view, node)
            if pair is not None and (pair.first.kind == "batched" or _scores(view, pair) is not None):
                found.append(node)
        return found

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """From tokens, ids, weights and biases to the sum over a token's experts."""
        pair = self._pair(view, anchor)
        if pair is None:
            return Refusal("no product with expert weights feeds this one.", anchor)
        if pair.first.kind == "batched":
            return cut_routed(view, self.name, pair)
        return _cut_dense(view, self.name, pair)

    def solve(self, region: Region) -> Solution | Refusal:
        """The member of ``moe_experts`` that the region computes."""
        return experts_family.solve(region)

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """See ``experts_family.probes``."""
        return experts_family.probes(region, solution)

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """See ``experts_family.emit``."""
        return experts_family.emit(build, region, inputs, solution)

    def _pair(self, view: GraphView, node: fx.Node) -> Pair | None:
        return pair_of(view.terms.term(node))


def _scores(view: GraphView, pair: Pair) -> tuple[Term, list[Term]] | None:
    """The scatter that a dense block's scores were made from, and the calls between it and the experts, in order."""
    uses: list[Term] = []
    rows = next((t for t in moved(pair.first.rows) if t.op == "aten.mul"), None)
    if rows is not None:
        uses += rows.args
    for node in pair.second.term.nodes:
        for user in node.users:
            uses += [view.terms.term(n) for n in user.all_input_nodes if n is not node]
    experts = pair.first.stored.shape[0]
    for term in uses:
        calls: list[Term] = []
        while term.op in ("Reshape", "Permute", "Expand", "Cast") or term.op in _SCORE_CALLS:
            if term.op not in ("Reshape", "Permute", "Expand"):
                calls.insert(0, term)
            term = term.args[0]
        scatter = term.op == "aten.scatter" and len(term.args) == 3 and dict(term.attrs).get("dim") == 1
        if scatter and len(term.shape) == 2 and term.shape[1] == experts:
            return term, calls
    return None


def _cut_dense(view: GraphView, name: str, pair: Pair) -> Sequence[Region] | Refusal:
    problem = stored_problem(pair)
    if problem is not None:
        return problem
    found = _scores(view, pair)
    if found is None:
        return Refusal("every expert runs on every token, and no scatter of chosen scores was found.", None)
    scatter, calls = found
    _, ids, chosen = scatter.args
    tokens, slots = scatter.shape[0], ids.shape[-1]
    rows = tokens * scatter.shape[1]
    hidden = divide(pair.second.term.numel, rows)
    if hidden is None or not isinstance(slots, int) or not ids.nodes or not chosen.nodes or chosen.shape != ids.shape:
        return Refusal("scores, ids and experts do not have matching sizes.", scatter.node)
    x = moved_tokens(pair.first.rows, tokens * hidden, hidden, ids)
    if x is None:
        return Refusal("the tokens that enter the first product were not found.", pair.first.term.node)
    text = [_call_text(t) for t in calls]
    if None in text:
        return Refusal("the scores go through a function that cannot be moved to the chosen ones.", scatter.node)
    leaves = {"x": x, "idx": ids, "weights": chosen}
    return regions(view, name, pair, leaves, tokens, hidden, rows, slots, {"score": json.dumps(text)})


def _call_text(term: Term) -> list[Any] | None:
    """One call of the score function: name of the overload and keyword arguments."""
    if term.op == "Cast":
        return ["aten._to_copy.default", {"dtype": str(term.dtype).removeprefix("torch.")}]
    node = term.node
    if node is None or len(node.args) != 1 or node.kwargs or not isinstance(node.target, torch._ops.OpOverload):
        return None
    return [str(node.target), {}]


RECOGNISER = ExpertsBatched()
