"""``einsum_bf16``: the four batched products that attention and grouped projections are made of.

    bhr,hdr->bhd      D[b,h,d] = sum over r of A[b,h,r] B[h,d,r]         (a projection per head)
    bhd,hdr->bhr      D[b,h,r] = sum over d of A[b,h,d] B[h,d,r]         (its transpose)
    bhd,bhr->hdr      D[h,d,r] = sum over b of A[b,h,d] B[b,h,r]         (its weight gradient)
    bmk,bnk->mn       D[m,n]   = sum over b, k of A[b,m,k] B[b,n,k]      (products summed over a batch)

plus C, if given. bfloat16 operands, float32 sums, one rounding; any size may be 0, a sum over nothing is C or zero. The
first three are each other's gradients, those of the last are ``gemm_bf16``, so the op can be differentiated any number
of times; a float32 gradient is not rounded (``_gemm.parts``). Contract: DeepGEMM ``einsum``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check, _gemm
from ascend_deep.ops._gemm_samples import EQUATIONS, einsum_samples
from ascend_deep.ops._op import OpDef, call
from ascend_deep.ops.gemm_bf16 import gemm_bf16

__all__ = ["EINSUM_BF16", "EQUATIONS", "einsum_bf16"]

_PROJECT, _BACK, _WEIGHT, _SUM = EQUATIONS
# Gradients of a and of b of the first three: the operands ("g" is the gradient) and the equation.
_GRADIENTS = {
    _PROJECT: (("gb", _BACK), ("ga", _WEIGHT)),
    _BACK: (("gb", _PROJECT), ("ag", _WEIGHT)),
    _WEIGHT: (("bg", _PROJECT), ("ag", _BACK)),
}


def einsum_bf16(
    eq: str, a: Tensor, b: Tensor, c: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``torch.einsum(eq, a, b) + c`` for the equations of the module.

    Args:
        eq: one of ``EQUATIONS``, without spaces.
        a, b: bf16, shapes by ``eq``.
        c: shape by ``eq``, in the dtype of the result, or ``None``.
        out_dtype: bf16 or f32; ``None``: that of ``c``, bf16 without it.

    Returns:
        Contiguous, shape by ``eq``. Differentiable in a, b and c.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call("einsum_bf16", a, b, c, eq=eq, out_dtype=out_dtype)


def _sizes(a: Tensor, b: Tensor, eq: str) -> dict[str, Any]:
    left, right = eq.split("->")[0].split(",")
    return {**dict(zip(right, b.shape, strict=True)), **dict(zip(left, a.shape, strict=True))}


def _shape(a: Tensor, b: Tensor, eq: str) -> tuple[Any, ...]:
    found = _sizes(a, b, eq)
    return tuple(found[letter] for letter in eq.split("->")[1])


def _check_args(a: Tensor, b: Tensor, c: Tensor | None, *, eq: str, out_dtype: torch.dtype | None) -> None:
    op = "einsum_bf16"
    _check.choice(op, "eq", eq, EQUATIONS)
    left, right = eq.split("->")[0].split(",")
    _gemm.check_operand(op, "a", a, f"[{', '.join(left)}]", 3)
    _gemm.check_operand(op, "b", b, f"[{', '.join(right)}]", 3)
    for letter, found in zip(right, b.shape, strict=True):
        if letter in left:
            _check.size(op, f"{letter} of b", found, a.shape[left.index(letter)], f"{letter} of a")
    _check.same_device(op, "a", a, b=b)
    _gemm.check_accumulator(op, a, c, _shape(a, b, eq), out_dtype)


def _reference(a: Tensor, b: Tensor, c: Tensor | None, *, eq: str, out_dtype: torch.dtype | None) -> Tensor:
    # Its result may be a view of the product that it made; an op returns no views.
    product = torch.einsum(eq, a.to(torch.float32), b.to(torch.float32)).clone(memory_format=torch.contiguous_format)
    return _gemm.finish(product, c, None, _gemm.result_dtype(c, out_dtype))


def _fake(a: Tensor, b: Tensor, c: Tensor | None, *, eq: str, out_dtype: torch.dtype | None) -> Tensor:
    return a.new_empty(_shape(a, b, eq), dtype=_gemm.result_dtype(c, out_dtype))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.eq = keyword_only_inputs["eq"]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wide = _gemm.as_float32(grad)
    pieces = () if wide or not any(needs[:2]) else _gemm.parts(grad)
    dtype = torch.bfloat16 if len(pieces) == 1 else torch.float32

    def closed(operands: str, eq: str) -> Tensor:
        if wide:
            left, right = ({"a": a, "b": b, "g": grad}[o].to(torch.float32) for o in operands)
            return torch.einsum(eq, left, right).to(torch.bfloat16).contiguous()
        out = None
        for g in pieces:
            left, right = ({"a": a, "b": b, "g": g}[o] for o in operands)
            out = einsum_bf16(eq, left, right, out, out_dtype=dtype)
        assert out is not None
        return out.to(torch.bfloat16)

    def summed(other: Tensor, layout: str) -> Tensor:
        """D = A' B' with the batch in K; the gradient [rows, batch * k] is one product, [m, n] by [n, batch * k]."""
        batch, rows, k = other.shape
        flat = other.transpose(0, 1).reshape(rows, batch * k)
        out = None
        if wide:
            left, right = _gemm.widened(grad, flat, layout)
            out = left @ right
        for g in pieces:
            out = gemm_bf16(g, flat, out, layout=layout, out_dtype=dtype)
        assert out is not None
        return out.to(torch.bfloat16).view(out.shape[0], batch, k).transpose(0, 1).contiguous()

    if ctx.eq == _SUM:
        return (
            summed(b, "nn") if needs[0] else None,
            summed(a, "tn") if needs[1] else None,
            grad if needs[2] else None,
        )
    for_a, for_b = _GRADIENTS[ctx.eq]
    return closed(*for_a) if needs[0] else None, closed(*for_b) if needs[1] else None, grad if needs[2] else None


EINSUM_BF16 = OpDef(
    name="einsum_bf16",
    schema="(Tensor a, Tensor b, Tensor? c, *, str eq, ScalarType? out_dtype) -> Tensor",
    check=_check_args,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_gemm.autocast,
    tolerance=_gemm.TOLERANCE,
    samples=einsum_samples,
    differentiable=("a", "b", "c"),
)
