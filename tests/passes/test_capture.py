"""Capture before autograd keeps what the model does: values, gradients, mutations, aliases, constants, modes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import ascend_deep
from ascend_deep.passes.capture import NotCaptured, capture, install
from ascend_deep.passes.graph_view import GraphView, op_name


class Catch:
    """A Dynamo backend that captures, installs the capture and runs it with AOT eager."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.errors: list[NotCaptured] = []

    def __call__(self, gm, example_inputs):
        try:
            captured = capture(gm)
        except NotCaptured as error:
            self.errors.append(error)
        else:
            self.graphs.append(captured)
            install(gm, captured)
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

    def names(self) -> list[str]:
        return [op_name(n) for g in self.graphs for n in g.graph.nodes if n.op == "call_function"]


def compiled(f, **kwargs):
    catch = Catch()
    return torch.compile(f, backend=catch, fullgraph=True, **kwargs), catch


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x):
        p = F.softmax(F.linear(x, self.weight), -1, dtype=torch.float)
        v, i = torch.topk(p, 2, -1)
        v /= v.sum(-1, keepdim=True)
        return v.to(x.dtype), i


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_values_and_gradients(dynamic, grad):
    model = Router()
    run, catch = compiled(model, dynamic=dynamic)
    x = torch.randn(6, 16)
    with torch.set_grad_enabled(grad):
        (v, i), (w, j) = run(x), model(x)
    assert torch.equal(v, w) and torch.equal(i, j)
    assert {"aten.softmax", "aten.topk", "aten.linear"} <= set(catch.names())
    assert not any(
        t._schema.is_mutable for g in catch.graphs for n in g.graph.nodes if hasattr(t := n.target, "_schema")
    )
    if grad:
        c = torch.randn_like(v)
        (g,) = torch.autograd.grad((v * c).sum(), model.weight)
        (h,) = torch.autograd.grad((w * c).sum(), model.weight)
        assert torch.allclose(g, h, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mutated_input_is_written_in_place(dynamic):
    def step(cache, pos, k, q):
        cache.index_copy_(0, pos, k)
        return F.softmax(q @ cache.t(), -1) @ cache

    cache, k, q = torch.randn(32, 16), torch.randn(2, 16), torch.randn(2, 16)
    pos = torch.tensor([3, 7])
    mine, theirs = cache.clone(), cache.clone()
    run, catch = compiled(step, dynamic=dynamic)
    with torch.no_grad():
        assert torch.allclose(run(mine, pos, k, q), step(theirs, pos, k, q), atol=1e-6)
    assert torch.equal(mine, theirs) and not torch.equal(mine, cache)
    assert catch.names()[-1] == "aten.copy_"


def test_a_buffer_that_the_module_updates():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.randn(3))

        def forward(self, x):
            self.seen.add_(x.sum(0))
            return x * self.seen

    a, b = Counter(), Counter()
    b.load_state_dict(a.state_dict())
    run, catch = compiled(a)
    for _ in range(3):
        x = torch.randn(5, 3)
        assert torch.allclose(run(x), b(x))
    assert torch.allclose(a.seen, b.seen) and catch.graphs


def test_outputs_that_alias_inputs_and_copy_to_itself():
    run, catch = compiled(lambda x: (x.view(-1), x.t()))
    x = torch.randn(3, 4)
    flat, turned = run(x)
    assert flat.data_ptr() == x.data_ptr() and torch.equal(turned, x.t()) and catch.graphs

    def self_copy(x):
        x.copy_(x)
        return x

    run, _ = compiled(self_copy)
    y = run(x.clone())
    assert torch.equal(y, x)


def test_an_in_place_update_between_two_uses_keeps_its_place():
    def f(x, w):
        h = x @ w
        x.add_(1.5)
        return torch.relu(h) + x.sum()

    w, x = torch.randn(4, 4), torch.randn(4, 4)
    mine, theirs = x.clone(), x.clone()
    run, _ = compiled(f)
    with torch.no_grad():
        assert torch.allclose(run(mine, w), f(theirs, w), atol=1e-5)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("constant", [-1e30, [0.5, -2.0, 3.25, 7.0]])
def test_literal_tensors_become_calls(constant):
    def f(x):
        return torch.where(x > 0, x, torch.tensor(constant, dtype=x.dtype))

    run, catch = compiled(f)
    x = torch.randn(3, 4)
    assert torch.equal(run(x), f(x))
    assert not [n for g in catch.graphs for n in g.graph.nodes if n.op == "get_attr"]


def test_grad_mode_fences_stay():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            with torch.no_grad():
                m = (x @ self.w).relu()
            return x * m + x @ self.w

    model, x = Half(), torch.randn(3, 4)
    run, catch = compiled(model)
    (g,) = torch.autograd.grad(run(x).square().sum(), model.w)
    (h,) = torch.autograd.grad(model(x).square().sum(), model.w)
    assert torch.allclose(g, h, rtol=1e-5)
    view = GraphView(catch.graphs[0].graph)
    first, second = (n for n in catch.graphs[0].graph.nodes if op_name(n) == "aten.matmul")
    assert view.modes[first] != view.modes[second]


def test_autocast_inside():
    def f(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ w).float() * 1.5

    run, catch = compiled(f)
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    with torch.no_grad():
        assert torch.equal(run(x, w), f(x, w))
    assert catch.graphs, [str(e) for e in catch.errors]


def test_checkpoint_is_not_captured_and_says_so():
    w = torch.randn(4, 4, requires_grad=True)

    def f(x):
        return torch.utils.checkpoint.checkpoint(lambda y: torch.sin(y @ w), x, use_reentrant=False)

    run, catch = compiled(f)
    x = torch.randn(3, 4)
    (g,) = torch.autograd.grad(run(x).sum(), w)
    (h,) = torch.autograd.grad(f(x).sum(), w)
    assert torch.allclose(g, h)
    assert catch.errors and "capture before autograd failed" in str(catch.errors[0])


def test_no_tensor_inputs():
    gm = fx.symbolic_trace(lambda: torch.arange(3))
    with pytest.raises(NotCaptured, match="no tensor inputs"):
        capture(gm)


def test_origin_of_nodes():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Router(), Router()])

        def forward(self, x):
            return self.layers[0](x)[0], self.layers[1](x)[0]

    run, catch = compiled(Outer())
    run(torch.randn(2, 16))
    nodes = [n for n in catch.graphs[0].graph.nodes if op_name(n) == "aten.topk"]
    assert [GraphView.module(n) for n in nodes] == ["layers.0", "layers.1"]
    assert all(GraphView.source(n).startswith("test_capture.py:") for n in nodes)


class Mixed(nn.Module):
    """Casts that only mean something under autocast, as routers write them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8)
        self.out = nn.Linear(16, 16)
        self.w = nn.Parameter(torch.randn(8, 16, 16))

    def forward(self, x):
        logits = self.gate(x)
        p = torch.softmax(logits.float() * 1.3, -1)
        h = torch.einsum("te,eio->tio", p.to(logits.dtype), self.w)
        y = torch.bmm(h, x.unsqueeze(-1).to(h.dtype)).squeeze(-1)
        return self.out(y) + p.sum(-1, keepdim=True), logits


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_autocast_is_made_explicit(grad, where, dynamic):
    model = Mixed()
    x = torch.randn(6, 16)

    def inside(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    run, catch = compiled(inside if where == "inside" else model, dynamic=dynamic)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "outside"):
        (got, logits), (want, expected) = run(x), (inside if where == "inside" else model)(x)
    assert catch.graphs, [str(e) for e in catch.errors]
    assert logits.dtype == torch.bfloat16 and torch.equal(logits, expected)
    assert got.dtype == want.dtype and torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    vals = {
        op_name(n): n.meta["val"].dtype for n in catch.graphs[0].graph.nodes if op_name(n).startswith("aten.softmax")
    }
    assert set(vals.values()) == {torch.float32}
    if grad:
        c = torch.randn_like(got)
        gs = torch.autograd.grad((got * c).sum(), list(model.parameters()))
        hs = torch.autograd.grad((want * c).sum(), list(model.parameters()))
        for g, h in zip(gs, hs, strict=True):
            assert g.dtype == h.dtype and torch.allclose(g, h, rtol=2e-2, atol=2e-2)


def test_explicit_casts_leave_graphs_without_autocast_alone():
    from ascend_deep.passes.autocast import make_explicit

    gm = fx.symbolic_trace(Router())
    assert make_explicit(gm) is gm


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_writing_into_a_slice_keeps_gradients(broadcast, dynamic):
    """Functionalised ``copy_`` is ``aten.copy``, which has no derivative."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 12))

        def forward(self, x, k):
            y = x @ self.w
            states = y.new_empty(y.shape[0], 16)
            states[..., :12] = y
            states[..., 12:].copy_(k[:1] if broadcast else k)
            return states * 1.5

    model = Rotary()
    run, catch = compiled(model, dynamic=dynamic)
    x, k = torch.randn(5, 8), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    got, want = run(x, k), model(x, k)
    assert torch.equal(got, want) and catch.graphs
    c = torch.randn_like(got)
    for g, h in zip(
        torch.autograd.grad((got * c).sum(), [model.w, k]),
        torch.autograd.grad((want * c).sum(), [model.w, k]),
        strict=True,
    ):
        assert g.dtype == h.dtype and torch.allclose(g, h)


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_in_training(inplace):
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return F.dropout(x @ self.w, 0.4, training=True, inplace=inplace)

    model = Drop()
    run, catch = compiled(model)
    x = torch.randn(50, 8)
    y = run(x)
    y.sum().backward()
    kept = (y != 0).float()
    assert catch.graphs and 0.4 < float(kept.mean()) < 0.8
    assert torch.allclose(y, (x @ model.w) * kept / 0.6, atol=1e-5)
    assert torch.allclose(model.w.grad, x.t() @ (kept / 0.6), atol=1e-4)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_functional_transforms_are_handed_over(transform: str) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 8))
    x = torch.randn(3, 8)
    function = {
        "grad": torch.func.grad(lambda t: layer(t).square().sum()),
        "vmap": torch.func.vmap(layer),
        "jvp": lambda t: torch.func.jvp(layer, (t,), (2 * t,)),
    }[transform]
    got = torch.compile(function, backend="ascend_deep", options={"downstream": "aot_eager"})(x)
    torch.testing.assert_close(got, function(x))
    assert torch._C._functorch.peek_interpreter_stack() is None


def test_where_with_a_condition_only_is_read() -> None:
    """It gives indices, and has one argument; a rule that looked for three raised."""

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, ids = x.softmax(-1).topk(2)
        return weights, *torch.where(ids == 1)

    x = torch.randn(5, 8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(model, backend="ascend_deep", options={"downstream": "eager"}, fullgraph=True)(x)
    torch.testing.assert_close(got, model(x))
    assert ascend_deep.last_report().counts() == {"moe_route": 1}
