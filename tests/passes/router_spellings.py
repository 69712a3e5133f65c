"""Routers as people write them: 40 spellings of members of the family.

Every function takes logits [T, E] (and a bias [E]) and returns (weights, ids) or a dense [T, E]. ``member`` is what the
op must be found to be. Sizes and scalars are at no default: E = 24 experts, K = 3, groups of 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

E, K, G, KEEP, H = 24, 3, 6, 2, 20
SIZE = E // G


@dataclass(frozen=True)
class Spelling:
    """One way to write a router, and the attributes of ``moe_route`` that it must be found to have."""

    f: Callable[..., Any]
    member: Mapping[str, Any] = field(default_factory=dict)
    bias: bool = False
    half: bool = True  # may be written on bf16 logits: nothing is rounded before the choice
    open_order: bool = False
    dense: bool = False
    bias_shift: float = 0.0
    specialises: bool = False  # Dynamo itself makes one graph per token count of it

    @property
    def name(self) -> str:
        return self.f.__name__

    def attrs(self) -> dict[str, Any]:
        base: dict[str, Any] = {
            "topk": K,
            "scoring": "softmax",
            "select": "scores",
            "renorm": "none",
            "eps": 0.0,
            "scale": 1.0,
            "n_group": 1,
        }
        return {**base, **self.member}


ALL: list[Spelling] = []


def spelling(**kwargs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(f: Callable[..., Any]) -> Callable[..., Any]:
        ALL.append(Spelling(f, **kwargs))
        return f

    return keep


# -- softmax before the choice --------------------------------------------------------------------------------------
@spelling(member={"renorm": "sum"})
def softmax_topk_divide(l):
    p = F.softmax(l, -1, dtype=torch.float)
    w, i = torch.topk(p, K, -1)
    return w / w.sum(-1, keepdim=True), i


@spelling(member={"renorm": "sum"})
def in_place_division(l):
    w, i = F.softmax(l.float(), dim=1).topk(K, dim=1)
    w /= w.sum(dim=-1, keepdim=True)
    return w, i


@spelling(member={"renorm": "sum"})
def cast_back(l):
    w, i = torch.topk(l.float().softmax(-1), K, dim=-1)
    return (w / w.sum(-1, True)).to(l.dtype), i


@spelling(member={"renorm": "sum"})
def sort_and_slice(l):
    s, o = torch.sort(l.float().softmax(-1), dim=-1, descending=True)
    return s[:, :K] / s[:, :K].sum(-1, keepdim=True), o[:, :K]


@spelling(member={"select": "logits"})
def argsort_logits_then_gather(l):
    o = torch.argsort(l, dim=-1, descending=True)[..., :K]
    w = l.float().softmax(-1).gather(-1, o)
    return w / w.sum(-1, keepdim=True), o


@spelling(member={"renorm": "sum"})
def ascending_sort(l):
    s, o = torch.sort(l.float().softmax(-1), dim=-1)
    w = s[:, E - K :]
    return w / w.sum(-1, keepdim=True), o[:, E - K :]


@spelling(member={"renorm": "sum"})
def softmax_by_hand(l):
    e = (l.float() - l.float().max(-1, keepdim=True)[0]).exp()
    w, i = (e / e.sum(-1, keepdim=True)).topk(K)
    return w / torch.sum(w, -1).unsqueeze(-1), i


@spelling(member={"renorm": "sum"}, open_order=True)
def unsorted_with_eps(l):
    w, i = torch.topk(F.softmax(l.float(), -1), K, sorted=False)
    return torch.div(w, w.sum(-1, keepdim=True) + 1e-20), i


@spelling(member={"renorm": "sum"})
def f_normalize(l):
    w, i = torch.topk(F.softmax(l.float(), -1), K)
    return F.normalize(w, p=1, dim=-1), i


@spelling(member={"select": "scores", "renorm": "sum"})
def masked_softmax(l):
    x = l.float()
    mask = torch.full_like(x, float("-inf")).scatter(1, x.topk(K, 1)[1], 0.0)
    return torch.softmax(x + mask, -1).topk(K, -1)


@spelling(member={"renorm": "sum"})
def argmax_loop(l):
    p = F.softmax(l.float(), -1)
    weights, ids, left = [], [], p
    for _ in range(K):
        j = left.argmax(-1, keepdim=True)
        weights.append(p.gather(1, j))
        ids.append(j)
        left = left.scatter(1, j, -1.0)
    w = torch.cat(weights, 1)
    return w / w.sum(1, keepdim=True), torch.cat(ids, 1)


@spelling()
def no_renormalisation(l):
    return torch.topk(F.softmax(l.float(), -1), K)


@spelling(member={"scale": 1.75}, open_order=True)
def scaled_without_renormalisation(l):
    w, i = torch.topk(F.softmax(l, -1, dtype=torch.float32), K, -1, True, False)
    return w * 1.75, i


@spelling(member={"renorm": "sum", "scale": 2.5})
def scale_before_the_sum_is_left(l):
    w, i = torch.topk(F.softmax(l.float(), -1), K)
    return w.mul(2.5) / w.sum(-1, keepdim=True), i


@spelling(member={"renorm": "sum", "eps": 0.05})
def large_eps(l):
    w, i = torch.topk(F.softmax(l.float(), -1), K)
    return w / (w.sum(-1, keepdim=True) + 0.05), i


@spelling(member={"topk": 1})
def top_one_max(l):
    return l.float().softmax(-1).max(dim=-1)


@spelling(member={"topk": 1, "scale": 0.7})
def top_one_argmax(l):
    p = l.float().softmax(-1)
    i = p.argmax(-1, keepdim=True)
    return 0.7 * p.gather(-1, i), i


# -- the choice first -----------------------------------------------------------------------------------------------
@spelling(member={"select": "logits"})
def topk_then_softmax(l):
    w, i = torch.topk(l, K, dim=-1)
    return torch.softmax(w.float(), -1), i


@spelling(member={"select": "logits", "scale": 1 / K})
def topk_then_softmax_shared(l):
    w, i = torch.topk(l, K, dim=-1)
    return torch.softmax(w, 1, dtype=torch.float32) / K, i


@spelling(member={"select": "logits", "scoring": "sigmoid"})
def dense_sigmoid_gathered(l):
    v, i = torch.topk(l, K, 1)
    d = torch.sigmoid(torch.full_like(l, float("-inf")).scatter_(1, i, v).float())
    return d.gather(1, i), i


@spelling(member={"select": "logits", "scoring": "sigmoid", "renorm": "sum"})
def topk_then_sigmoid_renormalised(l):
    v, i = torch.topk(l, K)
    w = v.float().sigmoid()
    return w / w.sum(-1, keepdim=True), i


@spelling(member={"select": "logits", "scoring": "sigmoid", "scale": 1.3}, bias=True)
def biased_logits(l, b):
    i = torch.topk(l + b, K)[1]
    return l.gather(1, i).float().sigmoid() * 1.3, i


@spelling(member={"select": "logits", "scoring": "sigmoid"}, dense=True)
def llama_dense(l):
    v, i = torch.topk(l, K, dim=1)
    d = torch.full_like(l, float("-inf")).scatter_(1, i, v)
    return torch.sigmoid(d.float()).to(l.dtype)


@spelling(member={"renorm": "sum"}, dense=True)
def dense_gates(l):
    w, i = torch.topk(F.softmax(l.float(), -1), K)
    return torch.zeros_like(l, dtype=torch.float32).scatter(-1, i, w / w.sum(-1, keepdim=True))


@spelling(dense=True)
def dense_by_mask(l):
    p = F.softmax(l.float(), -1)
    mask = F.one_hot(p.topk(K)[1], E).sum(1)
    return p * mask


# -- sigmoid and its relatives --------------------------------------------------------------------------------------
@spelling(member={"scoring": "sigmoid", "renorm": "sum", "eps": 1e-20, "scale": 2.5})
def sigmoid_topk(l):
    w, i = torch.topk(l.float().sigmoid(), K)
    return w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5, i


@spelling(member={"scoring": "sigmoid", "renorm": "sum", "eps": 1e-6}, bias=True)
def sigmoid_bias_eps(l, b):
    s = l.float().sigmoid()
    i = (s + b).topk(K)[1]
    w = torch.gather(s, 1, i)
    return (w / (w.sum(-1, keepdim=True) + 1e-6)).type_as(l), i


@spelling(member={"scoring": "sigmoid", "renorm": "sum", "eps": 1e-20, "scale": 2.5}, bias=True, open_order=True)
def sigmoid_bias_unsorted(l, b):
    s = l.float().sigmoid()
    i = torch.topk(s + b, K, sorted=False)[1]
    w = s.gather(1, i)
    return w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5, i


@spelling(member={"scoring": "sqrtsoftplus", "renorm": "sum", "eps": 1e-20, "scale": 1.5}, bias=True)
def sqrt_softplus_bias(l, b):
    s = torch.sqrt(F.softplus(l.float()))
    i = torch.topk(s + b.unsqueeze(0), K)[1]
    w = s.gather(1, i)
    return w / (w.sum(-1, keepdim=True) + 1e-20) * 1.5, i


@spelling(member={"scoring": "sqrtsoftplus", "renorm": "sum"})
def sqrt_softplus(l):
    w, i = torch.topk(F.softplus(l.float()) ** 0.5, K)
    return w / w.sum(-1, keepdim=True), i


@spelling(member={"renorm": "clamp", "eps": 1e-12}, bias=True)
def softmax_bias_clamp(l, b):
    p = F.softmax(l.float(), 1)
    i = torch.topk(p + b.squeeze(), K)[1]
    w = p.gather(-1, i)
    return w / torch.clamp(w.sum(-1, keepdim=True), min=1e-12), i


@spelling(member={"scoring": "sigmoid", "renorm": "clamp", "eps": 0.3, "scale": 1.1}, bias=True)
def sigmoid_bias_clamp(l, b):
    s = torch.sigmoid(l.float())
    i = torch.topk(s + b, K)[1]
    w = s.gather(-1, i)
    return w / w.sum(-1, keepdim=True).clamp_min(0.3) * 1.1, i


# -- groups ---------------------------------------------------------------------------------------------------------
_V3 = {
    "scoring": "sigmoid",
    "renorm": "sum",
    "eps": 1e-20,
    "scale": 2.5,
    "n_group": G,
    "topk_group": KEEP,
    "group_score": "top2",
    "group_fill": "neg_inf",
}


@spelling(member=_V3, bias=True, open_order=True)
def groups_scatter_mask(l, b):
    s = l.float().sigmoid()
    c = s + b
    g = c.view(-1, G, SIZE).topk(2, -1)[0].sum(-1)
    gi = torch.topk(g, KEEP, -1, sorted=False)[1]
    gm = torch.zeros_like(g)
    gm.scatter_(1, gi, 1)
    m = gm.unsqueeze(-1).expand(-1, G, SIZE).reshape(-1, E)
    c = c.masked_fill(~m.bool(), float("-inf"))
    i = torch.topk(c, K, -1, sorted=False)[1]
    w = s.gather(1, i)
    w /= w.sum(-1, keepdim=True) + 1e-20
    return w * 2.5, i


@spelling(member=_V3, bias=True, specialises=True)
def groups_one_hot_where(l, b):
    s = torch.sigmoid(l.float())
    c = (s + b).unflatten(-1, (G, -1))
    g = c.sort(-1, descending=True)[0][..., :2].sum(-1)
    m = F.one_hot(g.topk(KEEP, -1)[1], G).sum(1).bool()
    c = torch.where(m[..., None], c, torch.tensor(-1e30)).flatten(1)
    i = c.topk(K)[1]
    w = torch.take_along_dim(s, i, 1)
    return 2.5 * (w / (w.sum(1, True) + 1e-20)), i


@spelling(member={**_V3, "group_fill": "zero", "renorm": "none", "eps": 0.0}, bias=True, bias_shift=0.3)
def groups_filled_with_zero(l, b):
    s = torch.sigmoid(l.float())
    c = s + b
    g = c.view(-1, G, SIZE).topk(2, -1)[0].sum(-1)
    m = torch.zeros_like(g).scatter(1, g.topk(KEEP)[1], 1.0).repeat_interleave(SIZE, 1)
    i = c.masked_fill(m == 0, 0.0).topk(K)[1]
    return s.gather(1, i) * 2.5, i


@spelling(member={"n_group": G, "topk_group": KEEP, "group_score": "max", "scale": 1.25})
def groups_by_their_best(l):
    s = l.float().softmax(-1)
    g = s.view(-1, G, SIZE).max(-1).values
    m = torch.zeros_like(g).scatter(1, g.topk(KEEP, sorted=False)[1], 1.0)
    m = m.unsqueeze(-1).expand(-1, G, SIZE).reshape(-1, E)
    w, i = s.masked_fill(~m.bool(), 0.0).topk(K)
    return w * 1.25, i


@spelling(member={"n_group": G, "topk_group": KEEP, "group_score": "top2", "renorm": "sum"})
def groups_of_softmax(l):
    s = l.float().softmax(-1)
    g = s.reshape(-1, G, SIZE).topk(2, -1)[0].sum(-1)
    m = torch.zeros_like(g).scatter(1, g.topk(KEEP)[1], 1.0)
    c = (s.reshape(-1, G, SIZE) * m[:, :, None]).reshape(-1, E)
    i = c.topk(K)[1]
    w = s.gather(1, i)
    return w / (w.sum(-1, keepdim=True) + 1e-20), i


# -- parts that stay outside ----------------------------------------------------------------------------------------
@spelling(member={"renorm": "sum"}, half=False)
def temperature(l):
    w, i = torch.topk(F.softmax(l / 1.7, -1), K)
    return w / w.sum(-1, keepdim=True), i


@spelling(member={"scoring": "sigmoid", "renorm": "sum", "eps": 1e-15}, bias=True, half=False)
def softcapped(l, b):
    s = (torch.tanh(l / 30.0) * 30.0).sigmoid()
    i = torch.topk(s + b, K)[1]
    w = s.gather(1, i)
    return w / (w.sum(-1, keepdim=True) + 1e-15), i


@spelling()
def divided_by_the_largest(l):
    w, i = torch.topk(F.softmax(l.float(), -1), K)
    return w / w.max(-1, keepdim=True)[0], i


@spelling()
def divided_over_tokens(l):
    w, i = torch.topk(F.softmax(l.float(), -1), K)
    return w / w.sum(0, keepdim=True), i


BY_NAME = {s.name: s for s in ALL}
PARTIAL = ("temperature", "softcapped", "divided_by_the_largest", "divided_over_tokens")
