"""The provider's ops on a real NPU against their references. Skipped everywhere else, and so far that is everywhere."""

from __future__ import annotations

import pytest
import torch

from ascend_deep import ops

if not (hasattr(torch, "npu") and torch.npu.is_available()):
    pytest.skip("not run: no Ascend device", allow_module_level=True)

OPS = ("moe_route", "moe_permute", "moe_combine", "moe_experts", "swiglu", "mqa_topk", "sparse_mqa_attention")
GEMM = (
    "gemm_bf16",
    "gemm_scaled",
    "m_grouped_gemm_bf16",
    "m_grouped_gemm_bf16_masked",
    "m_grouped_gemm_scaled",
    "m_grouped_gemm_scaled_masked",
    "k_grouped_gemm_bf16",
    "quant_fp8",
    "swiglu_quant",
)
CASES = [
    (name, sample) for name in (*OPS, *GEMM) for sample in ops.op(name).samples() if "nonfinite" not in sample.name
]


@pytest.mark.parametrize(("name", "sample"), CASES, ids=[f"{n}-{s.name}" for n, s in CASES])
def test_op_on_the_device_equals_its_reference(name: str, sample: ops.Sample) -> None:
    definition = ops.op(name)
    moved = [a.to("npu") if isinstance(a, torch.Tensor) else a for a in sample.args]
    choice = ops.provider(name, "npu", tuple(moved), sample.kwargs)
    if choice.provider is None:
        pytest.skip("; ".join(map(str, choice.refusals)))
    with ops.strict():
        got = definition.overload(*moved, **sample.kwargs)
    want = definition.reference(*sample.args, **sample.kwargs)
    tolerance = definition.tolerance[sample.args[0].dtype]
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        if a.dtype == torch.float8_e4m3fn:
            a, b = a.float(), b.float()
        torch.testing.assert_close(a.cpu(), b, rtol=tolerance.rtol, atol=tolerance.atol)
