"""Routers whose logits also hold columns of shared experts, and indices that are no choice of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ascend_deep.passes.slices import slice_first
from tests.passes.router_tools import Found, compiled

EXPERTS, SHARED, K = 8, 2, 3


def joined(logits: Tensor, ids: Tensor) -> Tensor:
    """Weights of the chosen and of the shared experts, normalised together, as Inkling does."""
    chosen = torch.cat([logits[..., :EXPERTS].gather(-1, ids), logits[..., EXPERTS:]], dim=-1)
    scores = F.logsigmoid(chosen)
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) * 2.5


def inkling(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    ids = torch.topk(scores[..., :-SHARED] + bias, K, dim=-1, sorted=False)[1]
    return joined(logits, ids), ids


def sliced_twice(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.topk(logits.sigmoid()[:, 1:][..., : EXPERTS - 1] + bias[1:], K, dim=-1, sorted=False)[1]
    return joined(logits, ids + 1), ids


def softmax_of_all(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.topk(logits.softmax(-1)[..., :-SHARED] + bias, K, dim=-1, sorted=False)[1]
    return joined(logits, ids), ids


def half_of_the_scores(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.topk(0.5 * logits.sigmoid()[..., :-SHARED] + bias, K, dim=-1, sorted=False)[1]
    return joined(logits, ids), ids


def rounded(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid().to(torch.bfloat16).float()
    ids = torch.topk(scores[..., :-SHARED] + bias, K, dim=-1, sorted=False)[1]
    return joined(logits, ids), ids


def run(router: Callable[..., Any]) -> Found:
    """Compiled against eager, values and gradients, for several numbers of tokens."""
    torch._dynamo.reset()
    g = torch.Generator().manual_seed(4)
    weight = (torch.randn(EXPERTS + SHARED, 20, generator=g) * 0.4).requires_grad_()
    bias = torch.randn(EXPERTS, generator=g) * 0.2

    def block(x: Tensor) -> Any:
        return router(F.linear(x, weight), bias)

    function, backend = compiled(block)
    for count in (9, 1):
        x = torch.randn(count, 20, generator=g)
        results = []
        for f in (function, block):
            weights, ids = f(x)
            (weights * torch.linspace(0.3, 2.0, weights.shape[-1])[K:].sum() * weights).sum().backward()
            order = ids.argsort(-1)
            own = torch.cat([weights[:, :K].gather(-1, order), weights[:, K:]], -1)
            results.append((own.detach(), ids.gather(-1, order), weight.grad))
            weight.grad = None
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    return backend.found[0]


def test_the_choice_among_the_routed_experts_is_fused_and_the_joint_weights_stay() -> None:
    found = run(inkling)
    (solution,) = found.solutions
    assert solution.attrs["scoring"] == "sigmoid" and solution.attrs["topk"] == K
    assert found.regions[0].hints["returns"] == "ids" and "bias" in found.regions[0].inputs


def test_other_columns_of_the_logits() -> None:
    (solution,) = run(sliced_twice).solutions
    assert solution.attrs["scoring"] == "sigmoid"


@pytest.mark.parametrize("router", [softmax_of_all, half_of_the_scores, rounded])
def test_near_misses_stay_as_they_are(router: Callable[..., Any]) -> None:
    """A softmax of all columns is none of the routed; half the scores against the bias; scores that are rounded."""
    found = run(router)
    assert not found.solutions and found.refusals


def test_an_index_that_is_only_compared_is_no_choice() -> None:
    def router(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1)
        ids = (scores + torch.linspace(0, 1, EXPERTS + SHARED)).cumsum(-1).argmin(-1, keepdim=True)
        best = scores.max(-1, keepdim=True)[1]
        weights = torch.where(ids == best, 1.0, 0.25) * scores.gather(-1, ids)
        return torch.cat([weights.expand(-1, K), logits[:, :SHARED]], -1), ids.expand(-1, K)

    found = run(router)
    assert not found.solutions and not found.refusals


def test_slices_move_before_what_is_elementwise_and_nothing_else_changes() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor, wide: Tensor) -> Any:
            a = x.sigmoid()
            kept = a[:, 2:5].sum()  # no choice follows
            rows = a[1:].topk(2)[1]  # rows, not columns
            soft = x.softmax(-1)[:, :5].topk(2)[1]
            return a[:, 1:7].topk(2)[0], kept, rows, soft, wide.sigmoid()[..., 3:].argmax(-1)

    args = (torch.randn(4, 9), torch.randn(2, 3, 11))
    module = torch.export.export(Block(), args).module()
    want = module(*args)
    assert isinstance(module, fx.GraphModule)
    before = [n for n in module.graph.nodes if n.target == torch.ops.aten.sigmoid.default]
    assert slice_first(module.graph) == 2
    module.recompile()
    for got, wanted in zip(module(*args), want, strict=True):
        assert torch.equal(got, wanted)
    widths = [n.meta["val"].shape[-1] for n in module.graph.nodes if n.target == torch.ops.aten.sigmoid.default]
    assert len(before) == 2 and sorted(widths) == [6, 8, 9]
