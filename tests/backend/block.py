"""The MoE block that most tests of the backend compile, small and without transformers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A hand-written MoE block in the gather-and-bmm form."""

    def __init__(self, experts=8, hidden=24, width=16, topk=3) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(experts, hidden) * 0.5)
        self.w13 = nn.Parameter(torch.randn(experts, 2 * width, hidden) * 0.2)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, width) * 0.2)
        self.topk = topk

    def route(self, x):
        p = F.softmax(F.linear(x, self.gate), -1, dtype=torch.float32)
        w, i = torch.topk(p, self.topk, -1)
        return p, w / w.sum(-1, keepdim=True), i

    def experts(self, x, w, i):
        rows = x.repeat_interleave(self.topk, 0)
        ids = i.reshape(-1)
        gate, up = torch.bmm(self.w13[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.w2[ids], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (y * w.reshape(-1, 1)).view(x.shape[0], self.topk, x.shape[1]).sum(1)

    def forward(self, x):
        _, w, i = self.route(x)
        return self.experts(x, w, i)
