"""The scaled products against float64 products of naively decoded operands; accuracy; gradients; graphs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import scaled_naive as naive
import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native._provider import Provider

FP8 = torch.float8_e4m3fn


def close(found: Tensor, wanted: Tensor, magnitude: Tensor | float) -> None:
    """Within f32 summation error of float64, relative to the sum of magnitudes, and one rounding to the dtype."""
    half_ulp = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}[found.dtype]
    error = (found.double() - wanted).abs()
    assert bool((error <= wanted.abs() * half_ulp + magnitude * 2.0**-19).all()), float(error.max())


def magnitudes(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, kwargs: Any) -> Tensor:
    left = naive.operand(a, sfa, kwargs["recipe_a"], kwargs["layout"][0] == "t").abs()
    return left @ naive.operand(b, sfb, kwargs["recipe_b"], kwargs["layout"][1] == "n").abs().t()


def wanted_gemm(args: tuple[Any, ...], kwargs: Any) -> Tensor:
    return naive.product(*args, kwargs["recipe_a"], kwargs["recipe_b"], kwargs["layout"])


@pytest.mark.parametrize(("runner", "sample"), naive.cases("gemm_scaled"))
def test_gemm_scaled(runner: str, sample: ops.Sample) -> None:
    *operands, c = sample.args
    kwargs = sample.kwargs
    d = naive.run(runner, "gemm_scaled", sample)
    wanted = wanted_gemm(tuple(operands), kwargs) * (1.0 if kwargs["alpha"] is None else kwargs["alpha"])
    if c is not None:
        wanted = wanted + c.double()
    assert d.dtype == (kwargs["out_dtype"] or (torch.bfloat16 if c is None else c.dtype)) and d.is_contiguous()
    close(d, wanted, magnitudes(*operands, kwargs) * 3 + wanted.abs())


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("runner", ["op", "reference"])
def test_any_m_and_any_k(runner: str, group: int) -> None:
    """Ends of K that are no whole group, odd numbers of groups, rows that are a multiple of nothing."""
    for m, k in (
        (1, 33),
        (3, 63),
        (4, 65),
        (8, 96),
        (63, 128),
        (64, 513),
        (127, 34),
        (128, 66),
        (129, 1024),
        (2, 4304),
    ):
        n = 1 + (m + k) % 13
        for fmt in ("fp8", "fp4") if k % 2 == 0 else ("fp8",):
            recipe_b = (5 if fmt == "fp8" else 1, group)
            a, sfa = ops.quant_fp8(torch.randn(m, k), gran=(1, group))
            x = torch.randn(n, k)
            b, sfb = ops.quant_fp8(x, gran=recipe_b) if fmt == "fp8" else ops.quant_fp4(x, gran_k=group)
            assert sfa.shape == (m, -(-k // group)) and sfb.shape == (-(-n // recipe_b[0]), -(-k // group))
            kwargs = {"recipe_a": (1, group), "recipe_b": recipe_b, "layout": "nt"}
            sample = ops.Sample("", (a, sfa, b, sfb, None), {**kwargs, "out_dtype": torch.float32, "alpha": None})
            d = naive.run(runner, "gemm_scaled", sample)
            close(d, wanted_gemm((a, sfa, b, sfb), kwargs), magnitudes(a, sfa, b, sfb, kwargs))


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize(("runner", "sample"), naive.cases("gemm_scaled_out"))
def test_gemm_scaled_out(runner: str, sample: ops.Sample, alias: bool) -> None:
    d, *operands, c = (a.clone() if isinstance(a, Tensor) else a for a in sample.args)
    c = d if alias else c
    alpha = sample.kwargs["alpha"]
    wanted = wanted_gemm(tuple(operands), sample.kwargs) * (1.0 if alpha is None else alpha)
    wanted = wanted + (0.0 if c is None else c.double())
    pointer, strides = d.data_ptr(), d.stride()
    call = dataclasses.replace(sample, args=(d, *operands, c))
    assert naive.run(runner, "gemm_scaled_out", call) is None
    assert d.data_ptr() == pointer and d.stride() == strides
    close(d, wanted, magnitudes(*operands, sample.kwargs) * 3 + wanted.abs())


@pytest.mark.parametrize(("runner", "sample"), naive.cases("gemm_scaled_acc_"))
def test_gemm_scaled_acc(runner: str, sample: ops.Sample) -> None:
    d, *operands = (a.clone() for a in sample.args)
    step = wanted_gemm(tuple(operands), sample.kwargs)
    for _ in range(2):
        wanted = d.double() + step
        assert naive.run(runner, "gemm_scaled_acc_", dataclasses.replace(sample, args=(d, *operands))) is None
        close(d, wanted, magnitudes(*operands, sample.kwargs) + wanted.abs())


def einsum_operand(x: Tensor, sf: Tensor, gran: tuple[int, int], order: tuple[int, int, int]) -> Tensor:
    """float64 of the shape of ``x``, whose dims (batch, MN, K) are ``order``."""
    matrices = naive.numbers(x).permute(order)
    scales = sf if sf.dtype != torch.float32 else sf.permute(order)
    scaled = [m * naive.scale_of(s, *m.shape, gran) for m, s in zip(matrices, scales, strict=True)]
    back = tuple(order.index(d) for d in range(3))
    return (torch.stack(scaled) if scaled else matrices).permute(back)


ORDERS = {
    "bhr,hdr->bhd": ((1, 0, 2), (0, 1, 2)),
    "bhd,hdr->bhr": ((1, 0, 2), (0, 2, 1)),
    "bhd,bhr->hdr": ((1, 2, 0), (1, 2, 0)),
    "bmk,bnk->mn": ((0, 1, 2), (0, 1, 2)),
}


def wanted_einsum(sample: ops.Sample) -> tuple[Tensor, Tensor]:
    a, sfa, b, sfb, *_ = sample.args
    k = sample.kwargs
    left = einsum_operand(a, sfa, k["recipe_a"], ORDERS[k["eq"]][0])
    right = einsum_operand(b, sfb, k["recipe_b"], ORDERS[k["eq"]][1])
    return torch.einsum(k["eq"], left, right), torch.einsum(k["eq"], left.abs(), right.abs())


@pytest.mark.parametrize(("runner", "sample"), naive.cases("einsum_scaled"))
def test_einsum_scaled(runner: str, sample: ops.Sample) -> None:
    c = sample.args[4]
    wanted, magnitude = wanted_einsum(sample)
    wanted = wanted if c is None else wanted + c.double()
    d = naive.run(runner, "einsum_scaled", sample)
    assert d.is_contiguous()
    close(d, wanted, magnitude + wanted.abs())


def check_quantised(data: Tensor, sf: Tensor, wanted: Tensor, clamp: float | None) -> None:
    """Quantised rows of a float64 matrix: a power of two per 32 columns that just fits, numbers within half an ulp."""
    wanted = wanted if clamp is None else wanted.clamp(-clamp, clamp)
    rows, columns = wanted.shape
    scales = naive.scale_of(sf, rows, columns, (1, 32))
    found = naive.numbers(data) * scales
    error = (found - wanted).abs()
    assert bool((error <= wanted.abs() * 2.0**-4 * 1.0001 + scales * 2.0**-10 * 1.0001).all())
    for i in range(rows):
        for left in range(0, columns, 32):
            s = float(scales[i, left])
            amax = max(float(wanted[i, left : left + 32].abs().max()), 1e-4)
            assert math.log2(s).is_integer() and s * 448 >= amax * 0.9999 and s / 2 * 448 < amax * 1.0001


@pytest.mark.parametrize(("runner", "sample"), naive.cases("gemm_scaled_fp8out"))
def test_gemm_scaled_fp8out(runner: str, sample: ops.Sample) -> None:
    data, sf = naive.run(runner, "gemm_scaled_fp8out", sample)
    wanted = wanted_gemm(sample.args, sample.kwargs)
    assert data.dtype == FP8 and data.shape == wanted.shape
    check_quantised(data, sf, wanted, sample.kwargs["clamp"])
    assert sample.kwargs["clamp"] is None or (wanted.abs() > sample.kwargs["clamp"]).any()


@pytest.mark.parametrize(("runner", "sample"), naive.cases("einsum_scaled_fp8out"))
def test_einsum_scaled_fp8out(runner: str, sample: ops.Sample) -> None:
    data, sf = naive.run(runner, "einsum_scaled_fp8out", sample)
    wanted, _ = wanted_einsum(sample)
    assert data.shape == wanted.shape
    check_quantised(data.flatten(1), sf, wanted.flatten(1), sample.kwargs["clamp"])


@pytest.mark.parametrize(("runner", "sample"), naive.cases("swiglu_quant"))
def test_swiglu_quant_is_the_unrounded_activation_quantised(runner: str, sample: ops.Sample) -> None:
    h, weight = sample.args
    k = dict(sample.kwargs)
    quant = {"gran": (1, k.pop("gran_k")), **{name: k.pop(name) for name in ("ue8m0", "sf_format")}}
    data, sf = naive.run(runner, "swiglu_quant", sample)
    assert data.shape == (*h.shape[:-1], h.shape[-1] // 2) and data.dtype == FP8
    activation = ops.reference("swiglu")(h.float(), None if weight is None else weight.float(), **k)
    wanted, scales = ops.reference("quant_fp8")(activation, **quant)
    if runner == "reference":
        assert data.view(torch.uint8).equal(wanted.view(torch.uint8)) and sf.equal(scales)
        if h.dtype == torch.bfloat16 and h.numel():
            rounded, _ = ops.reference("quant_fp8")(activation.bfloat16(), **quant)
            assert not rounded.view(torch.uint8).equal(data.view(torch.uint8))
        return
    assert sf.stride() == scales.stride() and sf.dtype == scales.dtype
    tolerance = ops.op("swiglu_quant").tolerance[h.dtype]
    numbers = [
        ops.dequant(d, s, gran=quant["gran"], sf_format=quant["sf_format"]) for d, s in ((data, sf), (wanted, scales))
    ]
    torch.testing.assert_close(numbers[0], numbers[1], rtol=tolerance.rtol, atol=tolerance.atol)
    same = data.view(torch.uint8) == wanted.view(torch.uint8)
    assert same.double().mean() > 0.99 or not h.numel()


# The thresholds of the library's own tests, against operands that were never quantised.
RECIPES = {
    "fp8-1x128-128x128": ("fp8", "fp8", (1, 128), (128, 128), False, 1e-3),
    "fp8-1x128-128x128-ue8m0": ("fp8", "fp8", (1, 128), (128, 128), True, 1e-3),
    "fp8-1x128-1x128": ("fp8", "fp8", (1, 128), (1, 128), False, 1e-3),
    "fp8-mx": ("fp8", "fp8", (1, 32), (1, 32), True, 1e-3),
    "fp8xfp4": ("fp8", "fp4", (1, 32), (1, 32), True, 1e-2),
    "fp8-128xfp4": ("fp8", "fp4", (1, 128), (1, 32), True, 1e-2),
    "fp4xfp8": ("fp4", "fp8", (1, 32), (1, 32), True, 1e-2),
    "fp4xfp4": ("fp4", "fp4", (1, 32), (1, 32), True, 2e-2),
}


def quantised(x: Tensor, fmt: str, gran: tuple[int, int], ue8m0: bool) -> tuple[Tensor, Tensor]:
    return ops.quant_fp8(x, gran=gran, ue8m0=ue8m0) if fmt == "fp8" else ops.quant_fp4(x, gran_k=gran[1])


# Pairs of FP4 lie along the last dimension, so what is quantised along K is stored with K last.
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        (recipe, layout)
        for recipe, (a, b, *_) in RECIPES.items()
        for layout in ("nt", "nn", "tn", "tt")
        if (a == "fp8" or layout[0] == "n") and (b == "fp8" or layout[1] == "t")
    ],
)
def test_accuracy_is_that_of_the_librarys_own_tests(recipe: str, layout: str) -> None:
    fmt_a, fmt_b, recipe_a, recipe_b, ue8m0, bound = RECIPES[recipe]
    a, b = torch.randn(96, 384), torch.randn(160, 384)
    (qa, sfa), (qb, sfb) = quantised(a, fmt_a, recipe_a, ue8m0), quantised(b, fmt_b, recipe_b, ue8m0)
    qa, qb = qa.t() if layout[0] == "t" else qa, qb.t() if layout[1] == "n" else qb
    d = ops.gemm_scaled(qa, sfa, qb, sfb, recipe_a=recipe_a, recipe_b=recipe_b, layout=layout)
    exact = a.double() @ b.double().t()
    assert 0 < naive.calc_diff(d, exact) < bound
    if layout == "nt":
        data, sf = ops.gemm_scaled_fp8out(qa, sfa, qb, sfb, recipe_a=recipe_a, recipe_b=recipe_b, sf_format="fp32")
        assert naive.calc_diff(ops.dequant(data, sf, gran=(1, 32)), exact) < bound + 1e-3


@pytest.mark.parametrize("eq", list(ORDERS))
def test_accuracy_of_einsum_scaled(eq: str) -> None:
    size = {"b": 128, "h": 3, "r": 128, "d": 96, "m": 40, "n": 56, "k": 128}
    left, right = eq.split("->")[0].split(",")
    operands, raw = [], []
    for letters, order in zip((left, right), ORDERS[eq], strict=True):
        x = torch.randn(*(size[letter] for letter in letters))
        data, sf = ops.quant_fp8(x.permute(order), gran=(1, 32), ue8m0=True)
        back = tuple(order.index(d) for d in range(3))
        operands += [data.permute(back), sf.permute(back)]
        raw.append(x.double())
    exact = torch.einsum(eq, *raw)
    d = ops.einsum_scaled(eq, *operands, recipe_a=(1, 32), recipe_b=(1, 32))
    assert 0 < naive.calc_diff(d, exact) < 1e-3
    if eq == "bhr,hdr->bhd":
        data, sf = ops.einsum_scaled_fp8out(eq, *operands, recipe_a=(1, 32), recipe_b=(1, 32))
        back = ops.dequant(data.flatten(1), sf, gran=(1, 32), sf_format="ue8m0x4")
        assert naive.calc_diff(back, exact.flatten(1)) < 2e-3


def test_packed_and_logical_scales_give_the_same_bits() -> None:
    a, b = torch.randn(9, 200), torch.randn(13, 200)
    (qa, sfa), (qb, sfb) = ops.quant_fp8(a, gran=(1, 32), ue8m0=True), ops.quant_fp4(b)
    recipes: dict[str, Any] = {"recipe_a": (1, 32), "recipe_b": (1, 32)}
    wanted = ops.gemm_scaled(qa, sfa, qb, sfb, **recipes)
    for target in ("sm100", "ascend"):
        words = [ops.pack_sf(sf, mn=mn, k=200, gran=(1, 32), target=target) for sf, mn in ((sfa, 9), (sfb, 13))]
        assert ops.gemm_scaled(qa, words[0], qb, words[1], **recipes).equal(wanted)
        assert ops.gemm_scaled(qa, words[0].contiguous(), qb, sfb, **recipes).equal(wanted)


def test_the_dtype_that_holds_fp4_pairs_changes_nothing() -> None:
    (qa, sfa), (qb, sfb) = ops.quant_fp4(torch.randn(5, 64)), ops.quant_fp4(torch.randn(9, 64))

    def product(a: Tensor, b: Tensor) -> Tensor:
        return ops.gemm_scaled(a, sfa, b, sfb, recipe_a=(1, 32), recipe_b=(1, 32), alpha=1.7)

    wanted = product(qa, qb)
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    for a in naive.FP4:
        for b in naive.FP4:
            assert product(qa.view(a), qb.view(b)).equal(wanted)
    assert compiled(qa.view(torch.float4_e2m1fn_x2), qb.view(torch.float4_e2m1fn_x2)).equal(wanted)


def test_the_scale_of_a_group_reaches_exactly_its_group() -> None:
    """K is no multiple of the group, M and N of nothing: one scale changed, one block of D changes."""
    qa, sfa = ops.quant_fp8(torch.randn(5, 70), gran=(2, 32))
    qb, sfb = ops.quant_fp8(torch.randn(7, 70), gran=(3, 32))
    recipes: dict[str, Any] = {"recipe_a": (2, 32), "recipe_b": (3, 32), "out_dtype": torch.float32}
    before = ops.gemm_scaled(qa, sfa, qb, sfb, **recipes)
    changed = sfa.clone()
    changed[2, 2] *= 3.0
    difference = ops.gemm_scaled(qa, changed, qb, sfb, **recipes) - before
    assert (difference[:4] == 0).all() and (difference[4] != 0).all()
    tail = naive.operand(qa, sfa, (2, 32))[4, 64:] @ naive.operand(qb, sfb, (3, 32))[:, 64:].t()
    torch.testing.assert_close(difference[4].double(), 2 * tail, rtol=1e-4, atol=1e-4)


def test_nan_in_data_or_scales_reaches_its_rows_and_no_other() -> None:
    qa, sfa = ops.quant_fp8(torch.randn(4, 64), gran=(1, 32))
    qb, sfb = ops.quant_fp8(torch.randn(3, 64), gran=(1, 32))
    qa.view(torch.uint8)[1, 40] = 0x7F
    sfa[3, 0] = math.nan
    d = ops.gemm_scaled(qa, sfa, qb, sfb, recipe_a=(1, 32), recipe_b=(1, 32))
    assert d[[1, 3]].isnan().all() and d[[0, 2]].isfinite().all()


X = torch.randn(4, 64)
Q, SF = ops.quant_fp8(X, gran=(1, 32), ue8m0=True)


GRADS: dict[str, Any] = {
    "quant_fp8": lambda x: ops.quant_fp8(x, gran=(1, 32))[1],
    "quant_fp4": lambda x: ops.quant_fp4(x)[1],
    "dequant": lambda x: ops.dequant(Q, x[:, :2], gran=(1, 32)),
    "swiglu_quant": lambda x: ops.swiglu_quant(x)[1],
    "gemm_scaled": lambda x: ops.gemm_scaled(Q, SF, Q, SF, x[:, :4], recipe_a=(1, 32), recipe_b=(1, 32)),
    "pack_sf": lambda x: ops.pack_sf(x[:, :1], mn=4, k=128, gran=(1, 128), target="sm90"),
}


@pytest.mark.parametrize("name", list(GRADS))
def test_ops_without_a_gradient_say_so_and_return_no_zeros(name: str) -> None:
    x = torch.randn(4, 64, requires_grad=True)
    out = GRADS[name](x)
    with pytest.raises(
        RuntimeError, match=f"ascend_deep::{name} has no backward: .*fp8_linear|quant_fp4 has no backward"
    ):
        out.sum().backward()
    assert not GRADS[name](x.detach()).requires_grad


def test_writing_in_place_refuses_gradients_and_accumulates_without_them() -> None:
    recipes: dict[str, Any] = {"recipe_a": (1, 32), "recipe_b": (1, 32), "layout": "nt"}
    d = torch.randn(4, 4, requires_grad=True)
    before = d.detach().clone()
    with pytest.raises(RuntimeError, match=r"gemm_scaled_acc_ has no backward: .*fp8_linear\."):
        ops.gemm_scaled_acc_(d, Q, SF, Q, SF, **recipes)
    with pytest.raises(RuntimeError, match=r"gemm_scaled_out has no backward: .*fp8_linear\."):
        ops.gemm_scaled_out(torch.zeros(4, 4), Q, SF, Q, SF, d, **recipes)
    assert d.detach().equal(before)
    with torch.no_grad():
        ops.gemm_scaled_acc_(d, Q, SF, Q, SF, **recipes)
    assert not d.detach().equal(before)


def test_a_provider_gets_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    from ascend_deep.native import table

    seen: list[Any] = []

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((args, kwargs))
        return ops.reference("gemm_scaled")(*args, **kwargs)

    provider = Provider(name="spy", device="cpu", unavailable=lambda: None, kernels={"gemm_scaled": kernel})
    monkeypatch.setattr(table, "PRIORITY", {"cpu": (provider,)})
    c = torch.randn(4, 4)
    ops.gemm_scaled(Q, SF, Q, SF, c, recipe_a=(1, 32), recipe_b=(1, 32), alpha=0.3)
    ((args, kwargs),) = seen
    assert args[4] is c and kwargs == {
        "recipe_a": [1, 32],
        "recipe_b": [1, 32],
        "layout": "nt",
        "out_dtype": None,
        "alpha": 0.3,
    }


@pytest.mark.parametrize("fmt", ["fp32", "ue8m0x4", "ue8m0x2"])
def test_one_graph_serves_all_token_counts(fmt: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    w8, sfw = ops.quant_fp8(torch.randn(40, 96), gran=(128, 128), ue8m0=True)

    def layer(x: Tensor) -> Tensor:
        x8, sf = ops.quant_fp8(x, gran=(1, 32), ue8m0=True, sf_format=fmt)
        h8, h_sf = ops.gemm_scaled_fp8out(x8, sf, w8, sfw, recipe_a=(1, 32), recipe_b=(128, 128), sf_format=fmt)
        y = ops.dequant(h8, h_sf, gran=(1, 32), sf_format=fmt)
        a8, a_sf = ops.swiglu_quant(y, limit=1.25, sf_format=fmt)
        return ops.dequant(a8, a_sf, gran=(1, 32), sf_format=fmt)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for tokens in (2, 3, 7, 64, 33):
        x = torch.randn(tokens, 96)
        assert compiled(x).equal(layer(x))
    assert counter.frame_count <= 2
    for tokens in (0, 1):
        x = torch.randn(tokens, 96)
        assert compiled(x).equal(layer(x))


def test_writing_into_a_result_survives_compilation() -> None:
    def f(d: Tensor, a: Tensor, sf: Tensor) -> Tensor:
        ops.gemm_scaled_out(d, a, sf, a, sf, d, recipe_a=(1, 32), recipe_b=(1, 32), alpha=0.7)
        ops.gemm_scaled_acc_(d, a, sf, a, sf, recipe_a=(1, 32), recipe_b=(1, 32), layout="nt")
        return d * 2

    d = torch.randn(4, 4)
    eager, compiled = d.clone(), d.clone()
    wanted = f(eager, Q, SF)
    found = torch.compile(f, backend="aot_eager", fullgraph=True)(compiled, Q, SF)
    assert found.equal(wanted) and compiled.equal(eager) and not compiled.equal(d)


def test_inductor_keeps_the_strides_of_packed_scales() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        data, sf = ops.quant_fp8(x, gran=(1, 32), ue8m0=True, sf_format="ue8m0x4")
        return ops.gemm_scaled(data, sf, data, sf, recipe_a=(1, 32), recipe_b=(1, 32)), sf

    x = torch.randn(5, 300)
    (d, sf), (wanted, wanted_sf) = torch.compile(f, backend="inductor", fullgraph=True)(x), f(x)
    assert sf.stride() == wanted_sf.stride() == (1, 8) and sf.equal(wanted_sf) and d.equal(wanted)


def test_sizes_and_strides_beyond_two_to_the_31() -> None:
    x = torch.empty(2**17, 2**16, device="meta")
    x8, sf = ops.quant_fp8(x, gran=(1, 32), ue8m0=True, sf_format="ue8m0x4")
    assert x8.shape == x.shape and sf.shape == (2**17, 2**9) and sf.stride() == (1, 2**17)
    x4, sf = ops.quant_fp4(x[:-1], sf_format="ue8m0x2")
    assert x4.shape == (2**17 - 1, 2**15) and sf.shape == (2**17 - 1, 2**10) and sf.stride() == (1, 2**17 - 1)
    d = ops.gemm_scaled(x8, sf.new_empty(2**17, 2**10), x4, sf, recipe_a=(1, 32), recipe_b=(1, 32))
    assert d.shape == (2**17, 2**17 - 1) and d.dtype == torch.bfloat16
    stacked = torch.empty(3, 2**16, 2**16, device="meta").transpose(1, 2)
    assert ops.dequant(*ops.quant_fp8(stacked, gran=(128, 128)), gran=(128, 128)).stride() == (2**32, 2**16, 1)
