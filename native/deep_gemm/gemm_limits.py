"""Which calls of the GEMM ops the library takes, per platform: one sentence, or ``None``.

Shapes, dtypes, strides and scalars only. ``row`` comes from ``gemm_differences``; the other arguments are the op's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import GemmScaled, MaskedScaled, MGroupedScaled, takes
from ascend_deep.native.deep_gemm.gemm import sizes
from ascend_deep.native.deep_gemm.gemm_differences import Gemm

__all__ = [
    "einsum_bf16",
    "gemm_bf16",
    "gemm_bf16_acc_",
    "gemm_bf16_out",
    "gemm_scaled",
    "hc_prenorm_gemm",
    "k_grouped_gemm_bf16",
    "k_grouped_gemm_bf16_acc_",
    "m_grouped_gemm_bf16",
    "m_grouped_gemm_bf16_masked",
    "m_grouped_gemm_scaled",
    "m_grouped_gemm_scaled_masked",
]


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(map(_name, dtypes))


def _kind(x: Tensor) -> str:
    return "fp8" if x.dtype == torch.float8_e4m3fn else "fp4"


def _empty(*sizes_: Any) -> str | None:
    return f"a size is 0 in {tuple(sizes_)}; the library gets products that are not empty." if 0 in sizes_ else None


def _readable(row: Gemm, name: str, x: Tensor, *, last: bool = False) -> str | None:
    """A matrix (or tight groups of them) whose rows or columns are contiguous and start at multiples of the unit."""
    inner = -1 if x.stride(-1) == 1 else -2
    if x.stride(inner) != 1 or (last and inner == -2):
        wanted = "the last dimension" if last else "one of the last two dimensions"
        return f"{name} has the strides {tuple(x.stride())}; the library takes tensors with {wanted} contiguous."
    outer = x.stride(-3 - inner)
    if outer * x.element_size() % row.unit or outer < x.shape[inner]:
        return (
            f"{name} has rows {outer} elements apart; the library takes distances of at least a row that are multiples "
            f"of {row.unit} bytes."
        )
    if x.dim() == 3 and x.stride(0) != x.shape[1] * x.shape[2]:
        return f"{name} has the strides {tuple(x.stride())}; the library takes groups without gaps."
    return None


def _writes(row: Gemm, columns: int, dtype: torch.dtype) -> str | None:
    if columns * dtype.itemsize % row.unit:
        return f"the result has {columns} columns; the library takes rows that are a multiple of {row.unit} bytes."
    return None


def _few(row: Gemm, rows: int, kind: str) -> str | None:
    least = row.least_rows[kind]
    return f"it has {rows} rows; the library is fast from {least} rows on." if rows < least else None


def _dense(
    row: Gemm,
    a: Tensor,
    b: Tensor,
    layout: str,
    added: torch.dtype | None,
    dtype: torch.dtype,
    alpha: float | None,
) -> str | None:
    m, n, k = sizes(a, b, layout)
    if alpha not in (None, 1.0) and not row.alpha:
        return f"alpha is {alpha}; {row.platform} has no factor."
    if added is not None and added not in row.adds_into:
        return f"c has dtype {_name(added)}; {row.platform} adds to {_names(row.adds_into)} only, to round once."
    return (
        _empty(m, n, k)
        or _few(row, m, "bf16")
        or _readable(row, "a", a)
        or _readable(row, "b", b)
        or _writes(row, n, dtype)
    )


def gemm_bf16(
    row: Gemm,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    *,
    layout: str,
    out_dtype: torch.dtype | None,
    alpha: float | None,
) -> str | None:
    """Limits of ``gemm_bf16``."""
    dtype = out_dtype or (torch.bfloat16 if c is None else c.dtype)
    return _dense(row, a, b, layout, None if c is None else c.dtype, dtype, alpha)


def gemm_bf16_out(
    row: Gemm, d: Tensor, a: Tensor, b: Tensor, c: Tensor | None, *, layout: str, alpha: float | None
) -> str | None:
    """Limits of ``gemm_bf16_out``; that C may be D in part is refused by the op's contract."""
    reason = _dense(row, a, b, layout, None if c is None else c.dtype, d.dtype, alpha)
    return reason or _readable(row, "d", d, last=True)


def gemm_bf16_acc_(row: Gemm, d: Tensor, a: Tensor, b: Tensor, *, layout: str) -> str | None:
    """Limits of ``gemm_bf16_acc_``."""
    return _dense(row, a, b, layout, d.dtype, d.dtype, None) or _readable(row, "d", d, last=True)


def _recipes(row: Gemm, x: GemmScaled | MGroupedScaled | MaskedScaled) -> str | None:
    pair = (_kind(x.a), _kind(x.b))
    if pair not in row.pairs:
        accepted = ", ".join("×".join(p) for p in row.pairs)
        return f"the operands are {pair[0]}×{pair[1]}; {row.platform} takes {accepted}."
    gran_a, gran_b = (int(x.recipe_a[0]), int(x.recipe_a[1])), (int(x.recipe_b[0]), int(x.recipe_b[1]))
    for name, sf in (("sfa", x.sfa), ("sfb", x.sfb)):
        if sf.dtype != row.sf_dtype:
            why = "" if row.sf_dtype == torch.float32 else ", which hold powers of two"
            return f"{name} has dtype {_name(sf.dtype)}; {row.platform} takes {_name(row.sf_dtype)} scales{why}."
    if gran_a[1] not in row.gran_k or gran_b[1] not in row.gran_k:
        accepted = " or ".join(map(str, row.gran_k))
        return f"a scale covers {gran_a[1]} and {gran_b[1]} elements of K; {row.platform} takes {accepted}."
    if gran_a[0] != 1 or gran_b[0] not in row.scaled:
        accepted = " or ".join(map(str, row.scaled))
        return (
            f"a scale covers {gran_a[0]} rows of a and {gran_b[0]} of b; {row.platform} takes 1 row of a and "
            f"{accepted} of b."
        )
    return None


def _scaled_operand(row: Gemm, name: str, x: Tensor, transposed: bool) -> str | None:
    x = x.mT if transposed else x
    if _kind(x) == "fp4" and x.stride(-1) != 1:
        return f"{name} holds fp4 pairs along N or M; this adapter passes those along K only."
    if x.stride(-1) != 1 and (row.fp8_k_major or x.stride(-2) != 1):
        # A copy will be made.
        bytes_ = x.shape[-1] * x.element_size()
        return (
            None
            if bytes_ % row.unit == 0
            else f"{name} has rows of {bytes_} bytes; they must be multiples of {row.unit}."
        )
    return _readable(row, name, x)


def _scaled(row: Gemm, x: GemmScaled | MGroupedScaled | MaskedScaled, layout: str, dtype: torch.dtype) -> str | None:
    m, n, k = sizes(x.a, x.b, layout)
    return (
        _recipes(row, x)
        or _empty(m, n, k)
        or _scaled_operand(row, "a", x.a, layout[0] == "t")
        or _scaled_operand(row, "b", x.b, layout[1] == "n")
        or _writes(row, n, dtype)
    )


@takes(GemmScaled)
def gemm_scaled(row: Gemm, x: GemmScaled) -> str | None:
    """Limits of ``gemm_scaled``."""
    c, gran_b = x.c, int(x.recipe_b[0])
    if x.alpha not in (None, 1.0) and not row.alpha:
        return f"alpha is {x.alpha}; {row.platform} has no factor."
    dtype = x.out_dtype or (torch.bfloat16 if c is None else c.dtype)
    reason = _scaled(row, x, x.layout, dtype)
    if reason is not None:
        return reason
    wanted, must_add = row.scaled[gran_b]
    if row.sf_dtype == torch.float32 and dtype != wanted:
        return f"the result is {_name(dtype)}; with {gran_b} rows of b per scale {row.platform} writes {_name(wanted)}."
    if c is not None and (c.dtype not in row.adds_into or (row.sf_dtype == torch.float32 and not must_add)):
        return f"there is a c of dtype {_name(c.dtype)}; {row.platform} does not add to it with this recipe."
    return _few(row, sizes(x.a, x.b, x.layout)[0], _kind(x.b))


def _grouping(row: Gemm, rows: int, groups: int, grouping: str, alignment: int, dtype: torch.dtype) -> str | None:
    if grouping not in row.groupings:
        return f"grouping is {grouping!r}; {row.platform} takes {' or '.join(map(repr, row.groupings))}."
    fits = alignment == row.align if grouping == "psum" else alignment % row.align == 0
    if not fits:
        return f"groups are aligned to {alignment} rows; {row.platform} takes {row.align} rows."
    if row.padded and rows % row.align:
        return f"a has {rows} rows; {row.platform} reads the padding of the last group, so multiples of {row.align}."
    if dtype not in row.grouped_out:
        return f"the result is {_name(dtype)}; {row.platform} writes {_names(row.grouped_out)}."
    average = rows // max(groups, 1)
    if average < row.least_group:
        return f"groups have about {average} rows; the library is fast from {row.least_group} rows on."
    return None


def m_grouped_gemm_bf16(
    row: Gemm,
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    *,
    layout: str,
    grouping: str,
    alignment: int,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> str | None:
    """Limits of ``m_grouped_gemm_bf16``."""
    m, n, k = sizes(a, b, layout)
    dtype = out_dtype or torch.bfloat16
    reason = _empty(m, n, k, b.shape[0]) or _grouping(row, m, b.shape[0], grouping, alignment, dtype)
    if reason is None and k % row.grouped_depth:
        reason = f"K is {k}; {row.platform} takes multiples of {row.grouped_depth}."
    return reason or _readable(row, "a", a, last=True) or _readable(row, "b", b) or _writes(row, n, dtype)


@takes(MGroupedScaled)
def m_grouped_gemm_scaled(row: Gemm, x: MGroupedScaled) -> str | None:
    """Limits of ``m_grouped_gemm_scaled``."""
    dtype = x.out_dtype or torch.bfloat16
    return (
        _empty(*x.a.shape, *x.b.shape)
        or _grouping(row, x.a.shape[0], x.b.shape[0], x.grouping, x.alignment, dtype)
        or _scaled(row, x, x.layout, dtype)
        or _whole_blocks(row, x.recipe_b)
    )


def _whole_blocks(row: Gemm, recipe_b: Sequence[int]) -> str | None:
    wanted = 128 if row.sf_dtype == torch.float32 else 1
    if int(recipe_b[0]) != wanted:
        return f"a scale covers {int(recipe_b[0])} rows of b; grouped products of {row.platform} take {wanted}."
    return None


def _masked(row: Gemm, a: Tensor, b: Tensor) -> str | None:
    if not row.masked:
        return f"{row.platform} has no masked form."
    if a.shape[1] % row.masked_rows:
        return f"a group has {a.shape[1]} rows; {row.platform} writes whole tiles, so multiples of {row.masked_rows}."
    return _empty(*a.shape, b.shape[1])


def m_grouped_gemm_bf16_masked(row: Gemm, a: Tensor, b: Tensor, masked_m: Tensor, *, expected_m: int) -> str | None:
    """Limits of ``m_grouped_gemm_bf16_masked``."""
    if row.masked and a.shape[2] % row.grouped_depth:
        return f"K is {a.shape[2]}; {row.platform} takes multiples of {row.grouped_depth}."
    return (
        _masked(row, a, b)
        or _readable(row, "a", a, last=True)
        or _readable(row, "b", b, last=True)
        or _writes(row, b.shape[1], torch.bfloat16)
    )


@takes(MaskedScaled)
def m_grouped_gemm_scaled_masked(row: Gemm, x: MaskedScaled) -> str | None:
    """Limits of ``m_grouped_gemm_scaled_masked``."""
    return _masked(row, x.a, x.b) or _scaled(row, x, "nt", torch.bfloat16) or _whole_blocks(row, x.recipe_b)


def _k_grouped(
    row: Gemm, a: Tensor, b: Tensor, ks: Sequence[int] | None, grouping: str, alignment: int, added: torch.dtype | None
) -> str | None:
    if added is not None and added not in row.adds_into:
        return f"c has dtype {_name(added)}; {row.platform} adds to {_names(row.adds_into)} only, to round once."
    if row.k_grouped == "sizes":
        if ks is None:
            return f"ks is None; {row.platform} needs the sizes of groups on the host."
        for k in ks:
            if k % row.k_align or k % alignment:
                return (
                    f"a group has {k} rows; {row.platform} takes groups without padding, in multiples of "
                    f"{row.k_align} rows and of the alignment, {alignment}."
                )
        if sum(ks) > a.shape[0] or sum(ks) == 0:
            return f"the groups have {sum(ks)} of {a.shape[0]} rows; there must be some, and not more than there are."
    elif grouping != row.k_grouped or alignment != row.k_align or a.shape[0] % row.k_align:
        return (
            f"grouping is {grouping!r} with alignment {alignment} in {a.shape[0]} rows; {row.platform} takes "
            f"{row.k_grouped!r} with {row.k_align} in a multiple of it."
        )
    for name, x in (("a", a), ("b", b)):
        if not x.is_contiguous():
            return f"{name} has the strides {tuple(x.stride())}; k-grouped products take contiguous tensors."
    return _empty(*a.shape, b.shape[1]) or _readable(row, "a", a, last=True) or _readable(row, "b", b, last=True)


def k_grouped_gemm_bf16(
    row: Gemm,
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    c: Tensor | None,
    *,
    ks: Sequence[int] | None,
    grouping: str,
    alignment: int,
    out_dtype: torch.dtype | None,
) -> str | None:
    """Limits of ``k_grouped_gemm_bf16``."""
    dtype = out_dtype or (torch.bfloat16 if c is None else c.dtype)
    added = None if c is None else c.dtype
    return _k_grouped(row, a, b, ks, grouping, alignment, added) or _writes(row, b.shape[1], dtype)


def k_grouped_gemm_bf16_acc_(
    row: Gemm,
    d: Tensor,
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    *,
    ks: Sequence[int] | None,
    grouping: str,
    alignment: int,
) -> str | None:
    """Limits of ``k_grouped_gemm_bf16_acc_``."""
    if not d.is_contiguous():
        return f"d has the strides {tuple(d.stride())}; k-grouped products take contiguous tensors."
    return _k_grouped(row, a, b, ks, grouping, alignment, d.dtype) or _writes(row, b.shape[1], d.dtype)


def einsum_bf16(
    row: Gemm, a: Tensor, b: Tensor, c: Tensor | None, *, eq: str, out_dtype: torch.dtype | None
) -> str | None:
    """Limits of ``einsum_bf16``."""
    if eq not in row.einsum:
        return f"eq is {eq!r}; {row.platform} has {', '.join(row.einsum)}."
    dtype = out_dtype or (torch.bfloat16 if c is None else c.dtype)
    if dtype not in row.einsum[eq]:
        return f"the result is {_name(dtype)}; {row.platform} writes {_names(row.einsum[eq])} for {eq!r}."
    if c is not None and (dtype not in row.adds_into or not _adds(row, eq)):
        return f"there is a c of dtype {_name(c.dtype)}; {row.platform} does not add to it for {eq!r}."
    if not a.is_contiguous() or not b.is_contiguous():
        return "an operand is not contiguous; the library gets contiguous ones for its batched products."
    sizes_ = (*a.shape, *b.shape)
    if eq == "bmk,bnk->mn":
        found = (a.shape[1], b.shape[1], a.shape[2])
        if any(f % u for f, u in zip(found, row.einsum_unit, strict=True)):
            return f"M, N and K are {found}; {row.platform} takes multiples of {row.einsum_unit}."
    unit = row.unit // 2
    if a.shape[2] % unit or b.shape[2] % unit or (a.shape[2] if eq.startswith("bhd,bhr") else b.shape[1]) % unit:
        return f"the shapes are {tuple(a.shape)} and {tuple(b.shape)}; the library takes rows in multiples of {unit}."
    return _empty(*sizes_)


def _adds(row: Gemm, eq: str) -> bool:
    return row.platform == "Ascend" or eq == "bmk,bnk->mn"


def hc_prenorm_gemm(row: Gemm, a: Tensor, b: Tensor, *, num_splits: int | None) -> str | None:
    """Limits of ``hc_prenorm_gemm``."""
    (m, k), n = a.shape, b.shape[0]
    if n > row.hc_columns or n % row.hc_column_unit or k % row.hc_depth:
        return (
            f"N is {n} and K is {k}; {row.platform} takes N up to {row.hc_columns} in multiples of "
            f"{row.hc_column_unit} and K in multiples of {row.hc_depth}."
        )
    if num_splits not in (None, 1) and not row.hc_splits:
        return f"num_splits is {num_splits}; {row.platform} does not split K."
    return _empty(m, n, k) or _readable(row, "a", a, last=True) or _readable(row, "b", b, last=True)
