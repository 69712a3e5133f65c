"""Models that are prepared for SM100 and Ascend: scales are stored as their libraries want them, which take the calls.

Nothing here has run on such hardware: the library is a stand-in with the documented signature, the vendor's ops are
their documented limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ascend_deep
from ascend_deep import models
from ascend_deep.native.deep_gemm.gemm_differences import ASCEND, SM100
from ascend_deep.native.torch_npu import gemm, gemm_grouped, quantise, soc
from ascend_deep.native.torch_npu.soc import Target
from ascend_deep.quantize import calc_diff
from ascend_deep.quantized_modules import QuantizedExperts, QuantizedLinear
from tests.native.deep_gemm_stand_in import run, same

pytest.importorskip("transformers")

BF16 = torch.bfloat16
CASES = {
    "fp8 on Ascend": ("fp8", "ascend950", ASCEND, torch.int16),
    "fp4 on Ascend": ("fp4", "ascend950", ASCEND, torch.int16),
    "fp4 on SM100": ("fp4", "sm100", SM100, torch.int32),
}
VENDOR = {
    "gemm_scaled": gemm.scaled_limits,
    "m_grouped_gemm_scaled": gemm_grouped.scaled_limits,
    "quant_fp8": quantise.quant_limits,
    "swiglu_quant": quantise.swiglu_quant_limits,
}


class Recorded(TorchDispatchMode):
    """Every call of one of our ops: name, arguments by place, arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "ascend_deep":
            self.calls.append((name, args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def experts_of(family: str) -> nn.Module:
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    model = models.load(family, fields=fields, experts_implementation="eager", training=False).model.to(BF16).eval()
    layer = model.model.layers[0]
    found = next(m for m in layer.modules() if type(m).__name__.endswith("Experts"))
    for parameter in found.parameters():  # random biases, too
        parameter.data = (torch.randn(parameter.shape) * 0.2).to(BF16)
    return found


def operands(experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids and weights: uneven, one id of no expert, no token for the last one."""
    idx = torch.stack([torch.randperm(experts - 1)[:2] for _ in range(9)])
    idx[0, 1] = experts
    return torch.randn(9, 64).to(BF16), idx, (torch.rand(9, 2) + 0.1).to(BF16)


def vendor_takes(calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> Mapping[str, set[str | None]]:
    """What the limits of torch_npu say about each kind of call."""
    target = Target("950pr", soc.cann("9.2.0"))
    said: dict[str, set[str | None]] = {}
    for name, args, kwargs in calls:
        if name in VENDOR:
            said.setdefault(name, set()).add(VENDOR[name](target, *args, **kwargs))
    return said


@pytest.mark.parametrize("case", CASES)
def test_linear_layers(case: str, tmp_path: Any) -> None:
    kind, target, row, words = CASES[case]
    model = nn.Sequential(nn.Linear(192, 128), nn.Tanh(), nn.Linear(128, 64, bias=False)).to(BF16)
    x = torch.randn(2, 5, 192).to(BF16)
    with torch.no_grad():
        want = model(x)
        prepared = ascend_deep.prepare(model, quantize=kind, target=target)
        with Recorded() as seen:
            got = model(x)
    assert len(prepared.quantized) == 2 and all(e.output_error < 1e-2 for e in prepared.quantized)
    assert got.dtype == BF16 and calc_diff(got, want) < 2e-2
    for layer in (m for m in model if isinstance(m, QuantizedLinear)):
        assert layer.weight_scale_inv.dtype == words and layer.weight_scale_inv.stride()[0] == 1
        exact = nn.functional.linear(x[..., : layer.in_features].float(), layer.dequantize())
        plain = layer(x[..., : layer.in_features].float()).detach()
        plain = plain if layer.bias is None else plain - layer.bias.float()
        assert calc_diff(plain, exact) < 1e-3
    calls = seen.of("gemm_scaled")
    assert len(calls) == 2
    for args, kwargs in calls:
        same(*run("gemm_scaled", row, *args, **kwargs)[:2])
    if target == "ascend950":
        said = vendor_takes(seen.calls)
        assert said["quant_fp8"] == {None}
        if kind == "fp8":
            assert said["gemm_scaled"] == {None}
        else:
            (reason,) = said["gemm_scaled"]
            assert reason is not None and "mixed product is not used" in reason
    prepared.save(tmp_path / "m.safetensors")
    other = nn.Sequential(nn.Linear(192, 128), nn.Tanh(), nn.Linear(128, 64, bias=False)).to(BF16)
    ascend_deep.load_quantized(other, tmp_path / "m.safetensors")
    with torch.no_grad():
        assert torch.equal(other(x), got)
    assert other[0].weight_scale_inv.stride() == model[0].weight_scale_inv.stride()  # files have none


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("mixtral", "fp8 on Ascend"),
        ("gpt_oss", "fp8 on Ascend"),
        ("gpt_oss", "fp4 on Ascend"),
        ("gpt_oss", "fp4 on SM100"),
    ],
)
def test_experts(family: str, case: str) -> None:
    kind, target, row, words = CASES[case]
    holder = nn.Module()
    holder.experts = experts_of(family)
    x, idx, weights = operands(8)
    prepared = ascend_deep.prepare(holder, quantize=kind, target=target)
    (entry,) = prepared.quantized
    experts = holder.experts
    assert isinstance(experts, QuantizedExperts)
    assert entry.output_error < 4e-2  # of FP4 weights
    assert experts.gate_up_proj_scale_inv.dtype == experts.down_proj_scale_inv.dtype == words
    with torch.no_grad(), Recorded() as seen:
        got = experts(x, idx, weights)
    calls = seen.of("m_grouped_gemm_scaled")
    assert len(calls) == 2 and bool(torch.isfinite(got).all())
    for args, kwargs in calls:
        same(*run("m_grouped_gemm_scaled", row, *args, **kwargs)[:2])
    if kind == "fp8":
        said = vendor_takes(seen.calls)
        assert said["m_grouped_gemm_scaled"] == said["swiglu_quant"] == said["quant_fp8"] == {None}
    # The same layers with float32 scales, as on a CPU, compute the same: packing loses nothing.
    plain = ascend_deep.quantize_recipes.Recipe(kind, "cpu", (1, 32), 32, True, experts.recipe.alignment)
    from ascend_deep.ops import unpack_sf

    def unpacked(name: str) -> tuple[Tensor, Tensor]:
        data, scales = getattr(experts, f"{name}_q"), getattr(experts, f"{name}_scale_inv")
        return data, unpack_sf(scales, k=data.shape[-1] * (2 if kind == "fp4" else 1), gran_k=32)

    twin = QuantizedExperts(
        unpacked("gate_up_proj"), unpacked("down_proj"), experts.gate_up_proj_bias, experts.down_proj_bias,
        experts.spec, plain,
    )  # fmt: skip
    with torch.no_grad():
        assert torch.equal(twin(x, idx, weights), got)
