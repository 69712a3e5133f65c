"""Calls of DeepGEMM's indexer function, for every platform of ``differences``.

The functions take the library as an argument, so that a test can pass a stand-in and look at every call. Rules that
hold on all platforms: operands contiguous, bounds int32 and contiguous and inside [0, T], result allocated by the
library with a padded row pitch. Ours are added here: the scale goes into the weights, and everything outside the ranges
becomes -inf where the caller asks for it. Dense f32 scores of SM90 keep the library's rows, which is what the op
promises there (``native.logits_rows``); all others are made contiguous.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native import logits_rows
from ascend_deep.native.deep_gemm.differences import Indexer

__all__ = ["Operands", "logits", "operands", "pack_scales", "raw_logits"]

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


@dataclass(frozen=True)
class Operands:
    """Arguments of the library for one sequence.

    Attributes:
        q, kv: data, [S, H, D] and [T, D], contiguous.
        q_sf: words [S, H, n], or ``None`` where the weights hold the scales of q.
        kv_sf: f32 [T], or words [T, n].
        weights: [S, H] in the library's dtype, times the scale.
        starts, ends: i32 [S] inside [0, T].
    """

    q: Tensor
    q_sf: Tensor | None
    kv: Tensor
    kv_sf: Tensor
    weights: Tensor
    starts: Tensor
    ends: Tensor


def operands(
    row: Indexer,
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    scale: float,
) -> Operands:
    """What the library of the platform ``row`` gets for a call of ``mqa_logits`` with B = 1.

    A negative scale of a vector, which the library would apply behind the ReLU, becomes NaN (on CUDA; the op itself
    refuses it on the CPU).
    """
    device, keys = q.device, kv.shape[1]
    starts: Tensor | None
    ends: Tensor | None
    if row.mx_scales:
        assert q_sf is not None and kv_sf is not None
        q_words: Tensor | None = pack_scales(q_sf[0], row.scale_dtype)
        scales: Tensor | None = pack_scales(kv_sf[0], row.scale_dtype)
        folded = (weights[0] if scale == 1.0 else weights[0].float() * scale).to(row.weights).contiguous()
        starts, ends = (None if b is None else _bound(b, keys) for b in (ks, ke))
    else:
        q_words = None
        of_q, of_kv = None if q_sf is None else q_sf[0, :, :, 0], None if kv_sf is None else kv_sf[0, :, 0]
        first, end = (None if b is None else b[0] for b in (ks, ke))
        if device.type == "cuda":
            from ascend_deep.native.triton.library import prepare

            folded, scales, starts, ends = prepare(weights[0], of_q, of_kv, first, end, scale=scale, keys=keys)
        else:
            folded = weights[0].float() * scale * (1.0 if of_q is None else of_q)
            scales = None if of_kv is None else of_kv.contiguous()
            starts, ends = (None if b is None else _bound(b, keys) for b in (ks, ke))
    return Operands(
        q[0].contiguous(),
        q_words,
        kv[0].contiguous(),
        _filled("scale", keys, 1, device) if scales is None else scales,
        folded,
        _filled("bound", q.shape[1], 0, device) if starts is None else starts,
        _filled("bound", q.shape[1], keys, device) if ends is None else ends,
    )


def _bound(bound: Tensor, keys: int) -> Tensor:
    return bound[0].clamp(0, keys).to(torch.int32).contiguous()


def raw_logits(library: Any, row: Indexer, given: Operands, *, columns: int, clean: bool = False) -> Tensor:
    """The library's result [S, T], or compressed [S, columns] if ``columns`` is not 0; row pitch as it comes.

    Args:
        library: the ``deep_gemm`` module.
        row: the platform.
        given: from ``operands``.
        clean: let the library write -inf outside the ranges of a dense result (``row.clean``).
    """
    function = getattr(library, row.function)
    bounds = (given.weights, given.starts, given.ends)
    out: Tensor
    if given.q_sf is None:
        out = function(given.q, (given.kv, given.kv_sf), *bounds, clean_logits=clean, max_seqlen_k=columns)
    elif row.compressed_only:
        # Scales of q are rows of (query, head) there, as those of kv are rows of keys.
        q_pair = (given.q, given.q_sf.flatten(0, 1))
        out = function(q_pair, (given.kv, given.kv_sf), *bounds, columns or given.kv.shape[0])
    else:
        # One word holds the scales of a whole vector of up to 128 elements.
        out = function(
            (given.q, given.q_sf[..., 0].contiguous()),
            (given.kv, given.kv_sf[..., 0].contiguous()),
            *bounds,
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
    """The op ``mqa_logits`` for B = 1: [1, S, T or max_seqlen_k], contiguous unless ``logits_rows`` pads it."""
    given = operands(row, q, q_sf, kv, kv_sf, weights, ks, ke, scale)
    bounded = ks is not None or ke is not None
    if max_seqlen_k or row.compressed_only:
        out = raw_logits(library, row, given, columns=max_seqlen_k or kv.shape[1])
        if ks is not None and not max_seqlen_k:
            out = _spread(out, given.starts, given.ends)
        elif clean and (max_seqlen_k or bounded):
            _clean_behind(out, given.ends if ks is None else (given.ends - given.starts).clamp(min=0))
    else:
        # The library writes whole tiles from the first key of a range on; it cleans in front of and behind ranges.
        out = raw_logits(library, row, given, columns=0, clean=clean and ks is not None)
        if clean and ks is None and bounded:
            _clean_behind(out, given.ends)
    out = out.unsqueeze(0).to(out_dtype or torch.float32)
    if not logits_rows.padded(out.device.type, q.dtype, kv.dtype, max_seqlen_k, out_dtype):
        return out.contiguous()
    if out.stride(1) == logits_rows.pitch(kv.shape[1]):
        return out
    return logits_rows.empty_scores(q, kv, max_seqlen_k, out_dtype).copy_(out)


def _spread(compressed: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Dense [S, T] with -inf outside the ranges [S] from compressed [S, T] (column c is key start + c)."""
    start, end = start.unsqueeze(1), end.unsqueeze(1)
    at = torch.arange(compressed.shape[1], device=compressed.device)
    dense = compressed.gather(1, (at - start).clamp(min=0))
    return dense.masked_fill((at < start) | (at >= end), -torch.inf)


def _clean_behind(out: Tensor, length: Tensor) -> None:
    """-inf in the columns ``length[s]`` and above of ``out`` [S, C]."""
    if out.device.type == "cuda":
        from ascend_deep.native.triton.library import fill_behind

        fill_behind(out, length.contiguous())
    else:
        behind = torch.arange(out.shape[1], device=out.device) >= length.unsqueeze(1)
        out.masked_fill_(behind, -torch.inf)
