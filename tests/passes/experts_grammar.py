"""A grammar of MoE blocks: router × dispatch × spelling of each step × activation × layout × casts, and mutations.

``Block(spec)`` is a module of one block. A mutation changes one step of it, in a way that a hurried author or a
careless rewrite might: the block stays a valid model, and whatever is fused must compute what *it* computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, INNER, EXPERTS = 12, 8, 6


@dataclass(frozen=True)
class Spec:
    """One block. Every field is a key of the table of its name below, or a number."""

    router: str = "softmax_topk"
    form: str = "grouped"
    counts: str = "histc"
    rows: str = "divided"
    combine: str = "inverse"
    products: str = "einsum_te"
    scores: str = "scatter"
    weigh: str = "mul"
    share: str = "column"
    add: str = "new"
    shared: str = "none"
    act: str = "silu"
    layout: str = "enk"
    apart: bool = False
    weight_at: str = "output"
    bias: bool = False
    cast: str = "none"
    scale: float = 1.0
    slots: int = 2
    tokens: int = 7
    lead: bool = False
    mutation: str = "none"


# -- routers: logits -> scores of all experts, ids and weights [T, K] -----------------------------------------------
def _softmax_topk(block: Block, logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    probs = logits.softmax(-1)
    w, idx = probs.topk(k, dim=-1)
    return probs, idx, w


def _renormalised(block: Block, logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    probs = logits.softmax(-1)
    w, idx = torch.topk(probs, k, dim=-1)
    return probs, idx, w / (w.sum(-1, keepdim=True) + 1e-3)


def _topk_softmax(block: Block, logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    w, idx = logits.topk(k, dim=-1)
    return logits, idx, w.softmax(-1)


def _sigmoid_bias(block: Block, logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    probs = logits.sigmoid()
    choice = probs + block.correction[: probs.shape[1]]
    idx = choice.topk(k, dim=-1).indices
    return probs, idx, (choice if block.is_("biased_weight") else probs).gather(1, idx)


def _argmax(block: Block, logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    probs = logits.softmax(-1)
    idx = probs.argmax(-1, keepdim=True).expand(-1, 1)
    return probs, idx, probs.gather(1, idx)


def _grouped_topk(block: Block, logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """DeepSeek-V3's: groups of two experts, the best two groups, a bias that chooses and does not weigh."""
    probs = logits.sigmoid()
    choice = probs + block.correction[: probs.shape[1]]
    groups = choice.view(probs.shape[0], -1, probs.shape[1] // 2).topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(groups).scatter_(1, groups.topk(1, dim=-1).indices, 1.0)
    kept = kept.unsqueeze(-1).expand(-1, -1, probs.shape[1] // 2).reshape(probs.shape)
    idx = choice.masked_fill(kept == 0, float("-inf")).topk(k, dim=-1).indices
    w = probs.gather(1, idx)
    return probs, idx, w / (w.sum(-1, keepdim=True) + 1e-20)


def _hashed(block: Block, logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids from a table, as hash layers have them; here the position in the batch is the token."""
    idx = block.table[: logits.shape[0], :k] % logits.shape[1]
    probs = logits.softmax(-1)
    return probs, idx, probs.gather(1, idx)


ROUTERS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "softmax_topk": _softmax_topk, "renormalised": _renormalised, "topk_softmax": _topk_softmax,
    "sigmoid_bias": _sigmoid_bias, "argmax": _argmax, "hashed": _hashed, "grouped_topk": _grouped_topk,
}  # fmt: skip


# -- small steps ----------------------------------------------------------------------------------------------------
def _oai(g: Tensor, u: Tensor) -> Tensor:
    g, u = g.clamp(max=2.5), u.clamp(-2.5, 2.5)
    return (u + 1) * g * torch.sigmoid(g * 1.625)


ACTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda g, u: F.silu(g) * u,
    "written_silu": lambda g, u: u * (g * torch.sigmoid(g)),
    "gelu": lambda g, u: F.gelu(g) * u,
    "gelu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "relu": lambda g, u: F.relu(g) * u,
    "limited": lambda g, u: F.silu(g.clamp(max=1.5)) * u.clamp(-1.5, 1.5),
    "oai": _oai,
}
COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "histc": lambda ids: torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1),
    "histc_wide": lambda ids: torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS),
    "one_hot": lambda ids: F.one_hot(ids, EXPERTS).sum(0),
    "compared": lambda ids: (ids[:, None] == torch.arange(EXPERTS)).sum(0),
    "scattered": lambda ids: torch.zeros(EXPERTS, dtype=ids.dtype).scatter_add(0, ids, torch.ones_like(ids)),
}
ROWS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "divided": lambda x, order, k: x[order // k],
    "repeated": lambda x, order, k: x.repeat_interleave(k, dim=0)[order],
    "indexed": lambda x, order, k: x.index_select(0, torch.arange(x.shape[0]).repeat_interleave(k)[order]),
    "gathered": lambda x, order, k: x.gather(0, (order // k)[:, None].expand(-1, x.shape[1])),
    "tiled": lambda x, order, k: x.repeat(1, k).view(-1, x.shape[1])[order],
    "floored": lambda x, order, k: x[torch.div(order, k, rounding_mode="floor")],
    "expanded": lambda x, order, k: x[:, None].expand(-1, k, -1).reshape(-1, x.shape[1])[order],
}


def _inverse(y: Tensor, order: Tensor, x: Tensor, k: int) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return y[inverse].view(x.shape[0], k, -1).sum(1)


COMBINE: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "inverse": _inverse,
    "argsort": lambda y, order, x, k: y[order.argsort()].view(x.shape[0], k, -1).sum(dim=1),
    "index_add": lambda y, order, x, k: torch.zeros_like(x).index_add(0, order // k, y),
    "scatter_add": lambda y, order, x, k: torch.zeros_like(x).scatter_add(
        0, (order // k)[:, None].expand(-1, x.shape[1]), y
    ),
    "placed": lambda y, order, x, k: torch.zeros_like(y).index_copy(0, order, y).view(x.shape[0], k, -1).sum(1),
}


def _written(w: Tensor, idx: Tensor, probs: Tensor) -> Tensor:
    scores = torch.zeros(idx.shape[0], EXPERTS, dtype=w.dtype)
    scores[torch.arange(idx.shape[0])[:, None], idx] = w
    return scores


def _mask(idx: Tensor) -> Tensor:
    return F.one_hot(idx, EXPERTS).sum(1) > 0


SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "scatter": lambda w, idx, probs: torch.zeros(idx.shape[0], EXPERTS, dtype=w.dtype).scatter(1, idx, w),
    "scatter_like": lambda w, idx, probs: torch.zeros_like(probs).scatter_(1, idx, w),
    "scatter_add": lambda w, idx, probs: torch.zeros_like(probs).scatter_add(1, idx, w),
    "one_hot": lambda w, idx, probs: (F.one_hot(idx, EXPERTS) * w[..., None]).sum(1),
    "one_hot_einsum": lambda w, idx, probs: torch.einsum("tke,tk->te", F.one_hot(idx, EXPERTS).to(w.dtype), w),
    "compared": lambda w, idx, probs: ((idx[..., None] == torch.arange(EXPERTS)) * w[..., None]).sum(-2),
    "written": _written,
    "masked": lambda w, idx, probs: probs * _mask(idx),
    "where": lambda w, idx, probs: torch.where(_mask(idx), probs, 0.0),
    "renormalised_mask": lambda w, idx, probs: F.normalize(probs * _mask(idx), p=1.0, dim=-1),
    "masked_softmax": lambda w, idx, probs: probs.masked_fill(~_mask(idx), float("-inf")).softmax(-1),
    "threshold": lambda w, idx, probs: probs * (probs >= probs.topk(idx.shape[1], dim=-1).values[:, -1:]),
    "soft": lambda w, idx, probs: probs,
    "straight_through": lambda w, idx, probs: _mask(idx) + probs - probs.detach(),
}
WEIGH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # y [T, E, H], scores [T, E]
    "mul": lambda y, s: (y * s[..., None]).sum(1),
    "mul_expert_first": lambda y, s: (y.transpose(0, 1) * s.t().unsqueeze(-1)).sum(0),
    "einsum": lambda y, s: torch.einsum("teh,te->th", y, s),
    "bmm": lambda y, s: torch.bmm(s.unsqueeze(1), y).squeeze(1),
    "matmul": lambda y, s: (s[:, None] @ y)[:, 0],
}

# Loops over all experts: which part a token has in expert e, and how results are summed.
SHARE: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {  # scores [T, E], ids, weights, e -> [T, 1]
    "column": lambda s, idx, w, e: s[:, e : e + 1],
    "select": lambda s, idx, w, e: s.select(1, e).unsqueeze(-1),
    "masked": lambda s, idx, w, e: (w * (idx == e)).sum(-1, keepdim=True),
    "where": lambda s, idx, w, e: torch.where(idx == e, w, 0.0).sum(-1)[:, None],
    "einsum": lambda s, idx, w, e: torch.einsum("tk,tk->t", (idx == e).to(w.dtype), w).unsqueeze(1),
    "filled": lambda s, idx, w, e: w.masked_fill(idx != e, 0.0).sum(dim=1, keepdim=True),
}
PAIRS = ("masked", "where", "einsum", "filled")
"""Shares that are made of ids and weights, and not of scores."""


def _in_place(out: Tensor, y: Tensor, share: Tensor) -> Tensor:
    out += y * share
    return out


ADD: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # sum so far, result of an expert, share
    "new": lambda out, y, share: out + y * share,
    "in_place": _in_place,
    "addcmul": lambda out, y, share: torch.addcmul(out, y, share),
    "addcmul_": lambda out, y, share: out.addcmul_(y, share),
    "add_": lambda out, y, share: out.add_(share * y),
    "stacked": lambda out, y, share: y * share,  # see the form: stack and sum
    "listed": lambda out, y, share: share * y,  # sum() of a list
}

# -- mutations: where, and what happens to the value there -----------------------------------------------------------
MUTATIONS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "none": ("nowhere", lambda v: v),
    "biased_weight": ("router", lambda v: v),
    "squared_weight": ("weights", lambda v: v * v),
    "detached_weight": ("weights", lambda v: v.detach()),
    "no_weight": ("weights", torch.ones_like),
    "shuffled_weight": ("weights", lambda v: v.flip(-1)),
    "other_token": ("weights", lambda v: v.roll(1, 0)),
    "rounded_weight": ("weights", lambda v: v.bfloat16().to(v.dtype)),
    "next_expert": ("ids", lambda v: (v + 1) % EXPERTS),
    "off_by_one": ("ids", lambda v: (v + 1).clamp(max=EXPERTS - 1)),
    "detached_rows": ("rows", lambda v: v.detach()),
    "scaled_rows": ("rows", lambda v: v * 1.1),
    "swapped": ("hidden", lambda v: torch.cat(v.chunk(2, -1)[::-1], -1)),
    "interleaved": ("hidden", lambda v: torch.cat([v[..., ::2], v[..., 1::2]], -1)),
    "scaled_hidden": ("hidden", lambda v: v * 0.5),
    "shifted_hidden": ("hidden", lambda v: v + 0.25),
    "clamped_far": ("hidden", lambda v: v.clamp(max=77.0)),
    "dropout": ("activated", lambda v: F.dropout(v, 0.3, training=True)),
    "normed": ("activated", lambda v: v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)),
    "scaled_result": ("result", lambda v: v * 2.5),
    "shifted_result": ("result", lambda v: v + 1.0),
    "softcap": ("result", lambda v: torch.tanh(v / 30) * 30),
    "reversed_rows": ("result", lambda v: v.flip(0)),
    "wrong_offsets": ("offsets", lambda v: v.roll(1)),
    "few_bins": ("counts", lambda v: v.clamp(max=1)),
    "dropped_last": ("order", lambda v: v.flip(0)),
    "loop_short": ("loop", lambda v: v[:-1]),
    "loop_twice": ("loop", lambda v: [*v, v[0]]),
    "loop_shifted": ("loop", lambda v: [(a, b, (c + 1) % EXPERTS) for a, b, c in v]),
    "loop_other_down": ("loop", lambda v: [(a, (b + 1) % EXPERTS, c) for a, b, c in v]),
    "loop_reversed": ("loop", lambda v: v[::-1]),
    "loop_one_scaled": ("share", lambda v: v * 1.5),
    "loop_halved": ("sum", lambda v: v * 0.5),
    "half_shared": ("shared", lambda v: v * 0.5),
}


PRODUCTS = ("einsum_te", "bmm", "matmul", "repeat", "summed")
PLACES = ("output", "hidden", "input")
NOT_A_CHOICE = ("threshold", "soft", "straight_through")
"""Scores that are not zero for the experts that were not chosen, or whose gradients are not."""


def fusible(spec: Spec) -> bool:
    """True for blocks that are members of ``moe_experts``; mutated ones may be, by chance."""
    if spec.mutation != "none" or spec.form == "colliding":
        return False
    if spec.shared == "folded" and spec.form in ("dense", "unrolled", "capacity"):
        return False  # whether an id occurs twice is not seen through a concatenation: those may be left
    if spec.form == "mapped":
        return True
    if spec.form == "unrolled" and spec.share in PAIRS:
        return not (spec.bias and spec.weight_at != "output")
    if spec.form not in ("dense", "unrolled"):
        return not (spec.bias and spec.weight_at == "hidden")  # the bias of the second product would not be weighed
    summed = spec.form == "dense" and spec.products == "summed"
    bias_of_all = spec.bias and (spec.weight_at != "output" or summed)
    return spec.scores not in NOT_A_CHOICE and not bias_of_all


class Block(nn.Module):
    """The block of ``spec``: x [T, H] or [1, T, H] to the same shape."""

    def __init__(self, spec: Spec, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)

        def stored(*shape: int, size: float) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape, generator=generator, dtype=torch.float64) * size).to(dtype))

        n, swap = 2 * INNER, spec.layout == "ekn"
        folded = spec.shared == "folded"
        # With one more slot for a shared expert, the last expert is that one, and the others are chosen from.
        self.gate = stored(EXPERTS - 2 if folded else EXPERTS, HIDDEN, size=1.0)
        self.beside = stored(HIDDEN, HIDDEN, size=0.3) if spec.shared == "beside" else None
        half = n // 2 if spec.apart else n
        self.w13 = stored(EXPERTS, *((HIDDEN, half) if swap else (half, HIDDEN)), size=0.5)
        self.w3 = stored(*self.w13.shape, size=0.5) if spec.apart else None
        self.w2 = stored(EXPERTS, *((INNER, HIDDEN) if swap else (HIDDEN, INNER)), size=0.5)
        # Two tensors of biases, as models with two tensors of weights have; some forms also take the halves of one.
        two = spec.bias and spec.apart and spec.form in ("dense", "unrolled")
        self.b13 = stored(EXPERTS, INNER if two else n, size=0.5) if spec.bias else None
        self.b2 = stored(EXPERTS, HIDDEN, size=0.5) if spec.bias else None
        self.b3 = stored(EXPERTS, INNER, size=0.5) if two else None
        self.register_buffer("correction", torch.randn(EXPERTS, generator=generator, dtype=torch.float64).to(dtype))
        self.register_buffer("table", torch.randint(0, EXPERTS, (64, 4), generator=generator))

    def is_(self, mutation: str) -> bool:
        return self.spec.mutation == mutation

    def at(self, place: str, value: Tensor) -> Tensor:
        """``value``, or what the mutation makes of it if it acts at ``place``."""
        where, change = MUTATIONS[self.spec.mutation]
        return change(value) if where == place else value

    def weights(self) -> tuple[Tensor, Tensor]:
        """w13 as [E, H, N] and w2 as [E, I, H]."""
        if self.spec.layout == "ekn":
            return self.w13, self.w2
        return self.w13.transpose(1, 2), self.w2.transpose(1, 2)

    def hidden(self, product: Callable[[Tensor], Tensor], bias: Callable[[Tensor], Tensor]) -> Tensor:
        """The activated product of the first weights, one tensor or two.

        Args:
            product: of weights [E, H, N]; its last dim is N.
            bias: makes a stored bias [E, N] fit the product.
        """
        first = self.weights()[0]
        if self.w3 is None:
            h = product(first)
            return self.activate(h if self.b13 is None else h + bias(self.b13))
        gate, up = product(first), product(self.w3 if self.spec.layout == "ekn" else self.w3.transpose(1, 2))
        if self.b13 is not None:
            b1, b3 = (self.b13[:, :INNER], self.b13[:, INNER:]) if self.b3 is None else (self.b13, self.b3)
            gate, up = gate + bias(b1), up + bias(b3)
        if MUTATIONS[self.spec.mutation][0] == "hidden":
            return self.activate(torch.cat((gate, up), -1))
        return self.at("activated", ACTS[self.spec.act](gate, up))

    def activate(self, h: Tensor) -> Tensor:
        gate, up = self.at("hidden", h).chunk(2, -1)
        return self.at("activated", ACTS[self.spec.act](gate, up))

    def forward(self, x: Tensor) -> Tensor:
        from experts_forms import FORMS  # the forms use this module's tables

        flat = x.reshape(-1, HIDDEN) if self.spec.lead else x
        logits = F.linear(flat, self.gate)
        probs, idx, w = ROUTERS[self.spec.router](self, logits, self.spec.slots)
        if self.spec.shared == "folded":
            last = torch.full_like(idx[:, :1], EXPERTS - 1)
            ones = self.at("shared", torch.ones_like(w[:, :1]))
            idx, w = torch.cat((idx, last), 1), torch.cat((w, ones), 1)
            probs = torch.cat((probs, torch.zeros_like(probs[:, :1]), torch.ones_like(probs[:, :1])), 1)
        idx, w = self.at("ids", idx), self.at("weights", w)
        if self.spec.scale != 1.0:
            w, probs = w * self.spec.scale, probs * self.spec.scale
        if self.spec.cast == "weights":
            w = w.to(torch.float32).to(x.dtype)
        out = FORMS[self.spec.form](self, flat, idx, w, probs)
        if self.beside is not None:
            out = out + self.at("shared", torch.tanh(flat @ self.beside))
        return out.view(x.shape) if self.spec.lead else out
