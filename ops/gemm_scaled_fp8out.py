"""``gemm_scaled_fp8out`` and ``einsum_scaled_fp8out``: scaled products whose result is quantised to FP8 again.

The f32 sums, clamped to +-``clamp`` if it is given, become E4M3 with one power of two per row and 32 columns, by the
rule of ``ops/_quant.py``; they are not rounded in between. This is the epilogue of the libraries (``FP8CastWithClamp``,
``FP8Quantization``), which know no other block. Contract: A.4, B.1 and F of the DeepGEMM operator list.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_deep.native.calls import EinsumScaledFp8Out, GemmScaledFp8Out, takes
from ascend_deep.ops import _check, _quant, _sf
from ascend_deep.ops._gemm_scaled_samples import einsum_fp8out_samples, gemm_fp8out_samples
from ascend_deep.ops._op import OpDef, Tolerance, call
from ascend_deep.ops.einsum_scaled import PROJECT, check_einsum, einsum_product
from ascend_deep.ops.gemm_scaled import NO_BACKWARD, check_operands, product, sizes

__all__ = ["EINSUM_SCALED_FP8OUT", "GEMM_SCALED_FP8OUT", "GRAN", "einsum_scaled_fp8out", "gemm_scaled_fp8out"]

GRAN = (1, 32)


def gemm_scaled_fp8out(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    layout: str = "nt",
    clamp: float | None = None,
    sf_format: str = "ue8m0x4",
) -> tuple[Tensor, Tensor]:
    """A B^T of quantised operands, quantised; see the module.

    Args:
        a, sfa, b, sfb, recipe_a, recipe_b, layout: as in ``gemm_scaled``.
        clamp: bound of the magnitude of the result, positive; ``None``: none.
        sf_format: of the scales of the result, ``"ue8m0x4"``, ``"ue8m0x2"`` or ``"fp32"``.

    Returns:
        data [M, N] float8_e4m3fn, contiguous, and scales with blocks of (1, 32), f32 [M, ceil(N / 32)] or packed. Not
        differentiable.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call(
        "gemm_scaled_fp8out",
        a,
        sfa,
        b,
        sfb,
        recipe_a=recipe_a,
        recipe_b=recipe_b,
        layout=layout,
        clamp=clamp,
        sf_format=sf_format,
    )


def einsum_scaled_fp8out(
    eq: str,
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    clamp: float | None = None,
    sf_format: str = "ue8m0x4",
) -> tuple[Tensor, Tensor]:
    """``einsum_scaled`` of "bhr,hdr->bhd", quantised along d; see the module.

    Args:
        eq: ``"bhr,hdr->bhd"``; other equations have no such result.
        a, sfa, b, sfb, recipe_a, recipe_b: as in ``einsum_scaled``; d is a multiple of 32.
        clamp, sf_format: as in ``gemm_scaled_fp8out``.

    Returns:
        data [B, H, D] float8_e4m3fn, contiguous, and the scales of that tensor as a matrix [B, H D], f32 [B, H D / 32]
        or packed: what the product that follows takes. Not differentiable.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call(
        "einsum_scaled_fp8out",
        a,
        sfa,
        b,
        sfb,
        eq=eq,
        recipe_a=recipe_a,
        recipe_b=recipe_b,
        clamp=clamp,
        sf_format=sf_format,
    )


def _check_result(op: str, x: GemmScaledFp8Out | EinsumScaledFp8Out) -> None:
    _sf.check_format(op, x.sf_format, GRAN)
    if x.clamp is not None and not x.clamp > 0:
        raise ValueError(f"{op}: clamp is {x.clamp}; it must be positive, or None for no bound.")


def _quantised(product: Tensor, clamp: float | None, sf_format: str) -> tuple[Tensor, Tensor]:
    if clamp is not None:
        product = product.clamp(-clamp, clamp)
    data, scale = _quant.fp8(product, GRAN, True)
    return data, _quant.write_scales(scale, sf_format)


@takes(GemmScaledFp8Out)
def _check_gemm(x: GemmScaledFp8Out) -> None:
    check_operands("gemm_scaled_fp8out", x)
    _check_result("gemm_scaled_fp8out", x)


@takes(GemmScaledFp8Out)
def _reference_gemm(x: GemmScaledFp8Out) -> tuple[Tensor, Tensor]:
    return _quantised(product(x), x.clamp, x.sf_format)


@takes(GemmScaledFp8Out)
def _fake_gemm(x: GemmScaledFp8Out) -> tuple[Tensor, Tensor]:
    m, _, n, _ = sizes(x.a, x.b, x.layout)
    return x.a.new_empty((m, n), dtype=_sf.FP8), _quant.empty_scales(x.a, (), m, n, GRAN, x.sf_format)


@takes(EinsumScaledFp8Out)
def _check_einsum(x: EinsumScaledFp8Out) -> None:
    op = "einsum_scaled_fp8out"
    _check.choice(op, "eq", x.eq, (PROJECT,))
    check_einsum(op, x)
    depth = x.b.shape[1]
    torch._check_value(
        depth % GRAN[1] == 0,
        lambda: f"{op}: d of b is {depth}; it must be a multiple of {GRAN[1]}, one group of scales.",
    )
    _check_result(op, x)


@takes(EinsumScaledFp8Out)
def _reference_einsum(x: EinsumScaledFp8Out) -> tuple[Tensor, Tensor]:
    d = einsum_product(x)
    data, scales = _quantised(d.reshape(d.shape[0], d.shape[1] * d.shape[2]), x.clamp, x.sf_format)
    return _sf.owned(data.reshape(d.shape)), scales


@takes(EinsumScaledFp8Out)
def _fake_einsum(x: EinsumScaledFp8Out) -> tuple[Tensor, Tensor]:
    rows, heads, depth = x.a.shape[0], x.a.shape[1], x.b.shape[1]
    return (
        x.a.new_empty((rows, heads, depth), dtype=_sf.FP8),
        _quant.empty_scales(x.a, (), rows, heads * depth, GRAN, x.sf_format),
    )


# A sum next to a tie may fall on either side, and one next to a power of two may double the scale of its group.
_REASON = "f32 sums in another order; a sum next to a tie rounds to the other E4M3 neighbour, 2^-3 away"
_TOLERANCE = {dtype: Tolerance(0.125, 1e-3, _REASON) for dtype in _sf.QUANTISED}

GEMM_SCALED_FP8OUT = OpDef(
    name="gemm_scaled_fp8out",
    schema=(
        "(Tensor a, Tensor sfa, Tensor b, Tensor sfb, *, SymInt[2] recipe_a, SymInt[2] recipe_b, str layout, "
        "float? clamp, str sf_format) -> (Tensor, Tensor)"
    ),
    check=_check_gemm,
    reference=_reference_gemm,
    fake=_fake_gemm,
    no_backward=NO_BACKWARD,
    tolerance=_TOLERANCE,
    samples=gemm_fp8out_samples,
)

EINSUM_SCALED_FP8OUT = OpDef(
    name="einsum_scaled_fp8out",
    schema=(
        "(Tensor a, Tensor sfa, Tensor b, Tensor sfb, *, str eq, SymInt[2] recipe_a, SymInt[2] recipe_b, "
        "float? clamp, str sf_format) -> (Tensor, Tensor)"
    ),
    check=_check_einsum,
    reference=_reference_einsum,
    fake=_fake_einsum,
    no_backward=NO_BACKWARD,
    tolerance=_TOLERANCE,
    samples=einsum_fp8out_samples,
)
