"""``gemm_scaled_out`` and ``gemm_scaled_acc_``: the scaled product into a tensor of the caller.

    gemm_scaled_out    d = c + alpha * (A sfa)(B sfb)^T       c may be d
    gemm_scaled_acc_   d = d + (A sfa)(B sfb)^T               weight gradients over micro-batches; layout "tn" by
    default

Both round once to the dtype of ``d``, which may have any strides. Everything else is as in ``ops/gemm_scaled.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_deep.native.calls import GemmScaledAcc, GemmScaledOut, takes
from ascend_deep.ops import _gemm
from ascend_deep.ops._gemm_scaled_samples import gemm_scaled_acc_samples, gemm_scaled_out_samples
from ascend_deep.ops._op import OpDef, Tolerance
from ascend_deep.ops.gemm_scaled import NO_BACKWARD, SCALED_TOLERANCE, check_operands, product

__all__ = ["GEMM_SCALED_ACC", "GEMM_SCALED_OUT", "gemm_scaled_acc_", "gemm_scaled_out"]


def gemm_scaled_out(
    d: Tensor,
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    c: Tensor | None = None,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    layout: str = "nt",
    alpha: float | None = None,
) -> None:
    """d = c + alpha * A B^T, in place; see the module.

    Args:
        d: [M, N] bf16 or f32, overwritten; any strides without overlap.
        a, sfa, b, sfb, recipe_a, recipe_b, layout, alpha: as in ``gemm_scaled``.
        c: [M, N] in the dtype of ``d``, or ``None``: zero.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    torch.ops.ascend_deep.gemm_scaled_out.default(
        d, a, sfa, b, sfb, c, recipe_a=recipe_a, recipe_b=recipe_b, layout=layout, alpha=alpha
    )


def gemm_scaled_acc_(
    d: Tensor,
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    layout: str = "tn",
) -> None:
    """d += A B^T, in place; see the module.

    Args:
        d: [M, N] bf16 or f32, added to; any strides without overlap.
        a, sfa, b, sfb, recipe_a, recipe_b, layout: as in ``gemm_scaled``.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    torch.ops.ascend_deep.gemm_scaled_acc_.default(
        d, a, sfa, b, sfb, recipe_a=recipe_a, recipe_b=recipe_b, layout=layout
    )


@takes(GemmScaledOut)
def _check_out(x: GemmScaledOut) -> None:
    op = "gemm_scaled_out"
    shape = check_operands(op, x)
    _gemm.check_accumulator(op, x.a, x.d, shape, None, "d")
    _gemm.check_accumulator(op, x.a, x.c, shape, x.d.dtype)


@takes(GemmScaledOut)
def _reference_out(x: GemmScaledOut) -> None:
    x.d.copy_(_gemm.finish(product(x), x.c, x.alpha, x.d.dtype))


@takes(GemmScaledAcc)
def _check_acc(x: GemmScaledAcc) -> None:
    op = "gemm_scaled_acc_"
    shape = check_operands(op, x)
    _gemm.check_accumulator(op, x.a, x.d, shape, None, "d")


@takes(GemmScaledAcc)
def _reference_acc(x: GemmScaledAcc) -> None:
    x.d.copy_(_gemm.finish(product(x), x.d, None, x.d.dtype))


def _fake(*args: Tensor | None, **attributes: object) -> None:
    return None


# The leading tensor is the result.
_TOLERANCE: dict[torch.dtype, Tolerance] = {dtype: next(iter(SCALED_TOLERANCE.values())) for dtype in _gemm.OUT_DTYPES}

GEMM_SCALED_OUT = OpDef(
    name="gemm_scaled_out",
    schema=(
        "(Tensor(a!) d, Tensor a, Tensor sfa, Tensor b, Tensor sfb, Tensor? c, *, SymInt[2] recipe_a, "
        "SymInt[2] recipe_b, str layout, float? alpha) -> ()"
    ),
    check=_check_out,
    reference=_reference_out,
    fake=_fake,
    no_backward=NO_BACKWARD,
    tolerance=_TOLERANCE,
    samples=gemm_scaled_out_samples,
)

GEMM_SCALED_ACC = OpDef(
    name="gemm_scaled_acc_",
    schema=(
        "(Tensor(a!) d, Tensor a, Tensor sfa, Tensor b, Tensor sfb, *, SymInt[2] recipe_a, SymInt[2] recipe_b, "
        "str layout) -> ()"
    ),
    check=_check_acc,
    reference=_reference_acc,
    fake=_fake,
    no_backward=NO_BACKWARD,
    tolerance=_TOLERANCE,
    samples=gemm_scaled_acc_samples,
)
