"""Small kernels beside a library's indexer: operands as it wants them in one launch, rows cleaned behind their end.

DeepGEMM wants head weights with every factor of a query in them, bounds in i32 inside [0, T], and scales of keys that
are applied behind the ReLU. One launch makes all of these; a negative scale, with which the library would compute a
wrong number, becomes NaN on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_deep.native.triton.launch import key_of, launch, on_device, repeat

__all__ = ["fill_behind", "prepare"]

_BLOCK = 1024


@triton.jit
def _fill_kernel(out, length, columns, o_s, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(length + row)
    first = tl.program_id(1) * BLOCK
    if first + BLOCK > count:
        c = first + tl.arange(0, BLOCK)
        nothing = tl.full((BLOCK,), float("-inf"), tl.float32).to(out.dtype.element_ty)
        tl.store(out + row * o_s + c, nothing, mask=(c >= count) & (c < columns))


def fill_behind(out: Tensor, length: Tensor) -> None:
    """``out`` [S, C] gets -inf in the columns ``length[s]`` and above; ``length`` is i32 [S], contiguous, on CUDA."""
    rows, columns = out.shape
    if rows and columns:
        with on_device(out):
            grid = (rows, triton.cdiv(columns, 2048), 1)
            launch(_fill_kernel, grid, (out, length, columns, out.stride(0)), {"BLOCK": 2048})


@triton.jit
def _bound(bound, to, i, rows, keys, stride):
    value = tl.load(bound + i.to(tl.int64) * stride, mask=i < rows, other=0)
    tl.store(to + i, tl.minimum(tl.maximum(value, 0), keys).to(tl.int32), mask=i < rows)


@triton.jit
def _prepare_kernel(
    weights,
    q_sf,
    kv_sf,
    ks,
    ke,
    folded,
    scales,
    starts,
    ends,
    scale,
    elements,
    rows,
    keys,
    heads,
    w_s,
    w_h,
    qsf_s,
    qsf_h,
    kvsf_t,
    ks_s,
    ke_s,
    FOLD: tl.constexpr,
    HAS_QSF: tl.constexpr,
    HAS_KVSF: tl.constexpr,
    HAS_KS: tl.constexpr,
    HAS_KE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK places of each result, of which ``weights`` has ``elements``, bounds ``rows``, scales
    ``keys``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if FOLD:
        s = (i // heads).to(tl.int64)
        h = i % heads
        w = tl.load(weights + s * w_s + h * w_h, mask=i < elements, other=0.0).to(tl.float32) * scale
        if HAS_QSF:
            f = tl.load(q_sf + s * qsf_s + h * qsf_h, mask=i < elements, other=0.0)
            w = w * tl.where(f < 0, float("nan"), f)
        tl.store(folded + i, w, mask=i < elements)
    if HAS_KVSF:
        f = tl.load(kv_sf + i.to(tl.int64) * kvsf_t, mask=i < keys, other=0.0)
        tl.store(scales + i, tl.where(f < 0, float("nan"), f), mask=i < keys)
    if HAS_KS:
        _bound(ks, starts, i, rows, keys, ks_s)
    if HAS_KE:
        _bound(ke, ends, i, rows, keys, ke_s)


def prepare(
    weights: Tensor,
    q_sf: Tensor | None,
    kv_sf: Tensor | None,
    ks: Tensor | None,
    ke: Tensor | None,
    *,
    scale: float,
    keys: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Operands of a library's call for one sequence.

    Args:
        weights: [S, H], f32, bf16 or f16.
        q_sf: f32 [S, H] or ``None``.
        kv_sf: f32 [T] or ``None``.
        ks, ke: i32 or i64 [S], or ``None``.
        scale: goes into the weights.
        keys: T.

    Returns:
        (f32 weights * scale * q_sf, scales of keys, starts, ends), contiguous, the last three ``None`` as they came;
        bounds are i32 inside [0, T]. A tensor that is right as it is is returned itself.
    """
    rows, heads = weights.shape
    plain = q_sf is None and scale == 1.0 and weights.dtype == torch.float32 and weights.is_contiguous()
    if plain and kv_sf is None and ks is None and ke is None:
        return weights, None, None, None
    folded = weights if plain else torch.empty(rows, heads, dtype=torch.float32, device=weights.device)
    scales = None if kv_sf is None else torch.empty_like(kv_sf, memory_format=torch.contiguous_format)
    starts, ends = (
        None if b is None else torch.empty(rows, dtype=torch.int32, device=weights.device) for b in (ks, ke)
    )
    elements = rows * heads
    most = max(0 if plain else elements, 0 if kv_sf is None else keys, rows if ks is not None or ke is not None else 0)
    if most:
        tensors = (weights, q_sf, kv_sf, ks, ke, folded, scales, starts, ends)
        with on_device(weights):
            key = key_of(tensors, "prepare", scale, keys)
            if repeat(key, tensors):
                return folded, scales, starts, ends
            pitches = (
                *weights.stride(),
                *((0, 0) if q_sf is None else q_sf.stride()),
                *(0 if t is None else t.stride(0) for t in (kv_sf, ks, ke)),
            )
            options = {
                "FOLD": not plain,
                "HAS_QSF": q_sf is not None,
                "HAS_KVSF": kv_sf is not None,
                "HAS_KS": ks is not None,
                "HAS_KE": ke is not None,
                "BLOCK": _BLOCK,
            }
            args = (*tensors, float(scale), elements, rows, keys, heads, *pitches)
            launch(_prepare_kernel, (triton.cdiv(most, _BLOCK), 1, 1), args, options, (key, tensors))
    return folded, scales, starts, ends
