"""``gemm_scaled``: the product of two quantised matrices whose scales belong to blocks.

    D = C + alpha * (A sfa)(B sfb)^T        sums in f32, D rounded once

Operands are FP8 or FP4, each on its own; ``ops/_sf.py`` has the formats. ``layout`` tells how they are stored: first
letter n = A [M, K], t = A [K, M]; second letter n = B [K, N], t = B [N, K]. The scales do not follow it: sfa is always
[ceil(M / gran_m), ceil(K / gran_k)], sfb [ceil(N / gran_n), ceil(K / gran_k)], or packed. FP4 pairs lie along the last
dimension of the tensor. Contract: A.1, A.4, B.2 and F of the DeepGEMM operator list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ascend_deep.native.calls import GemmScaled, GemmScaledAcc, GemmScaledFp8Out, GemmScaledOut, takes
from ascend_deep.ops import _check, _gemm, _sf
from ascend_deep.ops._gemm_scaled_samples import gemm_scaled_samples
from ascend_deep.ops._op import OpDef, Tolerance, call

__all__ = [
    "GEMM_SCALED",
    "NO_BACKWARD",
    "SCALED_TOLERANCE",
    "Scaled",
    "check_operands",
    "decoded",
    "gemm_scaled",
    "product",
    "sizes",
]

Scaled: TypeAlias = "GemmScaled | GemmScaledOut | GemmScaledAcc | GemmScaledFp8Out"
"""A call of one of the ops that multiply two quantised matrices."""


def gemm_scaled(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    c: Tensor | None = None,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    layout: str = "nt",
    out_dtype: torch.dtype | None = None,
    alpha: float | None = None,
) -> Tensor:
    """D = C + alpha * A B^T of quantised operands; see the module.

    Args:
        a, b: float8_e4m3fn, or FP4 pairs in int8, uint8 or float4_e2m1fn_x2; stored as ``layout`` says, any strides.
        sfa, sfb: f32 scales [ceil(MN / gran_mn), ceil(K / gran_k)], or packed int32, int16; any strides.
        c: [M, N] in the dtype of the result, or ``None``: zero.
        recipe_a, recipe_b: (gran_mn, gran_k) of the scales, such as (1, 128) and (128, 128), or (1, 32) twice.
        layout: ``"nt"``, ``"nn"``, ``"tn"`` or ``"tt"``.
        out_dtype: bf16 or f32; ``None``: the dtype of ``c``, without it bf16.
        alpha: factor of the product; ``None``: 1.

    Returns:
        [M, N], contiguous. Not differentiable; ``fp8_linear`` is.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call(
        "gemm_scaled",
        a,
        sfa,
        b,
        sfb,
        c,
        recipe_a=recipe_a,
        recipe_b=recipe_b,
        layout=layout,
        out_dtype=out_dtype,
        alpha=alpha,
    )


def sizes(a: Tensor, b: Tensor, layout: str) -> tuple[Any, Any, Any, Any]:
    """M, K of A, N, K of B; leading dimensions are left out."""
    m, k = a.shape[-2], _sf.last_size(a)
    n, k_b = b.shape[-2], _sf.last_size(b)
    if layout[0] == "t":
        m, k = k, m
    if layout[1] == "n":
        n, k_b = k_b, n
    return m, k, n, k_b


def check_operands(op: str, x: Scaled) -> tuple[Any, Any]:
    """Dtypes, ranks, sizes and scales of two matrices; returns M and N."""
    a, b, layout = x.a, x.b, x.layout
    _check.choice(op, "layout", layout, _gemm.LAYOUTS)
    for name, operand in (("a", a), ("b", b)):
        _check.dtypes(op, name, operand, _sf.QUANTISED)
    _check.rank(op, "a", a, "[K, M]" if layout[0] == "t" else "[M, K]", 2)
    _check.rank(op, "b", b, "[N, K]" if layout[1] == "t" else "[K, N]", 2)
    m, k, n, k_b = sizes(a, b, layout)
    _check.size(op, f"K of b in layout {layout!r}", k_b, k, "K of a")
    _sf.check_sf(op, "sfa", x.sfa, (), m, k, x.recipe_a, "recipe_a")
    _sf.check_sf(op, "sfb", x.sfb, (), n, k, x.recipe_b, "recipe_b")
    _check.same_device(op, "a", a, sfa=x.sfa, b=b, sfb=x.sfb)
    return m, n


def decoded(x: Tensor, sf: Tensor, gran: Sequence[int], transposed: bool) -> Tensor:
    """An operand as float32 [..., MN, K]; ``transposed``: it is stored [..., K, MN]."""
    numbers = _sf.values(x)
    if transposed:
        numbers = numbers.transpose(-1, -2)
    return numbers * _sf.expand(sf, numbers.shape[-2], numbers.shape[-1], gran)


def product(x: Scaled) -> Tensor:
    """A B^T of two matrices in f32, not rounded."""
    left = decoded(x.a, x.sfa, x.recipe_a, x.layout[0] == "t")
    return left @ decoded(x.b, x.sfb, x.recipe_b, x.layout[1] == "n").t()


@takes(GemmScaled)
def _check_args(x: GemmScaled) -> None:
    shape = check_operands("gemm_scaled", x)
    _gemm.check_accumulator("gemm_scaled", x.a, x.c, shape, x.out_dtype)


@takes(GemmScaled)
def _reference(x: GemmScaled) -> Tensor:
    return _gemm.finish(product(x), x.c, x.alpha, _gemm.result_dtype(x.c, x.out_dtype))


@takes(GemmScaled)
def _fake(x: GemmScaled) -> Tensor:
    m, _, n, _ = sizes(x.a, x.b, x.layout)
    return x.a.new_empty((m, n), dtype=_gemm.result_dtype(x.c, x.out_dtype))


NO_BACKWARD = "its operands are quantised; train with fp8_linear."
_REASON = (
    "f32 sums of products of few bits in another order, which differ by 1e-6 of the sum of magnitudes, and one "
    "rounding: sums on both sides of a tie differ by a bf16 ulp, up to 2^-7"
)
SCALED_TOLERANCE = {dtype: Tolerance(8e-3, 1e-4, _REASON) for dtype in _sf.QUANTISED}

GEMM_SCALED = OpDef(
    name="gemm_scaled",
    schema=(
        "(Tensor a, Tensor sfa, Tensor b, Tensor sfb, Tensor? c, *, SymInt[2] recipe_a, SymInt[2] recipe_b, "
        "str layout, ScalarType? out_dtype, float? alpha) -> Tensor"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward=NO_BACKWARD,
    tolerance=SCALED_TOLERANCE,
    samples=gemm_scaled_samples,
)
