"""prepare on hand-written loops: every spelling equal to eager in one graph, what is almost one left with a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import ascend_deep
from tests.front.loop_blocks import HIDDEN, SPELLINGS
from tests.front.loop_misses import NEAR_MISSES

THROUGH_AUTOGRAD = ("mixtral", "grouped", "deepseek", "on_shared")

Result = tuple[list[Tensor], Tensor, dict[str, Tensor]]


def build(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """A block whose experts are far from each other and whose vectors are not zero."""
    torch.manual_seed(seed)
    block = make()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.dim() == 1 else 0.3))
    return block


def run(function: Callable[..., Any], block: nn.Module, shape: tuple[int, int], seed: int = 4) -> Result:
    """Every tensor that the block returns, and the gradients of its input and parameters (zero if there is none)."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(block.parameters()).dtype
    x = torch.randn(*shape, HIDDEN, generator=generator).to(dtype).requires_grad_()
    block.zero_grad()
    out = [t for t in tree_flatten(function(x))[0] if isinstance(t, Tensor)]
    total = sum((t * torch.randn(t.shape, generator=generator)).sum() for t in out if t.requires_grad)
    assert isinstance(total, Tensor) and x.numel()
    total.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in block.named_parameters()}
    assert x.grad is not None
    return [t.detach().clone() for t in out], x.grad, grads


def assert_same(got: Result, wanted: Result, rtol: float = 1e-4) -> None:
    pairs = [*zip(got[0], wanted[0], strict=True), (got[1], wanted[1])]
    pairs += [(got[2][name], grad) for name, grad in wanted[2].items()]
    for a, b in pairs:
        assert a.dtype == b.dtype and a.shape == b.shape
        scale = float(b.abs().max())
        assert float((a - b).abs().max()) <= rtol * scale + 1e-6


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SPELLINGS)
def test_equal_to_eager_in_one_graph(name: str) -> None:
    make, spec = SPELLINGS[name]
    block = build(make)
    keys = list(block.state_dict())
    original = copy.deepcopy(block)
    prepared = ascend_deep.prepare(block)
    assert [s.spec.describe() for s in prepared.swapped] == [spec] and not prepared.left, str(prepared)
    assert list(block.state_dict()) == keys
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append([n.target for n in gm.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager" if name in THROUGH_AUTOGRAD else "eager")(gm, inputs)

    for training in (True, False):
        block.train(training), original.train(training)
        for shape in ((1, 1), (1, 64)):
            assert_same(run(block, block, shape), run(original, original, shape))
        if training and name not in THROUGH_AUTOGRAD:
            continue
        compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=True)
        for shape in ((2, 5), (3, 7)):
            assert_same(run(compiled, block, shape), run(original, original, shape))
    compiles = 2 if name in THROUGH_AUTOGRAD else 1
    assert [targets.count(torch.ops.ascend_deep.moe_experts) for targets in seen] == [1] * compiles
    prepared.restore()
    assert [k for m in block.modules() for k in vars(m) if "ascend_deep" in k or k == "forward"] == []
    assert_same(run(block, block, (2, 5)), run(original, original, (2, 5)), rtol=1e-6)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_almost_a_mixture_is_left_with_a_reason(name: str) -> None:
    make, reason = NEAR_MISSES[name]
    torch.manual_seed(5)
    block = make()
    original = copy.deepcopy(block)
    prepared = ascend_deep.prepare(block)
    assert not prepared.swapped
    (left,) = prepared.left
    assert reason in left.reason and left.reason.endswith(".")
    x = torch.randn(1, 40, HIDDEN)
    with torch.no_grad():
        assert torch.equal(block(x.clone()), original(x.clone()))


@pytest.mark.parametrize(
    ("name", "dtype"), [("mixtral", torch.bfloat16), ("interleaved", torch.float16), ("stacked", torch.bfloat16)]
)
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    block = build(SPELLINGS[name][0]).to(dtype).eval()
    original = copy.deepcopy(block)
    assert len(ascend_deep.prepare(block).swapped) == 1
    assert_same(run(block, block, (3, 9)), run(original, original, (3, 9)), rtol=6e-2)


@pytest.mark.parametrize(("name", "modes"), [("mixtral", (True, False)), ("deepseek", (False,))])
def test_autocast(name: str, modes: tuple[bool, ...]) -> None:
    # DeepSeek's code gives bfloat16 in evaluation, and does not run under autocast in training.
    block = build(SPELLINGS[name][0])
    original = copy.deepcopy(block)
    assert len(ascend_deep.prepare(block).swapped) == 1
    x = torch.randn(2, 9, HIDDEN)
    for training in modes:
        block.train(training), original.train(training)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            got, wanted = (tree_flatten(m(x))[0][0] for m in (block, original))
        assert got.dtype == wanted.dtype
        assert float((got - wanted).abs().max()) <= 3e-2 * float(wanted.abs().max())


class Dropped(nn.Module):
    """Experts with dropout: a mixture of experts in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.block = build(SPELLINGS["mistral"][0])
        for expert in self.block.experts:  # type: ignore[union-attr]
            expert.w2 = nn.Sequential(nn.Dropout(0.5), expert.w2)

    def forward(self, x: Tensor) -> Any:
        return self.block(x)


def test_dropout_inside_experts_is_left_in_training_and_swapped_in_evaluation() -> None:
    block = Dropped()
    original = copy.deepcopy(block)
    (swapped,) = ascend_deep.prepare(block).swapped
    assert swapped.spec.describe() == "gelu_tanh, loop over 6 modules, in evaluation only"
    for training in (True, False):
        block.train(training), original.train(training)
        results = []
        for m in (block, original):
            torch.manual_seed(6)
            results.append(run(m, m, (2, 9)))
        assert_same(*results)


def test_equal_layers_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ascend_deep import loop_find

    examined: list[str] = []
    original = loop_find._examine
    monkeypatch.setattr(loop_find, "_examine", lambda *a: examined.append(a[2]) or original(*a))
    layers = nn.Sequential(*(build(SPELLINGS["mistral"][0], seed) for seed in range(3)))
    prepared = ascend_deep.prepare(layers)
    assert [s.module for s in prepared.swapped] == ["0", "1", "2"]
    assert len(examined) == 1
    assert "moe_experts  3× Mistral" in str(prepared)


def test_meta_weights_are_decided_without_data() -> None:
    with torch.device("meta"):
        block = SPELLINGS["mixtral"][0]()
    assert len(ascend_deep.prepare(block).swapped) == 1
    block.to_empty(device="cpu")
    filled = build(SPELLINGS["mixtral"][0])
    block.load_state_dict(filled.state_dict())
    assert_same(run(block, block, (2, 5)), run(filled, filled, (2, 5)))


def test_source_that_is_not_there_is_a_reason() -> None:
    scope: dict[str, Any] = {"nn": nn, "torch": torch, "Block": SPELLINGS["mistral"][0]}
    exec("class Typed(Block):\n    def forward(self, x):\n        return Block.forward(self, x) * 2\n", scope)
    (left,) = ascend_deep.prepare(build(scope["Typed"])).left
    assert "source of its forward is not available" in left.reason
