"""prepare(quantize=...): what is quantised computes its formula, the rest stays and says why, files round-trip."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ascend_deep
from ascend_deep import hf_experts, models, ops
from ascend_deep.quantize import calc_diff, linears
from ascend_deep.quantize_recipes import recipe_for
from ascend_deep.quantized_modules import QuantizedExperts, QuantizedLinear

BF16 = torch.bfloat16
KINDS = ("fp8", "fp4")


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


class Mlp(nn.Module):
    """Layers of sizes that are no multiples of a block, with and without a bias, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(200, 300)
        self.down = nn.Linear(300, 136, bias=False)
        self.gate = nn.Linear(200, 8)
        self.lm_head = nn.Linear(136, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.down(F.silu(self.up(x)))) * self.gate(x).sigmoid().sum(-1, keepdim=True)


def formula(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """What a quantised layer stands for, in float64."""
    recipe = layer.recipe
    rows, scales = ops.quant_fp8(x.reshape(-1, x.shape[-1]), gran=(1, recipe.group), ue8m0=recipe.ue8m0)
    read = ops.dequant(rows, scales, gran=(1, recipe.group), out_dtype=torch.float32).double()
    out = read @ layer.dequantize().double().t()
    out = out if layer.bias is None else out + layer.bias.double()
    return out.reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers_compute_their_formula(kind: str, dtype: torch.dtype) -> None:
    model = Mlp().to(dtype)
    weights = {n: m.weight.detach().clone() for n, m in model.named_children()}
    prepared = ascend_deep.prepare(model, quantize=kind)
    assert [q.module for q in prepared.quantized] == ["up", "down"]
    assert {r.module: r.reason for r in prepared.left} == {
        "gate": "it is excluded by 'gate' in exclude.",
        "lm_head": "it is excluded by 'lm_head' in exclude.",
    }
    for entry in prepared.quantized:
        layer = model.get_submodule(entry.module)
        assert isinstance(layer, QuantizedLinear)
        x = torch.randn(2, 5, layer.in_features).to(dtype)
        with torch.no_grad():
            got = layer(x)
        want = formula(layer, x).detach()
        assert got.dtype == dtype and got.shape == want.shape
        assert float((got - want).abs().max()) <= (1e-5 if dtype == torch.float32 else 8e-3) * float(want.abs().max())
        # The thresholds of the library: FP8 x FP8 1e-3, one FP4 operand 1e-2.
        limit = 1e-3 if kind == "fp8" else 1e-2
        assert 0 < entry.weight_error < limit and 0 < entry.output_error < limit
        assert entry.weight_error == pytest.approx(calc_diff(layer.dequantize(), weights[entry.module]))
        assert entry.bytes_after < (0.6 if dtype != torch.float32 else 0.3) * entry.bytes_before


@pytest.mark.parametrize(("kind", "dynamic"), [("fp8", False), ("fp4", True)])
def test_compiled_in_one_graph(kind: str, dynamic: bool) -> None:
    model = Mlp().to(BF16)
    ascend_deep.prepare(model, quantize=kind)
    run = torch.compile(
        model, backend="ascend_deep", fullgraph=True, dynamic=dynamic, options={"downstream": "aot_eager"}
    )
    with torch.no_grad():
        for rows in (7, 12):
            x = torch.randn(rows, 200).to(BF16)
            torch.testing.assert_close(run(x), model(x), rtol=8e-3, atol=8e-3)
    assert ascend_deep.last_report().counts() == {"gemm_scaled": 2, "quant_fp8": 2}


def build(family: str, **fields: Any) -> tuple[nn.Module, Tensor]:
    pytest.importorskip("transformers")
    loaded = models.load(family, fields=fields, experts_implementation="eager", shape=(2, 9), training=False)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if parameter.dim() == 3 or name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return loaded.model.eval(), loaded.kwargs["input_ids"]


def experts_formula(layer: QuantizedExperts, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """The experts with the quantised weights, one token and slot at a time, activations not quantised."""
    from ascend_deep.ops.activations import ACTIVATIONS

    recipe, spec = layer.recipe, layer.spec
    w13 = recipe.dequantise(layer.gate_up_proj_q, layer.gate_up_proj_scale_inv)
    w2 = recipe.dequantise(layer.down_proj_q, layer.down_proj_scale_inv)
    out = torch.zeros(x.shape[0], w2.shape[1])
    for t in range(x.shape[0]):
        for k in range(idx.shape[1]):
            e = int(idx[t, k])
            if not 0 <= e < layer.num_experts:
                continue
            h = w13[e] @ x[t].float()
            h = h if layer.gate_up_proj_bias is None else h + layer.gate_up_proj_bias[e].float()
            gate, up = (h[::2], h[1::2]) if spec.interleaved else h.chunk(2)
            y = w2[e] @ ACTIVATIONS[spec.act].forward(gate, up, spec.alpha, spec.limit)
            y = y if layer.down_proj_bias is None else y + layer.down_proj_bias[e].float()
            out[t] += weights[t, k].float() * y
    return out


@pytest.mark.parametrize(("family", "kind"), [("mixtral", "fp8"), ("gpt_oss", "fp4")])
def test_models_of_hugging_face(family: str, kind: str, tmp_path: Any) -> None:
    """Experts and projections quantised, routers not; equal to the formula, to compiled, and after a trip to a file."""
    model, ids = build(family, num_hidden_layers=1)
    layers = [m for m in model.modules() if hf_experts.is_decorated(m)]
    prepared = ascend_deep.prepare(model, quantize=kind)
    quantised = [m for m in model.modules() if isinstance(m, QuantizedExperts)]
    assert len(quantised) == len(layers) > 0 and not prepared.swapped
    assert "lm_head" in {r.module for r in prepared.left}
    assert {e.recipe for e in prepared.quantized} == {recipe_for(kind, "cpu", model)}
    x = torch.randn(6, model.config.hidden_size)
    experts = quantised[0].num_experts
    idx = torch.rand(6, experts).argsort(1)[:, :2]
    idx[0, 1], idx[1, 0] = experts, -1  # of no expert
    weights = torch.randn(6, 2)
    with torch.no_grad():
        got, want = quantised[0](x, idx, weights), experts_formula(quantised[0], x, idx, weights)
        # Two roundings of activations to FP8.
        assert calc_diff(got, want) < 2e-3
        logits = model(input_ids=ids, use_cache=False).logits
        if family != "mixtral":
            run = torch.compile(model, backend="ascend_deep", fullgraph=True, options={"downstream": "eager"})
            torch.testing.assert_close(run(input_ids=ids, use_cache=False).logits, logits, rtol=1e-3, atol=1e-3)
            counts = ascend_deep.last_report().counts()
            assert counts["m_grouped_gemm_scaled"] == 2 * len(layers) and counts["moe_route"] == len(layers)
            assert counts["gemm_scaled"] == len(prepared.quantized) - len(layers)
        prepared.save(tmp_path / "model.safetensors")
        other, _ = build(family, num_hidden_layers=1)
        loaded = ascend_deep.load_quantized(other, tmp_path / "model.safetensors")
        assert torch.equal(other(input_ids=ids, use_cache=False).logits, logits)
    assert loaded.quantized == prepared.quantized


def test_restore_with_and_without_the_originals() -> None:
    model = Mlp()
    x = torch.randn(3, 200)
    want, keys = model(x), list(model.state_dict())
    with ascend_deep.prepare(model, quantize="fp8", keep_master=True):
        assert list(model.state_dict()) != keys
        assert not torch.equal(model(x), want)
    assert torch.equal(model(x), want) and list(model.state_dict()) == keys
    prepared = ascend_deep.prepare(model, quantize="fp8")
    with pytest.raises(RuntimeError, match="original weights of 2 quantised layers, up among them, were not kept"):
        prepared.restore()
    again = ascend_deep.prepare(model, quantize="fp4")
    assert again.quantized == ()  # quantised once


def test_state_dict_copy_pickle_and_conversions() -> None:
    model = Mlp()
    ascend_deep.prepare(model, quantize="fp8")
    x = torch.randn(3, 200)
    with torch.no_grad():
        want = model(x)
        names = {n for n in model.state_dict() if n.startswith("up.")}
        assert names == {"up.weight_q", "up.weight_scale_inv", "up.bias"}
        assert torch.equal(copy.deepcopy(model)(x), want)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(x), want)
        other = Mlp()
        ascend_deep.prepare(other, quantize="fp8")
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(x), want)
        halved = copy.deepcopy(model).to(BF16)
        assert halved.up.weight_q.dtype == torch.float8_e4m3fn
        assert halved.up.weight_scale_inv.dtype == torch.float32 and halved.up.bias.dtype == BF16
        torch.testing.assert_close(halved(x.to(BF16)).float(), want, rtol=5e-2, atol=5e-2)
    assert not hasattr(model.up, "weight") and getattr(model.up, "weight", None) is None and hasattr(model.up, "bias")
    with pytest.raises(AttributeError, match="quantised and has no attribute 'weight': it is weight_q times weight_sc"):
        _ = model.up.weight
    with pytest.raises(AttributeError, match="no attribute 'wait'"):
        _ = model.up.wait


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float64])
def test_originals_come_back_as_the_model_was_converted_meanwhile(dtype: torch.dtype) -> None:
    model = Mlp()
    want = copy.deepcopy(model).to(dtype).state_dict()
    prepared = ascend_deep.prepare(model, quantize="fp8", keep_master=True)
    twin = copy.deepcopy(model)
    model.to(dtype)
    twin.half().to(torch.float32)  # rounds what it has, but not the originals
    prepared.restore()
    assert model.up.weight.dtype == model.up.bias.dtype == dtype
    assert all(torch.equal(v, want[n]) and v.dtype == want[n].dtype for n, v in model.state_dict().items())
    assert model(torch.randn(3, 200, dtype=dtype)).dtype == dtype
    ascend_deep.Prepared(twin, (), ()).restore()
    assert twin.up.weight.dtype == torch.float32 and torch.equal(twin.up.weight.to(dtype), want["up.weight"])


def test_the_input_of_a_quantised_layer_has_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(256, 128))
    weight = model[0].weight.detach().clone()
    ascend_deep.prepare(model, quantize="fp8")
    x = torch.randn(6, 256, requires_grad=True)
    seed = torch.randn(6, 128)
    (got,) = torch.autograd.grad(model(x), x, seed)
    assert calc_diff(got, seed @ weight) < 3e-3
    model = nn.Sequential(nn.Linear(256, 128))
    ascend_deep.prepare(model, quantize="fp4")
    with pytest.raises(RuntimeError, match="has no gradient; run it under"):
        model(x)


def test_autocast_decides_the_dtype_of_the_result() -> None:
    model = nn.Sequential(nn.Linear(128, 64))
    ascend_deep.prepare(model, quantize="fp8")
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        assert model(torch.randn(2, 128)).dtype == BF16


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


class Absorbs(nn.Module):
    """Reads the weight of its layer, as absorbed projections do."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b = nn.Linear(64, 32)
        self.plain = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kv_b.weight.t() + self.plain(x)


class Sub(nn.Linear):
    pass


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 32))
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    return model


def _infinite() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 32))
    model[0].weight.data[3, 5] = float("inf")
    return model


def _meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 32))


LEFT = {
    "tied": (Tied, "head", "its weight is shared with embed.weight, which reads it too."),
    "read elsewhere": (Absorbs, "kv_b", "Absorbs.forward reads the weight of a layer of this name itself."),
    "a subclass": (lambda: nn.Sequential(Sub(64, 32)), "0", "Sub is a class of its own"),
    "hooks": (_hooked, "0", "it has hooks or a forward of its own"),
    "not finite": (_infinite, "0", "its weight has values that are not finite."),
    "no data": (_meta, "0", "its weight has no data (meta device)."),
    "float64": (lambda: nn.Sequential(nn.Linear(64, 32).double()), "0", "its weight is float64;"),
    "quantised by others": (lambda: nn.Sequential(nn.Linear(63, 32)), "0", "it has 63 inputs; FP4 stores pairs"),
    "alone": (lambda: nn.Linear(64, 32), "", "it is the whole model"),
    "parametrised": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 32))),
        "0",
        "is a class of its own",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left(case: str) -> None:
    make, path, words = LEFT[case]
    model = make()
    layer = model.get_submodule(path)
    prepared = ascend_deep.prepare(model, quantize="fp4")
    reasons = {r.module: r.reason for r in prepared.left}
    assert words in reasons[path], reasons
    assert model.get_submodule(path) is layer
    assert path not in {q.module for q in prepared.quantized}


def test_tied_weights_in_a_file(tmp_path: Any) -> None:
    model, ids = Tied(), torch.randint(0, 40, (5,))
    prepared = ascend_deep.prepare(model, quantize="fp8")
    assert [q.module for q in prepared.quantized] == ["body"]
    prepared.save(tmp_path / "tied.safetensors")
    with torch.device("meta"):
        other = Tied()
    ascend_deep.load_quantized(other, tmp_path / "tied.safetensors")
    assert other.head.weight is other.embed.weight
    with torch.no_grad():
        assert torch.equal(other(ids), model(ids))


def test_files_that_are_none(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "m.safetensors"
    prepared = ascend_deep.prepare(Mlp(), quantize="fp8")
    prepared.save(path)
    with pytest.raises(ValueError, match="of another model: it has a layer"):
        ascend_deep.load_quantized(nn.Sequential(nn.Linear(4, 4)), path)
    larger = Mlp()
    larger.norm = nn.LayerNorm(7)
    with pytest.raises(ValueError, match=r"it lacks norm.bias \(2 names differ\)"):
        ascend_deep.load_quantized(larger, path)
    assert isinstance(larger.up, nn.Linear)  # unchanged
    with pytest.raises(FileNotFoundError, match="there is no file"):
        ascend_deep.load_quantized(Mlp(), tmp_path / "other")
    save_file({"x": torch.randn(3)}, str(path))
    with pytest.raises(ValueError, match=r"was not written by this version of Prepared.save"):
        ascend_deep.load_quantized(Mlp(), path)
    with pytest.raises(ValueError, match="no quantised layer"):
        ascend_deep.prepare(Mlp()).save(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"quantize": "int8"}, "quantize is 'int8'; accepted are 'fp8' and 'fp4'"),
        ({"quantize": "fp4", "target": "sm90"}, "SM90 has no products of FP4"),
        ({"quantize": "fp8", "target": "ascend910b"}, "matrix units have no FP8"),
        ({"quantize": "fp8", "target": "tpu"}, "no fp8 recipe for target 'tpu'; there are recipes for"),
    ],
)
def test_arguments(arguments: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ascend_deep.prepare(Mlp(), **arguments)
    with pytest.raises(TypeError, match="exclude is 'up'"):
        ascend_deep.prepare(Mlp(), quantize="fp8", exclude="up")


def test_exclude_and_targets() -> None:
    model = Mlp()
    prepared = ascend_deep.prepare(model, quantize="fp8", target="ascend950dt", exclude=["u*"])
    assert [q.module for q in prepared.quantized] == ["down", "gate", "lm_head"]
    packed = model.down.weight_scale_inv  # two powers of two per word, as Ascend's library wants them
    assert model.down.recipe.block == (1, 32) and packed.dtype == torch.int16 and packed.shape == (136, 5)
    with torch.no_grad():
        assert calc_diff(model.down(x := torch.randn(4, 300)), formula(model.down, x)) < 1e-9
    text = str(prepared)
    assert "quantised: 3 layers" in text and "calc_diff of weights up to" in text


def test_linear_layers_of_a_swapped_loop_stay() -> None:
    """Experts that run as one op read their weights from one tensor: quantising one of their layers changes nothing."""
    model = nn.Sequential(Mlp(), nn.Linear(64, 32))
    done, left = linears(model, recipe_for("fp8", "cpu", model), [], False, taken=["0"])
    assert [q.module for q in done] == ["1"]
    assert {path for path, _, _ in left} == {"0.up", "0.down", "0.gate", "0.lm_head"}
    assert all("it is inside a block whose experts run as one op" in reason for _, _, reason in left)
