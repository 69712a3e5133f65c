"""Recogniser of loops over groups of rows that are multiplied one by one, as one grouped product.

    torch.stack([x[s:e].t() @ dy[s:e] for s, e in bounds])      k_grouped_gemm_bf16: weight gradients of experts
    torch.cat([dy[s:e] @ w[g] for g, (s, e) in enumerate(bounds)])       m_grouped_gemm_bf16: forward, input gradients

as training code writes that computes gradients itself. Bounds are numbers, by slices or ``split``; results are stacked,
joined, or written into a tensor of zeros. Which rows belong to which group is found by running the block: the rows on
which a result depends; then all of it is compared with the products of these rows.

Left are groups with gaps between them that are no alignment, groups in another order than their rows, products that
others read too, and operands that are not bfloat16. ``policy.py`` says where it is worth it.

Contract: ``ops/k_grouped_gemm_bf16.py`` and ``ops/m_grouped_gemm_bf16.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.gemm_cut import PRODUCTS, name_of, product_of
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.normal_form import size
from ascend_deep.passes.region import Dims, Region, slice_region
from ascend_deep.passes.stand_ins import widened

__all__ = ["RECOGNISER", "GroupedLoop"]

_aten = torch.ops.aten
_JOINS = ("aten.stack", "aten.cat")
_WRITES = ("aten.select_scatter", "aten.slice_scatter")
_THROUGH = frozenset(
    f"aten.{name}"
    for name in (
        "view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "permute", "transpose", "t",
        "contiguous", "clone", "alias", "numpy_T", "mT", "slice", "narrow", "select", "split", "split_with_sizes",
        "chunk", "unbind", "tensor_split", "expand", "expand_as", "_to_copy", "to",
    )
) | {"getitem"}  # fmt: skip
_DEEPEST = 24
_ALIGNMENTS = (1, 8, 16, 32, 64, 128, 256, 512)
_MOST_GROUPS = 512
# Elements of the operands and results that a block is run on.
_LARGEST = 1 << 22
_SMALL = 8
# Of float32 sums of exact products, relative to the size of the terms.
_EXACT = 1e-5


class GroupedLoop:
    """See the module."""

    name = "grouped_loop"
    op = "k_grouped_gemm_bf16"

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """Where two products or more are joined, or written into one tensor."""
        return [n for n in view.graph.nodes if len(_products(n)) > 1]

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """From the two tensors whose parts are multiplied to the joined result."""
        products = _products(anchor)
        sides: tuple[dict[fx.Node, None], dict[fx.Node, None]] = ({}, {})
        for node in products:
            product = product_of(node)
            assert product is not None
            if product.added is not None:
                return Refusal("its products add something, which a grouped product does not.", node)
            for side, factor in zip(sides, (product.left, product.right), strict=True):
                side[_base(factor)] = None
        if any(len(side) != 1 for side in sides):
            return Refusal("its products are not of parts of two tensors.", anchor)
        a, b = (next(iter(side)) for side in sides)
        for tensor in (a, b):
            if view.dtype(tensor) != torch.bfloat16:
                return Refusal(f"an operand is {name_of(view.dtype(tensor))}, not bfloat16.", anchor)
        found = slice_region(view, self.name, {"a": a, "b": b}, [anchor])
        if isinstance(found, Refusal):
            return found
        inside = set(found.nodes)
        shared = next((p for p in products if any(u not in inside for u in p.users)), None)
        if shared is not None:
            return Refusal("the product of one group is read elsewhere, too.", shared)
        return [found]

    def solve(self, region: Region) -> Solution | Refusal:
        """Which rows belong to which group, and what is multiplied."""
        output = region.outputs[0]
        shapes = {role: list(node.meta["val"].shape) for role, node in region.inputs.items()}
        dtype: torch.dtype = output.meta["val"].dtype
        if dtype not in (torch.bfloat16, torch.float32):
            return Refusal(f"the result is {name_of(dtype)}, and grouped products give bfloat16 or float32.", output)
        if not all(isinstance(s, int) for shape in shapes.values() for s in shape):
            return Refusal("a size is symbolic, and the bounds of the groups are numbers.", output)
        dims = _plan(region)
        if dims is None:
            return Refusal("the block cannot be run at small sizes.", output)
        ranks = (len(shapes["a"]), len(shapes["b"]))
        if ranks == (2, 2):
            return _along_rows(region, dims, dtype)
        if ranks == (2, 3):
            return _rows_of(region, dims, dtype)
        return Refusal("its operands are not two matrices, nor a matrix and one per group.", output)

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """Three random cases; the bounds are part of the block."""
        dims = _plan(region)
        assert dims is not None
        return [Probe(f"random {seed}", seed, dims, _inputs(region, dims, seed)) for seed in (1, 2, 3)]

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """The ends of the groups as a tensor, and one product."""
        attrs = dict(solution.attrs)
        ends, alignment = attrs.pop("ends"), attrs.pop("alignment")
        a, b = inputs["a"], inputs["b"]
        numbers = [build.call(_aten.new_full.default, a, [], e, dtype=torch.int32) for e in ends]
        layout = build.call(_aten.stack.default, numbers)
        if solution.op == "m_grouped_gemm_bf16":
            options = {"grouping": "psum", "expected_m": None, "zero_padding": True}
            call = torch.ops.ascend_deep.m_grouped_gemm_bf16.default
            return [build.call(call, a, b, layout, alignment=alignment, **options, **attrs)]
        if attrs.pop("turned"):
            a, b = b, a
        call = torch.ops.ascend_deep.k_grouped_gemm_bf16.default
        ks = [e - s for s, e in _bounds(ends, alignment)]
        return [build.call(call, a, b, layout, None, ks=ks, grouping="psum", alignment=alignment, **attrs)]


# -- finding --------------------------------------------------------------------------------------------------------
def _products(node: fx.Node) -> list[fx.Node]:
    """The products that ``node`` joins along its first dim, each behind views and casts; none if it joins others."""
    name = op_name(node)
    if name in _JOINS:
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        items = node.args[0] if dim == 0 else ()
    elif name in _WRITES and not any(op_name(u) in _WRITES and u.args[0] is node for u in node.users):
        items, current = [], node
        while op_name(current) in _WRITES and len(items) <= _MOST_GROUPS:
            items.append(current.args[1])
            current = current.args[0]  # type: ignore[assignment]
    else:
        return []
    found = [_product(item) for item in items if isinstance(item, fx.Node)]  # type: ignore[union-attr]
    products = [p for p in found if p is not None]
    return products if len(products) == len(items) <= _MOST_GROUPS else []  # type: ignore[arg-type]


def _product(node: fx.Node) -> fx.Node | None:
    for _ in range(_DEEPEST):
        if op_name(node) in PRODUCTS:
            return node if product_of(node) is not None else None
        if op_name(node) not in _THROUGH or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    return None


def _base(node: fx.Node) -> fx.Node:
    """What ``node`` is a part of, through views, parts and casts that lose nothing."""
    for _ in range(_DEEPEST):
        parent = node.args[0] if node.args else None
        if op_name(node) not in _THROUGH or not isinstance(parent, fx.Node):
            break
        before, now = parent.meta.get("val"), node.meta.get("val")
        # Of several tensors at once, one is taken next.
        if isinstance(before, Tensor) and isinstance(now, Tensor):
            pair = before.dtype, now.dtype
            if pair[0] != pair[1] and pair != (torch.bfloat16, torch.float32):
                break
        node = parent
    return node


# -- solving --------------------------------------------------------------------------------------------------------
def _plan(region: Region) -> Dims | None:
    """Rows as they are, since the bounds of the groups are numbers; the other sizes small, if that changes no bound."""
    a, b = ([size(s) for s in region.inputs[role].meta["val"].shape] for role in ("a", "b"))
    if not all(isinstance(s, int) for s in (*a, *b)):
        return None
    kept = {a[0], b[0], *(_written(region))}
    if len(b) == 3:
        kept.add(a[0])
    literals: dict[int, int] = {}
    small = iter((_SMALL, _SMALL + 3, _SMALL + 5))
    for s in (*a[1:], *b[1:]):
        if s > _SMALL + 5 and s not in kept and s not in literals:
            literals[s] = next(small)
    dims = Dims({}, literals)
    counts = [torch.Size(dims.shape(n)).numel() for n in (*region.inputs.values(), region.outputs[0])]
    return dims if max(counts) <= _LARGEST else None


def _written(region: Region) -> set[int]:
    """Numbers that stand in the parts of tensors: bounds and sizes of groups, and their ends."""
    found: set[int] = set()
    parts = ("aten.slice", "aten.narrow", "aten.split", "aten.split_with_sizes", "aten.slice_scatter")
    for node in region.nodes:
        if op_name(node) in parts:
            for arg in (*node.args[1:], *node.kwargs.values()):
                found |= {n for n in (arg if isinstance(arg, (list, tuple)) else [arg]) if isinstance(n, int)}
            if isinstance(value := node.meta.get("val"), Tensor):
                found |= {s for s in value.shape[:1] if isinstance(s, int)}
    return found


def _inputs(region: Region, dims: Dims, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        role: torch.randn(dims.shape(node), generator=generator, dtype=torch.float64).to(dtype)
        for role, node in region.inputs.items()
    }


def _bounds(ends: Sequence[int], alignment: int) -> list[tuple[int, int]]:
    """Start and end of every group: a group starts at the end before it, rounded up."""
    starts = [0, *(-(-e // alignment) * alignment for e in ends[:-1])]
    return list(zip(starts, ends, strict=True))


def _ends(rows: Sequence[Tensor], count: int) -> tuple[list[int], int] | None:
    """Ends of groups and their alignment, from the rows of each; ``None``: no alignment makes these groups."""
    spans: list[tuple[int, int] | None] = []
    for found in rows:
        if not found.numel():
            spans.append(None)
            continue
        start, end = int(found[0]), int(found[-1]) + 1
        if found.numel() != end - start:
            return None
        spans.append((start, end))
    for alignment in _ALIGNMENTS:
        ends: list[int] = []
        for span in spans:
            start = -(-ends[-1] // alignment) * alignment if ends else 0
            if span is None:
                ends.append(min(start, count))  # an empty group ends where it starts
            elif span[0] != start:
                break
            else:
                ends.append(span[1])
        else:
            return ends, alignment
    return None


def _agrees(region: Region, dims: Dims, exact: object, dtype: torch.dtype) -> bool:
    """Whether the block, in its own dtypes, is ``exact(a, b)`` of its operands, rounded once at most."""
    tensors = _inputs(region, dims, 97)
    (want,) = region.program.run(dims, tensors)
    a, b = tensors["a"].double(), tensors["b"].double()
    result, terms = exact(a, b), exact(a.abs(), b.abs())  # type: ignore[operator]
    if result.shape != want.shape:
        return False
    allowed = _EXACT * terms + (0.0 if dtype == torch.float32 else torch.finfo(dtype).eps) * result.abs()
    return bool(((want.double() - result).abs() <= allowed).all())


_NO_GROUPS = Refusal(
    "its groups are not runs of rows that follow each other, in the order of the rows and without gaps."
)


def _along_rows(region: Region, dims: Dims, dtype: torch.dtype) -> Solution | Refusal:
    """Sums over the rows of each group: aᵀ b or bᵀ a."""
    output = region.outputs[0]
    tensors = _inputs(region, dims, 96, torch.float64)
    a = tensors["a"].requires_grad_()
    with torch.enable_grad():
        (out,) = widened(region.program).run(dims, {**tensors, "a": a})
        if out.dim() != 3 or not out.requires_grad or a.shape[0] != tensors["b"].shape[0]:
            return Refusal("its results are not one matrix per group.", output)
        slopes = [torch.autograd.grad(out[g].sum(), a, retain_graph=True)[0] for g in range(out.shape[0])]
    found = _ends([(s != 0).any(1).nonzero().flatten() for s in slopes], a.shape[0])
    if found is None:
        return _NO_GROUPS
    ends, alignment = found
    for turned in (False, True):

        def exact(a: Tensor, b: Tensor, turned: bool = turned) -> Tensor:
            left, right = (b, a) if turned else (a, b)
            return torch.stack([left[s:e].t() @ right[s:e] for s, e in _bounds(ends, alignment)])

        if _agrees(region, dims, exact, dtype):
            attrs = {"ends": ends, "alignment": alignment, "turned": turned, "out_dtype": dtype}
            return Solution("k_grouped_gemm_bf16", attrs, ("one product for all groups.",))
    return Refusal("its results are not the sums over the rows of each group.", output)


def _rows_of(region: Region, dims: Dims, dtype: torch.dtype) -> Solution | Refusal:
    """Rows of each group times a matrix of their own."""
    output = region.outputs[0]
    tensors = _inputs(region, dims, 96, torch.float64)
    program, b = widened(region.program), tensors["b"]
    rows = []
    for g in range(b.shape[0]):
        alone = torch.zeros_like(b)
        alone[g] = b[g]
        (out,) = program.run(dims, {"a": tensors["a"], "b": alone})
        if out.dim() != 2 or out.shape[0] != tensors["a"].shape[0]:
            return Refusal("its results are not one row for each row.", output)
        rows.append((out != 0).any(1).nonzero().flatten())
    found = _ends(rows, tensors["a"].shape[0])
    if found is None:
        return _NO_GROUPS
    ends, alignment = found
    for layout in ("nt", "nn"):

        def exact(a: Tensor, b: Tensor, layout: str = layout) -> Tensor:
            right = b.mT if layout == "nt" else b
            result = a.new_zeros(a.shape[0], right.shape[2])
            if right.shape[1] == a.shape[1]:
                for g, (s, e) in enumerate(_bounds(ends, alignment)):
                    result[s:e] = a[s:e] @ right[g]
            return result

        if _agrees(region, dims, exact, dtype):
            attrs = {"ends": ends, "alignment": alignment, "layout": layout, "out_dtype": dtype}
            return Solution("m_grouped_gemm_bf16", attrs, ("one product for all groups.",))
    return Refusal("a row does not meet the matrix of its group alone.", output)


RECOGNISER = GroupedLoop()
