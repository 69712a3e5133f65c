"""``moe_combine``: the rows of every token, summed; the way back from ``moe_permute``.

    out[t] = sum over k of y[row_map[t,k]]  (+ bias[t])        negative rows are skipped, nothing is read for them

Sums are in f32 (f64 for f64 rows), in the order of k, rounded once. No routing weight is multiplied: the expert side
has done that.

The gradient is an op, ``moe_combine_backward``, whose gradient is ``moe_combine`` again, so both can be differentiated
any number of times. Contract: sections B.7 and F of the DeepGEMM operator list, B.4 of the DeepEP one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check
from ascend_deep.ops._moe_permute_samples import COMBINE_ORDERS, combine_backward_samples, combine_samples
from ascend_deep.ops._op import OpDef, Tolerance

__all__ = ["MOE_COMBINE", "MOE_COMBINE_BACKWARD", "moe_combine"]


def moe_combine(y: Tensor, row_map: Tensor, bias: Tensor | None = None, *, order: str = "topk_first") -> Tensor:
    """Sum the rows of every token; see the module.

    Args:
        y: [M, H], f32, bf16, f16 or f64.
        row_map: [T, K] i32 or i64, rows of ``y``; negative: skip.
        bias: [T, H] in f32 or the dtype of ``y`` (a shared expert's output), added once, or ``None``.
        order: ``"topk_first"`` adds the bias last (DeepGEMM-Ascend), ``"bias_first"`` first (DeepGEMM on CUDA).

    Returns:
        [T, H] in the dtype of ``y``. Differentiable in y and bias.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return torch.ops.ascend_deep.moe_combine.default(y, row_map, bias, order=order)


def _check_combine(y: Tensor, row_map: Tensor, bias: Tensor | None, *, order: str) -> None:
    op = "moe_combine"
    _check.dtypes(op, "y", y, _check.FLOATING)
    _check.rank(op, "y", y, "[M, H]", 2)
    _check.dtypes(op, "row_map", row_map, _check.INDEX)
    _check.rank(op, "row_map", row_map, "[T, K]", 2)
    _check.choice(op, "order", order, COMBINE_ORDERS)
    if bias is not None:
        _check.dtypes(op, "bias", bias, (torch.float32, y.dtype))
        _check.rank(op, "bias", bias, "[T, H]", 2)
        _check.size(
            op, "the number of rows of bias", bias.shape[0], row_map.shape[0], "the number of tokens of row_map"
        )
        _check.size(op, "the number of columns of bias", bias.shape[1], y.shape[1], "H of y")
    _check.same_device(op, "y", y, row_map=row_map, bias=bias)


def _combine(y: Tensor, row_map: Tensor, bias: Tensor | None, *, order: str) -> Tensor:
    dtype = _check.compute_dtype(y.dtype)
    total = torch.zeros((row_map.shape[0], y.shape[1]), dtype=dtype, device=y.device)
    if bias is not None and order == "bias_first":
        total += bias
    if y.shape[0]:
        for k in range(row_map.shape[1]):
            rows = row_map[:, k]
            # Masked by where: a skipped slot must not bring in row 0 times zero, which is NaN if row 0 is.
            total += torch.where((rows >= 0).unsqueeze(1), y.index_select(0, rows.clamp(min=0)), 0)
    if bias is not None and order == "topk_first":
        total += bias
    return total.to(y.dtype)


def _fake_combine(y: Tensor, row_map: Tensor, bias: Tensor | None, *, order: str) -> Tensor:
    return y.new_empty((row_map.shape[0], y.shape[1]))


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    y, row_map, bias = inputs
    ctx.save_for_backward(row_map)
    ctx.rows = y.shape[0]
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward_combine(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    (row_map,) = ctx.saved_tensors
    d_y = None
    if ctx.needs_input_grad[0]:
        d_y = torch.ops.ascend_deep.moe_combine_backward.default(grad.contiguous(), row_map, ctx.rows)
    d_bias = grad.contiguous().to(ctx.bias_dtype) if ctx.bias_dtype is not None and ctx.needs_input_grad[2] else None
    return d_y, None, d_bias


def _check_combine_backward(grad: Tensor, row_map: Tensor, rows: int) -> None:
    op = "moe_combine_backward"
    _check.dtypes(op, "grad", grad, _check.FLOATING)
    _check.rank(op, "grad", grad, "[T, H]", 2)
    _check.dtypes(op, "row_map", row_map, _check.INDEX)
    _check.rank(op, "row_map", row_map, "[T, K]", 2)
    _check.size(op, "the number of rows of grad", grad.shape[0], row_map.shape[0], "the number of tokens of row_map")
    _check.same_device(op, "grad", grad, row_map=row_map)


def _combine_backward(grad: Tensor, row_map: Tensor, rows: int) -> Tensor:
    """[rows, H]: the gradient row of a token at each of its rows; rows that no slot names are zero."""
    dtype = _check.compute_dtype(grad.dtype)
    # Skipped slots add to one row behind the last, which is cut off.
    out = torch.zeros((rows + 1, grad.shape[1]), dtype=dtype, device=grad.device)
    source = grad.to(dtype)
    for k in range(row_map.shape[1]):
        target = row_map[:, k].to(torch.int64)
        out.index_add_(0, torch.where(target >= 0, target, rows), source)
    return out[:rows].to(grad.dtype).clone()


def _fake_combine_backward(grad: Tensor, row_map: Tensor, rows: int) -> Tensor:
    return grad.new_empty((rows, grad.shape[1]))


def _setup_combine_backward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward_combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (row_map,) = ctx.saved_tensors
    return moe_combine(grad.contiguous(), row_map), None, None


_SUM = "f32 sum of at most K + 1 terms and one rounding to the result"

_TOLERANCE = {
    torch.float64: Tolerance(1e-14, 1e-14, _SUM),
    torch.float32: Tolerance(1e-6, 1e-6, _SUM),
    torch.bfloat16: Tolerance(8e-3, 1e-5, _SUM + ", half a bf16 ulp is 2^-9"),
    torch.float16: Tolerance(1e-3, 1e-5, _SUM + ", half an f16 ulp is 2^-12"),
}

MOE_COMBINE = OpDef(
    name="moe_combine",
    schema="(Tensor y, Tensor row_map, Tensor? bias, *, str order) -> Tensor",
    check=_check_combine,
    reference=_combine,
    fake=_fake_combine,
    setup_context=_setup_combine,
    backward=_backward_combine,
    tolerance=_TOLERANCE,
    samples=combine_samples,
    differentiable=("y", "bias"),
)

MOE_COMBINE_BACKWARD = OpDef(
    name="moe_combine_backward",
    schema="(Tensor grad, Tensor row_map, SymInt rows) -> Tensor",
    check=_check_combine_backward,
    reference=_combine_backward,
    fake=_fake_combine_backward,
    setup_context=_setup_combine_backward,
    backward=_backward_combine_backward,
    tolerance=_TOLERANCE,
    samples=combine_backward_samples,
    differentiable=("grad",),
)
