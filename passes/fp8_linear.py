"""Recogniser of products of FP8 operands that are scaled back to floats first, as ``gemm_scaled``.

    (xq.float().view(T, G, 128) * sx[..., None]).view(T, K) @ (wq.float() * sw.repeat_interleave(...)).t()
    (xq.float() @ wq.float().t()) * sx * sw.t();     torch._scaled_mm(xq, wq.t(), sx, sw.t())

as hand-written FP8 layers and references compute. Blocks of any of the usual sizes, one scale per row or for all,
scales before or after the product, a bias, a final rounding to bfloat16. How the activations were quantised does not
matter: that stays as it is written. Left are: products with one FP8 factor only; operands that are rounded to bfloat16
once scaled; inverse scales that are divided by; and places where a gradient may be asked for, which ``gemm_scaled`` has
none of.

``scaled_mm`` is the same for ``torch._scaled_mm``; ``policy.py`` says where that is worth it.

Contract: ``ops/gemm_scaled.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from ascend_deep.passes import fp8_cut, fp8_family
from ascend_deep.passes._types import Probe, Refusal, Solution
from ascend_deep.passes.builder import Builder
from ascend_deep.passes.gemm_cut import PRODUCTS
from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.region import Region

__all__ = ["RECOGNISER", "SCALED_MM", "Fp8Linear"]


class Fp8Linear:
    """See the module.

    Args:
        name: of the recogniser.
        products: ops that count as products.
    """

    op = "gemm_scaled"
    checks_gradients = True

    def __init__(self, name: str, products: tuple[str, ...]) -> None:
        self.name = name
        self._products = products

    def find(self, view: GraphView) -> Sequence[fx.Node]:
        """Products with FP8 data behind a factor."""
        return list(fp8_cut.products(view, self._products))

    def cut(self, view: GraphView, anchor: fx.Node) -> Sequence[Region] | Refusal:
        """From data and scales to the product, with scales, rounding and bias behind it."""
        found = fp8_cut.cut(view, self.name, anchor)
        if not isinstance(found, Refusal) and any(fp8_cut.gradient_reaches(view, r) for r in found):
            return Refusal(
                "a gradient may be asked for what this block reads, and gemm_scaled has none.",
                anchor,
                "Compile it under torch.no_grad(), or use ascend_deep.ops.fp8_linear, which has one.",
            )
        return found

    def solve(self, region: Region) -> Solution | Refusal:
        """Blocks of the scales and layout."""
        return fp8_family.solve(region)

    def probes(self, region: Region, solution: Solution) -> Sequence[Probe]:
        """See ``fp8_family.probes``."""
        return fp8_family.probes(region, solution)

    def emit(
        self, build: Builder, region: Region, inputs: Mapping[str, fx.Node], solution: Solution
    ) -> Sequence[fx.Node]:
        """See ``fp8_family.emit``."""
        return fp8_family.emit(build, region, inputs, solution)


RECOGNISER = Fp8Linear("fp8_linear", PRODUCTS)
SCALED_MM = Fp8Linear("scaled_mm", (fp8_cut.SCALED_MM,))
