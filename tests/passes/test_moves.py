"""A router that moves its gate to a dtype on every forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ascend_deep
from ascend_deep.passes.moves import without_moves


class Router(nn.Module):
    def __init__(self, dtype: torch.dtype, target: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(20, 6).to(dtype)
        self.target = target

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.gate = self.gate.to(self.target)
        weights, ids = torch.softmax(self.gate(x.to(self.target)).float(), -1).topk(2)
        return weights / weights.sum(-1, keepdim=True), ids


@pytest.mark.parametrize("target", [torch.float32, torch.float64])
def test_a_move_to_the_same_dtype_hides_no_router_and_others_stay(target: torch.dtype) -> None:
    torch._dynamo.reset()
    router, x = Router(torch.float32, target), torch.randn(7, 20)
    before = copy.deepcopy(router.gate)
    want = copy.deepcopy(router)(x)
    got = torch.compile(router, backend="ascend_deep", options={"downstream": "eager"})(x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert router.gate.weight.dtype == target
    assert torch.equal(router.gate.weight, before.weight.to(target))
    if target == torch.float32:
        assert ascend_deep.last_report().counts() == {"moe_route": 1}


def test_only_moves_that_move_nothing_are_dropped() -> None:
    for target, stays in ((torch.float32, False), (torch.float64, True)):
        torch._dynamo.reset()
        seen: list[torch.fx.GraphModule] = []

        def backend(gm: torch.fx.GraphModule, inputs: object, seen: list[torch.fx.GraphModule] = seen) -> object:
            seen.append(gm)
            return gm.forward

        torch.compile(Router(torch.float32, target), backend=backend)(torch.randn(3, 20))
        for gm in seen:
            count = len(list(gm.graph.nodes))
            sets = [n for n in gm.graph.nodes if n.target is torch.Tensor.set_]
            kept = [n for n in without_moves(gm).graph.nodes if n.target is torch.Tensor.set_]
            assert bool(kept) == (stays and bool(sets))
            assert len(list(gm.graph.nodes)) == count, "the graph it was given is unchanged"
        if not stays:
            assert any(n.target is torch.Tensor.set_ for gm in seen for n in gm.graph.nodes), "Dynamo writes them so"
