"""Numbers of a config that a loop reads; loops in helper methods; experts that are frozen after a compile."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ascend_deep

H, I, E = 16, 12, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(H, I), nn.Linear(H, I), nn.Linear(I, H)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Reads from its config, inside the loop, which experts there are."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config or SimpleNamespace(first=0, count=E)
        self.router = nn.Linear(H, E)
        self.ffns = nn.ModuleList(Expert() for _ in range(E))

    def route(self, x: Tensor) -> Any:
        return self.router(x).softmax(-1).topk(2)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(self.config.first, self.config.count):
            token, k = torch.where(ids == e)
            if token.numel():
                out.index_add_(0, token, self.ffns[e](x[token]) * weights[token, k, None])
        return out


class Attributes:
    """Looks up attributes in a place of its own."""

    def __init__(self) -> None:
        self.count = E

    def __getattr__(self, name: str) -> int:
        if name != "first":
            raise AttributeError(name)
        return 0


class Helper(Block):
    """Everything is in a method."""

    def moe(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            token, k = torch.where(ids == e)
            if token.numel():
                out.index_add_(0, token, self.ffns[e](x[token]) * weights[token, k, None])
        return out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    """A block, and the same prepared."""
    torch.manual_seed(5)
    original = nn.Sequential(Block())
    block = copy.deepcopy(original)
    result = ascend_deep.prepare(block)
    assert len(result.swapped) == 1, str(result)
    return original, block


def test_a_number_of_a_config_may_be_read_and_is_watched(pair: tuple[Any, Any]) -> None:
    original, block = (copy.deepcopy(m) for m in pair)
    x = torch.randn(9, H)
    torch.testing.assert_close(block(x), original(x))
    for m in (original, block):
        m[0].config.first = 2
    with pytest.warns(UserWarning, match=r"'first', which its loop reads, was replaced after prepare"):
        got = block(x)
    torch.testing.assert_close(got, original(x))
    # The block that the copy was made from has a config of its own.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(pair[1](x), pair[0](x))


def test_another_config_is_noticed(pair: tuple[Any, Any]) -> None:
    original, block = (copy.deepcopy(m) for m in pair)
    x = torch.randn(9, H)
    for m in (original, block):
        m[0].config = SimpleNamespace(first=1, count=3)
    with pytest.warns(UserWarning, match=r"'config', which its loop reads, was replaced"):
        got = block(x)
    torch.testing.assert_close(got, original(x))


def test_configs_that_look_elsewhere_are_left() -> None:
    result = ascend_deep.prepare(nn.Sequential(Block(Attributes())))
    assert not result.swapped and "reads 'self.config', a Attributes" in result.left[0].reason, str(result)


def test_a_loop_in_a_method_is_listed_with_what_to_do() -> None:
    result = ascend_deep.prepare(nn.Sequential(Helper()))
    assert not result.swapped
    (left,) = result.left
    assert "its loop over experts is in the method 'moe'" in left.reason and "move the loop" in left.reason


def test_an_expert_that_is_frozen_after_the_compile_is_named(pair: tuple[Any, Any]) -> None:
    original, block = (copy.deepcopy(m) for m in pair)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    x = torch.randn(9, H)
    torch.testing.assert_close(compiled(x), original(x))
    for m in (original, block):
        m[0].ffns[1].up.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="requires_grad of one of its experts' parameters was changed") as caught:
        compiled(x)
    assert "old weights" not in str(caught.value)
    torch.testing.assert_close(compiled(x), original(x))
