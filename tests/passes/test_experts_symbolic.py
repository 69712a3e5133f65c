"""Experts behind a graph break: tokens, ids and weights come in with sizes of their own, the number of choices too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from experts_blocks import EXPERTS, Run, assert_near
from torch import nn

H, I, E = 12, 8, 6


class Dense(nn.Module):
    """Every expert on every token, weighed by scores that are made of ids and weights."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(E, H))
        self.w1, self.w3 = (nn.Parameter(torch.randn(E, I, H) * 0.4) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(E, H, I) * 0.4)

    def scores(self, x, idx, weights):
        return (F.one_hot(idx, E) * weights[..., None]).sum(1)

    def forward(self, x, idx, weights):
        hidden = F.silu(torch.einsum("th,eih->tei", x, self.w1)) * torch.einsum("th,eih->tei", x, self.w3)
        return (torch.einsum("tei,ehi->teh", hidden, self.w2) * self.scores(x, idx, weights)[..., None]).sum(1)


class Scattered(Dense):
    def scores(self, x, idx, weights):
        return torch.zeros(x.shape[0], E).scatter(1, idx, weights)


class Routed(Scattered):
    """The number of choices is the size of an argument."""

    def forward(self, x, idx, weights):
        chosen, ids = (x @ self.gate.t()).softmax(-1).topk(idx.shape[1], -1)
        return super().forward(x, ids, chosen * 1.5)


class Loop(Dense):
    def forward(self, x, idx, weights):
        out = torch.zeros_like(x)
        for e in range(E):
            hidden = F.silu(x @ self.w1[e].t()) * (x @ self.w3[e].t())
            out = torch.addcmul(out, hidden @ self.w2[e].t(), ((idx == e) * weights).sum(-1, keepdim=True))
        return out


def _routing(tokens, k):
    ids = torch.stack([torch.randperm(E)[:k] for _ in range(tokens)])
    return torch.randn(tokens, H), ids, torch.rand(tokens, k) + 0.1


def _run(block, dynamic):
    run = Run((*EXPERTS, "experts_unrolled"))
    torch._dynamo.reset()
    return torch.compile(block, backend=run, fullgraph=True, dynamic=dynamic), run


@pytest.mark.parametrize("kind", [Dense, Routed, Loop])
def test_the_number_of_choices_may_be_symbolic(kind):
    block = kind()
    call, run = _run(block, True)
    with torch.no_grad():
        for tokens, k in ((7, 2), (9, 3), (4, 5)):
            args = _routing(tokens, k)
            assert_near(call(*args), block(*args), torch.float32)
    assert [len(o.matches) for o in run.outcomes] == [1], run.reasons


def test_ids_that_may_repeat_are_told_from_those_of_a_topk():
    """A scatter writes the weight of an id that occurs twice once."""
    block = Scattered()
    call, run = _run(block, True)
    x, ids, weights = _routing(7, 2)
    with torch.no_grad():
        assert_near(call(x, ids, weights), block(x, ids, weights), torch.float32)
        ids[:, 1] = ids[:, 0]
        assert_near(call(x, ids, weights), block(x, ids, weights), torch.float32)
    assert not run.outcome.matches and "twice counts once in the block" in run.reasons[0], run.reasons


@pytest.mark.parametrize("kind", [Dense, Scattered, Loop])
def test_rows_of_tokens_ids_and_weights_are_the_same_by_a_guard(kind):
    block = kind()
    call, run = _run(block, None)
    with torch.no_grad():
        args = _routing(7, 2)
        for value in args:
            torch._dynamo.mark_dynamic(value, 0)
        assert_near(call(*args), block(*args), torch.float32)
        other = _routing(9, 2)
        assert_near(call(*other), block(*other), torch.float32)
        assert [len(o.matches) for o in run.outcomes] == [1], run.reasons
        if kind is Scattered:  # tokens without ids have no expert
            x, ids, weights = _routing(8, 2)
            fewer = x, ids[:5], weights[:5]
            assert_near(call(*fewer), block(*fewer), torch.float32)
            assert len(run.outcomes) == 2
