"""prepare on expert loops of transformers that have a shape of their own: DBRX, LongCat-Flash, JetMoE, Muse-Spark."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ascend_deep
from ascend_deep import hf_loops
from ascend_deep.coverage import build
from ascend_deep.coverage.families import find

pytest.importorskip("transformers")

FAMILIES = ("dbrx", "longcat_flash", "jetmoe", "muse_spark")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def blocks() -> dict[str, nn.Module]:
    """The MoE block of each family, with random weights; copies are taken of it."""
    made = {}
    for name in FAMILIES:
        family = find(name)
        model = build.build(family, "eager").model
        (experts,) = build.experts_of(family, model)
        made[name] = experts if name == "jetmoe" else build.blocks_of(family, model)[0]
    return made


def tokens(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 9, 64), seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def observe(call: Any, block: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of the tokens and of every parameter."""
    x = x.clone().requires_grad_()
    out = call(x)
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    grads = torch.autograd.grad(out, [x, *block.parameters()], towards, allow_unused=True)
    kept = [torch.zeros(()) if g is None else g for g in grads]
    return [out.detach(), *kept]


def assert_same(got: list[Tensor], wanted: list[Tensor], rtol: float) -> None:
    assert got[0].dtype == wanted[0].dtype
    for a, b in zip(got, wanted, strict=True):
        scale = max(float(b.abs().max()), 1e-6)
        assert float((a.double() - b.double()).abs().max()) <= rtol * scale


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_eager_in_one_graph_and_restored(blocks: dict[str, nn.Module], family: str) -> None:
    block = copy.deepcopy(blocks[family])
    keys, wanted = list(block.state_dict()), observe(block, block, tokens())
    prepared = ascend_deep.prepare(block)
    assert len(prepared.swapped) == 1 and not prepared.left, str(prepared)
    assert list(block.state_dict()) == keys
    again = ascend_deep.prepare(block)
    assert [s.spec for s in again.swapped] == [s.spec for s in prepared.swapped] and not again.left
    compiled = torch.compile(block, backend="ascend_deep", fullgraph=True, options={"downstream": "eager"})
    twin = copy.deepcopy(block)
    for call, owner in ((block, block), (twin, twin), (compiled, block)):
        assert_same(observe(call, owner, tokens()), wanted, 2e-4)
    assert {"moe_route", "moe_experts"} <= set(ascend_deep.last_report().counts())
    one = tokens(shape=(1, 1, 64), seed=4)
    assert_same(observe(twin, twin, one), observe(blocks[family], blocks[family], one), 2e-4)
    prepared.restore()
    assert_same(observe(block, block, tokens()), wanted, 0.0)
    assert not any("forward" in vars(m) for m in block.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_low_precision_and_training_mode(blocks: dict[str, nn.Module], family: str) -> None:
    block = copy.deepcopy(blocks[family]).to(torch.bfloat16).train()
    wanted = observe(block, block, tokens(torch.bfloat16))
    assert len(ascend_deep.prepare(block).swapped) == 1
    assert_same(observe(block, block, tokens(torch.bfloat16)), wanted, 4e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pickled_module_has_its_own_loop_again(blocks: dict[str, nn.Module], family: str) -> None:
    block = copy.deepcopy(blocks[family])
    wanted = block(tokens())
    ascend_deep.prepare(block)
    buffer = io.BytesIO()
    torch.save(block, buffer)
    buffer.seek(0)
    back = torch.load(buffer, weights_only=False)
    torch.testing.assert_close(back(tokens()), wanted, rtol=2e-4, atol=2e-5)
    assert len(ascend_deep.prepare(back).swapped) == 1


def experts_of(block: nn.Module) -> Any:
    (found,) = [m for m in block.modules() if hf_loops.is_known(m)]
    return found


def test_experts_that_return_the_token_are_weighed(blocks: dict[str, nn.Module]) -> None:
    experts = copy.deepcopy(experts_of(blocks["longcat_flash"]))
    assert experts.zero_expert_num > 0
    count, total = experts.num_routed_experts, experts.total_experts
    x, weights = tokens(shape=(6, 64)), 0.2 + torch.rand(6, 2, generator=torch.Generator().manual_seed(6))
    idx = torch.tensor([[0, count], [count, total - 1], [1, 3], [total - 1, 2], [count, 0], [5, count]])
    wanted = experts(x, idx, weights)
    ascend_deep.prepare(experts)
    got = experts(x, idx, weights)
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(got[1], x[1] * weights[1].sum(), rtol=1e-5, atol=1e-6)


# -- what must not be swapped, or not stay swapped ------------------------------------------------------------------
def test_a_hook_on_a_part_brings_the_loop_back(blocks: dict[str, nn.Module]) -> None:
    block = copy.deepcopy(blocks["dbrx"])
    wanted = block(tokens())
    ascend_deep.prepare(block)
    seen: list[int] = []
    experts_of(block).mlp.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="Its own loop runs"):
        block(tokens())
    assert seen
    seen.clear()
    compiled = torch.compile(block, backend="ascend_deep", options={"downstream": "eager"})
    torch.testing.assert_close(compiled(tokens()), wanted, rtol=2e-4, atol=2e-5)
    assert seen
    hooked = copy.deepcopy(blocks["dbrx"])
    experts_of(hooked).mlp.register_forward_hook(lambda *_: None)
    assert "a hook is attached" in ascend_deep.prepare(hooked).left[0].reason


def test_another_activation_after_the_swap_brings_the_loop_back(blocks: dict[str, nn.Module]) -> None:
    for family, name in (("longcat_flash", "act_fn"), ("jetmoe", "activation")):
        block = copy.deepcopy(blocks[family])
        ascend_deep.prepare(block)
        before = block(tokens())
        setattr(experts_of(block), name, nn.Tanh())
        with pytest.warns(UserWarning, match="Its own loop runs"):
            got = block(tokens())
        own = copy.deepcopy(blocks[family])
        setattr(experts_of(own), name, nn.Tanh())
        torch.testing.assert_close(got, own(tokens()))
        assert float((got - before).abs().max()) > 1e-2
        left = ascend_deep.prepare(own)
        assert not left.swapped and "none of those that moe_experts knows" in left.left[0].reason


def test_a_class_that_computes_something_else_is_left(
    blocks: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = copy.deepcopy(blocks["longcat_flash"])
    kind = type(experts_of(block))
    original = kind.forward
    # Experts that return the token count twice: everything else is as transformers has it.
    monkeypatch.setattr(
        kind,
        "forward",
        lambda self, x, idx, w: original(self, x, idx, torch.where(idx >= self.num_routed_experts, 2 * w, w)),
    )
    wanted = block(tokens())
    prepared = ascend_deep.prepare(block)
    assert not prepared.swapped and "results or gradients differ" in prepared.left[0].reason
    assert torch.equal(block(tokens()), wanted)


def test_a_subclass_is_not_taken_for_its_parent(blocks: dict[str, nn.Module]) -> None:
    block = copy.deepcopy(blocks["dbrx"])
    experts = experts_of(block)
    experts.__class__ = type(
        "Halved", (type(experts),), {"forward": lambda s, *a: type(s).__mro__[1].forward(s, *a) / 2}
    )
    wanted = block(tokens())
    prepared = ascend_deep.prepare(block)
    assert not prepared.swapped
    assert torch.equal(block(tokens()), wanted)


def test_a_norm_over_all_rows_is_left(blocks: dict[str, nn.Module]) -> None:
    class Whitened(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    block: Any = copy.deepcopy(blocks["muse_spark"])
    block.experts.post_expert_norm = Whitened()
    wanted = block(tokens())
    prepared = ascend_deep.prepare(block)
    assert not prepared.swapped and "computes something else" in prepared.left[0].reason
    assert torch.equal(block(tokens()), wanted)


def test_a_norm_that_makes_something_of_nothing(blocks: dict[str, nn.Module]) -> None:
    block: Any = copy.deepcopy(blocks["muse_spark"])
    experts = block.experts
    experts.post_expert_norm = nn.LayerNorm(experts.hidden_dim)
    nn.init.normal_(experts.post_expert_norm.bias)
    x = tokens(shape=(5, experts.hidden_dim))
    idx = torch.tensor([[0, 3], [8, 1], [8, 8], [2, 8], [4, 5]])  # 8: elsewhere, as transformers marks it
    weights = 0.2 + torch.rand(5, 2, generator=torch.Generator().manual_seed(8))
    wanted = experts(x, idx, weights)
    assert len(ascend_deep.prepare(block).swapped) == 1
    got = experts(x, idx, weights)
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)
    assert float(got[2].detach().abs().max()) == 0.0


def test_experts_with_a_norm_are_not_quantised(blocks: dict[str, nn.Module]) -> None:
    block: Any = copy.deepcopy(blocks["muse_spark"])
    prepared = ascend_deep.prepare(block, quantize="fp8")
    assert any("it normalises what every expert gives" in item.reason for item in prepared.left)
