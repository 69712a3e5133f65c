"""The indexer kernels of the CPU provider: the ops' arguments as the C++ functions take them, and their limits.

FP8 operands travel as bytes, so that the library needs no FP8 type of the torch it loads into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.sparse_rows import fill_empty, hide_filled

__all__ = ["KERNELS", "LIMITS"]

_FP4 = (torch.int8, torch.uint8)
_OUT = (None, torch.float32, torch.bfloat16)


def _bytes(operand: Tensor) -> tuple[Tensor, str]:
    """The operand and the name of its format; storage of 8 bits as uint8."""
    if operand.dtype == torch.float8_e4m3fn:
        return operand.view(torch.uint8), "fp8"
    if operand.dtype in _FP4:
        return operand.view(torch.uint8), "fp4"
    return operand, "plain"


def _mqa_logits(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    scale: float,
    max_seqlen_k: int,
    clean: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    # Everything is always clean here: the -inf are written where scores would be.
    out: Tensor = torch.ops.ascend_deep_cpu.mqa_logits(
        *_bytes(q), q_sf, *_bytes(kv), kv_sf, weights, ks, ke, mask, scale, max_seqlen_k, out_dtype
    )
    return out


def _mqa_topk(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    topk: int,
    scale: float,
    outside: str,
    sorted: bool,
    return_scores: bool,
    index_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = torch.ops.ascend_deep_cpu.mqa_topk(
        *_bytes(q),
        q_sf,
        *_bytes(kv),
        kv_sf,
        weights,
        ks,
        ke,
        mask,
        topk,
        scale,
        outside == "rank_last",
        sorted,
        return_scores,
        index_dtype == torch.int32,
    )
    return out


def _paged_mqa_logits(
    q: Tensor,
    q_sf: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    indices: Tensor | None,
    *,
    max_context_len: int,
    scale: float,
    clean: bool,
    out_dtype: torch.dtype | None,
    fmt: str,
) -> Tensor:
    out: Tensor = torch.ops.ascend_deep_cpu.paged_mqa_logits(
        *_bytes(q),
        q_sf,
        kv_cache,
        weights,
        context_lens,
        block_table,
        indices,
        max_context_len,
        scale,
        out_dtype,
        fmt,
    )
    return out


def _paged_mqa_topk(
    q: Tensor,
    q_sf: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    indices: Tensor | None,
    *,
    topk: int,
    max_context_len: int,
    scale: float,
    sorted: bool,
    return_scores: bool,
    index_dtype: torch.dtype | None,
    fmt: str,
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = torch.ops.ascend_deep_cpu.paged_mqa_topk(
        *_bytes(q),
        q_sf,
        kv_cache,
        weights,
        context_lens,
        block_table,
        indices,
        topk,
        max_context_len,
        scale,
        sorted,
        return_scores,
        index_dtype == torch.int32,
        fmt,
    )
    return out


def _sparse_mqa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    *,
    scale: float,
    empty: str,
    fill: float,
) -> tuple[Tensor, Tensor]:
    listed, masks = hide_filled(idx, mask, fill) if empty == "mean" else (idx, mask)
    out: tuple[Tensor, Tensor] = torch.ops.ascend_deep_cpu.sparse_mqa_attention(q, k, v, listed, masks, sink, scale)
    fill_empty(*out, k, v, idx, mask, empty, fill)
    return out


def _operands(q: Tensor, kv: Tensor, mask: Tensor | None) -> str | None:
    for name, tensor in (("q", q), ("kv", kv)):
        if tensor.dtype == torch.float64:
            return f"{name} is float64; the kernel computes in float32."
    if mask is not None and mask.dtype == torch.float64:
        return "mask is float64; the kernel takes bool, float32, bfloat16 and float16."
    return None


def _logits_limits(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> str | None:
    if out_dtype not in _OUT:
        return f"out_dtype is {out_dtype}; the kernel writes float32 and bfloat16."
    return _operands(q, kv, mask)


def _topk_limits(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    **_: Any,
) -> str | None:
    return _operands(q, kv, mask)


def _paged_limits(
    q: Tensor, q_sf: Tensor | None, kv_cache: Tensor, *_: Any, fmt: str, out_dtype: torch.dtype | None = None, **__: Any
) -> str | None:
    if out_dtype not in _OUT:
        return f"out_dtype is {out_dtype}; the kernel writes float32 and bfloat16."
    if fmt == "plain" and kv_cache.stride(3) != 1 and kv_cache.shape[3] != 1:
        return f"kv_cache has strides {tuple(kv_cache.stride())}; the kernel wants contiguous keys."
    return _operands(q, kv_cache, None)


def _attention_limits(
    q: Tensor, k: Tensor, v: Tensor, idx: Tensor, mask: Tensor | None, sink: Tensor | None, **_: Any
) -> str | None:
    if q.dtype not in (torch.float32, torch.bfloat16):
        return f"q has dtype {q.dtype}; the kernel takes float32 and bfloat16."
    if mask is not None and mask.dtype == torch.float64:
        return "mask is float64; the kernel takes bool, float32, bfloat16 and float16."
    return None


KERNELS: Mapping[str, Callable[..., Any]] = {
    "mqa_logits": _mqa_logits,
    "mqa_topk": _mqa_topk,
    "paged_mqa_logits": _paged_mqa_logits,
    "paged_mqa_topk": _paged_mqa_topk,
    "sparse_mqa_attention": _sparse_mqa_attention,
}

LIMITS: Mapping[str, Callable[..., str | None]] = {
    "mqa_logits": _logits_limits,
    "mqa_topk": _topk_limits,
    "paged_mqa_logits": _paged_limits,
    "paged_mqa_topk": _paged_limits,
    "sparse_mqa_attention": _attention_limits,
}
