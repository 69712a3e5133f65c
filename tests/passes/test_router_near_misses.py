"""Routers that look like members of the family and are not: left alone, with the sentence that says what differs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.router_spellings import SIZE, E, G, K
from tests.passes.router_tools import Gate, compiled, tokens

BF16 = torch.bfloat16


def softmax_over_tokens(l):
    w, i = torch.topk(F.softmax(l, 0), K, -1)
    return w / w.sum(-1, keepdim=True), i


def smallest(l):
    w, i = torch.topk(F.softmax(l, -1), K, -1, largest=False)
    return w / w.sum(-1, keepdim=True), i


def smallest_by_sort(l):
    s, i = torch.sort(F.softmax(l, -1), dim=-1)
    return s[:, :K], i[:, :K]


def biased_weights(l, b):
    s = l.sigmoid() + b
    w, i = torch.topk(s, K)
    return w / (w.sum(-1, keepdim=True) + 1e-20), i


def biased_softmax_weights(l, b):
    w, i = torch.topk((l + b).softmax(-1) + b, K)
    return w, i


def subtracted_bias(l, b):
    s = l.sigmoid()
    i = torch.topk(s - b, K)[1]
    return s.gather(-1, i), i


def multiplied_bias(l, b):
    s = l.sigmoid()
    i = torch.topk(s * b, K)[1]
    return s.gather(-1, i), i


def bias_after_the_choice(l, b):
    s = l.sigmoid()
    i = torch.topk(s, K)[1]
    return (s + b).gather(-1, i), i


def rounded_probabilities(l):
    w, i = torch.topk(F.softmax(l, -1, dtype=torch.float32).to(BF16), K)
    return w, i


def rounded_sigmoid(l, b):
    s = l.sigmoid().to(BF16)
    i = torch.topk(s + b.to(BF16), K)[1]
    return s.gather(-1, i), i


def half_softmax(l):
    w, i = torch.topk(F.softmax(l, -1), K)
    return w / w.sum(-1, keepdim=True), i


def half_sigmoid(l, b):
    s = torch.sigmoid(l)
    i = torch.topk(s + b, K)[1]
    w = s.gather(-1, i)
    return w / w.sum(-1, keepdim=True) * 1.5, i


def group_score_of_three(l, b):
    s = l.sigmoid()
    c = s + b
    g = c.view(-1, G, SIZE).topk(3, -1)[0].sum(-1)
    m = torch.zeros_like(g).scatter(1, g.topk(2)[1], 1.0).repeat_interleave(SIZE, 1)
    i = c.masked_fill(m == 0, float("-inf")).topk(K)[1]
    return s.gather(-1, i), i


def group_mean(l):
    s = l.softmax(-1)
    g = s.view(-1, G, SIZE).mean(-1)
    m = torch.zeros_like(g).scatter(1, g.topk(2)[1], 1.0).repeat_interleave(SIZE, 1)
    w, i = s.masked_fill(m == 0, 0.0).topk(K)
    return w, i


def interleaved_groups(l):
    s = l.sigmoid()
    g = s.view(-1, SIZE, G).amax(1)
    m = torch.zeros_like(g).scatter(1, g.topk(2)[1], 1.0).repeat(1, SIZE)
    w, i = s.masked_fill(m == 0, -1.0).topk(K)
    return w, i


def relu_scores(l):
    w, i = torch.topk(F.relu(l) + 1e-3, K)
    return w / w.sum(-1, keepdim=True), i


def exp_scores(l):
    w, i = torch.topk(torch.exp(l), K)
    return w, i


def softplus_without_root(l):
    w, i = torch.topk(F.softplus(l), K)
    return w, i


def tanh_scores(l):
    w, i = torch.topk(torch.tanh(l), K)
    return w, i


def mixed_scorings(l):
    i = l.softmax(-1).topk(K)[1]
    w = l.sigmoid().gather(-1, i)
    return w.square(), i


def scale_by_token(l):
    p = l.softmax(-1)
    w, i = p.topk(K)
    return w * p.amax(-1, keepdim=True), i


def sparsemixer(l):
    ws, ids, left = [], [], l
    for _ in range(2):
        top, j = left.max(-1, keepdim=True)
        far = (top - l) / l.abs().clamp(min=top) > 0.02
        ws.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, j))
        ids.append(j)
        left = left.scatter(-1, j, float("-inf"))
    return torch.concat(ws, -1), torch.concat(ids, -1)


def shifted_ids(l):
    p = torch.cat([l[:, 1:], l[:, :1]], -1).softmax(-1)
    w, i = p.topk(K)
    return w, i


def detached_weights(l):
    w, i = l.softmax(-1).detach().topk(K)
    return w, i


def straight_through(l):
    p = l.softmax(-1)
    w, i = p.topk(K)
    return w + w.detach() - w.detach() * 0.5 - 0.5 * w, i


def bias_with_gradient(l, b):
    s = l.sigmoid()
    i = (s + b).topk(K)[1]
    e = s.detach() + b
    return (s * (e / e.detach())).gather(-1, i), i


def top_p(l):
    s, i = l.softmax(-1).sort(-1, descending=True)
    w = s * (s.cumsum(-1) - s < 0.7)
    return w[:, :K] / w[:, :K].sum(-1, keepdim=True), i[:, :K]


# name, start of a sentence that must be among the reasons
MISSES = [
    (softmax_over_tokens, "softmax is over dim 0 (tokens); experts are on dim 1."),
    (smallest, "the smallest scores are chosen (largest=False)"),
    (smallest_by_sort, "the smallest scores are chosen; the op chooses the largest."),
    (biased_weights, "the biased scores are used as weights; the op weights with unbiased scores."),
    (biased_softmax_weights, "the choice or the weights also use|the chosen experts are not the K largest"),
    (subtracted_bias, "the bias is subtracted from the scores; the op adds it."),
    (multiplied_bias, "the bias multiplies the scores; the op adds it."),
    (bias_after_the_choice, "the vector per expert takes no part in the choice"),
    (rounded_probabilities, "the scores are rounded to bfloat16 before the choice"),
    (rounded_sigmoid, "the scores are rounded to bfloat16 before the choice"),
    (group_score_of_three, "experts are chosen within groups (6 of them, by the shapes), but by no group score"),
    (group_mean, "experts are chosen within groups (6 of them, by the shapes), but by no group score"),
    (interleaved_groups, "experts are chosen within groups"),
    (relu_scores, "the weights are not softmax, sigmoid or sqrt(softplus)|the chosen experts are not the K largest"),
    (exp_scores, "the scale of the weights depends on the token"),
    (softplus_without_root, "the weights are not softmax, sigmoid or sqrt(softplus)"),
    (tanh_scores, "the weights are not softmax, sigmoid or sqrt(softplus)|the chosen experts are not the K largest"),
    (scale_by_token, "the scale of the weights depends on the token; the op has one constant scale."),
    (sparsemixer, "each chosen expert is weighed by a softmax over its own thresholded set of experts (sparsemixer)"),
    (shifted_ids, "the chosen experts are not the K largest"),
    (detached_weights, "the weights are detached from the logits; the op would pass a gradient back."),
    (straight_through, "the weights have the op's values but another gradient"),
    (bias_with_gradient, "a gradient flows into the bias"),
    (top_p, "the number of experts of a token depends on a cumulative probability (top-p)"),
]
# What may be fused all the same: a smaller part, with the rest outside.
SMALLER = {"scale_by_token", "shifted_ids", "biased_softmax_weights", "rounded_probabilities", "straight_through"}


@pytest.mark.parametrize(("f", "reason"), MISSES, ids=lambda v: v.__name__ if callable(v) else "")
def test_near_miss(f, reason):
    takes_bias = f.__code__.co_argcount == 2
    gate = Gate(f, takes_bias, torch.float32)
    run, backend = compiled(gate, dynamic=False)
    x = tokens(gate, 9, torch.float32)
    (w, i), (v, j) = gate(x), run(x)
    assert torch.equal(i, j)
    torch.testing.assert_close(v, w, rtol=2e-2 if w.dtype == BF16 else 1e-5, atol=1e-6)
    found = backend.one
    reasons = [r.reason for r in found.refusals]
    assert any(r.startswith(start) for r in reasons for start in reason.split("|")), reasons
    for r in found.refusals:
        assert r.reason.endswith(".") and (not r.hint or r.hint.endswith("."))
    if f.__name__ not in SMALLER:
        assert not found.solutions
        assert "ascend_deep.moe_route" not in backend.names()
    elif found.solutions:
        assert "left outside the op" in " ".join(found.solutions[0].notes)


@pytest.mark.parametrize("f", [half_softmax, half_sigmoid])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_in_half_precision(f, dtype):
    """The same source in float32 is a match; on bf16 logits the rounded probabilities decide."""
    takes_bias = f.__code__.co_argcount == 2
    gate = Gate(f, takes_bias, dtype)
    if gate.bias is not None:
        gate.bias.data = gate.bias.data.to(dtype)
    run, backend = compiled(gate)
    x = torch.randn(40, 20).to(dtype)
    (_, i), (_, j) = gate(x), run(x)
    assert torch.equal(i, j)
    short = str(dtype).removeprefix("torch.")
    assert backend.one.refusals[0].reason.startswith(f"the scores are rounded to {short} before the choice")
    assert "float32" in backend.one.refusals[0].hint
    assert not backend.one.solutions

    torch._dynamo.reset()
    gate = Gate(f, takes_bias, torch.float32)
    run, backend = compiled(gate)
    run(torch.randn(8, 20))
    assert len(backend.one.solutions) == 1


def test_noise_before_the_choice_only():
    """Noise in the choice but not in the weights: two tensors of scores."""

    def noisy(l, noise):
        p = l.softmax(-1)
        i = (p + noise).topk(K)[1]
        return p.gather(-1, i), i

    weight = torch.randn(E, 20)
    run, backend = compiled(lambda x, noise: noisy(x @ weight.T, noise))
    x, noise = torch.randn(6, 20), torch.rand(6, E)
    w, i = run(x, noise)
    v, j = noisy(x @ weight.T, noise)
    assert torch.equal(i, j) and torch.allclose(w, v)
    assert not backend.one.solutions
    assert "besides one tensor of logits" in backend.one.refusals[0].reason


def test_noise_on_the_logits_stays_outside():
    """Noise that choice and weights both see is added before the op."""
    weight = torch.randn(E, 20)

    def model(x, noise):
        p = (x @ weight.T + noise * 0.3).softmax(-1)
        return p.topk(K)

    run, backend = compiled(model)
    x, noise = torch.randn(6, 20), torch.randn(6, E)
    (w, i), (v, j) = run(x, noise), model(x, noise)
    assert torch.equal(i, j) and torch.allclose(w, v)
    assert len(backend.one.solutions) == 1
    assert "aten.mul" in backend.names()


def test_dropout_and_random_ops_are_no_part_of_a_router():
    weight = torch.randn(E, 20)

    def model(x):
        p = F.dropout((x @ weight.T).softmax(-1), 0.4, training=True)
        w, i = p.topk(K)
        return w / w.sum(-1, keepdim=True), i

    run, backend = compiled(model)
    run(torch.randn(6, 20))
    assert not backend.one.solutions


def test_float64():
    gate = Gate(lambda l: torch.topk(l.softmax(-1), K), False, torch.float64)
    run, backend = compiled(gate)
    x = torch.randn(5, 20, dtype=torch.float64)
    assert torch.equal(run(x)[0], gate(x)[0])
    assert backend.one.refusals[0].reason == "the router runs in float64; the op computes in float32."


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: torch.topk(x @ w, 3),  # a sampler's topk: no scoring
        lambda x, w: torch.topk((x @ w).softmax(-1), 3, dim=0),  # experts choose tokens
        lambda x, w: (x @ w).softmax(-1).sort(-1, descending=True)[1],  # a whole sort
        lambda x, w: (x @ w.repeat(1, 120)).softmax(-1).topk(5),  # 2880 columns: a vocabulary
        lambda x, w: torch.topk((x @ w).round().to(torch.int64), 3)[1],  # integers
    ],
    ids=["plain_topk", "expert_choice", "whole_sort", "vocabulary", "integers"],
)
def test_other_choices_are_not_even_candidates(f):
    run, backend = compiled(f)
    x, w = torch.randn(6, 20), torch.randn(20, E)
    run(x, w)
    assert not backend.one.solutions and not backend.one.refusals
