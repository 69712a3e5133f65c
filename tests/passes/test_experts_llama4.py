"""Llama-4: every expert on every token, scattered scores multiplied onto the input. Experts and router are fused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from experts_blocks import EXPERTS, assert_near, compiled
from torch import nn

modeling = pytest.importorskip("transformers.models.llama4.modeling_llama4")

HIDDEN = 32


def block(slots: int, dtype: torch.dtype) -> nn.Module:
    config = SimpleNamespace(
        hidden_size=HIDDEN, intermediate_size=24, num_local_experts=6, num_experts_per_tok=slots, hidden_act="silu",
    )  # fmt: skip
    moe = modeling.Llama4TextMoe(config)
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.4)
    return moe.to(dtype)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("slots", [1, 2])
def test_experts_and_router(slots, dtype, dynamic):
    moe, x = block(slots, dtype), torch.randn(2, 5, HIDDEN, dtype=dtype)
    with torch.no_grad():
        got, run = compiled(moe, x, dynamic=dynamic, recognisers=(*EXPERTS, "router"))
        want = moe(x)
    assert sorted(m.op for m in run.outcome.matches) == ["moe_experts", "moe_route"], run.reasons
    attrs = run.op().kwargs
    assert attrs["weight_on_input"] is True and attrs["weight_layout"] == "ekn" and attrs["act"] == "silu"
    assert run.op("moe_route").kwargs["scoring"] == "sigmoid"
    assert not any("bmm" in str(n.target) for n in run.graphs[-1].graph.nodes)
    assert_near(got[0], want[0], dtype)


def test_training():
    moe, x = block(2, torch.float32), torch.randn(1, 7, HIDDEN)
    (got, _), run = compiled(moe, x, recognisers=(*EXPERTS, "router"))
    want, _ = moe(x)
    assert len(run.outcome.matches) == 2
    seed, parameters = torch.randn_like(want), list(moe.parameters())
    for a, b in zip(
        torch.autograd.grad(got, parameters, seed), torch.autograd.grad(want, parameters, seed), strict=True
    ):
        assert_near(a, b, torch.float32)
