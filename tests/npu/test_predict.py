"""Notes of a plan: per fused op the bound and the figure, marked as predicted; symbolic tokens stay symbolic."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import ascend_deep

PLAN = {"target": "ascend910b", "downstream": "eager", "enable": ["router"]}


def router(x: torch.Tensor) -> Any:
    weights, idx = x.softmax(-1).topk(3, -1)
    return weights / weights.sum(-1, keepdim=True), idx


def test_a_plan_predicts_and_says_so() -> None:
    report = ascend_deep.explain(router, torch.randn(4096, 64), options=PLAN)
    (note,) = [n for n in report.notes if n.startswith("moe_route on Ascend910B2")]
    seconds = (4 * 4096 * 64 + 12 * 4096 * 3) / (24 * 32 * 1.8e9)
    assert f"at least {seconds * 1e6:.3g} us predicted, bound by memory; not measured" in note
    assert "8*E*T operations" in note and "T = 4096, E = 64, K = 3" in note
    assert str(report).count("not measured") == 1


@pytest.mark.parametrize("target", ["auto", "cpu", "cuda"])
def test_only_plans_for_ascend_predict(target: str) -> None:
    report = ascend_deep.explain(router, torch.randn(7, 16), options={**PLAN, "target": target})
    assert report.counts() == {"moe_route": 1} and not any("predicted" in n for n in report.notes)


def test_a_symbolic_number_of_tokens_stays_in_the_formula() -> None:
    compiled = torch.compile(router, backend="ascend_deep", options=PLAN, dynamic=True)
    x = torch.randn(9, 16)
    torch._dynamo.mark_static(x, 1)
    compiled(x)
    report = ascend_deep.last_report()
    assert report is not None
    (note,) = [n for n in report.notes if n.startswith("moe_route on Ascend910B2")]
    expected = (
        r"at least [\d.e-]+\*s\d+ s predicted, bound by compute or memory; not measured, .* with T = s\d+, E = 16"
    )
    assert re.search(expected, note), note
