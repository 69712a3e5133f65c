"""Which member of ``moe_experts`` a region of experts computes: solved by running it, then proved and emitted.

The family is act × alpha × limit × interleaved × weight layout × weight on input. The region runs in f64 at small sizes
and is compared with every member at several magnitudes; the one that agrees everywhere is the answer. Members that
agree with each other on all of these inputs (a limit beyond which silu is the identity to sixteen digits) count as one,
and the plainest of them is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from ascend_deep.passes import experts_plan
from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.activation_family import Activated, fits, members, scales
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.experts_plan import Shape, chosen_scores, score_chain
from ascend_deep.passes.graph_view import op_name
from ascend_deep.passes.region import Dims, Region
from ascend_deep.passes.stand_ins import widened

__all__ = [
    "Case",
    "ExpertsRecogniser",
    "emit",
    "family_result",
    "first_product",
    "probes",
    "solve",
    "takes_outside_ids",
]

_COMPARISONS = frozenset(f"aten.{n}" for n in ("ge", "gt", "lt", "le", "eq", "ne", "clamp", "clamp_min", "clamp_max"))
_ATTRS = ("act", "alpha", "limit", "interleaved", "weight_layout", "weight_on_input", "expert_offset", "out_dtype")


class Case:
    """One run of a region in f64: what went in, by role of the op, and what came out.

    Attributes:
        x, idx, weights: [T, H], [T, K], [T, K]. w13 and w2 are [E, H, N] and [E, I, H] whatever the layout, gate and up
            in one.
        result: [T, H].
    """

    def __init__(
        self, region: Region, shape: Shape, dims: Dims, seed: int, gain: float, ids: str, zero: Sequence[str] = ()
    ) -> None:
        tensors = experts_plan.inputs(region, dims, seed, torch.float64, gain, ids)
        tensors.update({role: torch.zeros_like(tensors[role]) for role in zero if role in tensors})
        (result,) = widened(region.program).run(dims, tensors)
        self.x = tensors["x"].reshape(-1, tensors["x"].shape[-1])
        slots = dims.size(shape.slots)
        if "scores" in tensors:
            self.idx, self.weights = chosen_scores(tensors["scores"], len(self.x), slots, shape.experts)
        else:
            self.idx = tensors["idx"].reshape(-1, slots).long()
            weights = tensors["weights"]
            for target, kwargs in score_chain(region.hints):
                weights = target(weights, **{k: torch.float64 if k == "dtype" else v for k, v in kwargs.items()})
            self.weights = weights.reshape(-1, slots)
        self.w13, self.w2, w3 = tensors["w13"], tensors["w2"], tensors.get("w3")
        if w3 is not None:
            self.w13 = torch.cat((self.w13, w3), 1 if shape.layout == "enk" else 2)
        if shape.layout == "enk":
            self.w13, self.w2 = self.w13.transpose(1, 2), self.w2.transpose(1, 2)
        self.b13, self.b2, b3 = tensors.get("b13"), tensors.get("b2"), tensors.get("b3")
        if w3 is not None and (self.b13 is not None or b3 is not None):
            self.b13 = torch.cat(_both(self.b13, b3), 1)
        self.result = result.double().reshape(self.x.shape)


def _both(gate: Tensor | None, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two biases, one of which may be missing."""
    known = gate if gate is not None else up
    assert known is not None
    return (torch.zeros_like(known) if gate is None else gate), (torch.zeros_like(known) if up is None else up)


def first_product(case: Case, weight_on_input: bool) -> Tensor:
    """h [T, K, N] of every pair of token and expert; pairs with an id outside [0, E) get the last expert."""
    local = case.idx.clamp(0, case.w13.shape[0] - 1)
    x = case.x.unsqueeze(1)
    if weight_on_input:
        x = x * case.weights.unsqueeze(-1)
        h = torch.einsum("tkh,tkhn->tkn", x, case.w13[local])
    else:
        h = torch.einsum("th,tkhn->tkn", case.x, case.w13[local])
    return h if case.b13 is None else h + case.b13[local]


def family_result(
    case: Case, hidden: Tensor, weight_on_input: bool, arrange: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """y [.., T, H] from activated rows [.., T, K, I]; ``arrange`` changes the weighted rows before the sum."""
    experts = case.w2.shape[0]
    local = case.idx.clamp(0, experts - 1)
    y = torch.einsum("...tki,tkih->...tkh", hidden, case.w2[local])
    if case.b2 is not None:
        y = y + case.b2[local]
    inside = ((case.idx >= 0) & (case.idx < experts)).double()
    scale = inside if weight_on_input else inside * case.weights
    y = y * scale.unsqueeze(-1)
    return (y if arrange is None else arrange(y)).sum(-2)


def takes_outside_ids(region: Region, shape: Shape) -> bool:
    """True if the region compares or clamps integers, its ids, and runs with ids of other ranks."""
    routed = region.hints.get("kind") in ("grouped", "batched")
    if not routed or not any(op_name(n) in _COMPARISONS and _reads_integers(n) for n in region.nodes):
        return False
    for dims in experts_plan.plans(region, shape, 1):
        try:
            Case(region, shape, dims, 99, 1.0, "outside")
        except IndexError:  # there is no row for such an id: the model never has one
            return False
        except Exception:
            return True
    return True


def _reads_integers(node: fx.Node) -> bool:
    value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    return not (isinstance(value, Tensor) and value.is_floating_point())


def _may_repeat(region: Region) -> bool:
    """True if a token's ids may hold an expert twice, as far as the graph says."""
    if region.hints.get("kind") in ("grouped", "batched"):
        return True
    return "idx" in region.inputs and bool(region.hints.get("repeats", True))


def solve(region: Region) -> Solution | Refusal:
    """The member that ``region`` computes, or why none."""
    from ascend_deep.passes import experts_diagnose

    shapes = experts_plan.layouts(region)
    if not shapes:
        return Refusal(experts_diagnose.shapes_sentence(region), region.outputs[0])
    failure = ""
    for shape in shapes:
        cases = _cases(region, shape)
        if isinstance(cases, str):
            failure = cases
            continue
        found = _matches(region, shape, cases)
        if found:
            return _solution(region, shape, *found[0])
    if failure:
        return Refusal(f"the block did not run at small sizes: {failure}", region.outputs[0])
    return experts_diagnose.explain(region, shapes[0])


def _cases(region: Region, shape: Shape) -> list[Case] | str:
    """Runs at every magnitude, or the error of the last plan that was tried."""
    error = "no mapping to small sizes keeps equal sizes equal."
    ids = ["distinct", "repeated", "distinct"] if _may_repeat(region) else ["distinct"]
    ids += ["outside"] if takes_outside_ids(region, shape) else []
    gains = scales(region.constants())
    for dims in experts_plan.plans(region, shape, 3):
        try:
            runs = [
                Case(region, shape, dims, 100 + i, gains[i % len(gains)], ids[i % len(ids)])
                for i in range(max(len(gains), len(ids), 2))
            ]
            return runs
        except Exception as problem:  # any op of the region may refuse the sizes of this plan
            error = f"{type(problem).__name__}: {_first_line(problem)}"
    return error


def _matches(region: Region, shape: Shape, cases: Sequence[Case]) -> list[tuple[Activated, bool]]:
    family = [m for m in members(region.constants(), shape.gated) if not (shape.apart and m.interleaved)]
    found = []
    for weight_on_input in (False, True):
        left = list(family)
        for case in cases:
            if not left:
                break
            h = first_product(case, weight_on_input)
            hidden = torch.stack([member.apply(h, shape.gated) for member in left])
            left = [left[i] for i in fits(family_result(case, hidden, weight_on_input), case.result)]
        found += [(member, weight_on_input) for member in left]
    return found


def _solution(region: Region, shape: Shape, member: Activated, weight_on_input: bool) -> Solution:
    out = region.outputs[0].meta["val"].dtype
    return Solution(
        "moe_experts",
        {
            **member.attrs(),
            "weight_layout": shape.layout,
            "weight_on_input": weight_on_input,
            "expert_offset": 0,
            "out_dtype": None if out == _compute_dtype(region) else out,
        },
    )


def _compute_dtype(region: Region) -> torch.dtype:
    """The dtype of the products' operands: what the weights are cast to between storage and product."""
    dtype = getattr(torch, str(region.hints["compute"]))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _first_line(problem: Exception) -> str:
    text = str(problem).strip()
    return text.splitlines()[0][:160] if text else ""


# -- probes and replacement -------------------------------------------------------------------------------------------
def probes(region: Region, solution: Solution) -> Sequence[Probe]:
    """The cases of the final comparison, in the region's own dtypes."""
    shape = experts_plan.shape_of(region, solution.attrs["weight_layout"])
    some = experts_plan.plans(region, shape, 2)
    dense = not _may_repeat(region)
    limit = solution.attrs["limit"]
    cases = [
        ("random tokens", 1, 0, {}),
        ("repeated ids", 2, -1, {} if dense else {"ids": "repeated"}),
        ("all tokens on one expert", 3, 0, {} if dense else {"ids": "one"}),
        ("weights over five orders of magnitude", 4, -1, {"skew": True}),
        ("large activations", 5, 0, {"gain": 2.0 * (limit or 4.0)}),
    ]
    if takes_outside_ids(region, shape):
        cases.append(("ids of other ranks", 6, 0, {"ids": "outside"}))
    return [
        Probe(name, seed, some[plan], experts_plan.inputs(region, some[plan], seed, **options))  # type: ignore[arg-type]
        for name, seed, plan, options in cases
    ]


def emit(build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution) -> Sequence[fx.Node]:
    """One ``moe_experts`` call; tokens, ids and weights flattened and cast where the op wants it, weights as stored."""
    aten = torch.ops.aten
    originals = {role: node.meta["val"] for role, node in region.inputs.items()}
    dtype = _compute_dtype(region)

    def cast(node: fx.Node, have: torch.dtype, want: torch.dtype) -> fx.Node:
        return node if have == want else build.call(aten._to_copy.default, node, dtype=want)

    x = inputs["x"]
    if originals["x"].dim() != 2:
        x = build.call(aten.flatten.using_ints, x, 0, -2) if originals["x"].dim() > 2 else build.call(
            aten.unsqueeze.default, x, 0
        )  # fmt: skip
    x = cast(x, originals["x"].dtype, dtype)
    routing = _chosen if "scores" in inputs else _given
    idx, weights, have = routing(build, region, inputs)
    if have not in (torch.float32, dtype):
        weights = cast(weights, have, torch.float32)
    biases = {
        role: cast(inputs[role], originals[role].dtype, dtype) if role in inputs else None
        for role in ("b13", "b3", "b2")
    }
    gate, up = biases["b13"], biases["b3"]
    if "w3" in inputs and (gate is not None or up is not None):
        missing = build.call(aten.zeros_like.default, up if gate is None else gate)
        both = [missing if gate is None else gate, missing if up is None else up]
        biases["b13"] = build.call(aten.cat.default, both, 1)
    w13, w2 = (cast(inputs[role], originals[role].dtype, dtype) for role in ("w13", "w2"))
    w3 = cast(inputs["w3"], originals["w3"].dtype, dtype) if "w3" in inputs else None
    out = build.call(
        torch.ops.ascend_deep.moe_experts.default,
        x,
        idx,
        weights,
        w13,
        biases["b13"],
        w2,
        biases["b2"],
        w3,
        **{name: solution.attrs[name] for name in _ATTRS},
    )
    if region.outputs[0].meta["val"].dim() != 2:
        out = build.call(aten.view_as.default, out, inputs["x"])
    return [out]


def _given(build: Builder, region: Region, inputs: Mapping[str, fx.Node]) -> tuple[fx.Node, fx.Node, torch.dtype]:
    """Ids and weights [T, K] from those of the block, and the dtype of the weights."""
    aten = torch.ops.aten
    slots = region.hints["slots"]
    ids, chosen = (region.inputs[role].meta["val"] for role in ("idx", "weights"))
    idx, weights, have = inputs["idx"], inputs["weights"], chosen.dtype
    if ids.dim() != 2 or (slots and ids.shape[-1] != slots):
        idx = build.call(aten.reshape.default, idx, [-1, slots])
    if ids.dtype not in (torch.int64, torch.int32):
        idx = build.call(aten._to_copy.default, idx, dtype=torch.int64)
    for target, kwargs in score_chain(region.hints):
        weights = build.call(target, weights, **kwargs)
        have = kwargs.get("dtype", have)
    if chosen.dim() != 2 or (slots and chosen.shape[-1] != slots):
        weights = build.call(aten.reshape.default, weights, [-1, slots])
    return idx, weights, have


def _chosen(build: Builder, region: Region, inputs: Mapping[str, fx.Node]) -> tuple[fx.Node, fx.Node, torch.dtype]:
    """Ids and weights [T, K] of the scores that differ from zero, and the dtype of the weights."""
    aten = torch.ops.aten
    scores, like = inputs["scores"], region.inputs["scores"].meta["val"]
    experts = int(region.inputs["w13"].meta["val"].shape[0])
    if "dispatch" in inputs:
        if like.dim() == 2:
            scores = build.call(aten.unflatten.int, scores, 1, [experts, -1])
        scores = build.call(aten.sum.dim_IntList, scores, [-1])
    elif like.dim() != 2:
        scores = build.call(aten.reshape.default, scores, [-1, experts])
    largest = build.call(aten.topk.default, build.call(aten.abs.default, scores), int(region.hints["slots"]))
    idx = build.item(largest, 1)
    return idx, build.call(aten.gather.default, scores, 1, idx), like.dtype


class ExpertsRecogniser:
    """What the recognisers of experts have in common: all but how a block is found and where it is cut."""

    op = "moe_experts"

    def solve(self, region: Region) -> Solution | Refusal:
        """The member of ``moe_experts`` that the region computes."""
        return solve(region)

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """See ``probes`` of the module."""
        return probes(region, solution)

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """See ``emit`` of the module."""
        return emit(build, region, inputs, solution)
