"""The ops once more, as loops over Python floats: written from the documentation, not from the reference bodies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def activation(name: str, gate: float, up: float | None, alpha: float, limit: float | None) -> float:
    """One number through the activation table."""
    bound = math.inf if limit is None else limit

    def sigmoid(v: float) -> float:
        return 1 / (1 + math.exp(-v)) if v > -700 else 0.0

    if name == "silu_softcap":
        assert up is not None
        capped = up if limit is None else limit * math.tanh(up / limit)
        return alpha * math.tanh(gate / alpha) * sigmoid(gate) * capped
    u = None if up is None else max(-bound, min(bound, up))
    if name == "silu_clamp":
        value = min(gate * sigmoid(gate), bound)
        return value if u is None else value * u
    g = min(gate, bound)
    if name == "swiglu_oai":
        assert u is not None
        return (u + 1) * g * sigmoid(alpha * g)
    value = {
        "silu": lambda: g * sigmoid(g),
        "gelu": lambda: 0.5 * g * (1 + math.erf(g / math.sqrt(2))),
        "gelu_tanh": lambda: 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
        "relu": lambda: max(g, 0.0),
        "relu2": lambda: max(g, 0.0) ** 2,
        "sigmoid": lambda: sigmoid(g),
    }[name]()
    return value if u is None else value * u


def _halves(row: list[float], gated: bool, interleaved: bool) -> list[tuple[float, float | None]]:
    if not gated:
        return [(v, None) for v in row]
    n = len(row) // 2
    return [(row[2 * j], row[2 * j + 1]) if interleaved else (row[j], row[n + j]) for j in range(n)]


def swiglu(h: Tensor, row_weight: Tensor | None, *, act: str, alpha: float, limit: float | None, interleaved: bool):
    rows = h.double().reshape(-1, h.shape[-1]).tolist()
    scale = [1.0] * len(rows) if row_weight is None else row_weight.double().reshape(-1).tolist()
    out = [
        [activation(act, g, u, alpha, limit) * w for g, u in _halves(row, True, interleaved)]
        for row, w in zip(rows, scale, strict=True)
    ]
    return torch.tensor(out, dtype=torch.float64).reshape(*h.shape[:-1], h.shape[-1] // 2)


def moe_experts(
    x: Tensor,
    idx: Tensor,
    weights: Tensor,
    w13: Tensor,
    b13: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor | None = None,
    *,
    act: str,
    alpha: float,
    limit: float | None,
    interleaved: bool,
    weight_layout: str,
    weight_on_input: bool,
    expert_offset: int,
    out_dtype: torch.dtype | None,
) -> Tensor:
    def product(row: list[float], matrix: Tensor, bias: list[float] | None) -> list[float]:
        """row times the expert's matrix, given as [out, in]."""
        out = [sum(a * b for a, b in zip(row, line, strict=True)) for line in matrix.tolist()]
        return out if bias is None else [a + b for a, b in zip(out, bias, strict=True)]

    result = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for k in range(idx.shape[1]):
            e = int(idx[t, k]) - expert_offset
            if not 0 <= e < w13.shape[0]:
                continue
            first, second = w13[e].double(), w2[e].double()
            if w3 is not None:
                first = torch.cat((first, w3[e].double()), 0 if weight_layout == "enk" else 1)
            if weight_layout == "ekn":
                first, second = first.t(), second.t()
            weight = float(weights[t, k])
            row = [v * weight if weight_on_input else v for v in x[t].double().tolist()]
            h = product(row, first, None if b13 is None else b13[e].double().tolist())
            gated = first.shape[0] == 2 * second.shape[1]
            a = [activation(act, g, u, alpha, limit) for g, u in _halves(h, gated, interleaved)]
            y = product(a, second, None if b2 is None else b2[e].double().tolist())
            for j, v in enumerate(y):
                result[t, j] += v if weight_on_input else v * weight
    return result


def _rank_key(value: float) -> tuple[int, float]:
    """Sorts descending, NaN last."""
    return (1, 0.0) if math.isnan(value) else (0, -value)


def _score(values: list[float], scoring: str) -> list[float]:
    if scoring == "softmax":
        t = torch.tensor(values, dtype=torch.float64)
        return (t.exp() / t.exp().sum()).tolist() if len(values) else []
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in values]
    return [math.sqrt(math.log1p(math.exp(v))) for v in values]


def moe_route(logits: Tensor, bias: Tensor | None, *, topk: int, **a: Any) -> tuple[Tensor, Tensor]:
    """Finite logits of moderate size only. Choice scores are rounded to f32, where ties are decided."""
    experts = logits.shape[1]
    all_weights, all_ids = [], []
    for row in logits.float().double().tolist():
        scores = _score(row, a["scoring"]) if a["select"] == "scores" else row
        added = [0.0] * experts if bias is None else bias.float().double().tolist()
        choice = [float(torch.tensor(s + b, dtype=torch.float32)) for s, b in zip(scores, added, strict=True)]
        allowed = set(range(experts))
        if a["n_group"] > 1:
            size = experts // a["n_group"]
            totals = []
            for g in range(a["n_group"]):
                best = sorted(choice[g * size : (g + 1) * size], reverse=True)
                totals.append(best[0] if a["group_score"] == "max" else sum(best[:2]))
            kept = sorted(range(a["n_group"]), key=lambda g: (-totals[g], g))[: a["topk_group"]]
            allowed = {e for e in range(experts) if e // size in kept}
            if a["group_fill"] == "zero":
                choice = [c if e in allowed else 0.0 for e, c in enumerate(choice)]
                allowed = set(range(experts))
        # Experts of dropped groups come last, by index: their choice scores are all -inf.
        ids = sorted(range(experts), key=lambda e: (_rank_key(choice[e]) if e in allowed else (2, 0.0), e))[:topk]
        chosen = [scores[e] for e in ids]
        if a["select"] == "logits":
            chosen = _score(chosen, a["scoring"])
        total = sum(chosen)
        divisor = {"none": 1.0, "sum": total + a["eps"], "clamp": max(total, a["eps"])}[a["renorm"]]
        all_weights.append([w / divisor * a["scale"] for w in chosen])
        all_ids.append(ids)
    shape = (logits.shape[0], topk)
    return (
        torch.tensor(all_weights, dtype=torch.float64).reshape(shape),
        torch.tensor(all_ids, dtype=torch.int64).reshape(shape),
    )


def moe_permute(
    x: Tensor, x_sf: Tensor | None, idx: Tensor, weights: Tensor | None, *, num_experts, expert_offset, alignment
):
    """Rows, scale factors and weights as lists of (row number, source) pairs; psum; row map."""
    tokens, topk = idx.shape
    rows = (tokens * topk + num_experts * (alignment - 1)) // alignment * alignment
    source: list[tuple[int, int] | None] = [None] * rows
    row_map = torch.full((tokens, topk), -1, dtype=torch.int32)
    psum, start = [], 0
    for e in range(num_experts):
        at = start
        for t in range(tokens):
            for k in range(topk):
                if int(idx[t, k]) - expert_offset == e:
                    source[at], row_map[t, k] = (t, k), at
                    at += 1
        psum.append(at)
        start = -(-at // alignment) * alignment
    return source, torch.tensor(psum, dtype=torch.int32), row_map


def moe_combine(y: Tensor, row_map: Tensor, bias: Tensor | None, *, order: str) -> Tensor:
    out = torch.zeros(row_map.shape[0], y.shape[1], dtype=torch.float64)
    for t in range(row_map.shape[0]):
        for k in range(row_map.shape[1]):
            if row_map[t, k] >= 0:
                out[t] += y[int(row_map[t, k])].double()
        if bias is not None:
            out[t] += bias[t].double()
    return out
