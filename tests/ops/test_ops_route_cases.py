"""``moe_route``: failures that people met with routers elsewhere, each a rule here. Reference and kernel both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native.cpu.provider import CPU
from ascend_deep.ops import moe_route

Route = Callable[..., tuple[Tensor, Tensor]]


def _by_reference(logits: Tensor, bias: Tensor | None = None, **changes: Any) -> tuple[Tensor, Tensor]:
    attributes: dict[str, Any] = {
        "scoring": "softmax",
        "select": "scores",
        "renorm": "none",
        "eps": 0.0,
        "scale": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "group_score": "top2",
        "group_fill": "neg_inf",
        **changes,
    }
    return ops.reference("moe_route")(logits, bias, **attributes)


@pytest.fixture(params=["reference", "op"])
def route(request: pytest.FixtureRequest) -> Route:
    return _by_reference if request.param == "reference" else moe_route


def in_range(idx: Tensor, experts: int) -> bool:
    """Ids in [0, experts) and distinct within each row."""
    ordered = idx.sort(-1).values
    return bool((idx >= 0).all() and (idx < experts).all() and (ordered[:, 1:] > ordered[:, :-1]).all())


def test_scale_is_applied_exactly_once(route: Route) -> None:
    logits, bias = torch.randn(7, 12), torch.randn(12)
    attributes = {"topk": 4, "scoring": "sigmoid", "renorm": "sum", "eps": 1e-20}
    base, idx = route(logits, bias, **attributes)
    scaled, same = route(logits, bias, **attributes, scale=2.826)
    assert torch.equal(idx, same)
    torch.testing.assert_close(scaled, base * 2.826)
    torch.testing.assert_close(scaled.sum(-1), torch.full((7,), 2.826))


def test_scale_with_one_group_and_without_bias(route: Route) -> None:
    logits = torch.randn(9, 16)
    for bias in (None, torch.randn(16)):
        for scale in (1.0, 2.5):
            plain = route(logits, bias, topk=3, scoring="sigmoid", scale=scale)
            for score in ("top2", "max"):
                grouped = route(
                    logits, bias, topk=3, scoring="sigmoid", scale=scale, n_group=1, topk_group=1, group_score=score
                )
                torch.testing.assert_close(grouped, plain)


def test_weights_are_gathered_scores_and_not_choice_minus_bias(route: Route) -> None:
    logits, bias = torch.randn(6, 32) - 18, torch.randn(32) + 12
    weights, idx = route(logits, bias, topk=4, scoring="sigmoid", renorm="sum", eps=1e-20, scale=2.5)
    scores = logits.double().sigmoid().gather(-1, idx)
    torch.testing.assert_close(weights.double(), 2.5 * scores / scores.sum(-1, keepdim=True), rtol=1e-5, atol=0)
    assert (weights > 0).all()


def test_bias_chooses_and_does_not_weigh(route: Route) -> None:
    logits, bias = torch.randn(5, 10), torch.zeros(10)
    bias[7] = 50.0
    for select in ("scores", "logits"):
        weights, idx = route(logits, bias, topk=1, scoring="sigmoid", select=select, scale=1.3)
        assert (idx == 7).all()
        torch.testing.assert_close(weights[:, 0], 1.3 * logits[:, 7].sigmoid())


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [8, 33, 60, 64, 128, 160, 256, 384, 512, 896])
def test_every_size_gives_the_same_answer(route: Route, scoring: str, experts: int) -> None:
    logits, bias = torch.randn(3, experts), torch.randn(experts) * 0.3
    scores = logits.double().softmax(-1) if scoring == "softmax" else logits.double().sigmoid()
    for topk in (k for k in (1, 2, 4, 6, 8, 16) if k <= experts):
        for b in (None, bias):
            weights, idx = route(logits, b, topk=topk, scoring=scoring, scale=1.1)
            choice = scores if b is None else scores + b.double()
            wanted = choice.topk(topk).indices.sort(-1).values
            assert torch.equal(idx.sort(-1).values, wanted)
            torch.testing.assert_close(weights.double(), 1.1 * scores.gather(-1, idx), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("experts", [8, 33, 60, 128])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("select", ["scores", "logits"])
def test_rows_of_nan_and_infinities_keep_ids_distinct_and_others_untouched(
    route: Route, experts: int, scoring: str, select: str
) -> None:
    logits = torch.randn(6, experts)
    clean = route(logits, topk=4, scoring=scoring, select=select, scale=1.7)
    dirty = logits.clone()
    dirty[0], dirty[1], dirty[2] = float("nan"), float("inf"), float("-inf")
    dirty[3, ::3] = float("nan")
    weights, idx = route(dirty, topk=4, scoring=scoring, select=select, scale=1.7)
    assert in_range(idx, experts)
    assert torch.equal(idx[4:], clean[1][4:])
    torch.testing.assert_close(weights[4:], clean[0][4:])
    assert weights[0].isnan().all()
    if select == "scores" and scoring == "softmax":
        assert weights[3].isnan().all(), "softmax of a row with NaN is NaN throughout"
        assert torch.equal(idx[3], torch.arange(4)), "all choice scores are NaN: lowest ids first"
    else:
        assert (idx[3] % 3 != 0).all(), "NaN ranks below every number"
        assert weights[3].isfinite().all()


def test_nan_ranks_below_minus_infinity(route: Route) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan, -inf, nan, -inf, 0.5]])
    assert route(logits, topk=5, scoring="sigmoid", select="logits")[1].tolist() == [[4, 1, 3, 0, 2]]


def test_dropped_groups_are_chosen_after_everything_in_the_kept_ones(route: Route) -> None:
    """Rows of -inf: the kept group is all -inf too, and expert 0 of a dropped group must not win the tie."""
    bias = torch.tensor([-1.0, -1.0, -1.0, 0.0, 0.0, 0.0]) * float("inf")
    bias = torch.where(bias.isnan(), 0.0, bias)
    logits = torch.full((2, 6), float("-inf"))
    logits[1] = torch.tensor([0.1, 0.2, 0.3, float("nan"), 0.5, 0.4])
    _, idx = route(logits, bias, topk=5, scoring="sigmoid", n_group=2, topk_group=1, group_score="max")
    assert idx.tolist() == [[3, 4, 5, 0, 1], [4, 5, 3, 0, 1]]


@pytest.mark.parametrize("experts", [16, 33, 256])
def test_ties_go_to_the_lowest_index(route: Route, experts: int) -> None:
    zeros = torch.zeros(3, experts)
    for dtype in (torch.float32, torch.bfloat16):
        weights, idx = route(zeros.to(dtype), topk=5, scale=1.3)
        assert idx.tolist() == [[0, 1, 2, 3, 4]] * 3
        torch.testing.assert_close(weights, torch.full((3, 5), 1.3 / experts))
    mixed = zeros.clone()
    mixed[:, 3] = 1.0
    mixed[:, 0] = -0.0
    assert route(mixed, topk=4, select="logits")[1].tolist() == [[3, 0, 1, 2]] * 3
    groups = route(torch.zeros(2, 16), topk=4, scoring="sigmoid", n_group=4, topk_group=2)[1]
    assert groups.tolist() == [[0, 1, 2, 3]] * 2


def test_order_of_the_ids_is_descending_then_by_index(route: Route) -> None:
    logits = torch.tensor([[0.5, 2.0, 0.5, -1.0, 2.0, 0.5]])
    assert route(logits, topk=6)[1].tolist() == [[1, 4, 0, 2, 5, 3]]


@pytest.mark.parametrize("group_score", ["top2", "max"])
@pytest.mark.parametrize("group_fill", ["neg_inf", "zero"])
def test_groups_of_one_expert_are_plain_top_k_of_the_kept(route: Route, group_score: str, group_fill: str) -> None:
    logits, bias = torch.randn(9, 8), torch.randn(8)
    a = {"topk": 3, "scoring": "sigmoid", "renorm": "sum", "eps": 0.2, "scale": 2.5}
    grouped = route(logits, bias + 3, **a, n_group=8, topk_group=5, group_score=group_score, group_fill=group_fill)
    torch.testing.assert_close(grouped, route(logits, bias + 3, **a))


def test_zero_fill_lets_dropped_experts_win_over_negative_choice_scores(route: Route) -> None:
    logits = torch.randn(4, 8)
    bias = torch.full((8,), -2.0)
    a = {"topk": 3, "scoring": "sigmoid", "n_group": 2, "topk_group": 1}
    zero, kept = route(logits, bias, **a, group_fill="zero")[1], route(logits, bias, **a)[1]
    group = kept[:, :1] // 4
    assert (kept // 4 == group).all() and (zero // 4 != group).all()


def test_epsilon_matters_where_all_weights_are_tiny(route: Route) -> None:
    logits = torch.randn(4, 8) - 27
    scores = logits.double().sigmoid()
    for eps in (1e-20, 1e-12, 1e-6):
        for renorm in ("sum", "clamp"):
            weights, idx = route(logits, topk=3, scoring="sigmoid", renorm=renorm, eps=eps, scale=1.9)
            chosen = scores.gather(-1, idx)
            total = chosen.sum(-1, keepdim=True)
            wanted = 1.9 * chosen / (total + eps if renorm == "sum" else total.clamp(min=eps))
            torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=0)


def test_all_zero_weights_divide_as_eager_does(route: Route) -> None:
    logits = torch.full((1, 6), float("-inf"))
    assert route(logits, topk=2, scoring="sigmoid", renorm="sum", eps=0.0)[0].isnan().all()
    assert (route(logits, topk=2, scoring="sigmoid", renorm="sum", eps=1e-9, scale=2.5)[0] == 0).all()


def test_16_bit_logits_are_scored_in_f32(route: Route) -> None:
    """Probabilities in bf16 would collapse into ties and change the experts."""
    logits = (torch.randn(40, 64) * 0.02).bfloat16()
    weights, idx = route(logits, topk=4)
    wanted_weights, wanted = route(logits.float(), topk=4)
    assert torch.equal(idx, wanted) and weights.dtype == torch.float32
    torch.testing.assert_close(weights, wanted_weights)


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 2047, 2048, 2049])
def test_any_number_of_tokens(route: Route, tokens: int) -> None:
    logits = torch.randn(tokens, 12)
    weights, idx = route(logits, topk=3, renorm="sum", eps=0.01, scale=1.5)
    scores, wanted = logits.softmax(-1).topk(3)
    assert weights.shape == idx.shape == (tokens, 3)
    assert torch.equal(idx, wanted)
    torch.testing.assert_close(weights, 1.5 * scores / (scores.sum(-1, keepdim=True) + 0.01))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"topk": 9}, ValueError, "topk is 9, but logits have only 8 experts"),
        ({"topk": 0}, ValueError, "topk is 0; it must be at least 1"),
        (
            {"scoring": "sparsemixer"},
            ValueError,
            "'sparsemixer'; it must be one of 'softmax', 'sigmoid', 'sqrtsoftplus'",
        ),
        ({"select": "weights"}, ValueError, "select is 'weights'; it must be one of 'scores', 'logits'"),
        ({"renorm": "l2"}, ValueError, "renorm is 'l2'; it must be one of 'none', 'sum', 'clamp'"),
        ({"n_group": 3}, ValueError, "n_group is 3; it must divide the 8 experts"),
        ({"n_group": 4, "topk_group": 5}, ValueError, "topk_group is 5; it must be between 1 and n_group, which is 4"),
        ({"n_group": 4, "group_score": "mean"}, ValueError, "group_score is 'mean'"),
        ({"n_group": 4, "group_fill": "one"}, ValueError, "group_fill is 'one'"),
        ({"bias": torch.randn(7)}, ValueError, "the size of bias is 7, but the number of experts of logits is 8"),
        ({"bias": torch.arange(8)}, TypeError, "bias has dtype int64"),
        ({"logits": torch.arange(8).view(1, 8)}, TypeError, "logits has dtype int64; accepted: float32, bfloat16"),
        ({"logits": torch.randn(8)}, ValueError, r"logits has 1 dimensions; it must be \[T, E\]"),
        ({"bias": torch.randn(8, device="meta")}, TypeError, "logits is on cpu, but bias is on meta"),
    ],
)
def test_wrong_arguments_get_one_sentence(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {"logits": torch.randn(3, 8), "bias": None, "topk": 2, **changes}
    with pytest.raises(error, match=text) as caught:
        moe_route(
            arguments["logits"],
            arguments["bias"],
            **{k: v for k, v in arguments.items() if k not in ("logits", "bias")},
        )
    assert str(caught.value).startswith("moe_route: ") and "\n" not in str(caught.value)
    if CPU.unavailable() is None and not any(isinstance(a, Tensor) and a.is_meta for a in arguments.values()):
        rest = {"scoring": "softmax", "select": "scores", "renorm": "none", "eps": 0.0, "scale": 1.0, "n_group": 1}
        groups = {"topk_group": 1, "group_score": "top2", "group_fill": "neg_inf"}
        with pytest.raises((RuntimeError, TypeError)):
            CPU.direct["moe_route"]()(**{**rest, **groups, **arguments})
