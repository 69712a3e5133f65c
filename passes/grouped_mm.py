"""Recogniser of single grouped products as ``m_grouped_gemm_bf16`` and ``k_grouped_gemm_bf16``.

    torch._grouped_mm(a, b, offs=ends);   transformers::grouped_mm_fallback(a, b, ends)    a [S, K], b [E, K, N] bf16
    torch._grouped_mm(x.t(), dy, offs=ends)       x [S, M], dy [S, N]: sums over the rows of each group, [E, M, N]

The second is the weight gradient of the first, as training code writes it that computes gradients itself. Those that
belong to experts are part of ``moe_experts`` by then; what is left are grouped adapters, projections per group and the
like. Group g has the rows from ``ends[g-1]`` to ``ends[g]``, which is the ops' psum layout with an alignment of 1. Rows
behind the last end are not written by ``_grouped_mm``; the op makes them zero.

Left are: other dtypes, a bias, products grouped along columns or in batches (3-D operands on the left), and blocks in
which the ends are not int32 or int64. ``policy.py`` says where it is worth it.

Contract: ``ops/m_grouped_gemm_bf16.py``, ``ops/k_grouped_gemm_bf16.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.gemm_cut import name_of
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.normal_form import size
from ascend_deep.passes.region import Dims, Region, slice_region

__all__ = ["RECOGNISER", "GroupedMm"]

_NAMES = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
_GROUPS, _ROWS, _K, _N = 4, 9, 16, 8
_SUMMED = 24  # rows that are summed over: torch wants rows of memory in multiples of 16 bytes
_EXACT = 1e-5


class GroupedMm:
    """See the module."""

    name = "grouped_mm"
    op = "m_grouped_gemm_bf16"

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """Grouped products of bfloat16."""
        return [n for n in view.calls(*_NAMES) if view.dtype(n.args[0]) == torch.bfloat16]

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """The product alone. It is over the rows of groups if both operands are matrices."""
        a, b, ends = (_argument(anchor, i, name) for i, name in enumerate(("self", "mat2", "offs")))
        bias = _argument(anchor, 3, "bias") if op_name(anchor) == _NAMES[0] else None
        if not all(isinstance(n, fx.Node) for n in (a, b, ends)):
            return Refusal("it has no ends of groups, so it is a batch of products.", anchor)
        if len(view.shape(a)) != 2:
            return Refusal("the groups are not the rows of a matrix, each with a matrix of its own.", anchor)
        if bias is not None:
            return Refusal("it adds a bias, which grouped products do not.", anchor)
        if view.dtype(ends) not in (torch.int32, torch.int64):
            return Refusal(f"the ends of the groups are {name_of(view.dtype(ends))}, not int32 or int64.", anchor)
        found = slice_region(view, self.name, {"a": a, "b": b, "ends": ends}, [anchor])
        return found if isinstance(found, Refusal) else [found]

    def solve(self, region: Region) -> Solution | Refusal:
        """Check that rows of group g meet matrix g."""
        output = region.outputs[0]
        dtype: torch.dtype = output.meta["val"].dtype
        if dtype not in (torch.bfloat16, torch.float32):
            return Refusal(f"the product gives {name_of(dtype)}, not bfloat16 or float32.", output)
        dims, tensors = _case(region, 61, (2, 2, 7, 9))
        (want,) = region.program.run(dims, tensors)
        a, b = tensors["a"].double(), tensors["b"].double()
        start = 0
        if b.dim() == 2:
            for g, end in enumerate(tensors["ends"].tolist()):
                exact, terms = a[:, start:end] @ b[start:end], a[:, start:end].abs() @ b[start:end].abs()
                allowed = _EXACT * terms + torch.finfo(dtype).eps * exact.abs()
                if not bool(((want[g].double() - exact).abs() <= allowed).all()):
                    return Refusal("a result is not the sum over the rows of its group alone.", output)
                start = end
            return Solution("k_grouped_gemm_bf16", {"out_dtype": dtype})
        for g, end in enumerate(tensors["ends"].tolist()):
            exact, terms = a[start:end] @ b[g], a[start:end].abs() @ b[g].abs()
            allowed = _EXACT * terms + torch.finfo(dtype).eps * exact.abs()
            if not bool(((want[start:end].double() - exact).abs() <= allowed).all()):
                return Refusal("a row does not meet the matrix of its group alone.", output)
            start = end
        notes = ("rows behind the last group are zero, where torch leaves them unwritten.",)
        return Solution("m_grouped_gemm_bf16", {"out_dtype": dtype}, notes)

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """Uneven groups, empty ones, all rows in one."""
        cases = (("uneven", 1, (2, 2, 7, 9)), ("one group", 2, (0, 9, 9, 9)), ("the last group", 3, (0, 0, 0, 9)))
        return [Probe(name, seed, *_case(region, seed, ends)) for name, seed, ends in cases]

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """One call of the op."""
        if solution.op == "k_grouped_gemm_bf16":
            rows = build.call(torch.ops.aten.t.default, inputs["a"])
            target = torch.ops.ascend_deep.k_grouped_gemm_bf16.default
            options = {"ks": None, "grouping": "psum", "alignment": 1}
            return [build.call(target, rows, inputs["b"], inputs["ends"], None, **options, **solution.attrs)]
        call = build.call(
            torch.ops.ascend_deep.m_grouped_gemm_bf16.default,
            inputs["a"],
            inputs["b"],
            inputs["ends"],
            layout="nn",
            grouping="psum",
            alignment=1,
            expected_m=None,
            zero_padding=True,
            **solution.attrs,
        )
        return [call]


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _case(region: Region, seed: int, ends: Sequence[int]) -> tuple[Dims, dict[str, Tensor]]:
    """Small sizes and operands: 9 rows in 4 groups with these ends."""
    a, b = ([size(s) for s in region.inputs[role].meta["val"].shape] for role in ("a", "b"))
    sizes: list[tuple[int, ...]] = [(_ROWS, _K), (_GROUPS, _K, _N)]
    if len(b) == 2:
        groups = size(region.inputs["ends"].meta["val"].shape[0])
        dims = Dims.plan([(groups, _GROUPS), (a[0], _K), (b[1], _N), (b[0], _SUMMED)])
        sizes = [(_K, _SUMMED), (_SUMMED, _N)]
    else:
        dims = Dims.plan([(b[0], _GROUPS), (a[1], _K), (b[2], _N), (a[0], _ROWS)])
    if dims is None:  # sizes that coincide: the operands are small whatever they are, as nothing else has a size
        dims = Dims()
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(s, generator=generator).to(torch.bfloat16) for s in sizes)
    kind = region.inputs["ends"].meta["val"].dtype
    return dims, {"a": left, "b": right, "ends": torch.tensor(ends, dtype=kind)}


RECOGNISER = GroupedMm()
