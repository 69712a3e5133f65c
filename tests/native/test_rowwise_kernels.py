"""The C++ kernels of ``moe_route`` and ``swiglu`` against float64, on every instruction set of this CPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep.native.cpu.provider import CPU

from .experts_cases import activate

PLAIN: dict[str, Any] = {
    "scoring": "softmax", "select": "scores", "renorm": "none", "eps": 0.0, "scale": 1.0,
    "n_group": 1, "topk_group": 1, "group_score": "top2", "group_fill": "neg_inf",
}  # fmt: skip


def route(logits: Tensor, bias: Tensor | None = None, **attributes: Any) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = CPU.kernels["moe_route"](logits, bias, **{**PLAIN, **attributes})
    return out


def score(row: list[float], scoring: str) -> list[float]:
    if scoring == "softmax":
        top = max(row)
        total = sum(math.exp(v - top) for v in row)
        return [math.exp(v - top) / total for v in row]
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in row]
    return [math.sqrt(math.log1p(math.exp(v))) for v in row]


def best(choice: list[float], k: int) -> list[int]:
    """Descending, ties to the lowest index: Python's sort is stable."""
    return sorted(range(len(choice)), key=lambda i: -choice[i])[:k]


def expected(logits: Tensor, bias: Tensor | None, topk: int, **changes: Any) -> tuple[Tensor, Tensor]:
    """The contract, row by row in Python floats, for logits without NaN."""
    a = {**PLAIN, **changes}
    all_weights, all_ids = [], []
    for row in logits.double().tolist():
        scores = score(row, a["scoring"]) if a["select"] == "scores" else row
        choice = list(scores) if bias is None else [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
        if a["n_group"] > 1:
            size = len(row) // a["n_group"]
            groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(a["n_group"])]
            ranks = [sum(g[:2]) if a["group_score"] == "top2" else g[0] for g in groups]
            kept = set(best(ranks, a["topk_group"]))
            fill = -math.inf if a["group_fill"] == "neg_inf" else 0.0
            choice = [c if i // size in kept else fill for i, c in enumerate(choice)]
        ids = best(choice, topk)
        weights = [scores[i] for i in ids]
        if a["select"] == "logits":
            weights = score(weights, a["scoring"])
        by = {"none": 1.0, "sum": sum(weights) + a["eps"], "clamp": max(sum(weights), a["eps"])}[a["renorm"]]
        all_weights.append([w / by * a["scale"] for w in weights])
        all_ids.append(ids)
    return torch.tensor(all_weights, dtype=torch.float64), torch.tensor(all_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [1, 7, 33, 60, 128])
def test_route(each_isa: str, experts: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(experts)
    # A permutation per row: no ties, so that rounding cannot swap two ids; bias keeps it so.
    logits = torch.stack([torch.randperm(experts, generator=g) for _ in range(11)]) * 0.125 - 3.0
    bias = (torch.randperm(experts, generator=g) - experts / 2) * 2.0**-6 if dtype == torch.float32 else None
    for scoring, select, renorm, topk in itertools.product(
        ("softmax", "sigmoid", "sqrtsoftplus"), ("scores", "logits"), ("none", "sum", "clamp"), (1, 2, 6, experts)
    ):
        if topk > experts:
            continue
        attributes = {"topk": topk, "scoring": scoring, "select": select, "renorm": renorm, "eps": 0.37, "scale": 2.5}
        for b in (None, bias):
            weights, ids = route(logits.to(dtype), b, **attributes)
            want_weights, want_ids = expected(logits, b, **attributes)
            assert weights.dtype == torch.float32 and ids.dtype == torch.int64
            assert weights.shape == ids.shape == (11, topk)
            assert torch.equal(ids, want_ids), attributes
            torch.testing.assert_close(weights.double(), want_weights, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("n_group,topk_group", [(4, 2), (20, 7), (60, 13), (3, 3), (2, 1)])
@pytest.mark.parametrize("group_score", ["top2", "max"])
@pytest.mark.parametrize("group_fill", ["neg_inf", "zero"])
def test_groups(each_isa: str, n_group: int, topk_group: int, group_score: str, group_fill: str) -> None:
    g = torch.Generator().manual_seed(n_group)
    logits = torch.randn(23, 60, generator=g)
    bias = torch.randn(60, generator=g) * 0.3
    attributes = {
        "topk": 5, "scoring": "sigmoid", "n_group": n_group, "topk_group": topk_group,
        "group_score": group_score, "group_fill": group_fill, "renorm": "sum", "eps": 1e-20, "scale": 1.8,
    }  # fmt: skip
    weights, ids = route(logits, bias, **attributes)
    want_weights, want_ids = expected(logits, bias, **attributes)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights.double(), want_weights, rtol=2e-6, atol=0)


@pytest.mark.parametrize("experts", [5, 33, 60, 64])
def test_ties_go_to_the_lowest_index(each_isa: str, experts: int) -> None:
    logits = torch.randint(0, 3, (50, experts), generator=torch.Generator().manual_seed(1)).float()
    logits[0] = 0.0
    logits[1, ::2], logits[1, 1::2] = 0.0, -0.0
    _, ids = route(logits, topk=experts, select="logits", scoring="sigmoid")
    want = torch.stack([row.argsort(stable=True, descending=True) for row in logits])
    assert torch.equal(ids, want)
    # All groups tie: the first ones are kept.
    _, ids = route(torch.zeros(3, 60), topk=8, n_group=12, topk_group=2)
    assert torch.equal(ids, torch.arange(8).expand(3, 8))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("group_fill", ["neg_inf", "zero"])
def test_ids_are_distinct_whatever_the_logits(each_isa: str, scoring: str, group_fill: str) -> None:
    g = torch.Generator().manual_seed(6)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 3e38, -3e38])
    logits = special[torch.randint(6, (200, 36), generator=g)]
    logits[0], logits[1], logits[2] = torch.nan, -torch.inf, torch.inf
    for select, n_group in itertools.product(("scores", "logits"), (1, 6)):
        _, ids = route(
            logits, topk=36, scoring=scoring, select=select, n_group=n_group, topk_group=2, group_fill=group_fill
        )
        assert torch.equal(ids.sort(-1).values, torch.arange(36).expand(200, 36))


def test_nan_ranks_below_minus_infinity(each_isa: str) -> None:
    row = torch.tensor([[torch.nan, -torch.inf, 1.5, torch.nan, -torch.inf, -2.0, torch.inf]])
    weights, ids = route(row, topk=7, select="logits", scoring="sigmoid", scale=3.0)
    assert ids.tolist() == [[6, 2, 5, 1, 4, 0, 3]]
    assert weights[0, 5:].isnan().all() and not weights[0, :5].isnan().any()
    assert weights[0, 0] == 3.0 and weights[0, 3] == 0.0
    weights, _ = route(row, topk=3)
    assert weights.isnan().all()


def test_softmax_with_minus_infinity_is_exact(each_isa: str) -> None:
    row = torch.tensor([[-torch.inf, 0.25, -torch.inf, 1.75, -torch.inf]])
    weights, ids = route(row, topk=5)
    assert ids.tolist() == [[3, 1, 0, 2, 4]]
    torch.testing.assert_close(weights[0, :2], torch.tensor([1.5, 0.0]).softmax(0))
    assert (weights[0, 2:] == 0).all()


def test_route_strides_and_sizes(each_isa: str, threads: None) -> None:
    wide = torch.randn(2000, 80, generator=torch.Generator().manual_seed(2))
    want = route(wide[:, :40].contiguous(), topk=4)
    for other in (wide[:, :40], wide[:, :40].t().contiguous().t()):
        for n in (1, 2):
            torch.set_num_threads(n)
            got = route(other, topk=4)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    weights, ids = route(torch.randn(0, 8), topk=3)
    assert weights.shape == ids.shape == (0, 3)


@pytest.mark.parametrize(
    "change,sentence",
    [
        ({"topk": 9}, "topk is 9, logits has 8 experts"),
        ({"n_group": 3}, "n_group is 3"),
        ({"n_group": 4, "topk_group": 5}, "topk_group is 5"),
        ({"scoring": "tanh"}, "scoring is 'tanh'"),
        ({"renorm": "l2"}, "renorm is 'l2'"),
    ],
)
def test_bad_routes_get_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        route(torch.randn(2, 8), **{"topk": 2, **change})


ACTS = (
    ("silu", 1.0, None), ("silu", 1.0, 0.8), ("gelu", 1.0, None), ("gelu_tanh", 1.0, None), ("relu", 1.0, 1.1),
    ("relu2", 1.0, None), ("sigmoid", 1.0, 0.6), ("swiglu_oai", 1.702, 0.9), ("silu_clamp", 1.0, 0.5),
)  # fmt: skip


@pytest.mark.parametrize("act,alpha,limit", ACTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(each_isa: str, dtype: torch.dtype, act: str, alpha: float, limit: float | None) -> None:
    g = torch.Generator().manual_seed(len(act))
    for width, interleaved, weighted in itertools.product((1, 17, 64, 176), (False, True), (False, True)):
        h = (torch.randn(3, 5, 2 * width, generator=g) * 2).to(dtype)
        weight = torch.randn(3, 5, generator=g) if weighted else None
        got = CPU.kernels["swiglu"](h, weight, act=act, alpha=alpha, limit=limit, interleaved=interleaved)
        d = h.double()
        gate, up = (d[..., ::2], d[..., 1::2]) if interleaved else d.chunk(2, -1)
        want = activate(gate, up, act, alpha, limit)
        if weight is not None:
            want = want * weight.double()[..., None]
        assert got.dtype == dtype and got.shape == (3, 5, width)
        rtol = 2.0**-8 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=3e-7)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "sigmoid"])
def test_activations_over_their_whole_range(each_isa: str, act: str) -> None:
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.linspace(-6, 6, 4001), torch.linspace(-1e-3, 1e-3, 101)])
    h = torch.stack([gate, torch.ones_like(gate)], 1)
    got = CPU.kernels["swiglu"](h, None, act=act, alpha=1.0, limit=None, interleaved=True)
    want = activate(gate.double(), None, act, 1.0, None)
    torch.testing.assert_close(got[:, 0].double(), want, rtol=3e-6, atol=2e-7)


def test_activations_keep_nan_and_infinity(each_isa: str) -> None:
    gate = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    h = torch.stack([gate, torch.full((4,), 1.5)], 1)
    for act in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"):
        got = CPU.kernels["swiglu"](h, None, act=act, alpha=1.0, limit=None, interleaved=True)[:, 0]
        assert got[0].isnan(), act
        assert got[1] == (1.5 if act == "sigmoid" else torch.inf), act


def test_swiglu_strides(each_isa: str) -> None:
    wide = torch.randn(6, 90, generator=torch.Generator().manual_seed(3))
    attributes = {"act": "silu", "alpha": 1.0, "limit": None, "interleaved": False}
    want = CPU.kernels["swiglu"](wide[:, 10:84].contiguous(), None, **attributes)
    assert torch.equal(CPU.kernels["swiglu"](wide[:, 10:84], None, **attributes), want)
    turned = wide[:, 10:84].t().contiguous().t()
    assert torch.equal(CPU.kernels["swiglu"](turned, None, **attributes), want)
    assert CPU.kernels["swiglu"](torch.randn(0, 8), None, **attributes).shape == (0, 4)
    with pytest.raises(RuntimeError, match="row_weight has shape"):
        CPU.kernels["swiglu"](wide, torch.randn(5), **attributes)
    with pytest.raises(RuntimeError, match="has to be even"):
        CPU.kernels["swiglu"](torch.randn(2, 5), None, **attributes)
