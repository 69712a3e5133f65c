"""What probes cannot see must be refused: positions, capacities, thresholds out of range, cut gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ascend_deep
from tests.backend.block import Block

# What is refused is decided before AOT Autograd, which takes long with symbolic sizes.
STATIC, DYNAMIC = {"downstream": "aot_eager"}, {"downstream": "eager"}
TOKENS = 256


class Position(Block):
    def route(self, x):
        p, w, i = super().route(x)
        return p, w * (torch.arange(x.shape[0]) < 100)[:, None], i


class Rows(Block):
    def route(self, x):
        p, w, i = super().route(x)
        return p, torch.cat([w[:100], 2 * w[100:]]), i


class Capacity(Block):
    def route(self, x):
        p, w, i = super().route(x)
        place = F.one_hot(i, 8).sum(1).cumsum(0).gather(1, i)
        return p, w * (place < 40), i


class MaskedLogits(Block):
    def route(self, x):
        logits = F.linear(x, self.gate)
        logits = torch.where((torch.arange(x.shape[0]) < 100)[:, None], logits, 0.1 * logits)
        p = F.softmax(logits, -1)
        w, i = torch.topk(p, self.topk, -1)
        return p, w / w.sum(-1, keepdim=True), i


class Clamped(Block):
    def __init__(self) -> None:
        super().__init__(topk=8)  # all experts: logits that the clamp makes equal leave nothing to choose

    def route(self, x):
        p = F.softmax(F.linear(x, self.gate).mul(40.0).clamp(max=50.0), -1)
        w, i = torch.topk(p, self.topk, -1)
        return p, w / w.sum(-1, keepdim=True), i


class Doubled(Block):
    def route(self, x):
        logits = F.linear(x, self.gate) * 300.0
        p = F.softmax(logits, -1)
        w, i = torch.topk(p, self.topk, -1)
        w = w / w.sum(-1, keepdim=True)
        return p, torch.where(logits.max(-1, keepdim=True)[0] > 1e3, 2 * w, w), i


class Hidden(Block):
    """An activation of the experts that is not in the table, in a way that only shows elsewhere."""

    def act(self, gate, up):
        raise NotImplementedError

    def experts(self, x, w, i):
        rows, ids = x.repeat_interleave(self.topk, 0), i.reshape(-1)
        gate, up = torch.bmm(self.w13[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.w2[ids], self.act(gate, up).unsqueeze(-1)).squeeze(-1)
        return (y * w.reshape(-1, 1)).view(x.shape[0], self.topk, x.shape[1]).sum(1)


class DetachedGate(Hidden):
    def act(self, gate, up):
        return F.silu(gate.detach()) * up


class StraightThrough(Hidden):
    def act(self, gate, up):
        return (gate + (F.silu(gate) - gate).detach()) * up


class FarClamp(Hidden):
    def act(self, gate, up):
        return F.silu(gate.clamp(max=2e4)) * up


class ClampedProduct(Hidden):
    def act(self, gate, up):
        return (F.silu(gate) * up).clamp(-65504.0, 65504.0)


class HiddenLimit(Hidden):
    def act(self, gate, up):
        return F.silu((gate * 0.1 * 0.1).clamp(max=2.0) * 10 * 10) * up


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("kind", "gain"),
    [(Position, 1), (Rows, 1), (Capacity, 1), (MaskedLogits, 1), (Clamped, 1), (Doubled, 1), (DetachedGate, 1),
     (StraightThrough, 1), (FarClamp, 1e4), (ClampedProduct, 1e3), (HiddenLimit, 1e3)],
)  # fmt: skip
def test_result_and_gradients_are_those_of_eager(kind, gain, dynamic):
    model = kind()
    options = DYNAMIC if dynamic else STATIC
    run = torch.compile(model, backend="ascend_deep", fullgraph=True, dynamic=dynamic, options=options)
    x = torch.randn(TOKENS, 24) * gain
    got, want = run(x), model(x)
    scale = want.abs().max()
    torch.testing.assert_close(got / scale, want / scale, rtol=1e-4, atol=1e-5)
    c = torch.randn_like(got)
    parameters = list(model.parameters())
    found = torch.autograd.grad((got * c).sum(), parameters)
    wanted = torch.autograd.grad((want * c).sum(), parameters)
    for g, h in zip(found, wanted, strict=True):
        assert float((g - h).abs().max()) <= 2e-4 * max(float(h.abs().max()), 1e-6)
    counts = ascend_deep.last_report().counts()
    if isinstance(model, Hidden):
        assert "moe_experts" not in counts and counts.get("moe_route") == 1
    else:
        assert counts.get("moe_experts") == 1


def test_a_report_that_cannot_be_written_is_a_warning(caplog):
    options = {**STATIC, "report": "/nonexistent/folder/report.json"}
    model, x = Block(), torch.randn(5, 24)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="ascend_deep", options=options)(x), model(x))
    assert any("could not be written" in r.getMessage() for r in caplog.records)
