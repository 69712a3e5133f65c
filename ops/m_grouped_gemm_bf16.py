"""``m_grouped_gemm_bf16``: rows of one buffer, each times the matrix of its group (the experts of a MoE layer).

    D[i] = A[i] @ op(B[g])      for every row i of group g;  D[i] = 0 for padding rows

``ops/_grouped.py`` defines the layouts ``psum`` and ``labels``. ``layout="nt"``: B [G, N, K]; ``"nn"``: B [G, K, N].
Padding rows of A are never read into a result. With ``zero_padding=False`` padding rows of D are unspecified, which
saves a kernel from writing them. bfloat16 operands, float32 sums, one rounding. Groups may be empty, M, N, K be 0.

Gradients: dA is the same op with the other layout, its padding rows are zero; dB is ``k_grouped_gemm_bf16``, exactly
zero for an empty group. Rows given by ``labels`` are first moved into a psum layout for that, which looks at no value
on the host. The op can be differentiated any number of times; a float32 gradient is not rounded (``_gemm.parts``).

The reference body reads the layout on the host. Contract: DeepGEMM ``m_grouped_bf16_gemm_{nt,nn}_contiguous``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import MGroupedBf16, takes
from ascend_deep.ops import _check, _gemm, _grouped
from ascend_deep.ops._grouped_samples import m_grouped_samples
from ascend_deep.ops._op import OpDef, call
from ascend_deep.ops.k_grouped_gemm_bf16 import k_grouped_gemm_bf16
from ascend_deep.ops.moe_permute import moe_permute

__all__ = ["M_GROUPED_GEMM_BF16", "M_GROUPED_LAYOUTS", "m_grouped_gemm_bf16"]

_OP = "m_grouped_gemm_bf16"
M_GROUPED_LAYOUTS = ("nt", "nn")


def m_grouped_gemm_bf16(
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    *,
    layout: str = "nt",
    grouping: str = "psum",
    alignment: int = 128,
    expected_m: int | None = None,
    zero_padding: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Every row of ``a`` times the matrix of its group; see the module.

    Args:
        a: [M, K] bf16.
        b: [G, N, K] or [G, K, N] bf16, by ``layout``.
        grouped_layout: i32 [G] ends (``psum``) or i32 [M] group ids (``labels``).
        layout: ``"nt"`` or ``"nn"``.
        grouping: ``"psum"`` or ``"labels"``.
        alignment: groups start at multiples of it.
        expected_m: rows of a typical group, a hint for kernels; changes no result.
        zero_padding: write zeros to rows that belong to no group.
        out_dtype: bf16 or f32; ``None``: bf16.

    Returns:
        [M, N], contiguous. Differentiable in a and b.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: with ASCEND_DEEP_DEBUG=1, a layout that breaks its promise.
    """
    return call(
        _OP,
        a,
        b,
        grouped_layout,
        layout=layout,
        grouping=grouping,
        alignment=alignment,
        expected_m=expected_m,
        zero_padding=zero_padding,
        out_dtype=out_dtype,
    )


@takes(MGroupedBf16)
def _check_args(x: MGroupedBf16) -> None:
    a, b = x.a, x.b
    _check.choice(_OP, "layout", x.layout, M_GROUPED_LAYOUTS)
    _gemm.check_operand(_OP, "a", a, "[M, K]", 2)
    _gemm.check_operand(_OP, "b", b, "[G, N, K]" if x.layout == "nt" else "[G, K, N]", 3)
    _, _, ka, kb = _gemm.sizes(a, b, x.layout)
    _check.size(_OP, f"K of b in layout {x.layout!r}", kb, ka, "K of a")
    _grouped.check_m_grouped(_OP, a, x.grouped_layout, b.shape[0], x.grouping, x.alignment, x.expected_m)
    _check.same_device(_OP, "a", a, b=b)
    _gemm.check_accumulator(_OP, a, None, (), x.out_dtype)


@takes(MGroupedBf16)
def _reference(x: MGroupedBf16) -> Tensor:
    rows, columns, _, _ = _gemm.sizes(x.a, x.b, x.layout)
    out = x.a.new_zeros((rows, columns), dtype=x.out_dtype or torch.bfloat16)
    groups = _grouped.rows_of_groups(x.grouped_layout, x.b.shape[0], rows, x.grouping, x.alignment)
    for g, own in enumerate(groups):
        left, right = _gemm.widened(x.a[own], x.b[g], x.layout)
        if left.shape[0]:
            out[own] = (left @ right).to(out.dtype)
    return out


@takes(MGroupedBf16)
def _fake(x: MGroupedBf16) -> Tensor:
    return x.a.new_empty(_gemm.sizes(x.a, x.b, x.layout)[:2], dtype=x.out_dtype or torch.bfloat16)


@takes(MGroupedBf16)
def _debug(x: MGroupedBf16) -> None:
    _grouped.debug_m_grouped(_OP, x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.attributes = keyword_only_inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, grouped_layout = ctx.saved_tensors
    pieces = _gemm.parts(grad)
    dtype = torch.bfloat16 if len(pieces) == 1 else torch.float32
    d_a = d_b = None
    if ctx.needs_input_grad[0]:
        attributes = {
            **ctx.attributes,
            "layout": "nn" if ctx.attributes["layout"] == "nt" else "nt",
            "zero_padding": True,
            "out_dtype": dtype,
        }
        for g in pieces:
            part = m_grouped_gemm_bf16(g, b, grouped_layout, **attributes)
            d_a = part if d_a is None else d_a + part
    if ctx.needs_input_grad[1]:
        d_b = weight_gradient(
            pieces, a, grouped_layout, b.shape[0], ctx.attributes["layout"], ctx.attributes["grouping"],
            ctx.attributes["alignment"], dtype,
        )  # fmt: skip
    return None if d_a is None else d_a.to(torch.bfloat16), None if d_b is None else d_b.to(torch.bfloat16), None


def weight_gradient(
    pieces: tuple[Tensor, ...],
    a: Tensor,
    grouped_layout: Tensor,
    groups: Any,
    layout: str,
    grouping: str,
    alignment: Any,
    dtype: torch.dtype,
) -> Tensor:
    """[G, N, K] (``nt``) or [G, K, N] (``nn``): per group the sum over its rows of gradient times A."""
    ends = grouped_layout
    if grouping == "labels":
        ids = grouped_layout.unsqueeze(1)

        def moved(t: Tensor) -> tuple[Tensor, Tensor]:
            rows, _, _, found, _ = moe_permute(t, ids, num_experts=groups, alignment=alignment)
            return rows, found

        a, ends = moved(a)
        pieces = tuple(moved(g)[0] for g in pieces)
    out = None
    for g in pieces:
        left, right = (g, a) if layout == "nt" else (a, g)
        out = k_grouped_gemm_bf16(left, right, ends, out, alignment=alignment, out_dtype=dtype)
    assert out is not None
    return out


M_GROUPED_GEMM_BF16 = OpDef(
    name=_OP,
    schema=(
        "(Tensor a, Tensor b, Tensor grouped_layout, *, str layout, str grouping, SymInt alignment, "
        "SymInt? expected_m, bool zero_padding, ScalarType? out_dtype) -> Tensor"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_gemm.autocast,
    debug=_debug,
    tolerance=_gemm.TOLERANCE,
    samples=m_grouped_samples,
    differentiable=("a", "b"),
)
