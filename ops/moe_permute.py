"""``moe_permute``: token rows into one block per expert.

The row of token t is copied once per slot k with a local expert e = idx[t,k] - expert_offset. Blocks are in the psum
layout of the grouped GEMMs:

    start[0] = 0;   psum[e] = start[e] + count[e];   start[e + 1] = psum[e] rounded up to a multiple of alignment

Within a block, rows are ordered by (t, k). ``row_map[t,k]`` is the row of a slot, -1 for ids outside the local range.
The number of rows is the bound T K + E (alignment - 1), rounded down to a multiple of ``alignment``; it depends on no
value, so nothing synchronises. All rows that hold no slot are zero; their scale factors are 1 (floating) or 0
(packed exponents), both powers of two.

The gradient is ``moe_combine`` (``ops/moe_combine.py``), so the op can be differentiated any number of times.
Contract: sections A.3 and F of the DeepGEMM operator list, B.3 of the DeepEP one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import MoePermute
from ascend_deep.ops import _check
from ascend_deep.ops._moe_permute_samples import permute_samples
from ascend_deep.ops._op import OpDef, Tolerance
from ascend_deep.ops.moe_combine import moe_combine
from ascend_deep.ops.moe_experts import check_ids

__all__ = ["MOE_PERMUTE", "moe_permute"]

_FLOAT8 = tuple(
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu") if hasattr(torch, name)
)
# Payload that is only moved: floating rows, FP8 rows, FP4 pairs in int8, and their scale factors.
_ROWS = (*_check.FLOATING, *_FLOAT8, torch.int8, torch.uint8)
_SCALES = (torch.float32, *_FLOAT8, torch.uint8, torch.int16, torch.int32)


def moe_permute(
    x: Tensor,
    idx: Tensor,
    weights: Tensor | None = None,
    *,
    num_experts: int,
    x_sf: Tensor | None = None,
    expert_offset: int = 0,
    alignment: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Copy token rows into one aligned block per expert; see the module for the layout.

    Args:
        x: [T, H], floating, FP8, or int8/uint8 (FP4 pairs); moved, never converted.
        idx: [T, K] i64 or i32, global expert ids; ids outside the local range are dropped.
        weights: [T, K] f32, bf16, f16 or f64 routing weights that travel with the rows, or ``None``.
        num_experts: number of local experts.
        x_sf: [T, S] scale factors that travel with the rows, or ``None``.
        expert_offset: global id of the first local expert.
        alignment: every block starts at a multiple of it.

    Returns:
        rows [M, H], row scale factors [M, S], row weights [M], psum [E] i32, row_map [T, K] i32; absent scale factors
        and weights come back as empty [0] tensors. Differentiable in x (if floating) and weights.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: with ASCEND_DEEP_DEBUG=1 and ``expert_offset`` 0, an id that is neither -1 nor an expert.
    """
    return torch.ops.ascend_deep.moe_permute.default(
        x, x_sf, idx, weights, num_experts=num_experts, expert_offset=expert_offset, alignment=alignment
    )


@takes(MoePermute)
def _check_permute(args: MoePermute) -> None:
    op, x, x_sf, idx, weights = "moe_permute", args.x, args.x_sf, args.topk_idx, args.topk_weights
    num_experts, alignment = args.num_experts, args.alignment
    _check.dtypes(op, "x", x, _ROWS)
    _check.rank(op, "x", x, "[T, H]", 2)
    _check.dtypes(op, "idx", idx, _check.INDEX)
    _check.rank(op, "idx", idx, "[T, K]", 2)
    _check.size(op, "the number of rows of idx", idx.shape[0], x.shape[0], "the number of tokens of x")
    if x_sf is not None:
        _check.dtypes(op, "x_sf", x_sf, _SCALES)
        _check.rank(op, "x_sf", x_sf, "[T, S]", 2)
        _check.size(op, "the number of rows of x_sf", x_sf.shape[0], x.shape[0], "the number of tokens of x")
    if weights is not None:
        _check.dtypes(op, "weights", weights, _check.FLOATING)
        _check.rank(op, "weights", weights, "[T, K]", 2)
        _check.size(op, "the number of rows of weights", weights.shape[0], x.shape[0], "the number of tokens of x")
        _check.size(op, "the number of columns of weights", weights.shape[1], idx.shape[1], "that of idx")
    torch._check_value(num_experts >= 1, lambda: f"{op}: num_experts is {num_experts}; it must be at least 1.")
    torch._check_value(alignment >= 1, lambda: f"{op}: alignment is {alignment}; it must be at least 1.")
    _check.same_device(op, "x", x, x_sf=x_sf, idx=idx, weights=weights)


def _rows(idx: Tensor, num_experts: Any, alignment: Any) -> Any:
    """Number of rows of the permuted buffer; block ends are multiples of the alignment, hence rounding down."""
    return (idx.shape[0] * idx.shape[1] + num_experts * (alignment - 1)) // alignment * alignment


@takes(MoePermute)
def _permute(args: MoePermute) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, x_sf, idx, weights = args.x, args.x_sf, args.topk_idx, args.topk_weights
    num_experts, alignment = args.num_experts, args.alignment
    local = idx.reshape(-1).to(torch.int64) - args.expert_offset
    is_local = (local >= 0) & (local < num_experts)
    local = torch.where(is_local, local, num_experts)
    rows = _rows(idx, num_experts, alignment)
    order = local.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, local, torch.ones_like(local))
    aligned = (counts[:-1] + alignment - 1).div(alignment, rounding_mode="floor") * alignment
    start = aligned.cumsum(0) - aligned
    psum = (start + counts[:-1]).to(torch.int32)
    # Position of a slot within its expert's block: its rank in the sorted order less the slots of experts before it.
    before = counts.cumsum(0) - counts
    rank = torch.empty_like(order)
    rank.scatter_(0, order, torch.arange(order.numel(), device=x.device))
    row = torch.where(is_local, (rank - before[local]) + start[local.clamp(max=num_experts - 1)], -1)
    # slot_of[r]: the flat slot whose row is r. Slots without a row write to the entry behind the last.
    slot_of = torch.full((rows + 1,), -1, dtype=torch.int64, device=x.device)
    slot_of.scatter_(0, torch.where(is_local, row, rows), torch.arange(row.numel(), device=x.device))
    slot_of = slot_of[:rows]
    token_of = slot_of.div(max(idx.shape[1], 1), rounding_mode="floor")
    return (
        _take(x, token_of, 0),
        x.new_empty(0) if x_sf is None else _take(x_sf, token_of, 1 if x_sf.is_floating_point() else 0),
        x.new_empty(0, dtype=torch.float32)
        if weights is None
        else _take(weights.reshape(-1, 1), slot_of, 0).squeeze(1).clone(),
        psum,
        row.view(idx.shape).to(torch.int32),
    )


def _take(source: Tensor, index: Tensor, fill: int) -> Tensor:
    """``source[index]`` by rows, ``fill`` where the index is negative; also of a source without rows."""
    out = torch.full((index.shape[0], source.shape[1]), fill, dtype=torch.float32, device=source.device)
    out = out.to(source.dtype)
    if source.shape[0]:
        # One-byte formats have few operations of their own: move their bits.
        bits = torch.uint8 if source.element_size() == 1 else source.dtype
        picked = source.view(bits).index_select(0, index.clamp(min=0))
        target = out.view(bits)
        target.copy_(torch.where((index >= 0).unsqueeze(1), picked, target))
    return out


@takes(MoePermute)
def _fake_permute(args: MoePermute) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, x_sf, idx, weights = args.x, args.x_sf, args.topk_idx, args.topk_weights
    rows = _rows(idx, args.num_experts, args.alignment)
    return (
        x.new_empty((rows, x.shape[1])),
        x.new_empty(0) if x_sf is None else x_sf.new_empty((rows, x_sf.shape[1])),
        x.new_empty(0, dtype=torch.float32) if weights is None else weights.new_empty(rows),
        idx.new_empty(args.num_experts, dtype=torch.int32),
        idx.new_empty(idx.shape, dtype=torch.int32),
    )


@takes(MoePermute)
def _debug_permute(args: MoePermute) -> None:
    if args.expert_offset == 0:
        check_ids("moe_permute", args.topk_idx, args.num_experts)


def _setup_permute(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: tuple[Tensor, ...]) -> None:
    rows, row_sf, row_weights, psum, row_map = output
    fixed = [row_sf, psum, row_map]
    if rows.dtype not in _check.FLOATING:
        fixed.append(rows)
    if inputs[3] is None:
        fixed.append(row_weights)
    ctx.mark_non_differentiable(*fixed)
    ctx.save_for_backward(row_map)


def _backward_permute(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
    d_rows, _, d_row_weights, _, _ = grads
    (row_map,) = ctx.saved_tensors
    d_x = d_weights = None
    if ctx.needs_input_grad[0]:
        d_x = moe_combine(d_rows.contiguous(), row_map)
    if ctx.needs_input_grad[3]:
        column = d_row_weights.contiguous().unsqueeze(1)
        # One row per slot: combining over single-column maps is the gather that skips -1.
        d_weights = moe_combine(column, row_map.reshape(-1, 1)).view(row_map.shape)
    return d_x, None, None, d_weights


_MOVE = "rows are moved, not computed: exact"
MOE_PERMUTE = OpDef(
    name="moe_permute",
    schema=(
        "(Tensor x, Tensor? x_sf, Tensor topk_idx, Tensor? topk_weights, *, SymInt num_experts, SymInt expert_offset, "
        "SymInt alignment) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    check=_check_permute,
    reference=_permute,
    fake=_fake_permute,
    setup_context=_setup_permute,
    backward=_backward_permute,
    debug=_debug_permute,
    tolerance={dtype: Tolerance(0.0, 0.0, _MOVE) for dtype in _ROWS},
    samples=permute_samples,
    differentiable=("x", "topk_weights"),
)
