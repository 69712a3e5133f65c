"""Blocks that differ from an op only beyond the sizes or values that probes have: left as they are, with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ascend_deep
from ascend_deep.report import Report

HEADS, KEYS = 16, 40


def compiled(function: Callable[..., Any], args: tuple[Tensor, ...], dynamic: bool = False) -> tuple[Any, Report]:
    torch._dynamo.reset()
    got = torch.compile(function, backend="ascend_deep", dynamic=dynamic, options={"downstream": "eager"})(*args)
    report = ascend_deep.last_report()
    assert report is not None
    return got, report


# -- the indexer ----------------------------------------------------------------------------------------------------
def indexer_inputs(heads: int = HEADS, queries: int = 9, keys: int = KEYS) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(heads)
    q = torch.randn(2, queries, heads, 24, generator=g)
    return q, torch.randn(2, keys, 24, generator=g), torch.randn(2, queries, heads, generator=g)


def products(q: Tensor, k: Tensor) -> Tensor:
    return F.relu(torch.einsum("bshd,btd->bsht", q, k) * 0.37)


def scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return (products(q, k) * w[..., None]).sum(2)


def chosen(f: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, w: f(q, k, w).topk(4)[1]


INDEXERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "heads of two scales": lambda q, k, w: (
        0.3 * scores(q[:, :, :8], k, w[:, :, :8]) + scores(q[:, :, 8:], k, w[:, :, 8:])
    ),
    "last heads subtracted": lambda q, k, w: scores(q[:, :, :9], k, w[:, :, :9]) - scores(q[:, :, 9:], k, w[:, :, 9:]),
    "first heads of the products": lambda q, k, w: (products(q, k)[:, :, :8] * w[:, :, :8, None]).sum(2),
    "loop without the last head": lambda q, k, w: sum(
        (F.relu(q[:, :, h] @ k.mT * 0.37) * w[:, :, h, None] for h in range(HEADS - 1)), torch.zeros(())
    ),
    "a head twice": lambda q, k, w: scores(q, k, w) + scores(q[:, :, 14:], k, w[:, :, 14:]),
    "cumsum": lambda q, k, w: (products(q, k) * w[..., None]).cumsum(2)[:, :, 2],
    "tril far away": lambda q, k, w: scores(q, k, w).tril(25),
    "tril of products": lambda q, k, w: (products(q, k).tril(12) * w[..., None]).sum(2),
    "rolled keys": lambda q, k, w: scores(q, k, w).roll(11, -1),
    "rolled queries": lambda q, k, w: scores(q, k, w).roll(3, 1),
    "rolled heads": lambda q, k, w: (products(q, k).roll(3, 2) * w[..., None]).sum(2),
    "nan_to_num": lambda q, k, w: scores(q, k, w).nan_to_num(0.0),
    "nan by isnan": lambda q, k, w: scores(q, k, w).masked_fill(scores(q, k, w).isnan(), 0.0),
    "nan by comparison": lambda q, k, w: (lambda s: torch.where(s == s, s, 0.0))(scores(q, k, w)),
}


CASES = [(name, False) for name in INDEXERS] + [
    (name, True) for name in ("first heads of the products", "tril far away", "rolled queries", "nan_to_num")
]


@pytest.mark.parametrize("name,dynamic", CASES, ids=[f"{n}, {'dynamic' if d else 'static'}" for n, d in CASES])
def test_indexers_that_differ_beyond_small_sizes(name: str, dynamic: bool) -> None:
    args = indexer_inputs()
    if name.startswith("nan"):
        args[1][:, 7] = float("nan")
        args[2].abs_().neg_()
    function = chosen(INDEXERS[name])
    got, report = compiled(function, args, dynamic)
    assert torch.equal(got.sort(-1).values, function(*args).sort(-1).values)
    assert not [m for m in report.matches if m.op in ("mqa_topk", "mqa_logits")]
    assert any(m.recogniser == "mqa_indexer" and m.reason.endswith(".") for m in report.misses)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_mean_over_heads_has_the_scale_of_the_model(dynamic: bool) -> None:
    """The number of heads is in the scale; a run with fewer heads would find another one."""
    args = indexer_inputs()
    best, _ = compiled(lambda q, k, w: (products(q, k) * w[..., None]).mean(2).topk(4)[0], args, dynamic)
    q, k, w = (a.double() for a in args)
    torch.testing.assert_close(best.double(), (products(q, k) * w[..., None]).mean(2).topk(4)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("part", [slice(0, 8), slice(8, 16), slice(-9, None)], ids=str)
def test_a_shard_of_the_heads_is_fused_as_that_shard(part: slice) -> None:
    args = indexer_inputs()
    function = chosen(lambda q, k, w: scores(q[:, :, part], k, w[:, :, part]))
    got, report = compiled(function, args)
    assert torch.equal(got.sort(-1).values, function(*args).sort(-1).values)
    assert report.counts() == {"mqa_topk": 1}


# -- experts --------------------------------------------------------------------------------------------------------
TOKENS, EXPERTS, HIDDEN, INNER = 50, 8, 96, 80


def experts(middle: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def block(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        rows = x.repeat_interleave(2, 0)[..., None]
        gate, up = torch.bmm(w13[flat], rows)[..., 0].chunk(2, -1)
        y = torch.bmm(w2[flat], middle(F.silu(gate) * up)[..., None])[..., 0]
        return (y * weights.reshape(-1, 1)).view(TOKENS, 2, HIDDEN).sum(1)

    return block


MIDDLES: dict[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda h: h.roll(16, -1),
    "roll of a multiple": lambda h: h.roll(48, -1),
    "tril": lambda h: h.tril(60),
    "last units doubled": lambda h: torch.slice_scatter(h, h[:, 40:] * 2, 1, 40),
    "one unit negated": lambda h: torch.select_scatter(h, -h[:, 79], 1, 79),
    "nan_to_num": lambda h: h.nan_to_num(),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_experts_that_differ_beyond_small_sizes(name: str) -> None:
    g = torch.Generator().manual_seed(3)
    x, w13 = torch.randn(TOKENS, HIDDEN, generator=g), torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g) * 0.1
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=g) * 0.1
    weights, ids = torch.randn(TOKENS, EXPERTS, generator=g).softmax(-1).topk(2)
    _, report = compiled(experts(lambda h: h), (x, ids, weights, w13, w2))
    assert report.counts() == {"moe_experts": 1}, "the block without the change is fused"
    function = experts(MIDDLES[name])
    if name == "nan_to_num":
        x[5, 5] = torch.inf
    got, report = compiled(function, (x, ids, weights, w13, w2))
    torch.testing.assert_close(got, function(x, ids, weights, w13, w2), rtol=1e-4, atol=1e-5, equal_nan=True)
    assert "moe_experts" not in report.counts()
    assert name == "one unit negated" or any("experts" in m.recogniser for m in report.misses)
