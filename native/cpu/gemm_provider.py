"""The matrix products of the CPU provider: the ops' arguments as the C++ functions take them, and their limits.

``gemm_bf16`` and ``gemm_scaled`` are ops of the library with the schemas of the ops. All other products are calls of
its ``gemm_many``, which takes tensors with the positions of (batch, rows, K) among their dimensions: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["ACTS", "KERNELS", "LIMITS", "SAME"]

ACTS = frozenset({"silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "swiglu_oai", "silu_clamp"})
_OUT = (None, torch.float32, torch.bfloat16)
_X2 = getattr(torch, "float4_e2m1fn_x2", None)
_FP4 = (torch.int8, torch.uint8, _X2)
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


def _size(x: Tensor, dim: int) -> int:
    """Elements along a dimension; FP4 has two per byte along the last one."""
    return x.shape[dim] * (2 if x.dtype in _FP4 and dim in (-1, x.dim() - 1) else 1)


def _type(c: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    return out_dtype or (torch.bfloat16 if c is None else c.dtype)


# ---- dense -----------------------------------------------------------------------------------------------------------


def _fake_bf16(
    a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, out_dtype: torch.dtype | None, **_: Any
) -> Tensor:
    dims_a, dims_b = _dense(layout)
    return a.new_empty((_size(a, dims_a[1]), _size(b, dims_b[1])), dtype=_type(c, out_dtype))


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
    return _requantised(out, clamp, sf_format)


def _requantised(out: Tensor, clamp: float | None, sf_format: str) -> tuple[Tensor, Tensor]:
    if clamp is not None:
        out = out.clamp_(-clamp, clamp)
    return _quant_fp8(out, gran=(1, 32), ue8m0=True, sf_format=sf_format)


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
    d = make(a.shape[0], _size(b, dims_b[1]), dtype=out_dtype or torch.bfloat16)
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
    d = torch.zeros(a.shape[0], a.shape[1], b.shape[1], dtype=torch.bfloat16)
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
    d = torch.empty(grouped_layout.shape[0], _size(a, 1), _size(b, 1), dtype=_type(c, out_dtype))
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
    batch, m, n, k = _LETTERS[eq]
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
    d = torch.empty(_einsum_shape(a, b, eq), dtype=_type(c, out_dtype))
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
        d = torch.empty(_einsum_shape(a, b, eq), dtype=kind)
        scales_a, scales_b = (sfa, where_a, recipe_a), (sfb, where_b, recipe_b)
        return _many(d, (a, dims_a), (b, dims_b), c, dims_d=dims_d, sfa=scales_a, sfb=scales_b)
    # Groups of scales end with a batch entry: one product after the other, summed in float32.
    shape = _einsum_shape(a, b, eq)
    total = torch.zeros(shape, dtype=torch.float32) if c is None else c.to(torch.float32, copy=True).contiguous()
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
    data, scales = _requantised(out.view(out.shape[0], out.shape[1] * out.shape[2]), clamp, sf_format)
    return data.view(out.shape), scales


def _hc_prenorm_gemm(a: Tensor, b: Tensor, *, num_splits: int | None) -> tuple[Tensor, Tensor]:
    (rows, k), columns = a.shape, b.shape[0]
    splits = 1 if num_splits is None else num_splits
    width = max(-(-k // splits), 1)
    products = torch.empty(splits, rows, columns)
    squares = torch.empty(splits, rows)
    if num_splits is None:
        _many(products[0], (a, _MATRIX), (b, _MATRIX))
    else:
        ends = torch.tensor([min((i + 1) * width, k) for i in range(splits)])
        _many(products, (a, _MATRIX), (b, _MATRIX), dims_d=_BATCH, layout=ends, mode="psum_k")
    torch.ops.ascend_deep_cpu.row_squares(squares, a, width)
    return (products[0], squares[0]) if num_splits is None else (products, squares)


# ---- quantisation ----------------------------------------------------------------------------------------------------


def _empty_scales(lead: Sequence[int], rows: int, groups: int, gran_row: int, sf_format: str) -> Tensor:
    """Where scales are written to. Packed words: 127 behind the last group, and rows next to each other in memory with
    zeros up to the next column."""
    if sf_format == "fp32":
        return torch.empty((*lead, -(-rows // gran_row), groups))
    per, dtype = (4, torch.int32) if sf_format == "ue8m0x4" else (2, torch.int16)
    words = -(-groups // per)
    pitch = -(-rows // 4) * 4 if per == 4 else rows
    strides, step = [1, pitch], pitch * words
    for size in reversed(lead):
        strides.insert(0, step)
        step *= size
    out = torch.empty_strided((*lead, rows, words), strides, dtype=dtype)
    if out.numel():
        torch.as_strided(out, (out.untyped_storage().nbytes() // out.element_size(),), (1,)).zero_()
        out[..., words - 1] = 0x7F7F7F7F if per == 4 else 0x7F7F
    return out


def _matrices(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def _quantised(x: Tensor, gran: Sequence[int], fp4: bool, ue8m0: bool, sf_format: str) -> tuple[Tensor, Tensor]:
    *lead, rows, columns = x.shape
    scales = _empty_scales(lead, rows, -(-columns // gran[1]), gran[0], sf_format)
    data = torch.empty((*lead, rows, columns // 2 if fp4 else columns), dtype=torch.uint8)
    run = torch.ops.ascend_deep_cpu.quantise
    if not lead:
        run(data, scales, x, gran, fp4, ue8m0)
    elif scales.numel() or data.numel():
        views = (_matrices(data), scales.view(-1, *scales.shape[-2:]), _matrices(x))
        for d, s, source in zip(*views, strict=True):
            run(d, s, source, gran, fp4, ue8m0)
    return data.view(torch.int8 if fp4 else torch.float8_e4m3fn), scales


def _quant_fp8(x: Tensor, *, gran: Sequence[int], ue8m0: bool, sf_format: str) -> tuple[Tensor, Tensor]:
    return _quantised(x, gran, False, ue8m0, sf_format)


def _quant_fp4(x: Tensor, *, gran_k: int, sf_format: str) -> tuple[Tensor, Tensor]:
    return _quantised(x, (1, gran_k), True, True, sf_format)


def _swiglu_quant(
    h: Tensor,
    row_weight: Tensor | None,
    *,
    act: str,
    alpha: float,
    limit: float | None,
    interleaved: bool,
    gran_k: int,
    ue8m0: bool,
    sf_format: str,
) -> tuple[Tensor, Tensor]:
    *lead, rows, columns = h.shape
    width = columns // 2
    scales = _empty_scales(lead, rows, -(-width // gran_k), 1, sf_format)
    data = torch.empty((*lead, rows, width), dtype=torch.uint8)
    if scales.numel() or data.numel():
        weights = None if row_weight is None else row_weight.to(torch.float32).reshape(-1, rows).contiguous()
        source = _matrices(h if h.stride(-1) == 1 else h.contiguous())
        for i in range(source.shape[0]):
            torch.ops.ascend_deep_cpu.swiglu_quantise(
                _matrices(data)[i],
                scales.view(-1, *scales.shape[-2:])[i],
                source[i],
                None if weights is None else weights[i],
                act,
                alpha,
                limit,
                interleaved,
                gran_k,
                ue8m0,
            )
    return data.view(torch.float8_e4m3fn), scales


def _dequant(x: Tensor, sf: Tensor, *, gran: Sequence[int], sf_format: str, out_dtype: torch.dtype | None) -> Tensor:
    out = torch.empty((*x.shape[:-1], _size(x, -1)), dtype=out_dtype or torch.float32)
    run = torch.ops.ascend_deep_cpu.dequantise
    if x.dim() == 2:
        run(out, x, sf, gran)
    elif out.numel():
        for matrix, data, scales in zip(_matrices(out), _matrices(x), _matrices(sf), strict=True):
            run(matrix, data, scales, gran)
    return out


# ---- limits ----------------------------------------------------------------------------------------------------------


def _source_limits(x: Tensor, *_: Any, act: str = "silu", **__: Any) -> str | None:
    if x.dtype == torch.float64:
        return "the input is float64; the kernel takes float32, bfloat16 and float16."
    if act not in ACTS:
        return f"act is {act!r}, the kernel has {', '.join(sorted(ACTS))}."
    return None


def _swiglu_limits(h: Tensor, row_weight: Tensor | None, *, act: str, **_: Any) -> str | None:
    if h.dtype not in (torch.float32, torch.bfloat16):
        return f"h has dtype {h.dtype}; the kernel takes float32 and bfloat16."
    return _source_limits(h, act=act)


def _dequant_limits(x: Tensor, sf: Tensor, *, out_dtype: torch.dtype | None, **_: Any) -> str | None:
    if out_dtype not in _OUT:
        return f"out_dtype is {out_dtype}; the kernel writes float32 and bfloat16."
    return None


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
    "quant_fp8": _quant_fp8,
    "quant_fp4": _quant_fp4,
    "swiglu_quant": _swiglu_quant,
    "dequant": _dequant,
}

LIMITS: Mapping[str, Callable[..., str | None]] = {
    "quant_fp8": _source_limits,
    "quant_fp4": _source_limits,
    "swiglu_quant": _swiglu_limits,
    "dequant": _dequant_limits,
}
