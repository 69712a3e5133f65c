"""``moe_permute`` and ``moe_combine``: token rows into one block per expert, and back.

``moe_permute`` copies the row of token t once per slot k with a local expert e = idx[t,k] - expert_offset. Blocks are
in the psum layout of the grouped GEMMs:

    start[0] = 0;   psum[e] = start[e] + count[e];   start[e + 1] = psum[e] rounded up to a multiple of alignment

Within a block, rows are ordered by (t, k). ``row_map[t,k]`` is the row of a slot, -1 for ids outside the local range.
The number of rows is the bound T K + E (alignment - 1), rounded down to a multiple of ``alignment``; it depends on no
value, so nothing synchronises. All rows that hold no slot are zero; their scale factors are 1 (floating) or 0
(packed exponents), both powers of two.

``moe_combine`` is the way back: out[t] = sum over k of y[row_map[t,k]] (+ bias[t]), skipping -1, with f32 sums in the
order of k and one rounding. It multiplies by no routing weight: the expert side has done that.

The gradient of ``moe_permute`` is ``moe_combine``, that of ``moe_combine`` is ``moe_combine_backward``, whose gradient
is ``moe_combine`` again, so both can be differentiated any number of times.
Contract: sections A.3 and F of the DeepGEMM operator list, B.3 and B.4 of the DeepEP one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check
from ascend_deep.ops._op import OpDef, Sample, Tolerance
from ascend_deep.ops.moe_experts import check_ids

__all__ = ["MOE_COMBINE", "MOE_COMBINE_BACKWARD", "MOE_PERMUTE", "moe_combine", "moe_permute"]

COMBINE_ORDERS = ("topk_first", "bias_first")
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


def moe_combine(y: Tensor, row_map: Tensor, bias: Tensor | None = None, *, order: str = "topk_first") -> Tensor:
    """Sum the rows of every token; see the module.

    Args:
        y: [M, H], f32, bf16, f16 or f64.
        row_map: [T, K] i32 or i64, rows of ``y``; negative: skip.
        bias: [T, H] in f32 or the dtype of ``y`` (a shared expert's output), added once, or ``None``.
        order: ``"topk_first"`` adds the bias last (DeepGEMM-Ascend), ``"bias_first"`` first (DeepGEMM on CUDA).

    Returns:
        [T, H] in the dtype of ``y``. Differentiable in y and bias.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return torch.ops.ascend_deep.moe_combine.default(y, row_map, bias, order=order)


def _check_permute(
    x: Tensor,
    x_sf: Tensor | None,
    idx: Tensor,
    weights: Tensor | None,
    *,
    num_experts: int,
    expert_offset: int,
    alignment: int,
) -> None:
    op = "moe_permute"
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


def _permute(
    x: Tensor,
    x_sf: Tensor | None,
    idx: Tensor,
    weights: Tensor | None,
    *,
    num_experts: int,
    expert_offset: int,
    alignment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    local = idx.reshape(-1).to(torch.int64) - expert_offset
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
        else _take(weights.reshape(-1, 1), slot_of, 0).reshape(rows),
        psum,
        row.view(idx.shape).to(torch.int32),
    )


def _take(source: Tensor, index: Tensor, fill: float) -> Tensor:
    """``source[index]`` by rows, ``fill`` where the index is negative; also of a source without rows."""
    out = torch.empty((index.shape[0], source.shape[1]), dtype=torch.float32, device=source.device)
    out = out.fill_(fill).to(source.dtype)
    if source.shape[0] == 0:
        return out
    # One-byte formats have few operations of their own: move their bits.
    bits = torch.uint8 if source.element_size() == 1 else source.dtype
    picked = source.view(bits).index_select(0, index.clamp(min=0))
    return torch.where((index >= 0).unsqueeze(1), picked, out.view(bits)).view(source.dtype)


def _fake_permute(
    x: Tensor,
    x_sf: Tensor | None,
    idx: Tensor,
    weights: Tensor | None,
    *,
    num_experts: int,
    expert_offset: int,
    alignment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = _rows(idx, num_experts, alignment)
    return (
        x.new_empty((rows, x.shape[1])),
        x.new_empty(0) if x_sf is None else x_sf.new_empty((rows, x_sf.shape[1])),
        x.new_empty(0, dtype=torch.float32) if weights is None else weights.new_empty(rows),
        idx.new_empty(num_experts, dtype=torch.int32),
        idx.new_empty(idx.shape, dtype=torch.int32),
    )


def _setup_permute(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: tuple[Tensor, ...]) -> None:
    rows, row_sf, row_weights, psum, row_map = output
    fixed = [row_sf, psum, row_map]
    if not rows.is_floating_point():
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


def _check_combine(y: Tensor, row_map: Tensor, bias: Tensor | None, *, order: str) -> None:
    op = "moe_combine"
    _check.dtypes(op, "y", y, _check.FLOATING)
    _check.rank(op, "y", y, "[M, H]", 2)
    _check.dtypes(op, "row_map", row_map, _check.INDEX)
    _check.rank(op, "row_map", row_map, "[T, K]", 2)
    _check.choice(op, "order", order, COMBINE_ORDERS)
    if bias is not None:
        _check.dtypes(op, "bias", bias, (torch.float32, y.dtype))
        _check.rank(op, "bias", bias, "[T, H]", 2)
        _check.size(
            op, "the number of rows of bias", bias.shape[0], row_map.shape[0], "the number of tokens of row_map"
        )
        _check.size(op, "the number of columns of bias", bias.shape[1], y.shape[1], "H of y")
    _check.same_device(op, "y", y, row_map=row_map, bias=bias)


def _combine(y: Tensor, row_map: Tensor, bias: Tensor | None, *, order: str) -> Tensor:
    dtype = _check.compute_dtype(y.dtype)
    total = torch.zeros((row_map.shape[0], y.shape[1]), dtype=dtype, device=y.device)
    if bias is not None and order == "bias_first":
        total += bias
    if y.shape[0]:
        for k in range(row_map.shape[1]):
            rows = row_map[:, k]
            # Masked by where: a skipped slot must not bring in row 0 times zero, which is NaN if row 0 is.
            total += torch.where((rows >= 0).unsqueeze(1), y.index_select(0, rows.clamp(min=0)), 0)
    if bias is not None and order == "topk_first":
        total += bias
    return total.to(y.dtype)


def _fake_combine(y: Tensor, row_map: Tensor, bias: Tensor | None, *, order: str) -> Tensor:
    return y.new_empty((row_map.shape[0], y.shape[1]))


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    y, row_map, bias = inputs
    ctx.save_for_backward(row_map)
    ctx.rows = y.shape[0]
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward_combine(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    (row_map,) = ctx.saved_tensors
    d_y = None
    if ctx.needs_input_grad[0]:
        d_y = torch.ops.ascend_deep.moe_combine_backward.default(grad.contiguous(), row_map, ctx.rows)
    d_bias = grad.to(ctx.bias_dtype) if ctx.bias_dtype is not None and ctx.needs_input_grad[2] else None
    return d_y, None, d_bias


def _check_combine_backward(grad: Tensor, row_map: Tensor, rows: int) -> None:
    op = "moe_combine_backward"
    _check.dtypes(op, "grad", grad, _check.FLOATING)
    _check.rank(op, "grad", grad, "[T, H]", 2)
    _check.dtypes(op, "row_map", row_map, _check.INDEX)
    _check.rank(op, "row_map", row_map, "[T, K]", 2)
    _check.size(op, "the number of rows of grad", grad.shape[0], row_map.shape[0], "the number of tokens of row_map")
    _check.same_device(op, "grad", grad, row_map=row_map)


def _combine_backward(grad: Tensor, row_map: Tensor, rows: int) -> Tensor:
    """[rows, H]: the gradient row of a token at each of its rows; rows that no slot names are zero."""
    dtype = _check.compute_dtype(grad.dtype)
    # Skipped slots add to one row behind the last, which is cut off.
    out = torch.zeros((rows + 1, grad.shape[1]), dtype=dtype, device=grad.device)
    source = grad.to(dtype)
    for k in range(row_map.shape[1]):
        target = row_map[:, k].to(torch.int64)
        out.index_add_(0, torch.where(target >= 0, target, rows), source)
    return out[:rows].to(grad.dtype).clone()


def _fake_combine_backward(grad: Tensor, row_map: Tensor, rows: int) -> Tensor:
    return grad.new_empty((rows, grad.shape[1]))


def _setup_combine_backward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward_combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (row_map,) = ctx.saved_tensors
    return moe_combine(grad.contiguous(), row_map), None, None


def _permute_samples() -> Iterator[Sample]:
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


def _combine_samples() -> Iterator[Sample]:
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


def _combine_backward_samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(7)
    for sample in _combine_samples():
        y, row_map, _ = sample.args
        if sample.name.startswith("bias"):
            continue
        grad = torch.randn(row_map.shape[0], y.shape[1], generator=g).to(y.dtype)
        yield Sample(sample.name, (grad, row_map, y.shape[0]))


_MOVE = "rows are moved, not computed: exact"
_SUM = "f32 sum of at most K + 1 terms and one rounding to the result"

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
    debug=lambda x, x_sf, idx, weights, *, num_experts, expert_offset, alignment: (
        check_ids("moe_permute", idx, num_experts) if expert_offset == 0 else None
    ),
    tolerance={dtype: Tolerance(0.0, 0.0, _MOVE) for dtype in _ROWS},
    samples=_permute_samples,
    differentiable=("x", "topk_weights"),
)

_TOLERANCE = {
    torch.float64: Tolerance(1e-14, 1e-14, _SUM),
    torch.float32: Tolerance(1e-6, 1e-6, _SUM),
    torch.bfloat16: Tolerance(8e-3, 1e-5, _SUM + ", half a bf16 ulp is 2^-9"),
    torch.float16: Tolerance(1e-3, 1e-5, _SUM + ", half an f16 ulp is 2^-12"),
}

MOE_COMBINE = OpDef(
    name="moe_combine",
    schema="(Tensor y, Tensor row_map, Tensor? bias, *, str order) -> Tensor",
    check=_check_combine,
    reference=_combine,
    fake=_fake_combine,
    setup_context=_setup_combine,
    backward=_backward_combine,
    tolerance=_TOLERANCE,
    samples=_combine_samples,
    differentiable=("y", "bias"),
)

MOE_COMBINE_BACKWARD = OpDef(
    name="moe_combine_backward",
    schema="(Tensor grad, Tensor row_map, SymInt rows) -> Tensor",
    check=_check_combine_backward,
    reference=_combine_backward,
    fake=_fake_combine_backward,
    setup_context=_setup_combine_backward,
    backward=_backward_combine_backward,
    tolerance=_TOLERANCE,
    samples=_combine_backward_samples,
    differentiable=("grad",),
)
