"""Why a region of experts is no member of ``moe_experts``: the sentence for the report.

Runs only after every member failed. First the function between the two products is looked at alone; if it is in the
activation table, the mistake is elsewhere, and a few known near misses are tried.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from ascend_deep.passes import experts_plan
from ascend_deep.passes._types import Refusal
from ascend_deep.passes.activation_family import Activated, fits, match, members, scales
from ascend_deep.passes.experts_family import Case, family_result, first_product
from ascend_deep.passes.experts_plan import Shape
from ascend_deep.passes.experts_products import Pair, arrangements, pair_of
from ascend_deep.passes.graph_view import op_name
from ascend_deep.passes.region import Dims, Region, slice_region
from ascend_deep.passes.stand_ins import widened

__all__ = ["explain", "shapes_sentence"]

_QUIET = frozenset(
    f"aten.{n}"
    for n in (
        "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t",
        "expand", "clone", "split", "slice", "chunk", "select", "unbind", "index", "split_with_sizes", "contiguous",
    )
)  # fmt: skip


def shapes_sentence(region: Region) -> str:
    """What is wrong with the weight shapes."""
    w13, w2, x = (tuple(region.inputs[r].meta["val"].shape) for r in ("w13", "w2", "x"))
    if "w3" in region.inputs:
        return (
            f"expert weights of shapes {list(w13)} (gate, and up) and {list(w2)} do not fit tokens of size {x[-1]}: "
            "gate and up must be I wide each and the second product I deep."
        )
    return (
        f"expert weights of shapes {list(w13)} and {list(w2)} do not fit tokens of size {x[-1]}: the first product "
        "must be 2·I (gate and up) or I wide and the second I deep."
    )


def explain(region: Region, shape: Shape) -> Refusal:
    """The best sentence there is for a region that equals no member."""
    pair = _pair(region)
    out = region.outputs[0]
    if region.hints.get("kind") in ("dense", "scores", "capacity") and _biases_of_all(region, shape):
        return Refusal(
            "biases are added after the scores were applied, so experts that were not chosen contribute theirs, or "
            "they are not those of their expert.",
            out,
        )
    if pair is not None:
        middle = _middle(region, shape, pair)
        if isinstance(middle, str):
            return Refusal(middle, pair.second.term.node, "Activations outside ops.ACTIVATIONS are left alone.")
        for sentence in _near_misses(region, shape, middle):
            return Refusal(sentence, out)
    names = _names(region, None, None)
    return Refusal(f"no member of moe_experts computes what this block computes ({', '.join(names)}).", out)


def _pair(region: Region) -> Pair | None:
    for node in reversed(region.nodes):
        if op_name(node):
            pair = pair_of(region.view.terms.term(node))
            if pair is not None:
                gate = region.view.terms.term(region.inputs["w13"])
                return next((p for p in arrangements(pair) if p.first.stored is gate), pair)
    return None


def _names(region: Region, pair: Pair | None, middle: set[fx.Node] | None) -> list[str]:
    nodes = region.nodes if middle is None else [n for n in region.nodes if n in middle]
    found = dict.fromkeys(op_name(n) for n in nodes if n.op == "call_function")
    return [n.removeprefix("aten.") for n in found if n not in _QUIET and n != "getitem"]


def _middle(region: Region, shape: Shape, pair: Pair) -> list[Activated] | str:
    """Members that equal the function between the products, or the sentence that none does."""
    first, rows = pair.first.term.node, pair.second.rows.node
    if first is None or rows is None:
        return []
    given = {"h": first, **{r: n for r, n in region.inputs.items() if r != "x"}}
    if shape.apart:
        (up,) = pair.others
        if up.term.node is None:
            return []
        given["h3"] = up.term.node
    cut = slice_region(region.view, region.recogniser, given, [rows])
    if isinstance(cut, Refusal):
        return []
    dims = experts_plan.plans(region, shape, 1)[0]
    cases: list[tuple[Tensor, Tensor]] = []
    wide = dims.size(shape.wide)
    halves = ("h", "h3") if shape.apart else ("h",)
    for i, gain in enumerate(scales(region.constants())):
        tensors = experts_plan.inputs(region, dims, 70 + i, torch.float64)
        for role in {"weights", "scores"} & set(tensors):
            tensors[role] = (tensors[role] != 0).double()
        tensors.update({r: torch.zeros_like(t) for r, t in tensors.items() if r.startswith("b")})
        generator = torch.Generator().manual_seed(i)
        for half in halves:
            tensors[half] = torch.randn(dims.shape(first), generator=generator).double() * gain
        try:
            (value,) = widened(cut.program).run(dims, {r: tensors[r] for r in cut.inputs})
        except Exception:
            return []
        hidden = torch.cat([tensors[half].reshape(-1, wide) for half in halves], 1)
        cases.append((hidden, value.reshape(-1, dims.size(shape.inner))))
    found = match(members(region.constants(), shape.gated), cases, shape.gated)
    if found:
        return found
    names = _names(region, pair, set(cut.nodes))
    if shape.gated and not shape.apart:  # separate weights were tried the other way round as well
        swapped = [(torch.cat(h.chunk(2, dim=-1)[::-1], dim=-1), want) for h, want in cases]
        if match(members(region.constants(), True), swapped, True):
            return (
                f"the activation between the two products ({', '.join(names)}) is applied to the second half of the "
                "first product, and moe_experts applies it to the first half."
            )
    return f"no activation of the table computes what stands between the two products: {', '.join(names) or 'nothing'}."


def _near_misses(region: Region, shape: Shape, middle: Sequence[Activated]) -> list[str]:
    """Sentences of the known mistakes that the region makes; at most one in practice."""
    if not middle:
        return []
    member = middle[0]
    dims = experts_plan.plans(region, shape, 1)[0]
    try:
        case = Case(region, shape, dims, 200, scales(region.constants())[0], "distinct")
    except Exception:
        return []

    def changed(**fields: Tensor | None) -> Case:
        other = copy.copy(case)
        vars(other).update(fields)
        return other

    def same(other: Case, arrange: Callable[[Tensor], Tensor] | None = None) -> bool:
        for weight_on_input in (False, True):
            rows = member.apply(first_product(other, weight_on_input), shape.gated)
            got = family_result(other, rows, weight_on_input, arrange)
            if fits(got.unsqueeze(0), case.result):
                return True
        return False

    def sorted_rows(y: Tensor) -> Tensor:
        return y.flatten(0, 1)[case.idx.flatten().argsort(stable=True)].reshape(y.shape)

    found = []
    if same(changed(weights=case.weights**2)):
        found.append("the routing weights are applied twice.")
    if same(changed(weights=torch.ones_like(case.weights))):
        found.append("the routing weights are not applied.")
    if same(case, sorted_rows):
        found.append("the experts' rows are not put back into token order before they are summed.")
    plain = family_result(case, member.apply(first_product(case, False), shape.gated), False)
    ratio = (case.result / plain).median()
    if fits(plain.unsqueeze(0), case.result):
        found.append(
            "an expert that a token's ids hold twice counts once in the block and twice in moe_experts, and that no id "
            "occurs twice is known only of those that a topk gives as they are."
        )
    elif torch.isfinite(ratio) and fits((plain * ratio).unsqueeze(0), case.result):
        found.append(f"the block scales the sum of a token's experts by {float(ratio):.6g}.")
    if case.b13 is not None or case.b2 is not None:
        bare = _without_biases(region, shape, dims)
        if bare is not None and fits(_plain(bare, member, shape).unsqueeze(0), bare.result):
            found.append("a bias that is added is not the one of the row's expert.")
    return found


def _biases_of_all(region: Region, shape: Shape) -> bool:
    """True if a dense block would be a member were it not for its biases."""
    if not {"b13", "b3", "b2"} & set(region.inputs):
        return False
    bare = _without_biases(region, shape, experts_plan.plans(region, shape, 1)[0])
    if bare is None:
        return False
    for member in members(region.constants(), shape.gated):
        for on_input in (False, True):
            rows = member.apply(first_product(bare, on_input), shape.gated)
            if fits(family_result(bare, rows, on_input).unsqueeze(0), bare.result):
                return True
    return False


def _plain(case: Case, member: Activated, shape: Shape) -> Tensor:
    return family_result(case, member.apply(first_product(case, False), shape.gated), False)


def _without_biases(region: Region, shape: Shape, dims: Dims) -> Case | None:
    try:
        return Case(region, shape, dims, 201, 1.0, "distinct", zero=("b13", "b3", "b2"))
    except Exception:
        return None
