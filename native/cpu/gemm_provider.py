"""The matrix products of the CPU provider: the ops' arguments as the C++ functions take them, and their limits.

``gemm_bf16`` and ``gemm_scaled`` are ops of the library with the schemas of the ops. All other products are calls of
its ``gemm_many``, which takes tensors with the positions of (batch, rows, K) among their dimensions: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.cpu.gemm_quant_provider import element_count, empty_scales, quantised

__all__ = ["KERNELS", "SAME"]

# The dimensions of a matrix, of its transpose, of a batch of matrices and of its transposes: batch, rows, K.
_MATRIX, _TRANSPOSED = (-1, 0, 1), (-1, 1, 0)
_BATCH, _BATCH_TRANSPOSED = (0, 1, 2), (0, 2, 1)
# The letter of the batch, of M (a), of N (b) and of K.
_LETTERS = {"bhr,hdr->bhd": "hbdr", "bhd,hdr->bhr": "hbrd", "bhd,bhr->hdr": "hdrb", "bmk,bnk->mn": "bmnk"}

Dims = tuple[int, int, int]


def _many(
    d: Tensor,
    a: tuple[Tensor, Dims],
    b: tuple[Tensor, Dims],
    c: Tensor | None = None,
    *,
    dims_d: Dims = _MATRIX,
    sfa: tuple[Tensor, Dims, Sequence[int]] | None = None,
    sfb: tuple[Tensor, Dims, Sequence[int]] | None = None,
    layout: Tensor | None = None,
    mode: str = "batch",
    alignment: int = 1,
    alpha: float | None = None,
) -> Tensor:
    """``d[g] = c[g] + alpha * A[g] B[g]^T``, see ``gemm_bind.cpp``; operands with their dimensions, scales also with
    their blocks. Returns ``d``."""
    torch.ops.ascend_deep_cpu.gemm_many(
        d,
        a[0],
        sfa[0] if sfa else None,
        b[0],
        sfb[0] if sfb else None,
        c,
        layout,
        mode,
        a[1],
        b[1],
        dims_d,
        sfa[1] if sfa else (),
        sfb[1] if sfb else (),
        sfa[2] if sfa else (),
        sfb[2] if sfb else (),
        alignment,
        1.0 if alpha is None else alpha,
    )
    return d


def _dense(layout: str) -> tuple[Dims, Dims]:
    return (_MATRIX if layout[0] == "n" else _TRANSPOSED), (_MATRIX if layout[1] == "t" else _TRANSPOSED)


def _type(c: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    return out_dtype or (torch.bfloat16 if c is None else c.dtype)


# ---- dense -----------------------------------------------------------------------------------------------------------


def _fake_bf16(
    a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, out_dtype: torch.dtype | None, **_: Any
) -> Tensor:
    dims_a, dims_b = _dense(layout)
    return a.new_empty((element_count(a, dims_a[1]), element_count(b, dims_b[1])), dtype=_type(c, out_dtype))


def _fake_scaled(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, c: Tensor | None, **attributes: Any) -> Tensor:
    return _fake_bf16(a, b, c, **attributes)


def _gemm_bf16_out(d: Tensor, a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, alpha: float | None) -> None:
    dims_a, dims_b = _dense(layout)
    _many(d, (a, dims_a), (b, dims_b), c, alpha=alpha)


def _gemm_bf16_acc(d: Tensor, a: Tensor, b: Tensor, *, layout: str) -> None:
    _gemm_bf16_out(d, a, b, d, layout=layout, alpha=None)


def _gemm_scaled_out(
    d: Tensor,
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    c: Tensor | None,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    layout: str,
    alpha: float | None,
) -> None:
    dims_a, dims_b = _dense(layout)
    scales = {"sfa": (sfa, _MATRIX, recipe_a), "sfb": (sfb, _MATRIX, recipe_b)}
    _many(d, (a, dims_a), (b, dims_b), c, **scales, alpha=alpha)  # type: ignore[arg-type]


def _gemm_scaled_acc(d: Tensor, a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, **attributes: Any) -> None:
    _gemm_scaled_out(d, a, sfa, b, sfb, d, **attributes, alpha=None)


def _gemm_scaled_fp8out(
    a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, *, clamp: float | None, sf_format: str, **attributes: Any
) -> tuple[Tensor, Tensor]:
    out = torch.ops.ascend_deep_cpu.gemm_scaled(a, sfa, b, sfb, None, **attributes, out_dtype=torch.float32, alpha=None)
    if clamp is not None:
        out = out.clamp_(-clamp, clamp)
    return quantised(out, (1, 32), False, True, sf_format)


# ---- grouped ---------------------------------------------------------------------------------------------------------


def _m_grouped(
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    *,
    layout: str,
    grouping: str,
    alignment: int,
    expected_m: int | None,
    zero_padding: bool,
    out_dtype: torch.dtype | None,
    sfa: tuple[Tensor, Dims, Sequence[int]] | None = None,
    sfb: tuple[Tensor, Dims, Sequence[int]] | None = None,
) -> Tensor:
    dims_b = _BATCH if layout == "nt" else _BATCH_TRANSPOSED
    make = torch.zeros if zero_padding else torch.empty
    d = make(a.shape[0], element_count(b, dims_b[1]), dtype=out_dtype or torch.bfloat16, device="cpu")
    mode = "psum_m" if grouping == "psum" else "labels_m"
    return _many(d, (a, _MATRIX), (b, dims_b), sfa=sfa, sfb=sfb, layout=grouped_layout, mode=mode, alignment=alignment)


def _m_grouped_scaled(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    grouped_layout: Tensor,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    **attributes: Any,
) -> Tensor:
    return _m_grouped(a, b, grouped_layout, **attributes, sfa=(sfa, _MATRIX, recipe_a), sfb=(sfb, _BATCH, recipe_b))


def _masked(a: Tensor, b: Tensor, masked_m: Tensor, *, expected_m: int, **scales: Any) -> Tensor:
    d = torch.zeros(a.shape[0], a.shape[1], b.shape[1], dtype=torch.bfloat16, device="cpu")
    return _many(d, (a, _BATCH), (b, _BATCH), dims_d=_BATCH, **scales, layout=masked_m, mode="masked")


def _masked_scaled(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    masked_m: Tensor,
    *,
    expected_m: int,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
) -> Tensor:
    scales = {"sfa": (sfa, _BATCH, recipe_a), "sfb": (sfb, _BATCH, recipe_b)}
    return _masked(a, b, masked_m, expected_m=expected_m, **scales)


def _k_grouped_into(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    c: Tensor | None,
    grouping: str,
    alignment: int,
    **scales: Any,
) -> Tensor:
    mode = "psum_k" if grouping == "psum" else "sizes_k"
    return _many(
        d,
        (a, _TRANSPOSED),
        (b, _TRANSPOSED),
        c,
        dims_d=_BATCH,
        **scales,
        layout=grouped_layout,
        mode=mode,
        alignment=alignment,
    )


def _k_grouped(
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    c: Tensor | None,
    *,
    ks: Sequence[int] | None,
    grouping: str,
    alignment: int,
    out_dtype: torch.dtype | None,
    **scales: Any,
) -> Tensor:
    d = torch.empty(
        grouped_layout.shape[0], element_count(a, 1), element_count(b, 1), dtype=_type(c, out_dtype), device="cpu"
    )
    return _k_grouped_into(d, a, b, grouped_layout, c, grouping, alignment, **scales)


def _k_grouped_acc(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    *,
    ks: Sequence[int] | None,
    grouping: str,
    alignment: int,
    **scales: Any,
) -> None:
    _k_grouped_into(d, a, b, grouped_layout, d, grouping, alignment, **scales)


def _k_scales(sfa: Tensor, sfb: Tensor, gran_k: int) -> dict[str, Any]:
    return {"sfa": (sfa, _MATRIX, (1, gran_k)), "sfb": (sfb, _MATRIX, (1, gran_k))}


def _k_grouped_scaled(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    grouped_layout: Tensor,
    c: Tensor | None,
    *,
    gran_k: int,
    **attributes: Any,
) -> Tensor:
    return _k_grouped(a, b, grouped_layout, c, **attributes, **_k_scales(sfa, sfb, gran_k))


def _k_grouped_scaled_acc(
    d: Tensor,
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    grouped_layout: Tensor,
    *,
    gran_k: int,
    **attributes: Any,
) -> None:
    _k_grouped_acc(d, a, b, grouped_layout, **attributes, **_k_scales(sfa, sfb, gran_k))


# ---- einsum ----------------------------------------------------------------------------------------------------------


def _positions(eq: str) -> tuple[Dims, Dims, Dims]:
    """(batch, rows, K) of a and b, (batch, M, N) of the result."""
    operands, result = eq.split("->")
    left, right = operands.split(",")
    batch, m, n, k = tuple(_LETTERS[eq])
    return (
        (left.index(batch), left.index(m), left.index(k)),
        (right.index(batch), right.index(n), right.index(k)),
        (result.find(batch), result.index(m), result.index(n)),
    )


def _einsum_shape(a: Tensor, b: Tensor, eq: str) -> tuple[int, ...]:
    dims_a, dims_b, dims_d = _positions(eq)
    found = dict(zip(dims_d, (a.shape[dims_a[0]], a.shape[dims_a[1]], b.shape[dims_b[1]]), strict=True))
    return tuple(found[i] for i in range(3) if i in found)


def _einsum_bf16(a: Tensor, b: Tensor, c: Tensor | None, *, eq: str, out_dtype: torch.dtype | None) -> Tensor:
    dims_a, dims_b, dims_d = _positions(eq)
    d = torch.empty(_einsum_shape(a, b, eq), dtype=_type(c, out_dtype), device="cpu")
    if dims_d[0] < 0:
        # The batch is part of what is summed: K of one product.
        a, b = (x.transpose(0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2]) for x in (a, b))
        return _many(d, (a, _MATRIX), (b, _MATRIX), c)
    return _many(d, (a, dims_a), (b, dims_b), c, dims_d=dims_d)


def _einsum_scaled(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    c: Tensor | None,
    *,
    eq: str,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    out_dtype: torch.dtype | None,
) -> Tensor:
    dims_a, dims_b, dims_d = _positions(eq)
    kind = _type(c, out_dtype)
    # float32 scales follow the dimensions of their operand, packed ones are [batch, rows, words].
    where_a = dims_a if sfa.dtype == torch.float32 else _BATCH
    where_b = dims_b if sfb.dtype == torch.float32 else _BATCH
    if dims_d[0] >= 0:
        d = torch.empty(_einsum_shape(a, b, eq), dtype=kind, device="cpu")
        scales_a, scales_b = (sfa, where_a, recipe_a), (sfb, where_b, recipe_b)
        return _many(d, (a, dims_a), (b, dims_b), c, dims_d=dims_d, sfa=scales_a, sfb=scales_b)
    # Groups of scales end with a batch entry: one product after the other, summed in float32.
    shape = _einsum_shape(a, b, eq)
    total = (
        torch.zeros(shape, dtype=torch.float32, device="cpu")
        if c is None
        else c.to(torch.float32, copy=True).contiguous()
    )
    for i in range(a.shape[0]):
        _many(
            total,
            (a[i], _MATRIX),
            (b[i], _MATRIX),
            total,
            sfa=(sfa[i], _MATRIX, recipe_a),
            sfb=(sfb[i], _MATRIX, recipe_b),
        )
    return total.to(kind)


def _einsum_scaled_fp8out(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    *,
    eq: str,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    clamp: float | None,
    sf_format: str,
) -> tuple[Tensor, Tensor]:
    out = _einsum_scaled(a, sfa, b, sfb, None, eq=eq, recipe_a=recipe_a, recipe_b=recipe_b, out_dtype=torch.float32)
    rows, heads, depth = out.shape
    # The scales are those of a matrix; the data must be no view.
    data = torch.empty(out.shape, dtype=torch.float8_e4m3fn, device="cpu")
    if clamp is not None:
        out = out.clamp_(-clamp, clamp)
    scales = empty_scales((), rows, heads * depth // 32, 1, sf_format)
    matrix = out.view(rows, heads * depth)
    torch.ops.ascend_deep_cpu.quantise(data.view(matrix.shape), scales, matrix, (1, 32), False, True)
    return data, scales


def _hc_prenorm_gemm(a: Tensor, b: Tensor, *, num_splits: int | None) -> tuple[Tensor, Tensor]:
    (rows, k), columns = a.shape, b.shape[0]
    lead = () if num_splits is None else (num_splits,)
    products = torch.empty(*lead, rows, columns, dtype=torch.float32, device="cpu")
    squares = torch.empty(*lead, rows, dtype=torch.float32, device="cpu")
    if num_splits is None:
        _many(products, (a, _MATRIX), (b, _MATRIX))
        torch.ops.ascend_deep_cpu.row_squares(squares.unsqueeze(0), a, max(k, 1))
        return products, squares
    width = max(-(-k // num_splits), 1)
    ends = torch.tensor([min((i + 1) * width, k) for i in range(num_splits)], device="cpu")
    _many(products, (a, _MATRIX), (b, _MATRIX), dims_d=_BATCH, layout=ends, mode="psum_k")
    torch.ops.ascend_deep_cpu.row_squares(squares, a, width)
    return products, squares


SAME: Mapping[str, Callable[..., Any]] = {"gemm_bf16": _fake_bf16, "gemm_scaled": _fake_scaled}

KERNELS: Mapping[str, Callable[..., Any]] = {
    "gemm_bf16_out": _gemm_bf16_out,
    "gemm_bf16_acc_": _gemm_bf16_acc,
    "gemm_scaled_out": _gemm_scaled_out,
    "gemm_scaled_acc_": _gemm_scaled_acc,
    "gemm_scaled_fp8out": _gemm_scaled_fp8out,
    "m_grouped_gemm_bf16": _m_grouped,
    "m_grouped_gemm_scaled": _m_grouped_scaled,
    "m_grouped_gemm_bf16_masked": _masked,
    "m_grouped_gemm_scaled_masked": _masked_scaled,
    "k_grouped_gemm_bf16": _k_grouped,
    "k_grouped_gemm_bf16_acc_": _k_grouped_acc,
    "k_grouped_gemm_scaled": _k_grouped_scaled,
    "k_grouped_gemm_scaled_acc_": _k_grouped_scaled_acc,
    "einsum_bf16": _einsum_bf16,
    "einsum_scaled": _einsum_scaled,
    "einsum_scaled_fp8out": _einsum_scaled_fp8out,
    "hc_prenorm_gemm": _hc_prenorm_gemm,
}
