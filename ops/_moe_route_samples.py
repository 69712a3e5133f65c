"""The names that ``moe_route`` knows, and its sample inputs: the edge cases, seeded, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops._op import Sample

__all__ = ["GROUP_FILLS", "GROUP_SCORES", "RENORMS", "SCORINGS", "SELECTS", "samples"]

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
SELECTS = ("scores", "logits")
RENORMS = ("none", "sum", "clamp")
GROUP_SCORES = ("top2", "max")
GROUP_FILLS = ("neg_inf", "zero")

_PLAIN: dict[str, Any] = {
    "topk": 3,
    "scoring": "softmax",
    "select": "scores",
    "renorm": "none",
    "eps": 0.0,
    "scale": 1.7,
    "n_group": 1,
    "topk_group": 1,
    "group_score": "top2",
    "group_fill": "neg_inf",
}


def samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(2)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def case(name: str, logits: Tensor, bias: Tensor | None = None, **changes: Any) -> Sample:
        return Sample(name, (logits, bias), {**_PLAIN, **changes})

    for tokens in (0, 1, 63):
        yield case(f"tokens_{tokens}", randn(tokens, 8), renorm="sum", eps=0.01)
    for scoring in SCORINGS:
        for select in SELECTS:
            yield case(f"{scoring}-{select}", randn(5, 9), scoring=scoring, select=select)
            yield case(
                f"{scoring}-{select}-bias", randn(5, 9), randn(9), scoring=scoring, select=select, renorm="sum", eps=0.3
            )
    yield case("clamp_inactive", randn(4, 7), scoring="sigmoid", renorm="clamp", eps=1e-9)
    yield case("clamp_active", randn(4, 7) - 12, scoring="sigmoid", renorm="clamp", eps=0.25)
    yield case("tiny_weights", randn(4, 7) - 28, scoring="sigmoid", renorm="sum", eps=1e-12)
    yield case("bias_hides_scores", randn(4, 8) - 18, randn(8) + 12, scoring="sigmoid", renorm="sum", eps=1e-20)
    yield case("one_group_scaled", randn(6, 8), scoring="sigmoid", scale=2.5)
    groups: dict[str, Any] = {
        "scoring": "sigmoid",
        "n_group": 4,
        "topk_group": 2,
        "renorm": "sum",
        "eps": 1e-20,
        "scale": 2.5,
    }
    for score in GROUP_SCORES:
        for fill in GROUP_FILLS:
            yield case(f"groups-{score}-{fill}", randn(6, 12), randn(12), **groups, group_score=score, group_fill=fill)
    yield case("groups_of_one", randn(5, 8), randn(8), **{**groups, "n_group": 8, "topk_group": 4})
    yield case("groups_too_few_experts", randn(5, 8), **{**groups, "topk_group": 1})
    yield case("softmax_groups_max", randn(5, 12), n_group=3, topk_group=1, group_score="max", group_fill="zero")
    yield case("all_experts", randn(3, 5), topk=5, renorm="sum", eps=0.2)
    yield case("one_expert", randn(3, 1), topk=1)
    yield case("ties", randn(6, 1).expand(6, 16).contiguous(), topk=4)
    yield case("two_levels", (randn(6, 20) > 0).float(), topk=6, scoring="sigmoid")
    yield case("transposed", randn(10, 6).t(), renorm="sum", eps=0.1)
    yield case("sliced", randn(9, 24)[::2, 1:14], randn(26)[::2])
    yield case("bf16", randn(7, 33).bfloat16(), topk=5, renorm="sum", eps=0.1)
    yield case("f16", randn(7, 12).half(), randn(12).half(), scoring="sqrtsoftplus")
