"""What the expert-parallel ops share: argument checks, the fakes' sizes, and the gradient of a dispatch.

Names as in ``native/c10d/plan.py``: R ranks (``group_size``), E experts, T tokens of this rank, K choices, H columns,
M = ``max_tokens_per_rank``, a = ``expert_alignment``; N received rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls_moe import EpCombine, EpDispatch, EpDispatchCached
from ascend_deep.ops import _check

__all__ = [
    "HANDLE",
    "MOVED",
    "check_group",
    "check_handle",
    "check_routing",
    "check_rows",
    "combined",
    "new_size",
    "remember",
    "scales_like",
    "weights_like",
]

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


def check_rows(op: str, args: EpDispatch | EpDispatchCached) -> None:
    """The group, rows [T, H], their scales [T, P], ids and weights [T, K]."""
    x, x_sf = args.x, args.x_sf
    check_group(op, args.num_experts, args.group_size, args.max_tokens_per_rank)
    _check.dtypes(op, "x", x, MOVED)
    check_routing(op, x, args.topk_idx, args.topk_weights)
    if x_sf is not None:
        _check.rank(op, "x_sf", x_sf, "[T, P]", 2)
        _check.size(op, "the number of rows of x_sf", x_sf.shape[0], x.shape[0], "the number of tokens of x")
        _check.same_device(op, "x", x, x_sf=x_sf)


def check_handle(op: str, args: EpDispatchCached | EpCombine) -> None:
    """The six tensors of a handle and the ids that it was made for: dtypes, and sizes that agree with the group's."""
    _check.dtypes(op, "topk_idx", args.topk_idx, _check.INDEX)
    _check.rank(op, "topk_idx", args.topk_idx, "[T, K]", 2)
    for name, tensor, shape, dims in (
        ("psum_rank", args.psum_rank, "[R]", 1),
        ("psum_expert", args.psum_expert, "[E / R]", 1),
        ("src_meta", args.src_meta, "[N, K + 2]", 2),
        ("dst_slot", args.dst_slot, "[T, K]", 2),
        ("aux", args.aux, "[A]", 1),
    ):
        _check.dtypes(op, name, tensor, (torch.int32,))
        _check.rank(op, name, tensor, shape, dims)
    _check.dtypes(op, "splits", args.splits, (torch.int64,))
    _check.rank(op, "splits", args.splits, "[3, R]", 2)
    _check.size(op, "the number of rows of splits", args.splits.shape[0], 3, "that of every handle")
    (tokens, topk), ranks = args.topk_idx.shape, args.group_size
    for what, found, wanted, source in (
        ("the length of psum_rank", args.psum_rank.shape[0], ranks, "group_size"),
        ("the number of columns of splits", args.splits.shape[1], ranks, "group_size"),
        (
            "the length of psum_expert",
            args.psum_expert.shape[0],
            args.num_experts // ranks,
            "the number of experts of a rank",
        ),
        ("the number of columns of src_meta", args.src_meta.shape[1], topk + 2, "K + 2"),
        ("the number of rows of dst_slot", args.dst_slot.shape[0], tokens, "the number of tokens of topk_idx"),
        ("the number of columns of dst_slot", args.dst_slot.shape[1], topk, "that of topk_idx"),
    ):
        _check.size(op, what, found, wanted, source)


def new_size(most: Any) -> Any:
    """A size that only the data know, at most ``most`` (if that is a number)."""
    return torch.library.get_ctx().new_dynamic_size(min=0, max=most if isinstance(most, int) else None)


def scales_like(x: Tensor, x_sf: Tensor | None, rows: Any) -> Tensor:
    """Received scale factors, or the empty tensor that stands for none."""
    return x.new_empty((0, 0), dtype=torch.float32) if x_sf is None else x_sf.new_empty((rows, x_sf.shape[1]))


def weights_like(x: Tensor, weights: Tensor | None, rows: Any, topk: Any, expand: bool) -> Tensor:
    """Received weights, or the empty tensor that stands for none."""
    if weights is None:
        return x.new_empty((0,) if expand else (0, topk), dtype=torch.float32)
    return weights.new_empty((rows,) if expand else (rows, topk))


def remember(ctx: Any, x: Tensor, weights: Tensor | None, attributes: dict[str, Any], rows: Tensor) -> None:
    """What ``combined`` needs of a dispatch: ``attributes`` are those of ``ep_combine``, ``rows`` what it returned."""
    ctx.attributes = attributes
    ctx.rows, ctx.x_dtype, ctx.weighted = rows.shape, x.dtype, weights is not None
    ctx.set_materialize_grads(False)


def combined(ctx: Any, grad: Tensor | None, grad_weights: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and the weights of a dispatch: what ``ep_combine`` makes of those of the received ones.

    ``ctx.saved_tensors`` are the ids and the handle.
    """
    if grad is None and grad_weights is None:
        return None, None
    topk_idx, *handle = ctx.saved_tensors
    if grad is None:
        grad = topk_idx.new_zeros(ctx.rows, dtype=ctx.x_dtype)
    weights = grad_weights.contiguous() if grad_weights is not None and ctx.weighted else None
    dx, dw = torch.ops.ascend_deep.ep_combine.default(
        grad.contiguous(), weights, None, None, topk_idx, *handle, **ctx.attributes
    )
    return dx, dw if weights is not None else None
