"""How to pin what is fused in a model of yours, so that a change of the model or of a package cannot undo it unseen.

    python -m pytest examples/graph_capture_test.py

Nothing here is timed and no accelerator is needed: the tests compile tiny random models on the CPU, in a second or
two each. ``expect`` is exact. When it does not hold, the error names the ops, the places that were refused, and why.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from ascend_deep.testing import assert_fused

TOKENS = torch.randint(128, (2, 9), generator=torch.Generator().manual_seed(3))


def mixtral(**changes: object) -> MixtralForCausalLM:
    """A Mixtral of two tiny layers."""
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=3,
        use_cache=False,
        **changes,
    )
    return MixtralForCausalLM(config).eval()


def test_inference_fuses_every_layer() -> None:
    with torch.no_grad():
        assert_fused(mixtral(), TOKENS, expect={"moe_route": 2, "moe_experts": 2})


def test_training_fuses_every_layer_and_the_graph_has_no_breaks() -> None:
    report = assert_fused(mixtral().train(), TOKENS, labels=TOKENS, expect={"moe_route": 2, "moe_experts": 2})
    assert report.training and not report.graph_breaks


def test_plan_for_hardware_that_is_not_here() -> None:
    """What would run on an Ascend 950: recognition and limits are those of the target, the ops run here."""
    with torch.no_grad():
        report = assert_fused(
            mixtral(), TOKENS, options={"target": "ascend950"}, expect={"moe_route": 2, "moe_experts": 2}
        )
    assert report.target == "ascend950"


class Block(nn.Module):
    """A MoE block that somebody wrote by hand: softmax over the chosen scores, experts by gathered weights."""

    def __init__(self, scores: str = "softmax") -> None:
        super().__init__()
        self.scores = scores
        self.gate = nn.Linear(32, 6, bias=False)
        self.up = nn.Parameter(torch.randn(6, 40, 32) / 6)
        self.down = nn.Parameter(torch.randn(6, 32, 20) / 5)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        top, idx = logits.topk(2, dim=-1)
        weights = F.softmax(top, dim=-1) if self.scores == "softmax" else top / (1 + top.abs())
        gate, up = torch.einsum("th,tknh->tkn", x, self.up[idx]).chunk(2, dim=-1)
        out = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.down[idx])
        return (out * weights[..., None]).sum(1)


def test_a_block_of_your_own() -> None:
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        assert_fused(Block().eval(), x, expect={"moe_route": 1, "moe_experts": 1})


def test_what_a_failure_says() -> None:
    """Softsign is no router that we know. The experts are still fused; the router is not, and the error says so."""
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad(), pytest.raises(AssertionError, match="moe_route: 0 fused, 1 expected"):
        assert_fused(Block("softsign").eval(), x, expect={"moe_route": 1, "moe_experts": 1})
