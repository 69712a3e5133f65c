"""Ten families, fused whole: every MoE layer's router and experts, equal to eager, inference and training."""

from __future__ import annotations

import pytest
import torch

import ascend_deep
from tests.backend.families import FAMILIES, LAYERS, OWN_EXPERTS, build, token_ids

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "prepared")
CELLS = [(f, i) for f in FAMILIES for i in IMPLEMENTATIONS if f not in OWN_EXPERTS or i == "grouped_mm"]


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


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("family", "implementation"), CELLS)
def test_inference(family, implementation, dynamic):
    # AOT Autograd with symbolic sizes takes as long as all the rest. It meets the same ops in every implementation, so
    # it runs in one of them; the others run the rewritten graph as it is.
    downstream = "aot_eager" if implementation == "grouped_mm" or not dynamic else "eager"
    run, _, reference = _compiled(family, implementation, dynamic=dynamic, downstream=downstream)
    ids = token_ids(2, 9)
    with torch.no_grad():
        got, want = run(ids).logits, reference(ids).logits
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    _assert_fused()


@pytest.mark.parametrize(("family", "implementation"), CELLS)
def test_training(family, implementation):
    run, model, reference = _compiled(family, implementation)
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
    run, _, reference = _compiled(family, "grouped_mm", torch.bfloat16)
    ids = token_ids(2, 9)
    with torch.no_grad():
        got, want = run(ids).logits.float(), reference(ids).logits.float()
    _assert_fused()
    # A token whose two best experts are a rounding step apart may go elsewhere; most tokens must agree closely.
    error = (got - want).abs().amax(-1) / want.abs().max()
    assert float(error.median()) < 0.02, error


def test_inductor_is_the_default_downstream():
    model, reference = build("qwen3_moe"), build("qwen3_moe", "eager")
    ids = token_ids(2, 9)
    with torch.no_grad():
        got = torch.compile(model, backend="ascend_deep", fullgraph=True)(ids).logits
        torch.testing.assert_close(got, reference(ids).logits, rtol=2e-4, atol=2e-4)
    report = ascend_deep.last_report()
    assert report.counts() == {"moe_experts": LAYERS, "moe_route": LAYERS}, str(report)
    assert report.graphs[0].downstream == "inductor"
