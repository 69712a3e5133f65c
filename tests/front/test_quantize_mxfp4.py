"""gpt-oss with MXFP4 experts: the bytes of the checkpoint are those of our modules, and the model computes the same."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ascend_deep
from ascend_deep import models, ops
from ascend_deep.quantize import calc_diff
from ascend_deep.quantized_modules import QuantizedExperts

pytest.importorskip("transformers")
from transformers.integrations import mxfp4
from transformers.models.gpt_oss import modeling_gpt_oss as oss

BF16 = torch.bfloat16
HIDDEN, INTER, EXPERTS = 64, 96, 8
SIZES = {"gate_up_proj": (2 * INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


def checkpoint() -> dict[str, Tensor]:
    """What a file of gpt-oss has for the experts of one layer: every code, scales over a wide range, biases."""
    data = {}
    for name, (n, k) in SIZES.items():
        data[f"{name}_blocks"] = torch.randint(0, 256, (EXPERTS, n, k // 32, 16), dtype=torch.uint8)
        data[f"{name}_scales"] = torch.randint(117, 124, (EXPERTS, n, k // 32), dtype=torch.uint8)
        data[f"{name}_bias"] = torch.randn(EXPERTS, n).to(BF16)
    return data


class Packed(oss.GptOssExperts):
    """Experts that keep blocks and scales and dequantise on every call, as a model on a CPU may."""

    def __init__(self, original: nn.Module, data: dict[str, Tensor]) -> None:
        nn.Module.__init__(self)
        for name in ("config", "num_experts", "hidden_size", "intermediate_size", "alpha", "limit"):
            setattr(self, name, getattr(original, name))
        for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm"):
            setattr(self, name, getattr(original, name))
        self._is_expert_parallel = False
        for name, tensor in data.items():
            self.register_buffer(name, tensor.clone())

    @property
    def gate_up_proj(self) -> Tensor:
        return mxfp4.convert_moe_packed_tensors(self.gate_up_proj_blocks, self.gate_up_proj_scales)

    @property
    def down_proj(self) -> Tensor:
        return mxfp4.convert_moe_packed_tensors(self.down_proj_blocks, self.down_proj_scales)


@pytest.fixture(scope="module")
def loaded() -> models.Loaded:
    """gpt-oss in small, one layer; tests copy it."""
    fields = {"hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": 1, "swiglu_limit": 5.0}
    found = models.load("gpt_oss", fields=fields, experts_implementation="grouped_mm", shape=(2, 5), training=False)
    found.model.to(BF16).eval()
    return found


def model_of(loaded: models.Loaded, wrap: Any) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    """A model with experts as ``wrap(original, data)`` makes them, token ids, and the experts' data."""
    model, data = copy.deepcopy(loaded.model), checkpoint()
    mlp = model.model.layers[0].mlp
    mlp.experts = wrap(mlp.experts, data)
    return model, loaded.kwargs["input_ids"], data


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def dequantised(data: dict[str, Tensor], name: str) -> Tensor:
    return mxfp4.convert_moe_packed_tensors(data[f"{name}_blocks"], data[f"{name}_scales"]).mT  # [E, N, K]


def test_blocks_and_scales_are_taken_as_they_are(loaded: models.Loaded, tmp_path: Any) -> None:
    model, ids, data = model_of(loaded, Packed)
    want = logits_of(model, ids)
    original = model.model.layers[0].mlp.experts
    prepared = ascend_deep.prepare(model, quantize="fp4", exclude=["*proj", "lm_head", "router"])
    (entry,) = prepared.quantized
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, QuantizedExperts) and entry.weight_error == 0.0 and 0 < entry.output_error < 3e-3
    assert (experts.spec.act, experts.spec.limit, experts.spec.interleaved) == ("swiglu_oai", 5.0, True)
    for name in SIZES:
        held, scale = getattr(experts, f"{name}_q"), getattr(experts, f"{name}_scale_inv")
        assert held.data_ptr() == getattr(original, f"{name}_blocks").data_ptr()  # not even copied
        assert torch.equal(experts.recipe.dequantise(held, scale), dequantised(data, name).float())
    got = logits_of(model, ids)
    assert not torch.equal(got, want) and calc_diff(got, want) < 2e-3
    run = torch.compile(model, backend="ascend_deep", fullgraph=True, options={"downstream": "eager"})
    torch.testing.assert_close(logits_of(run, ids), got, rtol=1e-2, atol=1e-2)
    counts = ascend_deep.last_report().counts()
    assert counts["m_grouped_gemm_scaled"] == 2 and counts["moe_route"] == 1
    prepared.save(tmp_path / "m.safetensors")
    other, _, _ = model_of(loaded, lambda experts, data: experts)
    ascend_deep.load_quantized(other, tmp_path / "m.safetensors")
    assert torch.equal(logits_of(other, ids), got)
    prepared.restore()
    assert model.model.layers[0].mlp.experts is original and torch.equal(logits_of(model, ids), want)


def test_experts_that_are_dequantised_in_the_graph_are_fused(loaded: models.Loaded) -> None:
    """Without ``quantize`` the experts keep their arithmetic: bfloat16 activations, one op for both products."""
    model, ids, _ = model_of(loaded, Packed)
    want = logits_of(model, ids)
    run = torch.compile(model, backend="ascend_deep", fullgraph=True, options={"downstream": "eager"})
    got = logits_of(run, ids)
    counts = ascend_deep.last_report().counts()
    assert counts["moe_experts"] == counts["moe_route"] == 1
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


class Kernels:
    """Weights in a layout of transformers' kernels: a transposition that they undo (their module is a download)."""

    def __init__(self, data: Tensor) -> None:
        self.storage = SimpleNamespace(data=data.mT, layout=SimpleNamespace(unswizzle_data=lambda x: x.contiguous()))


def of_transformers(original: nn.Module, data: dict[str, Tensor]) -> nn.Module:
    """``Mxfp4GptOssExperts`` as they are after a checkpoint was loaded for their own kernels."""
    module = mxfp4.Mxfp4GptOssExperts(original.config)
    for name in SIZES:
        del module._parameters[name]
        setattr(module, name, Kernels(data[f"{name}_blocks"].flatten(2)))
        setattr(module, f"{name}_precision_config", SimpleNamespace(weight_scale=Kernels(data[f"{name}_scales"])))
        getattr(module, f"{name}_bias").data = data[f"{name}_bias"].float()
    return module


def test_experts_loaded_for_the_kernels_of_transformers(loaded: models.Loaded) -> None:
    reference, ids, data = model_of(loaded, Packed)
    model, _, _ = model_of(loaded, lambda original, _: of_transformers(original, data))
    model.load_state_dict(reference.state_dict(), strict=False)
    layer = model.model.layers[0]
    layer.mlp = mxfp4.Mxfp4GptOssMLP(layer.mlp.router, layer.mlp.experts)
    left = ascend_deep.prepare(model)
    assert left.quantized == () and any("quantises the activations to FP8" in item.reason for item in left.left)
    prepared = ascend_deep.prepare(model, quantize="fp4", exclude=["*proj", "lm_head", "router"])
    (entry,) = prepared.quantized
    assert entry.kind == "Mxfp4GptOssExperts" and layer.mlp.experts.master == []
    for name in SIZES:
        held, scale = getattr(layer.mlp.experts, f"{name}_q"), getattr(layer.mlp.experts, f"{name}_scale_inv")
        assert torch.equal(held.view(torch.uint8), data[f"{name}_blocks"].flatten(2))
        assert torch.equal(ops.dequant(held, scale, gran=(1, 32)), dequantised(data, name).float())
    assert calc_diff(logits_of(model, ids), logits_of(reference, ids)) < 2e-3


def changed(name: str, value: Any) -> Any:
    def wrap(original: nn.Module, data: dict[str, Tensor]) -> nn.Module:
        return Packed(original, data | {name: value(data[name]) if callable(value) else value})

    return wrap


class Doubled(Packed):
    @property
    def down_proj(self) -> Tensor:
        return 2 * mxfp4.convert_moe_packed_tensors(self.down_proj_blocks, self.down_proj_scales)


class Tanh(Packed):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return gate_up[..., ::2].tanh() * gate_up[..., 1::2]


def _nan(scales: Tensor) -> Tensor:
    scales[1, 2, 0] = 255
    return scales


def _hooked(original: nn.Module, data: dict[str, Tensor]) -> nn.Module:
    module = Packed(original, data)
    module.register_forward_hook(lambda *_: None)
    return module


LEFT = {
    "the code of NaN": (changed("down_proj_scales", _nan), "its down_proj_scales hold the code 255, which stands"),
    "groups of 16": (
        changed("down_proj_blocks", lambda b: b.reshape(*b.shape[:2], -1, 8)), "MXFP4 has [E, N, G, 16] and [E, N, G].",
    ),
    "signed": (changed("gate_up_proj_scales", lambda s: s.view(torch.int8)), "gate_up_proj_scales are int8; MXFP4"),
    "other sizes": (
        changed("down_proj_blocks", lambda b: b[:, :32].contiguous()), "MXFP4 has [E, N, G, 16] and [E, N, G].",
    ),
    "another forward": (Doubled, "its forward computes something else than experts with these weights"),
    "another activation": (Tanh, "is none of those that moe_experts knows"),
    "hooks": (_hooked, "it has hooks, which would see other experts."),
    "not loaded": (lambda original, _: mxfp4.Mxfp4GptOssExperts(original.config), "has no blocks and scales; prepare"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left(loaded: models.Loaded, case: str) -> None:
    wrap, words = LEFT[case]
    holder = nn.Module()
    holder.experts = before = wrap(loaded.model.model.layers[0].mlp.experts, checkpoint())
    prepared = ascend_deep.prepare(holder, quantize="fp4")
    assert prepared.quantized == () and holder.experts is before
    assert any(words in item.reason for item in prepared.left), [item.reason for item in prepared.left]


def test_a_target_without_fp4(loaded: models.Loaded) -> None:
    holder = nn.Module()
    holder.experts = Packed(loaded.model.model.layers[0].mlp.experts, checkpoint())
    with pytest.raises(ValueError, match="SM90 has no products of FP4"):
        ascend_deep.prepare(holder, quantize="fp4", target="sm90")
