"""What the scaled products, and the quantisation ops beside them, refuse: each with one sentence that names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_deep import ops

FP8 = torch.float8_e4m3fn


def good() -> dict[str, Any]:
    """Arguments of one valid call of gemm_scaled: M 6, N 10, K 70."""
    qa, sfa = ops.quant_fp8(torch.randn(6, 70), gran=(1, 32), ue8m0=True)
    qb, sfb = ops.quant_fp8(torch.randn(10, 70), gran=(1, 32), ue8m0=True)
    return {"a": qa, "sfa": sfa, "b": qb, "sfb": sfb, "c": None, "recipe_a": (1, 32), "recipe_b": (1, 32)}


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype-a": (
        {"a": torch.randn(6, 70)},
        TypeError,
        r"gemm_scaled: a has dtype float32; accepted: float8_e4m3fn, int8",
    ),
    "dtype-e5m2": ({"b": torch.randn(10, 70).to(torch.float8_e5m2)}, TypeError, r"b has dtype float8_e5m2; accepted"),
    "dtype-sfa": (
        {"sfa": torch.ones(6, 3).half()},
        TypeError,
        r"sfa has dtype float16; accepted: float32, int32, int16",
    ),
    "dtype-c": ({"c": torch.zeros(6, 10).half()}, TypeError, r"c has dtype float16; accepted: bfloat16, float32"),
    "c-and-out": (
        {"c": torch.zeros(6, 10), "out_dtype": torch.bfloat16},
        TypeError,
        r"c has dtype float32; accepted: bfloat16\.",
    ),
    "out_dtype": ({"out_dtype": torch.float16}, TypeError, r"out_dtype is float16; accepted: bfloat16, float32"),
    "rank-a": ({"a": torch.zeros(1, 6, 70).to(FP8)}, ValueError, r"a has 3 dimensions; it must be \[M, K\]\."),
    "rank-sfb": ({"sfb": torch.ones(30)}, ValueError, r"sfb has 1 dimensions; it must be \[ceil\(MN / gran_mn\), "),
    "layout": ({"layout": "nm"}, ValueError, r"layout is 'nm'; it must be one of 'nt', 'nn', 'tn', 'tt'"),
    "layout-K": ({"layout": "nn"}, ValueError, r"K of b in layout 'nn' is 10, but K of a is 70"),
    "K": ({"b": torch.zeros(10, 69).to(FP8)}, ValueError, r"K of b in layout 'nt' is 69, but K of a is 70"),
    "sfa-floor": ({"sfa": torch.ones(6, 2)}, ValueError, r"size 1 of sfa is 2, but recipe_a = \(1, 32\) wants .* is 3"),
    "sfa-repeated": ({"sfa": torch.ones(6, 12)}, ValueError, r"size 1 of sfa is 12, but recipe_a"),
    "sfa-rows": ({"sfa": torch.ones(1, 3)}, ValueError, r"size 0 of sfa is 1, but recipe_a = \(1, 32\) wants .* is 6"),
    "sfa-per-token": ({"sfa": torch.ones(6, 1)}, ValueError, r"size 1 of sfa is 1, but recipe_a"),
    "sfb-transposed": ({"sfb": torch.ones(3, 10)}, ValueError, r"size 0 of sfb is 3, but recipe_b = .* is 10"),
    "recipe-zero": (
        {"recipe_a": (1, 0)},
        ValueError,
        r"recipe_a is \[1, 0\]; it must be two block sizes of at least 1",
    ),
    "packed-blocks": (
        {"sfb": torch.ones(1, 1, dtype=torch.int32), "recipe_b": (128, 32)},
        ValueError,
        r"sfb has packed scales, int32, one per row, but recipe_b says 128 rows per scale; it must be 1, or sfb float",
    ),
    "packed-words": ({"sfa": torch.ones(6, 3, dtype=torch.int32)}, ValueError, r"size 1 of sfa is 3, .* is 1\."),
    "c-shape": ({"c": torch.zeros(6, 9)}, ValueError, r"size 1 of c is 9, but that of the result is 10"),
    "device": ({"sfa": torch.ones(6, 3, device="meta")}, TypeError, r"a is on cpu, but sfa is on meta"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_does_not_fit_is_refused_with_a_sentence(case: str) -> None:
    change, error, message = REFUSED[case]
    arguments = {**good(), **change}
    positional = [arguments.pop(name) for name in ("a", "sfa", "b", "sfb", "c")]
    with pytest.raises(error, match=message) as raised:
        ops.gemm_scaled(*positional, **arguments)
    assert str(raised.value).count("\n") == 0 and str(raised.value).endswith(".")


X = torch.randn(4, 64)
Q, SF = ops.quant_fp8(X, gran=(1, 32), ue8m0=True)
OTHERS: dict[str, tuple[Any, type[Exception], str]] = {
    "quant-dtype": (
        lambda: ops.quant_fp8(Q, gran=(1, 32)),
        TypeError,
        r"quant_fp8: x has dtype float8_e4m3fn; accepted",
    ),
    "quant-rank": (
        lambda: ops.quant_fp8(X[0], gran=(1, 32)),
        ValueError,
        r"x has 1 dimensions; it must be \[\.\.\., M, K\]",
    ),
    "quant-gran": (
        lambda: ops.quant_fp8(X, gran=(0, 32)),
        ValueError,
        r"gran is \[0, 32\]; it must be two block sizes",
    ),
    "quant-format": (
        lambda: ops.quant_fp8(X, gran=(1, 32), sf_format="e8"),
        ValueError,
        r"sf_format is 'e8'; it must be",
    ),
    "quant-packed": (
        lambda: ops.quant_fp8(X, gran=(1, 32), sf_format="ue8m0x4"),
        ValueError,
        r"holds powers of two only, but ue8m0 is False",
    ),
    "quant-rows": (
        lambda: ops.quant_fp8(X, gran=(128, 128), ue8m0=True, sf_format="ue8m0x2"),
        ValueError,
        r"one scale per row, but a scale covers 128 rows",
    ),
    "fp4-odd": (lambda: ops.quant_fp4(X[:, :63]), ValueError, r"quant_fp4: the last size of x is 63; it must be even"),
    "fp4-gran": (lambda: ops.quant_fp4(X, gran_k=0), ValueError, r"gran_k is 0; it must be at least 1"),
    "dequant-format": (
        lambda: ops.dequant(Q, SF, gran=(1, 32), sf_format="ue8m0x4"),
        TypeError,
        r"dequant: sf has dtype float32; accepted: int32",
    ),
    "dequant-sf": (
        lambda: ops.dequant(Q, SF, gran=(1, 64)),
        ValueError,
        r"size 1 of sf is 2, but gran = \(1, 64\) wants",
    ),
    "dequant-out": (
        lambda: ops.dequant(Q, SF, gran=(1, 32), out_dtype=torch.int8),
        TypeError,
        r"out_dtype is int8; accepted: float32",
    ),
    "pack-target": (
        lambda: ops.pack_sf(SF, mn=4, k=64, gran=(1, 32), target="sm80"),
        ValueError,
        r"target is 'sm80'; it must be one of 'sm90', 'sm100', 'ascend'",
    ),
    "pack-gran": (
        lambda: ops.pack_sf(SF, mn=4, k=64, gran=(1, 32), target="sm90"),
        ValueError,
        r"gran has 32 elements of K per scale; target 'sm90' takes 128",
    ),
    "pack-gran-64": (
        lambda: ops.pack_sf(SF, mn=4, k=128, gran=(1, 64), target="sm100"),
        ValueError,
        r"target 'sm100' takes 32 or 128",
    ),
    "pack-gran-48": (
        lambda: ops.pack_sf(SF, mn=4, k=96, gran=(1, 48), target="ascend"),
        ValueError,
        r"target 'ascend' takes multiples of 32",
    ),
    "pack-size": (
        lambda: ops.pack_sf(SF, mn=5, k=64, gran=(1, 32), target="sm100"),
        ValueError,
        r"size 0 of sf is 4, but gran = \(1, 32\) wants .* is 5",
    ),
    "pack-layout": (
        lambda: ops.pack_sf(SF, mn=4, k=64, gran=(1, 32), target="sm100", grouping="psum"),
        ValueError,
        r"grouping is 'psum', but grouped_layout is missing",
    ),
    "pack-alignment": (
        lambda: ops.pack_sf(
            SF,
            mn=4,
            k=64,
            gran=(1, 32),
            target="sm100",
            grouped_layout=torch.tensor([48], dtype=torch.int32),
            grouping="k_psum",
            alignment=48,
        ),
        ValueError,
        r"alignment is 48; blocks along K must start at multiples of gran_k = 32",
    ),
    "unpack": (
        lambda: ops.unpack_sf(SF, k=64, gran_k=32),
        TypeError,
        r"unpack_sf: sf has dtype float32; accepted: int32",
    ),
    "unpack-k": (
        lambda: ops.unpack_sf(torch.ones(4, 2, dtype=torch.int16), k=64, gran_k=32),
        ValueError,
        r"the last size of sf is 2, but the number of words of 2 groups is 1",
    ),
    "swiglu-odd": (
        lambda: ops.swiglu_quant(X[:, :63]),
        ValueError,
        r"swiglu_quant: the last size of h is 63; it must be",
    ),
    "swiglu-alpha": (lambda: ops.swiglu_quant(X, alpha=2.0), ValueError, r"alpha"),
    "einsum-eq": (
        lambda: ops.einsum_scaled("ij,jk->ik", Q, SF, Q, SF, recipe_a=(1, 32), recipe_b=(1, 32)),
        ValueError,
        r"eq is 'ij,jk->ik'; it must be one of 'bhr,hdr->bhd'",
    ),
    "einsum-fp8out-eq": (
        lambda: ops.einsum_scaled_fp8out("bmk,bnk->mn", Q, SF, Q, SF, recipe_a=(1, 32), recipe_b=(1, 32)),
        ValueError,
        r"eq is 'bmk,bnk->mn'; it must be one of 'bhr,hdr->bhd'",
    ),
    "einsum-fp8out-d": (
        lambda: ops.einsum_scaled_fp8out(
            "bhr,hdr->bhd",
            Q[None],
            SF[None],
            Q[:, None].expand(4, 5, 64),
            SF[:, None].expand(4, 5, 2),
            recipe_a=(1, 32),
            recipe_b=(1, 32),
        ),
        ValueError,
        r"d of b is 5; it must be a multiple of 32",
    ),
    "fp8out-clamp": (
        lambda: ops.gemm_scaled_fp8out(Q, SF, Q, SF, recipe_a=(1, 32), recipe_b=(1, 32), clamp=-1.0),
        ValueError,
        r"clamp is -1.0; it must be positive",
    ),
    "unpack-gran": (
        lambda: ops.unpack_sf(torch.ones(4, 1, dtype=torch.int32), k=64, gran_k=0),
        ValueError,
        r"unpack_sf: gran_k is 0; it must be at least 1",
    ),
    "unpack-k-below-zero": (
        lambda: ops.unpack_sf(torch.ones(4, 1, dtype=torch.int32), k=-1, gran_k=32),
        ValueError,
        r"unpack_sf: k is -1; it must be at least 0",
    ),
    "out-d": (
        lambda: ops.gemm_scaled_out(torch.zeros(4, 5), Q, SF, Q, SF, recipe_a=(1, 32), recipe_b=(1, 32)),
        ValueError,
        r"gemm_scaled_out: size 1 of d is 5, but that of the result is 4",
    ),
}


@pytest.mark.parametrize("case", list(OTHERS))
def test_other_ops_refuse_with_a_sentence(case: str) -> None:
    call, error, message = OTHERS[case]
    with pytest.raises(error, match=message) as raised:
        call()
    assert str(raised.value).count("\n") == 0 and str(raised.value).endswith(".")
