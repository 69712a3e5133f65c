"""explain and assert_fused, end to end on small models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ascend_deep
from ascend_deep import Report
from ascend_deep.lowering import _dynamo_compat
from ascend_deep.testing import assert_fused
from tests.front.conftest import BreakingModel, Router

ROUTER = {"enable": ["router"]}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class TwoRouters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Router(experts=e) for e in (8, 12))

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [block(x) for block in self.blocks]


class WrongDim(Router):
    """A near miss: softmax over tokens."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, idx = self.gate(x).softmax(0).topk(self.top_k, -1)
        return weights / weights.sum(-1, keepdim=True), idx


def test_a_router_is_found_with_place_provider_and_certificate() -> None:
    model = TwoRouters()
    with torch.no_grad():
        report = ascend_deep.explain(model, torch.randn(7, 16), options=ROUTER)
    assert report.counts() == {"moe_route": 2}
    first = report.matches[0]
    assert first.module == "blocks.0" and first.source.startswith("conftest.py:") and first.provider
    assert report.certificate(first.certificate) is not None
    assert report.model == "TwoRouters" and report.modules["blocks.1.gate"] == "Linear"
    assert not report.training and report.graphs[0].device == "cpu"
    assert ascend_deep.last_report() == report
    assert Report.from_json(report.to_json()) == report
    assert all(seconds >= 0 for seconds in report.timings.values()) and "everything else" in report.timings


def test_under_the_callers_grad_mode(router: Router) -> None:
    report = ascend_deep.explain(router, torch.randn(7, 16), options=ROUTER)
    assert report.training and report.counts() == {"moe_route": 1}


def test_a_near_miss_is_refused_with_a_sentence() -> None:
    report = ascend_deep.explain(WrongDim(), torch.randn(7, 16), options=ROUTER)
    assert report.counts() == {}
    (miss,) = report.misses
    assert miss.recogniser == "router" and miss.reason.endswith(".") and len(miss.reason.split()) > 4


def test_breaks_in_an_expert_loop_carry_the_hint(breaking: BreakingModel) -> None:
    with torch.no_grad():
        report = ascend_deep.explain(breaking, torch.randn(7, 16), options=ROUTER)
    assert report.graph_breaks
    first = report.graph_breaks[0]
    assert first.source.startswith("conftest.py:") and "ascend_deep.prepare(model)" in first.hint
    assert "\n" not in first.reason
    assert report.counts() == {"moe_route": 1}


def test_a_break_elsewhere_has_no_hint() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    report = ascend_deep.explain(f, torch.randn(4))
    assert [b.hint for b in report.graph_breaks] == [""] and report.model == "f"


def test_explain_is_never_answered_from_an_older_compile(router: Router) -> None:
    x = torch.randn(7, 16)
    user = torch.compile(router, backend="ascend_deep", options={**ROUTER, "downstream": "eager"})
    user(x)
    for _ in range(10):  # more often than the recompile limit
        assert ascend_deep.explain(router, x, options=ROUTER).counts() == {"moe_route": 1}


def test_explain_leaves_the_users_compiles_alone(router: Router) -> None:
    x = torch.randn(7, 16)
    compiles: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        compiles.append(1)
        return gm.forward

    user = torch.compile(router, backend=backend)
    user(x)
    for _ in range(3):
        ascend_deep.explain(router, x, options=ROUTER)
    user(x)
    assert compiles == [1]
    if _dynamo_compat.isolated():
        for n in (3, 4, 5):
            user(torch.randn(n, 16))
        assert len(compiles) <= 3  # static, then dynamic: the limit was not used up


def test_random_state_is_put_back(router: Router) -> None:
    model = nn.Sequential(nn.Dropout(0.5), router)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    ascend_deep.explain(model, torch.randn(0, 16).new_ones(7, 16), options=ROUTER)
    assert torch.equal(torch.rand(3), wanted)


def test_a_compiled_model_is_explained_like_its_original(router: Router) -> None:
    compiled = torch.compile(router, backend="eager")
    report = ascend_deep.explain(compiled, torch.randn(7, 16), options=ROUTER)
    assert report.model == "Router" and report.counts() == {"moe_route": 1}


def test_plan_for_a_target_that_is_not_there(router: Router) -> None:
    report = ascend_deep.explain(router, torch.randn(7, 16), options={**ROUTER, "target": "ascend950"})
    assert report.target == "ascend950" and report.counts() == {"moe_route": 1}
    assert any("not executed on that hardware" in note for note in report.notes)


def test_report_option_writes_the_file_with_breaks(breaking: BreakingModel, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = ascend_deep.explain(breaking, torch.randn(7, 16), options={**ROUTER, "report": str(path)})
    assert Report.from_json(path.read_text()) == report


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="explain: model is a int"):
        ascend_deep.explain(3)  # type: ignore[arg-type]
    with pytest.raises(ascend_deep.OptionsError, match="targets"):
        ascend_deep.explain(nn.Linear(2, 2), torch.randn(1, 2), options={"targets": "cpu"})


def test_errors_of_the_model_come_through(router: Router) -> None:
    with pytest.raises(Exception, match=r"17|shape"):
        ascend_deep.explain(router, torch.randn(7, 17))


# -- assert_fused -----------------------------------------------------------------------------------------------------
def test_assert_fused_passes_and_returns_the_report() -> None:
    report = assert_fused(TwoRouters(), torch.randn(7, 16), expect={"moe_route": 2, "swiglu": 0}, options=ROUTER)
    assert report.counts() == {"moe_route": 2}


def test_assert_fused_says_what_is_missing_and_why() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_fused(WrongDim(), torch.randn(7, 16), expect={"moe_route": 1}, options=ROUTER)
    text = str(caught.value)
    assert "WrongDim does not fuse as expected" in text and "moe_route: 0 fused, 1 expected   <--" in text
    assert "left as written, 1× router" in text


def test_assert_fused_is_exact(router: Router) -> None:
    with pytest.raises(AssertionError, match="moe_route: 1 fused, 0 expected"):
        assert_fused(router, torch.randn(7, 16), expect={}, options=ROUTER)


def test_assert_fused_shows_graph_breaks(breaking: BreakingModel) -> None:
    with pytest.raises(AssertionError, match=r"graph break.*\n.*prepare"):
        assert_fused(breaking, torch.randn(7, 16), expect={"moe_experts": 1}, options=ROUTER)


def test_assert_fused_wants_numbers() -> None:
    with pytest.raises(TypeError, match="mapping of op names"):
        assert_fused(nn.Linear(2, 2), torch.randn(1, 2), expect=["moe_route"])  # type: ignore[arg-type]
