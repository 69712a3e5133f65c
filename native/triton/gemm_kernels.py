"""Matrix products on tensor cores: one kernel for dense, grouped and scaled products, and the sum over splits of K.

``D[m, n] = C[m, n] + alpha * sum_k A[m, k] B[n, k]`` with f32 accumulation and one rounding. With scales every 128
elements of K are summed by the tensor cores and added to the f32 sum times the two scales, as the contract has it.

Few rows (SWAP): the tensor cores multiply 64 rows at least, so the weight takes the place of the rows and the
activations that of the columns. Such a product is bound by reading the weight; K is cut in SPLITS so that enough
multiprocessors read at once, and ``sum_kernel`` adds the parts, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ascend_deep.native.triton.portable import exact

__all__ = ["gemm_kernel", "sum_kernel"]


@triton.jit
def _load(x, row, k, rows, K, x_r, x_k, R: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, K_MAJOR: tl.constexpr):
    """A tile [R, BK] of the matrix x at (row, k).

    Through the copy engine ``x`` is a descriptor of the matrix as it lies, [rows, K] if K_MAJOR, else [K, rows].
    Otherwise ``x`` is a pointer, and what is not inside [rows, K] is read as 0. Codes of FP8 come as float16.
    """
    if TMA:
        if K_MAJOR:
            tile = x.load([row, k])
        else:
            tile = tl.trans(x.load([k, row]))
    else:
        r = (row + tl.arange(0, R)).to(tl.int64)
        at = (k + tl.arange(0, BK)).to(tl.int64)
        inside = (r < rows)[:, None] & (at < K)[None, :]
        tile = tl.load(x + r[:, None] * x_r + at[None, :] * x_k, mask=inside, other=0.0)
    return exact(tile)


@triton.jit
def _group_of(ends, tile, groups, M, alignment, BM: tl.constexpr, GP: tl.constexpr):
    """Where tile number ``tile`` of a psum layout lies: group, first row, end of valid rows, end of rows to write.

    A segment is the valid rows of a group and the padding behind them; rows behind the last one are the segment
    ``groups``, which has no valid rows. A tile that does not exist has its first row at its end.
    """
    g = tl.arange(0, GP)
    end = tl.minimum(tl.maximum(tl.load(ends + g, mask=g < groups, other=0).to(tl.int32), 0), M)
    before = tl.load(ends + tl.maximum(g - 1, 0), mask=(g > 0) & (g <= groups), other=0).to(tl.int32)
    before = tl.minimum(tl.maximum(before, 0), M)
    start = tl.minimum((before + alignment - 1) // alignment * alignment, M)
    aligned = tl.minimum((end + alignment - 1) // alignment * alignment, M)
    stop = tl.where(g == groups, M, tl.maximum(aligned, start))
    tiles = tl.where(g <= groups, (stop - start + BM - 1) // BM, 0)
    upto = tl.cumsum(tiles, 0)
    mine = (upto > tile) & (upto - tiles <= tile)
    group = tl.sum(tl.where(mine, g, 0), 0)
    row = tl.sum(tl.where(mine, start + (tile - upto + tiles) * BM, 0), 0)
    valid = tl.sum(tl.where(mine & (g < groups), tl.maximum(end, start), 0), 0)
    to = tl.sum(tl.where(mine, stop, 0), 0)
    return group, row, tl.where(group == groups, row, valid), to


@triton.jit
def gemm_kernel(
    a,
    b,
    c,
    out,
    sfa,
    sfb,
    layout,
    alpha,
    M,
    N,
    K,
    groups,
    alignment,
    m_tiles,
    a_m,
    a_k,
    b_g,
    b_n,
    b_k,
    c_m,
    c_n,
    o_s,
    o_m,
    sfa_m,
    sfa_k,
    sfb_g,
    sfb_n,
    sfb_k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GP: tl.constexpr,
    GROUPING: tl.constexpr,
    SWAP: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    GRAN_N: tl.constexpr,
    HAS_C: tl.constexpr,
    TMA: tl.constexpr,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    SUPER: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile [BM, BN] of the result, or of one of SPLITS parts of K.

    GROUPING: 0 dense; 1 psum (``layout``: ends of groups); 2 labels (``layout``: group of each row; rows of a tile have
    one group or none); 3 masked (``layout``: rows of each group; ``m_tiles`` tiles and M rows per group).
    b is [groups * N, K] if B_K_MAJOR, else [groups * K, N]. Padding rows come out as zeros, whatever A has there.
    ``out`` is f32 [SPLITS, M, N] if SPLITS > 1, without alpha and C.
    """
    pid = tl.program_id(0)
    n_tiles = tl.cdiv(N, BN)
    # Tiles that run together read a compact part of both operands.
    in_super = SUPER * n_tiles
    first = pid // in_super * SUPER
    height = tl.minimum(m_tiles - first, SUPER)
    tile = first + pid % in_super % height
    n0 = pid % in_super // height * BN
    m0 = tile * BM
    group = 0
    valid = M
    stop = M
    base = 0
    if GROUPING == 1:
        group, m0, valid, stop = _group_of(layout, tile, groups, M, alignment, BM, GP)
    elif GROUPING == 2:
        of_rows = m0 + tl.arange(0, BM)
        label = tl.load(layout + of_rows, mask=of_rows < M, other=-1).to(tl.int32)
        labelled = (label >= 0) & (label < groups)
        group = tl.max(tl.where(labelled, label, -1), 0)
        valid = tl.where(group >= 0, M, m0)
        group = tl.maximum(group, 0)
    elif GROUPING == 3:
        group = tl.program_id(2)
        base = group * M
        valid = tl.maximum(tl.minimum(tl.load(layout + group), M), 0).to(tl.int32)
    if m0 >= stop:
        return

    split = tl.program_id(1)
    low = 0
    high = K
    if SPLITS > 1:
        per_split = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
        low = split * per_split
        high = tl.minimum(low + per_split, K)
    if m0 >= valid:
        high = low

    m = m0 + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    if SWAP:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    b_row = n0
    b_at = 0
    if TMA:
        if B_K_MAJOR:
            b_row = group * N + n0
        else:
            b_at = group * K
        weights = b
    else:
        weights = b
        if GROUPING != 0:
            weights = b + tl.cast(group, tl.int64) * b_g
    if SCALED:
        sfa_at = sfa + (base + m).to(tl.int64) * sfa_m
        if GRAN_N == 1:
            sfb_at = sfb + group * sfb_g + n.to(tl.int64) * sfb_n
        else:
            # A tile of columns lies in one block of 128.
            sfb_at = sfb + group * sfb_g + n0 // GRAN_N * sfb_n
        m_in = m < valid
        n_in = n < N
        at = low // 128
        sa = tl.load(sfa_at + at * sfa_k, mask=m_in, other=0.0)
        sb = tl.load(sfb_at + at * sfb_k, mask=n_in, other=0.0) if GRAN_N == 1 else tl.load(sfb_at + at * sfb_k)

    for k in tl.range(low, high, BK, num_stages=STAGES):
        x = _load(a, base + m0, k, base + valid, K, a_m, a_k, BM, BK, TMA, A_K_MAJOR)
        w = _load(weights, b_row, b_at + k, N, K, b_n, b_k, BN, BK, TMA, B_K_MAJOR)
        if SCALED:
            if SWAP:
                part = tl.dot(w, x.T)
                by_n = sb[:, None] if GRAN_N == 1 else sb
                acc += part * (sa[None, :] * by_n)
            else:
                part = tl.dot(x, w.T)
                by_n = sb[None, :] if GRAN_N == 1 else sb
                acc += part * (sa[:, None] * by_n)
            at = (k + BK) // 128
            more = k + BK < high
            sa = tl.load(sfa_at + at * sfa_k, mask=m_in & more, other=0.0)
            if GRAN_N == 1:
                sb = tl.load(sfb_at + at * sfb_k, mask=n_in & more, other=0.0)
            else:
                sb = tl.load(sfb_at + at * sfb_k, mask=more, other=0.0)
        elif SWAP:
            acc = tl.dot(w, x.T, acc)
        else:
            acc = tl.dot(x, w.T, acc)

    kept = m < valid
    if GROUPING == 2:
        kept = kept & labelled
    if SWAP:
        m2 = m[None, :]
        n2 = n[:, None]
        kept2 = kept[None, :]
    else:
        m2 = m[:, None]
        n2 = n[None, :]
        kept2 = kept[:, None]
    inside = (m2 < stop) & (n2 < N)
    rows = (base + m2).to(tl.int64)
    if SPLITS > 1:
        tl.store(out + split.to(tl.int64) * o_s + rows * o_m + n2, acc, mask=inside)
    else:
        acc = acc * alpha
        if HAS_C:
            acc += tl.load(c + rows * c_m + n2.to(tl.int64) * c_n, mask=inside, other=0.0).to(tl.float32)
        if GROUPING != 0:
            # Also what came out of NaN in padding rows.
            acc = tl.where(kept2, acc, 0.0)
        tl.store(out + rows * o_m + n2, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(
    work, c, out, alpha, M, N, w_s, c_m, c_n, o_m, SPLITS: tl.constexpr, HAS_C: tl.constexpr, BLOCK: tl.constexpr
):
    """``out[m, n] = c[m, n] + alpha * sum_s work[s, m, n]`` for a row m of contiguous f32 ``work`` [SPLITS, M, N]."""
    m = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    acc = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(SPLITS):
        acc += tl.load(work + s * w_s + m * N + n, mask=inside, other=0.0)
    acc = acc * alpha
    if HAS_C:
        acc += tl.load(c + m * c_m + n.to(tl.int64) * c_n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m * o_m + n, acc.to(out.dtype.element_ty), mask=inside)
