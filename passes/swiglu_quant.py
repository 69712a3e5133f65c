"""Recogniser of a gated activation that is quantised to FP8 at once, as ``swiglu_quant``.

    gate, up = h.chunk(2, -1);    y = silu(gate) * up                          [* w[:, None]]
    s = y.float().view(M, G, 128).abs().amax(-1) / 448, or that as a power of two;    q = (y / s).to(float8_e4m3fn)

as FP8 experts and FP8 MLPs write it between their two products: every activation of ``swiglu``, groups of any usual
size, scales as they are or powers of two, a weight per row if there is one. What is computed is found by running the
block: in float64, where nothing is rounded, data times scale is the activation itself; in its own dtypes, where data
and scales must be those of the op.

The op does not round between activation and scale, and a block in half precision does, so a number may get the
neighbouring code there; the match says so. Left are: places where a gradient may be asked for, activations that others
read too (``swiglu`` and ``quantise`` take such a block apart), another lower bound of the scales than 1e-4 / 448, gate
and up that are two tensors.

Contract: ``ops/swiglu_quant.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.activation_family import Activated, match, members, scales
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.fp8_cut import FP8, gradient_reaches
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.normal_form import size
from ascend_deep.passes.quantise import ELEMENTWISE, fewer, in_blocks, is_scaled, like
from ascend_deep.passes.region import Dims, Region, slice_region
from ascend_deep.passes.sizes import few, give_leading, give_product
from ascend_deep.passes.stand_ins import widened
from ascend_deep.passes.swiglu import POINTWISE, halves

__all__ = ["RECOGNISER", "SwigluQuant"]

_aten = torch.ops.aten
_GROUPS = (128, 32, 64, 16, 256)
_CASTS = frozenset({"aten._to_copy", "aten.to"})
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PARTS = frozenset(
    {"getitem"} | {f"aten.{n}" for n in ("chunk", "split", "split_with_sizes", "unbind", "tensor_split", "narrow")}
)
_WALKED = ELEMENTWISE | POINTWISE | _PARTS
# Numbers that a block is run on, as wide as in the model and narrower.
_LARGEST = (1 << 17, 1 << 20)
# Share of numbers that may get a neighbouring code: ties in float32; in half precision, numbers that it rounds across
# the border between two codes, which are 2^-3 apart where it has steps of 2^-8.
_SHARE = {torch.float32: 1e-2, torch.bfloat16: 0.2, torch.float16: 0.05}
# Distance of two neighbouring codes, and what activations lose in half precision where they are steep.
_STEP = {torch.float32: 0.14, torch.bfloat16: 0.26, torch.float16: 0.2}
_SCALE = {torch.float32: 3e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


class SwigluQuant:
    """See the module."""

    name = "swiglu_quant"
    op = "swiglu_quant"
    checks_gradients = True
    # As in quantise: the rule has these bounds and this rounding, and they are tried.
    explained = (1e-4, -1e-4, 448.0, -448.0, 1e-4 / 448.0)
    roundings = ("ceil",)

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """Conversions to E4M3 of what was scaled and comes from both halves of a tensor."""
        casts = [
            n
            for n in view.graph.nodes
            if op_name(n) in _CASTS and view.dtype(n) == FP8 and view.dtype(n.args[0]) in _FLOATS and is_scaled(n)
        ]
        bases = halves(view) if casts else {}
        return [n for n in casts if any(e in bases for e in _edges(view, n, bases))]

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """From the tensor with both halves to the data and the scales that others read."""
        bases = halves(view)
        edges = _edges(view, anchor, bases)
        found = [e for e in edges if e in bases]
        rest = [e for e in edges if e not in bases]
        if len(found) != 1 or len(rest) > 1:
            return Refusal("what is quantised is computed from more than the two halves of one tensor.", anchor)
        inputs = {"h": found[0]}
        if rest:
            if not _per_row(view, rest[0], found[0]):
                return Refusal("it is also computed from another tensor, which is no weight per row.", anchor)
            if view.dtype(rest[0]) not in (torch.float32, view.dtype(found[0])):
                return Refusal("the weights of the rows are neither float32 nor of the dtype of the halves.", anchor)
            inputs["row_weight"] = rest[0]
        alone = slice_region(view, self.name, inputs, [anchor])
        if isinstance(alone, Refusal):
            return alone
        inside = set(alone.nodes)
        read = [n for n in alone.nodes if n is not anchor and any(u not in inside for u in n.users)]
        small = [n for n in read if fewer(view, n, anchor)]
        kept = [n for n in read if n not in small and view.tensor(n) is not None and _after_both(n, inside, bases)]
        if kept:
            return Refusal("the activation is read elsewhere too, so it is computed and quantised apart.", anchor)
        whole = slice_region(view, self.name, inputs, [*small, anchor])
        if isinstance(whole, Region) and gradient_reaches(view, whole):
            return Refusal("a gradient may be asked for what is quantised, and swiglu_quant has none.", anchor)
        return [whole] if isinstance(whole, Region) else whole

    def solve(self, region: Region) -> Solution | Refusal:
        """Activation, group and kind of scale."""
        output = region.outputs[-1]
        if len(region.outputs) < 2:
            return Refusal("its scales are not read by anything, so they are not known.", output)
        width = size(region.inputs["h"].meta["val"].shape[-1])
        if not isinstance(width, int):
            return Refusal("the width of the halves is symbolic.", output)
        refusal = "it is not the rule of quant_fp8 with groups of any usual size."
        for group in [g for g in (*_GROUPS, width // 2) if width // 2 % g == 0]:
            dims = _plan(region, group)
            if dims is None:
                continue
            member = _activation(region, dims, group)
            if isinstance(member, Refusal):
                return member
            if member is None:
                continue
            for powers in (False, True):
                attrs = {**member.attrs(), "gran_k": group, "ue8m0": powers}
                wrong = _differs(region, attrs, dims)
                if wrong is None:
                    return Solution("swiglu_quant", attrs, _notes(region))
                refusal = wrong if wrong.startswith("its") else refusal
        return Refusal(refusal, output)

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """Order 1, across the limits, one row, rows of very different size."""
        limit = solution.attrs["limit"] or 4.0
        found = []
        for name, seed, rows, gain in (
            ("order 1", 1, 5, 1.0),
            ("one row", 2, 1, 1.0),
            ("across the limits", 3, 7, 1.7 * limit),
            ("rows of very different size", 4, 9, 0.0),
        ):
            dims = _plan(region, int(solution.attrs["gran_k"]), rows)
            if dims is not None:
                found.append(Probe(name, seed, dims, _inputs(region, dims, seed, gain)))
        return found

    def canonical(self, region: Region, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The numbers that data and scales stand for: next to a power of two, a rounding doubles a scale and halves its
        data. The scales themselves are compared by ``solve``.

        Positive and negative numbers apart, each raised by some steps of the least code, of which one is allowed.
        """
        *found, data = results
        canonical = []
        for s in found:
            numbers = data.float().reshape(s.numel(), -1) * s.reshape(-1, 1)
            raised = numbers.abs().amax(1, keepdim=True) * (2.0**-5 / 448)
            canonical += [numbers.clamp(min=0) + raised, (-numbers).clamp(min=0) + raised]
        return tuple(canonical)

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """One ``swiglu_quant`` call; data and scales in the shapes of the block."""
        h = inputs["h"]
        have = region.inputs["h"].meta["val"].dim()
        weight = inputs.get("row_weight")
        if weight is not None and region.inputs["row_weight"].meta["val"].dim() == have:
            weight = build.call(_aten.squeeze.dim, weight, -1)
        call = build.call(torch.ops.ascend_deep.swiglu_quant.default, h, weight, sf_format="fp32", **solution.attrs)
        data, sf = build.item(call, 0), build.item(call, 1)
        *wanted, last = region.outputs
        blocks = in_blocks(build, data, last, have, (1, int(solution.attrs["gran_k"])))
        return [*(like(build, sf, node, have) for node in wanted), blocks]


# -- finding --------------------------------------------------------------------------------------------------------
def _edges(view: GraphView, anchor: fx.Node, bases: Mapping[fx.Node, object]) -> list[fx.Node]:
    """Tensors that ``anchor`` is computed from by elementwise ops, halves and maxima, nearest first."""
    pending: list[fx.Node] = [anchor]
    inside: set[fx.Node] = set()
    edge: dict[fx.Node, None] = {}
    while pending:
        node = pending.pop(0)
        if node in inside or node in edge:
            continue
        if node in bases or op_name(node) not in _WALKED:
            if node.op != "get_attr" and _is_tensor(view, node):
                edge[node] = None
            continue
        inside.add(node)
        pending.extend(node.all_input_nodes)
    return list(edge)


def _is_tensor(view: GraphView, node: fx.Node) -> bool:
    """A tensor that is no constant of the graph; a size is none."""
    return view.tensor(node) is not None and op_name(node) not in ("aten.scalar_tensor", "aten.full")


def _per_row(view: GraphView, weight: fx.Node, h: fx.Node) -> bool:
    """Whether ``weight`` has one number for each row of ``h``."""
    lead, have = [size(s) for s in view.shape(h)[:-1]], [size(s) for s in view.shape(weight)]
    return have in (lead, [*lead, 1])


def _after_both(node: fx.Node, inside: set[fx.Node], bases: Mapping[fx.Node, object]) -> bool:
    """Whether ``node`` is more than a part of the tensor, which others may well read."""
    return op_name(node) not in _PARTS and op_name(node) != "aten.slice" and node not in bases and node in inside


# -- solving --------------------------------------------------------------------------------------------------------
def _plan(region: Region, group: int, rows: int = 5) -> Dims | None:
    """Few rows; columns as they are, or four groups of them where a number of rows is also one of columns."""
    *lead, width = (size(s) for s in region.inputs["h"].meta["val"].shape)
    half = width // 2
    groups = half // group
    whole = {width: width, half: half, groups: groups, group: group, 1: 1}
    narrow = {width: 4 * group, half: 2 * group, groups: 2, group: group, 1: 1}
    plans = [whole, whole]
    if groups > 2 and len({width, half, groups, group, 1}) == 5:
        plans[1] = narrow
    for columns, largest in zip(plans, _LARGEST, strict=True):
        literals = dict(columns)
        symbols: dict[str, int] = {}
        give_leading(lead, few(rows), literals, symbols)
        if not give_product(lead, literals):
            continue
        dims = Dims(symbols, literals)
        if torch.Size(dims.shape(region.inputs["h"])).numel() <= largest:
            return dims
    return None


def _inputs(region: Region, dims: Dims, seed: int, gain: float, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Random halves and weights per row; with a gain of 0 rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for role, node in region.inputs.items():
        value = torch.randn(dims.shape(node), generator=generator, dtype=torch.float64)
        if role == "h" and gain:
            value = value * gain
        elif role == "h":
            spread = torch.rand((*value.shape[:-1], 1), generator=generator, dtype=torch.float64)
            value = value * (spread * 4 - 2).exp()
        else:
            value = value.abs() + 0.3
        tensors[role] = value.to(dtype or node.meta["val"].dtype)
    return tensors


def _activation(region: Region, dims: Dims, group: int) -> Activated | Refusal | None:
    """The member of the table that the region quantises; ``None`` if data and scales do not fit groups of this size."""
    constants = region.constants()
    program = widened(region.program)
    cases, swapped = [], []
    for i, gain in enumerate(scales(constants)):
        tensors = _inputs(region, dims, 80 + i, gain, torch.float64)
        try:
            *found, data = program.run(dims, tensors)
        except Exception as error:  # any op may refuse these sizes
            return Refusal(f"the block did not run at small sizes: {type(error).__name__}.", region.outputs[-1])
        h = tensors["h"]
        wanted = (*h.shape[:-1], h.shape[-1] // 2)
        if data.numel() != h.numel() // 2 or any(s.numel() * group != data.numel() for s in found):
            return None
        numbers = (data.reshape(-1, group) * found[0].reshape(-1, 1)).reshape(wanted)
        if "row_weight" in tensors:
            numbers = numbers / tensors["row_weight"].reshape(*wanted[:-1], 1)
        # Some rows of each case are enough to tell members apart; there are dozens of them.
        h, numbers = (x.reshape(-1, x.shape[-1])[:6] for x in (h, numbers))
        cases.append((h, numbers))
        swapped.append((torch.cat(h.chunk(2, dim=-1)[::-1], dim=-1), numbers))
    family = members(constants, gated=True)
    fits = match(family, cases, gated=True)
    if fits:
        return fits[0]
    if match(family, swapped, gated=True):
        return Refusal(
            "the activation is applied to the second half of the tensor, and swiglu_quant applies it to the first.",
            region.outputs[-1],
        )
    return Refusal("no activation of the table computes what is quantised.", region.outputs[-1])


def _differs(region: Region, attrs: Mapping[str, object], dims: Dims) -> str | None:
    """Why the block is another function than the op, or ``None``. A sentence that begins with "its" is for people."""
    from ascend_deep import ops

    dtype: torch.dtype = region.inputs["h"].meta["val"].dtype
    for seed, gain in ((91, 1.0), (92, 0.0), (93, 1e-6)):
        tensors = _inputs(region, dims, seed, gain)
        *found, data = region.program.run(dims, tensors)
        weight = tensors.get("row_weight")
        if weight is not None:
            weight = weight.reshape(tensors["h"].shape[:-1])
        wanted, sf = ops.swiglu_quant(tensors["h"], weight, **attrs)  # type: ignore[arg-type]
        if data.numel() != wanted.numel() or any(s.numel() != sf.numel() for s in found):
            return "other sizes"
        got = data.reshape(wanted.shape).float()
        ratio = torch.stack([s.reshape(sf.shape) / sf for s in found])
        same = (ratio - 1).abs() <= _SCALE[dtype]
        if attrs["ue8m0"] and dtype != torch.float32:  # next to a power of two a rounding may double the scale
            flipped = (ratio == 2) | (ratio == 0.5)
            same = same | flipped if float(flipped.float().mean()) <= 0.1 else same
        numbers, exact = (
            (x.reshape(sf.numel(), -1) * s.reshape(-1, 1)).reshape(-1)
            for x, s in ((got, found[0]), (wanted.float(), sf))
        )
        step = _STEP[dtype] * exact.abs() + sf.max() * 2.0**-8
        apart = float((got != wanted.float()).float().mean())
        if (
            bool(same.all())
            and bool(((numbers - exact).abs() <= step).all())
            and apart <= _SHARE[dtype] + 0.1 * float((~(ratio == 1)).float().mean() if attrs["ue8m0"] else 0.0)
        ):
            continue
        if gain == 1e-6:
            return "its scales have another lower bound than those of swiglu_quant, which is 1e-4 / 448."
        return "other numbers"
    return None


def _notes(region: Region) -> tuple[str, ...]:
    if region.inputs["h"].meta["val"].dtype == torch.float32:
        return ("on ties the op may take the other code.",)
    return ("the op does not round the activation before it is quantised, so a number may get the neighbouring code.",)


RECOGNISER = SwigluQuant()
