"""Who else uses what is inside a router: other outputs stay, partial uses are fused, no column order is mixed up."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ascend_deep
from tests.passes.router_spellings import BY_NAME, E, K
from tests.passes.router_tools import Gate, by_id, compiled, tokens


def gated(f, bias=False, count=7):
    gate = Gate(f, bias, torch.float32)
    return gate, tokens(gate, count, torch.float32)


def check(f, bias=False, open_order=False):
    """Compile ``f``, compare every output with eager, forward and backward; returns the backend."""
    gate, x = gated(f, bias)
    run, backend = compiled(gate)
    results = []
    for g in (gate, run):
        gate.zero_grad()
        leaf = x.clone().requires_grad_()
        out = g(leaf)
        floats = [o for o in out if o.is_floating_point() and o.requires_grad]
        if floats:
            sum(((o.float() + 0.3) ** 2).sum() * (n + 1) for n, o in enumerate(floats)).backward()
        results.append((out, leaf.grad, gate.weight.grad))
    (want, dx, dw), (got, ex, ew) = results
    if not open_order:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    for a, b in ((ex, dx), (ew, dw)):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return backend


def test_mean_of_probabilities_is_returned_as_well():
    def f(l):
        p = l.softmax(-1)
        w, i = p.topk(K)
        return w / w.sum(-1, keepdim=True), i, p.mean(0)

    backend = check(f)
    (region,) = backend.one.regions
    assert backend.one.solutions[0].attrs["renorm"] == "sum"
    assert len(region.outside_users) == 1
    assert "aten.softmax" in backend.names() and "aten.topk" not in backend.names()


def test_logits_are_returned_as_well():
    def f(l):
        w, i = l.softmax(-1).topk(K)
        return w / w.sum(-1, keepdim=True) * 1.5, i, l

    backend = check(f)
    assert backend.one.solutions[0].attrs["scale"] == 1.5
    assert "aten.softmax" not in backend.names()


def test_probabilities_returned_as_router_logits():
    """Some models return softmaxed values under the name of logits: what is returned must not change."""

    def f(l):
        p = F.softmax(l, -1, dtype=torch.float32)
        w, i = p.topk(K)
        return w / w.sum(-1, keepdim=True), i, p

    backend = check(f)
    assert backend.one.solutions


def test_values_before_renormalisation_are_returned_as_well():
    def f(l):
        v, i = l.softmax(-1).topk(K)
        return v / v.sum(-1, keepdim=True), i, v

    backend = check(f)
    assert backend.one.solutions[0].attrs["renorm"] == "sum"


def test_gathered_scores_used_outside_become_the_output():
    """Gathered scores in the block's own order may not be mixed with the op's ids: the op returns them instead."""

    def f(l, b):
        s = l.sigmoid()
        i = torch.topk(s + b, K, sorted=False)[1]
        v = s.gather(-1, i)
        return v / (v.sum(-1, keepdim=True) + 1e-20), i, v

    gate, x = gated(f, True)
    run, backend = compiled(gate)
    (w, i, v), (a, j, c) = gate(x), run(x)
    torch.testing.assert_close(by_id(a, j), by_id(w, i))
    torch.testing.assert_close(by_id(c, j), by_id(v, i))
    assert backend.one.solutions[0].attrs["renorm"] == "none"
    assert "aten.div" in backend.names()


def test_open_order_values_used_outside_with_ids():
    """topk(sorted=False): the values are used outside too, and must stay paired with the ids by position."""

    def f(l):
        v, i = torch.topk(l.softmax(-1), K, sorted=False)
        return v / v.sum(-1, keepdim=True), i, v * 3

    gate, x = gated(f)
    run, backend = compiled(gate)
    (w, i, v), (a, j, c) = gate(x), run(x)
    torch.testing.assert_close(by_id(a, j), by_id(w, i))
    torch.testing.assert_close(by_id(c, j), by_id(v, i))
    assert len(backend.one.solutions) == 1
    assert "aten.topk" not in backend.names()


def test_biased_values_in_open_order_used_outside_are_a_reason_to_refuse():
    def f(l, b):
        s = l.sigmoid()
        c, i = torch.topk(s + b, K, sorted=False)
        return s.gather(-1, i), i, c

    gate, x = gated(f, True)
    run, backend = compiled(gate)
    for got, want in zip(run(x), gate(x), strict=True):
        torch.testing.assert_close(got, want)
    assert not backend.one.solutions
    assert "column order of the block's own choice" in backend.one.refusals[0].reason


def test_biased_values_in_descending_order_may_be_used_outside():
    def f(l, b):
        s = l.sigmoid()
        c, i = torch.topk(s + b, K)
        return s.gather(-1, i), i, c

    backend = check(f, True)
    assert len(backend.one.solutions) == 1


def test_ids_alone():
    def f(l, b):
        return torch.topk(l.sigmoid() + b, K)[1], l

    backend = check(f, True)
    attrs = backend.one.solutions[0].attrs
    assert attrs["scoring"] == "sigmoid" and attrs["select"] == "scores"
    assert "aten.sigmoid" not in backend.names()


def test_ids_alone_without_bias_keep_their_scoring():
    """Without a bias every scoring chooses alike, up to ties where scores saturate: those of the block are kept."""
    for name in ("softmax", "sigmoid"):
        score = {"softmax": lambda l: l.softmax(-1), "sigmoid": torch.sigmoid}[name]
        backend = check(lambda l, score=score: (torch.topk(score(l), K)[1], l))
        attrs = backend.one.solutions[0].attrs
        assert (attrs["scoring"], attrs["select"]) == (name, "scores")
        torch._dynamo.reset()


@pytest.mark.parametrize("descending", [True, False])
def test_weights_alone(descending):
    """Nobody reads the ids, so the graph has no node for them."""

    def f(l):
        w = l.softmax(-1).topk(K, sorted=descending)[0]
        w = w / w.sum(-1, keepdim=True) * 1.5
        return (w if descending else w.square().sum(-1)), l

    backend = check(f)
    attrs = backend.one.solutions[0].attrs
    assert (attrs["scoring"], attrs["renorm"], attrs["scale"]) == ("softmax", "sum", 1.5)
    assert "aten.topk" not in backend.names()


def test_two_routers_one_after_the_other():
    """The first router's ids lead to the second's logits through a matmul: two blocks, not one."""
    w1, w2 = torch.randn(E, 20), torch.randn(E, 20)

    def f(x):
        a, i = F.linear(x, w1).softmax(-1).topk(K)
        y = x * a.sum(-1, keepdim=True) + i.sum(-1, keepdim=True) * 0.01
        b, j = F.linear(y, w2).sigmoid().topk(K)
        return a, i, b / b.sum(-1, keepdim=True), j

    run, backend = compiled(f)
    x = torch.randn(6, 20)
    for got, want in zip(run(x), f(x), strict=True):
        torch.testing.assert_close(got, want)
    assert [s.attrs["scoring"] for s in backend.one.solutions] == ["softmax", "sigmoid"]


def test_dense_output_with_ids_used_outside():
    """Dense gates and ids of one choice: no region returns both, so the ids and the [.., K] values are the block."""

    def f(l):
        v, i = l.softmax(-1).topk(K)
        return torch.zeros_like(l).scatter(-1, i, v), i

    backend = check(f)
    assert len(backend.one.solutions) == 1
    assert "aten.scatter" in backend.names()


def test_weights_returned_as_strided_columns():
    """The first columns of a sort keep their strides if the model returns them."""
    s = BY_NAME["sort_and_slice"]
    gate, x = gated(s.f)
    run, _ = compiled(gate)
    assert run(x)[1].stride() == gate(x)[1].stride() == (E, 1)


@pytest.mark.parametrize("levels", [1, 2])
def test_ties(levels):
    """Equal logits: the ids are free, but distinct, and the multiset of weights is eager's."""

    def f(l):
        w, i = torch.topk((l * levels).round().softmax(-1), K)
        return w, i

    gate, x = gated(f, count=64)
    gate.weight.data *= 0.2
    run, backend = compiled(gate)
    (w, _), (v, j) = gate(x), run(x)
    assert backend.one.solutions
    torch.testing.assert_close(v, w)
    assert bool((j.sort(-1).values.diff(dim=-1) > 0).all())
    scores = (F.linear(x, gate.weight) * levels).round().softmax(-1)
    torch.testing.assert_close(scores.gather(-1, j), v)


def test_nan_rows_stay_in_their_rows():
    s = BY_NAME["sigmoid_bias_unsorted"]
    gate, x = gated(s.f, True)
    run, _ = compiled(gate)
    x[2] = float("nan")
    (w, i), (v, j) = gate(x), run(x)
    rows = torch.arange(len(x)) != 2
    torch.testing.assert_close(by_id(v[rows], j[rows]), by_id(w[rows], i[rows]))
    assert v[2].isnan().all() and bool((j[2].sort().values.diff() > 0).all()) and int(j[2].max()) < E


def test_no_grad_inside_the_model():
    """A router under no_grad in a model that trains: fused, without a gradient."""
    w = torch.nn.Parameter(torch.randn(E, 20))

    def f(x):
        with torch.no_grad():
            l = F.linear(x, w)
            p, i = l.softmax(-1).topk(K)
        return p, i, (x * 2).sum(-1)

    run, backend = compiled(f)
    x = torch.randn(5, 20, requires_grad=True)
    (a, i, b), (p, j, _) = run(x), f(x)
    assert torch.equal(i, j) and not a.requires_grad and not p.requires_grad
    torch.testing.assert_close(a, p)
    b.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))
    assert len(backend.one.solutions) == 1


def test_large_router():
    """DeepSeek-V3's sizes: 256 experts in 8 groups, 8 chosen."""

    def f(x, weight, b):
        s = F.linear(x, weight).sigmoid()
        c = s + b
        g = c.view(-1, 8, 32).topk(2, -1)[0].sum(-1)
        m = torch.zeros_like(g).scatter(1, g.topk(4, sorted=False)[1], 1.0)
        m = m.unsqueeze(-1).expand(-1, 8, 32).reshape(-1, 256)
        i = c.masked_fill(~m.bool(), float("-inf")).topk(8, sorted=False)[1]
        w = s.gather(1, i)
        return w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5, i

    run, backend = compiled(f)
    args = torch.randn(33, 48), torch.randn(256, 48) * 0.2, torch.randn(256) * 0.1
    torch.testing.assert_close(by_id(*run(*args)), by_id(*f(*args)))
    attrs = backend.one.solutions[0].attrs
    assert (attrs["n_group"], attrs["topk_group"], attrs["topk"], attrs["scale"]) == (8, 4, 8, 2.5)


THRESHOLDS = {
    "at_least": lambda p: p * (p >= p.topk(K).values[:, -1:]),
    "less": lambda p: p.masked_fill(p < p.topk(K).values.amin(-1, keepdim=True), 0.0),
    "equal": lambda p: p * (p == p.topk(1).values),
    "gathered": lambda p: (lambda v, i: (p.gather(1, i) == v) * v)(*p.topk(K)),
    "difference": lambda p: p * torch.sign(p - p.topk(K).values[:, -1:] + 1e-9),
    "flipped": lambda p: p * (p.topk(K).values[:, -1:].expand(-1, E) <= p),
}


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", THRESHOLDS)
def test_chosen_scores_that_are_compared_with_all_scores_stay_theirs(name, scoring):
    """In eager mode they are the same numbers to the last bit, which an op and the model's own softmax are not."""

    def model(logits):
        return THRESHOLDS[name](logits.softmax(-1) if scoring == "softmax" else logits.sigmoid())

    run, backend = compiled(model)
    logits = torch.randn(300, E)
    torch.testing.assert_close(run(logits), model(logits))
    if name == "gathered":  # both sides of that comparison are weights of the op
        return
    assert not backend.one.solutions
    reasons = [r.reason for r in backend.one.refusals]
    assert not reasons or "compares the chosen scores with all of them outside the block" in reasons[0], reasons


def test_scores_that_are_used_but_not_compared_do_not_stop_a_router():
    backend = check(lambda logits: (*torch.topk(logits.softmax(-1), K), logits.softmax(-1).mean(0), logits.sigmoid()))
    assert len(backend.one.solutions) == 1


@pytest.mark.parametrize("batch", [2, 3])
def test_a_batch_of_a_fixed_size_times_a_symbolic_length(batch):
    """Tokens come in multiples of the batch, so the block cannot be run on any number of them."""
    torch.manual_seed(batch)
    gate = torch.nn.Linear(24, 9)

    def router(x):
        weights, idx = gate(x.view(-1, 24)).softmax(-1).topk(3, -1)
        return weights / weights.sum(-1, keepdim=True), idx

    torch._dynamo.reset()
    run = torch.compile(router, backend="ascend_deep", options={"downstream": "eager"}, fullgraph=True)
    first = torch.randn(batch, 7, 24)
    torch._dynamo.mark_dynamic(first, 1)
    with torch.no_grad():
        for x in (first, torch.randn(batch, 12, 24)):
            (weights, idx), (wanted, chosen) = run(x), router(x)
            assert torch.equal(idx, chosen)
            torch.testing.assert_close(weights, wanted)
    assert ascend_deep.last_report().counts() == {"moe_route": 1}
