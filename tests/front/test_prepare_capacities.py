"""Loops that drop tokens beyond a capacity, which only many tokens reach: each is left, and the reason says why."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ascend_deep
from tests.front.loop_blocks import EXPERTS, HIDDEN, Block

Choice = tuple[Tensor, Tensor]


class Loop(Block):
    """Of the tokens and slots that chose an expert it takes what ``cut`` leaves."""

    def cut(self, token: Tensor, slot: Tensor, total: int) -> Choice:
        return token, slot

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            token, slot = torch.where(idx == e)
            token, slot = self.cut(token, slot, flat.shape[0])
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, slot, None])
        return out.view(x.shape)


def nearly_all(self: Any, token: Tensor, slot: Tensor, total: int) -> Choice:
    room = int(0.999 * total) + 1
    return token[:room], slot[:room]


def all_but_one_of_512(self: Any, token: Tensor, slot: Tensor, total: int) -> Choice:
    return token[: total - (total >> 9)], slot[: total - (total >> 9)]


def rounded_up(self: Any, token: Tensor, slot: Tensor, total: int) -> Choice:
    room = math.ceil(total * 0.9995)
    return token[:room], slot[:room]


def by_digits(self: Any, token: Tensor, slot: Tensor, total: int) -> Choice:
    room = total if len(str(total)) < 5 else 10000
    return token[:room], slot[:room]


def at_most(self: Any, token: Tensor, slot: Tensor, total: int) -> Choice:
    return token[: min(total, 4096)], slot[: min(total, 4096)]


def without_a_part(self: Any, token: Tensor, slot: Tensor, total: int) -> Choice:
    room = total - int(total * 1e-4)
    return token[:room], slot[:room]


def by_list(self: Any, token: Tensor, slot: Tensor, total: int) -> Choice:
    kept = token.tolist()[: total - (total >> 9)]
    return token[: len(kept)], slot[: len(kept)]


def by_pairs(self: Any, token: Tensor, slot: Tensor, total: int) -> Choice:
    kept = [t for t, _ in zip(token.unbind(), range(4096), strict=False)]
    return token[: len(kept)], slot[: len(kept)]


def behind(self: Any, token: Tensor, slot: Tensor, total: int) -> Choice:
    return token[max(0, total - 4096) :], slot[max(0, total - 4096) :]


def short_positions(self: Any, token: Tensor, slot: Tensor, total: int) -> Choice:
    return token.to(torch.int16).long(), slot


CAPACITIES = (
    nearly_all, all_but_one_of_512, rounded_up, by_digits, at_most, without_a_part, behind, by_list, by_pairs,
    short_positions,
)  # fmt: skip


def made(cut: Callable[..., Choice] | None) -> nn.Module:
    torch.manual_seed(5)
    return type("Made", (Loop,), {"cut": cut} if cut is not None else {})()  # type: ignore[no-any-return]


@pytest.mark.parametrize("cut", CAPACITIES, ids=lambda cut: cut.__name__)
def test_a_capacity_that_few_tokens_do_not_reach(cut: Callable[..., Choice]) -> None:
    prepared = ascend_deep.prepare(made(cut))
    assert not prepared.swapped
    (left,) = prepared.left
    assert left.reason.endswith("."), left.reason
    assert "source" not in left.reason and "failed" not in left.reason, left.reason


def test_without_one_the_loop_is_swapped() -> None:
    assert len(ascend_deep.prepare(made(None)).swapped) == 1
