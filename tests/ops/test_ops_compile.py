"""The ops under torch.compile: number of graphs, gradients, autocast inside and outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from ascend_deep import ops
from ascend_deep.lowering import direct
from ascend_deep.native.cpu.provider import CPU

TOKENS = (2, 3, 7, 64, 33)


def block(x: Tensor, gate: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """A whole layer out of all five ops."""
    logits = x @ gate
    weights, idx = ops.moe_route(logits, topk=3, scoring="sigmoid", renorm="sum", eps=0.05, scale=2.5)
    rows, _, row_weights, _, row_map = ops.moe_permute(x, idx, weights, num_experts=4, alignment=4)
    moved = ops.moe_combine(ops.swiglu(rows, row_weights, act="swiglu_oai", alpha=1.7, limit=2.0), row_map)
    return ops.moe_experts(x, idx, weights, w13, None, w2, act="gelu") + moved.repeat(1, 2)


def parameters(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple((torch.randn(*s) * 0.4).to(dtype).requires_grad_() for s in ((8, 4), (4, 12, 8), (4, 8, 6)))


def test_one_graph_for_all_token_counts_from_two_on() -> None:
    counter = CompileCounter()
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    weights = parameters()
    for tokens in TOKENS:
        x = torch.randn(tokens, 8)
        torch.testing.assert_close(compiled(x, *weights), block(x, *weights))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("tokens", [0, 1])
def test_zero_and_one_token_on_a_graph_compiled_for_others(tokens: int) -> None:
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    weights = parameters()
    for count in (5, 9, tokens):
        x = torch.randn(count, 8)
        torch.testing.assert_close(compiled(x, *weights), block(x, *weights))


@pytest.mark.parametrize("name", ["moe_route", "moe_permute", "moe_combine", "swiglu", "moe_experts"])
def test_each_op_adds_no_guard_on_the_number_of_tokens(name: str) -> None:
    """Every op alone, all sizes that may vary marked so: marking fails if something specialises them."""

    def call(x: Tensor, idx: Tensor) -> Any:
        if name == "moe_route":
            return ops.moe_route(x, topk=2, n_group=2, topk_group=1, scale=1.3)
        if name == "moe_permute":
            return ops.moe_permute(x, idx, None, num_experts=4, alignment=8)
        if name == "moe_combine":
            return ops.moe_combine(x, idx, x)
        if name == "swiglu":
            return ops.swiglu(x, x[:, 0])
        return ops.moe_experts(x, idx, x[:, :2], w13, None, w2, act="relu2", limit=0.7)

    w13, w2 = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    counter = CompileCounter()
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for tokens in TOKENS:
        x = torch.randn(tokens, 8)
        idx = torch.randint(0, min(4, tokens), (tokens, 2))
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(idx, 0)
        torch.testing.assert_close(compiled(x, idx), call(x, idx))
    assert counter.frame_count == 1


def test_compiled_training_gives_the_gradients_of_eager() -> None:
    """An op without an autograd kernel would give zeros here and values in eager."""
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    weights = parameters()
    for tokens in (6, 1, 13):
        x = torch.randn(tokens, 8, requires_grad=True)
        grads = [torch.autograd.grad(f(x, *weights).square().sum(), [x, *weights]) for f in (block, compiled)]
        for eager, found in zip(*grads, strict=True):
            torch.testing.assert_close(found, eager)
            assert eager.abs().sum() > 0


def test_in_place_on_the_result_leaves_the_input_alone_when_compiled() -> None:
    def f(x: Tensor, row_map: Tensor) -> Tensor:
        y = ops.moe_combine(x, row_map)
        y.add_(1.5)
        return y

    x, row_map = torch.randn(4, 3), torch.arange(4)[:, None]
    before = x.clone()
    torch.testing.assert_close(torch.compile(f, backend="aot_eager")(x, row_map), before + 1.5)
    torch.testing.assert_close(x, before)


def hf_style(x: Tensor, gate: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The eager loop of the Hugging Face experts, with linear layers that autocast knows."""
    weights, idx = torch.nn.functional.linear(x, gate.t()).float().softmax(-1).topk(3)
    out = torch.zeros_like(x)
    for e in range(w13.shape[0]):
        token, slot = torch.where(idx == e)
        g, u = torch.nn.functional.linear(x[token], w13[e]).chunk(2, -1)
        y = torch.nn.functional.linear(torch.nn.functional.gelu(g) * u, w2[e])
        out.index_add_(0, token, (y * weights[token, slot, None]).to(out.dtype))
    return out


def fused_style(x: Tensor, gate: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, idx = ops.moe_route(torch.nn.functional.linear(x, gate.t()), topk=3)
    return ops.moe_experts(x, idx, weights, w13, None, w2, act="gelu")


def autocast_inside(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def f(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args)

    return f


@pytest.mark.parametrize("where", ["eager", "outside", "inside"])
def test_autocast_computes_what_eager_would(where: str) -> None:
    args = (torch.randn(12, 8, requires_grad=True), *parameters())
    wanted = autocast_inside(hf_style)(*args)
    if where == "eager":
        found = autocast_inside(fused_style)(*args)
    elif where == "inside":
        found = torch.compile(autocast_inside(fused_style), backend="aot_eager", fullgraph=True)(*args)
    else:
        found = autocast_inside(torch.compile(fused_style, backend="aot_eager", fullgraph=True))(*args)
    assert wanted.dtype == found.dtype == torch.float32
    scale = float(wanted.detach().abs().max())
    torch.testing.assert_close(found, wanted, rtol=1.6e-2, atol=1.6e-2 * scale)
    # The same in f32 is nearer to neither: autocast did change the numbers, so the rule did run.
    full = fused_style(*args)
    assert (found - full).abs().max() > 1e-4 * scale

    grad = torch.randn_like(found)
    for f, w in zip(torch.autograd.grad(found, args, grad), torch.autograd.grad(wanted, args, grad), strict=True):
        assert f.dtype == w.dtype == torch.float32
        torch.testing.assert_close(f, w, rtol=5e-2, atol=3e-2 * float(w.abs().max()))


def test_autocast_casts_what_a_linear_casts_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.dtype, ...]] = []
    experts = ops.op("moe_experts")

    def spy(*args: Any, **kwargs: Any) -> None:
        seen.append(tuple(a.dtype for a in args if isinstance(a, Tensor)))
        experts.check(*args, **kwargs)

    import dataclasses

    from ascend_deep.ops import _op

    monkeypatch.setitem(_op._REGISTERED, "moe_experts", dataclasses.replace(experts, check=spy))
    low, full, ids = torch.bfloat16, torch.float32, torch.int64
    for weight_dtype in (full, low):
        args = (
            torch.randn(5, 8),
            torch.randint(0, 4, (5, 2)),
            torch.rand(5, 2),
            torch.randn(4, 12, 8).to(weight_dtype),
            torch.randn(4, 12),
            torch.randn(4, 8, 6).to(weight_dtype),
            torch.randn(4, 8),
        )
        seen.clear()
        with torch.autocast("cpu", low):
            out = ops.moe_experts(*args)
        # x, idx, routing weights, w13, b13, w2, b2
        assert seen == [(low, ids, full, low, low, low, low)]
        assert out.dtype == full


def test_route_stays_in_f32_under_autocast() -> None:
    logits = torch.randn(50, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        weights, idx = ops.moe_route(logits, topk=6, scale=1.7)
    wanted = ops.moe_route(logits.float(), topk=6, scale=1.7)
    assert weights.dtype == torch.float32
    torch.testing.assert_close((weights, idx), wanted, rtol=1e-6, atol=0)


def test_matmuls_of_the_reference_are_not_cast_again_under_autocast() -> None:
    """f64 inputs are not cast by autocast; a reference body that ran under it would lose their precision."""
    d = torch.float64
    args = (torch.randn(6, 8, dtype=d), torch.randint(0, 4, (6, 2)), torch.rand(6, 2, dtype=d))
    weights = (torch.randn(4, 12, 8, dtype=d), None, torch.randn(4, 8, 6, dtype=d))
    wanted = ops.moe_experts(*args, *weights)
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.moe_experts(*args, *weights)
    torch.testing.assert_close(found, wanted)


@pytest.mark.skipif(CPU.unavailable() is not None, reason="the C++ kernels are not built")
def test_compiled_graphs_call_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of the provider is made once, when a graph is compiled; what no kernel takes stays an op."""
    monkeypatch.delenv("ASCEND_DEEP_DEBUG", raising=False)

    def targets(dtype: torch.dtype) -> list[str]:
        graph = fx.Graph()
        h = graph.placeholder("h")
        h.meta["val"] = _fake(dtype)
        keywords = {"act": "silu", "alpha": 1.0, "limit": None, "interleaved": False}
        y = graph.call_function(torch.ops.ascend_deep.swiglu.default, (h, None), keywords)
        graph.output(y)
        direct.replace(graph)
        return [str(n.target) for n in graph.nodes if n.op == "call_function"]

    assert targets(torch.float32) == ["ascend_deep_cpu.swiglu.default"]
    assert targets(torch.float64) == ["ascend_deep.swiglu.default"]
    monkeypatch.setenv("ASCEND_DEEP_DEBUG", "1")
    assert targets(torch.float32) == ["ascend_deep.swiglu.default"]


def _fake(dtype: torch.dtype) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(4, 6, dtype=dtype)
