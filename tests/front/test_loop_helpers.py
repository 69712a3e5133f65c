"""Where a loop over experts is, if it is not in ``forward``: read off the code, and listed by ``prepare``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ascend_deep
from ascend_deep.loop_helpers import loop_elsewhere

H, I, E = 16, 12, 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(H, I), nn.Linear(H, I), nn.Linear(I, H)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """No name in it says that it has experts."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.parts = nn.Linear(H, E), nn.ModuleList(Mlp() for _ in range(E))
        self.w1, self.w2 = nn.Parameter(torch.randn(E, I, H)), nn.Parameter(torch.randn(E, H, I))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)

    def outer(self, x: Tensor) -> Tensor:
        return self.inner(x) * 0.7


class OddName(Block):
    def inner(this, x: Tensor) -> Tensor:
        share, ids = this.choose(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, part in enumerate(this.parts):
            token, slot = torch.where(ids == e)
            out = out.index_add(0, token, part(x[token]) * share[token, slot, None])
        return out


class ByMethod(Block):
    """The loop calls a method that reads the experts."""

    def one(self, x: Tensor, e: int) -> Tensor:
        return F.silu(x @ self.w1[e].t()) @ self.w2[e].t()

    def inner(self, x: Tensor) -> Tensor:
        ids = self.choose(x).argmax(-1)
        return sum(self.one(x, e) * (ids == e).unsqueeze(-1) for e in range(E))  # type: ignore[return-value]


def _dispatch(block: Block, x: Tensor) -> Tensor:
    ids = block.choose(x).argmax(-1)
    out = torch.zeros_like(x)
    for e in range(E):
        out[ids == e] = block.parts[e](x[ids == e])
    return out


def _each(x: Tensor, ids: Tensor, *, parts: nn.ModuleList) -> Tensor:
    out = torch.zeros_like(x)
    for e, part in enumerate(parts):
        out[ids == e] = part(x[ids == e])
    return out


class ByFunction(Block):
    def inner(self, x: Tensor) -> Tensor:
        return _dispatch(self, x)


class ByList(Block):
    def inner(self, x: Tensor) -> Tensor:
        return _each(x, self.choose(x).argmax(-1), parts=self.parts)


class Layers(Block):
    """One after another: nothing is chosen."""

    def inner(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return x


class Elsewhere(Block):
    """A loop, over something else."""

    def inner(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x * (self.choose(x).argmax(-1, keepdim=True) == 1)
        return x


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (OddName, "the method 'inner'"),
        (ByMethod, "the method 'inner'"),
        (ByFunction, "the function '_dispatch'"),
        (ByList, "the function '_each'"),
        (Layers, None),
        (Elsewhere, None),
    ],
)
def test_the_place_of_a_loop(kind: type[Block], where: str | None) -> None:
    assert loop_elsewhere(kind, {"parts", "w1", "w2"}) == where
    assert loop_elsewhere(kind, {"others"}) is None


def test_prepare_lists_it_though_nothing_is_named_so() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.norm = OddName(), nn.LayerNorm(H)
            del self.block.w1, self.block.w2

        def forward(self, x: Tensor) -> Tensor:
            return x + self.block(self.norm(x))  # type: ignore[no-any-return]

    result = ascend_deep.prepare(Model())
    assert not result.swapped
    (left,) = result.left
    assert left.module == "block" and "its loop over experts is in the method 'inner'" in left.reason, left
