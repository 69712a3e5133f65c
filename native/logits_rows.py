"""How the dense scores of the indexer lie in memory, for every implementation of ``mqa_logits``.

They are contiguous, with one exception. DeepGEMM's SM90 kernel writes whole tiles of keys, so the rows it returns are a
tile longer than the keys; making them contiguous would cost a tenth of its time. A graph is compiled before it is known
which provider will run, so the exception depends on what a fake tensor shows alone: device and dtypes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["FP8_TILE", "UNIT", "empty_scores", "padded", "pitch"]

FP8_TILE = 256
"""Keys of a tile of DeepGEMM's SM90 kernel, by which a row is longer than the keys."""
UNIT = 256
"""The library's rows are a multiple of this many scores apart."""


def pitch(keys: Any) -> Any:
    """Distance of the rows of padded scores over ``keys`` (may be symbolic) keys, in elements."""
    return (keys + FP8_TILE + UNIT - 1) // UNIT * UNIT


def padded(device: str, q: torch.dtype, kv: torch.dtype, max_seqlen_k: Any, out_dtype: torch.dtype | None) -> bool:
    """Whether a result has padded rows: dense f32 scores of fp8 operands on CUDA."""
    return (
        device == "cuda"
        and q == kv == torch.float8_e4m3fn
        and out_dtype in (None, torch.float32)
        and type(max_seqlen_k) is int
        and max_seqlen_k == 0
    )


def empty_scores(q: Tensor, kv: Tensor, max_seqlen_k: Any, out_dtype: torch.dtype | None) -> Tensor:
    """Uninitialised result of ``mqa_logits`` for q [B, S, H, D] and kv [B, T, D], real or fake.

    Args:
        max_seqlen_k: columns of a compressed result, 0 for a dense one; may be symbolic.
        out_dtype: f32 or f64, whichever the operands are computed in, for ``None``.

    Returns:
        [B, S, T] or [B, S, max_seqlen_k], contiguous or with padded rows (see ``padded``).
    """
    batch, rows, keys = q.shape[0], q.shape[1], kv.shape[1]
    if padded(q.device.type, q.dtype, kv.dtype, max_seqlen_k, out_dtype):
        apart = pitch(keys)
        return q.new_empty_strided((batch, rows, keys), (rows * apart, apart, 1), dtype=torch.float32)
    dense = type(max_seqlen_k) is int and max_seqlen_k == 0
    dtype = out_dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    return q.new_empty((batch, rows, keys if dense else max_seqlen_k), dtype=dtype)
