"""Recogniser of products of operands that were converted from bfloat16 to float32 just before, as ``gemm_bf16``.

    F.linear(x.float(), w.float());   x.float() @ w.float().t();   torch.addmm(bias, x.float(), w.float(), alpha=...)

as routers, indexers and norms are written. A product of two bfloat16 numbers is exact in float32, so the op, which sums
in float32 and returns float32, adds the same products in another order, and reads half the bytes.

Covers linear, mm, matmul, addmm, bmm and einsum; views before and after the conversion; a bias; a factor; a final
rounding to bfloat16; and batches of products, as ``einsum_bf16`` (``gemm_batched.py``). Left are: operands that are not
both bfloat16 before the conversion (rounding one to bfloat16 would change the result), ``beta``, batches that share a
matrix. The op is decided by running the block (``gemm_family.py``); whether it is worth it, by the device
(``policy.py``).

Contracts: ``ops/gemm_bf16.py``, ``ops/einsum_bf16.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ascend_deep.passes import gemm_batched, gemm_family
from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.gemm_cut import PRODUCTS, cuts, is_batch, name_of, product_of, source_of, unfit
from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.region import Region

__all__ = ["RECOGNISER", "UpcastMatmul"]

_HALF = (torch.bfloat16, torch.float16)


class UpcastMatmul:
    """See the module."""

    name = "upcast_matmul"
    op = "gemm_bf16"

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """float32 products with an operand that was converted to float32."""
        found = []
        for node in view.calls(*PRODUCTS):
            product = product_of(node)
            if product is not None and view.dtype(node) == torch.float32:
                sources = (source_of(view, product.left), source_of(view, product.right))
                if any(view.dtype(s) in _HALF for s in sources):
                    found.append(node)
        return found

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """From the operands before their conversion to the product, with a final rounding first."""
        product = product_of(anchor)
        assert product is not None
        batched = is_batch(view, product) and product.added is None
        refusal = None if batched else unfit(view, product)
        if refusal is not None:
            return refusal
        sources = [source_of(view, operand) for operand in (product.left, product.right)]
        kinds = [view.dtype(s) for s in sources]
        if torch.float16 in kinds:
            return Refusal(
                "an operand is converted from float16, and gemm_bf16 takes bfloat16, which has fewer digits.", anchor
            )
        if kinds[0] != kinds[1]:
            which, kind = ("first", kinds[0]) if kinds[0] != torch.bfloat16 else ("second", kinds[1])
            return Refusal(
                f"the {which} operand is {name_of(kind)} itself and not converted from bfloat16; rounding it would "
                "change the result.",
                anchor,
            )
        return cuts(view, self.name, product, sources[0], sources[1], {"batched": batched})

    def solve(self, region: Region) -> Solution | Refusal:
        """Layout and factor of the product."""
        if region.hints["batched"]:
            return gemm_batched.solve(region)
        return gemm_family.solve(region, (torch.float32, torch.bfloat16))

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """See ``gemm_family.probes``."""
        return gemm_family.probes(region, solution)

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """See ``gemm_family.emit``."""
        if region.hints["batched"]:
            return gemm_batched.emit(build, region, inputs, solution)
        return gemm_family.emit(build, region, inputs, solution)


RECOGNISER = UpcastMatmul()
