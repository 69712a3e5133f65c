"""Products over the rows of each group: ``D[g] = C[g] + A[rows of g]^T B[rows of g]`` (weight gradients)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_deep.native.triton.launch import Rows, launch
from ascend_deep.native.triton.plan import power_of_two

__all__ = ["k_grouped_gemm_bf16", "k_grouped_gemm_bf16_acc_"]


@triton.jit
def k_grouped_kernel(
    a,
    b,
    a_at,
    b_at,
    c,
    out,
    layout,
    R,
    M,
    N,
    groups,
    alignment,
    a_r,
    a_m,
    b_r,
    b_n,
    c_g,
    c_m,
    c_n,
    o_g,
    o_m,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GP: tl.constexpr,
    SIZES: tl.constexpr,
    HAS_C: tl.constexpr,
    TMA: tl.constexpr,
    SUPER: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile [BM, BN] of one group.

    ``a`` and ``b`` are descriptors of [R, M] and [R, N] if TMA; ``a_at`` and ``b_at`` point to the same matrices.
    ``layout``: ends, or SIZES. Rows of another group and padding, whatever it holds, are read as 0: the last rows of a
    group go through masked loads.
    """
    group = tl.program_id(1)
    if SIZES:
        g = tl.arange(0, GP)
        size = tl.maximum(tl.load(layout + g, mask=g < group, other=0), 0)
        first = tl.sum((size + alignment - 1) // alignment * alignment, 0)
        stop = first + tl.maximum(tl.load(layout + group), 0)
    else:
        before = tl.load(layout + group - 1, mask=group > 0, other=0)
        first = (tl.maximum(before, 0) + alignment - 1) // alignment * alignment
        stop = tl.load(layout + group)
    first = tl.minimum(first, R).to(tl.int32)
    stop = tl.maximum(tl.minimum(stop, R).to(tl.int32), first)

    pid = tl.program_id(0)
    m_tiles = tl.cdiv(M, BM)
    n_tiles = tl.cdiv(N, BN)
    in_super = SUPER * n_tiles
    top = pid // in_super * SUPER
    height = tl.minimum(m_tiles - top, SUPER)
    m0 = (top + pid % in_super % height) * BM
    n0 = pid % in_super // height * BN
    m = m0 + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    whole = first
    if TMA:
        whole = first + (stop - first) // BK * BK
        for k in tl.range(first, whole, BK, num_stages=STAGES):
            x = a.load([k, m0])
            w = b.load([k, n0])
            acc = tl.dot(x.T, w, acc)
    for k in tl.range(whole, stop, BK, num_stages=1):
        rows = (k + tl.arange(0, BK)).to(tl.int64)
        inside = (rows < stop)[:, None]
        x = tl.load(a_at + rows[:, None] * a_r + m[None, :] * a_m, mask=inside & (m < M)[None, :], other=0.0)
        w = tl.load(b_at + rows[:, None] * b_r + n[None, :] * b_n, mask=inside & (n < N)[None, :], other=0.0)
        acc = tl.dot(x.T, w, acc)
    inside = (m < M)[:, None] & (n < N)[None, :]
    g64 = group.to(tl.int64)
    rows = m.to(tl.int64)[:, None]
    if HAS_C:
        acc += tl.load(c + g64 * c_g + rows * c_m + n[None, :] * c_n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + g64 * o_g + rows * o_m + n[None, :], acc.to(out.dtype.element_ty), mask=inside)


def _readable(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) * 2 % 16 == 0 and x.data_ptr() % 16 == 0 and x.stride(0) >= x.shape[1]


def _launch(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, grouped_layout: Tensor, grouping: str, alignment: int
) -> None:
    rows, m = a.shape
    n, groups = b.shape[1], grouped_layout.shape[0]
    large = m >= 1024 and n >= 1024
    bm, bn, bk = (128, 256, 64) if large else (128, 128, 64)
    tma = _readable(a) and _readable(b)
    args = (
        Rows(a, rows, m, a.stride(0), (bk, bm)) if tma else a,
        Rows(b, rows, n, b.stride(0), (bk, bn)) if tma else b,
        a,
        b,
        c,
        out,
        grouped_layout.contiguous(),
        rows,
        m,
        n,
        groups,
        alignment,
        *a.stride(),
        *b.stride(),
        *((0, 0, 0) if c is None else c.stride()),
        out.stride(0),
        out.stride(1),
    )
    options = {
        "BM": bm,
        "BN": bn,
        "BK": bk,
        "GP": power_of_two(groups),
        "SIZES": grouping == "sizes",
        "HAS_C": c is not None,
        "TMA": tma,
        "SUPER": 8,
        "STAGES": 3,
        "num_warps": 8,
    }
    launch(k_grouped_kernel, (-(-m // bm) * -(-n // bn), groups, 1), args, options)


def k_grouped_gemm_bf16(
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    c: Tensor | None,
    *,
    grouping: str,
    alignment: int,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> Tensor:
    """The op ``k_grouped_gemm_bf16``; sizes on the host are not needed."""
    dtype = out_dtype or (torch.bfloat16 if c is None else c.dtype)
    out = a.new_empty((grouped_layout.shape[0], a.shape[1], b.shape[1]), dtype=dtype)
    _launch(a, b, c, out, grouped_layout, grouping, alignment)
    return out


def k_grouped_gemm_bf16_acc_(
    d: Tensor, a: Tensor, b: Tensor, grouped_layout: Tensor, *, grouping: str, alignment: int, **_: Any
) -> None:
    """The op ``k_grouped_gemm_bf16_acc_``."""
    _launch(a, b, d, d, grouped_layout, grouping, alignment)
