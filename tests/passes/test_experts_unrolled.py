"""Loops over all experts that Dynamo unrolls: one op where the weights are stacked, a reason where they are not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from experts_blocks import EXPERTS, Run, assert_near, compiled
from torch import nn

H, I, E = 20, 12, 5
ALL = (*EXPERTS, "experts_unrolled", "router")


class Loop(nn.Module):
    """``for e in range(E)`` over stacked weights; steps are methods so that a test can change one."""

    def __init__(self, bias=False, experts=E):
        super().__init__()
        self.experts = experts
        self.gate = nn.Parameter(torch.randn(experts, H))
        self.w1 = nn.Parameter(torch.randn(experts, I, H) * 0.3)
        self.w3 = nn.Parameter(torch.randn(experts, I, H) * 0.3)
        self.w2 = nn.Parameter(torch.randn(experts, H, I) * 0.3)
        for name, n in (("b1", I), ("b3", I), ("b2", H)):
            setattr(self, name, nn.Parameter(torch.randn(experts, n)) if bias else None)

    def one(self, x, e):
        b1, b3, b2 = (None if b is None else b[e] for b in (self.b1, self.b3, self.b2))
        return F.linear(F.silu(F.linear(x, self.w1[e], b1)) * F.linear(x, self.w3[e], b3), self.w2[e], b2)

    def route(self, x):
        weights, ids = F.linear(x, self.gate).softmax(-1).topk(2)
        return weights * 2.5, ids

    def share(self, weights, ids, e):
        return (weights * (ids == e)).sum(-1, keepdim=True)

    def forward(self, x):
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(self.experts):
            out = out + self.one(x, e) * self.share(weights, ids, e)
        return out


class Scores(Loop):
    """A column of scores for each expert, and results stacked before they are summed."""

    def forward(self, x):
        weights, ids = self.route(x)
        scores = torch.zeros(x.shape[0], self.experts).scatter(1, ids, weights)
        return torch.stack([scores[:, e : e + 1] * self.one(x, e) for e in range(self.experts)]).sum(0)


class Masked(Loop):
    """Scores that no pair of ids and weights alone decides."""

    def forward(self, x):
        probs = F.linear(x, self.gate).softmax(-1)
        mask = F.one_hot(probs.topk(2).indices, self.experts).sum(1)
        scores = probs * mask / (probs * mask).sum(-1, keepdim=True)
        out = 0
        for e, share in enumerate(scores.unbind(-1)):
            out = out + share.unsqueeze(-1) * self.one(x, e)
        return out


class Fused(Loop):
    """Gate and up in one tensor, weights by unbind, no biases, activated by gelu."""

    def __init__(self):
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(E, H, 2 * I) * 0.3)
        self.down = nn.Parameter(torch.randn(E, I, H) * 0.3)

    def forward(self, x):
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, (first, second) in enumerate(zip(self.w13.unbind(), self.down.unbind(), strict=True)):
            gate, up = (x @ first).chunk(2, -1)
            out += (F.gelu(gate) * up) @ second * torch.where(ids == e, weights, 0.0).sum(-1, keepdim=True)
        return out


class Input(Loop):
    """Routing weights on the input."""

    def forward(self, x):
        weights, ids = self.route(x)
        return sum(self.one(x * self.share(weights, ids, e), e) for e in range(self.experts))


@pytest.mark.parametrize(
    ("block", "dynamic"),
    [(Loop(), True), (Loop(bias=True), False), (Scores(), False), (Masked(), False), (Fused(), True), (Input(), False)],
    ids=["loop", "biases", "scores", "masked", "fused", "input"],
)
def test_loops_are_one_op(block, dynamic):
    x = torch.randn(7, H)
    with torch.no_grad():
        got, run = compiled(block, x, dynamic=dynamic, recognisers=ALL)
        assert_near(got, block(x), torch.float32)
    ops = sorted(m.op for m in run.outcome.matches)
    assert "moe_experts" in ops, run.reasons
    assert {m.recogniser for m in run.outcome.matches if m.op == "moe_experts"} == {"experts_unrolled"}
    products = [n for n in run.graphs[-1].graph.nodes if "linear" in str(n.target) or "matmul" in str(n.target)]
    assert len(products) == 1, "only the router's is left"


def test_gradients():
    block, x = Loop(bias=True).double(), torch.randn(7, H, dtype=torch.float64, requires_grad=True)
    leaves = [x, *block.parameters()]
    wanted = torch.autograd.grad(block(x).square().sum(), leaves)
    run = Run(recognisers=ALL)
    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(block, backend=run, fullgraph=True)(x).square().sum(), leaves)
    assert [m.op for m in run.outcome.matches] == ["moe_experts"], run.reasons
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_the_graph_does_not_grow_with_the_experts():
    """Budget: as many nodes after with any number of experts, and a second of capture and passes per expert."""
    sizes = {}
    for experts in (5, 12):
        block, x = Loop(experts=experts), torch.randn(3, H)
        with torch.no_grad():
            got, run = compiled(block, x, recognisers=ALL)
            assert_near(got, block(x), torch.float32)
        assert sorted(m.op for m in run.outcome.matches) == ["moe_experts", "moe_route"], run.reasons
        sizes[experts] = len(run.graphs[-1].graph.nodes)
        spent = sum(run.outcome.timings.values())
    assert sizes[5] == sizes[12] < 20 and spent < 16, (sizes, spent)


# -- left -----------------------------------------------------------------------------------------------------------
class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(H, I), nn.Linear(H, I), nn.Linear(I, H)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Modules(nn.Module):
    """Each expert has parameters of its own."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(H, E)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + self.experts[e](x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


def left(block, *words):
    x = torch.randn(7, H)
    with torch.no_grad():
        got, run = compiled(block, x, recognisers=ALL)
        assert_near(got, block(x), torch.float32)
    assert [m.op for m in run.outcome.matches if m.op == "moe_experts"] == []
    assert run.reasons and all(any(w in r for r in run.reasons) for w in words), run.reasons
    return run


def test_experts_with_parameters_of_their_own_are_left_with_the_hint_and_prepare_takes_them():
    import ascend_deep

    block = Modules()
    run = left(block, f"the graph holds {E} copies of an expert", "one tensor")
    assert any("prepare(model)" in m.hint for m in run.outcome.misses)
    x = torch.randn(7, H)
    with torch.no_grad():
        want = block(x)
        prepared = ascend_deep.prepare(block)
        assert len(prepared.swapped) == 1, str(prepared)
        got, run = compiled(block, x, recognisers=ALL)
    assert_near(got, want, torch.float32)
    assert run.reasons == []


class WrongBias(Loop):
    def one(self, x, e):
        e2 = (e + 1) % E
        return super().one(x, e) if e < 3 else super().one(x, e) - self.b2[e] + self.b2[e2]


class OtherExpert(Loop):
    """Two experts have changed places in one of three tensors."""

    def one(self, x, e):
        down = self.w2[{1: 2, 2: 1}.get(e, e)]
        return F.linear(F.silu(F.linear(x, self.w1[e])) * F.linear(x, self.w3[e]), down)


class LeavesOut(Loop):
    def forward(self, x):
        weights, ids = self.route(x)
        return sum(self.one(x, e) * self.share(weights, ids, e) for e in range(self.experts - 1))


class OneDiffers(Loop):
    """The last expert has another activation."""

    def one(self, x, e):
        if e < E - 1:
            return super().one(x, e)
        return F.linear(F.gelu(F.linear(x, self.w1[e])) * F.linear(x, self.w3[e]), self.w2[e])


class Squared(Loop):
    def share(self, weights, ids, e):
        return super().share(weights, ids, e) * (1.0 if e else 2.0)


class Soft(Loop):
    """Every expert has a say."""

    def forward(self, x):
        probs = F.linear(x, self.gate).softmax(-1)
        return sum(self.one(x, e) * probs[:, e, None] for e in range(self.experts))


class Threshold(Loop):
    def forward(self, x):
        probs = F.linear(x, self.gate).softmax(-1)
        scores = probs * (probs >= probs.topk(2).values[:, -1:])
        return sum(self.one(x, e) * scores[:, e, None] for e in range(self.experts))


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (WrongBias(bias=True), ["are not those of their expert"]),
        (OtherExpert(), ["leaves out"]),
        (LeavesOut(), ["leaves out 1 of 5 experts, number 4 first"]),
        (OneDiffers(), ["no member of moe_experts"]),
        (Squared(), ["no member of moe_experts"]),
        (Soft(), ["none is left out"]),
        (Threshold(), ["comparing with a threshold"]),
        (Input(bias=True), ["biases are added"]),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_near_misses_are_left(block, words):
    left(block, *words)


def test_certificates_run_again(monkeypatch, tmp_path):
    from ascend_deep.passes import certificates
    from ascend_deep.passes.replay import replay

    monkeypatch.setattr(certificates, "store", lambda: tmp_path)
    with torch.no_grad():
        _, run = compiled(Scores(), torch.randn(7, H), recognisers=ALL)
    again = replay(next(m.certificate for m in run.outcome.matches if m.op == "moe_experts"))
    assert again.ok, again.text


def test_several_mlps_side_by_side_are_not_mentioned():
    """Three heads on the same input, none of them weighed: nobody asked about experts."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.list = nn.ModuleList(Expert() for _ in range(3))

        def forward(self, x):
            return sum(head(x) for head in self.list)

    _, run = compiled(Heads(), torch.randn(7, H), recognisers=ALL)
    assert run.outcome.matches == () and run.reasons == []
