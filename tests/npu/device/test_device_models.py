"""Whole models on a real NPU, compiled and eager. Skipped everywhere else, and so far that is everywhere."""

from __future__ import annotations

import pytest
import torch

import ascend_deep
from ascend_deep import models

if not (hasattr(torch, "npu") and torch.npu.is_available()):
    pytest.skip("not run: no Ascend device", allow_module_level=True)


@pytest.mark.parametrize("downstream", ["eager", "npu", "npugraph_ex"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v32", "glm4_moe", "gpt_oss"])
def test_a_compiled_model_equals_eager(family: str, downstream: str) -> None:
    loaded = models.load(family, layers=2, shape=(2, 16), dtype="bfloat16")
    model = loaded.model.to("npu")
    args = [a.to("npu") if isinstance(a, torch.Tensor) else a for a in loaded.args]
    kwargs = {k: v.to("npu") if isinstance(v, torch.Tensor) else v for k, v in loaded.kwargs.items()}
    with torch.no_grad():
        want = model(*args, **kwargs).logits
        got = torch.compile(model, backend="ascend_deep", options={"downstream": downstream})(*args, **kwargs).logits
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert ascend_deep.last_report().counts().get("moe_experts") == 2
