"""``gemm_bf16``: one matrix product of bfloat16 operands with float32 sums, and its forms that write into a buffer.

    gemm_bf16        returns   C + alpha * op(A) @ op(B)
    gemm_bf16_out    writes it into ``d``; ``c`` may be ``d`` itself
    gemm_bf16_acc_   adds op(A) @ op(B) to ``d``, with one rounding of the sum (weight gradients)

``ops/_gemm.py`` defines layouts and arithmetic. M, N and K may be 0; K = 0 gives C, or zeros. NaN and infinities follow
IEEE arithmetic. Contract: DeepGEMM ``bf16_gemm_{nt,nn,tn,tt}`` with the output returned.

The gradients are products of the same kind, so ``gemm_bf16`` can be differentiated any number of times. A float32
gradient (of a float32 result) is not rounded, see ``_gemm.parts``; gradients of a and b are bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _gemm
from ascend_deep.ops._gemm_samples import acc_samples, dense_samples, out_samples
from ascend_deep.ops._op import OpDef, call

__all__ = ["GEMM_BF16", "GEMM_BF16_ACC", "GEMM_BF16_OUT", "gemm_bf16", "gemm_bf16_acc_", "gemm_bf16_out"]

# The gradients of a and of b as calls of the op: operands ("g" is the gradient) and layout.
_GRADIENTS = {
    "nt": ("gb", "nn", "ga", "tn"),
    "nn": ("gb", "nt", "ag", "tn"),
    "tn": ("bg", "nt", "ag", "nn"),
    "tt": ("bg", "tt", "ga", "tt"),
}


def gemm_bf16(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    layout: str = "nt",
    out_dtype: torch.dtype | None = None,
    alpha: float | None = None,
) -> Tensor:
    """``c + alpha * op(a) @ op(b)``; see the module.

    Args:
        a: [M, K] or [K, M] bf16, by ``layout``.
        b: [N, K] or [K, N] bf16, by ``layout``.
        c: [M, N] in the dtype of the result, or ``None``.
        layout: ``"nt"``, ``"nn"``, ``"tn"`` or ``"tt"``.
        out_dtype: bf16 or f32; ``None``: that of ``c``, bf16 without it.
        alpha: factor of the product; ``None``: 1.

    Returns:
        [M, N], contiguous. Differentiable in a, b and c.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call("gemm_bf16", a, b, c, layout=layout, out_dtype=out_dtype, alpha=alpha)


def gemm_bf16_out(
    d: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None, *, layout: str = "nt", alpha: float | None = None
) -> None:
    """``gemm_bf16`` into ``d``, in place; see the module.

    Args:
        d: [M, N] bf16 or f32, any strides without overlap; must share no memory with ``a`` or ``b``.
        a, b, layout, alpha: as for ``gemm_bf16``.
        c: [M, N] in the dtype of ``d``, ``d`` itself, or ``None``; must not overlap ``d`` in part.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: a gradient would be needed.
    """
    torch.ops.ascend_deep.gemm_bf16_out.default(d, a, b, c, layout=layout, alpha=alpha)


def gemm_bf16_acc_(d: Tensor, a: Tensor, b: Tensor, *, layout: str = "tn") -> None:
    """``d += op(a) @ op(b)``, in place, the sum rounded once; see the module.

    Args:
        d: [M, N] bf16 or f32, any strides without overlap; must share no memory with ``a`` or ``b``.
        a, b, layout: as for ``gemm_bf16``.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: a gradient would be needed.
    """
    torch.ops.ascend_deep.gemm_bf16_acc_.default(d, a, b, layout=layout)


def _check_args(
    a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, out_dtype: torch.dtype | None, alpha: float | None
) -> None:
    _gemm.check_dense("gemm_bf16", a, b, layout)
    _gemm.check_accumulator("gemm_bf16", a, c, _gemm.sizes(a, b, layout)[:2], out_dtype)


def _check_out(d: Tensor, a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, alpha: float | None) -> None:
    _gemm.check_dense("gemm_bf16_out", a, b, layout)
    shape = _gemm.sizes(a, b, layout)[:2]
    _gemm.check_accumulator("gemm_bf16_out", a, d, shape, None, "d")
    _gemm.check_accumulator("gemm_bf16_out", a, c, shape, d.dtype)


def _check_acc(d: Tensor, a: Tensor, b: Tensor, *, layout: str) -> None:
    _gemm.check_dense("gemm_bf16_acc_", a, b, layout)
    _gemm.check_accumulator("gemm_bf16_acc_", a, d, _gemm.sizes(a, b, layout)[:2], None, "d")


def _reference(
    a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, out_dtype: torch.dtype | None, alpha: float | None
) -> Tensor:
    left, right = _gemm.widened(a, b, layout)
    return _gemm.finish(left @ right, c, alpha, _gemm.result_dtype(c, out_dtype))


def _reference_out(d: Tensor, a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, alpha: float | None) -> None:
    d.copy_(_reference(a, b, c, layout=layout, out_dtype=d.dtype, alpha=alpha))


def _reference_acc(d: Tensor, a: Tensor, b: Tensor, *, layout: str) -> None:
    d.copy_(_reference(a, b, d, layout=layout, out_dtype=d.dtype, alpha=None))


def _fake(a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, out_dtype: torch.dtype | None, **_: Any) -> Tensor:
    return a.new_empty(_gemm.sizes(a, b, layout)[:2], dtype=_gemm.result_dtype(c, out_dtype))


def _fake_nothing(*_: Any, **__: Any) -> None:
    return None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.layout, ctx.alpha = keyword_only_inputs["layout"], keyword_only_inputs["alpha"]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    wide = _gemm.as_float32(grad)
    pieces = () if wide or not any(ctx.needs_input_grad[:2]) else _gemm.parts(grad)
    of_a, layout_a, of_b, layout_b = _GRADIENTS[ctx.layout]

    def product(operands: str, layout: str) -> Tensor:
        if wide:
            left, right = ({"a": a, "b": b, "g": grad}[o] for o in operands)
            left, right = _gemm.widened(left, right, layout)
            return _gemm.finish(left @ right, None, ctx.alpha, torch.bfloat16)
        out = None
        for g in pieces:
            left, right = ({"a": a, "b": b, "g": g}[o] for o in operands)
            dtype = torch.bfloat16 if len(pieces) == 1 else torch.float32
            out = gemm_bf16(left, right, out, layout=layout, out_dtype=dtype, alpha=ctx.alpha)
        assert out is not None
        return out.to(torch.bfloat16)

    return (
        product(of_a, layout_a) if ctx.needs_input_grad[0] else None,
        product(of_b, layout_b) if ctx.needs_input_grad[1] else None,
        grad if ctx.needs_input_grad[2] else None,
    )


GEMM_BF16 = OpDef(
    name="gemm_bf16",
    schema="(Tensor a, Tensor b, Tensor? c, *, str layout, ScalarType? out_dtype, float? alpha) -> Tensor",
    check=_check_args,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_gemm.autocast,
    tolerance=_gemm.TOLERANCE,
    samples=dense_samples,
    differentiable=("a", "b", "c"),
)

_IN_PLACE = "it writes into d; call gemm_bf16, which returns its result, where gradients are needed."

GEMM_BF16_OUT = OpDef(
    name="gemm_bf16_out",
    schema="(Tensor(a!) d, Tensor a, Tensor b, Tensor? c, *, str layout, float? alpha) -> ()",
    check=_check_out,
    reference=_reference_out,
    fake=_fake_nothing,
    no_backward=_IN_PLACE,
    tolerance=_gemm.TOLERANCE,
    samples=out_samples,
)

GEMM_BF16_ACC = OpDef(
    name="gemm_bf16_acc_",
    schema="(Tensor(a!) d, Tensor a, Tensor b, *, str layout) -> ()",
    check=_check_acc,
    reference=_reference_acc,
    fake=_fake_nothing,
    no_backward=_IN_PLACE,
    tolerance=_gemm.TOLERANCE,
    samples=acc_samples,
)
