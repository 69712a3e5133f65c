"""Calls of the expert kernel with their float64 truth, written independently of ``ascend_deep.ops``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.cpu.provider import CPU, isa


@dataclass
class Call:
    """The arguments of one call, in the order of the schema."""

    x: Tensor
    idx: Tensor
    weights: Tensor
    w13: Tensor
    b13: Tensor | None
    w2: Tensor
    b2: Tensor | None
    act: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    interleaved: bool = False
    weight_layout: str = "enk"
    weight_on_input: bool = False
    expert_offset: int = 0
    out_dtype: torch.dtype | None = None
    w3: Tensor | None = None

    def but(self, **changes: Any) -> Call:
        return replace(self, **changes)

    def run(self) -> Tensor:
        out: Tensor = CPU.kernels["moe_experts"](
            self.x, self.idx, self.weights, self.w13, self.b13, self.w2, self.b2, self.w3,
            act=self.act, alpha=self.alpha, limit=self.limit, interleaved=self.interleaved,
            weight_layout=self.weight_layout, weight_on_input=self.weight_on_input,
            expert_offset=self.expert_offset, out_dtype=self.out_dtype,
        )  # fmt: skip
        return out


def make(
    generator: torch.Generator,
    *,
    tokens: int,
    hidden: int = 33,
    inter: int = 17,
    experts: int = 5,
    topk: int = 2,
    dtype: torch.dtype = torch.float32,
    layout: str = "enk",
    gated: bool = True,
    bias: bool = False,
    **attributes: Any,
) -> Call:
    """Random arguments of order one; ids are drawn with repetition from all experts."""

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    n = 2 * inter if gated else inter
    w13, w2 = randn(experts, n, hidden) / hidden**0.5, randn(experts, hidden, inter) / inter**0.5
    if layout == "ekn":
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    return Call(
        x=randn(tokens, hidden).to(dtype),
        idx=torch.randint(experts, (tokens, topk), generator=generator),
        weights=randn(tokens, topk),
        w13=w13.to(dtype),
        b13=randn(experts, n).to(dtype) if bias else None,
        w2=w2.to(dtype),
        b2=randn(experts, hidden).to(dtype) if bias else None,
        weight_layout=layout,
        **attributes,
    )


def activate(g: Tensor, u: Tensor | None, act: str, alpha: float, limit: float | None) -> Tensor:
    """The activation table of the contract, in float64 and spelled out."""
    if limit is not None:
        if act != "silu_clamp":
            g = torch.minimum(g, torch.tensor(limit, dtype=g.dtype))
        u = u if u is None else u.clamp(-limit, limit)
    y = {
        "silu": lambda: g / (1 + torch.exp(-g)),
        "silu_clamp": lambda: g / (1 + torch.exp(-g)),
        "gelu": lambda: 0.5 * g * (1 + torch.erf(g / math.sqrt(2))),
        "gelu_tanh": lambda: 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
        "relu": lambda: g * (g > 0),
        "relu2": lambda: (g * (g > 0)) ** 2,
        "sigmoid": lambda: 1 / (1 + torch.exp(-g)),
        "swiglu_oai": lambda: g / (1 + torch.exp(-alpha * g)),
    }[act]()
    if act == "silu_clamp" and limit is not None:
        y = torch.minimum(y, torch.tensor(limit, dtype=g.dtype))
    if u is None:
        return y
    return y * (u + 1) if act == "swiglu_oai" else y * u


def truth(c: Call) -> Tensor:
    """[T, H] in float64: one token and one slot at a time."""
    return _truth(c)[0]


def _truth(c: Call) -> tuple[Tensor, Tensor]:
    """The result, and by how much it changes at most if every hidden activation changes by one part."""
    w13, w2 = c.w13.double(), c.w2.double()
    if c.w3 is not None:
        w13 = torch.cat((w13, c.w3.double()), 1 if c.weight_layout == "enk" else 2)
    if c.weight_layout == "ekn":
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    gated = w13.shape[1] != w2.shape[2]
    out = torch.zeros(c.x.shape, dtype=torch.float64)
    spread = torch.zeros_like(out)
    for t in range(c.x.shape[0]):
        for k in range(c.idx.shape[1]):
            e = int(c.idx[t, k]) - c.expert_offset
            if not 0 <= e < w13.shape[0]:
                continue
            weight = c.weights[t, k].double()
            h = w13[e] @ (c.x[t].double() * (weight if c.weight_on_input else 1.0))
            if c.b13 is not None:
                h = h + c.b13[e].double()
            g, u = h, None
            if gated:
                g, u = (h[::2], h[1::2]) if c.interleaved else h.chunk(2)
            hidden = activate(g, u, c.act, c.alpha, c.limit)
            y = w2[e] @ hidden
            spread[t] += (1.0 if c.weight_on_input else weight.abs()) * (w2[e].abs() @ hidden.abs())
            if c.b2 is not None:
                y = y + c.b2[e].double()
            out[t] += y if c.weight_on_input else weight * y
    return out, spread


def assert_right(c: Call) -> None:
    """The kernel's result has the right form and is as near to the truth as float32 sums and one rounding allow."""
    got, (want, spread) = c.run(), _truth(c)
    dtype = c.out_dtype or c.x.dtype
    assert got.dtype == dtype and got.shape == want.shape and got.is_contiguous()
    if not want.numel():
        return
    scale = float(want.abs().max()) + 1e-3
    # 2^-24 per operation, of which sums over H and I take a few dozen in a chain; bfloat16 adds half a unit.
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    error = (got.double() - want).abs() - rounding * want.abs()
    if c.x.dtype == torch.bfloat16 and "avx512_bf16*" in isa().split():
        error -= 2.0**-8 * spread  # hidden activations are rounded, as a model's are, to be multiplied in pairs
    assert torch.isfinite(got).all()
    assert float(error.max()) < 4e-6 * scale, f"largest error {float(error.max()):.2e} of values up to {scale:.2f}"
