"""Models whose modules transformers has quantised to FP8: every layer runs our ops and computes its formula."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ascend_deep
from ascend_deep import models
from ascend_deep.quantize import calc_diff
from ascend_deep.quantized_modules import QuantizedExperts, QuantizedLinear

pytest.importorskip("transformers")
from transformers import FineGrainedFP8Config
from transformers.integrations import finegrained_fp8 as hf

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


def fill(module: nn.Module, seed: int = 5) -> nn.Module:
    """Random data and scales for what transformers leaves on the meta device; scales over a wide range."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is None or parameter.device.type != "meta":
                continue
            shape = parameter.shape
            if name.endswith("scale_inv"):
                value = 0.01 * torch.rand(shape, generator=generator).mul(2).exp2()
                value = value.log2().ceil().exp2().to(parameter.dtype) if parameter.dtype != torch.float32 else value
            elif parameter.dtype == torch.int8:
                value = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
            elif parameter.dtype == FP8:
                value = (torch.randn(shape, generator=generator) * 3).to(FP8)
            else:
                value = torch.randn(shape, generator=generator) * 0.1
            part._parameters[name] = nn.Parameter(value.to(parameter.dtype), requires_grad=False)
    return module


@pytest.fixture(scope="module")
def deepseek() -> tuple[nn.Module, Tensor]:
    """DeepSeek-V3 in small, as FineGrainedFP8Config makes it: FP8Linear and FP8Experts."""
    fields = {"moe_intermediate_size": 128, "hidden_size": 256, "intermediate_size": 256}
    fields |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    loaded = models.load("deepseek_v3", fields=fields, experts_implementation="eager", shape=(2, 5), training=False)
    config = FineGrainedFP8Config(weight_block_size=(128, 128))
    model = hf.replace_with_fp8_linear(loaded.model, ["lm_head"], config)
    return fill(model).eval(), loaded.kwargs["input_ids"]


def blockwise(weight: Tensor, scales: Tensor, block: int = 128) -> Tensor:
    wide = scales.float().repeat_interleave(block, -2).repeat_interleave(block, -1)
    return weight.float() * wide[..., : weight.shape[-2], : weight.shape[-1]]


def test_every_layer_of_a_deepseek_model(deepseek: tuple[nn.Module, Tensor]) -> None:
    model, ids = deepseek
    linears = {p: m for p, m in model.named_modules() if type(m) is hf.FP8Linear}
    experts = {p: m for p, m in model.named_modules() if type(m).__name__ == "FP8Experts"}
    assert len(linears) > 5 and len(experts) > 0
    with ascend_deep.prepare(model) as prepared, torch.no_grad():
        assert {q.module for q in prepared.quantized} == {*linears, *experts} and not prepared.swapped
        assert all(q.weight_error == 0.0 and 0 < q.output_error < 3e-3 for q in prepared.quantized)
        assert prepared.left == ()
        for path, original in linears.items():
            layer = model.get_submodule(path)
            assert isinstance(layer, QuantizedLinear) and layer.weight_q.data_ptr() == original.weight.data_ptr()
            x = torch.randn(3, layer.in_features)
            want = F.linear(x, blockwise(original.weight, original.weight_scale_inv), original.bias)
            assert calc_diff(layer(x), want) < 1e-3
        path, original = next(iter(experts.items()))
        layer = model.get_submodule(path)
        assert isinstance(layer, QuantizedExperts) and layer.spec.act == "silu"
        w13 = blockwise(original.gate_up_proj, original.gate_up_proj_scale_inv)
        w2 = blockwise(original.down_proj, original.down_proj_scale_inv)
        x, weights = torch.randn(7, 256), torch.randn(7, 2)
        idx = torch.rand(7, layer.num_experts).argsort(1)[:, :2]
        want = torch.zeros(7, 256)
        for t in range(7):
            for k in range(2):
                gate, up = (w13[idx[t, k]] @ x[t]).chunk(2)
                want[t] += weights[t, k] * (w2[idx[t, k]] @ (F.silu(gate) * up))
        assert calc_diff(layer(x, idx, weights), want) < 2e-3
        logits = model(input_ids=ids, use_cache=False).logits
        run = torch.compile(model, backend="ascend_deep", fullgraph=True, options={"downstream": "eager"})
        torch.testing.assert_close(run(input_ids=ids, use_cache=False).logits, logits, rtol=1e-3, atol=1e-3)
        counts = ascend_deep.last_report().counts()
        assert counts["gemm_scaled"] == len(linears) and counts["m_grouped_gemm_scaled"] == 2 * len(experts)
    assert {type(m) for m in model.modules()} >= {hf.FP8Linear}  # restored
    assert all(model.get_submodule(p) is m for p, m in linears.items())


def layer(**fields: Any) -> nn.Module:
    fields = {"block_size": (128, 128), **fields}
    with torch.device("meta"):
        made = hf.FP8Linear(200, 300, **fields)
    return fill(nn.Sequential(made))


def test_scales_of_powers_of_two_and_a_bias() -> None:
    model = layer(scale_fmt="ue8m0")
    (original,) = model
    assert original.weight_scale_inv.dtype == torch.float8_e8m0fnu
    prepared = ascend_deep.prepare(model)
    (entry,) = prepared.quantized
    assert entry.recipe.ue8m0 and entry.recipe.block == (128, 128)
    x = torch.randn(2, 3, 200).to(BF16)
    with torch.no_grad():
        got = model(x)
    assert got.dtype == BF16
    assert calc_diff(got, x.float() @ blockwise(original.weight, original.weight_scale_inv).t()) < 1e-3
    with_bias = layer(has_bias=True)
    (original,) = with_bias
    ascend_deep.prepare(with_bias)
    with torch.no_grad():
        want = F.linear(x.float(), blockwise(original.weight, original.weight_scale_inv), original.bias.float())
        assert calc_diff(with_bias(x.float()), want) < 1e-3


def test_the_input_has_a_gradient_as_in_transformers() -> None:
    model = layer()
    (original,) = model
    ascend_deep.prepare(model)
    x = torch.randn(4, 200, requires_grad=True)
    seed = torch.randn(4, 300)
    (got,) = torch.autograd.grad(model(x), x, seed)
    assert calc_diff(got, seed @ blockwise(original.weight, original.weight_scale_inv)) < 3e-3


def _hooked() -> nn.Module:
    model = layer()
    model[0].register_forward_pre_hook(lambda module, args: None)
    return model


def _wrong_scales() -> nn.Module:
    model = layer()
    model[0].weight_scale_inv = nn.Parameter(torch.rand(3, 3), requires_grad=False)
    return model


def _meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(hf.FP8Linear(200, 300, block_size=(128, 128)))


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv_b = layer()[0]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kv_b.weight.float().t()


LEFT = {
    "static": (lambda: layer(activation_scheme="static"), "its activation scales are static"),
    "one scale": (lambda: layer(block_size=None), "it has one scale for the whole weight"),
    "hooks": (_hooked, "it has hooks"),
    "scales": (_wrong_scales, "its scales have shape [3, 3], and blocks of 128x128 need [3, 2]."),
    "no data": (_meta, "its weights have no data yet"),
    "read elsewhere": (Reads, "Reads.forward reads the weight of a layer of this name itself."),
}


@pytest.mark.parametrize("case", LEFT)
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_what_is_left(case: str, quantize: str | None) -> None:
    make, words = LEFT[case]
    model = make()
    before = list(model.modules())
    prepared = ascend_deep.prepare(model, quantize=quantize)
    assert prepared.quantized == () and list(model.modules()) == before
    (item,) = prepared.left
    assert words in item.reason


def test_dequantised_mxfp4_is_quantised_back_without_loss() -> None:
    """gpt-oss: its MXFP4 weights loaded as bfloat16, then ``quantize="fp4"``, are the same numbers."""
    from ascend_deep import ops

    codes = torch.randint(-128, 128, (64, 48), dtype=torch.int8)
    scales = torch.randint(-10, 8, (64, 3)).float().exp2()
    weight = ops.dequant(codes, scales, gran=(1, 32), out_dtype=BF16)
    model = nn.Sequential(nn.Linear(96, 64, bias=False, dtype=BF16))
    model[0].weight.data.copy_(weight)
    (entry,) = ascend_deep.prepare(model, quantize="fp4").quantized
    assert entry.weight_error == 0.0
    assert torch.equal(model[0].dequantize(), weight.float())
