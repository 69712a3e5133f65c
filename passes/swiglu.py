"""Recogniser of gated activations: act(gate) * up of the two halves of one tensor.

    gate, up = h.chunk(2, -1)   or   h[..., ::2], h[..., 1::2];      out = act(gate) * up

Covers every activation of ``ops.ACTIVATIONS`` with its limits and alpha, as one op or in pieces (x * sigmoid(x)), with
operands in any order and casts in between. The activation is decided by running the block (``activation_family.py``).
Not covered: gate and up from two products (there is no one tensor), the activation on the second half, split dims other
than the last.

Contract: ``ops/swiglu.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.activation_family import match, members, scales
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.normal_form import Term, size
from ascend_deep.passes.region import Dims, Region, slice_region
from ascend_deep.passes.stand_ins import widened

__all__ = ["POINTWISE", "RECOGNISER", "Swiglu", "halves"]

POINTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "mul", "add", "sub", "rsub", "div", "neg", "pow", "square", "sqrt", "exp", "log", "log1p", "tanh", "erf", "abs",
        "sigmoid", "silu", "gelu", "relu", "relu6", "mish", "softplus", "elu", "celu", "selu", "leaky_relu",
        "hardswish", "hardsigmoid", "hardtanh", "log_sigmoid", "clamp", "clamp_min", "clamp_max", "minimum", "maximum",
        "where", "_to_copy", "to", "type_as", "view", "reshape", "unsqueeze", "squeeze", "reciprocal", "sign",
    )
)  # fmt: skip
_PARTS = frozenset({"getitem", "aten.slice", "aten.narrow"})
_LEAD = (3, 2, 5, 4)
_HALF = 6


class Swiglu:
    """See the module."""

    name = "swiglu"
    op = "swiglu"

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """Tensors whose two halves meet again in a pointwise op."""
        return [base for base, parts in halves(view).items() if _meeting(view, parts)]

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """From the tensor to each pointwise result of both halves, largest first."""
        outputs = _meeting(view, halves(view)[anchor])
        dtype = view.dtype(anchor)
        outputs = [n for n in outputs if view.dtype(n) == dtype]
        if not outputs:
            return Refusal("the two halves only meet in another dtype than that of the tensor.", anchor)
        cuts = [slice_region(view, self.name, {"h": anchor}, [n]) for n in outputs]
        return [c for c in cuts if isinstance(c, Region)] or next(c for c in cuts if isinstance(c, Refusal))

    def solve(self, region: Region) -> Solution | Refusal:
        """The activation that the region computes."""
        constants = region.constants()
        dims = _plan(region)
        width = region.outputs[0].meta["val"].shape[-1]
        cases: list[tuple[Tensor, Tensor]] = []
        for i, gain in enumerate(scales(constants)):
            h = _random(dims.shape(region.inputs["h"]), 40 + i, torch.float64, gain)
            try:
                (want,) = widened(region.program).run(dims, {"h": h})
            except Exception as error:  # any op may refuse these sizes
                return Refusal(f"the block did not run at small sizes: {type(error).__name__}.", region.outputs[0])
            if want.shape != (*h.shape[:-1], h.shape[-1] // 2):
                return Refusal(f"the result is {width} wide, not half of the tensor.", region.outputs[0])
            cases.append((h, want))
        family = members(constants, gated=True)
        found = match(family, cases, gated=True)
        if found:
            return Solution("swiglu", found[0].attrs())
        names = ", ".join(dict.fromkeys(op_name(n).removeprefix("aten.") for n in region.nodes if _is_function(n)))
        swapped = [(torch.cat(h.chunk(2, dim=-1)[::-1], dim=-1), want) for h, want in cases]
        if match(family, swapped, gated=True):
            return Refusal(
                f"the activation ({names}) is applied to the second half of the tensor, and swiglu applies it to the "
                "first.",
                region.outputs[0],
            )
        return Refusal(f"no activation of the table computes {names} of the two halves.", region.outputs[0])

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """Random tensors in the region's dtype: order 1, across the limits, and large."""
        dims = _plan(region)
        dtype: torch.dtype = region.inputs["h"].meta["val"].dtype
        shape = dims.shape(region.inputs["h"])
        limit = solution.attrs["limit"] or 4.0
        cases = [("order 1", 1, 1.0), ("across the limits", 2, 1.7 * limit), ("large", 3, 40.0)]
        return [Probe(name, seed, dims, {"h": _random(shape, seed, dtype, gain)}) for name, seed, gain in cases]

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """One ``swiglu`` call."""
        return [build.call(torch.ops.ascend_deep.swiglu.default, inputs["h"], None, **solution.attrs)]


def halves(view: GraphView) -> dict[fx.Node, list[fx.Node]]:
    """Tensors of which both halves (or even and odd columns) are taken, and the nodes that take them."""
    found: dict[int, tuple[Term, dict[tuple[Any, ...], list[fx.Node]]]] = {}
    for node in view.graph.nodes:
        if op_name(node) not in _PARTS:
            continue
        term = view.terms.term(node)
        if term.op != "Part" or not term.is_float or not term.args[0].nodes:
            continue
        base = term.args[0]
        dim, start, step, length = term.attrs
        width = base.shape[-1]
        if dim != len(base.shape) - 1 or not isinstance(width, int) or length * 2 != width:
            continue
        if (start, step) in ((0, 1), (length, 1), (0, 2), (1, 2)):
            found.setdefault(base.number, (base, {}))[1].setdefault((start, step), []).append(node)
    bases = {}
    for base, parts in found.values():
        length = base.shape[-1] // 2
        for pair in (((0, 1), (length, 1)), ((0, 2), (1, 2))):
            if all(p in parts for p in pair) and base.node is not None:
                bases[base.node] = [n for p in pair for n in parts[p]]
    return bases


def _meeting(view: GraphView, parts: Sequence[fx.Node]) -> list[fx.Node]:
    """Pointwise nodes that depend on both halves and on no other tensor, last first."""
    starts = {view.terms.term(p) for p in parts}
    marks: dict[fx.Node, frozenset[Term]] = {p: frozenset({view.terms.term(p)}) for p in parts}
    pending = list(parts)
    while pending:
        node = pending.pop(0)
        for user in node.users:
            if user in marks or op_name(user) not in POINTWISE:
                continue
            tensors = [n for n in user.all_input_nodes if view.tensor(n) is not None and not _is_constant(n)]
            if all(n in marks for n in tensors):
                marks[user] = frozenset().union(*(marks[n] for n in tensors))
                pending.append(user)
    both = [n for n, mark in marks.items() if mark == starts]
    return sorted(both, key=view.order.__getitem__, reverse=True)


def _is_constant(node: fx.Node) -> bool:
    return op_name(node) in ("aten.scalar_tensor", "aten.full") or node.op == "get_attr"


def _is_function(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(node) in POINTWISE


def _plan(region: Region) -> Dims:
    """Small sizes: the half is 6 wide, leading sizes shrink, equal sizes stay equal."""
    *lead, width = (size(s) for s in region.inputs["h"].meta["val"].shape)
    literals = {width: 2 * _HALF, width // 2: _HALF}
    symbols: dict[str, int] = {}
    small: Iterator[int] = iter(_LEAD * len(lead))
    for s in lead:
        if isinstance(s, int):
            literals.setdefault(s, s if s < 2 else next(small))
        else:
            for name in sorted(str(x) for x in s.free_symbols):
                symbols.setdefault(name, next(small))
    return Dims(symbols, literals)


def _random(shape: Sequence[int], seed: int, dtype: torch.dtype, gain: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * gain).to(dtype)


RECOGNISER = Swiglu()
