"""A stand-in for the library of one platform, and what the tests of its adapter share.

It checks names, dtypes, shapes, strides and alignments against the documented signatures, computes the documented
result from what it is given, and leaves garbage wherever the documents promise nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.deep_gemm.gemm_differences import ASCEND, SM90, SM100, Gemm
from ascend_deep.native.deep_gemm.gemm_provider import OPS
from ascend_deep.ops import reference

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
            d.copy_(torch.where(padding(out), d, out))

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
        d.copy_(torch.where(padding(out), float("nan"), out))

    def _masked(self, d: Tensor, masked_m: Tensor, out: Tensor) -> None:
        assert masked_m.dtype == torch.int32 and masked_m.is_contiguous() and d.dtype == BF16
        assert masked_m.min() >= 0 and masked_m.max() <= d.shape[1] and d.shape[1] % 128 == 0
        d.copy_(torch.where(padding(out), float("nan"), out))

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


def padding(out: Tensor) -> Tensor:
    """Rows of a grouped product that belong to no group: the library leaves garbage there."""
    return (out == 0).all(-1, keepdim=True)


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
