"""The gate before capture lets every graph through in which some recogniser finds an anchor, and few others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ascend_deep.passes import catalogue
from ascend_deep.passes.capture import capture
from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.pipeline import _has_candidates

W1, W2 = torch.randn(4, 24, 16), torch.randn(4, 24, 16)


def _batched(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Experts whose weights are gathered, without any other trigger."""

    def experts(x: Tensor) -> Tensor:
        ids = (x[:, :2].abs() * 3).long() % 4
        rows = x[:, None, None].expand(-1, 2, 1, 16).reshape(-1, 1, 16)
        hidden = product(rows, W1[ids.flatten()].transpose(1, 2)).relu()
        out = product(hidden, W2[ids.flatten()])
        return out.reshape(x.shape[0], 2, 16).sum(1)

    return experts


def _halves(gate: Tensor, up: Tensor) -> Tensor:
    return gate.relu() * up


def _erf(gate: Tensor, up: Tensor) -> Tensor:
    return gate * (1 + torch.erf(gate / 2**0.5)) / 2 * up


def _exp(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def _indexer(x: Tensor) -> Tensor:
    """Scores that nobody ranks: products of two heads by keys, relu, weighted sum."""
    q, k = x.view(1, 6, 2, 8), x.view(1, 12, 8)
    scores = torch.einsum("bshd,btd->bsht", q, k).relu()
    return (scores * x[:, :2].view(1, 6, 2, 1)).sum(2)


FOUND: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "topk": ("router", lambda x: F.relu(x).softmax(-1).topk(3, -1)),
    "sort": ("router", lambda x: x.softmax(-1).sort(-1, descending=True)[1][:, :3]),
    "argsort": ("router", lambda x: x.softmax(-1).argsort(-1, descending=True)[:, :3]),
    "argmax": ("router", lambda x: x.softmax(-1).argmax(-1)),
    "max of one expert": ("router", lambda x: x.softmax(-1).max(-1)),
    "torch.max of one expert": ("router", lambda x: torch.max(x.softmax(-1), dim=-1)),
    "bmm": ("experts_batched", _batched(torch.bmm)),
    "matmul": ("experts_batched", _batched(torch.matmul)),
    "@": ("experts_batched", _batched(lambda a, b: a @ b)),
    "method": ("experts_batched", _batched(lambda a, b: a.matmul(b))),
    "baddbmm": ("experts_batched", _batched(lambda a, b: torch.baddbmm(a.new_ones(1, 1, b.shape[2]), a, b))),
    "einsum": ("experts_batched", _batched(lambda a, b: torch.einsum("rik,rkn->rin", a, b))),
    "indexer": ("mqa_indexer", _indexer),
    "chunk": ("swiglu", lambda x: _halves(*x.chunk(2, -1))),
    "split": ("swiglu", lambda x: _halves(*x.split(8, -1))),
    "torch.split": ("swiglu", lambda x: _halves(*torch.split(x, [8, 8], -1))),
    "tensor_split": ("swiglu", lambda x: _halves(*x.tensor_split(2, -1))),
    "hsplit": ("swiglu", lambda x: _halves(*x.hsplit(2))),
    "narrow": ("swiglu", lambda x: _halves(x.narrow(-1, 0, 8), x.narrow(-1, 8, 8))),
    "slices": ("swiglu", lambda x: _halves(x[..., :8], x[..., 8:])),
    "slices of two dims": ("swiglu", lambda x: _halves(x[:, :8], x[:, -8:])),
    "interleaved": ("swiglu", lambda x: _halves(x[..., ::2], x[..., 1::2])),
    "interleaved erf": ("swiglu", lambda x: _erf(x[..., ::2], x[..., 1::2])),
    "interleaved exp": ("swiglu", lambda x: _exp(x[..., ::2], x[..., 1::2])),
}


def _graph(function: Callable[[Tensor], object], x: Tensor, **how: object) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(gm)
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True, **how)(x)  # type: ignore[call-overload]
    return graphs[0]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FOUND)
def test_what_a_recogniser_finds_passes_the_gate(name: str, dynamic: bool) -> None:
    recogniser, function = FOUND[name]
    x = torch.randn(6, 16)
    if dynamic:
        if name == "indexer":
            pytest.skip("its view has a fixed number of tokens")
        torch._dynamo.mark_dynamic(x, 0)
    gm = _graph(function, x)
    passed = _has_candidates(gm)
    (loaded,) = catalogue.load([recogniser])
    anchors = loaded.find(GraphView(capture(gm).graph))
    assert anchors, "nothing is found, so this case shows nothing"
    assert passed


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.linear(x, W2[0]).relu() + 1,
        lambda x: x[1:] * x[:-1],
        lambda x: x[..., :5].exp(),
        lambda x: x[:3].tanh() * x[3:].tanh(),
        lambda x: torch.cat([-x[..., 9:], x[..., :9]], -1),
    ],
    ids=["dense", "rows", "columns", "half of the rows", "uneven parts"],
)
def test_graphs_without_any_of_it_are_not_captured(function: Callable[[Tensor], Tensor]) -> None:
    assert not _has_candidates(_graph(function, torch.randn(6, 16)))
