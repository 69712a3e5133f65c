"""Recogniser of dense products of bfloat16 operands as ``gemm_bf16``: linear layers and the like.

    F.linear(x, w, bias);   x @ w;   torch.mm, addmm, einsum        bfloat16 operands, bfloat16 result

torch computes them with float32 sums and one rounding, and so does the op. Whether the op's provider is faster depends
on the device, so this recogniser runs where ``policy.py`` says so or where the user asks for it. The op is decided by
running the block (``gemm_family.py``). Left are: other dtypes, batches of products, ``beta``.

Contract: ``ops/gemm_bf16.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ascend_deep.passes import gemm_family
from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.gemm_cut import PRODUCTS, cuts, product_of, unfit
from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.region import Region

__all__ = ["RECOGNISER", "Linear"]


class Linear:
    """See the module."""

    name = "linear"
    op = "gemm_bf16"

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """Products of two bfloat16 tensors."""
        found = []
        for node in view.calls(*PRODUCTS):
            product = product_of(node)
            if product is not None and view.dtype(product.left) == view.dtype(product.right) == torch.bfloat16:
                found.append(node)
        return found

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """The product alone."""
        product = product_of(anchor)
        assert product is not None
        return unfit(view, product) or cuts(view, self.name, product, product.left, product.right)

    def solve(self, region: Region) -> Solution | Refusal:
        """Layout and factor of the product."""
        return gemm_family.solve(region, (torch.bfloat16,))

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """See ``gemm_family.probes``."""
        return gemm_family.probes(region, solution)

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """See ``gemm_family.emit``."""
        return gemm_family.emit(build, region, inputs, solution)


RECOGNISER = Linear()
