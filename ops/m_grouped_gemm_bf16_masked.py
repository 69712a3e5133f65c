"""``m_grouped_gemm_bf16_masked``: one buffer of rows per group, of which the first ``masked_m[g]`` count (decoding).

    D[g, i] = A[g, i] @ B[g]ᵀ      for i < masked_m[g];  D[g, i] = 0 otherwise

A [G, Mmax, K], B [G, N, K], D [G, Mmax, N], all bfloat16, float32 sums, one rounding. Counts outside [0, Mmax] are
clamped. What A holds in rows that do not count is not read into a result. ``expected_m`` is a hint for kernels and no
bound. The reference body computes all rows, so it looks at no value on the host.

Gradients: dA is the same op; dB is a product over the rows that count, exactly zero for a group without any. The op can
be differentiated any number of times. Contract: DeepGEMM ``m_grouped_bf16_gemm_nt_masked``, which leaves the other rows
undefined.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check, _gemm, _grouped
from ascend_deep.ops._grouped_samples import masked_samples
from ascend_deep.ops._op import OpDef, call
from ascend_deep.ops.einsum_bf16 import einsum_bf16

__all__ = ["M_GROUPED_GEMM_BF16_MASKED", "m_grouped_gemm_bf16_masked"]

_OP = "m_grouped_gemm_bf16_masked"


def m_grouped_gemm_bf16_masked(a: Tensor, b: Tensor, masked_m: Tensor, expected_m: int) -> Tensor:
    """Per group the first rows of ``a`` times its matrix; see the module.

    Args:
        a: [G, Mmax, K] bf16.
        b: [G, N, K] bf16.
        masked_m: i32 [G], number of rows of each group that count.
        expected_m: rows of a typical group, at least 1; a hint, changes no result.

    Returns:
        [G, Mmax, N] bf16, contiguous, zero in rows that do not count. Differentiable in a and b.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: with ASCEND_DEEP_DEBUG=1, a count outside [0, Mmax].
    """
    return call(_OP, a, b, masked_m, expected_m=expected_m)


def _check_args(a: Tensor, b: Tensor, masked_m: Tensor, *, expected_m: int) -> None:
    _gemm.check_operand(_OP, "a", a, "[G, Mmax, K]", 3)
    _gemm.check_operand(_OP, "b", b, "[G, N, K]", 3)
    _check.size(_OP, "the number of groups of b", b.shape[0], a.shape[0], "that of a")
    _check.size(_OP, "K of b", b.shape[2], a.shape[2], "K of a")
    _grouped.check_index(_OP, "masked_m", masked_m, "[G]", a.shape[0], "the number of groups of a")
    _grouped.check_expected(_OP, expected_m)
    _check.same_device(_OP, "a", a, b=b, masked_m=masked_m)


def _reference(a: Tensor, b: Tensor, masked_m: Tensor, *, expected_m: int) -> Tensor:
    left, right = _gemm.widened(a, b, "nt")
    product = torch.where(_grouped.valid_rows(masked_m, a.shape[1]), left @ right, 0.0)
    return product.to(torch.bfloat16).contiguous()


def _fake(a: Tensor, b: Tensor, masked_m: Tensor, *, expected_m: int) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[1]))


def _debug(a: Tensor, b: Tensor, masked_m: Tensor, *, expected_m: int) -> None:
    _grouped.debug_masked(_OP, masked_m, a.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.expected_m = keyword_only_inputs["expected_m"]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, masked_m = ctx.saved_tensors
    d_a = d_b = None
    if ctx.needs_input_grad[0]:
        d_a = m_grouped_gemm_bf16_masked(grad.contiguous(), b.mT, masked_m, ctx.expected_m)
    if ctx.needs_input_grad[1]:
        valid = _grouped.valid_rows(masked_m, a.shape[1])
        # Both sides: a padding row may hold NaN in A, and 0 * NaN is NaN.
        rows, left = torch.where(valid, grad, 0.0), torch.where(valid, a, 0.0)
        d_b = einsum_bf16("bhd,bhr->hdr", rows.transpose(0, 1), left.transpose(0, 1))
    return d_a, d_b, None


M_GROUPED_GEMM_BF16_MASKED = OpDef(
    name=_OP,
    schema="(Tensor a, Tensor b, Tensor masked_m, *, SymInt expected_m) -> Tensor",
    check=_check_args,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_gemm.autocast,
    debug=_debug,
    tolerance=_gemm.TOLERANCE,
    samples=masked_samples,
    differentiable=("a", "b"),
)
