"""What the ``deep_gemm`` adapter refuses, platform by platform; the calls it makes are in the contract tests."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ascend_deep.native.deep_gemm import gemm_limits
from ascend_deep.native.deep_gemm.gemm_differences import ASCEND, SM90, SM100, Gemm
from ascend_deep.native.deep_gemm.gemm_provider import OPS
from ascend_deep.ops import _sf, quant_fp4, quant_fp8
from tests.native.deep_gemm_stand_in import F32, SM90_, bf16, by_platform

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
    assert found is not None and found.endswith(".") and re.search(reason, found), found


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
