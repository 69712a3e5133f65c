"""CPU kernels under the vendor's ops, written from the vendor's public formulas.

They share no code with the provider under test. What the vendor leaves undefined is NaN here, so that a result which
depends on it shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.npu.rig import reference_gemm

__all__ = ["CALLS", "KERNELS", "install"]

CALLS: Counter[str] = Counter()
"""How often each vendor op ran."""

_LIBRARY: list[torch.library.Library] = []


def _gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    norm = torch.sigmoid(x.float()) if norm_type == 1 else torch.softmax(x.float(), -1)
    value = norm if bias is None else norm + bias.float()
    if group_count > 1:
        grouped = value.view(x.shape[0], group_count, -1)
        best = grouped.topk(2, -1).values.sum(-1) if group_select_mode else grouped.max(-1).values
        keep = torch.zeros_like(best).scatter(1, best.topk(k_group, 1).indices, 1.0).bool()
        value = torch.where(keep.unsqueeze(-1), grouped, -math.inf).view(x.shape)
    idx = value.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    y = norm.gather(1, idx)
    if norm_type == 1 or renorm == 1:
        y = y / (y.sum(-1, keepdim=True) + eps)
    third = norm if out_flag else torch.full_like(norm, math.nan)
    return (y * routed_scaling_factor).to(x.dtype), idx.to(torch.int32), third


def _gating_softmax_v2(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[Tensor, Tensor, Tensor]:
    order = x.float().sort(dim=-1, descending=True, stable=True)
    top, idx = order.values[..., :k], order.indices[..., :k]
    y = top.softmax(-1) if renorm else x.float().softmax(-1).gather(-1, idx)
    return y.to(x.dtype), idx.to(torch.int32), x.new_full((0,), 0, dtype=torch.float32)


def _init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, last = active_expert_range or (0, expert_num)
    flat = expert_idx.reshape(-1).tolist()
    assert all(0 <= e < expert_num for e in flat), "the vendor's op takes ids of experts only"
    undefined = 127 if x.dtype == torch.int8 else math.nan  # 127 is NaN if the bytes are FP8
    rows = torch.full((len(flat), x.shape[1]), undefined, dtype=x.dtype)
    row_map = torch.full((len(flat),), -1, dtype=torch.int32)
    counts = torch.zeros(last - first, dtype=torch.int64)
    position = 0
    for expert in range(first, last):
        for slot, chosen in enumerate(flat):
            if chosen == expert:
                rows[position] = x[slot // expert_idx.shape[1]]
                row_map[slot] = position
                counts[expert - first] += 1
                position += 1
    return rows, row_map, counts, torch.full((len(flat),), math.nan)


def _finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    assert drop_pad_mode == 3 and scales is not None and bias is None and skip2 is None
    rows = expanded_permuted_rows.flatten(0, 1)
    tokens, slots = scales.shape
    out = torch.zeros(tokens, rows.shape[1])
    for t in range(tokens):
        for j in range(slots):
            row = int(expanded_src_to_dst_row[t * slots + j])
            if row >= 0:
                out[t] += scales[t, j].float() * rows[row].float()
    if skip1 is not None:
        out += skip1.float()
    return out.to(rows.dtype)


def _grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    scale: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    scale_dtype: int | None = None,
    **_: Any,
) -> list[Tensor]:
    (a,), (w,) = x, weight
    assert group_list is not None
    if scale is not None and per_token_scale is not None:
        assert group_list_type == 1 and group_type == 0 and bias is None
        how = (output_dtype, x_dtype == 296, scale_dtype == 293)
        return [reference_gemm.grouped_scaled(a, w, group_list.tolist(), scale[0], per_token_scale[0], *how)]
    sizes = group_list.tolist() if group_list_type == 1 else torch.diff(group_list, prepend=group_list[:0].sum()[None])
    start = 0
    if group_type == 2:
        out = torch.full((len(sizes), a.shape[0], w.shape[1]), math.nan, dtype=a.dtype)
        for e, size in enumerate(sizes):
            part = slice(start, start + int(size))
            if size:  # what an empty group gives is not documented
                out[e] = (a[:, part].float() @ w[part].float()).to(a.dtype)
            start += int(size)
        return [out]
    out = torch.full((a.shape[0], w.shape[2]), math.nan, dtype=a.dtype)
    for e, size in enumerate(sizes):
        part = slice(start, start + int(size))
        y = a[part].float() @ w[e].float()
        out[part] = (y if bias is None else y + bias[0][e].float()).to(a.dtype)
        start += int(size)
    return [out]


def _swiglu(input: Tensor, dim: int = -1) -> Tensor:
    a, b = input.float().chunk(2, dim)
    return (a * torch.sigmoid(a) * b).to(input.dtype)


def _swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    a, b = input.float().chunk(2, dim)
    s, g = torch.sigmoid(a), grad_output.float()
    return torch.cat((g * b * s * (1 + a * (1 - s)), g * a * s), dim).to(input.dtype)


def _clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    a, b = a.float().clamp(max=limit), b.float().clamp(-limit, limit)
    return (a * torch.sigmoid(alpha * a) * (b + bias)).to(x.dtype)


def _choose(query: Tensor, key: Tensor, weights: Tensor, lengths: Tensor | None, count: int) -> Tensor:
    batch, queries = query.shape[:2]
    out = torch.full((batch, queries, 1, count), -1, dtype=torch.int32)
    for b in range(batch):
        n = key.shape[1] if lengths is None else int(lengths[b])
        score = torch.einsum("shd,td->sht", query[b].float(), key[b, :n, 0].float()).relu()
        total = (score * weights[b].float().unsqueeze(-1)).sum(1)
        kept = min(count, n)
        # Best first: the vendor does not say that it is by index.
        out[b, :, 0, :kept] = total.topk(kept, -1).indices.to(torch.int32)
    return out


def _lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_key: Tensor | None = None,
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    assert sparse_mode == 0
    return _choose(query, key, weights, actual_seq_lengths_key, sparse_count), query.new_empty(0)


def _quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_key: Tensor | None = None,
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **_: Any,
) -> Tensor:
    assert sparse_mode == 0
    q = query.float() * query_dequant_scale.float().unsqueeze(-1)
    k = key.float() * key_dequant_scale.float().unsqueeze(-1)
    return _choose(q, k, weights, actual_seq_lengths_key, sparse_count)


def _sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    return_softmax_lse: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert value is not None and query_rope is not None and key_rope is not None
    batch, queries, heads, _depth = query.shape
    out = torch.full_like(query, math.nan)
    highest = torch.full((batch, 1, queries, heads), math.nan)
    total = torch.full((batch, 1, queries, heads), math.nan)
    for b in range(batch):
        for s in range(queries):
            ids = sparse_indices[b, s, 0]
            count = int((ids >= 0).sum())
            assert (ids[:count] >= 0).all(), "valid indices come first"
            if not count:
                continue
            at = ids[:count].long()
            logits = query[b, s].float() @ key[b, at, 0].float().t()
            logits = (logits + query_rope[b, s].float() @ key_rope[b, at, 0].float().t()) * scale_value
            top = logits.max(-1).values
            p = (logits - top.unsqueeze(-1)).exp()
            highest[b, 0, s], total[b, 0, s] = top, p.sum(-1)
            out[b, s] = ((p / p.sum(-1, keepdim=True)) @ value[b, at, 0].float()).to(query.dtype)
    return (out, highest, total) if return_softmax_lse else (out, highest.new_empty(0), total.new_empty(0))


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_moe_gating_top_k": _gating_top_k,
    "npu_moe_gating_top_k_softmax_v2": _gating_softmax_v2,
    "npu_moe_init_routing_v2": _init_routing_v2,
    "npu_moe_finalize_routing": _finalize_routing,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": _swiglu_backward,
    "npu_clipped_swiglu": _clipped_swiglu,
    "npu_lightning_indexer": _lightning_indexer,
    "npu_quant_lightning_indexer": _quant_lightning_indexer,
    "npu_sparse_flash_attention": _sparse_flash_attention,
    **reference_gemm.KERNELS,
}


def _counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return kernel(*args, **kwargs)

    return run


def install() -> None:
    """Register the kernels for the CPU, once per process."""
    if _LIBRARY:
        return
    library = torch.library.Library("npu", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, _counted(name, kernel), "CPU")
    _LIBRARY.append(library)
