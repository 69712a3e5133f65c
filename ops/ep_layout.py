"""``ep_layout``: how many tokens go to each rank and to each expert, and which go where. No communication.

Expert e lives on rank e // (E / R). A token counts once for a rank, however many of its experts are there, and once for
each expert that it chose. Ids outside [0, E) count nowhere.

Contract: ``get_dispatch_layout`` of DeepEP.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ascend_deep.native.c10d import normal
from ascend_deep.ops import _check, _ep
from ascend_deep.ops._op import OpDef, Sample, Tolerance, call

__all__ = ["EP_LAYOUT", "ep_layout"]


def ep_layout(topk_idx: Tensor, *, num_experts: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts of a dispatch before it is made.

    Args:
        topk_idx: [T, K] i64 or i32, global expert ids, -1 for no expert.
        num_experts: E, a multiple of ``group_size``.
        group_size: R.

    Returns:
        tokens per rank i32 [R], tokens per expert i32 [E], whether token t goes to rank q bool [T, R]. No gradients.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call("ep_layout", topk_idx, num_experts=num_experts, group_size=group_size)


def _check_args(topk_idx: Tensor, *, num_experts: int, group_size: int) -> None:
    _ep.check_group("ep_layout", num_experts, group_size)
    _check.dtypes("ep_layout", "topk_idx", topk_idx, _check.INDEX)
    _check.rank("ep_layout", "topk_idx", topk_idx, "[T, K]", 2)


def _fake(topk_idx: Tensor, *, num_experts: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        topk_idx.new_empty(group_size, dtype=torch.int32),
        topk_idx.new_empty(num_experts, dtype=torch.int32),
        topk_idx.new_empty((topk_idx.shape[0], group_size), dtype=torch.bool),
    )


def _samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(31)
    yield Sample("37 tokens", (torch.randint(-1, 12, (37, 3), generator=g),), {"num_experts": 12, "group_size": 4})


EP_LAYOUT = OpDef(
    name="ep_layout",
    schema=(
        "(Tensor topk_idx, *, SymInt num_experts, SymInt group_size) -> "
        "(Tensor num_tokens_per_rank, Tensor num_tokens_per_expert, Tensor is_token_in_rank)"
    ),
    check=_check_args,
    reference=normal.ep_layout,
    fake=_fake,
    no_backward="its results are counts.",
    tolerance={dtype: Tolerance(0, 0, "counts are exact") for dtype in _check.INDEX},
    samples=_samples,
)
