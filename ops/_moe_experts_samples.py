"""Sample inputs of ``moe_experts`` and its backward: the edge cases, in small sizes, seeded, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops._op import Sample

__all__ = ["samples"]


class _Maker:
    """Random layers of experts; every layer has weights of order 1/sqrt(fan-in), so outputs are of order 1."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * scale

    def ids(self, tokens: int, experts: int, topk: int) -> Tensor:
        """Distinct ids per row."""
        return torch.rand(tokens, experts, generator=self.generator).argsort(-1)[:, :topk].contiguous()

    def __call__(
        self,
        name: str,
        *,
        tokens: int = 7,
        experts: int = 4,
        topk: int = 2,
        hidden: int = 10,
        inner: int = 6,
        gated: bool = True,
        bias: bool = False,
        layout: str = "enk",
        idx: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        weights_dtype: torch.dtype = torch.float32,
        transposed: bool = False,
        apart: bool = False,
        **attributes: Any,
    ) -> Sample:
        n = 2 * inner if gated else inner
        w13 = self.randn(experts, n, hidden, scale=hidden**-0.5)
        w2 = self.randn(experts, hidden, inner, scale=inner**-0.5)
        # Stored as the layout says, or the other way round and seen through a transpose.
        if (layout == "ekn") != transposed:
            w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
        if transposed:
            w13, w2 = w13.to(dtype).transpose(1, 2), w2.to(dtype).transpose(1, 2)
        w3 = None
        if apart:  # gate and up in two tensors, the second with room between the experts
            w13, up = (half.contiguous() for half in w13.chunk(2, 1 if layout == "enk" else 2))
            w3 = torch.stack((up, up + 1.0), 1)[:, 0].to(dtype)
        args = (
            self.randn(tokens, hidden).to(dtype),
            self.ids(tokens, experts, topk) if idx is None else idx,
            (torch.rand(tokens, topk, generator=self.generator) + 0.1).to(weights_dtype),
            w13.to(dtype),
            self.randn(experts, n).to(dtype) if bias else None,
            w2.to(dtype),
            self.randn(experts, hidden).to(dtype) if bias else None,
            w3,
        )
        kwargs = {
            "act": "silu",
            "alpha": 1.0,
            "limit": None,
            "interleaved": False,
            "weight_layout": layout,
            "weight_on_input": False,
            "expert_offset": 0,
            "out_dtype": None,
        }
        return Sample(name, args, {**kwargs, **attributes})


_OAI: dict[str, Any] = {"act": "swiglu_oai", "alpha": 1.702, "limit": 0.8}


def samples() -> Iterator[Sample]:
    """About 40 calls of ``moe_experts``; names are unique."""
    make = _Maker(3)
    for tokens in (0, 1, 63):
        yield make(f"tokens_{tokens}", tokens=tokens)
        yield make(f"tokens_{tokens}-ekn-bias", tokens=tokens, layout="ekn", bias=True, **_OAI, interleaved=True)
    for layout in ("enk", "ekn"):
        for name, attributes in (
            ("silu", {}),
            ("silu_limit", {"limit": 0.6}),
            ("gelu", {"act": "gelu"}),
            ("gelu_tanh-interleaved", {"act": "gelu_tanh", "interleaved": True}),
            ("relu", {"act": "relu"}),
            ("relu2", {"act": "relu2", "limit": 1.1}),
            ("sigmoid", {"act": "sigmoid"}),
            ("silu_clamp", {"act": "silu_clamp", "limit": 0.3}),
            ("oai", _OAI),
            ("silu_softcap", {"act": "silu_softcap", "alpha": 1.3, "limit": 0.7}),
            ("oai-interleaved-bias", {**_OAI, "interleaved": True, "bias": True}),
            ("no_gate-relu2", {"act": "relu2", "gated": False}),
            ("no_gate-gelu-bias", {"act": "gelu", "gated": False, "bias": True}),
            ("weight_on_input", {"weight_on_input": True, "topk": 1}),
            ("weight_on_input-bias", {"weight_on_input": True, "bias": True, "act": "gelu"}),
            ("transposed", {"transposed": True, "bias": True}),
            ("odd", {"hidden": 13, "inner": 7, "tokens": 5, "topk": 3}),
            ("apart", {"apart": True, "act": "gelu"}),
            ("apart-oai-bias", {"apart": True, "bias": True, **_OAI}),
        ):
            yield make(f"{name}-{layout}", layout=layout, **attributes)
    yield make("all_on_one_expert", idx=torch.full((9, 1), 2), tokens=9, topk=1)
    yield make("empty_experts", experts=16, tokens=3, topk=2)
    yield make("repeated_ids", idx=torch.tensor([[1, 1, 1], [0, 3, 0], [2, 2, 3]]), tokens=3, topk=3)
    skipped = make.ids(8, 4, 3)
    skipped[::2, 1] = -1
    skipped[3] = -1
    yield make("skipped_slots", idx=skipped, tokens=8, topk=3, bias=True)
    yield make("all_skipped", idx=torch.full((4, 2), -1), tokens=4, bias=True)
    yield make("other_ranks", idx=make.ids(9, 12, 3), tokens=9, topk=3, expert_offset=5, bias=True)
    yield make("i32_ids", idx=make.ids(6, 4, 2).int(), tokens=6)
    yield make("no_slots", topk=0, tokens=3)
    yield make("one_expert", experts=1, topk=1)
    yield make("out_f32", dtype=torch.bfloat16, out_dtype=torch.float32, bias=True)
    yield make("bf16", dtype=torch.bfloat16, hidden=33, inner=17, tokens=11)
    yield make("bf16-bf16_weights-ekn", dtype=torch.bfloat16, weights_dtype=torch.bfloat16, layout="ekn", bias=True)
    yield make("f16", dtype=torch.float16, bias=True, act="gelu")
    yield make("bf16-apart", dtype=torch.bfloat16, apart=True, hidden=33, inner=17, tokens=19)
    yield make("apart-weight_on_input", apart=True, weight_on_input=True, topk=1, bias=True)
    sliced = make("sliced", hidden=12, inner=8, tokens=8)
    _, idx, weights, w13, _, w2, *_ = sliced.args
    views = (
        make.randn(16, 24)[::2, 5:17],
        idx.t().contiguous().t(),
        weights[:, :1].expand(8, 2),
        torch.cat((w13, w13), 2)[:, :, 3:15],
        None,
        torch.cat((w2, w2), 0)[::2],
        None,
        None,
    )
    yield Sample("sliced", views, sliced.kwargs)
