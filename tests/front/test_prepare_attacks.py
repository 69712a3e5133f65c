"""Loops that are a mixture of experts in most circumstances only: each is left with a reason, or watched.

Every block here was written against ``prepare``: in the circumstances in which it is tried first it is exactly what
``moe_experts`` computes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ascend_deep
from tests.front.loop_blocks import EXPERTS, HIDDEN, Block, Expert, assert_noticed

TABLE = {"factor": 1.0}
FACTOR = 1.0


class Loop(Block):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, slot = torch.where(idx == e)
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, slot, None])
        return out.view(x.shape)


def of(body: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A loop over experts whose forward is ``body(self, x, y)``, with what an ordinary expert gives as ``y``."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return body(self, x, Expert.forward(self, x))

    return lambda: Loop(lambda: type("Made", (Expert,), {"forward": forward})())


# -- experts that are left ------------------------------------------------------------------------------------------
def no_nan(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.nan_to_num(y)


def only_finite(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(torch.isfinite(y), y, torch.zeros_like(y))


def unequal_to_itself(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return y.masked_fill(y != y, 0.0)


def finite_at_all(self: Any, x: Tensor, y: Tensor) -> Tensor:
    if not y.isfinite().all():
        y = torch.zeros_like(y)
    return y


def far_above(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=1e8)) * self.up_proj(x))  # type: ignore[no-any-return]


def far_away(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return y - F.relu(y - 1e15)


def far_tokens(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return Expert.forward(self, x.clamp(-3e5, 3e5))


def far_parameters(self: Any, x: Tensor, y: Tensor) -> Tensor:
    down = self.down_proj.weight.clamp(-1e6, 1e6)
    return F.linear(self.act_fn(self.gate_proj(x)) * self.up_proj(x), down)


def by_parameters(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return x if float(self.down_proj.weight.abs().max()) > 1e6 else y


def by_frozen(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return y if self.down_proj.weight.requires_grad else y * 3.0


def by_version(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return y * (2.0 if self.down_proj.weight._version > 100 else 1.0)


def by_strides(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return y * (1.0 if x.is_contiguous() else 2.0)


def by_default(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return listed(y)


def listed(y: Tensor, factors: list[float] = [1.0]) -> Tensor:  # noqa: B006 (that is the point)
    return y * factors[0]


def by_remainder(self: Any, x: Tensor, y: Tensor) -> Tensor:
    if x.shape[0] % 300 == 0 and x.shape[0] > 0:
        y = y * 2
    return y


def by_table(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return y * {300: 2.0}.get(len(x), 1.0)


def by_steps(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return y * (1.0 + x.shape[0] // 4000 // 2)


def by_match(self: Any, x: Tensor, y: Tensor) -> Tensor:
    match x.shape[0]:
        case 300:
            return y * 2
    return y


def spoils_its_input(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x.zero_()
    return y


def wrapped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Tensor:
        return function(*args) * TABLE["factor"]

    return wrapper


class Decorated(Expert):
    @wrapped
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Factor:
    """An object that is no module."""

    def __init__(self) -> None:
        self.factor = 1.0

    def times(self, y: Tensor) -> Tensor:
        return y * self.factor


class WithMethod(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.factor = Factor()
        self.times = self.factor.times

    def forward(self, x: Tensor) -> Tensor:
        return self.times(super().forward(x))


class WithLambda(Expert):
    def __init__(self) -> None:
        super().__init__()
        factors = [1.0]
        self.times = lambda y: y * factors[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.times(super().forward(x))


class Remainder(Loop):
    """Of the tokens of one expert."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, slot = torch.where(idx == e)
            if token.numel() == 37:
                continue
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, slot, None])
        return out.view(x.shape)


def shared_memory() -> nn.Module:
    block: Any = Loop()
    block.experts[1].up_proj.weight = nn.Parameter(block.experts[0].up_proj.weight.data)
    return block  # type: ignore[no-any-return]


TOKENS, PARAMETERS = "of its tokens or weights", "its parameters"
LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "nan_to_num": (of(no_nan), "calls nan_to_num"),
    "where isfinite": (of(only_finite), "calls isfinite"),
    "unequal to itself": (of(unequal_to_itself), "are equal to others"),
    "branch on isfinite": (of(finite_at_all), "calls isfinite"),
    "clamp of the gate": (of(far_above), "clamp on values of its tokens or weights with 1e+08"),
    "relu far away": (of(far_away), "something else on some tokens (with tokens of about 3e+11)"),
    "clamp of the tokens": (of(far_tokens), "clamp on values of its tokens or weights with -300000"),
    "clamp of parameters": (of(far_parameters), "clamp on its parameters with -1e+06"),
    "branch on parameters": (of(by_parameters), "its parameters"),
    "branch on requires_grad": (of(by_frozen), "asks 'requires_grad'"),
    "version": (of(by_version), "asks '_version'"),
    "strides": (of(by_strides), "asks 'is_contiguous'"),
    "default": (of(by_default), "'listed' has a list as a default"),
    "remainder": (of(by_remainder), "how many tokens there are"),
    "remainder of one expert": (Remainder, "how many tokens there are"),
    "table": (of(by_table), "how many tokens there are"),
    "steps": (of(by_steps), "how many tokens there are"),
    "match": (of(by_match), "how many tokens there are"),
    "input in place": (of(spoils_its_input), "does not run on values of our choosing"),
    "decorator": (lambda: Loop(Decorated), "reads the global 'TABLE', a dict"),
    "method of an object": (lambda: Loop(WithMethod), "'times' of a Factor"),
    "lambda": (lambda: Loop(WithLambda), "'factors', a list"),
    "memory of two parameters": (shared_memory, "share their memory"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_with_the_reason(name: str) -> None:
    make, reason = LEFT[name]
    torch.manual_seed(11)
    prepared = ascend_deep.prepare(make())
    assert not prepared.swapped
    (left,) = prepared.left
    assert reason in left.reason, left.reason


# -- swapped, and watched -------------------------------------------------------------------------------------------
def by_class(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return y * type(self).gain  # type: ignore[no-any-return]


class Gained(Expert):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return by_class(self, x, super().forward(x))


class Dropped(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x))  # type: ignore[no-any-return]


class Own(nn.Linear):
    """A linear layer with a factor of its class."""

    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.gain, self.bias)


class WithOwn(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = Own(HIDDEN, self.up_proj.out_features, bias=False)


def by_variable() -> nn.Module:
    factor = 1.0

    def forward(self: Any, x: Tensor) -> Tensor:
        return Expert.forward(self, x) * factor

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    made = type("Made", (Expert,), {"forward": forward, "change": staticmethod(change)})
    return Loop(made)


WATCHED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, pytest.MonkeyPatch], Any], str]] = {
    "attribute of the class": (lambda: Loop(Gained), lambda m, p: p.setattr(Gained, "gain", 3.0), "'gain'"),
    "attribute over that of the class": (
        lambda: Loop(WithOwn), lambda m, p: setattr(m.experts[1].up_proj, "gain", 2.0), "'gain'",
    ),
    "variable of a function": (by_variable, lambda m, p: m.experts[0].change(2.0), "the variable 'factor'"),
    "forward of a layer": (
        Loop, lambda m, p: p.setattr(nn.SiLU, "forward", lambda self, x: x), "'forward' of a class",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WATCHED)
def test_changes_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change, message = WATCHED[name]
    assert_noticed(make, lambda m: change(m, monkeypatch), message)


def test_dropout_that_is_turned_on_later_runs_the_loop() -> None:
    torch.manual_seed(13)
    block: Any = Loop(Dropped)
    assert len(ascend_deep.prepare(block).swapped) == 1
    x = torch.randn(2, 9, HIDDEN)
    for expert in block.experts:
        expert.drop.p = 0.5
    with pytest.warns(UserWarning, match="'p'"):
        a, b = block.train()(x), block(x)
    assert not torch.allclose(a, b)


def test_hooks_on_parameters_are_called() -> None:
    torch.manual_seed(14)
    block: Any = Loop()
    original = copy.deepcopy(block)
    for m in (block, original):
        m.experts[2].up_proj.weight.register_hook(lambda grad: 2 * grad)
    assert len(ascend_deep.prepare(block).swapped) == 1
    x = torch.randn(2, 9, HIDDEN)
    for m in (block, original):
        m(x).square().sum().backward()
    for a, b in zip(block.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)
