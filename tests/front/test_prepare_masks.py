"""prepare on loops that get their ids as a mask of zeros and ones, as Switch Transformers does; masks that lie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ascend_deep
from ascend_deep.loop_masks import OneHot, ids_of, mask_of

HIDDEN, WIDTH, EXPERTS = 16, 24, 5


class Experts(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__()
        for i in range(EXPERTS):
            self[f"expert_{i}"] = nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.ReLU(), nn.Linear(WIDTH, HIDDEN))

    def forward(self, x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        by_expert = mask.permute(2, 1, 0)
        for hit in torch.greater(by_expert.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(by_expert[hit].squeeze(0))
            y = self[f"expert_{hit[0]}"](x[token]) * weights[token, slot, None]
            out.index_add_(0, token, y)
        return out


class Switch(nn.Module):
    """A token's expert is the first of its logits, unless ``capacity`` tokens of its row chose that one before."""

    capacity = 4

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.experts = Experts()

    def mask(self, logits: Tensor) -> Tensor:
        chosen = F.one_hot(logits.argmax(-1), EXPERTS)
        return chosen * (chosen.cumsum(-2) <= self.capacity)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        mask = self.mask(logits)
        weights = logits.softmax(-1).max(-1).values.view(-1, 1)
        return self.experts(x.view(-1, HIDDEN), mask.view(-1, 1, EXPERTS), weights).view_as(x)


class TwoOnes(Switch):
    """Two experts of a token share one weight: a mask with two ones in a row."""

    def mask(self, logits: Tensor) -> Tensor:
        return F.one_hot(logits.topk(2)[1], EXPERTS).sum(-2)


class Compared(Switch):
    """At most one one in practice, and nothing that says so."""

    def mask(self, logits: Tensor) -> Tensor:
        return (logits == logits.amax(-1, keepdim=True)).long()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(8)
    return make()


def observe(call: Any, block: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = call(x)
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    inputs = [x, *block.parameters()]
    grads = torch.autograd.grad(out, inputs, towards, allow_unused=True)
    # A loop that skips an expert leaves no gradient for it; the op gives zeros.
    kept = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, inputs, strict=True)]
    return [out.detach(), *kept]


def test_equal_to_eager_in_one_graph_with_tokens_that_no_expert_takes() -> None:
    block = build(Switch)
    original = copy.deepcopy(block)
    prepared = ascend_deep.prepare(block)
    assert [s.module for s in prepared.swapped] == ["experts"] and not prepared.left, str(prepared)
    compiled = torch.compile(block, backend="ascend_deep", fullgraph=True, options={"downstream": "aot_eager"})
    dropped = 0
    for call, shape in ((block, (2, 31)), (compiled, (2, 31)), (block, (1, 1))):
        x = torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(shape[1]))
        dropped += int((original.mask(original.gate(x)).sum(-1) == 0).sum())
        for got, want in zip(observe(call, block, x), observe(original, original, x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert dropped > 10
    prepared.restore()
    x = torch.randn(2, 9, HIDDEN)
    assert torch.equal(block(x), original(x))


@pytest.mark.parametrize("make", [TwoOnes, Compared])
def test_masks_that_may_hold_more_than_one_expert_are_left(make: Callable[[], nn.Module]) -> None:
    block = build(make)
    original = copy.deepcopy(block)
    prepared = ascend_deep.prepare(block)
    assert not prepared.swapped and prepared.left[0].reason.endswith(".")
    x = torch.randn(2, 31, HIDDEN)
    assert torch.equal(block(x), original(x))


def test_what_keeps_a_mask_a_mask() -> None:
    ids = torch.tensor([3, 0, 4])
    with OneHot() as masks:
        mask = F.one_hot(ids, EXPERTS)
        kept = [mask, mask.view(3, 1, EXPERTS), mask * (mask.cumsum(0) < 2), (mask.cumsum(0) < 2) * mask, mask.clone()]
        lost = [
            mask.t(),
            mask * 2,
            mask + mask,
            mask.reshape(EXPERTS, 3),
            mask.roll(1, -1),
            mask * mask.bool().view(3, 1, 5),
        ]
        assert all(map(masks.holds, kept)) and not any(map(masks.holds, lost))
        mask[1, 2] = 1
        assert not masks.holds(mask)


def test_ids_and_masks_go_both_ways() -> None:
    ids = torch.tensor([[3], [-1], [0], [4]])
    mask = mask_of(ids, EXPERTS, torch.zeros(2, 2, EXPERTS, dtype=torch.int32))
    assert mask.dtype == torch.int32 and mask.sum(-1).tolist() == [[1, 0], [1, 1]]
    assert torch.equal(ids_of(mask), ids)
