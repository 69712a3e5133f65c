"""With ``dynamic=True`` Dynamo passes sizes as inputs of their own; a block that reads one is still a block."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import ascend_deep


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_sizes_that_are_inputs_do_not_stop_the_experts(implementation: str) -> None:
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        moe_intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM._from_config(config, experts_implementation=implementation).eval()
    compiled = torch.compile(
        model, backend="ascend_deep", fullgraph=True, dynamic=True, options={"downstream": "eager"}
    )
    reports = []
    with torch.no_grad():
        for shape in ((2, 9), (3, 5), (1, 11)):
            tokens = torch.randint(96, shape)
            torch.testing.assert_close(compiled(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)
            reports.append(ascend_deep.last_report())
    for report in reports:
        assert report is not None
        assert report.counts() == {"moe_experts": 1, "moe_route": 1}, [m.reason for m in report.misses]
    assert reports[0] is reports[1]
    assert reports[0].graphs[0].dynamic
