"""``k_grouped_gemm_scaled``: ``k_grouped_gemm_bf16`` of operands quantised along the rows they are summed over.

    D[g] = C[g] + (A sfa)[rows of g]ᵀ @ (B sfb)[rows of g]        A [R, M], B [R, N], D [G, M, N]

A scale belongs to ``gran_k`` rows of one column (recipe (1, gran_k) of ``ops/_sf.py`` for an operand that is stored
[K, MN]): sfa [M, ceil(R / gran_k)], sfb [N, ceil(R / gran_k)], counted from the start of the buffer, or packed. Where
``alignment`` is a multiple of ``gran_k`` no scale is shared between groups. FP4 pairs lie along the columns. Grouped
layouts and padding are those of ``ops/_grouped.py``; a block whose rows are all padding may have any scale, NaN too.
``k_grouped_gemm_scaled_acc_`` adds to ``d`` in place. The reference body reads the layout on the host.

Contract: DeepGEMM ``k_grouped_fp8_gemm_tn_contiguous`` (and ``nt``, which is the same product in another storage).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import KGroupedScaled, KGroupedScaledAcc, takes
from ascend_deep.ops import _check, _gemm, _grouped, _sf
from ascend_deep.ops._grouped_scaled_samples import k_grouped_scaled_acc_samples, k_grouped_scaled_samples
from ascend_deep.ops._op import OpDef, call
from ascend_deep.ops.gemm_scaled import NO_BACKWARD, SCALED_TOLERANCE, decoded
from ascend_deep.ops.k_grouped_gemm_bf16 import check_layout, debug_layout, ends_of

__all__ = [
    "K_GROUPED_GEMM_SCALED",
    "K_GROUPED_GEMM_SCALED_ACC",
    "k_grouped_gemm_scaled",
    "k_grouped_gemm_scaled_acc_",
]

_OP = "k_grouped_gemm_scaled"
_ACC = "k_grouped_gemm_scaled_acc_"


def k_grouped_gemm_scaled(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    *,
    gran_k: int,
    ks: list[int] | None = None,
    grouping: str = "psum",
    alignment: int = 128,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``a.T @ b`` over the rows of each group, of quantised operands; see the module.

    Args:
        a, b: [R, M] and [R, N] float8_e4m3fn, or FP4 pairs along the last dimension.
        sfa, sfb: [M, ceil(R / gran_k)] and [N, ceil(R / gran_k)] f32, or packed.
        grouped_layout: i32 [G], ends (``psum``) or numbers of rows (``sizes``).
        c: [G, M, N] in the dtype of the result, or ``None``.
        gran_k: rows per scale.
        ks: the number of rows of each group, known on the host, or ``None``; a hint for kernels that need it there.
        grouping: ``"psum"`` or ``"sizes"``.
        alignment: groups start at multiples of it.
        out_dtype: bf16 or f32; ``None``: that of ``c``, bf16 without it.

    Returns:
        [G, M, N], contiguous. Not differentiable.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: with ASCEND_DEEP_DEBUG=1, a layout that breaks its promise, or a wrong ``ks``.
    """
    return call(
        _OP,
        a,
        sfa,
        b,
        sfb,
        grouped_layout,
        c,
        gran_k=gran_k,
        ks=ks,
        grouping=grouping,
        alignment=alignment,
        out_dtype=out_dtype,
    )


def k_grouped_gemm_scaled_acc_(
    d: Tensor,
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    grouped_layout: Tensor,
    *,
    gran_k: int,
    ks: list[int] | None = None,
    grouping: str = "psum",
    alignment: int = 128,
) -> None:
    """``d[g] += a.T @ b`` over the rows of each group, in place, the sum rounded once; see the module.

    Args:
        d: [G, M, N] bf16 or f32, any strides without overlap; must share no memory with the operands.
        a, sfa, b, sfb, grouped_layout, gran_k, ks, grouping, alignment: as for ``k_grouped_gemm_scaled``.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: as for ``k_grouped_gemm_scaled``.
    """
    torch.ops.ascend_deep.k_grouped_gemm_scaled_acc_.default(
        d, a, sfa, b, sfb, grouped_layout, gran_k=gran_k, ks=ks, grouping=grouping, alignment=alignment
    )


def _check_operands(op: str, x: KGroupedScaled | KGroupedScaledAcc) -> tuple[Any, ...]:
    a, b, recipe = x.a, x.b, (1, x.gran_k)
    _check.dtypes(op, "a", a, _sf.QUANTISED)
    _check.dtypes(op, "b", b, _sf.QUANTISED)
    _check.rank(op, "a", a, "[R, M]", 2)
    _check.rank(op, "b", b, "[R, N]", 2)
    rows, m, n = a.shape[0], _sf.last_size(a), _sf.last_size(b)
    _check.size(op, "the number of rows of b", b.shape[0], rows, "that of a")
    if int(x.gran_k) < 1:
        raise ValueError(f"{op}: gran_k is {x.gran_k}; it is a number of rows, at least 1.")
    _sf.check_sf(op, "sfa", x.sfa, (), m, rows, recipe, "(1, gran_k)")
    _sf.check_sf(op, "sfb", x.sfb, (), n, rows, recipe, "(1, gran_k)")
    _check.same_device(op, "a", a, sfa=x.sfa, b=b, sfb=x.sfb)
    check_layout(op, x)
    return x.grouped_layout.shape[0], m, n


@takes(KGroupedScaled)
def _check_args(x: KGroupedScaled) -> None:
    _gemm.check_accumulator(_OP, x.a, x.c, _check_operands(_OP, x), x.out_dtype)


@takes(KGroupedScaledAcc)
def _check_acc(x: KGroupedScaledAcc) -> None:
    _gemm.check_accumulator(_ACC, x.a, x.d, _check_operands(_ACC, x), None, "d")


def _products(x: KGroupedScaled | KGroupedScaledAcc) -> Tensor:
    """[G, M, N] in f32, not rounded."""
    ends, recipe = ends_of(x), (1, x.gran_k)
    left, right = decoded(x.a, x.sfa, recipe, True), decoded(x.b, x.sfb, recipe, True)
    out = x.sfa.new_zeros((ends.shape[0], left.shape[0], right.shape[0]), dtype=torch.float32)
    for g, (start, end) in enumerate(_grouped.bounds(ends, x.a.shape[0], x.alignment)):
        out[g] = left[:, start:end] @ right[:, start:end].mT
    return out


@takes(KGroupedScaled)
def _reference(x: KGroupedScaled) -> Tensor:
    return _gemm.finish(_products(x), x.c, None, _gemm.result_dtype(x.c, x.out_dtype))


@takes(KGroupedScaledAcc)
def _reference_acc(x: KGroupedScaledAcc) -> None:
    x.d.copy_(_gemm.finish(_products(x), x.d, None, x.d.dtype))


@takes(KGroupedScaled)
def _fake(x: KGroupedScaled) -> Tensor:
    shape = (x.grouped_layout.shape[0], _sf.last_size(x.a), _sf.last_size(x.b))
    return x.a.new_empty(shape, dtype=_gemm.result_dtype(x.c, x.out_dtype))


def _fake_acc(*_: Any, **__: Any) -> None:
    return None


@takes(KGroupedScaled)
def _debug(x: KGroupedScaled) -> None:
    debug_layout(_OP, x)


@takes(KGroupedScaledAcc)
def _debug_acc(x: KGroupedScaledAcc) -> None:
    debug_layout(_ACC, x)


K_GROUPED_GEMM_SCALED = OpDef(
    name=_OP,
    schema=(
        "(Tensor a, Tensor sfa, Tensor b, Tensor sfb, Tensor grouped_layout, Tensor? c, *, SymInt gran_k, "
        "SymInt[]? ks, str grouping, SymInt alignment, ScalarType? out_dtype) -> Tensor"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward=NO_BACKWARD,
    debug=_debug,
    tolerance=SCALED_TOLERANCE,
    samples=k_grouped_scaled_samples,
)

K_GROUPED_GEMM_SCALED_ACC = OpDef(
    name=_ACC,
    schema=(
        "(Tensor(a!) d, Tensor a, Tensor sfa, Tensor b, Tensor sfb, Tensor grouped_layout, *, SymInt gran_k, "
        "SymInt[]? ks, str grouping, SymInt alignment) -> ()"
    ),
    check=_check_acc,
    reference=_reference_acc,
    fake=_fake_acc,
    no_backward=NO_BACKWARD,
    debug=_debug_acc,
    tolerance=_gemm.TOLERANCE,
    samples=k_grouped_scaled_acc_samples,
)
