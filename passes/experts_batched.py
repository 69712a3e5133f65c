"""Recogniser of experts in the batched form, the dense form and the form with capacity.

Batched: each pair of token and expert gathers the weights of its expert.

    h = w13[idx] @ x[:, None];  y = (w2[idx] @ act(h)) * weights;  out[t] = sum over k

Covers bmm, matmul, baddbmm and einsum, rows flat or [T, K], biases gathered by the ids, clamped ids (expert parallel).

Dense, and with capacity: every expert runs on every token, or on slots that tokens are put into, and scores weigh the
results (``experts_dense.py``):

    y[t] = sum over e of scores[t, e] * expert e (x[t])   ->   moe_experts(x, idx, weights, …)

The mathematics is decided in ``experts_family.py``. Contract: ``ops/moe_experts.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.experts_cut import cut_routed
from ascend_deep.passes.experts_dense import cut_dense, is_weighed
from ascend_deep.passes.experts_family import ExpertsRecogniser
from ascend_deep.passes.experts_products import Pair, pair_of
from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.region import Region

__all__ = ["RECOGNISER", "ExpertsBatched"]

_CALLS = ("aten.bmm", "aten.matmul", "aten.baddbmm", "aten.einsum")


class ExpertsBatched(ExpertsRecogniser):
    """See the module."""

    name = "experts_batched"

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """Products with gathered or per-expert weights that another such product feeds."""
        found = []
        for node in view.calls(*_CALLS):
            pair = self._pair(view, node)
            if pair is not None and (pair.first.kind == "batched" or is_weighed(view, pair)):
                found.append(node)
        return found

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """From tokens, ids, weights and biases to the sum over a token's experts."""
        pair = self._pair(view, anchor)
        if pair is None:
            return Refusal("no product with expert weights feeds this one.", anchor)
        if pair.first.kind == "batched":
            return cut_routed(view, self.name, pair)
        return cut_dense(view, self.name, pair)

    def _pair(self, view: GraphView, node: fx.Node) -> Pair | None:
        return pair_of(view.terms.term(node))


RECOGNISER = ExpertsBatched()
