"""shadow_select: choice, demotion, gradients."""

from __future__ import annotations

import logging
import uuid

import pytest
import torch

from ascend_deep import ops  # noqa: F401  (registers the ops)
from ascend_deep.ops.shadow import demoted


def _site() -> str:
    return f"test {uuid.uuid4()}"


def _select(fused, original, site, rtol=1e-4, atol=1e-5):
    return torch.ops.ascend_deep.shadow_select(fused, original, site, rtol, atol)


def test_agreement_keeps_the_fused_result():
    original = [torch.randn(5, 7), torch.randint(9, (5, 2))]
    fused = [original[0] * (1 + 1e-6), original[1].clone()]
    (chosen, ids), agreed = _select(fused, original, _site())
    assert bool(agreed)
    assert torch.equal(chosen, fused[0]) and not torch.equal(chosen, original[0])
    assert chosen.data_ptr() != fused[0].data_ptr() and torch.equal(ids, original[1])


@pytest.mark.parametrize("kind", ["float", "int", "nan"])
def test_disagreement_demotes_the_site_for_good(kind, caplog):
    original = [torch.randn(5, 7), torch.randint(9, (5, 2))]
    fused = [t.clone() for t in original]
    if kind == "float":
        fused[0][3, 2] += 0.1
    elif kind == "int":
        fused[1][0, 1] += 1
    else:
        fused[0][0, 0] = float("nan")
    site = _site()
    with caplog.at_level(logging.WARNING, "ascend_deep"):
        chosen, agreed = _select(fused, original, site)
    assert not bool(agreed) and torch.equal(chosen[0], original[0]) and torch.equal(chosen[1], original[1])
    assert site in demoted() and sum(site in r.message for r in caplog.records) == 1
    again, agreed = _select([t.clone() for t in original], original, site)
    assert not bool(agreed) and torch.equal(again[0], original[0])


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_goes_to_the_chosen_one(off, compiled):
    site = _site()
    x = torch.randn(4, 3)
    a, b = torch.tensor(1.7, requires_grad=True), torch.tensor(1.7 + off, requires_grad=True)

    def run(a, b):
        (y,), _ = _select([x * a], [x * b], site)
        return (y * x).sum()

    run = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    run(a, b).backward()
    chosen, other = (b, a) if off else (a, b)
    assert torch.allclose(chosen.grad, (x * x).sum())
    assert other.grad is None or float(other.grad) == 0


def test_opcheck():
    f = [torch.randn(3, 4, requires_grad=True), torch.randint(9, (3,))]
    o = [f[0].detach().clone().requires_grad_(), f[1].clone()]
    torch.library.opcheck(torch.ops.ascend_deep.shadow_select.default, (f, o, _site(), 1e-4, 1e-5))
