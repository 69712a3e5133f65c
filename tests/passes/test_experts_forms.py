"""Hand-written experts: spellings that must be fused, near misses that must be refused with the right sentence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from experts_blocks import Batched, Grouped, assert_near, compiled, routing
from torch import nn

pytest.importorskip("transformers.integrations.moe")

H, E = 24, 6


def data(tokens=5, slots=2):
    return torch.randn(tokens, H), *routing(tokens, slots, experts=E)


def fused(block, **expected):
    args = data()
    got, run = compiled(block, *args)
    assert len(run.outcome.matches) == 1 and run.reasons == [], run.reasons
    attrs = run.op().kwargs
    assert {k: attrs[k] for k in expected} == expected
    assert_near(got, block(*args), torch.float32)
    return run


def refused(block, *words):
    args = data()
    got, run = compiled(block, *args)
    assert run.outcome.matches == ()
    assert run.reasons and all(w in run.reasons[0] for w in words), run.reasons
    torch.testing.assert_close(got, block(*args), equal_nan=True)


# -- spellings that are fused ---------------------------------------------------------------------------------------
class Added(Grouped):
    def combine(self, y, order, x, slots):
        return torch.zeros_like(x).index_add(0, order // slots, y)


class Scattered(Grouped):
    def combine(self, y, order, x, slots):
        return torch.zeros_like(x).scatter_add(0, (order // slots)[:, None].expand(-1, x.shape[1]), y)


class SortedTwice(Grouped):
    def back(self, y, order):
        return y[order.argsort()]


class Bincount(Grouped):
    def offsets(self, ids):
        return F.one_hot(ids, E).sum(0).cumsum(0).int()


class WeightOnHidden(Grouped):
    def forward(self, x, idx, weights):
        slots = idx.shape[1]
        ids, order = idx.reshape(-1).sort()
        offs = self.offsets(ids)
        h = self.activation(self.product(x[order // slots], self.up(), offs)) * weights.reshape(-1)[order][:, None]
        return self.combine(self.product(h, self.down(), offs), order, x, slots)


class WeightOnInput(Grouped):
    def forward(self, x, idx, weights):
        slots = idx.shape[1]
        ids, order = idx.reshape(-1).sort()
        offs = self.offsets(ids)
        rows = x[order // slots] * weights.reshape(-1)[order][:, None]
        return self.combine(self.product(self.activation(self.product(rows, self.up(), offs)), self.down(), offs),
                            order, x, slots)  # fmt: skip


class Stored(Grouped):
    """Weights stored [E, H, N] and [E, I, H]."""

    def __init__(self):
        super().__init__()
        self.w13 = nn.Parameter(self.w13.detach().transpose(1, 2).contiguous())
        self.w2 = nn.Parameter(self.w2.detach().transpose(1, 2).contiguous())

    def up(self):
        return self.w13

    def down(self):
        return self.w2


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (Grouped, {"weight_layout": "enk"}),
        (Added, {}),
        (Scattered, {}),
        (SortedTwice, {}),
        (Bincount, {}),
        (WeightOnHidden, {"weight_on_input": False}),
        (WeightOnInput, {"weight_on_input": True}),
        (Stored, {"weight_layout": "ekn"}),
    ],
)
def test_grouped_spellings(block, expected):
    fused(block(), **expected)


@pytest.mark.parametrize("form", ["bmm", "matmul", "einsum", "index_select"])
@pytest.mark.parametrize("bias", [False, True])
def test_batched_spellings(form, bias):
    run = fused(Batched(form, bias=bias))
    assert (run.op().args[4] is not None) == bias


def test_baddbmm():
    fused(Batched("baddbmm", bias=True))


def act(f):
    def activation(self, h):
        gate, up = h.chunk(2, -1)
        return f(gate, up)

    return type("Act", (Grouped,), {"activation": activation})


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda g, u: F.gelu(g) * u, {"act": "gelu"}),
        (lambda g, u: F.gelu(g, approximate="tanh") * u, {"act": "gelu_tanh"}),
        (lambda g, u: u * (g * torch.sigmoid(g)), {"act": "silu"}),
        (lambda g, u: F.relu(g) * u, {"act": "relu"}),
        (lambda g, u: F.silu(g).clamp(max=2.5) * u.clamp(-2.5, 2.5), {"act": "silu_clamp", "limit": 2.5}),
        (lambda g, u: F.silu(g.clamp(max=2.5)) * u.clamp(-2.5, 2.5), {"act": "silu", "limit": 2.5}),
    ],
)
def test_activations(f, expected):
    fused(act(f)(), **expected)


def test_interleaved():
    class Interleaved(Grouped):
        def activation(self, h):
            return F.silu(h[..., ::2]) * h[..., 1::2]

    fused(Interleaved(), interleaved=True)


def test_square_weights_are_told_apart_by_running():
    """H = N: the shapes allow both layouts."""
    run = fused(Grouped(inner=12), weight_layout="enk")
    assert run.op().args[3].meta["val"].shape == (E, 24, 24)


def test_interior_results_may_be_used_outside():
    class Both(Grouped):
        def forward(self, x, idx, weights):
            ids, _ = idx.reshape(-1).sort()
            return super().forward(x, idx, weights), self.offsets(ids)

    block, args = Both(), data()
    (got, offs), run = compiled(block, *args)
    want, expected = block(*args)
    assert len(run.outcome.matches) == 1
    assert torch.equal(offs, expected)
    assert_near(got, want, torch.float32)


# -- near misses ----------------------------------------------------------------------------------------------------
class WeightSquared(Grouped):
    def weigh(self, y, weights):
        return super().weigh(super().weigh(y, weights), weights)


class NotPutBack(Grouped):
    def back(self, y, order):
        return y


class Mean(Grouped):
    def combine(self, y, order, x, slots):
        return self.back(y, order).view(x.shape[0], slots, -1).mean(1)


class Largest(Grouped):
    def combine(self, y, order, x, slots):
        return self.back(y, order).view(x.shape[0], slots, -1).amax(1)


class CountsForOffsets(Grouped):
    def offsets(self, ids):
        return torch.histc(ids.float(), bins=E, min=0, max=E - 1).int()


class WrongBias(Grouped):
    def __init__(self):
        super().__init__(bias=True)

    def first_bias(self, ids, order):
        return self.b13[ids.flip(0)]


class PerExpertScale(Grouped):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(E))

    def after(self, y, ids):
        return y * self.scale[ids][:, None]


class PostNorm(Grouped):
    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.randn(H))

    def after(self, y, ids):
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * self.norm


class PlainNorm(Grouped):
    def after(self, y, ids):
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)


class Scaled(Grouped):
    def after(self, y, ids):
        return y * 2.5


class Permuted(Grouped):
    """E = N = H: a permutation of other dims than the last two fits by its sizes alone."""

    def __init__(self):
        super().__init__(hidden=H, inner=12, experts=24)

    def up(self):
        return self.w13.permute(1, 2, 0)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (act(lambda g, u: F.mish(g) * u), ["no activation of the table", "mish"]),
        (act(lambda g, u: F.softplus(g) * u), ["no activation of the table", "softplus"]),
        (act(lambda g, u: g * F.silu(u)), ["second half"]),
        (act(lambda g, u: F.silu(g) + u), ["no activation of the table"]),
        (act(lambda g, u: F.silu(1.1 * g) * u), ["no activation of the table"]),
        (WeightSquared, ["applied twice"]),
        (NotPutBack, ["not put back"]),
        (Mean, ["mean"]),
        (Largest, ["amax"]),
        (CountsForOffsets, ["no member of moe_experts"]),
        (WrongBias, ["bias"]),
        (PerExpertScale, ["also reads", "scale"]),
        (PostNorm, ["also reads", "norm"]),
        (PlainNorm, ["no member of moe_experts", "rsqrt"]),
        (Scaled, ["scales", "2.5"]),
    ],
)
def test_near_misses_are_refused(block, words):
    refused(block(), *words)


def test_a_permutation_that_is_not_a_transpose_is_refused():
    block = Permuted()
    args = (torch.randn(5, H), *routing(5, 2, experts=24))
    got, run = compiled(block, *args)
    assert run.outcome.matches == () and "not a transpose" in run.reasons[0]
    torch.testing.assert_close(got, block(*args))


# -- mutations ------------------------------------------------------------------------------------------------------
def _set(target, index, value):
    def change(node):
        args = list(node.args)
        args[index] = value
        node.args = tuple(args)

    return target, change


@pytest.mark.parametrize(
    ("target", "change"),
    [
        _set("histc", 3, E - 2),
        _set("floor_divide", 1, 3),
        _set("cumsum", 1, 0),
        _set("split", 1, H),
    ],
    ids=["bins", "token of a row", "same", "halves"],
)
def test_one_changed_attribute_is_seen(target, change, monkeypatch):
    """The graph is changed after capture: the block is refused, or what replaces it computes the changed graph."""
    from ascend_deep.passes import pipeline

    genuine, changed = pipeline.capture, []

    def capture(gm):
        graph = genuine(gm)
        for node in graph.graph.nodes:
            if target in str(node.target) and len(node.args) > 1:
                before = node.args
                change(node)
                changed.append(before != node.args)
        graph.recompile()
        return graph

    monkeypatch.setattr(pipeline, "capture", capture)
    args = data()
    _, run = compiled(Grouped(), *args)
    assert changed
    assert bool(run.outcome.matches) == (not any(changed))
