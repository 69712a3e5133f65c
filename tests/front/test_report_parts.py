"""Parts that look like a mixture of experts and that no recogniser claims, and notes of single places."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import ascend_deep
from ascend_deep.passes._types import Match, Miss
from ascend_deep.report import GraphInfo, OwnCall, Report
from ascend_deep.report_parts import unclaimed_parts
from tests.front.conftest import BreakingModel, Router

ROUTER = {"enable": ["router"], "downstream": "eager"}
MODULES = {
    "": "SwitchForCausalLM",
    "layers.0": "SwitchMoeDecoderLayer",
    "layers.0.attention": "SwitchMoeAttention",
    "layers.0.mlp": "SwitchSparseMLP",
    "layers.0.mlp.router": "SwitchTop1Router",
    "layers.0.mlp.experts": "SwitchExperts",
    "layers.1.mlp": "SwitchMoeMLP",
}


def _report(*, matches: tuple[Match, ...] = (), misses: tuple[Miss, ...] = (), **info: object) -> Report:
    return Report(graphs=(GraphInfo(modules=MODULES, **info),), matches=matches, misses=misses)  # type: ignore[arg-type]


def _match(recogniser: str, op: str, module: str) -> Match:
    return Match(recogniser, op, 1, module, "m.py:1", "reference", 0.0, "c1", f"{op}()")


def test_the_outermost_module_that_nobody_speaks_about_is_listed() -> None:
    report = _report()
    assert unclaimed_parts(report) == {"layers.0.mlp": "SwitchSparseMLP"}
    assert "1× SwitchSparseMLP  layers.0.mlp: it looks like" in str(report)
    assert "Parts that no recogniser claims" in report.to_html()
    assert json.loads(report.to_json())["parts"] == {"layers.0.mlp": "SwitchSparseMLP"}
    assert Report.from_json(report.to_json()) == report


ROUTED = _match("router", "moe_route", "layers.0.mlp.router")
FUSED = _match("experts_batched", "moe_experts", "layers.0.mlp.experts")


@pytest.mark.parametrize(
    ("report", "left"),
    [
        (_report(matches=(ROUTED, FUSED)), []),
        (_report(matches=(ROUTED,)), ["layers.0.mlp.experts"]),
        (_report(matches=(FUSED,)), ["layers.0.mlp.router"]),
        (_report(matches=(replace(ROUTED, module="layers.0.mlp"), FUSED)), []),
        (_report(matches=(ROUTED,), misses=(Miss("experts_grouped", "layers.0.mlp.experts", "", "no."),)), []),
        (_report(matches=(ROUTED,), own_calls=(OwnCall("moe_experts", "layers.0.mlp.experts", ""),)), []),
        (_report(matches=(ROUTED,), own_calls=(OwnCall("m_grouped_gemm_scaled", "layers.0.mlp.experts", ""),)), []),
        (
            _report(matches=(ROUTED,), own_calls=(OwnCall("gemm_scaled", "layers.0.mlp.experts", ""),)),
            ["layers.0.mlp.experts"],
        ),
        (_report(matches=(_match("swiglu", "swiglu", "layers.0.mlp.experts"),)), ["layers.0.mlp"]),
        (_report(misses=(Miss("router", "layers.0.mlp.router", "", "no."),)), ["layers.0.mlp.experts"]),
    ],
)
def test_a_claim_speaks_for_its_kind(report: Report, left: list[str]) -> None:
    assert list(unclaimed_parts(report)) == left


class _Top1Router(Router):
    """Chooses in a way that no recogniser looks for."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores = self.gate(x).sigmoid()
        best = (scores == scores.amax(-1, keepdim=True)).to(x.dtype)
        return scores * best, best


def test_a_model_that_nothing_speaks_about() -> None:
    report = ascend_deep.explain(nn.Sequential(nn.Linear(16, 16), _Top1Router()), torch.randn(5, 16))
    assert report.counts() == {} and report.misses == ()
    assert unclaimed_parts(report) == {"1": "_Top1Router"}


def test_switch_transformers_is_not_passed_over_in_silence() -> None:
    """One of its parts breaks the graph; of the other nothing was said at all."""
    config = pytest.importorskip("transformers").SwitchTransformersConfig(
        d_model=16, d_ff=24, num_experts=4, num_heads=2, d_kv=8, expert_capacity=5
    )
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    with torch.no_grad():
        report = ascend_deep.explain(SwitchTransformersSparseMLP(config).eval(), torch.randn(2, 7, 16))
    claimed = {m.recogniser for m in (*report.matches, *report.misses)}
    assert "router" in claimed or unclaimed_parts(report) == {"router": "SwitchTransformersTop1Router"}
    assert any(b.hint for b in report.graph_breaks) or any(r.startswith("experts") for r in claimed)


@pytest.mark.parametrize(("dtype", "told"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_a_gate_in_half_precision_carries_the_note_about_ties(dtype: torch.dtype, told: bool) -> None:
    class Gate(Router):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            weights, idx = self.gate(x).float().softmax(-1).topk(self.top_k, -1)
            return weights / weights.sum(-1, keepdim=True), idx

    (match,) = ascend_deep.explain(Gate().to(dtype), torch.randn(7, 16).to(dtype), options=ROUTER).matches
    name = str(dtype).removeprefix("torch.")
    assert any(f"the gate computes in {name}, where experts often have equal" in n for n in match.notes) == told


def test_sizes_that_others_use_are_no_news(router: Router) -> None:
    x = torch.randn(6, 16)
    torch._dynamo.mark_dynamic(x, 0)
    model = nn.ModuleList([router, Router()])

    def run(x: Tensor) -> Tensor:
        first, second = model[0](x), model[1](x)
        return first[0].view(x.shape[0], -1) + second[0].reshape(x.size(0), 3)

    report = ascend_deep.explain(run, x, options=ROUTER)
    assert report.graphs[0].dynamic and [m.outside_users for m in report.matches] == [0, 0]


def test_values_that_others_need_are_said_to_be_computed_still() -> None:
    class Both(Router):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            scores = self.gate(x).softmax(-1)
            weights, idx = scores.topk(self.top_k, -1)
            return weights / weights.sum(-1, keepdim=True), idx, scores.mean(0)

    report = ascend_deep.explain(Both(), torch.randn(7, 16), options=ROUTER)
    sentence = "1 value inside is needed elsewhere as well and is still computed for that."
    assert report.counts() == {"moe_route": 1}
    assert sentence in str(report) and sentence in report.to_html()


# -- what a plain compile says ----------------------------------------------------------------------------------------
def test_a_broken_expert_loop_is_a_warning_once(breaking: BreakingModel, caplog: pytest.LogCaptureFixture) -> None:
    from ascend_deep import backend

    backend._BREAKS = backend._Breaks()
    for _ in range(2):
        torch._dynamo.reset()
        with torch.no_grad(), caplog.at_level(logging.WARNING, "ascend_deep"):
            torch.compile(breaking, backend="ascend_deep", options=ROUTER)(torch.randn(7, 16))
    told = [r for r in caplog.records if "ascend_deep.prepare(model)" in r.getMessage()]
    assert [r.levelno for r in told] == [logging.WARNING]
    assert "inside a loop over experts at conftest.py:" in told[0].getMessage()


def test_another_break_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    def f(x: Tensor) -> Tensor:
        y = x.softmax(-1).topk(2, -1)[0]
        torch._dynamo.graph_break()
        return y.cos()

    with caplog.at_level(logging.WARNING, "ascend_deep"):
        torch.compile(f, backend="ascend_deep", options=ROUTER)(torch.randn(4, 8))
    assert not [r for r in caplog.records if "prepare" in r.getMessage()]


def test_a_plain_compile_tells_the_time_of_the_compiler_below(router: Router) -> None:
    torch.compile(router, backend="ascend_deep", options=ROUTER)(torch.randn(7, 16))
    timings = ascend_deep.last_report().timings  # type: ignore[union-attr]
    assert {"capture", "recognise", "downstream"} <= set(timings) and timings["downstream"] >= 0


def test_a_first_call_without_tokens_says_so_and_the_next_call_fuses(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    run = torch.compile(router, backend="ascend_deep", options=ROUTER)
    with caplog.at_level(logging.WARNING, "ascend_deep"):
        weights, idx = run(torch.randn(0, 16))
    assert weights.shape == idx.shape == (0, 3)
    report = ascend_deep.last_report()
    assert report is not None and report.counts() == {}
    assert [m.reason for m in report.misses] == [
        "this graph is for calls without tokens (a size is 0), where there is nothing to compute; the first call with "
        "tokens compiles another graph."
    ]
    assert caplog.records == []
    x = torch.randn(9, 16)
    for got, want in zip(run(x), router(x), strict=True):
        torch.testing.assert_close(got, want)
    assert ascend_deep.last_report().counts() == {"moe_route": 1}  # type: ignore[union-attr]
