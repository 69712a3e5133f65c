"""Tiny random models of the families that the backend must fuse whole, with routing that tests something.

Correction biases and scales are set to values that matter: a bias that stays zero and a factor of one hide mistakes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ascend_deep.models import load

# family: fields beside the small defaults
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"norm_topk_prob": True},
    "qwen3_moe": {"norm_topk_prob": True},
    "olmoe": {},
    "deepseek_v2": {"routed_scaling_factor": 2.5, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {"routed_scaling_factor": 2.5},
    "glm4_moe": {"routed_scaling_factor": 1.7},
    "gpt_oss": {},
    "llama4_text": {"interleave_moe_layer_step": 1, "num_experts_per_tok": 1},
    "granitemoe": {},
}
# Llama-4 has its own experts, the other families all implementations.
OWN_EXPERTS = ("llama4_text",)
LAYERS = 2


def build(family: str, implementation: str | None = "grouped_mm", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of ``family`` with ``LAYERS`` MoE layers, random weights, biases and scales."""
    fields = dict(FAMILIES[family])
    chosen = None if family in OWN_EXPERTS else implementation
    name = str(dtype).removeprefix("torch.")
    model = load(family, layers=LAYERS, dtype=name, fields=fields, experts_implementation=chosen).model
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in name and tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
            elif "experts" in name or "gate.weight" in name or "router" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model


def token_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, length]."""
    return torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(seed))
