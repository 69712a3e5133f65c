"""Recogniser of experts in the grouped form: rows sorted by expert, grouped GEMMs, rows put back.

    order = argsort(idx);  h = grouped(x[order // K], w13, offs);  y = grouped(act(h), w2, offs) * weights[order]
    out[t] = sum over the K rows of token t                          offs = running count of rows per expert

Covers ``aten._grouped_mm`` and the custom op ``transformers::grouped_mm_fallback``; weights [E, N, H] and [E, H, N];
biases gathered by the sorted ids; gated (halves or interleaved) and plain activations with limits; routing weights on
input, hidden rows or output, before or after a cast; rows put back by an inverse permutation, index_add or scatter_add;
ids of other ranks (expert parallel), which contribute zero; gate and up in one tensor or in two.

The mathematics is decided in ``experts_family.py``. Contract: ``ops/moe_experts.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.experts_cut import cut_routed
from ascend_deep.passes.experts_family import ExpertsRecogniser
from ascend_deep.passes.experts_products import impure_between, pair_of
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.region import Region

__all__ = ["RECOGNISER", "ExpertsGrouped"]


class ExpertsGrouped(ExpertsRecogniser):
    """See the module."""

    name = "experts_grouped"

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """Grouped products that another grouped product feeds."""
        calls = view.calls("aten._grouped_mm", "transformers.grouped_mm_fallback")
        return [n for n in calls if pair_of(view.terms.term(n)) or impure_between(view.terms.term(n))]

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """From tokens, ids, weights and biases to the sum over a token's experts."""
        pair = pair_of(view.terms.term(anchor))
        if pair is None:
            between = impure_between(view.terms.term(anchor))
            name = op_name(between).removeprefix("aten.")
            return Refusal(f"{name} stands before this product, and is not on the list of pure ops.", between)
        return cut_routed(view, self.name, pair)


RECOGNISER = ExpertsGrouped()
