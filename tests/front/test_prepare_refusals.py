"""``prepare`` leaves loops that depend on what the op does not look at, and watches the numbers that they read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ascend_deep
from tests.front.loop_blocks import EXPERTS, HIDDEN, WIDTH, Block, Expert, experts

LOG: list[int] = []
FACTOR = 1.0


class Loop(Block):
    """The plain loop, and places where it can be bent; ``every`` and ``result`` are overridden by the near misses."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(tokens)
        out = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            token, slot = self.every(e, idx, weights)
            out.index_add_(0, token, self.result(e, self.experts[e](tokens[token]), weights[token, slot, None]))
        return out.view(x.shape)

    def every(self, e: int, idx: Tensor, weights: Tensor) -> Any:
        return torch.where(idx == e)

    def result(self, e: int, y: Tensor, weight: Tensor) -> Tensor:
        return y * weight


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(tokens)
        out = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            chosen = idx == e
            if mask is not None:
                chosen = chosen & mask.reshape(-1, 1)
            token, slot = torch.where(chosen)
            out.index_add_(0, token, self.experts[e](tokens[token]) * weights[token, slot, None])
        return out.view(x.shape)


class Scaled(Block):
    """Through a local variable."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        tokens = x.reshape(-1, HIDDEN)
        factor = 2.0 * scale - 1.0
        _, weights, idx = self.router(tokens)
        out = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            token, slot = torch.where(idx == e)
            out.index_add_(0, token, self.experts[e](tokens[token]) * weights[token, slot, None] * factor)
        return out.view(x.shape)


class Buffer(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.ones(EXPERTS))

    def result(self, e: int, y: Tensor, weight: Tensor) -> Tensor:
        return y * weight * self.scales[e]  # type: ignore[index]


class BufferedExpert(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class ExpertBuffer(Loop):
    def __init__(self) -> None:
        super().__init__(BufferedExpert)


class Pruned(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.pruned: set[int] = set()

    def every(self, e: int, idx: Tensor, weights: Tensor) -> Any:
        return torch.where((idx == e) & (e not in self.pruned))


class Config:
    scale = 1.0


class Configured(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def result(self, e: int, y: Tensor, weight: Tensor) -> Tensor:
        return y * weight * self.config.scale


class Logged(Loop):
    def result(self, e: int, y: Tensor, weight: Tensor) -> Tensor:
        LOG.append(y.shape[0])
        return y * weight


class Clamped(Loop):
    def result(self, e: int, y: Tensor, weight: Tensor) -> Tensor:
        return y * weight.clamp(max=2.0)


class FarClamped(Loop):
    def result(self, e: int, y: Tensor, weight: Tensor) -> Tensor:
        return y * weight.clamp(max=30000.0)


class SkipsSmall(Loop):
    def every(self, e: int, idx: Tensor, weights: Tensor) -> Any:
        return torch.where((idx == e) & (weights.abs() > 0.02))


class Capacity(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.capacity = 8192

    def every(self, e: int, idx: Tensor, weights: Tensor) -> Any:
        token, slot = torch.where(idx == e)
        return token[: self.capacity], slot[: self.capacity]


class Bits(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.bits = 9

    def every(self, e: int, idx: Tensor, weights: Tensor) -> Any:
        limit = 1 << self.bits
        token, slot = torch.where(idx == e)
        return token[:limit], slot[:limit]


class ByDtype(Loop):
    def result(self, e: int, y: Tensor, weight: Tensor) -> Tensor:
        if y.dtype == torch.float16:
            y = y.clamp(-1000, 1000)
        return y * weight


class ByMode(Loop):
    def result(self, e: int, y: Tensor, weight: Tensor) -> Tensor:
        return y * weight + (1.0 if torch.is_grad_enabled() else 0.0)


class ByBatch(Block):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        tokens = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(tokens)
        out = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            token, slot = torch.where(idx == e)
            y = self.experts[e](tokens[token]) * weights[token, slot, None]
            if batch >= 8:
                y = y * 0.5
            out.index_add_(0, token, y)
        return out.view(batch, length, -1)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "argument": (Masked, "depends on the argument 'mask'"),
    "argument through a variable": (Scaled, "depends on the argument 'scale'"),
    "buffer": (Buffer, "reads the buffer 'scales'"),
    "buffer of an expert": (ExpertBuffer, "reads the buffer 'factor'"),
    "set": (Pruned, "reads 'self.pruned', a set"),
    "config": (Configured, "reads 'self.config', a Config"),
    "global list": (Logged, "reads the global 'LOG', a list"),
    "clamped weights": (Clamped, "computes something else on some tokens (with weights of about"),
    "weights clamped far away": (FarClamped, "computes something else on some tokens (with weights of about"),
    "small weights": (SkipsSmall, "computes something else on some tokens (with weights of about"),
    "capacity": (Capacity, "has the number 8192 (self.capacity)"),
    "computed capacity": (Bits, "computes a bound from fixed numbers"),
    "dtype": (ByDtype, "tests a dtype"),
    "gradients": (ByMode, "when gradients are enabled"),
    "batch": (ByBatch, "tests how many tokens there are"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_op_would_not_look_at_is_a_reason(name: str) -> None:
    make, reason = REFUSED[name]
    torch.manual_seed(7)
    prepared = ascend_deep.prepare(make())
    assert not prepared.swapped
    (left,) = prepared.left
    assert reason in left.reason and left.reason.endswith(".")


# -- numbers are watched ----------------------------------------------------------------------------------------------
class Factor(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.mode, self.factor = 0, 1.0

    def result(self, e: int, y: Tensor, weight: Tensor) -> Tensor:
        return y * weight * self.factor * FACTOR if self.mode == 0 else y


class Stacked(nn.Module):
    """No tensor is made for the op, so nothing but the compiler's guards can look."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Block().router
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.mode = 0

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        _, weights, idx = self.router(tokens)
        out = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            token, slot = torch.where(idx == e)
            y = F.relu(tokens[token] @ self.up[e]) @ self.down[e]
            if self.mode == 0:
                y = y * weights[token, slot, None] * FACTOR
            out.index_add_(0, token, y)
        return out.view(x.shape)


class Gelu(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.experts = experts(lambda: Expert(nn.GELU()))


def approximate(block: Any) -> None:
    for expert in block.experts:
        expert.act_fn.approximate = "tanh"


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "float": (Factor, lambda m: setattr(m, "factor", 3.0)),
    "int": (Factor, lambda m: setattr(m, "mode", 1)),
    "stacked": (Stacked, lambda m: setattr(m, "mode", 1)),
    "setting of an activation": (Gelu, approximate),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_number_that_changes_later_lets_the_loop_run(name: str) -> None:
    make, change = CHANGES[name]
    torch.manual_seed(8)
    block = make()
    original = copy.deepcopy(block)
    assert len(ascend_deep.prepare(block).swapped) == 1
    x = torch.randn(2, 9, HIDDEN)
    change(block), change(original)
    with pytest.warns(UserWarning, match="Its own loop runs"), torch.no_grad():
        assert torch.equal(block(x), original(x))


@pytest.mark.parametrize("make", [Factor, Stacked])
def test_a_global_that_changes_later_lets_the_loop_run(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(8)
    block = make()
    original = copy.deepcopy(block)
    assert len(ascend_deep.prepare(block).swapped) == 1
    monkeypatch.setitem(globals(), "FACTOR", 3.5)
    x = torch.randn(2, 9, HIDDEN)
    with pytest.warns(UserWarning, match="'FACTOR'"), torch.no_grad():
        assert torch.equal(block(x), original(x))


@pytest.mark.parametrize("make", [Factor, Stacked])
def test_a_compiled_graph_notices_a_number_that_changes(make: Callable[[], nn.Module]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(9)
    block = make()
    original = copy.deepcopy(block)
    assert len(ascend_deep.prepare(block).swapped) == 1
    compiled = torch.compile(block, backend="eager")
    x = torch.randn(2, 9, HIDDEN)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), original(x), rtol=1e-4, atol=1e-5)
        for m in (block, original):
            m.mode = 1  # type: ignore[assignment]
        torch.testing.assert_close(compiled(x), original(x), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


class Numbered(Block):
    """The base class reads the number of the layer; a subclass reads nothing."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(tokens)
        out = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            token, slot = torch.where(idx == e)
            y = self.experts[e](tokens[token])
            if self.layer_idx == 0:
                y = y * weights[token, slot, None]
            out.index_add_(0, token, y)
        return out.view(x.shape)


class Inherits(Numbered):
    pass


def test_a_number_of_a_layer_that_a_base_class_reads_counts() -> None:
    torch.manual_seed(10)
    layers = nn.Sequential(Inherits(0), Inherits(1))
    original = copy.deepcopy(layers)
    ascend_deep.prepare(layers, verify=False)
    x = torch.randn(2, 9, HIDDEN)
    with torch.no_grad():
        torch.testing.assert_close(layers(x), original(x), rtol=1e-4, atol=1e-5)


class Unlimited(Loop):
    """A limit that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = float("inf")

    def result(self, e: int, y: Tensor, weight: Tensor) -> Tensor:
        return y.clamp(max=self.limit) * weight


class Converts(Loop):
    def result(self, e: int, y: Tensor, weight: Tensor) -> Tensor:
        if y.dtype != weight.dtype:
            y = y.to(weight.dtype)
        return y * weight


class MaskedBefore(Block):
    """The mask is applied to the weights, before the loop: these statements stay."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(tokens)
        if mask is not None:
            weights = weights * mask.reshape(-1, 1)
        out = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            token, slot = torch.where(idx == e)
            out.index_add_(0, token, self.experts[e](tokens[token]) * weights[token, slot, None])
        return out.view(x.shape)


@pytest.mark.parametrize("make", [Unlimited, Converts, MaskedBefore])
def test_what_looks_like_a_reason_and_is_none(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(11)
    block = make()
    original = copy.deepcopy(block)
    assert len(ascend_deep.prepare(block).swapped) == 1
    x, more = torch.randn(2, 9, HIDDEN), (torch.rand(2, 9) < 0.5,) if make is MaskedBefore else ()
    with torch.no_grad():
        torch.testing.assert_close(block(x, *more), original(x, *more), rtol=1e-4, atol=1e-5)
