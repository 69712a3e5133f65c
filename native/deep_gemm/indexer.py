"""Calls of DeepGEMM's indexer function, for every platform of ``differences``.

The functions take the library as an argument, so that a test can pass a stand-in and look at every call. Rules that
hold on all platforms: operands contiguous, bounds int32 and contiguous and inside [0, T], result allocated by the
library with a padded row pitch. Ours are added here: the scale goes into the weights, the row pitch is taken out, and
everything outside the ranges becomes -inf where the caller asks for it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.deep_gemm.differences import Indexer

__all__ = ["logits", "pack_scales", "raw_logits"]

_EXPONENT_ONE = 127


def pack_scales(sf: Tensor, dtype: torch.dtype) -> Tensor:
    """UE8M0 codes of power-of-two f32 scales [..., G], packed little-endian into words of ``dtype``.

    Args:
        sf: f32, each value a power of two (what is between is cut off, as the library would not take it).
        dtype: int32 for four codes in a word (SM100), int16 for two (Ascend).

    Returns:
        [..., ceil(G * 1 byte / word)]; missing codes are those of 1.0.
    """
    per_word = dtype.itemsize
    codes = (sf.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word), value=_EXPONENT_ONE)
    return codes.contiguous().view(dtype)


@functools.lru_cache(maxsize=64)
def _constant(kind: str, size: int, value: int, device: torch.device) -> Tensor:
    """A read-only tensor that calls share; made outside of CUDA graphs only (see ``_filled``)."""
    made = torch.full((size,), value, dtype=torch.int32 if kind == "bound" else torch.float32, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return made


def _filled(kind: str, size: int, value: int, device: torch.device) -> Tensor:
    # What a capture allocates belongs to its graph and is written only when the graph runs.
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.full((size,), value, dtype=torch.int32 if kind == "bound" else torch.float32, device=device)
    return _constant(kind, size, value, device)


def _bound(bound: Tensor | None, default: int, queries: int, keys: int, device: torch.device) -> Tensor:
    if bound is None:
        return _filled("bound", queries, default, device)
    return bound[0].clamp(0, keys).to(torch.int32).contiguous()


def _weights(row: Indexer, weights: Tensor, q_sf: Tensor | None, scale: float) -> Tensor:
    """Head weights [S, H] in the library's dtype, times the scale and, where q has one, its per-vector scale."""
    folded = weights[0]
    if q_sf is not None and not row.mx_scales:
        # 0 + scale * weights * q_sf in one launch.
        folded = torch.addcmul(_filled("scale", 1, 0, weights.device), folded, q_sf[0, :, :, 0], value=scale)
    elif scale != 1.0:
        folded = folded.float() * scale
    return folded.to(row.weights).contiguous()


def raw_logits(
    library: Any,
    row: Indexer,
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    *,
    scale: float,
    columns: int,
    clean: bool = False,
    ranges: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The library's result [S, T], or compressed [S, columns] if ``columns`` is not 0; row pitch as it comes.

    Args:
        library: the ``deep_gemm`` module.
        row: the platform.
        others: as for ``mqa_logits`` with B = 1.
        ranges: ``ks`` and ``ke`` as the library wants them, if the caller has made them.
        clean: let the library write -inf outside the ranges of a dense result (``row.clean``).
    """
    queries, heads, device = q.shape[1], q.shape[2], q.device
    keys = kv.shape[1]
    start, end = ranges or (_bound(ks, 0, queries, keys, device), _bound(ke, keys, queries, keys, device))
    w = _weights(row, weights, q_sf, scale)
    q_data, kv_data = q[0].contiguous(), kv[0].contiguous()
    function = getattr(library, row.function)
    if not row.mx_scales:
        sf = _filled("scale", keys, 1, device) if kv_sf is None else kv_sf[0, :, 0].contiguous()
        out: Tensor = function(q_data, (kv_data, sf), w, start, end, clean_logits=clean, max_seqlen_k=columns)
        return out
    assert q_sf is not None and kv_sf is not None
    q_words = pack_scales(q_sf[0], row.scale_dtype)
    kv_words = pack_scales(kv_sf[0], row.scale_dtype)
    if row.compressed_only:
        # Scales of q are rows of (query, head) there, as those of kv are rows of keys.
        q_pair = (q_data, q_words.reshape(queries * heads, -1))
        out = function(q_pair, (kv_data, kv_words), w, start, end, columns or keys)
        return out
    # One word holds the scales of a whole vector of up to 128 elements.
    out = function(
        (q_data, q_words[..., 0].contiguous()),
        (kv_data, kv_words[..., 0].contiguous()),
        w,
        start,
        end,
        clean_logits=clean,
        max_seqlen_k=columns,
        logits_dtype=row.logits,
    )
    return out


def logits(
    library: Any,
    row: Indexer,
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    *,
    scale: float,
    max_seqlen_k: int,
    clean: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """The op ``mqa_logits`` for B = 1: contiguous [1, S, T or max_seqlen_k]."""
    keys = kv.shape[1]
    ranges = (_bound(ks, 0, q.shape[1], keys, q.device), _bound(ke, keys, q.shape[1], keys, q.device))
    call = functools.partial(raw_logits, library, row, q, q_sf, kv, kv_sf, weights, ks, ke, scale=scale, ranges=ranges)
    bounded = ks is not None or ke is not None
    unit = row.row_bytes // row.logits.itemsize
    if max_seqlen_k or ks is None:
        # With every range at 0 compressed and dense are the same, and a compressed result of a full row has no padding.
        columns = max_seqlen_k or (keys if row.compressed_only or keys % unit == 0 else 0)
        out = call(columns=columns).contiguous()
        if clean and (max_seqlen_k or bounded):
            _clean_behind(out, ranges[1] if ks is None else (ranges[1] - ranges[0]).clamp(min=0))
    elif row.compressed_only:
        out = _spread(call(columns=keys), *ranges)
    else:
        out = call(columns=0, clean=clean).contiguous()
    return out.unsqueeze(0).to(out_dtype or torch.float32)


def _spread(compressed: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Dense [S, T] with -inf outside the ranges [S] from compressed [S, T] (column c is key start + c)."""
    start, end = start.unsqueeze(1), end.unsqueeze(1)
    at = torch.arange(compressed.shape[1], device=compressed.device)
    dense = compressed.gather(1, (at - start).clamp(min=0))
    return dense.masked_fill((at < start) | (at >= end), -torch.inf)


def _clean_behind(out: Tensor, length: Tensor) -> None:
    """-inf in the columns ``length[s]`` and above of ``out`` [S, C]."""
    if out.device.type == "cuda":
        from ascend_deep.native.triton.fill import fill_behind

        fill_behind(out, length.contiguous())
    else:
        behind = torch.arange(out.shape[1], device=out.device) >= length.unsqueeze(1)
        out.masked_fill_(behind, -torch.inf)
