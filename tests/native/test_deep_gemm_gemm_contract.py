"""Every matrix product that the ``deep_gemm`` adapter calls, against a stand-in with the documented signature.

SM100 and Ascend cannot run here; ``deep_gemm_stand_in.py`` says what the stand-in checks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep.native.deep_gemm.gemm_differences import ASCEND, SM90, SM100, Gemm, row_of
from ascend_deep.native.deep_gemm.gemm_provider import OPS
from ascend_deep.ops import pack_sf, quant_fp4, quant_fp8
from tests.native.deep_gemm_stand_in import (
    F32,
    ROWS,
    SM90_,
    SM100_,
    StandIn,
    bf16,
    by_platform,
    run,
    same,
)


@pytest.mark.parametrize("row", ROWS, ids=by_platform)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_dense(row: Gemm, layout: str) -> None:
    m, n, k = 24, 40, 64
    a = bf16(m, k) if layout[0] == "n" else bf16(k, m)
    b = bf16(n, k) if layout[1] == "t" else bf16(k, n)
    options: dict[str, Any] = {"layout": layout, "out_dtype": None, "alpha": None}
    same(*run("gemm_bf16", row, a, b, None, **options)[:2])
    same(*run("gemm_bf16", row, a, b, torch.randn(m, n), **options)[:2])
    shifted = torch.cat((bf16(1), a.flatten()))[1:].view(a.shape)
    assert shifted.data_ptr() % 16
    same(*run("gemm_bf16", row, shifted, b, None, layout=layout, out_dtype=F32, alpha=1.0)[:2])
    wide = bf16(a.shape[0], a.shape[1] + 8)[:, : a.shape[1]]
    d = torch.randn(m, n)
    same(*run("gemm_bf16_out", row, d, wide, b, torch.randn(m, n), layout=layout, alpha=None)[:2])
    same(*run("gemm_bf16_acc_", row, d, a, b, layout=layout)[:2])
    if row.alpha:
        same(*run("gemm_bf16", row, a, b, None, layout=layout, out_dtype=None, alpha=0.37)[:2])


def scaled(row: Gemm, *shape: int, kind: str = "fp8", gran_mn: int = 1) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Data, scales and recipe as the platform takes them; strides of the scales at random."""
    x = torch.randn(*shape) * torch.randn(*shape[:-1], 1).exp()
    gran = (gran_mn, row.gran_k[-1])
    if row.sf_dtype == F32:
        data, sf = quant_fp8(x, gran=gran)
        return data, (sf if torch.rand(()) < 0.5 else sf.mT.contiguous().mT), gran
    gran = (1, 32)
    data, sf = quant_fp8(x, gran=gran, ue8m0=True) if kind == "fp8" else quant_fp4(x, gran_k=32)
    words = pack_sf(
        sf, mn=shape[-2], k=shape[-1], gran=gran, target="sm100" if row.sf_dtype == torch.int32 else "ascend"
    )
    return data, (words if torch.rand(()) < 0.5 else words.contiguous()), gran


PAIRS = [(row, pair) for row in ROWS for pair in row.pairs]


@pytest.mark.parametrize("row,pair", PAIRS, ids=by_platform)
def test_dense_scaled(row: Gemm, pair: tuple[str, str]) -> None:
    m, n, k = 37, 144, 384
    a, sfa, recipe_a = scaled(row, m, k, kind=pair[0])
    options: dict[str, Any] = {"layout": "nt", "out_dtype": None, "alpha": None}
    for gran_n in row.scaled:
        b, sfb, recipe_b = scaled(row, n, k, kind=pair[1], gran_mn=gran_n)
        dtype, must_add = row.scaled[gran_n]
        given = options | {"out_dtype": dtype, "recipe_a": recipe_a, "recipe_b": recipe_b}
        same(*run("gemm_scaled", row, a, sfa, b, sfb, None, **given)[:2])
        if must_add or row.sf_dtype != F32:
            given["out_dtype"] = None
            same(*run("gemm_scaled", row, a, sfa, b, sfb, torch.randn(m, n), **given)[:2])
        if pair == ("fp8", "fp8"):
            moved = b.t().contiguous()
            given |= {"layout": "nn", "out_dtype": dtype}
            same(*run("gemm_scaled", row, a, sfa, moved, sfb, None, **given)[:2])


def ends_of(sizes: list[int], align: int, index: torch.dtype) -> tuple[Tensor, int]:
    """Ends, those of empty groups before their starts, and rows of the buffer."""
    ends, start = [], 0
    for size in sizes:
        ends.append(start + size if size else (ends[-1] if ends else 0))
        start = -(-ends[-1] // align) * align
    return torch.tensor(ends, dtype=index), start


@pytest.mark.parametrize("row", ROWS, ids=by_platform)
@pytest.mark.parametrize("grouping", ["psum", "labels"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_m_grouped(row: Gemm, grouping: str, index: torch.dtype) -> None:
    if grouping not in row.groupings:
        return
    n, k = 48, 128
    layout, rows = ends_of([5, 0, row.align, 2 * row.align + 1, 0], row.align, index)
    ends = layout
    if not row.padded:
        rows += 24  # a tail that belongs to no group
    if grouping == "labels":
        at = torch.arange(rows)
        layout = torch.full((rows,), -1, dtype=index)
        for g, (start, end) in enumerate(_bounds(ends, row.align)):
            layout[(at >= start) & (at < end)] = g
        layout[0] = 99  # padding may come first, and may be any number that is no group
    a = bf16(rows, k)
    given: dict[str, Any] = {
        "grouping": grouping,
        "alignment": row.align,
        "expected_m": None,
        "zero_padding": True,
        "out_dtype": None,
    }
    for name, b in (("nt", bf16(5, n, k)), ("nn", bf16(5, k, n))):
        same(*run("m_grouped_gemm_bf16", row, a, b, layout, layout=name, **given)[:2])
    if F32 in row.grouped_out:
        given["out_dtype"] = F32
        same(*run("m_grouped_gemm_bf16", row, a, b, layout, layout="nn", **given)[:2])
        given["out_dtype"] = None
    data, sfa, recipe_a = scaled(row, rows, k)
    right, sfb, recipe_b = scaled(row, 5, n, k, gran_mn=128)
    given |= {"recipe_a": recipe_a, "recipe_b": recipe_b}
    same(*run("m_grouped_gemm_scaled", row, data, sfa, right, sfb, layout, layout="nt", **given)[:2])
    moved = right.mT.contiguous()
    same(*run("m_grouped_gemm_scaled", row, data, sfa, moved, sfb, layout, layout="nn", **given)[:2])


def _bounds(ends: Tensor, align: int) -> list[tuple[int, int]]:
    start, found = 0, []
    for end in ends.tolist():
        found.append((start, end))
        start = -(-end // align) * align
    return found


@pytest.mark.parametrize("row", [SM90_, SM100_], ids=by_platform)
def test_masked(row: Gemm) -> None:
    rows, n, k = row.masked_rows, 32, 128
    counts = torch.tensor([7, 0, rows + 9, -4])
    got, want, _ = run("m_grouped_gemm_bf16_masked", row, bf16(4, rows, k), bf16(4, n, k), counts, expected_m=7)
    same(got, want)
    a, sfa, recipe_a = scaled(row, 4, rows, k)
    b, sfb, recipe_b = scaled(row, 4, n, k, gran_mn=128)
    given: dict[str, Any] = {"expected_m": 3, "recipe_a": recipe_a, "recipe_b": recipe_b}
    same(*run("m_grouped_gemm_scaled_masked", row, a, sfa, b, sfb, counts, **given)[:2])


@pytest.mark.parametrize("row", ROWS, ids=by_platform)
def test_k_grouped(row: Gemm) -> None:
    m, n = 16, 24
    if row.k_grouped == "sizes":
        ks = [256, 0, 128]
        layout, rows = ends_of(ks, 128, torch.int32)
        rows += 8  # behind the last group
        given: dict[str, Any] = {"ks": ks, "grouping": "psum", "alignment": 128}
    else:
        layout, rows = ends_of([5, 0, 300], 256, torch.int32)
        given = {"ks": None, "grouping": "psum", "alignment": 256}
    a, b = bf16(rows, m), bf16(rows, n)
    used = torch.zeros(rows, dtype=torch.bool)
    for start, end in _bounds(layout, given["alignment"]):
        used[start:end] = True
    a[~used], b[~used] = float("nan"), float("nan")
    for c, dtype in ((None, None), (torch.randn(3, m, n), None), (None, F32)):
        same(*run("k_grouped_gemm_bf16", row, a, b, layout, c, out_dtype=dtype, **given)[:2])
    d = torch.randn(3, m, n)
    same(*run("k_grouped_gemm_bf16_acc_", row, d, a, b, layout, **given)[:2])


@pytest.mark.parametrize("row,eq", [(row, eq) for row in ROWS for eq in row.einsum], ids=by_platform)
def test_einsum(row: Gemm, eq: str) -> None:
    b, h, r, d = 8, 3, 16, 24
    shapes = {
        "bhr,hdr->bhd": ((b, h, r), (h, d, r)),
        "bhd,hdr->bhr": ((b, h, d), (h, d, r)),
        "bhd,bhr->hdr": ((b, h, d), (b, h, r)),
        "bmk,bnk->mn": ((5, 64, 128), (5, 128, 128)),
    }
    left, right = (bf16(*s) for s in shapes[eq])
    for dtype in row.einsum[eq]:
        got, want, library = run("einsum_bf16", row, left, right, None, eq=eq, out_dtype=dtype)
        same(got, want)
        assert library.calls == [eq]
    if F32 in row.einsum[eq]:
        c = torch.randn(want.shape)
        same(*run("einsum_bf16", row, left, right, c, eq=eq, out_dtype=None)[:2])


@pytest.mark.parametrize("row", ROWS, ids=by_platform)
def test_hc_prenorm(row: Gemm) -> None:
    a, b = bf16(13, 512), torch.randn(24, 512)
    for splits in (None, 1, 4) if row.hc_splits else (None, 1):
        same(*run("hc_prenorm_gemm", row, a, b, num_splits=splits)[:2])


def test_changed_alignment_is_an_error() -> None:
    library = StandIn(SM90_)
    library.get_mk_alignment_for_contiguous_layout = lambda: 64  # type: ignore[method-assign]
    kernel, _ = OPS["m_grouped_gemm_bf16"]
    with pytest.raises(RuntimeError, match="set to 64"):
        kernel(
            library, SM90_, bf16(128, 64), bf16(1, 16, 64), torch.tensor([128]), layout="nt", grouping="psum",
            alignment=128, expected_m=None, zero_padding=True, out_dtype=None,
        )  # fmt: skip


def test_rows_of_devices() -> None:
    assert row_of("cuda", (9, 0)) is SM90 and row_of("cuda", (10, 3)) is SM100 and row_of("npu", None) is ASCEND
    assert row_of("cuda", (8, 9)) is None and row_of("cpu", None) is None
    assert SM90.executed and not SM100.executed and not ASCEND.executed
