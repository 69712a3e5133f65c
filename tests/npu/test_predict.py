"""Notes of a plan: per fused op the bound and the figure, marked as predicted; symbolic tokens stay symbolic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import ascend_deep
from ascend_deep import _predict, ops, passes
from ascend_deep.lowering import targets

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


# Calls in which every operand is read once and every result written once: the formula is what the tensors hold.
EXACT = (
    *("gemm_bf16", "einsum_bf16", "m_grouped_gemm_bf16", "k_grouped_gemm_bf16", "gemm_scaled", "m_grouped_gemm_scaled"),
    "quant_fp8",
)


def _node_of(name: str, sample: ops.Sample) -> tuple[fx.Node, list[torch.Tensor]]:
    """A call of the op in a graph with fake values, and the tensors that go in and come out."""
    graph = fx.Graph()
    values = [torch.empty_like(a, device="meta") if isinstance(a, torch.Tensor) else a for a in sample.args]
    args = []
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            args.append(graph.placeholder(f"a{i}"))
            args[-1].meta["val"] = value
        else:
            args.append(value)
    node = graph.call_function(ops.op(name).overload, tuple(args), dict(sample.kwargs))
    node.meta["val"] = ops.op(name).overload(*values, **sample.kwargs)
    out = node.meta["val"] if isinstance(node.meta["val"], tuple) else (node.meta["val"],)
    return node, [t for t in (*values, *out) if isinstance(t, torch.Tensor)]


def _is_exact(name: str, sample: ops.Sample, sizes: dict[str, Any]) -> bool:
    """Whether each number of the call is moved once, and nothing is added."""
    if name == "quant_fp8":
        return bool(sample.kwargs["sf_format"] == "fp32")
    added = {"gemm_bf16": 2, "einsum_bf16": 2, "gemm_scaled": 4, "k_grouped_gemm_bf16": 3}.get(name)
    return (
        name in EXACT
        and (added is None or sample.args[added] is None)
        and (not name.startswith("m_grouped") or sizes["G"] <= sizes["M"])
    )


@pytest.mark.parametrize("name", _predict._SIZES)
def test_a_formula_has_every_size_it_needs_and_counts_what_is_there(name: str) -> None:
    checked = 0
    for sample in ops.op(name).samples():
        node, tensors = _node_of(name, sample)
        sizes = _predict.sizes_of(node)
        cost = targets.cost(name, **sizes)
        assert cost.flops.is_number and cost.bytes.is_number, (sample.name, sizes, cost)
        if all(t.numel() for t in tensors):
            assert cost.flops > 0 and cost.bytes > 0
            if _is_exact(name, sample, sizes):
                layout = tensors[-2] if "grouped" in name else None
                held = [t for t in tensors if t is not layout]
                assert int(cost.bytes) == sum(t.numel() * t.itemsize for t in held), (sample.name, sizes)
                checked += 1
    assert (checked >= 2) == (name in EXACT)


def test_every_op_that_a_recogniser_emits_has_a_formula() -> None:
    source = "".join(f.read_text() for f in Path(passes.__path__[0]).glob("*.py"))
    emitted = set(re.findall(r"ops\.ascend_deep\.(\w+)", source)) - {"shadow_select"}
    assert len(emitted) > 8 and emitted <= set(targets.COSTS) == set(_predict._SIZES), emitted
