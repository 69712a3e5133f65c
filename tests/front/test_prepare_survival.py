"""What a prepared model survives: copies, checkpoints, optimisers, DDP, LoRA, and changes of its experts afterwards."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ascend_deep
from ascend_deep import models
from tests.front.loop_blocks import HIDDEN, SPELLINGS, DeepSeek, Grouped, Mistral
from tests.front.loop_misses import Lora
from tests.front.test_prepare_loops import assert_same, build, run

X = (2, 9)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Its own loop runs")
        yield
    torch._dynamo.reset()


def prepared(name: str = "mistral") -> tuple[nn.Module, nn.Module]:
    """A prepared block, and the same block as it was."""
    block = build(SPELLINGS[name][0])
    original = copy.deepcopy(block)
    assert len(ascend_deep.prepare(block).swapped) == 1
    return block, original


def same(block: nn.Module, original: nn.Module) -> None:
    assert_same(run(block, block, X), run(original, original, X))


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def uses_op(block: nn.Module) -> bool:
    """Whether an eager call runs the op."""
    with torch.no_grad(), _Calls() as calls:
        block(torch.randn(1, 3, HIDDEN, dtype=next(block.parameters()).dtype))
    return "ascend_deep::moe_experts" in calls.names


@pytest.mark.parametrize("name", ["mistral", "grouped", "nested", "stacked"])
def test_a_deep_copy_is_prepared_and_lives_on_its_own(name: str) -> None:
    block, original = prepared(name)
    twin = copy.deepcopy(block)
    assert uses_op(twin) and [s.spec for s in ascend_deep.prepare(twin).swapped]
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.25)
    same(block, original)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.mul_(1.25)
    same(twin, original)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    assert_same(run(compiled, twin, X), run(original, original, X))


def test_state_dict_goes_both_ways_and_is_written_into() -> None:
    block, original = prepared("grouped")
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    other = build(Grouped, seed=8)
    other.load_state_dict(torch.load(file))
    same(other, original)
    replacement = build(Grouped, seed=9)
    block.load_state_dict(replacement.state_dict())
    same(block, replacement)
    assert uses_op(block)


def test_assigned_checkpoints_are_collected_again() -> None:
    block, _ = prepared()
    replacement = build(Mistral, seed=9)
    state = {name: tensor.clone() for name, tensor in replacement.state_dict().items()}
    block.load_state_dict(state, assign=True)
    same(block, replacement)
    assert uses_op(block)


def test_to_another_dtype_and_back() -> None:
    block, original = prepared("deepseek")
    block.to(torch.bfloat16), original.to(torch.bfloat16)
    assert block.experts[2].up_proj.weight.dtype == torch.bfloat16  # type: ignore[index, union-attr]
    assert_same(run(block, block, X), run(original, original, X), rtol=6e-2)
    block.float(), original.float()
    same(block, original)
    assert uses_op(block)


def test_pickled_models_have_their_own_loops_again() -> None:
    block, original = prepared()
    loaded = pickle.loads(pickle.dumps(block))
    assert not uses_op(loaded)
    same(loaded, original)
    same(copy.deepcopy(loaded), original)
    assert len(ascend_deep.prepare(loaded).swapped) == 1 and uses_op(loaded)
    same(loaded, original)


@pytest.mark.parametrize("compiled", [False, True])
def test_optimisers_made_before_and_after(compiled: bool) -> None:
    block = build(DeepSeek)
    original = copy.deepcopy(block)
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (block, original)]
    ascend_deep.prepare(block)
    function = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    for step in range(3):
        results = [run(f, m, X, seed=step) for f, m in ((function, block), (original, original))]
        assert_same(*results, rtol=1e-3)
        for optimiser in optimisers:
            optimiser.step()


def test_frozen_and_thawed_experts() -> None:
    block, original = prepared()
    for wanted in (False, True):
        for m in (block, original):
            for parameter in m.experts.parameters():  # type: ignore[union-attr]
                parameter.requires_grad_(wanted)
        same(block, original)
        with_grad = [p for p in block.experts.parameters() if p.grad is not None]  # type: ignore[union-attr]
        assert bool(with_grad) is wanted


def test_gradients_may_be_asked_for_twice() -> None:
    block, original = prepared()
    x = torch.randn(*X, HIDDEN)
    for _ in range(2):
        grads = [
            torch.autograd.grad(m(x).square().sum(), list(m.parameters()), allow_unused=True) for m in (block, original)
        ]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-3, atol=1e-5)


def test_one_process_of_ddp(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        block, original = prepared("bincount")
        wrapped = nn.parallel.DistributedDataParallel(block)
        for step in range(2):
            assert_same(run(wrapped, block, X, seed=step), run(original, original, X, seed=step))
        assert uses_op(block)
    finally:
        dist.destroy_process_group()


# -- changes afterwards -----------------------------------------------------------------------------------------------
def test_lora_on_the_router_fuses_with_the_delta() -> None:
    block, original = prepared()
    for m in (block, original):
        torch.manual_seed(12)
        m.router.proj = Lora(m.router.proj)  # type: ignore[union-attr, arg-type]
    same(block, original)
    assert uses_op(block)
    other = build(Mistral)
    torch.manual_seed(12)
    other.router.proj = Lora(other.router.proj)  # type: ignore[union-attr, arg-type]
    assert len(ascend_deep.prepare(other).swapped) == 1
    same(other, original)


def test_lora_on_an_expert_runs_the_loop_with_the_delta() -> None:
    block, original = prepared()
    compiled = torch.compile(block, backend="aot_eager")
    assert_same(run(compiled, block, X), run(original, original, X))
    for m in (block, original):
        torch.manual_seed(13)
        m.experts[1].w2 = Lora(m.experts[1].w2)  # type: ignore[index, union-attr]
    with pytest.warns(UserWarning, match=r"'w2' of one of its experts was replaced after prepare\. Its own loop runs"):
        got = run(block, block, X)
    assert_same(got, run(original, original, X))
    assert not uses_op(block)
    assert_same(run(compiled, block, X), run(original, original, X))


@pytest.mark.parametrize("prepared_first", [True, False])
@pytest.mark.parametrize(("target", "fuses"), [("proj", True), ("up_proj", False)])
def test_peft(prepared_first: bool, target: str, fuses: bool) -> None:
    peft = pytest.importorskip("peft")
    block = build(SPELLINGS["mixtral"][0])
    original = copy.deepcopy(block)
    if prepared_first:
        ascend_deep.prepare(block)
    for m in (block, original):
        torch.manual_seed(17)
        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=[target], init_lora_weights=False)
        peft.inject_adapter_in_model(config, m)
    if not prepared_first:
        result = ascend_deep.prepare(block)
        assert bool(result.swapped) is fuses and bool(result.left) is not fuses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_same(run(block, block, X), run(original, original, X))
        assert uses_op(block) is fuses


@pytest.mark.parametrize("change", ["hook", "parametrisation", "activation"])
def test_other_changes_run_the_loop(change: str) -> None:
    block, original = prepared("mixtral")
    for m in (block, original):
        expert: Any = m.experts[3]  # type: ignore[index, union-attr]
        if change == "hook":
            expert.up_proj.register_forward_hook(lambda module, args, out: 1.5 * out)
        elif change == "parametrisation":
            nn.utils.parametrizations.weight_norm(expert.down_proj)
        else:
            expert.act_fn = nn.ReLU()
    with pytest.warns(UserWarning, match="Its own loop runs"):
        got = run(block, block, X)
    assert_same(got, run(original, original, X))


@pytest.mark.parametrize("change", ["data", "parameter", "lora"])
def test_a_compiled_graph_never_uses_old_experts(change: str) -> None:
    block, original = prepared()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=change != "lora")
    assert_same(run(compiled, block, X), run(original, original, X))
    for m in (block, original):
        torch.manual_seed(14)
        linear: Any = m.experts[2].w1  # type: ignore[index, union-attr]
        if change == "data":
            linear.weight.data = torch.randn_like(linear.weight)
        elif change == "parameter":
            linear.weight = nn.Parameter(torch.randn_like(linear.weight))
        else:
            m.experts[2].w1 = Lora(linear)  # type: ignore[index, union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(RuntimeError, match="changed after it was compiled"):
            run(compiled, block, X)
        assert_same(run(compiled, block, X), run(original, original, X))


def test_a_forward_that_somebody_wrapped_stays_theirs() -> None:
    block, original = prepared()
    ours, calls = block.forward, []
    block.forward = lambda x: calls.append(1) or ours(x)  # type: ignore[method-assign, func-returns-value]
    same(block, original)
    assert uses_op(block)
    ascend_deep.Prepared(block, (), ()).restore()
    same(block, original)
    assert not uses_op(block) and len(calls) == 4


def test_functional_call_takes_the_loop_with_the_given_parameters() -> None:
    block, original = prepared()
    given = {name: 1.5 * p.detach() for name, p in original.named_parameters()}
    x = torch.randn(*X, HIDDEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        got = torch.func.functional_call(block, given, (x,))
    torch.testing.assert_close(got, torch.func.functional_call(original, given, (x,)), rtol=1e-4, atol=1e-5)
    same(block, original)
    assert uses_op(block)


# -- the Hugging Face door --------------------------------------------------------------------------------------------
def hugging_face() -> tuple[Any, dict[str, torch.Tensor]]:
    pytest.importorskip("transformers")
    loaded = models.load("qwen3_moe", experts_implementation="eager", shape=(2, 9), training=True)
    return loaded.model, {"input_ids": loaded.kwargs["input_ids"]}


def test_hugging_face_save_pretrained(tmp_path: Path) -> None:
    model, batch = hugging_face()
    ascend_deep.prepare(model)
    with torch.no_grad():
        wanted = model(**batch).logits
        model.save_pretrained(tmp_path)
        assert "ascend_deep" not in (tmp_path / "config.json").read_text()
        other = type(model).from_pretrained(tmp_path, experts_implementation="eager")
        torch.testing.assert_close(other.train()(**batch).logits, wanted, rtol=2e-4, atol=2e-5)


def test_hugging_face_save_pretrained_with_a_loop_over_modules(tmp_path: Path) -> None:
    model, batch = hugging_face()
    for layer in model.model.layers:
        layer.mlp = _Adapted(model.config.hidden_size)
    keys = list(model.state_dict())
    with torch.no_grad():
        wanted = model(**batch).logits
        swapped = ascend_deep.prepare(model).swapped
        assert [s.module for s in swapped] == ["model.layers.0.mlp.inner", "model.layers.1.mlp.inner"]
        assert list(model.state_dict()) == keys
        torch.testing.assert_close(model(**batch).logits, wanted, rtol=2e-4, atol=2e-5)
        model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        if name in saved:
            assert torch.equal(saved[name], tensor)
    assert "model.layers.1.mlp.inner.experts.5.w3.weight" in saved


class _Adapted(nn.Module):
    """A hand-written block in a model of another width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(width, HIDDEN), build(Mistral), nn.Linear(HIDDEN, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x)))


def test_hugging_face_ddp_and_lora_on_the_router(tmp_path: Path) -> None:
    model, batch = hugging_face()
    ascend_deep.prepare(model)
    plain = copy.deepcopy(model)
    ascend_deep.Prepared(plain, (), ()).restore()
    for m in (model, plain):
        torch.manual_seed(15)
        for layer in m.model.layers:
            layer.mlp.gate.register_forward_hook(_router_delta(torch.randn(m.config.num_experts)))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        losses = []
        for function, m in ((wrapped, model), (plain, plain)):
            m.zero_grad()
            loss = function(**batch).logits.float().square().mean()
            loss.backward()
            losses.append((loss, m.model.layers[0].mlp.experts.down_proj.grad.clone()))
        torch.testing.assert_close(*(loss for loss, _ in losses), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(*(grad for _, grad in losses), rtol=1e-3, atol=1e-6)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("before", [True, False])
def test_hugging_face_lora_on_the_experts(before: bool) -> None:
    """PEFT puts LoRA on stacked parameters by a parametrisation: the op gets the sum."""
    model, batch = hugging_face()
    plain = copy.deepcopy(model)
    swapped = () if before else ascend_deep.prepare(model).swapped
    for m in (model, plain):
        torch.manual_seed(16)
        for layer in m.model.layers:
            nn.utils.parametrize.register_parametrization(layer.mlp.experts, "down_proj", _Delta(layer.mlp.experts))
    swapped = ascend_deep.prepare(model).swapped if before else swapped
    assert len(swapped) == 2
    grads = []
    for m in (model, plain):
        loss = m(**batch).logits.float().square().mean()
        loss.backward()
        delta = m.model.layers[1].mlp.experts.parametrizations.down_proj[0]
        grads.append((loss.detach(), delta.a.grad, delta.b.grad))
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6)
    assert float(grads[0][1].abs().max()) > 0


class _Delta(nn.Module):
    def __init__(self, experts: Any) -> None:
        super().__init__()
        count, out, width = experts.down_proj.shape
        self.a = nn.Parameter(torch.randn(count, 3, width) / 4)
        self.b = nn.Parameter(torch.randn(count, out, 3) / 4)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 0.7 * self.b @ self.a


def _router_delta(delta: torch.Tensor) -> Any:
    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        logits = out[0] if isinstance(out, tuple) else out
        changed = logits + 0.01 * delta.to(logits)
        return (changed, *out[1:]) if isinstance(out, tuple) else changed

    return hook
