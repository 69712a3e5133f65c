"""Recogniser ``mqa_indexer``: the scores of a lightning indexer, and the top-k of them, as ``mqa_logits``/``mqa_topk``.

    scores[b,s,t] = sum over h of weights[b,s,h] * relu(scale * q[b,s,h,:] . k[b,t,:]);    top-k over t

in any spelling: matmul, bmm, einsum or a loop over heads; the scale before or after the ReLU; heads summed by a
product with the weights or by multiply and sum; keys with or without a head dim; masks by addition, masked_fill or
where; k a constant or min(k, number of keys). ``mqa_cut`` finds where to cut, ``mqa_family`` runs what is between.

RoPE, norms, projections and caches stay outside. ``q.float() @ k.float()`` on half precision is cut before the upcast:
the products are exact in f32, so the op computes the same sum in another order.

The choice ranks hidden keys last (``outside="rank_last"``), as ``topk`` of scores filled with -inf does. Keys of equal
score are chosen by lowest index, where ``torch.topk`` promises nothing; scores that differ by less than the rounding of
f32 sums may change places.

Limits: scores summed in f32 or f64; one key head; one set of keys for all heads; masks after the sum over the heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ascend_deep.native import logits_rows
from ascend_deep.passes import mqa_edges, mqa_sizes, safeguards
from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.mqa_cut import cuts
from ascend_deep.passes.mqa_family import CANONICAL, Bench, arrange, fit, restore
from ascend_deep.passes.mqa_walk import anchors
from ascend_deep.passes.region import Dims, Region

__all__ = ["RECOGNISER", "MqaIndexer"]

_aten = torch.ops.aten
_FEW = 16  # chosen keys up to which random scores are far enough apart to have one order
_GAP = 2e-5


class MqaIndexer:
    """See the module."""

    name = "mqa_indexer"
    op = "mqa_topk"

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """The choice of keys, or the ReLU where nobody chooses."""
        return anchors(view)

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """Regions around the anchor: with the choice before scores alone, likely layouts first."""
        return cuts(view, anchor, self.name)

    def solve(self, region: Region) -> Solution | Refusal:
        """The scale and the attributes of the op."""
        bench = Bench(region)
        solution = self._solve(region, bench)
        if isinstance(solution, Refusal):
            return solution
        # A number that stands in the block makes the better sentence.
        threshold = safeguards.unexplained_thresholds(region, solution)
        return threshold or mqa_edges.differs(bench, float(solution.attrs["scale"])) or solution

    def _solve(self, region: Region, bench: Bench) -> Solution | Refusal:
        returns = str(region.hints["returns"]).split(",")
        floats = "scores" in returns
        if floats and any(op_name(n) == "aten.detach" for n in region.nodes):
            return Refusal("part of the scores is detached; the op would pass a gradient back.", bench.scores)
        beyond = mqa_sizes.unseen(bench)
        if beyond is not None:
            return beyond
        found = fit(bench)
        if isinstance(found, Refusal):
            return found
        if found.fill is not None and found.fill != -torch.inf:
            alone = len(bench.masks) == 1 and not floats and found.fill <= -1e30
            if not alone:
                return Refusal(
                    f"hidden keys get the score {found.fill:.4g}; the op gives them -inf.",
                    bench.scores,
                    "Fill the scores of hidden keys with -inf.",
                )
        notes = []
        if region.inputs["q"].meta["val"].dtype in (torch.bfloat16, torch.float16):
            notes.append("products of half precision are exact in float32: the same sum in another order.")
        attrs: dict[str, Any]
        if len(_cases(region, found.scale)) < 3:
            return Refusal("no inputs were found whose scores differ enough to have one order.", bench.scores)
        if not bench.chosen:
            out = bench.scores.meta["val"].dtype
            attrs = {"scale": found.scale, "max_seqlen_k": 0, "clean": True}
            if any(k != "add" for k in bench.masks.values()):
                notes.append("the scores of hidden keys are -inf.")
            return Solution("mqa_logits", {**attrs, "out_dtype": str(out).removeprefix("torch.")}, tuple(notes))
        if region.hints["order"] == "open":
            notes.append("the block leaves the order of the chosen keys open; the op returns them by ascending index.")
        notes.append("keys of equal score are chosen by lowest index.")
        attrs = {
            "topk": bench.chosen,
            "scale": found.scale,
            "outside": "rank_last",
            "sorted": region.hints["order"] == "descending",
            "return_scores": floats,
            "index_dtype": str(region.hints["index_dtype"]),
        }
        return Solution("mqa_topk", attrs, tuple(notes))

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """Random operands, and keys in a ladder of scores, so that the choice has one answer."""
        return _cases(region, float(solution.attrs["scale"]))

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """The op on [B, S, H, D] and [B, T, D], then the block's own shape."""
        bench = Bench(region)
        q, kv, weights = (
            arrange(build.call, inputs[r], bench.layouts[r], CANONICAL[r]) for r in ("q", "kv", "weights")
        )
        mask = _mask(build, bench, inputs)
        attrs = dict(solution.attrs)
        layout = bench.layouts["scores"]
        args = (q, None, kv, None, weights, None, None, mask)
        if solution.op == "mqa_logits":
            attrs["out_dtype"] = getattr(torch, attrs["out_dtype"])
            out = build.call(torch.ops.ascend_deep.mqa_logits.default, *args, **attrs)
            of_q, of_kv, value = (node.meta.get("val") for node in (q, kv, out))
            if (
                isinstance(of_q, Tensor)
                and isinstance(of_kv, Tensor)
                and isinstance(value, Tensor)
                and logits_rows.padded(of_q.device.type, of_q.dtype, of_kv.dtype, 0, value.dtype)
            ):
                # The block's scores are contiguous.
                out = build.call(_aten.clone.default, out, memory_format=torch.contiguous_format)
            return [restore(build.call, out, layout)]
        attrs["index_dtype"] = getattr(torch, attrs["index_dtype"])
        if region.hints["capped"]:
            keys = build.call(_aten.sym_size.int, kv, 1)
            attrs["topk"] = build.call(torch.sym_min, keys, attrs["topk"])
        chosen = build.call(torch.ops.ascend_deep.mqa_topk.default, *args, **attrs)
        position = {"scores": 0, "idx": 1}
        return [
            restore(build.call, build.item(chosen, position[name]), layout)
            for name in str(region.hints["returns"]).split(",")
        ]

    @staticmethod
    def canonical(region: Region, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``outputs`` with the columns of each row in order of index (of scores, without indices) if it is open."""
        if region.hints["order"] != "open":
            return tuple(outputs)
        returns = str(region.hints["returns"]).split(",")
        if "idx" not in returns:
            return tuple(t.sort(-1).values for t in outputs)
        order = outputs[returns.index("idx")].long().argsort(-1)
        return tuple(t.gather(-1, order) for t in outputs)


def _mask(build: Builder, bench: Bench, inputs: Mapping[str, fx.Node]) -> fx.Node | None:
    """All masks as one: boolean (True takes part), or floating if one of them is added."""
    keep: fx.Node | None = None
    added: fx.Node | None = None
    for role, kind in bench.masks.items():
        mask = arrange(build.call, inputs[role], bench.layouts[role], "BST")
        if kind == "add":
            added = mask if added is None else build.call(_aten.add.Tensor, added, mask)
        else:
            mask = build.call(_aten.bitwise_not.default, mask) if kind == "hide" else mask
            keep = mask if keep is None else build.call(_aten.bitwise_and.Tensor, keep, mask)
    if added is None or keep is None:
        return keep if added is None else added
    hide = build.call(_aten.bitwise_not.default, keep)
    # masked_fill keeps the shape of what it fills; a sum has that of both masks.
    wide = build.call(_aten.add.Tensor, added, build.call(_aten.zeros_like.default, hide, dtype=torch.float32))
    return build.call(_aten.masked_fill.Scalar, wide, hide, -torch.inf)


def _cases(region: Region, scale: float) -> list[Probe]:
    """Up to three probes; fewer where no inputs were found."""
    bench = Bench(region)
    dims = next((d for d in bench.plans() if _runs(bench, d)), None)
    if dims is None:
        return []
    cases = [("ordinary", 21), ("another seed", 22), ("a third seed", 23)]
    if not bench.chosen:
        return [Probe(case, seed, dims, bench.tensors(dims, seed)) for case, seed in cases]
    depth = dims.size(bench.size("D"))
    found = []
    for case, seed in cases:
        tensors = _apart(bench, dims, seed, scale, ladder=False) if bench.chosen <= _FEW else None
        if tensors is None and depth > 1:
            case, tensors = f"{case}, a ladder of scores", _apart(bench, dims, seed, scale, ladder=True)
        if tensors is not None:
            found.append(Probe(case, seed, dims, tensors))
    return found


def _runs(bench: Bench, dims: Dims) -> bool:
    try:
        bench.run_scores(dims, bench.tensors(dims, 3))
    except Exception:  # any op may refuse these sizes
        return False
    return True


def _apart(bench: Bench, dims: Dims, seed: int, scale: float, ladder: bool) -> dict[str, Tensor] | None:
    """Inputs whose best scores differ by more than rounding does, in every row."""
    sign = 1.0 if scale > 0 else -1.0
    for attempt in range(4 if ladder else 40):
        tensors = bench.tensors(dims, seed + 1000 * attempt, ladder=ladder, sign=sign)
        if not ladder:
            _first_head_counts(bench, tensors, sign)
        best = bench.run_scores(dims, tensors).topk(min(bench.chosen + 1, dims.size(bench.size("T")))).values
        gaps = best[..., :-1] - best[..., 1:]
        size = best.masked_fill(~best.isfinite(), 0.0).abs().amax(-1, keepdim=True)
        if bool((best.isfinite().all()) & (gaps > _GAP * size).all()):
            return tensors
    return None


def _first_head_counts(bench: Bench, tensors: dict[str, Tensor], sign: float) -> None:
    """Make products of the first head count, or scores of exactly zero tie: every ReLU off."""
    layouts, q, kv = bench.layouts, tensors["q"], tensors["kv"]
    if "D" not in layouts["q"] or "D" not in layouts["kv"]:
        return
    kv.select(layouts["kv"].index("D"), 0).abs_().add_(1.0).mul_(sign)
    first = q.select(layouts["q"].index("H"), 0) if "H" in layouts["q"] else q
    at = layouts["q"].index("D")
    if "H" in layouts["q"]:
        at -= layouts["q"].index("H") < at
    first.select(at, 0).abs_().add_(4.0)


RECOGNISER = MqaIndexer()
