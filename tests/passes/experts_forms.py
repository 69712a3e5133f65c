"""The ways from tokens, ids and weights to the weighted sum of experts that ``experts_grammar.py`` chooses from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from experts_grammar import ADD, COMBINE, COUNTS, EXPERTS, HIDDEN, PAIRS, ROWS, SCORES, SHARE, WEIGH, Block
from torch import Tensor

with contextlib.suppress(ImportError):
    import transformers.integrations.moe  # noqa: F401 - registers the grouped product


def _grouped(block: Block, x: Tensor, idx: Tensor, w: Tensor, probs: Tensor) -> Tensor:
    spec, k = block.spec, idx.shape[1]
    ids, order = idx.reshape(-1).sort(stable=True)
    order = block.at("order", order)
    offs = block.at("offsets", torch.cumsum(block.at("counts", COUNTS[spec.counts](ids)), 0, dtype=torch.int32))
    _, w2 = block.weights()
    product = torch.ops.transformers.grouped_mm_fallback
    weight = w.reshape(-1)[order][:, None]
    rows = block.at("rows", ROWS[spec.rows](x, order, k))
    if spec.weight_at == "input":
        rows = rows * weight
    h = block.hidden(lambda w: product(rows, w, offs), lambda b: b[ids])
    if spec.weight_at == "hidden":
        h = h * weight
    y = product(h, w2, offs)
    y = block.at("result", y if block.b2 is None else y + block.b2[ids])
    if spec.weight_at == "output":
        y = y * weight
    return COMBINE[spec.combine](y, order, x, k)


def _batched(block: Block, x: Tensor, idx: Tensor, w: Tensor, probs: Tensor) -> Tensor:
    spec, k = block.spec, idx.shape[1]
    ids = idx.reshape(-1)
    _, w2 = block.weights()
    rows = x.repeat_interleave(k, 0) if spec.rows != "divided" else x[torch.arange(x.shape[0] * k) // k]
    rows = block.at("rows", rows)
    if spec.weight_at == "input":
        rows = rows * w.reshape(-1, 1)
    h = block.hidden(lambda w: torch.bmm(rows.unsqueeze(1), w[ids]).squeeze(1), lambda b: b[ids])
    if spec.weight_at == "hidden":
        h = h * w.reshape(-1, 1)
    y = (h.unsqueeze(1) @ w2[ids])[:, 0]
    y = block.at("result", y if block.b2 is None else y + block.b2[ids])
    if spec.weight_at == "output":
        y = y * w.reshape(-1)[:, None]
    return y.view(-1, k, HIDDEN).sum(1)


def _per_token(block: Block, x: Tensor, idx: Tensor, w: Tensor, probs: Tensor) -> Tensor:
    _, w2 = block.weights()
    rows = block.at("rows", x)
    h = block.hidden(lambda w: torch.einsum("th,tkhn->tkn", rows, w[idx]), lambda b: b[idx])
    y = torch.einsum("tki,tkih->tkh", h, w2[idx])
    y = block.at("result", y if block.b2 is None else y + block.b2[idx])
    return torch.einsum("tkh,tk->th", y, w)


def _dense(block: Block, x: Tensor, idx: Tensor, w: Tensor, probs: Tensor) -> Tensor:
    """Every expert on every token; results are [T, E, H] or come summed."""
    spec = block.spec
    s = block.at("scores", SCORES[spec.scores](w, idx, probs))
    _, w2 = block.weights()
    x = block.at("rows", x)
    b2 = 0.0 if block.b2 is None else block.b2
    if spec.products in ("bmm", "matmul", "repeat"):
        rows = {
            "bmm": lambda: x.unsqueeze(0).expand(EXPERTS, -1, -1),
            "matmul": lambda: x[None],
            "repeat": lambda: x.repeat(EXPERTS, 1).view(EXPERTS, -1, HIDDEN),
        }[spec.products]()
        if spec.weight_at == "input":
            rows = rows * s.t().unsqueeze(-1)
        times = torch.matmul if spec.products == "matmul" else torch.bmm
        h = block.hidden(lambda w: times(rows, w), lambda b: b[:, None])
        h = h * s.t()[..., None] if spec.weight_at == "hidden" else h
        y = torch.bmm(h, w2)
        y = block.at("result", y if block.b2 is None else y + block.b2[:, None])
        y = y.transpose(0, 1)
    elif spec.products == "summed":
        h = block.hidden(lambda w: torch.einsum("th,ehn->ten", x, w), lambda b: b)
        return torch.einsum("tei,eih->th", h * s[..., None], w2)
    else:
        rows = x[:, None] * s[..., None] if spec.weight_at == "input" else x
        equation = "teh,ehn->ten" if spec.weight_at == "input" else "th,ehn->ten"
        h = block.hidden(lambda w: torch.einsum(equation, rows, w), lambda b: b)
        h = h * s[..., None] if spec.weight_at == "hidden" else h
        y = block.at("result", torch.einsum("tei,eih->teh", h, w2) + b2)
    return WEIGH[spec.weigh](y, s) if spec.weight_at == "output" else y.sum(1)


def _unrolled(block: Block, x: Tensor, idx: Tensor, w: Tensor, probs: Tensor) -> Tensor:
    """A loop over all experts that Dynamo unrolls. The triples are the expert of the first and second weights and of
    the share."""
    spec = block.spec
    s = probs if spec.share in PAIRS else block.at("scores", SCORES[spec.scores](w, idx, probs))
    _, w2 = block.weights()
    x = block.at("rows", x)
    out, parts = torch.zeros_like(x), []
    experts: list[tuple[int, int, int]] = block.at("loop", [(e, e, e) for e in range(EXPERTS)])  # type: ignore
    for first, second, own in experts:
        share = SHARE[spec.share](s, idx, w, own)
        share = block.at("share", share) if own == 2 else share
        rows = x * share if spec.weight_at == "input" else x
        h = block.hidden(lambda m, rows=rows, e=first: rows @ m[e], lambda b, e=first: b[e])  # type: ignore[misc]
        y = (h * share if spec.weight_at == "hidden" else h) @ w2[second]
        y = block.at("result", y if block.b2 is None else y + block.b2[second])
        if spec.weight_at != "output":
            out = out + y
        elif spec.add in ("stacked", "listed"):
            parts.append(ADD[spec.add](out, y, share))
        else:
            out = ADD[spec.add](out, y, share)
    if parts:
        out = torch.stack(parts).sum(0) if spec.add == "stacked" else sum(parts)  # type: ignore[assignment]
    return block.at("sum", out)


def _mapped(block: Block, x: Tensor, idx: Tensor, w: Tensor, probs: Tensor) -> Tensor:
    """One token at a time by ``vmap``; an expert at a time by a second one, or the chosen ones by einsum."""
    _, w2 = block.weights()
    rows = block.at("rows", x)

    def expert(token: Tensor, e: Tensor, share: Tensor) -> Tensor:
        h = block.hidden(lambda m: token @ m[e], lambda b: b[e])
        y = h @ w2[e]
        return block.at("result", y if block.b2 is None else y + block.b2[e]) * share

    def chosen(token: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        h = block.hidden(lambda m: torch.einsum("h,khn->kn", token, m[ids]), lambda b: b[ids])
        y = torch.einsum("ki,kih->kh", h, w2[ids])
        return shares @ block.at("result", y if block.b2 is None else y + block.b2[ids])

    def one_by_one(token: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return torch.vmap(lambda e, s: expert(token, e, s))(ids, shares).sum(0)

    return torch.vmap(chosen if block.spec.products == "einsum_te" else one_by_one)(rows, idx, w)


def _capacity(block: Block, x: Tensor, idx: Tensor, w: Tensor, probs: Tensor, collide: bool = False) -> Tensor:
    """Switch and GShard: slots per expert, tokens beyond the capacity are dropped."""
    spec = block.spec
    tokens, k = idx.shape
    room = max(2, tokens // 3)
    one_hot = F.one_hot(idx, EXPERTS).transpose(0, 1).reshape(k * tokens, EXPERTS)
    place = ((one_hot.cumsum(0) - 1) * one_hot).sum(-1).view(k, tokens)
    if collide:
        place = place.clamp(max=room - 1)
    fits = place < room
    where = F.one_hot(place.clamp(max=room - 1), room) * fits[..., None]
    parts = one_hot.view(k, tokens, EXPERTS, 1) * where.unsqueeze(2)
    combine = (parts * w.t()[:, :, None, None]).sum(0)
    dispatch = parts.sum(0).to(x.dtype)
    _, w2 = block.weights()
    if spec.products in ("bmm", "matmul", "repeat"):
        slots = (dispatch.flatten(1).t() @ x).view(EXPERTS, room, HIDDEN)
        slots = block.at("rows", slots)
        h = block.hidden(lambda w: torch.bmm(slots, w), lambda b: b[:, None])
        y = block.at("result", torch.bmm(h, w2) + (0.0 if block.b2 is None else block.b2[:, None]))
        return combine.to(x.dtype).view(tokens, -1) @ y.view(-1, HIDDEN)
    slots = block.at("rows", torch.einsum("tec,th->ech", dispatch, x))
    h = block.hidden(lambda w: torch.einsum("ech,ehn->ecn", slots, w), lambda b: b[:, None])
    y = block.at("result", torch.einsum("eci,eih->ech", h, w2))
    return torch.einsum("tec,ech->th", combine.to(x.dtype), y)


def _colliding(block: Block, x: Tensor, idx: Tensor, w: Tensor, probs: Tensor) -> Tensor:
    """A mistake: tokens beyond the capacity share the last slot."""
    return _capacity(block, x, idx, w, probs, collide=True)


FORMS: dict[str, Callable[[Block, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "grouped": _grouped,
    "batched": _batched,
    "per_token": _per_token,
    "dense": _dense,
    "unrolled": _unrolled,
    "mapped": _mapped,
    "capacity": _capacity,
    "colliding": _colliding,
}
