"""Grouped and batched products through DeepGEMM, for every platform of ``gemm_differences``; see ``gemm``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import MaskedScaled, MGroupedScaled, takes
from ascend_deep.native.deep_gemm import gemm_layouts
from ascend_deep.native.deep_gemm.gemm import aligned, k_major, recipes, scales, starting
from ascend_deep.native.deep_gemm.gemm_differences import Gemm

__all__ = [
    "einsum_bf16",
    "hc_prenorm_gemm",
    "k_grouped_gemm_bf16",
    "k_grouped_gemm_bf16_acc_",
    "m_grouped_gemm_bf16",
    "m_grouped_gemm_bf16_masked",
    "m_grouped_gemm_scaled",
    "m_grouped_gemm_scaled_masked",
]


def _index(row: Gemm, grouped_layout: Tensor, rows: int, groups: int, grouping: str) -> Tensor:
    if grouping == "labels":
        return gemm_layouts.block_labels(grouped_layout, groups, row.align)
    return gemm_layouts.ends(grouped_layout, rows, row.align)


def _check_alignment(library: Any, row: Gemm) -> None:
    """The alignment is a global of the library; the limits counted on its default."""
    found = library.get_mk_alignment_for_contiguous_layout()
    if found != row.align:
        raise RuntimeError(
            f"deep_gemm: its alignment of groups was set to {found} in this process; this adapter works with "
            f"{row.align}, the default on {row.platform}."
        )


def _compiled(row: Gemm) -> dict[str, Any]:
    return {} if row.compiled_dims is None else {"compiled_dims": row.compiled_dims}


def m_grouped_gemm_bf16(
    library: Any,
    row: Gemm,
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    *,
    layout: str,
    grouping: str,
    alignment: int,
    zero_padding: bool,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> Tensor:
    """The op ``m_grouped_gemm_bf16``."""
    _check_alignment(library, row)
    n, groups = b.shape[1 if layout == "nt" else 2], b.shape[0]
    d = a.new_empty((a.shape[0], n), dtype=out_dtype or torch.bfloat16)
    getattr(library, f"m_grouped_bf16_gemm_{layout}_contiguous")(
        aligned(row, a),
        aligned(row, b),
        d,
        _index(row, grouped_layout, a.shape[0], groups, grouping),
        use_psum_layout=grouping == "psum",
        **_compiled(row),
    )
    if zero_padding:
        gemm_layouts.clear_padding(d, grouped_layout, grouping, alignment, groups)
    return d


@takes(MGroupedScaled)
def m_grouped_gemm_scaled(library: Any, row: Gemm, x: MGroupedScaled) -> Tensor:
    """The op ``m_grouped_gemm_scaled``."""
    _check_alignment(library, row)
    right, groups = k_major(row, x.b, x.layout == "nn"), x.b.shape[0]
    d = x.a.new_empty((x.a.shape[0], right.shape[1]), dtype=x.out_dtype or torch.bfloat16)
    library.m_grouped_fp8_fp4_gemm_nt_contiguous(
        (k_major(row, x.a, False), scales(row, x.sfa, int(x.recipe_a[0]))),
        (right, scales(row, x.sfb, int(x.recipe_b[0]))),
        d,
        _index(row, x.grouped_layout, x.a.shape[0], groups, x.grouping),
        use_psum_layout=x.grouping == "psum",
        **_compiled(row),
        **recipes(row, x.recipe_a, x.recipe_b),
    )
    if x.zero_padding:
        gemm_layouts.clear_padding(d, x.grouped_layout, x.grouping, x.alignment, groups)
    return d


def m_grouped_gemm_bf16_masked(
    library: Any, row: Gemm, a: Tensor, b: Tensor, masked_m: Tensor, *, expected_m: int
) -> Tensor:
    """The op ``m_grouped_gemm_bf16_masked``."""
    groups, rows, _ = a.shape
    d = a.new_empty((groups, rows, b.shape[1]))
    library.m_grouped_bf16_gemm_nt_masked(
        aligned(row, a), aligned(row, b), d, gemm_layouts.counts(masked_m, rows), expected_m, **_compiled(row)
    )
    gemm_layouts.clear_padding(d, masked_m, "masked", 1, groups)
    return d


@takes(MaskedScaled)
def m_grouped_gemm_scaled_masked(library: Any, row: Gemm, x: MaskedScaled) -> Tensor:
    """The op ``m_grouped_gemm_scaled_masked``."""
    groups, rows = x.a.shape[:2]
    d = x.a.new_empty((groups, rows, x.b.shape[1]), dtype=torch.bfloat16)
    library.m_grouped_fp8_fp4_gemm_nt_masked(
        (k_major(row, x.a, False), scales(row, x.sfa, int(x.recipe_a[0]))),
        (k_major(row, x.b, False), scales(row, x.sfb, int(x.recipe_b[0]))),
        d,
        gemm_layouts.counts(x.masked_m, rows),
        x.expected_m,
        **_compiled(row),
        **recipes(row, x.recipe_a, x.recipe_b),
    )
    gemm_layouts.clear_padding(d, x.masked_m, "masked", 1, groups)
    return d


def _k_grouped(
    library: Any,
    row: Gemm,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    ks: Sequence[int] | None,
    alignment: int,
) -> None:
    if row.k_grouped == "sizes":
        # The limits took multiples only, so that groups lie one behind the other.
        assert ks is not None
        rows = sum(ks)
        a, b = aligned(row, a[:rows]), aligned(row, b[:rows])
        lengths = torch.tensor(list(ks), dtype=torch.int32, device=a.device)
        library.k_grouped_bf16_gemm_tn_contiguous(a, b, d, list(ks), lengths, d)
        return
    # Padding rows count there, so they have to be zeros.
    a, b = (gemm_layouts.keep_rows(x, grouped_layout, alignment) for x in (a, b))
    index = gemm_layouts.ends(grouped_layout, a.shape[0], alignment)
    sizes = None if ks is None else list(ks)
    library.k_grouped_bf16_gemm_tn_contiguous(a, b, d, sizes, index, d, use_psum_layout=True)


def k_grouped_gemm_bf16(
    library: Any,
    row: Gemm,
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    c: Tensor | None,
    *,
    ks: Sequence[int] | None,
    alignment: int,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> Tensor:
    """The op ``k_grouped_gemm_bf16``."""
    dtype = out_dtype or (torch.bfloat16 if c is None else c.dtype)
    d = starting(c, a, (grouped_layout.shape[0], a.shape[1], b.shape[1]), dtype)
    _k_grouped(library, row, a, b, d, grouped_layout, ks, alignment)
    return d


def k_grouped_gemm_bf16_acc_(
    library: Any,
    row: Gemm,
    d: Tensor,
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    *,
    ks: Sequence[int] | None,
    alignment: int,
    **_: Any,
) -> None:
    """The op ``k_grouped_gemm_bf16_acc_``; ``d`` is contiguous."""
    _k_grouped(library, row, a, b, d, grouped_layout, ks, alignment)


_SUM = "bmk,bnk->mn"


def einsum_bf16(
    library: Any, row: Gemm, a: Tensor, b: Tensor, c: Tensor | None, *, eq: str, out_dtype: torch.dtype | None
) -> Tensor:
    """The op ``einsum_bf16``."""
    left, right = eq.split("->")[0].split(",")
    size = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    shape = [size[letter] for letter in eq.split("->")[1]]
    dtype = out_dtype or (torch.bfloat16 if c is None else c.dtype)
    if c is not None or (eq == _SUM and dtype == torch.float32):
        d = starting(c, a, shape, dtype)
        library.einsum(eq, aligned(row, a), aligned(row, b), d, d)
    else:
        d = a.new_empty(shape, dtype=dtype)
        library.einsum(eq, aligned(row, a), aligned(row, b), d)
    return d


def hc_prenorm_gemm(library: Any, row: Gemm, a: Tensor, b: Tensor, *, num_splits: int | None) -> tuple[Tensor, Tensor]:
    """The op ``hc_prenorm_gemm``."""
    lead = () if num_splits is None else (num_splits,)
    d = b.new_empty((*lead, a.shape[0], b.shape[0]))
    squares = b.new_empty((*lead, a.shape[0]))
    library.tf32_hc_prenorm_gemm(aligned(row, a), aligned(row, b), d, squares, num_splits=num_splits)
    return d, squares
