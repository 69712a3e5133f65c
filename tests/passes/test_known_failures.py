"""Failures of comparable systems that no other test has: one MoE block, spelled in the ways that broke them.

docs/known_failures.md says which test stands for which failure.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from experts_blocks import EXPERTS, assert_near, compiled
from torch import nn

H, I, E, K = 20, 12, 8, 2
ALL = (*EXPERTS, "router", "swiglu")


class Block(nn.Module):
    """Softmax router with a correction bias, batched experts, a shared expert; steps are methods."""

    def __init__(self, **switches):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(E, H))
        self.register_buffer("correction", torch.randn(E) * 0.3)
        self.w13 = nn.Parameter(torch.randn(E, 2 * I, H) * 0.3)
        self.w2 = nn.Parameter(torch.randn(E, H, I) * 0.3)
        self.shared = nn.Linear(H, H)
        self.switches = switches

    def logits(self, x):
        return F.linear(x, self.gate)

    def route(self, x):
        scores = self.logits(x).sigmoid()
        ids = (scores + self.correction).topk(K, dim=-1).indices
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-2)

    def product(self, rows, weight):
        return torch.bmm(rows.unsqueeze(1), weight.transpose(1, 2)).squeeze(1)

    def experts(self, x, ids, weights):
        flat = ids.reshape(-1)
        gate, up = self.product(x.repeat_interleave(K, 0), self.w13[flat]).chunk(2, -1)
        y = self.product(F.silu(gate) * up, self.w2[flat]) * weights.reshape(-1, 1)
        return y.view(-1, K, H).sum(1)

    def forward(self, x):
        ids, weights = self.route(x)
        return self.experts(x, ids, weights)


def run(block, x=None, ops=("moe_experts", "moe_route"), **options):
    """Compiled equals eager; ``ops`` are what must have been fused."""
    x = torch.randn(7, H) if x is None else x
    with torch.no_grad():
        want = block(x)
        got, found = compiled(block, x, recognisers=ALL, **options)
    assert_near(got, want, want.dtype)
    counted = sorted(m.op for m in found.outcome.matches)
    if ops is not None:
        assert counted == sorted(ops), (counted, found.reasons)
    for graph in found.graphs:
        graph.graph.lint()
    return found


# -- the scale ------------------------------------------------------------------------------------------------------
class Scaled(Block):
    """The same factor, written at another place."""

    def forward(self, x):
        where, scale = self.switches["where"], self.switches["scale"]
        ids, weights = self.route(x)
        if where == "weights":
            return self.experts(x, ids, weights * scale) + self.shared(x)
        if where == "division":
            return self.experts(x, ids, weights / (1 / scale)) + self.shared(x)
        if where == "output":
            return self.experts(x, ids, weights) * scale + self.shared(x)
        if where == "alpha of add":
            return torch.add(self.shared(x), self.experts(x, ids, weights), alpha=scale)
        return scale * (self.experts(x, ids, weights) + self.shared(x) / scale)


@pytest.mark.parametrize(
    ("where", "scale"),
    [
        ("weights", 1.0),
        ("weights", 2.5),
        ("division", 7.3),
        ("output", 2.5),
        ("alpha of add", 7.3),
        ("both inputs of the add", 2.5),
    ],
)
def test_a_scale_is_applied_once_wherever_it_is_written(where, scale):
    block = Scaled(where=where, scale=scale)
    found = run(block)
    routed = found.op("moe_route").kwargs["scale"]
    assert routed == pytest.approx(scale if where in ("weights", "division") else 1.0)


def test_a_scale_that_is_a_tensor_is_not_folded_away():
    class Buffer(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.5))

        def forward(self, x):
            ids, weights = self.route(x)
            return self.experts(x, ids, weights * self.scale)

    block = Buffer()
    run(block)
    x = torch.randn(5, H)
    torch._dynamo.reset()
    compiled_block = torch.compile(block, backend="ascend_deep", options={"downstream": "aot_eager"})
    with torch.no_grad():
        before = compiled_block(x)
        block.scale.fill_(0.5)
        torch.testing.assert_close(compiled_block(x), before / 5, rtol=1e-4, atol=1e-5)


# -- precision of the router ------------------------------------------------------------------------------------------
class Upcast(Block):
    """Tokens and gate in float32 for a bfloat16 model."""

    def logits(self, x):
        return F.linear(x.float(), self.gate.float())

    def route(self, x):
        weights, ids = self.logits(x).softmax(-1).topk(K)
        return ids, weights.to(x.dtype)


def test_the_router_keeps_its_precision_and_its_experts():
    block, x = Upcast().bfloat16(), torch.randn(4096, H).bfloat16()
    found = run(block, x)
    (matmul,) = [n for n in found.graphs[-1].graph.nodes if "linear" in str(n.target)]
    assert matmul.meta["val"].dtype == torch.float32
    with torch.no_grad():
        ids, _ = compiled(block.route, x, recognisers=("router",))[0]
        assert torch.equal(ids.sort(-1).values, block.route(x)[0].sort(-1).values)


class CastBefore(Upcast):
    """Probabilities are rounded before the choice: ties, and other experts."""

    def route(self, x):
        weights, ids = self.logits(x).softmax(-1).to(x.dtype).topk(K)
        return ids, weights


def test_a_cast_before_the_choice_is_not_one_behind_it():
    model = Upcast().bfloat16()
    other = CastBefore().bfloat16()
    other.load_state_dict(model.state_dict())
    x = torch.randn(512, H).bfloat16()
    for block in (model, other):
        with torch.no_grad():
            _, weights = block.route(x)
            (_, got), _ = compiled(block.route, x, recognisers=("router",))
            torch.testing.assert_close(got.sort().values, weights.sort().values, rtol=0, atol=0)


# -- products ---------------------------------------------------------------------------------------------------------
class Added(Block):
    """baddbmm with coefficients. A factor on the second product is the experts' result scaled."""

    def product(self, rows, weight):
        bias = torch.linspace(-1, 1, weight.shape[1]).to(rows.dtype).expand(rows.shape[0], 1, -1)
        beta, alpha = self.switches["beta"], self.switches["alpha"]
        return torch.baddbmm(bias, rows.unsqueeze(1), weight.transpose(1, 2), beta=beta, alpha=alpha).squeeze(1)


@pytest.mark.parametrize(("beta", "alpha"), [(0.5, 1.0), (0.0, 2.0)])
def test_coefficients_of_products_are_never_ignored(beta, alpha):
    run(Added(beta=beta, alpha=alpha), ops=None)


def test_a_gate_by_addmm_with_coefficients():
    class Gate(Block):
        def logits(self, x):
            return torch.addmm(self.correction.expand(x.shape[0], -1), x, self.gate.t(), beta=2.0, alpha=0.5)

    run(Gate())


def test_a_bias_that_does_not_fit_is_an_error_as_in_eager():
    class Wrong(Block):
        def logits(self, x):
            return torch.addmm(torch.ones(3, 5), x, self.gate.t(), beta=0)

    block, x = Wrong(), torch.randn(7, H)
    with pytest.raises(RuntimeError):
        block(x)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"expand|size|shape|broadcast"):
        torch.compile(block, backend="ascend_deep", options={"downstream": "aot_eager"})(x)


def test_sums_of_two_dtypes_and_rounding_steps_stay():
    """bfloat16 experts, a rounding to bfloat16, a float32 residual: the rounding is no cast to be dropped."""

    class Mixed(Upcast):
        def forward(self, x):
            return (super().forward(x) * 1.7).to(torch.bfloat16).float() + x.float().round()

    block, x = Mixed().bfloat16(), torch.randn(9, H).bfloat16()
    with torch.no_grad():
        got, found = compiled(block, x, recognisers=ALL)
        want = block(x)
    assert sorted(m.op for m in found.outcome.matches) == ["moe_experts", "moe_route"], found.reasons
    rounded = got - x.float().round()
    assert torch.equal(rounded, rounded.bfloat16().float()) and got.dtype == torch.float32
    assert_near(rounded.bfloat16(), (want - x.float().round()).bfloat16(), torch.bfloat16)


# -- spellings that hid a block ---------------------------------------------------------------------------------------
class Views(Block):
    """No-op views, copies and casts between all steps."""

    def noop(self, t):
        shape = t.shape
        return t.contiguous().reshape(-1).view(shape).expand(shape).to(t.dtype).unsqueeze(0).squeeze(0)

    def logits(self, x):
        return self.noop(super().logits(self.noop(x)))

    def route(self, x):
        ids, weights = super().route(self.noop(x))
        return self.noop(ids), self.noop(weights)

    def product(self, rows, weight):
        return self.noop(super().product(self.noop(rows), weight))


class Explicit(Block):
    """Every default argument is passed."""

    def route(self, x):
        scores = F.linear(x, self.gate, None).sigmoid()
        ids = torch.topk(torch.add(scores, self.correction, alpha=1), K, -1, True, True)[1]
        weights = torch.gather(scores, 1, ids, sparse_grad=False)
        return ids, weights / (torch.sum(weights, dim=-1, keepdim=True, dtype=None) + 1e-2)


class Casts(Block):
    """float64 and back, in four spellings, where it changes nothing that float32 shows."""

    def route(self, x):
        logits = self.logits(x)
        scores = logits.to(torch.float32).type(torch.float32).type_as(x).float().sigmoid()
        ids = (scores + self.correction).topk(K, dim=-1).indices.to(torch.int32).long().type(torch.int64)
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-2)


class Out(Block):
    """A sum into a given tensor, one of several overloads."""

    def experts(self, x, ids, weights):
        flat = ids.reshape(-1)
        gate, up = self.product(x.repeat_interleave(K, 0), self.w13[flat]).chunk(2, -1)
        y = self.product(F.silu(gate) * up, self.w2[flat]) * weights.reshape(-1, 1)
        result = torch.empty_like(x)
        torch.sum(y.view(-1, K, H), dim=1, out=result)
        return result


class Batch(Block):
    """Tokens [B, S, H]."""

    def forward(self, x):
        return super().forward(x.view(-1, H)).view(x.shape)


@pytest.mark.parametrize("kind", [Views, Explicit, Casts, Out, Batch])
def test_spellings_that_hide_nothing(kind):
    run(kind(), torch.randn(2, 5, H) if kind is Batch else None, dynamic=kind is Batch or None)


@pytest.mark.parametrize("tokens", [2047, 2049])
def test_sizes_at_which_buffers_overflowed(tokens):
    run(Block(), torch.randn(tokens, H))


@pytest.mark.parametrize("hidden", [(1025, 5)], ids=str)
def test_odd_sizes_offsets_and_strides_of_expert_weights(hidden):
    """Weights that are slices of a larger tensor, one element behind its beginning, transposed."""
    h, i = hidden
    store = torch.randn(1 + E * 2 * i * h + E * h * i) * 0.1
    first = store[1 : 1 + E * 2 * i * h].view(E, h, 2 * i).transpose(1, 2)
    second = store[1 + E * 2 * i * h :].view(E, i, h).transpose(1, 2)

    def block(x, ids, weights):
        flat = ids.reshape(-1)
        rows = x.repeat_interleave(K, 0).unsqueeze(-1)
        gate, up = torch.bmm(first[flat], rows).squeeze(-1).chunk(2, -1)
        y = torch.bmm(second[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (y * weights.reshape(-1, 1)).view(-1, K, h).sum(1)

    args = (torch.randn(7, h), torch.rand(7, E).argsort(1)[:, :K], torch.randn(7, K))
    got, found = compiled(block, *args)
    assert len(found.outcome.matches) == 1, found.reasons
    assert_near(got, block(*args), torch.float32)
