"""Indexers as people write them: functions of q [B,S,H,D], k [B,T,D], w [B,S,H] and a mask [B,S,T] (True: visible)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ascend_deep.passes._types import Outcome
from ascend_deep.passes.graph_view import op_name
from ascend_deep.passes.pipeline import Pipeline

INF = float("inf")
K = 4
H, D = 5, 12
SCALE = 0.37


@dataclass
class Backend:
    """Runs the recogniser alone and keeps what it did; the rewritten graph runs as it is."""

    names: tuple[str, ...] = ("mqa_indexer",)
    outcomes: list[Outcome] = field(default_factory=list)
    graphs: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.outcomes.append(Pipeline(self.names).run(gm))
        self.graphs.append(gm)
        return gm.forward

    @property
    def ops(self) -> list[str]:
        return [op_name(n) for n in self.graphs[-1].graph.nodes if op_name(n)]

    @property
    def found(self) -> list[str]:
        return [m.op for m in self.outcomes[-1].matches]

    @property
    def reasons(self) -> list[str]:
        return [m.reason for m in self.outcomes[-1].misses]


def compiled(f: Callable[..., Any], dynamic: bool = False) -> tuple[Callable[..., Any], Backend]:
    """``f`` under a backend of its own."""
    torch._dynamo.reset()
    backend = Backend()
    return torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic), backend


def operands(
    b: int, s: int, t: int, dtype: torch.dtype = torch.float32, h: int = H, d: int = D, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random operands whose scores are not zero: the first head is on for every key. At least 6 keys are visible."""
    g = torch.Generator().manual_seed(seed + 31 * s + t)
    q, k = torch.randn(b, s, h, d, generator=g), torch.randn(b, t, d, generator=g)
    q[:, :, 0, 0], k[:, :, 0] = q[:, :, 0, 0].abs() + 5, k[:, :, 0].abs() + 1
    w = torch.randn(b, s, h, generator=g)
    mask = torch.rand(b, s, t, generator=g).argsort(-1).argsort(-1) < max(6, t - 3)
    return q.to(dtype), k.to(dtype), w.to(dtype), mask


def products_of(q: Tensor, k: Tensor) -> Tensor:
    """[B, S, H, T]."""
    return torch.einsum("bshd,btd->bsht", q.float(), k.float())


# -- scores ---------------------------------------------------------------------------------------------------------
def matmul_matmul(q, k, w):
    s = F.relu(torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * SCALE)
    return torch.matmul(w.float().unsqueeze(-2), s).squeeze(-2)


def matmul_sum(q, k, w):
    s = F.relu(q.float() @ k.float().unsqueeze(1).transpose(-1, -2)) * SCALE
    return (s * w.float().unsqueeze(-1)).sum(2)


def einsum(q, k, w):
    s = (torch.einsum("bshd,btd->bsht", q.float(), k.float()) * SCALE).relu()
    return torch.einsum("bsht,bsh->bst", s, w.float())


def einsum_keys_first(q, k, w):
    s = torch.einsum("btd,bshd->bhst", k.float(), q.float()).clamp(min=0) / 2.5
    return torch.einsum("bhst,bsh->bst", s, w.float())


def clamp_min_heads_first(q, k, w):
    s = torch.matmul(q.float().transpose(1, 2), k.float().unsqueeze(1).mT).clamp_min(0.0)
    return (s * w.float().permute(0, 2, 1).unsqueeze(-1)).sum(dim=1) * SCALE


def scaled_weights(q, k, w):
    s = torch.matmul(q.float(), k.float()[:, None].transpose(2, 3)).relu()
    return ((w.float() * SCALE).unsqueeze(-2) @ s)[:, :, 0]


def two_scales(q, k, w):
    s = F.relu(torch.einsum("bshd,btd->bsht", q.float(), k.float()) * 0.3) * 1.7
    return (w.float()[..., None] * s).sum(-2)


def negative_scale(q, k, w):
    s = F.relu(torch.einsum("bshd,btd->bsht", q.float(), (-k).float()) * -SCALE)
    return (w.float()[..., None] * s).sum(-2)


def loop(q, k, w):
    kt = k.float().transpose(1, 2)
    total = 0
    for h in range(q.shape[2]):
        total = total + w[:, :, h].float().unsqueeze(-1) * F.relu(q[:, :, h].float() @ kt * SCALE)
    return total


def flat_bmm(q, k, w):
    b, s, h, d = q.shape
    p = torch.bmm(q.float().reshape(b, s * h, d), k.float().transpose(1, 2)).view(b, s, h, k.shape[1])
    return (p.mul(SCALE).relu() * w.float().unsqueeze(-1)).sum(2)


def repeated_keys(q, k, w):
    keys = k.float().unsqueeze(2).expand(-1, -1, H, -1)
    p = torch.matmul(q.float().transpose(1, 2), keys.permute(0, 2, 3, 1))
    return torch.einsum("bhst,bsh->bst", (p * SCALE).relu(), w.float())


def head_chunks(q, k, w):
    """Heads in chunks of 2, 2 and 1, so that the products of all heads never exist."""
    keys = k.float().transpose(1, 2).unsqueeze(1)
    parts = zip(q.float().split(2, dim=2), w.float().split(2, dim=2), strict=True)
    return sum(torch.einsum("bsht,bsh->bst", F.relu(part @ keys * SCALE), weight) for part, weight in parts)


SCORES = [
    matmul_matmul, matmul_sum, einsum, einsum_keys_first, clamp_min_heads_first, scaled_weights, two_scales,
    negative_scale, loop, flat_bmm, repeated_keys, head_chunks,
]  # fmt: skip


# -- choices --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Spelling:
    """Scores and a choice; ``wanted`` is what the match must say."""

    name: str
    scores: Callable[..., Tensor]
    choose: Callable[..., Any]
    wanted: str = ""
    op: str = "mqa_topk"
    open_order: bool = False

    def __call__(self, q: Tensor, k: Tensor, w: Tensor, mask: Tensor) -> Any:
        return self.choose(self.scores(q, k, w), mask)


def fill_topk(s, m):
    return s.masked_fill(~m, -INF).topk(min(K, s.shape[-1]), dim=-1).indices.to(torch.int32)


def lowest_topk(s, m):
    return s.masked_fill(m.logical_not(), torch.finfo(s.dtype).min).topk(K)[1]


def where_topk(s, m):
    return torch.where(m, s, -INF).topk(K, -1)[1]


def hidden_where_topk(s, m):
    return torch.where(~m, torch.full_like(s, -INF), s).topk(K, -1)[1]


def added_topk(s, m):
    return (s + torch.zeros(m.shape).masked_fill(~m, -INF)).topk(K, dim=-1)[1]


def both_topk(s, m):
    causal = torch.ones(s.shape[1], s.shape[2], dtype=torch.bool).tril(s.shape[2] - 2)
    bias = torch.linspace(-1, 1, s.shape[-1])
    return (s.masked_fill(~m, -INF) + bias).masked_fill(~causal, -INF).topk(K)[1]


def no_mask_topk(s, m):
    return s.topk(K)[1]


def open_topk(s, m):
    v, i = s.masked_fill(~m, -INF).topk(K, sorted=False)
    return v, i


def values_too(s, m):
    v, i = s.masked_fill(~m, -INF).topk(K)
    return v, i


def argsort(s, m):
    return s.masked_fill(~m, -INF).argsort(-1, descending=True)[..., :K]


def scattered_mask(s, m):
    i = s.masked_fill(~m, -INF).topk(K)[1]
    return torch.zeros(m.shape).masked_fill(~m, -INF) + torch.full(m.shape, -INF).scatter(-1, i, 0.0)


def no_choice(s, m):
    return s.masked_fill(~m, -INF).softmax(-1)


def scores_returned(s, m):
    s = s.masked_fill(~m, -INF)
    return s, s.topk(K)[1]


ALL = [
    *(Spelling(f.__name__, f, fill_topk) for f in SCORES),
    Spelling("lowest", matmul_sum, lowest_topk),
    Spelling("where", einsum, where_topk),
    Spelling("hidden_where", matmul_matmul, hidden_where_topk),
    Spelling("added", matmul_matmul, added_topk),
    Spelling("both_masks", matmul_sum, both_topk),
    Spelling("no_mask", scaled_weights, no_mask_topk),
    Spelling("open", einsum, open_topk, open_order=True),
    Spelling("values", matmul_matmul, values_too, wanted="return_scores=True"),
    Spelling("argsort", matmul_sum, argsort, op="mqa_logits"),
    Spelling("scattered", matmul_matmul, scattered_mask),
    Spelling("no_choice", matmul_matmul, no_choice, op="mqa_logits"),
    Spelling("scores_returned", matmul_sum, scores_returned, op="mqa_logits"),
]
