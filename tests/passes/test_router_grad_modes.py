"""Routers that choose under ``no_grad``: the ids have no gradient anyway. Weights under it are another function."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.router_spellings import E, K
from tests.passes.router_tools import Gate, by_id, compiled, tokens


def choice_without_gradients(l, b):
    s = l.float().sigmoid()
    with torch.no_grad():
        i = torch.topk(s + b, K, sorted=False)[1]
    w = s.gather(-1, i)
    return w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5, i


@torch.no_grad()
def _choose(p, b):
    return torch.topk(p + b, K, sorted=False)[1]


def choice_in_a_decorated_function(l, b):
    p = F.softmax(l, -1, dtype=torch.float32)
    i = _choose(p, b)
    return p.gather(-1, i) * 1.7, i


def groups_without_gradients(l, b):
    s = l.float().sigmoid()
    with torch.no_grad():
        biased = s + b
        best = biased.view(-1, 6, E // 6).topk(2, -1)[0].sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(2, -1, sorted=False)[1], 1)
        mask = kept.unsqueeze(-1).expand(-1, 6, E // 6).reshape(-1, E)
        i = biased.masked_fill(~mask.bool(), float("-inf")).topk(K, -1, sorted=False)[1]
    w = s.gather(1, i)
    return w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5, i


@pytest.mark.parametrize("f", [choice_without_gradients, choice_in_a_decorated_function, groups_without_gradients])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_choice_without_gradients_is_fused(f, dynamic):
    gate = Gate(f, True, torch.float32)
    x = tokens(gate, 9, torch.float32)
    run, backend = compiled(gate, dynamic=dynamic)
    found = []
    for g in (gate, run):
        gate.zero_grad()
        w, i = g(x)
        w, i = by_id(w, i)
        (w * torch.linspace(0.5, 2, K)).pow(2).sum().backward()
        found.append((w.detach(), i, gate.weight.grad.clone(), gate.bias.grad))
    (w, i, dw, db), (v, j, dv, dc) = found
    assert torch.equal(i, j) and db is None and dc is None and float(dw.abs().max()) > 1e-3
    torch.testing.assert_close(v, w)
    torch.testing.assert_close(dv, dw, rtol=2e-4, atol=2e-5)
    assert len(backend.one.solutions) == 1, backend.one.refusals
    assert "aten.topk" not in backend.names()


def test_the_same_block_without_any_gradients_is_fused():
    gate = Gate(choice_without_gradients, True, torch.float32)
    x = tokens(gate, 9, torch.float32)
    run, backend = compiled(gate)
    with torch.no_grad():
        torch.testing.assert_close(by_id(*run(x)), by_id(*gate(x)))
    assert len(backend.one.solutions) == 1


def scores_without_gradients(l):
    with torch.no_grad():
        p = l.softmax(-1)
    w, i = p.topk(K)
    return w * 1.5 + 0 * l.sum(), i


def sum_without_gradients(l):
    w, i = l.softmax(-1).topk(K)
    with torch.no_grad():
        total = w.sum(-1, keepdim=True)
    return w / total, i


@pytest.mark.parametrize("f", [scores_without_gradients, sum_without_gradients])
def test_a_floating_value_without_gradients_is_refused_or_left_outside(f):
    gate = Gate(f, False, torch.float32)
    x = tokens(gate, 9, torch.float32)
    run, backend = compiled(gate)
    grads = []
    for g in (gate, run):
        gate.zero_grad()
        (g(x)[0] * torch.linspace(0.5, 2, K)).sum().backward()
        grads.append(gate.weight.grad.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-4, atol=2e-6)
    said = [r.reason for r in backend.one.refusals] + [n for s in backend.one.solutions for n in s.notes]
    assert any("the block spans a change of grad mode or autocast" in text for text in said)
    assert not any(s.attrs["renorm"] == "sum" for s in backend.one.solutions)


def test_ids_that_are_used_before_the_weights_are_computed_stay_in_their_mode():
    """What uses the ids under ``no_grad`` would be moved behind the weights, out of it."""

    def f(l, b):
        s = l.float().sigmoid()
        with torch.no_grad():
            i = torch.topk(s + b, K)[1]
            load = s.gather(-1, i).mean(0)
        w = s.gather(-1, i)
        return w / (w.sum(-1, keepdim=True) + 1e-20), i, load

    gate = Gate(f, True, torch.float32)
    x = tokens(gate, 9, torch.float32)
    run, _ = compiled(gate)
    want, got = gate(x), run(x)
    assert [t.requires_grad for t in got] == [t.requires_grad for t in want] == [True, False, False]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    grads = []
    for g in (gate, run):
        gate.zero_grad()
        w, _, load = g(x)
        ((w * torch.linspace(0.5, 2, K)).sum() + load.sum()).backward()
        grads.append(gate.weight.grad.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-4, atol=2e-6)
