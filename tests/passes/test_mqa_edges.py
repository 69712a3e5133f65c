"""Functions that are close to a ReLU on ordinary numbers and rank keys differently at the edges: left as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ascend_deep
from ascend_deep.report import Report
from tests.passes.mqa_spellings import INF, SCALE, K, compiled, loop, operands, products_of

OFF = "every product is negative does not get a score of exactly 0"
PROPORTIONAL = "not proportional to q, k and the weights"


def weighted(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """An indexer with ``function`` in the place of the ReLU."""
    return lambda q, k, w: (function(products_of(q, k) * SCALE) * w[..., None]).sum(2)


def scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return weighted(F.relu)(q, k, w)


BLOCKS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "leaky": (weighted(lambda p: F.leaky_relu(p, 1e-10)), OFF),
    "very leaky": (weighted(lambda p: F.leaky_relu(p, 1e-13)), OFF),
    "leaky by a sum": (weighted(lambda p: p.relu() + 1e-11 * p), OFF),
    "leaky by lerp": (weighted(lambda p: torch.lerp(p.relu(), p, 1e-12)), OFF),
    "elu": (weighted(lambda p: F.elu(p, 1e-13)), OFF),
    "an epsilon on each product": (weighted(lambda p: p.relu() + 1e-12), OFF),
    "one head beside the ReLU": (weighted(lambda p: p.relu() + 1e-14 * p[:, :, :1]), OFF),
    "softplus": (weighted(lambda p: F.softplus(p, beta=1e12)), PROPORTIONAL),
    "an epsilon in the ReLU": (weighted(lambda p: (p - 1e-12).relu()), PROPORTIONAL),
    "a power": (weighted(lambda p: p.relu() ** 1.0000000001), PROPORTIONAL),
    "a cap on the products": (weighted(lambda p: (torch.tanh(p / 1e8) * 1e8).relu()), PROPORTIONAL),
    "a cap on the scores": (lambda q, k, w: torch.asinh(scores(q, k, w) * 1e-9) * 1e9, PROPORTIONAL),
    "a square": (lambda q, k, w: (s := scores(q, k, w)) + 1e-13 * s * s, PROPORTIONAL),
    "NaN products are 0": (weighted(lambda p: torch.where(p > 0, p, 0.0)), "holds NaN"),
    "NaN products are 0 by fmax": (weighted(lambda p: torch.fmax(p, torch.zeros(()))), "holds NaN"),
    "infinite products are NaN": (weighted(lambda p: (p + p.abs()) * 0.5), "holds infinity"),
    "a mask in f64": (lambda q, k, w: scores(q, k, w) + far(k), "added in float64"),
}


def far(k: Tensor) -> Tensor:
    """-1e9 for odd keys, in which f32 loses their scores and f64 does not."""
    return (torch.arange(k.shape[1]) % 2).double() * -1e9


def edge(name: str, reason: str) -> tuple[Tensor, ...]:
    """Operands where the block and the op choose different keys."""
    q, k, w, _ = operands(2, 7, 13)
    w = w.abs() + 0.1
    if reason == OFF:
        return -q.abs(), k.abs(), w
    if "NaN" in name:
        k[:, 2] = torch.nan
        return q, k, -w
    if "infinite" in name:
        k[:, 2, 0] = -INF
    if "epsilon" in name or "softplus" in name:
        return 1e-14 * q, k, w
    if "cap" in name:
        return 1e12 * q, k, w
    return q, k, w


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_differs_at_an_edge_is_left(name: str, dynamic: bool) -> None:
    block, reason = BLOCKS[name]

    def choose(q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        best = block(q, k, w).topk(K)
        return best.values, best.indices

    args = edge(name, reason)
    run, backend = compiled(choose, dynamic)
    got, want = run(*args), choose(*args)
    assert torch.equal(got[0].nan_to_num(7.0), want[0].nan_to_num(7.0))
    assert torch.equal(got[1], want[1])
    assert backend.found == []
    (said,) = backend.reasons
    # A head cannot be taken from a symbolic number of heads.
    assert said.endswith(".") and (reason in said or (dynamic and "part of the heads" in said)), said


NEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "twice": lambda p: p.relu().relu(),
    "negated clamp": lambda p: -((-p).clamp(max=0)),
    "maximum": lambda p: torch.maximum(p, torch.zeros_like(p)),
    "root of a square": lambda p: p.relu().square().sqrt(),
    "scaled there and back": lambda p: (p * 1e-20).relu() * 1e20,
}


@pytest.mark.parametrize("name", NEAR)
def test_other_spellings_of_a_relu_are_fused(name: str) -> None:
    def choose(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return weighted(NEAR[name])(q, k, w).topk(K)[1]

    args = operands(2, 7, 13)[:3]
    run, backend = compiled(choose)
    assert torch.equal(run(*args), choose(*args))
    assert backend.found == ["mqa_topk"], backend.reasons


RANKED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda s: s.softmax(-1),
    "exp": torch.exp,
    "capped": lambda s: torch.tanh(s / 30.0) * 30.0,
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("name", RANKED)
def test_a_function_of_the_scores_is_ranked(name: str) -> None:
    """The scores are the op, and the function of them stays."""

    def choose(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return RANKED[name](0.05 * scores(q, k, w)).topk(K)[1]

    args = operands(2, 7, 13)[:3]
    run, backend = compiled(choose)
    assert torch.equal(run(*args), choose(*args))
    assert backend.found == ["mqa_logits"], backend.reasons


def everything(function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> Report:
    """The report of a compile with all recognisers."""
    torch._dynamo.reset()
    torch.compile(function, backend="ascend_deep", options={"downstream": "eager"})(*args)
    report = ascend_deep.last_report()
    assert report is not None
    return report


@pytest.mark.parametrize("masked", [False, True])
def test_the_router_says_nothing_about_a_loop_over_heads(masked: bool) -> None:
    q, k, w, mask = operands(2, 7, 13)

    def choose(q: Tensor, k: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        s = loop(q, k, w)
        return (s.masked_fill(~mask, -INF) if masked else s).topk(K)[1]

    report = everything(choose, (q, k, w, mask))
    assert report.counts() == {"mqa_topk": 1}
    assert report.misses == ()


@pytest.mark.parametrize("shape", [(5, 32), (2, 5, 32)], ids=str)
def test_the_indexer_says_nothing_about_a_router_with_a_relu(shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(8)
    x, inner, outer = (torch.randn(*s, generator=g) for s in (shape, (32, 24), (24, 16)))

    def gate(x: Tensor, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = ((x @ inner).relu() @ outer).softmax(-1).topk(2)
        return values, ids

    report = everything(gate, (x, inner, outer))
    assert report.counts() == {"moe_route": 1}
    assert report.misses == ()


def test_a_softmax_over_the_chosen_scores_is_no_router() -> None:
    q, k, w, _ = operands(2, 7, 13)

    def choose(q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = scores(q, k, w).topk(K)
        return values.softmax(-1), ids

    assert everything(choose, (q, k, w)).counts() == {"mqa_topk": 1}


def test_an_added_mask_hides_keys_that_hold_nan() -> None:
    """As docs/indexer.md says: the op excludes them, where eager takes NaN for the largest number."""
    q, k, w, _ = operands(2, 7, 13)
    k[:, 5] = torch.nan
    mask = torch.zeros(2, 7, 13).index_fill(-1, torch.tensor([5]), -INF)

    def choose(q: Tensor, k: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return (scores(q, k, w) + mask).topk(K)[1]

    run, backend = compiled(choose)
    assert bool((choose(q, k, w, mask)[..., 0] == 5).all())
    got = run(q, k, w, mask)
    assert backend.found == ["mqa_topk"]
    assert not bool((got == 5).any())
    assert torch.equal(got, choose(q, k.nan_to_num(0.0), w, mask))
