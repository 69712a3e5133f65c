"""``k_grouped_gemm_bf16``: per group the product over its own rows (the weight gradient of grouped experts).

    D[g] = C[g] + A[rows of g]ᵀ @ B[rows of g]        A [R, M], B [R, N], D [G, M, N]

``ops/_grouped.py`` defines the layouts ``psum`` and ``sizes``. Padding rows of A and B are never read into a result. An
empty group gives C[g], or exactly zero. bfloat16 operands, float32 sums, one rounding. ``k_grouped_gemm_bf16_acc_``
adds the products to ``d`` in place.

Gradients are ``m_grouped_gemm_bf16``, zero in padding rows, so the op can be differentiated any number of times; a
float32 gradient is not rounded (``_gemm.parts``). The reference body reads the layout on the host. Contract: DeepGEMM
``k_grouped_bf16_gemm_tn_contiguous``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from ascend_deep.native.calls import KGroupedBf16, KGroupedBf16Acc, KGroupedScaled, KGroupedScaledAcc, takes
from ascend_deep.ops import _check, _gemm, _grouped
from ascend_deep.ops._grouped_samples import k_grouped_acc_samples, k_grouped_samples
from ascend_deep.ops._op import OpDef, call

__all__ = [
    "K_GROUPED_GEMM_BF16",
    "K_GROUPED_GEMM_BF16_ACC",
    "check_layout",
    "debug_layout",
    "ends_of",
    "k_grouped_gemm_bf16",
    "k_grouped_gemm_bf16_acc_",
]

_OP = "k_grouped_gemm_bf16"
_ACC = "k_grouped_gemm_bf16_acc_"
KGrouped: TypeAlias = "KGroupedBf16 | KGroupedBf16Acc | KGroupedScaled | KGroupedScaledAcc"
"""A call of one of the k-grouped products."""


def k_grouped_gemm_bf16(
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    *,
    ks: list[int] | None = None,
    grouping: str = "psum",
    alignment: int = 128,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``a.T @ b`` over the rows of each group; see the module.

    Args:
        a, b: [R, M] and [R, N] bf16.
        grouped_layout: i32 [G], ends (``psum``) or numbers of rows (``sizes``).
        c: [G, M, N] in the dtype of the result, or ``None``.
        ks: the number of rows of each group, known on the host, or ``None``; a hint for kernels that need it there.
        grouping: ``"psum"`` or ``"sizes"``.
        alignment: groups start at multiples of it.
        out_dtype: bf16 or f32; ``None``: that of ``c``, bf16 without it.

    Returns:
        [G, M, N], contiguous. Differentiable in a, b and c.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: with ASCEND_DEEP_DEBUG=1, a layout that breaks its promise, or a wrong ``ks``.
    """
    return call(
        _OP,
        a,
        b,
        grouped_layout,
        c,
        ks=ks,
        grouping=grouping,
        alignment=alignment,
        out_dtype=out_dtype,
    )


def k_grouped_gemm_bf16_acc_(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    *,
    ks: list[int] | None = None,
    grouping: str = "psum",
    alignment: int = 128,
) -> None:
    """``d[g] += a.T @ b`` over the rows of each group, in place, the sum rounded once; see the module.

    Args:
        d: [G, M, N] bf16 or f32, any strides without overlap; must share no memory with ``a`` or ``b``.
        a, b, grouped_layout, ks, grouping, alignment: as for ``k_grouped_gemm_bf16``.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: a gradient would be needed; and as for ``k_grouped_gemm_bf16``.
    """
    torch.ops.ascend_deep.k_grouped_gemm_bf16_acc_.default(
        d, a, b, grouped_layout, ks=ks, grouping=grouping, alignment=alignment
    )


def check_layout(op: str, x: KGrouped) -> None:
    """The index tensor, the alignment and the hint of a k-grouped product."""
    _check.choice(op, "grouping", x.grouping, _grouped.K_GROUPINGS)
    _check.dtypes(op, "grouped_layout", x.grouped_layout, (torch.int32, torch.int64))
    _check.rank(op, "grouped_layout", x.grouped_layout, "[G]", 1)
    _grouped.check_alignment(op, x.alignment)
    if x.ks is not None:
        _check.size(op, "the length of ks", len(x.ks), x.grouped_layout.shape[0], "the number of groups")
    _check.same_device(op, "a", x.a, grouped_layout=x.grouped_layout)


def debug_layout(op: str, x: KGrouped) -> None:
    """Raises RuntimeError if ends decrease or leave the buffer, a size is negative, or ``ks`` says something else."""
    sizes, rows = x.grouping == "sizes", x.a.shape[0]
    if sizes and bool(((x.grouped_layout < 0) | (x.grouped_layout % x.alignment != 0)).any()):
        raise RuntimeError(
            f"{op}: grouped_layout is {x.grouped_layout.tolist()}; sizes must be multiples of the alignment, "
            f"{x.alignment}, and not negative."
        )
    ends = ends_of(x)
    _grouped.debug_ends(op, ends, rows, "ends(grouped_layout)" if sizes else "grouped_layout")
    if x.ks is not None:
        found = [end - start for start, end in _grouped.bounds(ends, rows, x.alignment)]
        if list(x.ks) != found:
            raise RuntimeError(f"{op}: ks is {list(x.ks)}, but by grouped_layout the groups have {found} rows.")


def ends_of(x: KGrouped) -> Tensor:
    """The grouped layout as ``psum``."""
    return x.grouped_layout if x.grouping == "psum" else _grouped.ends_of_sizes(x.grouped_layout, x.alignment)


def _check_operands(op: str, x: KGroupedBf16 | KGroupedBf16Acc) -> tuple[Any, ...]:
    _gemm.check_operand(op, "a", x.a, "[R, M]", 2)
    _gemm.check_operand(op, "b", x.b, "[R, N]", 2)
    _check.size(op, "the number of rows of b", x.b.shape[0], x.a.shape[0], "that of a")
    _check.same_device(op, "a", x.a, b=x.b)
    check_layout(op, x)
    return x.grouped_layout.shape[0], x.a.shape[1], x.b.shape[1]


@takes(KGroupedBf16)
def _check_args(x: KGroupedBf16) -> None:
    _gemm.check_accumulator(_OP, x.a, x.c, _check_operands(_OP, x), x.out_dtype)


@takes(KGroupedBf16Acc)
def _check_acc(x: KGroupedBf16Acc) -> None:
    _gemm.check_accumulator(_ACC, x.a, x.d, _check_operands(_ACC, x), None, "d")


def _products(x: KGroupedBf16 | KGroupedBf16Acc) -> Tensor:
    """[G, M, N] in f32, not rounded."""
    ends = ends_of(x)
    out = x.a.new_zeros((ends.shape[0], x.a.shape[1], x.b.shape[1]), dtype=torch.float32)
    for g, (start, end) in enumerate(_grouped.bounds(ends, x.a.shape[0], x.alignment)):
        left, right = _gemm.widened(x.a[start:end], x.b[start:end], "tn")
        out[g] = left @ right
    return out


@takes(KGroupedBf16)
def _reference(x: KGroupedBf16) -> Tensor:
    return _gemm.finish(_products(x), x.c, None, _gemm.result_dtype(x.c, x.out_dtype))


@takes(KGroupedBf16Acc)
def _reference_acc(x: KGroupedBf16Acc) -> None:
    x.d.copy_(_gemm.finish(_products(x), x.d, None, x.d.dtype))


@takes(KGroupedBf16)
def _fake(x: KGroupedBf16) -> Tensor:
    shape = (x.grouped_layout.shape[0], x.a.shape[1], x.b.shape[1])
    return x.a.new_empty(shape, dtype=_gemm.result_dtype(x.c, x.out_dtype))


def _fake_acc(*_: Any, **__: Any) -> None:
    return None


@takes(KGroupedBf16)
def _debug(x: KGroupedBf16) -> None:
    debug_layout(_OP, x)


@takes(KGroupedBf16Acc)
def _debug_acc(x: KGroupedBf16Acc) -> None:
    debug_layout(_ACC, x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.grouping, ctx.alignment = keyword_only_inputs["grouping"], keyword_only_inputs["alignment"]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # The two ops are each other's gradients, so one of the imports has to wait.
    from ascend_deep.ops.m_grouped_gemm_bf16 import m_grouped_gemm_bf16

    a, b, ends = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if ctx.grouping == "sizes":
        ends = _grouped.ends_of_sizes(ends, ctx.alignment)
    pieces = _gemm.parts(grad) if needs[0] or needs[1] else ()
    dtype = torch.bfloat16 if len(pieces) == 1 else torch.float32

    def rows(t: Tensor, layout: str) -> Tensor:
        out = None
        for g in pieces:
            part = m_grouped_gemm_bf16(t, g, ends, layout=layout, alignment=ctx.alignment, out_dtype=dtype)
            out = part if out is None else out + part
        assert out is not None
        return out.to(torch.bfloat16)

    return (
        rows(b, "nt") if needs[0] else None,
        rows(a, "nn") if needs[1] else None,
        None,
        grad if needs[3] else None,
    )


K_GROUPED_GEMM_BF16 = OpDef(
    name=_OP,
    schema=(
        "(Tensor a, Tensor b, Tensor grouped_layout, Tensor? c, *, SymInt[]? ks, str grouping, SymInt alignment, "
        "ScalarType? out_dtype) -> Tensor"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_gemm.autocast,
    debug=_debug,
    tolerance=_gemm.TOLERANCE,
    samples=k_grouped_samples,
    differentiable=("a", "b", "c"),
)

K_GROUPED_GEMM_BF16_ACC = OpDef(
    name=_ACC,
    schema=(
        "(Tensor(a!) d, Tensor a, Tensor b, Tensor grouped_layout, *, SymInt[]? ks, str grouping, SymInt alignment) "
        "-> ()"
    ),
    check=_check_acc,
    reference=_reference_acc,
    fake=_fake_acc,
    no_backward="it writes into d; call k_grouped_gemm_bf16, which returns its result, where gradients are needed.",
    debug=_debug_acc,
    tolerance=_gemm.TOLERANCE,
    samples=k_grouped_acc_samples,
)
