"""Every matrix product that the ``deep_gemm`` adapter calls, against a stand-in with the documented signature.

SM100 and Ascend cannot run here. The stand-in checks names, dtypes, shapes, strides and alignments, computes the
documented result from what it is given, and leaves garbage wherever the documents promise nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep.native.deep_gemm import gemm_limits
from ascend_deep.native.deep_gemm.gemm_differences import ASCEND, SM90, SM100, Gemm, row_of
from ascend_deep.native.deep_gemm.gemm_provider import OPS
from ascend_deep.ops import _sf, pack_sf, quant_fp4, quant_fp8, reference

BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
ROWS = [replace(row, least_rows=dict.fromkeys(row.least_rows, 1), least_group=1) for row in (SM90, SM100, ASCEND)]
SM90_, SM100_, ASCEND_ = ROWS


def by_platform(row: Any) -> str:
    if isinstance(row, Gemm):
        return row.platform
    return "call" if callable(row) else str(row)  # a function has an address in its name


class StandIn:
    """The library of one platform."""

    def __init__(self, row: Gemm) -> None:
        self.row = row
        self.calls: list[str] = []
        for layout in ("nt", "nn", "tn", "tt"):
            setattr(self, f"bf16_gemm_{layout}", self._dense(layout))
        for layout in ("nt", "nn"):
            setattr(self, f"m_grouped_bf16_gemm_{layout}_contiguous", self._m_grouped(layout))

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.row.align

    # -- what the host code asserts --
    def _matrix(self, x: Tensor) -> None:
        if x.dim() == 3:
            assert x.stride(0) == x.shape[1] * x.shape[2]
        assert x.stride(-1) == 1 or x.stride(-2) == 1
        outer = x.stride(-2) if x.stride(-1) == 1 else x.stride(-1)
        assert outer * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0

    def _result(self, d: Tensor, c: Tensor | None) -> None:
        self._matrix(d)
        assert d.stride(-1) == 1 and d.dtype in (BF16, F32)
        if c is not None:
            assert c.data_ptr() == d.data_ptr() and c.stride() == d.stride() and c.dtype == d.dtype == F32

    def _options(self, compiled_dims: str | None, alpha: float | None = None) -> None:
        assert compiled_dims is None or set(compiled_dims) <= set("mnk")
        assert alpha is None or self.row.alpha

    def _dense(self, layout: str) -> Any:
        def call(
            a: Tensor,
            b: Tensor,
            d: Tensor,
            c: Tensor | None = None,
            compiled_dims: str | None = None,
            alpha: float | None = None,
        ) -> None:
            self.calls.append("bf16_gemm_" + layout)
            assert a.dtype == b.dtype == BF16
            self._matrix(a)
            self._matrix(b)
            self._result(d, c)
            self._options(compiled_dims, alpha)
            start = None if c is None else c.clone()
            d.copy_(reference("gemm_bf16")(a, b, start, layout=layout, out_dtype=d.dtype, alpha=alpha))

        return call

    def _scales(self, sf: Tensor, gran_mn: int, mn: int, lead: tuple[int, ...]) -> None:
        assert sf.dtype == self.row.sf_dtype and sf.shape[:-2] == lead
        if sf.dtype == F32:
            transposed = sf.stride(-2) == 1 and sf.stride(-1) % 4 == 0 and gran_mn == 1
            assert sf.is_contiguous() or transposed
            return
        assert gran_mn == 1 and sf.shape[-2] == mn and sf.stride(-2) == 1
        pitch = -(-mn // 4) * 4 if sf.dtype == torch.int32 else mn
        assert sf.stride(-1) == pitch
        if lead:
            assert sf.stride(0) == pitch * sf.shape[-1]

    def _recipe(self, recipe: Any, recipe_a: Any, recipe_b: Any) -> tuple[tuple[int, int], tuple[int, int]]:
        if recipe is not None:
            assert recipe_a is None and recipe_b is None and len(recipe) == 3
            return (recipe[0], recipe[2]), (recipe[1], recipe[2])
        assert self.row.platform == "CUDA SM100"
        return recipe_a, recipe_b

    def _quantised(self, pair: Any, gran: tuple[int, int], lead: tuple[int, ...]) -> None:
        data, sf = pair
        assert gran[1] in self.row.gran_k and data.dtype in (FP8, torch.int8)
        self._matrix(data)
        if self.row.fp8_k_major or data.dtype != FP8:
            assert data.stride(-1) == 1
        self._scales(sf, gran[0], data.shape[-2], lead)

    def fp8_fp4_gemm_nt(
        self,
        a: Any,
        b: Any,
        d: Tensor,
        c: Tensor | None = None,
        recipe: Any = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: str | None = None,
        disable_ue8m0_cast: bool = False,
        alpha: float | None = None,
    ) -> None:
        self.calls.append("fp8_fp4_gemm_nt")
        of_a, of_b = self._recipe(recipe, recipe_a, recipe_b)
        self._quantised(a, of_a, ())
        self._quantised(b, of_b, ())
        self._result(d, c)
        self._options(compiled_dims, alpha)
        if self.row is SM90_:
            assert (d.dtype == BF16 and c is None) if of_b[0] == 128 else (d.dtype == F32 and c is not None)
        start = None if c is None else c.clone()
        d.copy_(
            reference("gemm_scaled")(
                *a, *b, start, recipe_a=of_a, recipe_b=of_b, layout="nt", out_dtype=d.dtype, alpha=alpha
            )
        )

    def _grouped(self, a: Tensor, d: Tensor, index: Tensor, psum: bool, groups: int) -> dict[str, Any]:
        assert index.dtype == torch.int32 and index.is_contiguous() and a.stride(-1) == 1
        align = self.row.align
        if psum:
            start = 0
            assert index.shape == (groups,)
            for end in index.tolist():
                assert start <= end <= a.shape[0]
                start = min(-(-end // align) * align, a.shape[0])
        else:
            assert self.row.platform != "Ascend" and index.shape == a.shape[:1]
            for block in index.split(align):
                assert block.unique().numel() == 1
        if self.row.platform == "Ascend":
            assert psum and a.shape[0] % align == 0
        return {"grouping": "psum" if psum else "labels", "alignment": align, "expected_m": None, "zero_padding": True}

    def _m_grouped(self, layout: str) -> Any:
        def call(
            a: Tensor,
            b: Tensor,
            d: Tensor,
            grouped_layout: Tensor,
            compiled_dims: str | None = "nk",
            use_psum_layout: bool = False,
            ensure_zero_padding: bool = True,
        ) -> None:
            self.calls.append("m_grouped_bf16")
            self._matrix(a)
            self._matrix(b)
            self._result(d, None)
            given = self._grouped(a, d, grouped_layout, use_psum_layout, b.shape[0])
            d.fill_(float("nan"))
            out = reference("m_grouped_gemm_bf16")(a, b, grouped_layout, layout=layout, out_dtype=d.dtype, **given)
            d.copy_(torch.where(out == 0, d, out))

        return call

    def m_grouped_fp8_fp4_gemm_nt_contiguous(
        self,
        a: Any,
        b: Any,
        d: Tensor,
        grouped_layout: Tensor,
        recipe: Any = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: str | None = "nk",
        disable_ue8m0_cast: bool = False,
        use_psum_layout: bool = False,
        ensure_zero_padding: bool = True,
    ) -> None:
        self.calls.append("m_grouped_scaled")
        of_a, of_b = self._recipe(recipe, recipe_a, recipe_b)
        self._quantised(a, of_a, ())
        self._quantised(b, of_b, (b[0].shape[0],))
        given = self._grouped(a[0], d, grouped_layout, use_psum_layout, b[0].shape[0])
        out = reference("m_grouped_gemm_scaled")(
            *a, *b, grouped_layout, recipe_a=of_a, recipe_b=of_b, layout="nt", out_dtype=d.dtype, **given
        )
        d.copy_(torch.where(out == 0, float("nan"), out))

    def _masked(self, d: Tensor, masked_m: Tensor, out: Tensor) -> None:
        assert masked_m.dtype == torch.int32 and masked_m.is_contiguous() and d.dtype == BF16
        assert masked_m.min() >= 0 and masked_m.max() <= d.shape[1] and d.shape[1] % 128 == 0
        d.copy_(torch.where(out == 0, float("nan"), out))

    def m_grouped_bf16_gemm_nt_masked(
        self, a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int, compiled_dims: str = "nk"
    ) -> None:
        self.calls.append("masked")
        assert expected_m > 0 and a.stride(-1) == b.stride(-1) == 1
        self._matrix(a)
        self._matrix(b)
        self._masked(d, masked_m, reference("m_grouped_gemm_bf16_masked")(a, b, masked_m, expected_m=expected_m))

    def m_grouped_fp8_fp4_gemm_nt_masked(
        self,
        a: Any,
        b: Any,
        d: Tensor,
        masked_m: Tensor,
        expected_m: int,
        recipe: Any = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: str = "nk",
    ) -> None:
        self.calls.append("masked_scaled")
        of_a, of_b = self._recipe(recipe, recipe_a, recipe_b)
        self._quantised(a, of_a, (a[0].shape[0],))
        self._quantised(b, of_b, (b[0].shape[0],))
        out = reference("m_grouped_gemm_scaled_masked")(
            *a, *b, masked_m, expected_m=expected_m, recipe_a=of_a, recipe_b=of_b
        )
        self._masked(d, masked_m, out)

    def k_grouped_bf16_gemm_tn_contiguous(
        self,
        a: Tensor,
        b: Tensor,
        d: Tensor,
        ks: list[int] | None,
        grouped_layout: Tensor,
        c: Tensor | None = None,
        compiled_dims: str = "mn",
        use_psum_layout: bool = False,
    ) -> None:
        self.calls.append("k_grouped")
        assert c is not None and c.data_ptr() == d.data_ptr()
        assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (a, b, d))
        assert grouped_layout.dtype == torch.int32
        if self.row.k_grouped == "sizes":
            assert not use_psum_layout and isinstance(ks, list) and grouped_layout.tolist() == ks
            assert sum(ks) == a.shape[0] == b.shape[0] and all(k % 128 == 0 for k in ks)
        else:
            assert use_psum_layout and a.shape[0] % 256 == 0
            assert a.isfinite().all() and b.isfinite().all()
        grouping = "psum" if use_psum_layout else "sizes"
        given = {"ks": ks, "grouping": grouping, "alignment": self.row.k_align, "out_dtype": d.dtype}
        d.copy_(reference("k_grouped_gemm_bf16")(a, b, grouped_layout, c.clone(), **given))

    def einsum(self, expr: str, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
        self.calls.append(expr)
        assert expr in self.row.einsum and d.dtype in self.row.einsum[expr] and d.is_contiguous()
        assert a.stride(2) == b.stride(2) == 1
        if expr == "bmk,bnk->mn" and d.dtype == F32:
            assert c is not None and c.data_ptr() == d.data_ptr()
        start = None if c is None else c.clone()
        d.copy_(reference("einsum_bf16")(a, b, start, eq=expr, out_dtype=d.dtype))

    def tf32_hc_prenorm_gemm(
        self, a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int | None = None
    ) -> None:
        self.calls.append("hc")
        assert a.dtype == BF16 and b.dtype == d.dtype == sqr_sum.dtype == F32
        assert d.is_contiguous() and sqr_sum.is_contiguous() and d.dim() == (2 if num_splits is None else 3)
        out, squares = reference("hc_prenorm_gemm")(a, b, num_splits=num_splits)
        d.copy_(out)
        sqr_sum.copy_(squares)


def run(op: str, row: Gemm, *args: Any, **kwargs: Any) -> tuple[Any, Any, StandIn]:
    """The adapter's result, the op's, and the stand-in. The limits must take the call."""
    kernel, limit = OPS[op]
    assert limit(row, *args, **kwargs) is None
    library = StandIn(row)
    before = [x.clone() if isinstance(x, Tensor) else x for x in args]
    got = kernel(library, row, *args, **kwargs)
    want = reference(op)(*before, **kwargs)
    assert len(library.calls) == 1
    if got is None:
        return args[0], before[0], library
    return got, want, library


def same(got: Any, want: Any) -> None:
    if isinstance(got, tuple):
        for g, w in zip(got, want, strict=True):
            same(g, w)
        return
    assert got.dtype == want.dtype and got.shape == want.shape and got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


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


DENSE: dict[str, Any] = {"layout": "nt", "out_dtype": None, "alpha": None}
NEAR: list[tuple[str, Gemm, Any, dict[str, Any], str]] = [
    ("gemm_bf16", SM90, lambda: (bf16(64, 64), bf16(16, 64), None), DENSE, "it has 64 rows"),
    ("gemm_bf16", SM90_, lambda: (bf16(8, 64), bf16(16, 64), None), DENSE | {"alpha": 0.5}, "alpha is 0.5"),
    ("gemm_bf16", SM90_, lambda: (bf16(8, 64), bf16(16, 64), bf16(8, 16)), DENSE, "c has dtype bfloat16"),
    ("gemm_bf16", SM90_, lambda: (bf16(8, 60), bf16(16, 60), None), DENSE, "rows 60 elements apart"),
    ("gemm_bf16", SM90_, lambda: (bf16(8, 64), bf16(12, 64), None), DENSE, "12 columns"),
    ("gemm_bf16", SM90_, lambda: (bf16(8, 128)[:, ::2], bf16(16, 64), None), DENSE, "strides \\(128, 2\\)"),
    ("gemm_bf16", SM90_, lambda: (bf16(1, 64).expand(8, 64), bf16(16, 64), None), DENSE, "rows 0 elements apart"),
    ("gemm_bf16", SM90_, lambda: (bf16(8, 0), bf16(16, 0), None), DENSE, "a size is 0"),
    ("hc_prenorm_gemm", SM90, lambda: (bf16(8, 64), torch.randn(40, 64)), {"num_splits": None}, "N is 40"),
    ("hc_prenorm_gemm", ASCEND, lambda: (bf16(8, 256), torch.randn(40, 256)), {"num_splits": 2}, "does not split"),
    ("hc_prenorm_gemm", ASCEND, lambda: (bf16(8, 64), torch.randn(40, 64)), {"num_splits": None}, "K is 64"),
    (
        "einsum_bf16", SM90, lambda: (bf16(8, 2, 16), bf16(8, 2, 24), None),
        {"eq": "bhd,bhr->hdr", "out_dtype": None}, "eq is 'bhd,bhr->hdr'",
    ),
    (
        "einsum_bf16", SM90, lambda: (bf16(2, 32, 64), bf16(2, 64, 64), None),
        {"eq": "bmk,bnk->mn", "out_dtype": None}, "multiples of \\(64, 64, 64\\)",
    ),
    (
        "m_grouped_gemm_bf16_masked", SM90, lambda: (bf16(2, 64, 64), bf16(2, 16, 64), torch.tensor([1, 2])),
        {"expected_m": 1}, "a group has 64 rows",
    ),
    (
        "m_grouped_gemm_bf16_masked", ASCEND, lambda: (bf16(2, 256, 64), bf16(2, 16, 64), torch.tensor([1, 2])),
        {"expected_m": 1}, "no masked form",
    ),
    (
        "k_grouped_gemm_bf16", SM90, lambda: (bf16(128, 16), bf16(128, 16), torch.tensor([128]), None),
        {"ks": None, "grouping": "psum", "alignment": 128, "out_dtype": None}, "ks is None",
    ),
    (
        "k_grouped_gemm_bf16", SM90, lambda: (bf16(128, 16), bf16(128, 16), torch.tensor([100]), None),
        {"ks": [100], "grouping": "psum", "alignment": 128, "out_dtype": None}, "a group has 100 rows",
    ),
    (
        "k_grouped_gemm_bf16", ASCEND, lambda: (bf16(256, 16), bf16(256, 16), torch.tensor([100]), None),
        {"ks": None, "grouping": "psum", "alignment": 128, "out_dtype": None}, "alignment 128",
    ),
]  # fmt: skip


@pytest.mark.parametrize("op,row,make,given,reason", NEAR, ids=by_platform)
def test_near_misses(op: str, row: Gemm, make: Any, given: dict[str, Any], reason: str) -> None:
    found = OPS[op][1](row, *make(), **given)
    assert found is not None and found.endswith(".")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found)


GROUPED: dict[str, Any] = {
    "layout": "nt",
    "grouping": "psum",
    "alignment": 128,
    "expected_m": None,
    "zero_padding": True,
    "out_dtype": None,
}


@pytest.mark.parametrize(
    "row,k,change,reason",
    [
        (SM90, 64, {}, "about 128 rows"),
        (SM90_, 64, {"alignment": 64}, "aligned to 64"),
        (SM90_, 64, {"alignment": 256}, "aligned to 256"),
        (SM90_, 96, {}, "K is 96"),
        (SM90_, 64, {"out_dtype": F32}, "the result is float32"),
        (ASCEND, 64, {}, "aligned to 128"),
        (ASCEND, 64, {"grouping": "labels", "alignment": 256}, "grouping is 'labels'"),
        (ASCEND, 64, {"alignment": 256}, "a has 128 rows"),
    ],
    ids=by_platform,
)
def test_near_misses_of_groups(row: Gemm, k: int, change: dict[str, Any], reason: str) -> None:
    given = GROUPED | change
    rows = 128
    layout = torch.zeros(rows if given["grouping"] == "labels" else 1, dtype=torch.int32)
    found = gemm_limits.m_grouped_gemm_bf16(row, bf16(rows, k), bf16(1, 16, k), layout, **given)
    assert found is not None and reason in found
    if row is SM90_:
        assert gemm_limits.m_grouped_gemm_bf16(row, bf16(rows, 64), bf16(1, 16, 64), layout, **GROUPED) is None


def test_scales_that_no_platform_may_see() -> None:
    """Values of f32 scales cannot be checked without looking, so platforms that need powers of two get words only."""
    a, sf = quant_fp8(torch.randn(32, 128), gran=(1, 32), ue8m0=True)
    given = {"recipe_a": (1, 32), "recipe_b": (1, 32), **DENSE}
    for row in (SM100, ASCEND):
        found = gemm_limits.gemm_scaled(row, a, sf, a, sf, None, **given)
        assert found is not None and "powers of two" in found
    found = gemm_limits.gemm_scaled(SM90_, a, sf, a, sf, None, **given)
    assert found is not None and "elements of K" in found
    codes, words = quant_fp4(torch.randn(32, 128), gran_k=32, sf_format="ue8m0x2")
    found = gemm_limits.gemm_scaled(ASCEND, codes, words, a, _sf.pack(_sf.encode_ue8m0(sf), "ue8m0x2"), None, **given)
    assert found is not None and "fp4×fp8" in found
