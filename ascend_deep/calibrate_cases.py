"""The blocks that ``ascend-deep calibrate`` times: as models write them, with random inputs, one size after another.

Each is recognised and rewritten like the same block in a model; nothing here calls an op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["CASES", "Case"]

_BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A block that one recogniser finds.

    Attributes:
        recogniser: that finds it.
        op: that takes its place.
        written: the block.
        inputs: makes its arguments on the CPU from sizes; tensors are moved afterwards.
        sizes: named as in the cost formulas (``lowering/targets``), few rows first.
        dtype: of the operands.
        devices: where it is measured; empty: everywhere.
    """

    recogniser: str
    op: str
    written: Callable[..., Any]
    inputs: Callable[[Mapping[str, int]], tuple[Any, ...]]
    sizes: tuple[Mapping[str, int], ...]
    dtype: torch.dtype = _BF16
    devices: tuple[str, ...] = ()

    def small(self) -> Mapping[str, int]:
        """Sizes for a look at whether it works at all."""
        rows = next(iter(self.sizes[0]))
        return {**self.sizes[0], rows: 4}


def _experts_grouped(x: Tensor, idx: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    tokens, topk = idx.shape
    flat = idx.reshape(-1)
    order = torch.argsort(flat)
    rows = torch.arange(tokens, device=x.device).unsqueeze(1).expand(-1, topk).reshape(-1)[order]
    counts = torch.histc(flat.float(), bins=w13.shape[0], min=0, max=w13.shape[0] - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[rows], w13.transpose(1, 2), offs=ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=ends)
    y = y * weights.reshape(-1)[order].unsqueeze(-1)
    return y[torch.argsort(order)].view(tokens, topk, -1).sum(1).to(x.dtype)


def _experts_gathered(x: Tensor, idx: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    gate, up = torch.einsum("th,tknh->tkn", x, w13[idx]).chunk(2, -1)
    return (torch.einsum("tkn,tkhn->tkh", F.silu(gate) * up, w2[idx]) * weights.unsqueeze(-1)).sum(1)


def _experts_inputs(s: Mapping[str, int]) -> tuple[Any, ...]:
    idx = torch.rand(s["T"], s["E"]).topk(s["K"], -1).indices
    weights = torch.rand(s["T"], s["K"]).to(_BF16)
    w13 = torch.randn(s["E"], 2 * s["I"], s["H"]).to(_BF16) * 0.05
    return (
        torch.randn(s["T"], s["H"]).to(_BF16),
        idx,
        weights,
        w13,
        torch.randn(s["E"], s["H"], s["I"]).to(_BF16) * 0.05,
    )


def _router(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, idx = logits.softmax(-1).topk(8, -1)
    return weights / weights.sum(-1, keepdim=True), idx


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def _gated(s: Mapping[str, int]) -> tuple[Any, ...]:
    return (torch.randn(s["T"], 2 * s["I"]).to(_BF16),)


def _upcast(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float(), w.float())


def _product(s: Mapping[str, int]) -> tuple[Any, ...]:
    return torch.randn(s["M"], s["K"]).to(_BF16), torch.randn(s["N"], s["K"]).to(_BF16)


def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(a, b.transpose(1, 2), offs=ends)


def _groups(s: Mapping[str, int]) -> tuple[Any, ...]:
    ends = torch.linspace(0, s["M"], s["G"] + 1)[1:].to(torch.int32)
    return torch.randn(s["M"], s["K"]).to(_BF16), torch.randn(s["G"], s["N"], s["K"]).to(_BF16), ends


def _weight_gradients(x: Tensor, dy: Tensor) -> Tensor:
    rows = x.shape[0] // _GROUPS["G"]
    parts = [slice(g * rows, (g + 1) * rows) for g in range(_GROUPS["G"])]
    return torch.stack([x[part].t() @ dy[part] for part in parts])


def _rows_of_groups(s: Mapping[str, int]) -> tuple[Any, ...]:
    return torch.randn(s["K"], s["M"]).to(_BF16), torch.randn(s["K"], s["N"]).to(_BF16)


def _fp8_linear(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor) -> Tensor:
    spread = sw.repeat_interleave(128, 0).repeat_interleave(128, 1)
    left = (x.float().unflatten(-1, (-1, 128)) * sx.unsqueeze(-1)).flatten(-2)
    return F.linear(left, w.float() * spread).to(_BF16)


def _fp8_operands(s: Mapping[str, int]) -> tuple[Any, ...]:
    m, n, k = s["M"], s["N"], s["K"]
    fp8 = torch.float8_e4m3fn
    scales = torch.rand(m, k // 128) + 0.01, torch.rand(n // 128, k // 128) + 0.01
    return torch.randn(m, k).to(fp8), scales[0], torch.randn(n, k).to(fp8), scales[1]


def _scaled_mm(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor) -> Tensor:
    return torch._scaled_mm(x, w.t(), scale_a=sx, scale_b=sw.t(), out_dtype=_BF16)


def _by_row(s: Mapping[str, int]) -> tuple[Any, ...]:
    x, _, w, _ = _fp8_operands(s)
    return x, torch.rand(s["M"], 1) + 0.01, w, torch.rand(s["N"], 1) + 0.01


def _indexer(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    scores = torch.einsum("bshd,btd->bsht", q.float(), k.float()).relu()
    return torch.einsum("bsht,bsh->bst", scores, w).topk(64, -1).indices


def _indexer_inputs(s: Mapping[str, int]) -> tuple[Any, ...]:
    q = torch.randn(1, s["S"], s["N"], s["D"]).to(_BF16)
    return q, torch.randn(1, s["T"], s["D"]).to(_BF16), torch.randn(1, s["S"], s["N"])


def _rows(fixed: Mapping[str, int], name: str, *counts: int) -> tuple[Mapping[str, int], ...]:
    return tuple({name: count, **fixed} for count in counts)


_EXPERTS = {"K": 4, "E": 32, "H": 512, "I": 256}
_KEYS = {"T": 1024, "N": 16, "D": 64, "K": 64}
_GROUPS = {"M": 256, "N": 256, "G": 4}
_LAYER = {"N": 1024, "K": 2048}
CASES: tuple[Case, ...] = (
    Case("experts_grouped", "moe_experts", _experts_grouped, _experts_inputs, _rows(_EXPERTS, "T", 1, 64, 512)),
    Case("experts_batched", "moe_experts", _experts_gathered, _experts_inputs, _rows(_EXPERTS, "T", 1, 8)),
    Case(
        "router",
        "moe_route",
        _router,
        lambda s: (torch.randn(s["T"], s["E"]),),
        _rows({"E": 128, "K": 8}, "T", 1, 64, 1024),
        torch.float32,
    ),
    Case("swiglu", "swiglu", _swiglu, _gated, _rows({"I": 1024}, "T", 1, 64, 1024)),
    Case("upcast_matmul", "gemm_bf16", _upcast, _product, _rows({"N": 256, "K": 2048}, "M", 1, 64, 512)),
    Case("linear", "gemm_bf16", F.linear, _product, _rows(_LAYER, "M", 1, 64, 512)),
    Case("grouped_mm", "m_grouped_gemm_bf16", _grouped, _groups, _rows({"G": 16, "N": 512, "K": 512}, "M", 16, 512)),
    Case("grouped_loop", "k_grouped_gemm_bf16", _weight_gradients, _rows_of_groups, _rows(_GROUPS, "K", 64, 1024)),
    Case("fp8_linear", "gemm_scaled", _fp8_linear, _fp8_operands, _rows(_LAYER, "M", 1, 64, 512), torch.float8_e4m3fn),
    Case("scaled_mm", "gemm_scaled", _scaled_mm, _by_row, _rows(_LAYER, "M", 16, 512), torch.float8_e4m3fn),
    Case("mqa_indexer", "mqa_topk", _indexer, _indexer_inputs, _rows(_KEYS, "S", 1, 64)),
)  # fmt: skip
