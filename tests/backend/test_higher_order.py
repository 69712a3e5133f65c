"""Graphs with higher-order ops: what is left as it is, and the sentence that says so."""

from __future__ import annotations

import torch

import ascend_deep


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.3

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.4  # not the derivative: it has to be kept


def test_a_function_with_its_own_backward_is_kept_and_named():
    weight = torch.randn(6, 20, requires_grad=True)

    def router(x):
        w, i = torch.softmax(x @ weight.T, -1).topk(2)
        return Scaled.apply(w / w.sum(-1, keepdim=True)), i

    x = torch.randn(7, 20)
    run = torch.compile(router, backend="ascend_deep", fullgraph=True, options={"downstream": "eager"})
    grads = []
    for f in (run, router):
        w, _ = f(x)
        (w * torch.tensor([0.3, 2.0])).sum().backward()
        grads.append(weight.grad.clone())
        weight.grad = None
    torch.testing.assert_close(grads[0], grads[1])
    report = ascend_deep.last_report()
    assert not report.counts()
    (miss,) = report.misses
    assert miss.reason == (
        "the graph runs a torch.autograd.Function that the model defines; a graph with one is left as it is, "
        "checkpointed regions aside."
    )
