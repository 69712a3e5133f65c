"""Recogniser ``sparse_attention``: attention under a mask of chosen keys, as ``sparse_mqa_attention``.

    mask = ones(B, S, T).scatter(-1, topk indices, False);   softmax(scale * q . k, hidden where mask) @ v

in any spelling: SDPA with a boolean or an additive mask, or product, softmax and product; the mask of the choice joined
with causal and padding masks by and, addition, masked_fill or where; key heads repeated or grouped; with or without a
sink behind the scores. Work and memory become O(S * topk) instead of O(S * T), and the mask disappears, so it may have
no other user.

The chosen keys come from a top-k, which lists no key twice. Rows in which no chosen key is visible (padding) are part
of the match: the op gives what the block gives there (``empty``). Blocks that round scores to half precision are
computed in f32, and the report says so.

Limits: no dropout, no other use of scores or weights; a device with a kernel for the op; enough keys for each
chosen one that a gather is faster than a dense product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from ascend_deep.native import table
from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.mqa_family import arrange, run
from ascend_deep.passes.region import Region
from ascend_deep.passes.sparse_attention_cut import cuts
from ascend_deep.passes.sparse_attention_family import CANONICAL, Bench, fit
from ascend_deep.passes.sparse_attention_trace import masks_of_choices

__all__ = ["RECOGNISER", "SparseAttention"]

_aten = torch.ops.aten


class SparseAttention:
    """See the module."""

    name = "sparse_attention"
    op = "sparse_mqa_attention"

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """The scatter of every mask that attention reads."""
        return masks_of_choices(view)

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """The attention behind the mask, one region per layout."""
        regions = cuts(view, anchor, self.name)
        refusal = _no_kernel(regions[0]) if isinstance(regions, list) and regions else None
        return refusal or regions

    def solve(self, region: Region) -> Solution | Refusal:
        """The scale, and what rows without a visible key give."""
        bench = Bench(region)
        found = fit(bench)
        if isinstance(found, Refusal):
            return found
        if found.empty == "mean" and region.hints["overwritten"]:
            return Refusal(
                "scores of hidden keys are overwritten by a finite number; in rows without a visible key the op's "
                "gradients are those of a number that is added.",
                region.outputs[0],
                "Add the mask to the scores, or fill them with -inf.",
            )
        notes = []
        if region.hints["rounds"]:
            notes.append("the block rounds scores and weights to half precision; the op keeps them in float32.")
        attrs = {"scale": found.scale, "empty": found.empty, "fill": found.fill}
        return Solution(self.op, attrs, tuple(notes))

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """Random operands under masks whose rows hide all, none or some keys."""
        bench = Bench(region)
        dims = next(d for d in bench.plans() if _runs(bench, d))
        dtype = region.inputs["q"].meta["val"].dtype
        lowest = float(solution.attrs["fill"]) if solution.attrs["empty"] == "mean" else torch.finfo(dtype).min
        cases = [
            Probe("masks hide by -inf", 31, dims, bench.tensors(dims, 31)),
            Probe("masks hide by the lowest number", 32, dims, bench.tensors(dims, 32, low=lowest, nothing=True)),
            Probe("nothing hidden but what is not chosen", 33, dims, bench.tensors(dims, 33, visible=True)),
        ]
        if not region.hints["rounds"]:  # scores next to -1e4 have two digits in half precision
            cases.append(Probe("masks hide by -1e4", 34, dims, bench.tensors(dims, 34, low=-1e4)))
        return cases

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """The op on [B, Hq, S, D], then the block's own order of dims and strides."""
        bench = Bench(region)
        q, k, v, idx = (arrange(build.call, inputs[r], bench.layouts[r], CANONICAL[r]) for r in ("q", "k", "v", "idx"))
        mask = _mask(build, bench, inputs)
        sink = arrange(build.call, inputs["sink"], bench.layouts["sink"], "H") if "sink" in inputs else None
        attended = build.call(
            torch.ops.ascend_deep.sparse_mqa_attention.default, q, k, v, idx, mask, sink, **solution.attrs
        )
        out = build.item(attended, 0)
        return [_restored(build, out, bench.layouts["out"], region.outputs[0].meta["val"])]


def _no_kernel(region: Region) -> Refusal | None:
    """Off the CPU, the refusals of every provider: the reference body is slower than dense attention there."""
    values = {role: node.meta["val"] for role, node in region.inputs.items()}
    device = values["q"].device.type
    if device == "cpu":
        return None
    bench = Bench(region)
    with getattr(values["q"], "fake_mode", None) or nullcontext():
        operands = [arrange(run, values[r], bench.layouts[r], CANONICAL[r]) for r in CANONICAL]
        masks = [arrange(run, values[r], bench.layouts[r], "BHST") for r in bench.masks]
        sink = arrange(run, values["sink"], bench.layouts["sink"], "H") if "sink" in values else None
    args = (*operands, masks[0] if masks else None, sink)
    choice = table.choose("sparse_mqa_attention", device, args, {"scale": 1.0, "empty": "zero", "fill": -1e30})
    if choice.provider is not None:
        return None
    return Refusal(
        f"no kernel of sparse_mqa_attention takes this call on {device}, where dense attention with the mask is faster "
        f"than the reference ({'; '.join(map(str, choice.refusals)).rstrip('.')}).",
        region.outputs[0],
    )


def _runs(bench: Bench, dims: Any) -> bool:
    try:
        bench.region.program.run(dims, bench.tensors(dims, 3))
    except Exception:  # any op may refuse these sizes
        return False
    return True


def _mask(build: Builder, bench: Bench, inputs: Mapping[str, fx.Node]) -> fx.Node | None:
    """All masks as one: boolean (True is visible), or floating if one of them is added."""
    keep: fx.Node | None = None
    added: fx.Node | None = None
    for role, kind in bench.masks.items():
        mask = arrange(build.call, inputs[role], bench.layouts[role], "BHST")
        if kind == "add":
            added = mask if added is None else build.call(_aten.add.Tensor, added, mask)
        else:
            mask = build.call(_aten.bitwise_not.default, mask) if kind == "hide" else mask
            keep = mask if keep is None else build.call(_aten.bitwise_and.Tensor, keep, mask)
    if added is None or keep is None:
        return keep if added is None else added
    return build.call(_aten.where.ScalarOther, keep, added, -torch.inf)


def _restored(build: Builder, out: fx.Node, layout: str, wanted: torch.Tensor) -> fx.Node:
    """``out`` [B, Hq, S, Dv] with the dims of ``layout``, in memory as ``wanted`` is."""
    kept = [n for n in layout if n != "1"]
    missing = [i for i, n in enumerate("BHSE") if n not in kept]
    if missing:
        out = build.call(_aten.squeeze.dims, out, missing)
    left = [n for n in "BHSE" if n in kept]
    if kept != left:
        out = build.call(_aten.permute.default, out, [left.index(n) for n in kept])
    for i, n in enumerate(layout):
        if n == "1":
            out = build.call(_aten.unsqueeze.default, out, i)
    if _heads_inside(wanted):
        out = build.call(_aten.transpose.int, out, 1, 2)
        out = build.call(_aten.clone.default, out, memory_format=torch.contiguous_format)
        return build.call(_aten.transpose.int, out, 1, 2)
    if kept != left:
        out = build.call(_aten.clone.default, out, memory_format=torch.contiguous_format)
    return out


def _heads_inside(wanted: torch.Tensor) -> bool:
    """True for [B, H, S, E] that lies in memory as [B, S, H, E], as flash attention returns it."""
    if wanted.dim() != 4:
        return False
    shape, stride = wanted.shape, wanted.stride()
    sizes = [s for s in (shape[1], shape[2]) if isinstance(s, int)]
    return 1 not in sizes and str(stride[1]) == str(shape[3]) and str(stride[2]) != str(shape[3])


RECOGNISER = SparseAttention()
