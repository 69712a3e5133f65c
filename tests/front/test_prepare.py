"""prepare: which experts are swapped, equality with eager, restoring, and what is refused and why."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ascend_deep
from ascend_deep import hf_experts, models

transformers = pytest.importorskip("transformers")

FAMILIES = {
    "mixtral": ("silu, weights enk", {}),
    "qwen2_moe": ("silu, weights enk", {}),
    "qwen3_moe": ("silu, weights enk", {}),
    "olmoe": ("gelu_tanh, weights enk", {"hidden_act": "gelu_pytorch_tanh"}),
    "deepseek_v2": ("silu, weights enk", {}),
    "deepseek_v3": ("silu, weights enk", {"routed_scaling_factor": 2.5}),
    "glm4_moe": ("silu, weights enk", {}),
    "gpt_oss": ("swiglu_oai, alpha=1.702, limit=7, interleaved, weights ekn, bias", {}),
    "granitemoe": ("relu, weights enk", {"hidden_act": "relu"}),
}


def build(family: str, impl: str = "eager", **fields: Any) -> tuple[nn.Module, Tensor]:
    """A tiny model whose experts matter: weights large enough that a wrong expert shows in the logits."""
    loaded = models.load(family, fields=fields, experts_implementation=impl, shape=(2, 9), training=True)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.dim() == 3 or (parameter.dim() == 2 and parameter.abs().sum() == 0):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return loaded.model, loaded.kwargs["input_ids"]


def run(model: Callable[..., Any], base: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradient of every parameter."""
    base.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.float().square().mean().backward()
    grads = {n: p.grad.clone() for n, p in base.named_parameters() if p.grad is not None}
    return logits.detach().clone(), grads


def assert_same(got: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(got[0], wanted[0], rtol=2e-4, atol=2e-5)
    assert got[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        scale = float(grad.abs().max())
        error = float((got[1][name] - grad).abs().max())
        assert error <= 1e-3 * scale + 1e-7, f"gradient of {name}: {error:.2g} of {scale:.2g}"


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_eager_in_one_graph(family: str) -> None:
    spec, fields = FAMILIES[family]
    model, ids = build(family, **fields)
    keys = list(model.state_dict())
    wanted = run(model, model, ids)
    prepared = ascend_deep.prepare(model)
    assert [s.spec.describe() for s in prepared.swapped] == [spec] * 2 and not prepared.left
    assert list(model.state_dict()) == keys
    assert_same(run(model, model, ids), wanted)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(run(compiled, model, ids), wanted)
    prepared.restore()
    restored = run(model, model, ids)
    assert torch.equal(restored[0], wanted[0])


def test_the_op_really_runs() -> None:
    model, ids = build("mixtral")
    seen: list[torch.fx.Node] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(n for n in gm.graph.nodes if n.target is torch.ops.ascend_deep.moe_experts)
        return gm.forward

    with ascend_deep.prepare(model), torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(input_ids=ids, use_cache=False)
    assert len(seen) == 2
    assert {n.kwargs["act"] for n in seen} == {"silu"}


def test_without_prepare_the_loop_breaks_the_graph() -> None:
    model, ids = build("mixtral")
    with pytest.raises(Exception, match=r"data-dependent|nonzero|Dynamic shape"):
        torch.compile(model, backend="eager", fullgraph=True)(input_ids=ids, use_cache=False)


@pytest.mark.parametrize("impl", ["eager", "batched_mm", "grouped_mm"])
def test_restore_gives_back_the_implementation_it_found(impl: str) -> None:
    model, _ = build("qwen3_moe", impl)
    prepared = ascend_deep.prepare(model)
    assert model.config._experts_implementation == "ascend_deep"
    prepared.restore()
    prepared.restore()
    assert model.config._experts_implementation == impl
    leftovers = [k for m in model.modules() for k in vars(m) if "ascend_deep" in k]
    assert leftovers == []


def test_twice_is_once_and_restores_the_first_state() -> None:
    model, ids = build("qwen2_moe", "batched_mm")
    first = ascend_deep.prepare(model)
    second = ascend_deep.prepare(model)
    assert first.swapped == second.swapped
    second.restore()
    assert model.config._experts_implementation == "batched_mm"
    third = ascend_deep.prepare(model)
    assert third.swapped == first.swapped
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)


def test_a_deep_copy_is_prepared_and_lives_on_its_own() -> None:
    model, ids = build("gpt_oss")
    prepared = ascend_deep.prepare(model)
    twin = copy.deepcopy(model)
    wanted = run(model, model, ids)
    prepared.restore()
    assert twin.config._experts_implementation == "ascend_deep"
    got = run(twin, twin, ids)
    assert_same(got, wanted)


def test_state_dict_goes_both_ways() -> None:
    model, ids = build("mixtral")
    file = io.BytesIO()
    ascend_deep.prepare(model)
    torch.save(model.state_dict(), file)
    file.seek(0)
    other, _ = build("mixtral")
    other.load_state_dict(torch.load(file))
    model.eval(), other.eval()
    with torch.no_grad():
        a, b = (m(input_ids=ids, use_cache=False).logits for m in (model, other))
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def test_compiled_wrapper_is_prepared_through() -> None:
    model, _ = build("olmoe")
    prepared = ascend_deep.prepare(torch.compile(model, backend="eager"))
    assert [s.module for s in prepared.swapped] == [f"model.layers.{i}.mlp.experts" for i in range(2)]


# -- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama4_text"])
def test_classes_without_the_interface_are_listed(family: str) -> None:
    model, _ = build(family, impl="")
    before = dict(model.named_modules())
    prepared = ascend_deep.prepare(model)
    assert not prepared.swapped and prepared.left
    assert all("does not dispatch through" in item.reason for item in prepared.left)
    assert dict(model.named_modules()) == before
    assert "left as they are" in str(prepared)


class _Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class _Stretched(nn.Module):
    """silu on a scaled argument: smooth, close to silu, and not silu."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.01 * x)


class _Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x) * (1 + 0.01 * torch.rand_like(x)) if self.training else nn.functional.silu(x)


@pytest.mark.parametrize(
    ("act", "reason"),
    [(_Sine(), "is none of those"), (_Stretched(), "is none of those"), (_Noisy(), "training and evaluation")],
)
def test_an_activation_outside_the_table_is_left_alone(act: nn.Module, reason: str) -> None:
    model, ids = build("mixtral")
    wanted = run(model, model, ids)[0]
    layer = model.model.layers[1].mlp.experts
    assert wanted.shape[-1] == model.config.vocab_size
    layer.act_fn = act
    torch.manual_seed(0)
    wanted = run(model, model, ids)
    prepared = ascend_deep.prepare(model)
    assert [s.module for s in prepared.swapped] == ["model.layers.0.mlp.experts"]
    (left,) = prepared.left
    assert left.module == "model.layers.1.mlp.experts" and reason in left.reason
    torch.manual_seed(0)
    assert_same(run(model, model, ids), wanted)  # the module that was left keeps its own code


def test_limit_and_alpha_of_the_model_are_found_not_assumed() -> None:
    model, _ = build("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.experts.alpha, layer.mlp.experts.limit = 1.375, 5.25
    prepared = ascend_deep.prepare(model)
    assert {(s.spec.alpha, s.spec.limit) for s in prepared.swapped} == {(1.375, 5.25)}


def test_a_forward_that_is_not_what_the_attributes_say_is_left_alone() -> None:
    model, _ = build("mixtral")
    experts = model.model.layers[0].mlp.experts
    kind = type(experts)
    original = hf_experts.original_forward(experts)

    def doubled(self: nn.Module, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        return 2 * original(self, x, idx, weights)

    odd = type("OddExperts", (kind,), {})

    def decorate(experts_interface: Any) -> Any:
        def inner(self: nn.Module, *args: Any) -> Tensor:
            return experts_interface.get_interface(self.config._experts_implementation, doubled)(self, *args)

        inner.__wrapped__ = doubled  # type: ignore[attr-defined]
        return inner

    odd.forward = decorate(hf_experts.interface())  # type: ignore[method-assign]
    experts.__class__ = odd
    prepared = ascend_deep.prepare(model)
    (left,) = prepared.left
    assert left.kind == "OddExperts" and "something else than its attributes say" in left.reason


def test_quantised_weights_are_left_alone() -> None:
    model, _ = build("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    (left,) = ascend_deep.prepare(model).left
    assert "float8_e4m3fn" in left.reason


def test_meta_weights_are_decided_without_data() -> None:
    model, _ = build("gpt_oss")
    prepared = ascend_deep.prepare(model.to("meta"))
    assert len(prepared.swapped) == 2


def test_bfloat16_experts_are_swapped() -> None:
    loaded = models.load("qwen3_moe", dtype="bfloat16", experts_implementation="eager")
    with torch.no_grad():
        wanted = loaded.model(**loaded.kwargs).logits
        assert len(ascend_deep.prepare(loaded.model).swapped) == 2
        got = loaded.model(**loaded.kwargs).logits
    torch.testing.assert_close(got, wanted, rtol=5e-2, atol=2e-2)


def test_expert_parallel_sentinels_contribute_nothing() -> None:
    model, _ = build("mixtral")
    ascend_deep.prepare(model)
    experts = model.model.layers[0].mlp.experts
    x, weights = torch.randn(5, 64), torch.rand(5, 2)
    idx = torch.tensor([[0, 8], [8, 3], [8, 8], [2, 5], [7, 8]])
    with torch.no_grad():
        got = experts(x, idx, weights)
        kept = experts(x, idx.clamp(max=7), weights.masked_fill(idx == 8, 0.0))
    torch.testing.assert_close(got, kept, rtol=1e-4, atol=1e-5)
    assert torch.equal(got[2], torch.zeros(64))


def test_models_without_experts_come_back_unchanged() -> None:
    prepared = ascend_deep.prepare(nn.Linear(3, 4))
    assert not prepared.swapped and not prepared.left
    assert "0 experts modules swapped" in str(prepared)


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(TypeError, match=r"prepare: model is a dict; it takes a torch\.nn\.Module\."):
        ascend_deep.prepare({})  # type: ignore[arg-type]


def test_importing_us_registers_nothing() -> None:
    import subprocess
    import sys

    code = (
        "import sys, ascend_deep; ascend_deep.prepare, ascend_deep.explain, ascend_deep.Report\n"
        "bad = [m for m in ('transformers', 'torch_npu', 'triton') if m in sys.modules]; print(bad)\n"
        "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as f; print('ascend_deep' in f.keys())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out == ["[]", "False"]
