"""Gradients: numerically, against autograd of a plain spelling, eager against compiled, and their dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep import ops

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def double(sample: ops.Sample) -> ops.Sample:
    """The same call in f64."""
    args = tuple(a.double() if isinstance(a, Tensor) and a.dtype in _FLOATS else a for a in sample.args)
    kwargs = dict(sample.kwargs)
    if kwargs.get("out_dtype") is not None:
        kwargs["out_dtype"] = torch.float64
    return dataclasses.replace(sample, args=args, kwargs=kwargs)


def requires_grad(args: tuple[Any, ...], names: list[str], wanted: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(
        a.detach().clone().requires_grad_() if isinstance(a, Tensor) and n in wanted else a
        for a, n in zip(args, names, strict=True)
    )


def positional(name: str) -> list[str]:
    return [a.name for a in ops.op(name).overload._schema.arguments if not a.kwarg_only]


def few(name: str, *skip: str) -> list[Any]:
    """Samples small enough for numerical differentiation; not those in which a tie or kink is the point."""
    return [
        pytest.param(s, id=s.name)
        for s in ops.op(name).samples()
        if "63" not in s.name and not any(word in s.name for word in (*skip, "fp8", "packed"))
    ]


def check_numerically(name: str, sample: ops.Sample) -> None:
    sample = double(sample)
    args = requires_grad(sample.args, positional(name), ops.op(name).differentiable)
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad and a.numel()]
    if not leaves:
        return

    def call(*changed: Tensor) -> tuple[Tensor, ...]:
        it = iter(changed)
        full = tuple(next(it) if any(a is leaf for leaf in leaves) else a for a in args)
        result = ops.op(name).overload(*full, **sample.kwargs)
        result = (result,) if isinstance(result, Tensor) else result
        return tuple(r for r in result if r.requires_grad)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("sample", few("moe_experts"))
def test_moe_experts_numerically(sample: ops.Sample) -> None:
    check_numerically("moe_experts", sample)


@pytest.mark.parametrize("sample", few("moe_route", "ties", "two_levels"))
def test_moe_route_numerically(sample: ops.Sample) -> None:
    check_numerically("moe_route", sample)


@pytest.mark.parametrize("sample", few("swiglu"))
def test_swiglu_numerically(sample: ops.Sample) -> None:
    check_numerically("swiglu", sample)


@pytest.mark.parametrize("name", ["moe_permute", "moe_combine", "moe_combine_backward"])
def test_moving_ops_numerically(name: str) -> None:
    for parameter in few(name):
        check_numerically(name, parameter.values[0])


def plain_experts(
    x: Tensor, idx: Tensor, weights: Tensor, w13: Tensor, b13: Tensor, w2: Tensor, b2: Tensor, offset: int
) -> Tensor:
    """Tanh-gelu experts with interleaved halves and biases, weights gathered per slot, all of it differentiable."""
    local = idx - offset
    inside = (local >= 0) & (local < w13.shape[0])
    e = local.clamp(0, w13.shape[0] - 1)
    h = torch.einsum("th,tknh->tkn", x, w13[e]) + b13[e]
    a = torch.nn.functional.gelu(h[..., ::2], approximate="tanh") * h[..., 1::2]
    y = torch.einsum("tki,tkhi->tkh", a, w2[e]) + b2[e]
    return (y * (weights * inside).unsqueeze(-1)).sum(1)


def experts_case(dtype: torch.dtype = torch.float64) -> tuple[tuple[Any, ...], dict[str, Any]]:
    t, k, e, h, i = 11, 3, 5, 8, 6
    args = (
        torch.randn(t, h),
        torch.randint(0, 9, (t, k)),
        torch.rand(t, k),
        torch.randn(e, 2 * i, h) * 0.4,
        torch.randn(e, 2 * i),
        torch.randn(e, h, i) * 0.4,
        torch.randn(e, h),
    )
    args = tuple(a.to(dtype).requires_grad_() if a.is_floating_point() else a for a in args)
    return args, {"act": "gelu_tanh", "interleaved": True, "expert_offset": 2}


def test_moe_experts_against_autograd_of_a_plain_spelling() -> None:
    args, kwargs = experts_case()
    leaves = [a for a in args if a.requires_grad]
    grad = torch.randn(11, 8, dtype=torch.float64)
    wanted = torch.autograd.grad(plain_experts(*args, offset=2), leaves, grad)
    found = torch.autograd.grad(ops.moe_experts(*args, **kwargs), leaves, grad)
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_input", [False, True])
def test_gradients_have_the_dtypes_of_their_inputs(dtype: torch.dtype, on_input: bool) -> None:
    args, kwargs = experts_case(dtype)
    args = (*args[:2], args[2].detach().float().requires_grad_(), *args[3:])
    ops.moe_experts(*args, **kwargs, weight_on_input=on_input).sum().backward()
    for a in args:
        if a.requires_grad:
            assert a.grad is not None and a.grad.dtype == a.dtype and a.grad.shape == a.shape
            assert a.grad.abs().sum() > 0


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda y: y.sum(),
    "mean": lambda y: y.mean(),
    "column": lambda y: y[:, 0].sum(),
    "transposed": lambda y: (y.t() @ torch.linspace(-1, 1, y.shape[0], dtype=y.dtype)).sum(),
    "expanded": lambda y: y.sum(0, keepdim=True).expand(3, -1).sum(),
}


@pytest.mark.parametrize("loss", list(LOSSES))
def test_any_gradient_strides(loss: str) -> None:
    args, kwargs = experts_case()
    leaves = [a for a in args if a.requires_grad]
    wanted = torch.autograd.grad(LOSSES[loss](plain_experts(*args, offset=2)), leaves)
    found = torch.autograd.grad(LOSSES[loss](ops.moe_experts(*args, **kwargs)), leaves)
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w)
    h, w = torch.randn(6, 8, requires_grad=True), torch.randn(6, requires_grad=True)
    gate, up = h.chunk(2, -1)
    wanted = torch.autograd.grad(LOSSES[loss](torch.nn.functional.silu(gate) * up * w[:, None]), (h, w))
    found = torch.autograd.grad(LOSSES[loss](ops.swiglu(h, w)), (h, w))
    logits = torch.randn(6, 8, requires_grad=True)
    wanted += torch.autograd.grad(LOSSES[loss](logits.softmax(-1).topk(3).values * 2.5), logits)
    found += torch.autograd.grad(LOSSES[loss](ops.moe_route(logits, topk=3, scale=2.5)[0]), logits)
    y, row_map = torch.randn(7, 4, requires_grad=True), torch.randint(0, 7, (6, 2))
    wanted += torch.autograd.grad(LOSSES[loss](y[row_map].sum(1)), y)
    found += torch.autograd.grad(LOSSES[loss](ops.moe_combine(y, row_map)), y)
    for f, g in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, g)


def test_experts_without_tokens_get_exactly_zero_gradients() -> None:
    poison = [torch.full((64, 64), float("nan")) for _ in range(50)]
    del poison
    args, kwargs = experts_case(torch.float32)
    idx = torch.tensor([[2, 4, -1]]).expand(11, 3).contiguous()
    ops.moe_experts(args[0], idx, *args[2:], **kwargs).square().sum().backward()
    for parameter in args[3:]:
        assert (parameter.grad[[1, 3, 4]] == 0).all()
        assert (parameter.grad[0] != 0).any() and (parameter.grad[2] != 0).any()
    assert (args[2].grad[:, 2] == 0).all()


def test_nothing_is_read_for_foreign_ids_in_the_backward() -> None:
    args, kwargs = experts_case(torch.float32)
    idx = torch.tensor([[2, 10**9, -1]]).expand(11, 3).contiguous()
    poisoned = args[2].detach().clone()
    poisoned[:, 1:] = float("nan")
    weights = poisoned.requires_grad_()
    out = ops.moe_experts(args[0], idx, weights, *args[3:], **kwargs)
    grads = torch.autograd.grad(out.square().sum(), [args[0], weights, *args[3:]])
    assert out.isfinite().all() and all(g.isfinite().all() for g in grads)


def test_token_without_local_experts_gets_zero_gradient() -> None:
    args, kwargs = experts_case(torch.float32)
    idx = args[1].clone()
    idx[4] = -1
    out = ops.moe_experts(args[0], idx, *args[2:], **kwargs)
    (d_x,) = torch.autograd.grad(out.sum(), args[0])
    assert (out[4] == 0).all() and (d_x[4] == 0).all() and (d_x[3] != 0).any()


def test_route_idx_has_no_gradient_and_bias_gets_none() -> None:
    logits, bias = torch.randn(5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    weights, idx = ops.moe_route(logits, bias, topk=2, scoring="sigmoid", renorm="sum", eps=0.1)
    assert not idx.requires_grad and weights.requires_grad
    weights.square().sum().backward()
    assert logits.grad is not None and logits.grad.abs().sum() > 0 and bias.grad is None


def test_route_gradient_of_sqrtsoftplus_is_finite_where_softplus_underflows() -> None:
    logits = torch.tensor([[-200.0, -150.0, 1.0]], requires_grad=True)
    ops.moe_route(logits, topk=3, scoring="sqrtsoftplus", scale=1.5)[0].sum().backward()
    assert logits.grad is not None and (logits.grad[0, :2] == 0).all() and logits.grad[0, 2] > 0


def test_double_backward_of_moe_experts_says_why_it_cannot() -> None:
    args, kwargs = experts_case()
    out = ops.moe_experts(*args, **kwargs)
    (d_x,) = torch.autograd.grad(out.square().sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"moe_experts_backward has no backward: moe_experts can be differentiated"):
        d_x.sum().backward()


def test_double_backward_of_the_others_is_right() -> None:
    h = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda a, b: ops.swiglu(a, b, act="swiglu_oai", alpha=1.3, limit=1.1), (h, w))
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        for select in ("scores", "logits"):
            assert torch.autograd.gradgradcheck(
                lambda a, c=scoring, s=select: ops.moe_route(
                    a, topk=2, scoring=c, select=s, renorm="sum", eps=0.2, scale=2.5
                )[0],
                logits,
            )
    y = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    row_map = torch.tensor([[0, 4], [-1, 2], [3, 3]])
    assert torch.autograd.gradgradcheck(lambda a: ops.moe_combine(a.square(), row_map), y)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 2], [1, 0], [-1, 1], [2, 1]])
    assert torch.autograd.gradgradcheck(lambda a: ops.moe_permute(a.sin(), ids, num_experts=3, alignment=2)[0], x)


def compiled_and_eager(call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    eager, compiled = call(*args), torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)(*args)
    torch.testing.assert_close(compiled, eager)
    grad = torch.randn_like(eager)
    for c, e in zip(torch.autograd.grad(compiled, leaves, grad), torch.autograd.grad(eager, leaves, grad), strict=True):
        assert c.dtype == e.dtype
        torch.testing.assert_close(c, e)


@pytest.mark.parametrize("on_input", [False, True])
def test_compiled_gradients_equal_eager_ones(on_input: bool) -> None:
    torch._dynamo.reset()
    args, kwargs = experts_case(torch.float32)
    compiled_and_eager(lambda *a: ops.moe_experts(*a, **kwargs, weight_on_input=on_input), args)

    def block(x: Tensor, gate: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        weights, idx = ops.moe_route(x @ gate, topk=2, scoring="sigmoid", renorm="sum", eps=0.05, scale=2.5)
        rows, _, row_weights, _, row_map = ops.moe_permute(x, idx, weights, num_experts=4, alignment=4)
        moved = ops.moe_combine(ops.swiglu(rows, row_weights, act="gelu"), row_map)
        return ops.moe_experts(x, idx, weights, w13, None, w2, act="relu2", limit=2.0) + moved.repeat(1, 2)

    shapes = ((9, 8), (8, 4), (4, 12, 8), (4, 8, 6))
    compiled_and_eager(block, tuple((torch.randn(*s) * 0.5).requires_grad_() for s in shapes))


@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_is_refused_and_gives_no_zeros(grad: bool) -> None:
    h = torch.randn(4, 6)
    with torch.set_grad_enabled(grad), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(h, torch.randn(4, 6))
        with pytest.raises((NotImplementedError, RuntimeError), match="forward"):
            ops.swiglu(dual)
        assert ops.swiglu(h).shape == (4, 3)
    with torch.set_grad_enabled(grad), pytest.raises((NotImplementedError, RuntimeError), match=r"forward|functorch"):
        torch.func.jvp(lambda t: ops.swiglu(t), (h,), (h,))


@pytest.mark.parametrize("name", [n for n, op in ops.OPS.items() if op.differentiable])
def test_no_op_loses_a_tangent(name: str) -> None:
    sample = next(iter(ops.OPS[name].samples()))
    args = list(sample.args)
    at = next(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.dtype in (torch.float32, torch.bfloat16))
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        args[at] = torch.autograd.forward_ad.make_dual(args[at].detach(), torch.ones_like(args[at]))
        with pytest.raises(NotImplementedError, match=f"{name} has no forward-mode derivative"):
            ops.OPS[name].overload(*args, **sample.kwargs)
