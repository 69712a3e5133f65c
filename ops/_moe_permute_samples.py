"""Sample inputs of ``moe_permute``, ``moe_combine`` and its backward: the edge cases, seeded, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops._op import Sample

__all__ = ["COMBINE_ORDERS", "combine_backward_samples", "combine_samples", "permute_samples"]

COMBINE_ORDERS = ("topk_first", "bias_first")


def permute_samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(5)

    def case(
        name: str,
        tokens: int = 6,
        topk: int = 3,
        experts: int = 4,
        ids: tuple[int, int] | None = None,
        hidden: int = 5,
        dtype: torch.dtype = torch.float32,
        **changes: Any,
    ) -> Sample:
        low, high = ids or (0, experts)
        args = (
            torch.randn(tokens, hidden, generator=g).to(dtype),
            changes.pop("x_sf", None),
            torch.randint(low, high, (tokens, topk), generator=g),
            changes.pop("weights", torch.rand(tokens, topk, generator=g)),
        )
        return Sample(name, args, {"num_experts": experts, "expert_offset": 0, "alignment": 4, **changes})

    for tokens in (0, 1, 63):
        yield case(f"tokens_{tokens}", tokens)
    yield case("alignment_1", alignment=1)
    yield case("alignment_16-empty_experts", 5, 2, 9, alignment=16)
    yield case("no_weights", weights=None)
    yield case("skipped", ids=(-1, 4))
    yield case("other_ranks", 9, ids=(0, 12), expert_offset=5)
    yield case("all_dropped", ids=(-1, 0))
    yield case("one_expert", ids=(2, 3), topk=1)
    yield case("no_slots", topk=0)
    yield case("bf16", dtype=torch.bfloat16, weights=torch.rand(6, 3, generator=g).bfloat16())
    yield case("fp8", dtype=torch.float8_e4m3fn, x_sf=torch.rand(6, 2, generator=g).exp2())
    yield case("packed_sf", dtype=torch.int8, x_sf=torch.randint(0, 255, (6, 2), generator=g).to(torch.int32))
    _, _, idx, weights = case("i32").args
    views = (torch.randn(5, 6, generator=g).t(), None, idx.int().t().contiguous().t(), weights[:, :1].expand(6, 3))
    yield Sample("i32-strided", views, {"num_experts": 4, "expert_offset": 0, "alignment": 8})


def combine_samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(6)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    for tokens in (0, 1, 63):
        yield Sample(
            f"tokens_{tokens}",
            (randn(200, 5), torch.randperm(200, generator=g)[: tokens * 3].view(tokens, 3).int(), None),
            {"order": "topk_first"},
        )
    skipping = torch.tensor([[0, -1, 7], [-1, -1, -1], [3, 2, 5], [-1, 6, 1]])
    for order in COMBINE_ORDERS:
        yield Sample(f"bias-{order}", (randn(8, 5), skipping, randn(4, 5)), {"order": order})
        yield Sample(f"bf16-{order}", (randn(8, 6).bfloat16(), skipping.int(), randn(4, 6)), {"order": order})
    yield Sample("shared_rows", (randn(4, 6), torch.tensor([[1, 1], [3, 1]]), None), {"order": "bias_first"})
    yield Sample("no_rows", (randn(0, 6), torch.full((3, 2), -1), randn(3, 6)), {"order": "topk_first"})
    yield Sample("no_slots", (randn(4, 6), torch.zeros(3, 0, dtype=torch.int64), None), {"order": "topk_first"})
    yield Sample(
        "strided", (randn(5, 8).t(), skipping.t().contiguous().t(), randn(4, 10)[:, ::2]), {"order": "bias_first"}
    )


def combine_backward_samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(7)
    for sample in combine_samples():
        y, row_map, _ = sample.args
        if sample.name.startswith("bias"):
            continue
        grad = torch.randn(row_map.shape[0], y.shape[1], generator=g).to(y.dtype)
        yield Sample(sample.name, (grad, row_map, y.shape[0]))
