"""What the expert-parallel ops share: argument checks, and the fakes' sizes.

Names as in ``native/c10d/plan.py``: R ranks (``group_size``), E experts, T tokens of this rank, K choices, H columns,
M = ``max_tokens_per_rank``, a = ``expert_alignment``; N received rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check

__all__ = ["HANDLE", "MOVED", "check_group", "check_handle", "check_routing", "new_size", "weights_like"]

HANDLE = "Tensor psum_rank, Tensor psum_expert, Tensor src_meta, Tensor dst_slot, Tensor aux, Tensor splits"
"""The six tensors of a handle, as schemas have them."""

MOVED = (*_check.FLOATING, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""Dtypes of rows that dispatch moves; the last three as they are, with their scale factors."""


def check_group(op: str, num_experts: int, group_size: int, max_tokens: Any = 1) -> None:
    """Sizes that say how experts are shared out. Whether the group exists is asked when the op runs, not here."""
    torch._check_value(group_size >= 1, lambda: f"{op}: group_size is {group_size}; it must be at least 1.")
    torch._check_value(max_tokens >= 1, lambda: f"{op}: max_tokens_per_rank is {max_tokens}; it must be at least 1.")
    # Slots are numbered rank * M + place in int32.
    torch._check_value(
        max_tokens * group_size < 2**31,
        lambda: f"{op}: max_tokens_per_rank is {max_tokens}; with {group_size} ranks it must be below {2**31} / ranks.",
    )
    torch._check_value(
        num_experts >= 1 and num_experts % group_size == 0,
        lambda: f"{op}: num_experts is {num_experts}; it must be a multiple of group_size, which is {group_size}.",
    )


def check_routing(op: str, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None) -> None:
    """``x`` [T, H], ``topk_idx`` [T, K] and ``topk_weights`` [T, K] belong together."""
    _check.rank(op, "x", x, "[T, H]", 2)
    _check.dtypes(op, "topk_idx", topk_idx, _check.INDEX)
    _check.rank(op, "topk_idx", topk_idx, "[T, K]", 2)
    _check.size(op, "the number of rows of topk_idx", topk_idx.shape[0], x.shape[0], "the number of tokens of x")
    if topk_weights is not None:
        _check.dtypes(op, "topk_weights", topk_weights, _check.FLOATING)
        _check.rank(op, "topk_weights", topk_weights, "[T, K]", 2)
        for dim, what in ((0, "rows"), (1, "columns")):
            _check.size(
                op, f"the number of {what} of topk_weights", topk_weights.shape[dim], topk_idx.shape[dim],
                "that of topk_idx",
            )  # fmt: skip
    _check.same_device(op, "x", x, topk_idx=topk_idx, topk_weights=topk_weights)


def check_handle(
    op: str,
    topk_idx: Tensor,
    psum_rank: Tensor,
    psum_expert: Tensor,
    src_meta: Tensor,
    dst_slot: Tensor,
    aux: Tensor,
    splits: Tensor,
    num_experts: int,
    group_size: int,
) -> None:
    """The six tensors of a handle and the ids that it was made for: dtypes, and sizes that agree with the group's."""
    _check.dtypes(op, "topk_idx", topk_idx, _check.INDEX)
    _check.rank(op, "topk_idx", topk_idx, "[T, K]", 2)
    for name, tensor, shape, dims in (
        ("psum_rank", psum_rank, "[R]", 1),
        ("psum_expert", psum_expert, "[E / R]", 1),
        ("src_meta", src_meta, "[N, K + 2]", 2),
        ("dst_slot", dst_slot, "[T, K]", 2),
        ("aux", aux, "[A]", 1),
    ):
        _check.dtypes(op, name, tensor, (torch.int32,))
        _check.rank(op, name, tensor, shape, dims)
    _check.dtypes(op, "splits", splits, (torch.int64,))
    _check.rank(op, "splits", splits, "[3, R]", 2)
    _check.size(op, "the number of rows of splits", splits.shape[0], 3, "that of every handle")
    local = num_experts // group_size
    for what, found, wanted, source in (
        ("the length of psum_rank", psum_rank.shape[0], group_size, "group_size"),
        ("the number of columns of splits", splits.shape[1], group_size, "group_size"),
        ("the length of psum_expert", psum_expert.shape[0], local, "the number of experts of a rank"),
        ("the number of columns of src_meta", src_meta.shape[1], topk_idx.shape[1] + 2, "K + 2"),
        ("the number of rows of dst_slot", dst_slot.shape[0], topk_idx.shape[0], "the number of tokens of topk_idx"),
        ("the number of columns of dst_slot", dst_slot.shape[1], topk_idx.shape[1], "that of topk_idx"),
    ):
        _check.size(op, what, found, wanted, source)


def new_size(most: Any) -> Any:
    """A size that only the data know, at most ``most`` (if that is a number)."""
    return torch.library.get_ctx().new_dynamic_size(min=0, max=most if isinstance(most, int) else None)


def weights_like(x: Tensor, weights: Tensor | None, rows: Any, topk: Any, expand: bool) -> Tensor:
    """Received weights, or the empty tensor that stands for none."""
    if weights is None:
        return x.new_empty((0,) if expand else (0, topk), dtype=torch.float32)
    return weights.new_empty((rows,) if expand else (rows, topk))
