"""Ten families, fused whole: every MoE layer's router and experts, equal to eager, inference and training."""

from __future__ import annotations

import pytest
import torch

import ascend_deep
from tests.backend.families import FAMILIES, LAYERS, OWN_EXPERTS, build, token_ids

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "prepared")
CELLS = [(f, i) for f in FAMILIES for i in IMPLEMENTATIONS if f not in OWN_EXPERTS or i == "grouped_mm"]
# Families whose calls of the ops differ in which tensors there are: a bias in the router or the experts, weights on the
# input. In the other families only numbers and names differ, which ride along.
UNLIKE = ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text")
# Routers meet symbolic sizes in all families, experts of every family and form in passes/test_experts_hf.py.
SHAPES = [
    pytest.param(f, i, dynamic, id=f"{f}-{i}-{'dynamic' if dynamic else 'static'}")
    for f, i in CELLS
    for dynamic in (False, True)
    if not dynamic or i == "grouped_mm" or f in UNLIKE
]


def _compiled(family, implementation, dtype=torch.float32, downstream="aot_eager", **kwargs):
    model = build(family, "eager" if implementation == "prepared" else implementation, dtype)
    reference = build(family, "eager", dtype)
    if implementation == "prepared":
        ascend_deep.prepare(model)
    run = torch.compile(model, backend="ascend_deep", fullgraph=True, options={"downstream": downstream}, **kwargs)
    return run, model, reference


def _assert_fused() -> None:
    """Every layer's router and experts; ``prepare`` puts the experts' op into the graph itself."""
    report = ascend_deep.last_report()
    assert {k: report.counts().get(k) for k in ("moe_route", "moe_experts")} == dict.fromkeys(
        ("moe_route", "moe_experts"), LAYERS
    ), str(report)


@pytest.mark.parametrize(("family", "implementation", "dynamic"), SHAPES)
def test_inference(family, implementation, dynamic):
    # AOT Autograd takes as long as all the rest, with symbolic sizes more, and meets the same calls of the ops in every
    # implementation. Where it does not run, the rewritten graph runs as it is.
    through_aot = implementation == "grouped_mm" and (not dynamic or family in UNLIKE)
    downstream = "aot_eager" if through_aot else "eager"
    run, _, reference = _compiled(family, implementation, dynamic=dynamic, downstream=downstream)
    ids = token_ids(2, 9)
    with torch.no_grad():
        got, want = run(ids).logits, reference(ids).logits
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    _assert_fused()


@pytest.mark.parametrize(("family", "implementation"), CELLS)
def test_training(family, implementation):
    downstream = "aot_eager" if implementation == "grouped_mm" else "eager"
    run, model, reference = _compiled(family, implementation, downstream=downstream)
    ids = token_ids(2, 9)
    for m in (run, reference):
        m(ids, labels=ids).loss.backward()
    _assert_fused()
    wanted = dict(reference.named_parameters())
    moved = 0
    for name, parameter in model.named_parameters():
        want = wanted[name].grad
        if want is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        scale = want.abs().max().clamp_min(1e-6)
        torch.testing.assert_close(
            parameter.grad / scale, want / scale, rtol=2e-3, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
        moved += bool(want.any())
    assert moved > 8


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in OWN_EXPERTS])
def test_bfloat16(family):
    run, _, reference = _compiled(family, "grouped_mm", torch.bfloat16, "eager")
    ids = token_ids(2, 9)
    with torch.no_grad():
        got, want = run(ids).logits.float(), reference(ids).logits.float()
    _assert_fused()
    # A token whose two best experts are a rounding step apart may go elsewhere; most tokens must agree closely.
    error = (got - want).abs().amax(-1) / want.abs().max()
    assert float(error.median()) < 0.02, error
