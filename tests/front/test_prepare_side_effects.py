"""``prepare`` runs modules to learn what they compute; afterwards they are as they were."""

from __future__ import annotations

import torch
from torch import nn

import ascend_deep
from ascend_deep.coverage import build
from ascend_deep.coverage.families import find


def _plain(model: nn.Module) -> dict[str, object]:
    """Every attribute of every module that is a number, a string or None."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if value is None or isinstance(value, (int, float, str))
    }


def test_attributes_that_a_forward_sets_come_back():
    """NLLB's router keeps the capacity that it computed from the number of tokens, and uses it in training."""
    family = find("nllb_moe")
    model = build.build(family, "eager").model
    before, random = _plain(model), torch.get_rng_state()
    prepared = ascend_deep.prepare(model)
    assert prepared.swapped
    after = {name: value for name, value in _plain(model).items() if name in before}
    assert after == before
    assert before["encoder.layers.0.ffn.router.expert_capacity"] == 64
    assert torch.equal(torch.get_rng_state(), random)
