"""``m_grouped_gemm_scaled`` and ``m_grouped_gemm_scaled_masked``: the grouped products of quantised operands.

    D[i] = (A sfa)[i] @ (B[g] sfb[g])ᵀ      for every row i of group g;  0 for padding rows

Operands and scales are those of ``gemm_scaled`` (``ops/_sf.py``), with a leading group dimension in B and sfb, and in A
and sfa of the masked form. Grouped layouts and padding are those of ``ops/_grouped.py``: neither the data of padding
rows nor scales that belong to them alone are read into a result. FP4 and FP8 may be mixed. float32 sums, one rounding.
The reference body of the contiguous form reads the layout on the host.

Contract: DeepGEMM ``m_grouped_fp8_fp4_gemm_{nt,nn}_contiguous`` and ``m_grouped_fp8_fp4_gemm_nt_masked``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_deep.native.calls import MaskedScaled, MGroupedScaled, takes
from ascend_deep.ops import _check, _gemm, _grouped, _sf
from ascend_deep.ops._grouped_scaled_samples import m_grouped_scaled_samples, masked_scaled_samples
from ascend_deep.ops._op import OpDef, call
from ascend_deep.ops.gemm_scaled import NO_BACKWARD, SCALED_TOLERANCE, decoded, sizes
from ascend_deep.ops.m_grouped_gemm_bf16 import M_GROUPED_LAYOUTS

__all__ = [
    "M_GROUPED_GEMM_SCALED",
    "M_GROUPED_GEMM_SCALED_MASKED",
    "m_grouped_gemm_scaled",
    "m_grouped_gemm_scaled_masked",
]

_OP = "m_grouped_gemm_scaled"
_MASKED = "m_grouped_gemm_scaled_masked"


def m_grouped_gemm_scaled(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    grouped_layout: Tensor,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    layout: str = "nt",
    grouping: str = "psum",
    alignment: int = 128,
    expected_m: int | None = None,
    zero_padding: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Every quantised row of ``a`` times the quantised matrix of its group; see the module.

    Args:
        a: [M, K] float8_e4m3fn, or FP4 pairs [M, K / 2].
        sfa: [ceil(M / gran_m), ceil(K / gran_k)] f32, or packed.
        b: [G, N, K] or [G, K, N] by ``layout``, float8_e4m3fn, or FP4 pairs along the last dimension.
        sfb: [G, ceil(N / gran_n), ceil(K / gran_k)] f32, or packed, in either layout.
        grouped_layout: i32 [G] ends (``psum``) or i32 [M] group ids (``labels``).
        recipe_a, recipe_b: (gran_m, gran_k) and (gran_n, gran_k).
        layout: ``"nt"`` or ``"nn"``.
        grouping: ``"psum"`` or ``"labels"``.
        alignment: groups start at multiples of it.
        expected_m: rows of a typical group, a hint for kernels; changes no result.
        zero_padding: write zeros to rows that belong to no group.
        out_dtype: bf16 or f32; ``None``: bf16.

    Returns:
        [M, N], contiguous. Not differentiable.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: with ASCEND_DEEP_DEBUG=1, a layout that breaks its promise.
    """
    return call(
        _OP,
        a,
        sfa,
        b,
        sfb,
        grouped_layout,
        recipe_a=recipe_a,
        recipe_b=recipe_b,
        layout=layout,
        grouping=grouping,
        alignment=alignment,
        expected_m=expected_m,
        zero_padding=zero_padding,
        out_dtype=out_dtype,
    )


def m_grouped_gemm_scaled_masked(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    masked_m: Tensor,
    expected_m: int,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
) -> Tensor:
    """Per group the first quantised rows of ``a`` times its quantised matrix; see the module.

    Args:
        a: [G, Mmax, K] float8_e4m3fn, or FP4 pairs [G, Mmax, K / 2].
        sfa: [G, ceil(Mmax / gran_m), ceil(K / gran_k)] f32, or packed.
        b: [G, N, K] float8_e4m3fn, or FP4 pairs [G, N, K / 2].
        sfb: [G, ceil(N / gran_n), ceil(K / gran_k)] f32, or packed.
        masked_m: i32 [G], number of rows of each group that count.
        expected_m: rows of a typical group, at least 1; a hint, changes no result.
        recipe_a, recipe_b: (gran_m, gran_k) and (gran_n, gran_k).

    Returns:
        [G, Mmax, N] bf16, contiguous, zero in rows that do not count. Not differentiable.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: with ASCEND_DEEP_DEBUG=1, a count outside [0, Mmax].
    """
    return call(_MASKED, a, sfa, b, sfb, masked_m, expected_m=expected_m, recipe_a=recipe_a, recipe_b=recipe_b)


@takes(MGroupedScaled)
def _check_args(x: MGroupedScaled) -> None:
    a, b = x.a, x.b
    _check.choice(_OP, "layout", x.layout, M_GROUPED_LAYOUTS)
    _check.dtypes(_OP, "a", a, _sf.QUANTISED)
    _check.dtypes(_OP, "b", b, _sf.QUANTISED)
    _check.rank(_OP, "a", a, "[M, K]", 2)
    _check.rank(_OP, "b", b, "[G, N, K]" if x.layout == "nt" else "[G, K, N]", 3)
    m, k, n, k_b = sizes(a, b, x.layout)
    groups = b.shape[0]
    _check.size(_OP, f"K of b in layout {x.layout!r}", k_b, k, "K of a")
    _sf.check_sf(_OP, "sfa", x.sfa, (), m, k, x.recipe_a, "recipe_a")
    _sf.check_sf(_OP, "sfb", x.sfb, (groups,), n, k, x.recipe_b, "recipe_b")
    _grouped.check_m_grouped(_OP, a, x.grouped_layout, groups, x.grouping, x.alignment, x.expected_m)
    _check.same_device(_OP, "a", a, sfa=x.sfa, b=b, sfb=x.sfb)
    _gemm.check_accumulator(_OP, a, None, (), x.out_dtype)


@takes(MaskedScaled)
def _check_masked(x: MaskedScaled) -> None:
    a, b = x.a, x.b
    _check.dtypes(_MASKED, "a", a, _sf.QUANTISED)
    _check.dtypes(_MASKED, "b", b, _sf.QUANTISED)
    _check.rank(_MASKED, "a", a, "[G, Mmax, K]", 3)
    _check.rank(_MASKED, "b", b, "[G, N, K]", 3)
    groups = a.shape[0]
    _check.size(_MASKED, "the number of groups of b", b.shape[0], groups, "that of a")
    m, k, n, k_b = sizes(a, b, "nt")
    _check.size(_MASKED, "K of b", k_b, k, "K of a")
    _sf.check_sf(_MASKED, "sfa", x.sfa, (groups,), m, k, x.recipe_a, "recipe_a")
    _sf.check_sf(_MASKED, "sfb", x.sfb, (groups,), n, k, x.recipe_b, "recipe_b")
    _grouped.check_index(_MASKED, "masked_m", x.masked_m, "[G]", groups, "the number of groups of a")
    _grouped.check_expected(_MASKED, x.expected_m)
    _check.same_device(_MASKED, "a", a, sfa=x.sfa, b=b, sfb=x.sfb, masked_m=x.masked_m)


@takes(MGroupedScaled)
def _reference(x: MGroupedScaled) -> Tensor:
    rows, _, columns, _ = sizes(x.a, x.b, x.layout)
    left = decoded(x.a, x.sfa, x.recipe_a, False)
    out = x.sfa.new_zeros((rows, columns), dtype=x.out_dtype or torch.bfloat16)
    groups = _grouped.rows_of_groups(x.grouped_layout, x.b.shape[0], rows, x.grouping, x.alignment)
    for g, own in enumerate(groups):
        mine = left[own]
        if mine.shape[0]:
            out[own] = (mine @ decoded(x.b[g], x.sfb[g], x.recipe_b, x.layout == "nn").mT).to(out.dtype)
    return out


@takes(MaskedScaled)
def _reference_masked(x: MaskedScaled) -> Tensor:
    product = decoded(x.a, x.sfa, x.recipe_a, False) @ decoded(x.b, x.sfb, x.recipe_b, False).mT
    valid = _grouped.valid_rows(x.masked_m, x.a.shape[1])
    return torch.where(valid, product, 0.0).to(torch.bfloat16).contiguous()


@takes(MGroupedScaled)
def _fake(x: MGroupedScaled) -> Tensor:
    rows, _, columns, _ = sizes(x.a, x.b, x.layout)
    return x.a.new_empty((rows, columns), dtype=x.out_dtype or torch.bfloat16)


@takes(MaskedScaled)
def _fake_masked(x: MaskedScaled) -> Tensor:
    return x.a.new_empty((x.a.shape[0], x.a.shape[1], x.b.shape[1]), dtype=torch.bfloat16)


@takes(MGroupedScaled)
def _debug(x: MGroupedScaled) -> None:
    _grouped.debug_m_grouped(_OP, x)


@takes(MaskedScaled)
def _debug_masked(x: MaskedScaled) -> None:
    _grouped.debug_masked(_MASKED, x.masked_m, x.a.shape[1])


M_GROUPED_GEMM_SCALED = OpDef(
    name=_OP,
    schema=(
        "(Tensor a, Tensor sfa, Tensor b, Tensor sfb, Tensor grouped_layout, *, SymInt[2] recipe_a, "
        "SymInt[2] recipe_b, str layout, str grouping, SymInt alignment, SymInt? expected_m, bool zero_padding, "
        "ScalarType? out_dtype) -> Tensor"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward=NO_BACKWARD,
    debug=_debug,
    tolerance=SCALED_TOLERANCE,
    samples=m_grouped_scaled_samples,
)

M_GROUPED_GEMM_SCALED_MASKED = OpDef(
    name=_MASKED,
    schema=(
        "(Tensor a, Tensor sfa, Tensor b, Tensor sfb, Tensor masked_m, *, SymInt expected_m, SymInt[2] recipe_a, "
        "SymInt[2] recipe_b) -> Tensor"
    ),
    check=_check_masked,
    reference=_reference_masked,
    fake=_fake_masked,
    no_backward=NO_BACKWARD,
    debug=_debug_masked,
    tolerance=SCALED_TOLERANCE,
    samples=masked_scaled_samples,
)
