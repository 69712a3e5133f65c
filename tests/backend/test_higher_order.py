"""Graphs with autograd functions of the model: kept as they are, and the parts around them are rewritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ascend_deep
from ascend_deep.passes import held


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x * 1.3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 0.4, None  # not the derivative: it has to be kept


class Doubled(torch.autograd.Function):
    """Writes into what it takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return x + 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


WEIGHT = torch.randn(6, 20, generator=torch.Generator().manual_seed(2))


def gradient(f: Any, x: Tensor, weight: Tensor, autocast: bool = False) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        w, i = f(x, weight)
    (w.float() * torch.tensor([0.3, 2.0])).sum().backward()
    grad, weight.grad = weight.grad, None
    assert grad is not None
    return [w.detach(), i, grad]


def compare(router: Any, sizes: tuple[int, ...] = (7,), dynamic: bool = False, autocast: bool = False) -> Any:
    torch._dynamo.reset()
    weight = WEIGHT.clone().requires_grad_()
    options = {"downstream": "aot_eager"}
    run = torch.compile(router, backend="ascend_deep", fullgraph=True, options=options)
    for size in sizes:
        x = torch.randn(size, 20, generator=torch.Generator().manual_seed(size))
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        for got, want in zip(gradient(run, x, weight, autocast), gradient(router, x, weight, autocast), strict=True):
            # Under autocast the compiled backward rounds to bfloat16 where eager does not, whatever the backend.
            torch.testing.assert_close(got, want, rtol=2e-2 if autocast else 1e-5, atol=2e-3 if autocast else 1e-5)
    assert not held._RESULTS, "what was held is let go"
    return ascend_deep.last_report()


def choose(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    w, i = torch.softmax(x @ weight.T, -1).topk(2)
    return w / w.sum(-1, keepdim=True), i


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_function_with_its_own_backward_is_kept_and_what_is_before_it_is_fused(dynamic: bool) -> None:
    def router(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        w, i = choose(x, weight)
        return Scaled.apply(w, 2.5).view(x.shape[0], 2), i

    report = compare(router, (7, 12) if dynamic else (7,), dynamic)
    assert report.counts() == {"moe_route": 1}


def test_what_is_behind_a_function_is_fused_and_two_functions_keep_apart() -> None:
    class Shifted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x - 0.25

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * -1.7

    def router(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        w, i = choose(Scaled.apply(x, 1.0), Shifted.apply(weight))
        return Scaled.apply(Shifted.apply(w), 3.0), i

    assert compare(router).counts() == {"moe_route": 1}


def test_no_block_crosses_a_function() -> None:
    def router(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        w, i = Scaled.apply(torch.softmax(x @ weight.T, -1), 0.5).topk(2)
        return w / w.sum(-1, keepdim=True), i

    report = compare(router)
    assert not report.counts()


def test_a_function_that_writes_in_place_leaves_the_graph() -> None:
    def router(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = x @ weight.T
        w, i = torch.softmax(logits, -1).topk(2)
        return Scaled.apply(w, 1.0) * Doubled.apply(logits.clone()).sum(), i

    report = compare(router)
    assert not report.counts()
    assert any("writes in place; the graph is left as it is." in m.reason for m in report.misses), report.misses


def test_a_function_under_autocast_leaves_the_graph() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x @ weight.T

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return None, (grad.T.float() @ x) * 0.5

    def router(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        w, i = torch.softmax(Product.apply(x, weight).float(), -1).topk(2)
        return w / w.sum(-1, keepdim=True), i

    report = compare(router, autocast=True)
    assert not report.counts()
    assert any("runs under autocast" in m.reason for m in report.misses), report.misses
