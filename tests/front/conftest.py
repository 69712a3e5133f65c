"""Fixtures of the front-door tests: a report with everything in it, and small models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ascend_deep.passes._types import Certificate, Match, Miss, Outcome
from ascend_deep.report import GraphBreak, GraphInfo, Report

LAYERS = 3


class Router(nn.Module):
    """softmax, top-k, renormalise: what the recogniser ``router`` fuses."""

    def __init__(self, hidden: int = 16, experts: int = 8, top_k: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts)
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, idx = self.gate(x).softmax(-1).topk(self.top_k, -1)
        return weights / weights.sum(-1, keepdim=True), idx


class LoopExperts(nn.Module):
    """A Python loop over experts that depends on data: breaks the graph."""

    def __init__(self, hidden: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(experts))

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(len(self.layers)):
            token, slot = torch.where(idx == e)
            if token.numel() == 0:
                continue
            out = out.index_add(0, token, self.layers[e](x[token]) * weights[token, slot, None])
        return out


class BreakingModel(nn.Module):
    """A router and a loop that breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(experts=4)
        self.experts = LoopExperts()

    def forward(self, x: Tensor) -> Tensor:
        weights, idx = self.router(x)
        return self.experts(x, idx, weights)


@pytest.fixture
def router() -> Router:
    torch.manual_seed(3)
    return Router()


@pytest.fixture
def breaking() -> BreakingModel:
    torch.manual_seed(4)
    return BreakingModel()


@pytest.fixture
def outcome() -> Outcome:
    certificate = Certificate(
        key="aa11bb22cc33dd44",
        recogniser="router",
        op="moe_route",
        attrs={"topk": 3, "limit": None, "pair": (2, 2.5), "dtype": torch.bfloat16, "low": -math.inf, "on": True},
        seeds=(4, 9),
        cases=("ties", "one token"),
        max_error=1.5e-7,
        tolerance={"rtol": 1e-5, "atol": 1e-6, "reason": "float32 sums in another order"},
        verify="probe",
        program={"steps": [["aten.topk", [{"float": "inf"}, None, 3, [1, 2]], {"sorted": True}]], "results": [0]},
        versions={"torch": "2.13.0"},
    )
    matches, misses, unclaimed = [], [], {"model.embed_tokens": 1}
    for i in range(LAYERS):
        block = f"model.layers.{i}.mlp"
        spec = "moe_route(topk=3, renorm=sum)"
        matches.append(
            Match("router", "moe_route", 1, f"{block}.gate", "r.py:7", "native.cpu", 1.5e-7, certificate.key, spec)
        )
        error, why = 3e-7 * (i + 1), ("native.cpu: float16 weights are not supported.",)
        place = (f"{block}.experts", "e.py:40", "reference", error, f"key{i}", "moe_experts(act=silu)")
        matches.append(Match("experts_grouped", "moe_experts", 1, *place, 1, ("biases are views.",), why))
        misses.append(
            Miss(
                "swiglu",
                f"{block}.shared",
                "s.py:12",
                "gate & up are <added>, not multiplied.",
                "Write act(gate) * up.",
            )
        )
        unclaimed[f"model.layers.{i}.attention"] = 24
    timings = {"capture": 0.31, "probe": 0.0021, "downstream": 3.4}
    return Outcome(tuple(matches), tuple(misses), (certificate,), timings, unclaimed)


@pytest.fixture
def report(outcome: Outcome) -> Report:
    modules = {
        "": "TinyMoeForCausalLM",
        "model": "TinyMoe",
        "model.embed_tokens": "Embedding",
        "model.layers": "ModuleList",
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        modules |= {layer: "Layer", f"{layer}.attention": "Attention", f"{layer}.mlp": "Block"}
        modules |= {f"{layer}.mlp.{n}": n.title() for n in ("gate", "experts", "shared")}
        modules[f"{layer}.mlp.experts.act_fn"] = "SiLU"
    info = GraphInfo(nodes=300, nodes_after=117, training=True, device="cpu", target="ascend950", planned=True)
    made = Report(model="TinyMoeForCausalLM", modules=modules).with_graph(outcome, info)
    return replace(made, graph_breaks=(GraphBreak("data-dependent: aten.nonzero", "loop.py:79", "Call prepare.", 2),))


@pytest.fixture
def make_outcome() -> Callable[..., Outcome]:
    def make(op: str = "swiglu", module: str = "mlp", seconds: float = 0.5) -> Outcome:
        match = Match("swiglu", op, 1, module, "m.py:1", "reference", 0.0, "c1", f"{op}()")
        return Outcome(matches=(match,), timings={"capture": seconds}, unclaimed={module: 2})

    return make
