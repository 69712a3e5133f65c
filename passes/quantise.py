"""Recogniser of quantisation to FP8 written by hand, as ``quant_fp8``: the largest of a block, a scale, a rounding.

    s = x.view(T, G, 128).abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448;     q = (x.view(..) / s).to(float8_e4m3fn)

Rows of groups of any usual size, whole rows, blocks of a weight; scales as they are or rounded up to powers of two. The
results are the data and every scale that is read elsewhere, in the shape that the block gives it.

The op is taken only if the block has its lower bound of scales (1e-4 / 448: with another one, or none, blocks of tiny
numbers differ) and no gradient may be asked for ``x``. Where the block divides by the scale and the op multiplies by
its reciprocal, a number that lies halfway between two codes may get the other one; the match says so.

Contract: ``ops/quant_fp8.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ascend_deep.lowering._torch_compat import statically_known_true
from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.fp8_cut import FP8, gradient_reaches
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.normal_form import size
from ascend_deep.passes.region import Dims, Region, slice_region
from ascend_deep.passes.sizes import few, give_product, give_symbols

__all__ = ["ELEMENTWISE", "RECOGNISER", "Quantise", "fewer", "in_blocks", "is_scaled", "like"]

_aten = torch.ops.aten
_GRANS = (128, 32, 64, 16, 256)
# Share of numbers on a tie; operands in bfloat16, whose quotients have few digits, have more.
_TIES = 1e-2
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = frozenset({"aten._to_copy", "aten.to"})
ELEMENTWISE = frozenset(
    f"aten.{n}"
    for n in (
        "mul", "div", "reciprocal", "clamp", "clamp_min", "clamp_max", "abs", "amax", "max", "maximum", "minimum",
        "view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "contiguous",
        "clone", "_to_copy", "to", "log2", "ceil", "exp2", "pow", "neg", "permute", "transpose", "repeat_interleave",
        "linalg_vector_norm", "constant_pad_nd", "slice",
    )
)  # fmt: skip


class Quantise:
    """See the module."""

    name = "quantise"
    op = "quant_fp8"
    checks_gradients = True
    # The rule has these bounds and this rounding; tiny numbers, zeros and scales of all sizes are tried.
    explained = (1e-4, -1e-4, 448.0, -448.0, 1e-4 / 448.0)
    roundings = ("ceil",)

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """Conversions of floats to E4M3 of what was divided or multiplied."""
        return [
            n
            for n in view.graph.nodes
            if op_name(n) in _CASTS and view.dtype(n) == FP8 and view.dtype(n.args[0]) in _FLOATS and is_scaled(n)
        ]

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """From the tensor whose largest numbers give the scale to the data and the scales that others read."""
        roots = _roots(view, anchor)
        if not roots:
            return Refusal("what is converted to FP8 is not scaled by its own largest numbers.", anchor)
        found: Region | Refusal = Refusal("what is converted to FP8 is computed from more than one tensor.", anchor)
        regions = []
        for x in roots:
            alone = slice_region(view, self.name, {"x": x}, [anchor])
            if isinstance(alone, Refusal):
                found = alone
                continue
            inside = set(alone.nodes)
            read = [n for n in alone.nodes if n is not anchor and any(u not in inside for u in n.users)]
            small = [n for n in read if fewer(view, n, x)]
            whole = slice_region(view, self.name, {"x": x}, [*small, anchor])
            if isinstance(whole, Region):
                if gradient_reaches(view, whole):
                    return Refusal("a gradient may be asked for what is quantised, and quant_fp8 has none.", anchor)
                regions.append(whole)
            else:
                found = whole
        return regions or found  # type: ignore[return-value]

    def solve(self, region: Region) -> Solution | Refusal:
        """Block and kind of scale."""
        output = region.outputs[-1]
        if not isinstance(size(region.inputs["x"].meta["val"].shape[-1]), int):
            return Refusal(
                "its rows have a symbolic length, and so have the blocks that they are divided into; quant_fp8 takes "
                "blocks of a fixed size.",
                output,
                "Compile with dynamic=None and mark the tokens alone, torch._dynamo.mark_dynamic(x, 0).",
            )
        refusal = None
        for gran in _grans(region):
            dims = _plan(region, gran)
            if dims is None:
                continue
            for powers in (False, True):
                solution = Solution(
                    "quant_fp8", {"gran": list(gran), "ue8m0": powers}, ("on ties the op may take the other code.",)
                )
                wrong = _differs(region, solution, dims)
                if wrong is None:
                    return solution
                refusal = wrong if wrong.startswith("its") else refusal
        return Refusal(refusal or "it is not the rule of quant_fp8 with blocks of any usual size.", output)

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """Order 1, rows of very different size, and one row."""
        found = []
        for name, seed, rows in (("order 1", 1, 5), ("one row", 2, 1), ("many rows", 3, 9)):
            dims = _plan(region, tuple(solution.attrs["gran"]), rows)
            if dims is not None:
                found.append(Probe(name, seed, dims, {"x": _random(region, dims, seed)}))
        return found

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """One ``quant_fp8`` call; data and scales in the shapes of the block."""
        x = inputs["x"]
        call = build.call(torch.ops.ascend_deep.quant_fp8.default, x, sf_format="fp32", **solution.attrs)
        data, scales = build.item(call, 0), build.item(call, 1)
        *wanted, last = region.outputs
        value: Tensor = region.inputs["x"].meta["val"]
        gran = solution.attrs["gran"]

        def rows(result: fx.Node, node: fx.Node) -> tuple[fx.Node, int]:
            """``result`` with the leading dims in one if ``node`` has them so, and how many dims it has then."""
            if value.dim() < 3 or gran[0] > 1 or not _flat(value, node.meta["val"]):
                return result, value.dim()
            return build.call(_aten.flatten.using_ints, result, 0, -2), 2

        found = []
        for node in wanted:
            result, have = rows(scales, node)
            found.append(like(build, result, node, have))
        result, have = rows(data, last)
        return [*found, in_blocks(build, result, last, have, gran)]


# -- finding --------------------------------------------------------------------------------------------------------
def is_scaled(node: fx.Node) -> bool:
    """True if a division or product by something stands before ``node``, with views and clamps between."""
    for _ in range(12):
        if op_name(node) in ("aten.div", "aten.mul"):
            return len(node.args) > 1 and isinstance(node.args[1], fx.Node)
        if op_name(node) not in ELEMENTWISE or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return False


def _roots(view: GraphView, anchor: fx.Node) -> list[fx.Node]:
    """Tensors that all of ``anchor`` is computed from by elementwise ops, views and maxima, furthest back first."""
    pending, inside = [anchor], set()
    edge: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in inside:
            continue
        if op_name(node) not in ELEMENTWISE and op_name(node) != "getitem":
            if view.tensor(node) is not None and node.op != "get_attr":
                edge.add(node)
            continue
        inside.add(node)
        pending.extend(node.all_input_nodes)
    if len(edge) == 1:
        return [next(iter(edge))]
    return []


def fewer(view: GraphView, node: fx.Node, x: fx.Node) -> bool:
    """Whether ``node`` is float32 with fewer elements than ``x``, as the scales of ``x`` are."""
    value, whole = view.tensor(node), view.tensor(x)
    if value is None or whole is None or value.dtype != torch.float32:
        return False
    return _count(value) < _count(whole)


def _count(value: Tensor) -> int:
    """Number of elements with every symbol at a power of two that every block divides."""
    total = 1
    for s in value.shape:
        expr = size(s)
        total *= expr if isinstance(expr, int) else int(expr.subs(dict.fromkeys(expr.free_symbols, 512)))
    return total


# -- solving --------------------------------------------------------------------------------------------------------
def _grans(region: Region) -> Iterator[tuple[int, int]]:
    shape = [size(s) for s in region.inputs["x"].meta["val"].shape]
    if len(shape) < 2 or not isinstance(shape[-1], int):
        return
    columns = [g for g in _GRANS if shape[-1] >= g]
    yield from ((1, g) for g in [*columns, shape[-1]])
    yield from ((g, h) for g, h in itertools.product(_GRANS, columns) if g == h)


def _plan(region: Region, gran: tuple[int, ...], rows: int = 5) -> Dims | None:
    """Two groups along the columns, rows few (two blocks of them if blocks have several)."""
    shape = [size(s) for s in region.inputs["x"].meta["val"].shape]
    down, along = gran
    literals: dict[int, int] = {1: 1, down: down, along: along}
    columns = shape[-1]
    symbols: dict[str, int] = {}
    groups = -(-columns // along)
    if groups > 2 and columns not in literals and groups not in literals and columns % along == 0:
        literals[columns], literals[groups] = 2 * along, 2
    else:
        literals.setdefault(columns, columns)
        literals.setdefault(groups, groups)
    small = few(rows)
    for s in shape[:-1]:
        if isinstance(s, int):
            blocks = -(-s // down)
            if down > 1 and s % down == 0 and blocks > 2 and s not in literals and blocks not in literals:
                literals[s], literals[blocks] = 2 * down, 2
            else:
                literals.setdefault(s, s if s < 9 or down > 1 else next(small))
                literals.setdefault(blocks, literals[s] if down == 1 else blocks)
        else:
            give_symbols(s, small, symbols)
    if not give_product(shape[:-1], literals):
        return None
    dims = Dims(symbols, literals)
    return dims if torch.Size(dims.shape(region.inputs["x"])).numel() <= 1 << 22 else None


def _random(region: Region, dims: Dims, seed: int) -> Tensor:
    """Rows over many orders of magnitude, none near the lower bound of the scales."""
    generator = torch.Generator().manual_seed(seed)
    shape = dims.shape(region.inputs["x"])
    x = torch.randn(shape, generator=generator, dtype=torch.float32)
    x = x * (torch.rand((*shape[:-1], 1), generator=generator, dtype=torch.float32) * 9 - 3).exp()
    return x.to(region.inputs["x"].meta["val"].dtype)


def _differs(region: Region, solution: Solution, dims: Dims) -> str | None:
    """Why the block is another function than the op, or ``None``. A sentence that begins with "its" is for people."""
    from ascend_deep import ops

    gran, powers = solution.attrs["gran"], solution.attrs["ue8m0"]
    for seed, gain in ((71, 1.0), (72, 1.0), (73, 1e-6), (74, 0.0)):
        x = (_random(region, dims, seed).float() * gain).to(region.inputs["x"].meta["val"].dtype)
        try:
            *scales, data = region.program.run(dims, {"x": x})
        except Exception as error:
            return f"the block did not run at small sizes: {type(error).__name__}."
        wanted, sf = ops.quant_fp8(x, gran=gran, ue8m0=powers)
        if data.numel() != wanted.numel() or any(s.numel() % sf.numel() for s in scales):
            return "other sizes"
        got = data.reshape(wanted.shape).float()
        apart = (got - wanted.float()).abs() > 0
        step = wanted.float().abs() * 0.13 + 2.0**-9
        near = bool(((got - wanted.float()).abs() <= step).all()) and float(apart.float().mean()) <= _TIES
        near = near and all(_close(s, sf) for s in scales)
        if near:
            continue
        if gain != 1.0:
            return "its scales have another lower bound than those of quant_fp8, which is 1e-4 / 448."
        return "other numbers"
    return None


def _close(scale: Tensor, sf: Tensor) -> bool:
    """The block's scale, in whatever shape, equals the op's."""
    return scale.numel() == sf.numel() and torch.allclose(scale.reshape(sf.shape), sf, rtol=3e-7, atol=0.0)


# -- writing --------------------------------------------------------------------------------------------------------
def _flat(x: Tensor, out: Tensor) -> bool:
    """Whether ``out`` has all rows of ``x`` in its first dim."""
    rows: Any = 1
    for s in x.shape[:-1]:
        rows = rows * s
    return bool(statically_known_true(out.shape[0] == rows)) and not statically_known_true(out.shape[0] == x.shape[0])


def like(build: Builder, scales: fx.Node, node: fx.Node, have: int) -> fx.Node:
    """The scales (``have`` dims) with the ones that the block's have in their shape."""
    shape = list(node.meta["val"].shape)
    ones = [i for i, s in enumerate(shape) if isinstance(s, int) and s == 1]
    missing = len(shape) - have
    for i in ones[len(ones) - missing :] if missing > 0 else []:
        scales = build.call(_aten.unsqueeze.default, scales, i)
    return scales


def in_blocks(build: Builder, data: fx.Node, node: fx.Node, have: int, gran: Sequence[int]) -> fx.Node:
    """The data with a dim for the columns of a block, and one for its rows, if the block has them."""
    missing = node.meta["val"].dim() - have
    if missing > 0:
        data = build.call(_aten.unflatten.int, data, -1, [-1, gran[1]])
    if missing > 1:
        data = build.call(_aten.unflatten.int, data, -3, [-1, gran[0]])
    return data


RECOGNISER = Quantise()
