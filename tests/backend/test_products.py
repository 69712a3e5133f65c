"""Products are rewritten after routers and experts: forcing them takes nothing away from the larger blocks."""

from __future__ import annotations

import torch

import ascend_deep
from tests.backend.families import LAYERS, build, token_ids

FORCE = ["upcast_matmul", "linear", "grouped_mm"]


def test_routers_and_experts_are_found_as_before():
    models = [build("deepseek_v3", how, torch.bfloat16) for how in ("grouped_mm", "eager")]
    for model in models:  # DeepSeek keeps this weight in float32; as a checkpoint in bfloat16 has it, it is upcast
        model.to(torch.bfloat16)
    run = torch.compile(
        models[0], backend="ascend_deep", fullgraph=True, options={"downstream": "eager", "force": FORCE}
    )
    ids = token_ids(2, 9)
    with torch.no_grad():
        got, want = run(ids).logits.float(), models[1](ids).logits.float()
    report = ascend_deep.last_report()
    counts = report.counts()
    assert counts["moe_route"] == counts["moe_experts"] == LAYERS, str(report)
    upcast = [m for m in report.matches if m.recogniser == "upcast_matmul"]
    assert len(upcast) == LAYERS
    assert all("float32" in m.spec and m.module.endswith("gate") for m in upcast)
    assert sum(m.recogniser == "linear" for m in report.matches) > 4 * LAYERS
    error = (got - want).abs().amax(-1) / want.abs().max()
    assert float(error.median()) < 0.02, error
