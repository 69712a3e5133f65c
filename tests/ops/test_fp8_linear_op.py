"""``fp8_linear``: values and gradients against their definition in float64, dtypes, autocast, compilation, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import scaled_naive as naive
import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native import table
from ascend_deep.native._provider import Provider

TOKEN, WEIGHT, ALONG = (1, 128), (128, 128), (128, 1)


def rounded(x: Tensor, gran: tuple[int, int], ue8m0: bool) -> Tensor:
    """float64 of the numbers that FP8 makes of a matrix."""
    data, sf = ops.quant_fp8(x, gran=gran, ue8m0=ue8m0)
    return naive.operand(data, sf, gran)


def matrix(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])


def case(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [3, 47, 200], weight [150, 200], bias, and a gradient of y whose rows differ in size."""
    x, weight, bias = torch.randn(3, 47, 200), torch.randn(150, 200) / 14, torch.randn(150)
    grad = torch.randn(3, 47, 150) * torch.exp2(torch.randint(-8, 4, (3, 47, 1)).float())
    x, weight, bias = (t.to(dtype).requires_grad_() for t in (x, weight, bias))
    return x, weight, bias, grad.to(dtype)


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_value_and_gradients_are_those_of_the_definition(dtype: torch.dtype, ue8m0: bool) -> None:
    x, weight, bias, grad = case(dtype)
    y = ops.fp8_linear(x, weight, bias=bias, ue8m0=ue8m0)
    d_x, d_weight, d_bias = torch.autograd.grad(y, (x, weight, bias), grad)
    assert (y.dtype, d_x.dtype, d_weight.dtype, d_bias.dtype) == (dtype,) * 4
    w = rounded(weight.detach(), WEIGHT, ue8m0)
    g = matrix(grad)
    wanted = {
        "y": (y, rounded(matrix(x), TOKEN, ue8m0) @ w.t() + bias.detach().double()),
        "d_x": (d_x, rounded(g, TOKEN, ue8m0) @ w),
        "d_weight": (d_weight, rounded(g, ALONG, ue8m0).t() @ rounded(matrix(x), ALONG, ue8m0)),
        "d_bias": (d_bias, g.double().sum(0)),
    }
    rtol = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 1e-5}[dtype]
    for name, (found, expected) in wanted.items():
        expected = expected.reshape(found.shape)
        scale = float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=2e-6 * scale, msg=lambda m, n=name: n + m)


def test_gradients_are_near_those_of_the_exact_layer() -> None:
    x, weight, bias, grad = case(torch.float32)
    leaves = (x, weight, bias)
    y = ops.fp8_linear(*leaves[:2], bias=bias)
    exact = torch.nn.functional.linear(*(t.detach().double().requires_grad_() for t in leaves))
    assert naive.calc_diff(y.detach(), exact.detach()) < 1e-3
    found = torch.autograd.grad(y, leaves, grad)
    double = [t.detach().double().requires_grad_() for t in leaves]
    wanted = torch.autograd.grad(torch.nn.functional.linear(*double), double, grad.double())
    for f, w in zip(found, wanted, strict=True):
        assert naive.calc_diff(f, w) < 1e-3


def test_a_weight_that_is_fp8_gives_the_same_and_has_no_gradient() -> None:
    x, weight, bias, grad = case()
    w8, sfw = ops.quant_fp8(weight.detach(), gran=WEIGHT)
    y = ops.fp8_linear(x, weight, bias=bias)
    other = ops.fp8_linear(x, w8, sfw, bias)
    assert other.equal(y)
    (wanted,) = torch.autograd.grad(y, x, grad)
    (found,) = torch.autograd.grad(other, x, grad)
    assert found.equal(wanted)


@pytest.mark.parametrize("needed", ["x", "weight", "bias", "none"])
def test_only_the_gradients_that_are_needed(needed: str) -> None:
    x, weight, bias, grad = (t.detach() for t in case())
    arguments = {"x": x, "weight": weight, "bias": bias}
    if needed != "none":
        arguments[needed].requires_grad_()
    y = ops.fp8_linear(x, weight, bias=bias)
    assert y.requires_grad == (needed != "none")
    if needed != "none":
        y.backward(grad)
        assert arguments[needed].grad is not None and arguments[needed].grad.abs().sum() > 0


def test_any_strides_of_the_gradient_and_of_the_inputs() -> None:
    x, weight, bias, grad = case(torch.float32)
    leaves = (x, weight, bias)
    wanted = torch.autograd.grad(ops.fp8_linear(x, weight, bias=bias), leaves, grad)
    strided = (x.detach().mT.contiguous().mT, weight.detach().t().contiguous().t(), bias.detach().repeat(2)[::2])
    again = [t.copy_(o.detach()).requires_grad_() for t, o in zip(strided, leaves, strict=True)]
    assert not again[0].is_contiguous() and not again[1].is_contiguous()
    y = ops.fp8_linear(again[0], again[1], bias=again[2])
    found = torch.autograd.grad(y, again, grad.transpose(0, 1).contiguous().transpose(0, 1))
    for f, w in zip(found, wanted, strict=True):
        assert f.equal(w)


def test_an_expanded_gradient() -> None:
    x, weight, bias, _ = case(torch.float32)
    loss = ops.fp8_linear(x, weight, bias=bias).sum()
    d_x, d_weight, d_bias = torch.autograd.grad(loss, (x, weight, bias))
    assert (d_bias == 3 * 47).all() and d_x.abs().sum() > 0 and d_weight.abs().sum() > 0


def test_differentiating_twice_says_why_not() -> None:
    x, weight, bias, _ = case(torch.float32)
    y = ops.fp8_linear(x, weight, bias=bias)
    (d_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"has no backward: .*fp8_linear"):
        d_x.sum().backward()


@pytest.mark.parametrize("rows", [0, 1, 129])
def test_rows(rows: int) -> None:
    x, weight = torch.randn(rows, 33, requires_grad=True), torch.randn(5, 33, requires_grad=True)
    y = ops.fp8_linear(x, weight, ue8m0=True)
    assert y.shape == (rows, 5)
    d_x, d_weight = torch.autograd.grad(y, (x, weight), torch.randn(rows, 5))
    assert d_x.shape == x.shape and d_weight.shape == weight.shape and d_weight.isfinite().all()
    assert rows or (d_weight == 0).all()


def test_a_vector_is_one_row() -> None:
    x, weight = torch.randn(33, requires_grad=True), torch.randn(5, 33)
    y = ops.fp8_linear(x, weight)
    assert y.shape == (5,) and y.equal(ops.fp8_linear(x[None], weight)[0])
    assert torch.autograd.grad(y.sum(), x)[0].shape == (33,)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_casts_what_a_linear_casts(low: torch.dtype) -> None:
    x, weight, bias, grad = case(torch.float32)
    with torch.autocast("cpu", low):
        y = ops.fp8_linear(x, weight, bias=bias)
    assert y.dtype == low
    assert y.equal(ops.fp8_linear(x.to(low), weight.to(low), bias=bias.to(low)))
    for g, leaf in zip(torch.autograd.grad(y, (x, weight, bias), grad.to(low)), (x, weight, bias), strict=True):
        assert g.dtype == torch.float32 and g.shape == leaf.shape and g.abs().sum() > 0
    w8, sfw = ops.quant_fp8(weight.detach(), gran=WEIGHT)
    with torch.autocast("cpu", low):
        assert ops.fp8_linear(x, w8, sfw, bias).dtype == low


def test_training_step_compiled_equals_eager_at_any_batch() -> None:
    weight, bias = (t.detach() for t in case(torch.float32)[1:3])

    def step(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.silu(ops.fp8_linear(x, weight, bias=bias, ue8m0=True)).square().sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (7, 1, 130):
        leaves = [t.clone().requires_grad_() for t in (torch.randn(rows, 200), weight, bias)]
        wanted = torch.autograd.grad(step(*leaves), leaves)
        found = torch.autograd.grad(compiled(*leaves), leaves)
        for f, w in zip(found, wanted, strict=True):
            assert f.equal(w) and w.abs().sum() > 0


def test_a_layer_learns() -> None:
    """Thirty steps of SGD on a random regression: the loss falls as it does with the exact layer."""
    x, target = torch.randn(64, 96), torch.randn(64, 32)
    losses: dict[str, float] = {}
    for name in ("exact", "fp8"):
        weight = torch.zeros(32, 96, requires_grad=True)
        for _ in range(30):
            y = ops.fp8_linear(x, weight) if name == "fp8" else torch.nn.functional.linear(x, weight)
            loss = (y - target).square().mean()
            weight.grad = None
            loss.backward()
            with torch.no_grad():
                weight -= 4.0 * weight.grad  # type: ignore[operator]
        losses[name] = float(loss.detach())
    assert losses["exact"] < 0.5 and abs(losses["fp8"] - losses["exact"]) < 0.02


def test_strict_looks_at_the_products_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def kernel(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return ops.reference(name)(*args, **kwargs)

        return run

    def provider(*names: str) -> dict[str, tuple[Provider, ...]]:
        kernels = {name: kernel(name) for name in names}
        return {"cpu": (Provider(name="spy", device="cpu", unavailable=lambda: None, kernels=kernels),)}

    x, weight = torch.randn(3, 40), torch.randn(5, 40)
    wanted = ops.fp8_linear(x, weight)
    monkeypatch.setattr(table, "PRIORITY", provider("quant_fp8", "gemm_scaled"))
    with ops.strict():
        torch.testing.assert_close(ops.fp8_linear(x, weight), wanted)
    assert seen == ["quant_fp8", "quant_fp8", "gemm_scaled"]
    monkeypatch.setattr(table, "PRIORITY", provider("quant_fp8"))
    with (
        ops.strict(),
        pytest.raises(RuntimeError, match=r"strict: no provider takes this call of ascend_deep::gemm_scaled"),
    ):
        ops.fp8_linear(x, weight)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": (
        {"x": torch.randn(4, 8).double()},
        TypeError,
        r"x has dtype float64; accepted: bfloat16, float32, float16",
    ),
    "weight-dtype": (
        {"weight": torch.randn(6, 8).half()},
        TypeError,
        r"weight has dtype float16; accepted: float32, float8",
    ),
    "no-scales": (
        {"weight": torch.zeros(6, 8).to(torch.float8_e4m3fn)},
        ValueError,
        r"weight has dtype float8_e4m3fn, but weight_sf is missing",
    ),
    "scales": ({"weight_sf": torch.ones(1, 1)}, ValueError, r"weight has dtype float32, but weight_sf is given"),
    "K": ({"weight": torch.randn(6, 9)}, ValueError, r"K of weight is 9, but K of x is 8"),
    "bias": ({"bias": torch.randn(5)}, ValueError, r"the size of bias is 5, but N of weight is 6"),
    "rank": ({"weight": torch.randn(6)}, ValueError, r"weight has 1 dimensions; it must be \[N, K\]"),
    "scale-shape": (
        {"weight": torch.zeros(6, 8).to(torch.float8_e4m3fn), "weight_sf": torch.ones(6, 1)},
        ValueError,
        r"size 0 of weight_sf is 6, but the block = \(128, 128\) wants",
    ),
    "scale-packed": (
        {"weight": torch.zeros(6, 8).to(torch.float8_e4m3fn), "weight_sf": torch.ones(6, 1, dtype=torch.int32)},
        TypeError,
        r"weight_sf has dtype int32; accepted: float32",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_does_not_fit_is_refused_with_a_sentence(name: str) -> None:
    change, error, message = REFUSED[name]
    arguments = {"x": torch.randn(4, 8), "weight": torch.randn(6, 8), "weight_sf": None, "bias": None, **change}
    with pytest.raises(error, match=f"fp8_linear: {message}") as raised:
        ops.fp8_linear(*arguments.values())
    assert str(raised.value).endswith(".")
