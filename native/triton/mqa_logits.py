"""Indexer scores on tensor cores: the kernel and its launch.

For one query s with H heads, ``acc[t, h] = k_t . q_h`` is a product [keys, D] x [D, H], so several queries side by side
make one tensor-core tile [BLOCK_T, QUERIES * H]. The ReLU, the weights and the sum over heads run on the accumulator in
registers: per key and query a single f32 leaves the multiprocessor, 1/H of what the products are.

The keys are the rows of the tile because a thread holds whole head groups of a key then: the sum over heads is in
registers but for two exchanges between neighbouring threads. Several small programs share a multiprocessor, so that the
sum of one overlaps with the products of another.

Arithmetic: products exact (bf16, f16) with f32 accumulation in the tensor core; fp8 products are accumulated by the
hardware with about 14 bits, as in every fp8 kernel of this generation. The absolute value of ``scale`` and of a query's
scale goes into the weights and their sign into q, which is exact; the scale of a key is applied to the sum, and a
negative one makes it NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ascend_deep.native.triton.portable import exact, gdc_launch_dependents

__all__ = ["logits_kernel", "negate"]


@triton.jit
def _row_bounds(ks, ke, b, s, inside, keys, ks_b, ks_s, ke_b, ke_s, HAS_KS: tl.constexpr, HAS_KE: tl.constexpr):
    """First and end key of the queries ``s``, clamped to [0, keys]."""
    first = tl.zeros_like(s)
    end = tl.zeros_like(s) + keys
    if HAS_KS:
        first = tl.load(ks + b * ks_b + s * ks_s, mask=inside, other=0)
        first = tl.minimum(tl.maximum(first, 0), keys).to(tl.int32)
    if HAS_KE:
        end = tl.load(ke + b * ke_b + s * ke_s, mask=inside, other=0)
        end = tl.minimum(tl.maximum(end, 0), keys).to(tl.int32)
    return first, end


@triton.jit
def negate(x, rows):
    """``x`` [N, D] with the sign of the rows flipped where ``rows`` [N] is true, on the bits: fp8 has no arithmetic."""
    if x.dtype.is_fp8():
        bits = x.to(tl.uint8, bitcast=True)
        x = tl.where(rows[:, None], bits ^ 0x80, bits).to(x.dtype, bitcast=True)
    elif x.dtype == tl.uint8:
        x = tl.where(rows[:, None], x ^ 0x80, x)
    else:
        x = tl.where(rows[:, None], -x, x)
    return x


@triton.jit
def _keys(kv, row, d, rows, D: tl.constexpr, BLOCK_T: tl.constexpr):
    """A tile [BLOCK_T, D] of the keys from ``row`` on; through the copy engine, unless ``kv`` is a pointer."""
    if kv.dtype.is_ptr():
        at = row + tl.arange(0, BLOCK_T)
        inside = (at < rows)[:, None] & (d < D)[None, :]
        tile = exact(tl.load(kv + at.to(tl.int64)[:, None] * D + d[None, :], mask=inside, other=0.0))
    else:
        tile = kv.load([row, 0])
    return tile


@triton.jit
def logits_kernel(
    q,
    q_sf,
    kv,
    kv_sf,
    weights,
    ks,
    ke,
    mask,
    out,
    scale,
    queries,
    keys,
    columns,
    chunk,
    q_b,
    q_s,
    q_h,
    qsf_b,
    qsf_s,
    qsf_h,
    kvsf_b,
    w_b,
    w_s,
    w_h,
    ks_b,
    ks_s,
    ke_b,
    ke_s,
    m_b,
    m_s,
    m_t,
    o_b,
    o_s,
    H: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NEGATIVE: tl.constexpr,
    HAS_QSF: tl.constexpr,
    HAS_KVSF: tl.constexpr,
    HAS_KS: tl.constexpr,
    HAS_KE: tl.constexpr,
    MASK: tl.constexpr,
    COMPRESSED: tl.constexpr,
    CLEAN: tl.constexpr,
    BITS: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: QUERIES queries of one batch row, ``chunk`` keys.

    ``kv`` is a tensor descriptor of [B * T, D], or a pointer to its rows; then FP8 may be uint8. All other tensors are
    pointers with strides in elements. MASK is 0 (none), 1 (bool) or 2 (floating). BITS: ``out`` is int32 and gets the
    bits of the scores, -1 for masked ones, and nothing sensible outside the bounds of a query (the workspace of the
    selection, see ``select``). Otherwise ``out`` is floating, excluded keys get -inf, and everything outside the bounds
    does if CLEAN. EVEN: chunks divide the keys, and there are no bounds.
    """
    if BITS:
        gdc_launch_dependents()  # the selection, which waits for the end of this kernel
    b = tl.program_id(2).to(tl.int64)
    s0 = tl.program_id(0) * QUERIES
    begin = tl.program_id(1) * chunk
    stop = tl.minimum(begin + chunk, keys)

    # The operand of all keys: rows are (query, head).
    row = tl.arange(0, QUERIES * BLOCK_H)
    row_s = s0 + row // BLOCK_H
    row_h = row % BLOCK_H
    d = tl.arange(0, BLOCK_D)
    row_in = (row_s < queries) & (row_h < H)
    w = tl.load(weights + b * w_b + row_s.to(tl.int64) * w_s + row_h * w_h, mask=row_in, other=0.0).to(tl.float32)
    queries_at = q + b * q_b + row_s.to(tl.int64) * q_s + row_h * q_h
    x = tl.load(queries_at[:, None] + d[None, :], mask=row_in[:, None] & (d < D)[None, :], other=0.0)
    if HAS_QSF:
        f = tl.load(q_sf + b * qsf_b + row_s.to(tl.int64) * qsf_s + row_h * qsf_h, mask=row_in, other=0.0)
        w = w * tl.abs(scale * f)
        x = negate(x, scale * f < 0)
    else:
        w = w * tl.abs(scale)
        if NEGATIVE:
            x = negate(x, row >= 0)
    operand = tl.trans(exact(x))

    s = s0 + tl.arange(0, QUERIES)
    inside = s < queries
    first, end = _row_bounds(ks, ke, b, s, inside, keys, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
    low = begin
    high = stop
    if HAS_KS:
        low = tl.maximum(low, tl.min(tl.where(inside, first, keys), axis=0) // BLOCK_T * BLOCK_T)
    if HAS_KE:
        high = tl.minimum(high, tl.max(tl.where(inside, end, 0), axis=0))
    to = out + b * o_b + s.to(tl.int64) * o_s
    base = tl.program_id(2) * keys
    scales = kv_sf + b * kvsf_b if HAS_KVSF else kv_sf

    for t0 in tl.range(low, high, BLOCK_T, num_stages=STAGES):
        k = _keys(kv, base + t0, d, base + keys, D, BLOCK_T)
        acc = tl.dot(k, operand, input_precision=PRECISION)
        acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
        if BLOCK_H != H:
            # A key with an infinity makes NaN of the padding's zeros.
            acc = tl.where((row_h < H)[None, :], acc, 0.0)
        score = tl.sum(tl.reshape(acc, (BLOCK_T, QUERIES, BLOCK_H)), axis=2)
        t = t0 + tl.arange(0, BLOCK_T)
        if HAS_KVSF:
            factor = tl.load(scales + t) if EVEN else tl.load(scales + t, mask=t < high, other=0.0)
            # Behind the ReLU a negative scale would give a wrong number.
            factor = tl.where(factor < 0, float("nan"), factor)
            score = score * factor[:, None]
        used = inside[None, :] & (t >= 0)[:, None] if EVEN else (t < high)[:, None] & inside[None, :]
        shown = used
        if HAS_KS:
            shown = shown & (t[:, None] >= first[None, :])
        if HAS_KE:
            shown = shown & (t[:, None] < end[None, :])
        ranged = shown
        if MASK != 0:
            m = tl.load(mask + b * m_b + s.to(tl.int64)[None, :] * m_s + t.to(tl.int64)[:, None] * m_t, mask=used)
            if MASK == 1:
                shown = shown & (m != 0)
            else:
                m = m.to(tl.float32)
                shown = shown & (m != float("-inf"))
                score = score + m
        if BITS:
            value = score.to(tl.int32, bitcast=True)
            if MASK != 0:
                value = tl.where(shown, value, -1)
        else:
            value = tl.where(shown, score, float("-inf")).to(out.dtype.element_ty)
        column = t[:, None]
        if COMPRESSED:
            column = column - first[None, :]
            used = ranged & (column < columns)
        tl.store(to[None, :] + column, value, mask=used)

    if CLEAN and (COMPRESSED or (HAS_KS or HAS_KE)):
        limit = tl.minimum(begin + chunk, columns)
        for c0 in tl.range(begin, limit, BLOCK_T):
            c = c0 + tl.arange(0, BLOCK_T)
            if COMPRESSED:
                behind = c[:, None] >= (end - first)[None, :]
            else:
                behind = ((c < low) | (c >= high))[:, None]
            empty = behind & (c < limit)[:, None] & inside[None, :]
            nothing = tl.full((BLOCK_T, QUERIES), float("-inf"), tl.float32).to(out.dtype.element_ty)
            tl.store(to[None, :] + c[:, None], nothing, mask=empty)
