"""Every expert on every token, and experts with capacity: what is fused, what of the scores stays, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experts_blocks import EXPERTS as RECOGNISERS
from experts_blocks import assert_near, compiled
from experts_grammar import EXPERTS, HIDDEN, PRODUCTS, SCORES, WEIGH, Block, Spec
from experts_property import examine
from torch import nn

pytest.importorskip("transformers.integrations.moe")

DENSE = Spec(form="dense", act="gelu_tanh", layout="ekn", scale=2.5, slots=2)


def fused(spec, **options):
    verdict = examine(spec, **options)
    assert not verdict.wrong, verdict.wrong
    assert verdict.fused, verdict.reasons


def refused(spec, *words):
    verdict = examine(spec)
    assert not verdict.wrong and not verdict.fused
    assert all(w in verdict.reasons[0] for w in words), verdict.reasons


@pytest.mark.parametrize("scores", [s for s in SCORES if s not in ("threshold", "soft", "straight_through")])
def test_scores(scores):
    fused(replace(DENSE, scores=scores, bias=scores in ("scatter", "masked")), dynamic=scores in ("one_hot", "where"))


@pytest.mark.parametrize("weigh", WEIGH)
def test_ways_to_weigh(weigh):
    fused(replace(DENSE, weigh=weigh, products="bmm", lead=weigh == "mul"))


@pytest.mark.parametrize("place", ["output", "hidden", "input"])
@pytest.mark.parametrize("products", PRODUCTS)
def test_products(products, place):
    if products == "summed" and place != "hidden":
        pytest.skip("there is one place for the scores in this product")
    fused(replace(DENSE, products=products, weight_at=place))


@pytest.mark.parametrize("products", ["einsum_te", "bmm"])
@pytest.mark.parametrize("router", ["softmax_topk", "renormalised", "argmax", "hashed"])
def test_capacity(router, products):
    """17 tokens, room for 5 in an expert: some are dropped in every run."""
    fused(Spec(router=router, form="capacity", products=products, slots=1 if router == "argmax" else 2, tokens=17))


def test_tokens_beyond_the_capacity_are_dropped_as_before():
    block = Block(Spec(form="capacity", tokens=31), torch.float32)
    with torch.no_grad():
        block.gate[:2] += 3.0  # two experts that most tokens want
        x = torch.randn(31, HIDDEN).abs()
        got, run = compiled(block, x)
        want = block(x)
    assert len(run.outcome.matches) == 1 and (want == 0).all(1).any(), "no token was dropped"
    assert_near(got, want, torch.float32)
    assert ((got == 0).all(1) == (want == 0).all(1)).all()
    assert not any("einsum" in str(n.target) or "bmm" in str(n.target) for n in run.graphs[-1].graph.nodes)


def test_scores_made_of_ids_and_weights_vanish_and_others_stay():
    for scores, stays in (("one_hot", False), ("masked", True)):
        block, x = Block(replace(DENSE, scores=scores), torch.float32), torch.randn(9, HIDDEN)
        with torch.no_grad():
            got, run = compiled(block, x)
            assert_near(got, block(x), torch.float32)
        names = {str(n.target) for n in run.graphs[-1].graph.nodes}
        assert any("one_hot" in n for n in names) == stays
        assert (run.op().args[2].op, "gather" in str(run.op().args[2].target)) == ("call_function", stays) or not stays


def test_bfloat16():
    block, x = Block(DENSE, torch.bfloat16), torch.randn(9, HIDDEN).bfloat16()
    with torch.no_grad():
        got, run = compiled(block, x)
        assert len(run.outcome.matches) == 1, run.reasons
        assert_near(got, block(x), torch.bfloat16)


def test_router_is_fused_behind_scattered_scores():
    block, x = Block(replace(DENSE, router="renormalised"), torch.float32), torch.randn(9, HIDDEN)
    with torch.no_grad():
        _, run = compiled(block, x, recognisers=(*RECOGNISERS, "router"))
    assert sorted(m.op for m in run.outcome.matches) == ["moe_experts", "moe_route"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(DENSE, scores="threshold"), ["comparing with a threshold"]),
        (replace(DENSE, scores="soft"), ["none is left out"]),
        (replace(DENSE, scores="straight_through"), ["gradients flow", "not chosen"]),
        (replace(DENSE, bias=True, weight_at="hidden"), ["biases are added after the scores"]),
        (replace(DENSE, bias=True, weight_at="input"), ["biases are added after the scores"]),
        (replace(DENSE, form="colliding", tokens=17), ["more than one token", "same slot"]),
    ],
    ids=["threshold", "soft", "straight through", "bias of all", "bias of all, input", "colliding"],
)
def test_near_misses_are_refused(spec, words):
    refused(spec, *words)


class Threshold(nn.Module):
    """Experts above a threshold have a say. The top-k of a layer before says nothing about how many that are."""

    def __init__(self):
        super().__init__()
        self.inner = Block(replace(DENSE, scale=1.0), torch.float32)
        self.choice = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x):
        values, _ = nn.functional.linear(x, self.choice).softmax(-1).topk(4, dim=-1)
        x = x * values.sum(-1, keepdim=True)
        probs = nn.functional.linear(x, self.inner.gate).softmax(-1)
        scores = probs * (probs > 0.18)
        w13, w2 = self.inner.weights()
        h = self.inner.activate(torch.einsum("th,ehn->ten", x, w13))
        return torch.einsum("te,teh->th", scores, torch.einsum("tei,eih->teh", h, w2))


def test_a_choice_further_up_is_not_this_block_s():
    module, x = Threshold(), torch.randn(9, HIDDEN)
    with torch.no_grad():
        got, run = compiled(module, x)
        assert_near(got, module(x), torch.float32)
    assert run.outcome.matches == () and "not made from a choice" in run.reasons[0], run.reasons


class Blocks(nn.Module):
    """A block-diagonal MLP: every product runs for every token, nothing weighs, and nobody asked about experts."""

    def __init__(self):
        super().__init__()
        self.inner = Block(Spec(), torch.float32)

    def forward(self, x):
        w13, w2 = self.inner.weights()
        h = self.inner.activate(torch.bmm(x.expand(EXPERTS, -1, -1), w13))
        return torch.bmm(h, w2).sum(0)


def test_products_that_nothing_weighs_are_not_mentioned():
    _, run = compiled(Blocks(), torch.randn(9, HIDDEN))
    assert run.outcome.matches == () and run.reasons == []


class Slots(nn.Module):
    """Capacity with one step that a test can change."""

    def __init__(self):
        super().__init__()
        self.inner = Block(Spec(form="capacity"), torch.float32)

    def masks(self, x):
        probs = nn.functional.linear(x, self.inner.gate).softmax(-1)
        chosen = nn.functional.one_hot(probs.argmax(-1), EXPERTS)
        place = (chosen.cumsum(0) - 1) * chosen
        kept = chosen * (place < 3)
        slot = nn.functional.one_hot((place * kept).sum(-1), 3)
        dispatch = (kept[..., None] * slot[:, None]).to(x.dtype)
        return dispatch, dispatch * probs.amax(-1)[:, None, None]

    def forward(self, x):
        dispatch, combine = self.masks(x)
        w13, w2 = self.inner.weights()
        h = self.inner.activate(torch.einsum("ech,ehn->ecn", torch.einsum("tec,th->ech", dispatch, x), w13))
        return torch.einsum("tec,ech->th", combine, torch.einsum("eci,eih->ech", h, w2))


class HalfCounts(Slots):
    """Positions counted in bfloat16 collide from the 257th token on."""

    def masks(self, x):
        probs = nn.functional.linear(x, self.inner.gate).softmax(-1)
        chosen = nn.functional.one_hot(probs.argmax(-1), EXPERTS).bfloat16()
        place = ((chosen.cumsum(0) - 1) * chosen).long()
        kept = chosen.long() * (place < 3)
        slot = nn.functional.one_hot((place * kept).sum(-1), 3)
        dispatch = (kept[..., None] * slot[:, None]).to(x.dtype)
        return dispatch, dispatch * probs.amax(-1)[:, None, None]


class Scaled(Slots):
    def masks(self, x):
        dispatch, combine = super().masks(x)
        return dispatch * 0.5, combine


class NextSlot(Slots):
    """Tokens get the result of the slot beside theirs."""

    def masks(self, x):
        dispatch, combine = super().masks(x)
        return dispatch, combine.roll(1, -1)


class SoftMask(Slots):
    """The mask is the weight, and has gradients."""

    def masks(self, x):
        dispatch, combine = super().masks(x)
        return (combine - combine.detach()) + dispatch, combine


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (Slots, []),
        (HalfCounts, ["half precision"]),
        (Scaled, ["scaled on their way"]),
        (NextSlot, ["was not put into"]),
        (SoftMask, ["gradients flow through the mask"]),
    ],
)
def test_masks_of_slots(block, words):
    module, x = block(), torch.randn(11, HIDDEN)
    got, run = compiled(module, x)
    assert_near(got, module(x), torch.float32)
    if words:
        assert run.outcome.matches == () and all(w in run.reasons[0] for w in words), run.reasons
    else:
        assert len(run.outcome.matches) == 1, run.reasons


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "spec", [Spec(form="capacity", tokens=17), replace(DENSE, scores="masked"), replace(DENSE, scores="one_hot")],
    ids=["capacity", "scores", "ids"],
)  # fmt: skip
def test_certificates_run_again(spec, dynamic, monkeypatch, tmp_path):
    from ascend_deep.passes import certificates
    from ascend_deep.passes.replay import replay

    monkeypatch.setattr(certificates, "store", lambda: tmp_path)
    with torch.no_grad():
        _, run = compiled(Block(spec, torch.float32), torch.randn(spec.tokens, HIDDEN), dynamic=dynamic)
    (match,) = run.outcome.matches
    again = replay(match.certificate)
    assert again.ok, again.text
