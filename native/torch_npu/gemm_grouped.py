"""The m-grouped products by ``npu_grouped_matmul``.

    psum     the vendor's groups follow each other without gaps, so each group takes the padding rows behind it along
    labels   rows are sorted by ``npu_moe_init_routing_v2`` first and brought back after
    masked   as labels, one per row, so that rows that do not count cost no arithmetic

Rows are independent: what is computed for padding rows, from whatever they hold, is replaced by zero and reaches
nothing else. Nothing looks at the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import MaskedScaled, MGroupedBf16, MGroupedScaled, takes
from ascend_deep.native.torch_npu._call import Spec, known
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.formats import E8M0, FP4_PAIRS, NUMBER, is_fp4, last_size, mx_pairs
from ascend_deep.native.torch_npu.gemm import EMPTY, Blocks, along, blocks_of, mixed, swapped
from ascend_deep.native.torch_npu.permute import row_values, sort_refusal, sorted_rows
from ascend_deep.native.torch_npu.soc import Target

__all__ = [
    "bf16",
    "bf16_limits",
    "bf16_masked",
    "bf16_masked_limits",
    "psum_layout",
    "scaled",
    "scaled_limits",
    "scaled_masked",
    "scaled_masked_limits",
    "zeroed",
]


def psum_layout(psum: Tensor, rows: Any, alignment: Any) -> tuple[Tensor, Tensor]:
    """What the vendor needs of ends [G] in a buffer of ``rows`` rows.

    Returns:
        counts [G] i64, never negative and ``rows`` in sum at most, whatever the ends are; and which rows belong to a
        group, [rows] bool.
    """
    groups = psum.shape[0]
    ends = psum.to(torch.int64).clamp(min=0)
    behind = ((ends + alignment - 1) // alignment * alignment).clamp(max=rows)
    at = torch.arange(groups, device=psum.device)
    # The running maximum: a group that ends before it starts is empty.
    upper = torch.where(at.unsqueeze(0) <= at.unsqueeze(1), behind.unsqueeze(0), 0).amax(1)
    starts = torch.nn.functional.pad(upper[:-1], (1, 0))
    row = torch.arange(rows, device=psum.device).unsqueeze(1)
    used = ((row >= starts) & (row < ends)).any(1)
    return upper - starts, used


def zeroed(out: Tensor, used: Tensor) -> Tensor:
    """``out`` [M, N] with zeros in the rows that are not ``used`` [M], whatever was there."""
    return torch.where(used.unsqueeze(1), out, torch.zeros((), dtype=out.dtype, device=out.device))


def _weight(b: Tensor, layout: str) -> Tensor:
    """[G, K, N] as the vendor takes it: contiguous, or transposed in memory."""
    x = b.view(torch.uint8) if is_fp4(b) else b
    return x.mT if layout == "nt" else x


def _labels_of_counts(masked_m: Tensor, rows: Any) -> Tensor:
    """[G rows, 1]: the group of each row that counts, -1 for others."""
    groups = masked_m.shape[0]
    group = torch.arange(groups, device=masked_m.device).unsqueeze(1)
    counts = torch.arange(rows, device=masked_m.device) < masked_m.unsqueeze(1)
    return torch.where(counts, group, -1).reshape(-1, 1)


def _brought_back(y: Tensor, row_map: Tensor) -> Tensor:
    return zeroed(y.index_select(0, row_map.clamp(min=0).to(torch.int64)), row_map >= 0)


# -- bfloat16 ---------------------------------------------------------------------------------------------------------
def _product(rows: Tensor, weight: Tensor, counts: Tensor, **kwargs: Any) -> Tensor:
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weight],
        group_list=counts,
        split_item=3,
        group_type=0,
        group_list_type=1,
        act_type=0,
        **kwargs,
    )
    return out


def _by_label(a: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    rows, row_map, counts = sorted_rows(a, ids, weight.shape[0], 0)
    return _brought_back(_product(rows, weight, counts), row_map)


@takes(MGroupedBf16)
def bf16(x: MGroupedBf16) -> Tensor:
    """``m_grouped_gemm_bf16``."""
    a, weight = x.a.contiguous(), _weight(x.b, x.layout)
    if x.grouping == "labels":
        return _by_label(a, weight, x.grouped_layout.unsqueeze(1))
    counts, used = psum_layout(x.grouped_layout, a.shape[0], x.alignment)
    out = _product(a, weight, counts)
    return zeroed(out, used) if x.zero_padding else out


def bf16_masked(a: Tensor, b: Tensor, masked_m: Tensor, *, expected_m: int) -> Tensor:
    """``m_grouped_gemm_bf16_masked``; the schema's arguments."""
    ids = _labels_of_counts(masked_m, a.shape[1])
    out = _by_label(a.reshape(-1, a.shape[2]), _weight(b, "nt"), ids)
    return out.reshape(a.shape[0], a.shape[1], b.shape[1])


@takes(MGroupedBf16)
def bf16_limits(target: Target, x: MGroupedBf16) -> str | None:
    """Why the vendor's op does not compute this call of ``m_grouped_gemm_bf16``; ``None`` if it does."""
    if x.out_dtype == torch.float32:
        return "out_dtype is float32; the vendor's grouped product of bfloat16 is bfloat16."
    return _unsuited(x.a, x.b) or _refused(target, x.a, x.b, x.layout, x.a.shape[0], x.grouping == "labels")


def bf16_masked_limits(target: Target, a: Tensor, b: Tensor, masked_m: Tensor, *, expected_m: int) -> str | None:
    """Why the vendor's op does not compute this call of ``m_grouped_gemm_bf16_masked``; ``None`` if it does."""
    return _unsuited(a, b) or _refused(target, a, b, "nt", a.shape[0] * a.shape[1], True)


def _unsuited(a: Tensor, b: Tensor) -> str | None:
    for name, x in (("a", a), ("b", b)):
        if any(known(size) and size == 0 for size in x.shape):
            return f"{name} {EMPTY}"
    if not (b.is_contiguous() or b.mT.is_contiguous()):
        return f"b has the strides {tuple(b.stride())}; the vendor takes weights contiguous or transposed."
    return None


def _refused(target: Target, a: Tensor, b: Tensor, layout: str, rows: Any, sort: bool, **kwargs: Any) -> str | None:
    four = is_fp4(a) if kwargs else False
    data = Spec((rows, a.shape[-1]), torch.uint8 if four else a.dtype)
    weight = _weight(b, layout)
    if sort:
        moved = Spec(data.shape, torch.int8) if kwargs else data
        reason = sort_refusal(target, moved, Spec((rows, 1), torch.int32), b.shape[0])  # type: ignore[arg-type]
        if reason is not None:
            return reason
    counts = Spec((b.shape[0],), torch.int64)
    how = {"split_item": 3, "group_type": 0, "group_list_type": 1, "act_type": 0}
    return refusal("npu_grouped_matmul", target, [data], [weight], group_list=counts, **how, **kwargs)


# -- quantised --------------------------------------------------------------------------------------------------------
def _own(sfa: Tensor, blocks: Blocks, k: Any) -> Tensor:
    """The scales of x, one row per row of x: [M, P, 2], [M, ceil(K / 128)] or [M]."""
    if blocks.mx:
        pairs = mx_pairs(sfa, (k + 31) // 32)
        return pairs.reshape(-1, *pairs.shape[-2:])
    flat = sfa.reshape(-1, sfa.shape[-1])
    return flat.squeeze(1) if blocks.sizes is None else flat


def _of_weight(sfb: Tensor, blocks: Blocks, k: Any, memory_swapped: bool) -> Tensor:
    """The scales of the weight: [G, P, N, 2], [G, ceil(K / 128), ceil(N / 128)] or [G, N], laid out like it."""
    if blocks.mx:
        return along(mx_pairs(sfb, (k + 31) // 32).transpose(1, 2), 1, memory_swapped)
    if blocks.sizes is None:
        return sfb.squeeze(-1).contiguous()
    return along(sfb.mT, 1, memory_swapped)


def _numbers(blocks: Blocks, four: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"output_dtype": NUMBER[dtype or torch.bfloat16]}
    if blocks.mx:
        kwargs |= {"scale_dtype": E8M0, "per_token_scale_dtype": E8M0}
    if four:
        kwargs |= {"x_dtype": FP4_PAIRS, "weight_dtype": FP4_PAIRS}
    return kwargs


def _scaled_by_label(
    a: Tensor, own: Tensor, weight: Tensor, scale: Tensor, ids: Tensor, kwargs: dict[str, Any]
) -> Tensor:
    moved, row_map, counts = sorted_rows(a.view(torch.int8), ids, weight.shape[0], 0)
    source = row_values(torch.arange(a.shape[0], device=a.device), row_map)
    rows = moved.view(torch.uint8 if is_fp4(a) else a.dtype)
    y = _product(rows, weight, counts, scale=[scale], per_token_scale=[own.index_select(0, source)], **kwargs)
    return _brought_back(y, row_map)


@takes(MGroupedScaled)
def scaled(x: MGroupedScaled) -> Tensor:
    """``m_grouped_gemm_scaled``."""
    blocks, weight, own, scale = _operands(x, x.layout)
    kwargs = _numbers(blocks, is_fp4(x.a), x.out_dtype)
    a = x.a.contiguous()
    if x.grouping == "labels":
        return _scaled_by_label(a, own, weight, scale, x.grouped_layout.unsqueeze(1), kwargs)
    counts, used = psum_layout(x.grouped_layout, a.shape[0], x.alignment)
    rows = a.view(torch.uint8) if is_fp4(a) else a
    out = _product(rows, weight, counts, scale=[scale], per_token_scale=[own], **kwargs)
    return zeroed(out, used) if x.zero_padding else out


@takes(MaskedScaled)
def scaled_masked(x: MaskedScaled) -> Tensor:
    """``m_grouped_gemm_scaled_masked``."""
    blocks, weight, own, scale = _operands(x, "nt")
    ids = _labels_of_counts(x.masked_m, x.a.shape[1])
    kwargs = _numbers(blocks, is_fp4(x.a), torch.bfloat16)
    out = _scaled_by_label(x.a.reshape(-1, x.a.shape[2]), own, weight, scale, ids, kwargs)
    return out.reshape(x.a.shape[0], x.a.shape[1], x.b.shape[1])


def _operands(x: MGroupedScaled | MaskedScaled, layout: str) -> tuple[Blocks, Tensor, Tensor, Tensor]:
    """The blocks of the scales, the weight and the scales of both sides as the vendor takes them."""
    k, weight = last_size(x.a), _weight(x.b, layout)
    blocks = blocks_of(x.recipe_a, x.recipe_b, k, (x.sfa.dtype, x.sfb.dtype))
    assert isinstance(blocks, Blocks)  # the limits refuse all others
    return blocks, weight, _own(x.sfa, blocks, k).contiguous(), _of_weight(x.sfb, blocks, k, swapped(weight))


@takes(MGroupedScaled)
def scaled_limits(target: Target, x: MGroupedScaled) -> str | None:
    """Why the vendor's op does not compute this call of ``m_grouped_gemm_scaled``; ``None`` if it does."""
    return _scaled_limits(target, x, x.layout, x.a.shape[0], x.grouping == "labels", x.out_dtype)


@takes(MaskedScaled)
def scaled_masked_limits(target: Target, x: MaskedScaled) -> str | None:
    """Why the vendor's op does not compute this call of ``m_grouped_gemm_scaled_masked``; ``None`` if it does."""
    return _scaled_limits(target, x, "nt", x.a.shape[0] * x.a.shape[1], True, None)


def _scaled_limits(
    target: Target,
    x: MGroupedScaled | MaskedScaled,
    layout: str,
    rows: Any,
    sort: bool,
    out_dtype: torch.dtype | None,
) -> str | None:
    k = last_size(x.a)
    blocks = blocks_of(x.recipe_a, x.recipe_b, k, (x.sfa.dtype, x.sfb.dtype))
    if isinstance(blocks, str):
        return blocks
    if blocks.name == "B-B":
        return "a scale of a covers 128 rows; the vendor's grouped product takes scales of single rows."
    reason = mixed(x.a, x.b, blocks) or _unsuited(x.a, x.b)
    if reason is not None:
        return reason
    groups, n = x.b.shape[0], x.b.shape[1] if layout == "nt" else last_size(x.b)
    if blocks.mx:
        own, scale = Spec((rows, (k + 63) // 64, 2), torch.uint8), Spec((groups, (k + 63) // 64, n, 2), torch.uint8)
    elif blocks.sizes is not None:
        own = Spec((rows, x.sfa.shape[-1]), x.sfa.dtype)
        scale = Spec((groups, x.sfb.shape[2], x.sfb.shape[1]), x.sfb.dtype, swapped(_weight(x.b, layout)))
    else:
        own, scale = Spec((rows,), x.sfa.dtype), Spec((groups, n), x.sfb.dtype)
    kwargs = _numbers(blocks, is_fp4(x.a), out_dtype)
    return _refused(target, x.a, x.b, layout, rows, sort, scale=[scale], per_token_scale=[own], **kwargs)
