"""``hc_prenorm_gemm``: the mixing projection of hyper-connections and the sum of squares of its input, in one pass.

    d[m,n] = sum over k of A[m,k] B[n,k]        s[m] = sum over k of A[m,k]^2

A [M, K] bfloat16, B [N, K] float32, both results float32; the caller divides by the norm afterwards. With S =
``num_splits`` the results are [S, M, N] and [S, M]: part i covers the columns [i w, (i + 1) w) of K, w = K / S rounded
up, parts behind the end are zero, and the caller adds them up. Only that sum is promised: an implementation may cut K
elsewhere.

Arithmetic: float32, or TF32 products (B loses 13 bits) where the hardware has no other unit for it, which is what the
tolerance allows. The gradients are plain torch products, so the op can be differentiated any number of times:

    dA = dd B + 2 ds A    (bfloat16, rounded once)        dB = ddᵀ A    (float32)

Contract: DeepGEMM ``tf32_hc_prenorm_gemm``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check, _gemm
from ascend_deep.ops._gemm_samples import hc_samples
from ascend_deep.ops._op import OpDef, Tolerance, call

__all__ = ["HC_PRENORM_GEMM", "hc_prenorm_gemm"]

_OP = "hc_prenorm_gemm"


def hc_prenorm_gemm(a: Tensor, b: Tensor, *, num_splits: int | None = None) -> tuple[Tensor, Tensor]:
    """``a @ b.T`` and the sum of squares of every row of ``a``; see the module.

    Args:
        a: [M, K] bf16.
        b: [N, K] f32.
        num_splits: ``None``, or the number S >= 1 of parts of K whose sums are returned separately.

    Returns:
        f32 [M, N] and [M], or [S, M, N] and [S, M], contiguous. Differentiable in a and b.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call(_OP, a, b, num_splits=num_splits)


def _check_args(a: Tensor, b: Tensor, *, num_splits: int | None) -> None:
    _gemm.check_operand(_OP, "a", a, "[M, K]", 2)
    _check.dtypes(_OP, "b", b, (torch.float32,))
    _check.rank(_OP, "b", b, "[N, K]", 2)
    _check.size(_OP, "K of b", b.shape[1], a.shape[1], "K of a")
    if num_splits is not None:
        torch._check_value(num_splits >= 1, lambda: f"{_OP}: num_splits is {num_splits}; it must be at least 1.")
    _check.same_device(_OP, "a", a, b=b)


def _parts(t: Tensor, num_splits: int) -> Tensor:
    """[R, K] as [S, R, w], zeros behind the end of K."""
    rows, k = t.shape
    width = (k + num_splits - 1) // num_splits
    padded = torch.nn.functional.pad(t, (0, width * num_splits - k))
    return padded.reshape(rows, num_splits, width).transpose(0, 1)


def _reference(a: Tensor, b: Tensor, *, num_splits: int | None) -> tuple[Tensor, Tensor]:
    left = a.to(torch.float32)
    if num_splits is None:
        return (left @ b.t()).contiguous(), left.square().sum(1)
    left = _parts(left, num_splits)
    return left @ _parts(b, num_splits).mT, left.square().sum(2)


def _fake(a: Tensor, b: Tensor, *, num_splits: int | None) -> tuple[Tensor, Tensor]:
    lead = () if num_splits is None else (num_splits,)
    rows = a.shape[0]
    return (
        b.new_empty((*lead, rows, b.shape[0])),
        b.new_empty((*lead, rows)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.num_splits = keyword_only_inputs["num_splits"]


def _backward(ctx: Any, d_product: Tensor, d_squares: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    left, k = a.to(torch.float32), a.shape[1]
    d_left = d_right = None
    if ctx.num_splits is None:
        if ctx.needs_input_grad[0]:
            d_left = d_product @ b + 2 * d_squares.unsqueeze(1) * left
        if ctx.needs_input_grad[1]:
            d_right = d_product.mT @ left
    else:
        if ctx.needs_input_grad[0]:
            pieces = d_product @ _parts(b, ctx.num_splits) + 2 * d_squares.unsqueeze(2) * _parts(left, ctx.num_splits)
            d_left = pieces.transpose(0, 1).flatten(1)[:, :k]
        if ctx.needs_input_grad[1]:
            d_right = (d_product.mT @ _parts(left, ctx.num_splits)).transpose(0, 1).flatten(1)[:, :k]
    return (
        None if d_left is None else d_left.to(torch.bfloat16).contiguous(),
        None if d_right is None else d_right.contiguous(),
    )


_REASON = "float32 sums in any order; a kernel may round B to TF32 (2^-11 relative per term)"

HC_PRENORM_GEMM = OpDef(
    name=_OP,
    schema="(Tensor a, Tensor b, *, SymInt? num_splits) -> (Tensor, Tensor)",
    check=_check_args,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    tolerance={torch.bfloat16: Tolerance(1e-3, 5e-3, _REASON)},
    samples=hc_samples,
    differentiable=("a", "b"),
)
