"""Recogniser ``router``: logits to expert ids and routing weights, in any spelling, as one ``moe_route``.

Structure only says where to cut (``router_cut``). What the cut-out region computes is found by running it
(``router_solve``): scoring (softmax, sigmoid, sqrt(softplus)) before or after the choice, a bias for the choice only,
groups by their two best or their best expert, masked groups at -inf or 0, renormalisation with the model's own eps,
one constant scale. The result is the op with those attributes, or a sentence that says what differs.

Limits: one selection of K experts per token, K and E static, E <= 2048; logits in f32, bf16 or f16 of any rank;
a choice that depends on probabilities rounded to half precision is left alone, since the op chooses in f32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.region import Region
from ascend_deep.passes.router_bench import Bench
from ascend_deep.passes.router_cut import anchors, cuts
from ascend_deep.passes.router_outside import compared_outside
from ascend_deep.passes.router_selection import selection
from ascend_deep.passes.router_solve import solve

__all__ = ["RECOGNISER", "Router"]

_aten = torch.ops.aten


class Router:
    """See the module."""

    name = "router"
    op = "moe_route"
    row_wise = "logits"
    """Role whose rows are treated one by one (``safeguards.position_dependence``)."""
    checks_gradients = True
    """``solve`` compares gradients too."""

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """The last choice of experts of every router."""
        return anchors(view)

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """Regions around the choice, largest first."""
        found = selection(view, anchor)
        assert found is not None
        regions = cuts(view, found, self.name)
        if isinstance(regions, Refusal):
            return regions
        checked = [(region, compared_outside(view, region)) for region in regions]
        fit = [region for region, refusal in checked if refusal is None]
        return fit or checked[0][1] or []

    def solve(self, region: Region) -> Solution | Refusal:
        """The member of the family that ``region`` computes."""
        return solve(region)

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """Random logits of several sizes and scales, one token, large and far negative logits, columns of -inf."""
        bench = Bench(region)
        experts = bench.experts
        found: list[Probe] = []

        # Groups masked with 0 tie with each other: keep enough choice scores above.
        zero_filled = solution.attrs["n_group"] > 1 and solution.attrs["group_fill"] == "zero"
        lift = 8.0 if zero_filled and solution.attrs["select"] == "logits" else 0.0

        def add(case: str, seed: int, rows: int, spread: float, shift: float = 0.0, masked: int = 0) -> None:
            g = torch.Generator().manual_seed(seed)
            dims, lead = bench.plan(rows)
            logits = torch.randn(int(torch.Size(lead).numel()), experts, generator=g) * spread + shift + lift
            if masked:
                logits[:, torch.randperm(experts, generator=g)[:masked]] = -torch.inf
            bias = torch.randn(experts, generator=g) * 0.3 if bench.bias_dtype is not None else None
            if bias is not None and zero_filled:
                bias = bias.abs()
            found.append(Probe(case, seed, dims, bench.tensors(_apart(logits, bench.dtype, g), bias, lead)))

        # Where scores are equal in f32 the ids have no common answer: sigmoid of large logits is 1.
        calm = 0.5 if solution.attrs["scoring"] == "sigmoid" and solution.attrs["select"] == "scores" else 1.0
        add("ordinary logits", 11, 16, 1.3 * calm)
        add("many tokens", 12, 61, 2.1 * calm)
        add("one token", 13, 1, 1.7 * calm)
        add("large logits", 14, 8, 9.0 * calm, shift=-40.0 * (1 - calm))
        half_precision = bench.dtype in (torch.bfloat16, torch.float16)
        if bench.bias_dtype is not None or not half_precision:
            # Half precision has too few numbers around -40 to tell hundreds of experts apart.
            add("far negative logits", 15, 8, 2.0, shift=-40.0)
        spare = (experts - int(solution.attrs["topk"])) // 2 if solution.attrs["n_group"] == 1 else 0
        if spare:
            add("columns of -inf", 16, 8, 1.1, masked=spare)
        return found

    def site_notes(self, region: Region) -> tuple[str, ...]:
        """Equal scores are common where the gate computes in half precision, also if its logits are cast up."""
        node = region.inputs["logits"]
        while op_name(node) in ("aten._to_copy", "aten.to", "aten.type_as") and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        dtype = region.view.dtype(node)
        if dtype not in (torch.bfloat16, torch.float16):
            return ()
        name = str(dtype).removeprefix("torch.")
        return (
            f"the gate computes in {name}, where experts often have equal scores; the op then takes the lower "
            "index, and eager may take another of them.",
        )

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """``moe_route`` on [T, E], then the block's own shape, order and dtype."""
        returns = str(region.hints["returns"]).split(",")
        logits_value = region.inputs["logits"].meta["val"]
        logits, bias = inputs["logits"], inputs.get("bias")
        if logits_value.dim() != 2:
            logits = build.call(_aten.flatten.using_ints, logits, 0, -2)
        if bias is not None and region.inputs["bias"].meta["val"].dim() != 1:
            bias = build.call(_aten.flatten.using_ints, bias)
        routed = build.call(torch.ops.ascend_deep.moe_route.default, logits, bias, **solution.attrs)
        weights, ids = build.item(routed, 0), build.item(routed, 1)
        if returns == ["dense"]:
            zeros = build.call(_aten.zeros_like.default, logits, dtype=torch.float32)
            dense = build.call(_aten.scatter.src, zeros, 1, ids, weights)
            return [self._finish(build, region, region.outputs[0], dense, inputs["logits"], dense=True)]
        if region.hints["order"] == "ascending":
            weights, ids = build.call(_aten.flip.default, weights, [-1]), build.call(_aten.flip.default, ids, [-1])
        made = {"weights": weights, "ids": ids}
        return [
            self._finish(build, region, old, made[name], inputs["logits"])
            for name, old in zip(returns, region.outputs, strict=True)
        ]

    @staticmethod
    def _finish(
        build: Builder, region: Region, old: fx.Node, new: fx.Node, logits: fx.Node, dense: bool = False
    ) -> fx.Node:
        """``new`` [T, K] (or [T, E]) in the dtype, shape and strides of ``old``."""
        value: Any = old.meta["val"]
        if value.dtype not in (torch.float32, torch.int64):
            new = build.call(_aten._to_copy.default, new, dtype=value.dtype)
        experts = int(region.inputs["logits"].meta["val"].shape[-1])
        width = experts if dense else 1 if region.hints["squeezed"] else int(value.shape[-1])
        squeezed = bool(region.hints["squeezed"]) and not dense
        if value.dim() + squeezed != 2:
            # view_as needs no sizes, so the graph stays the same for all of them.
            like = logits if width == experts else build.call(_aten.slice.Tensor, logits, -1, 0, width)
            new = build.call(_aten.view_as.default, new, like)
        if squeezed:
            return build.call(_aten.squeeze.dim, new, -1)
        if value.stride()[-2:] == (experts, 1) and width < experts:
            # The first columns of a sorted [.., E] tensor: give back the same strides.
            rest = build.call(_aten.slice.Tensor, logits, -1, width, experts)
            rest = build.call(_aten.zeros_like.default, rest, dtype=value.dtype)
            return build.call(_aten.slice.Tensor, build.call(_aten.cat.default, [new, rest], -1), -1, 0, width)
        return new

    @staticmethod
    def canonical(region: Region, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """``outputs`` with the columns of each row in order of ids (of weights, without ids) if their order is open."""
        returns = str(region.hints["returns"]).split(",")
        if region.hints["order"] != "open" or returns == ["dense"]:
            return tuple(outputs)
        if "ids" not in returns:
            return tuple(t.sort(-1).values for t in outputs)
        order = outputs[returns.index("ids")].argsort(-1)
        return tuple(t.gather(-1, order) for t in outputs)


def _apart(logits: torch.Tensor, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """``logits`` rounded to ``dtype`` without two equal ones in a row: ties have no common answer."""
    for _ in range(20):
        rounded = logits.to(dtype).float()
        ordered, where = rounded.sort(-1)
        same = (ordered[:, 1:] == ordered[:, :-1]) & ordered[:, 1:].isfinite()
        if not bool(same.any()):
            return rounded
        again = torch.zeros_like(same).new_zeros(rounded.shape)
        again.scatter_(-1, where[:, 1:], same)
        fresh = torch.randn(rounded.shape, generator=g) * rounded[rounded.isfinite()].std()
        logits = torch.where(again, rounded + fresh, rounded)
    return rounded


RECOGNISER = Router()
