"""Exact selection of the largest scores of a row: the kernel.

A program holds a segment of one row in registers as unsigned keys in the order of the scores. It finds the topk-th
largest key by narrowing an interval: each step counts the keys above a trial value, first by interpolation between the
counts at both ends, which takes about eight steps on smooth data, then by bisection of the bits, at most 32 more. The
chosen keys are written in ascending order of their index through a prefix sum, ties at the threshold by lowest index.
Nothing depends on the order in which threads run.

Rows longer than a segment are selected in rounds: the candidates of each segment, in order of index, form the row of the
next round. Every round applies the same total order (score, lowest index), so the result is that of the whole row.

Scores travel as the int32 bits of f32, -1 (a NaN that arithmetic never makes) for a key that cannot be chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["select_kernel"]


@triton.jit
def _keys(bits, RANK_LAST: tl.constexpr):
    """uint32 in the order of the scores: 0 cannot be chosen, 1 is NaN, -0.0 is 0.0."""
    u = bits.to(tl.uint32, bitcast=True)
    magnitude = u & 0x7FFFFFFF
    u = tl.where(magnitude == 0, 0, u)
    key = tl.where(u >> 31 != 0, u ^ 0xFFFFFFFF, u | 0x80000000)
    key = tl.where(magnitude > 0x7F800000, 1, key)
    barred = 0x007FFFFF if RANK_LAST else 0
    return tl.where(bits == -1, barred, key).to(tl.uint32)


@triton.jit
def _bits(key):
    """The score bits of a key; NaN for 1."""
    u = tl.where(key >> 31 != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return tl.where(key == 1, 0x7FC00000, u).to(tl.int32, bitcast=True)


@triton.jit
def _trial(low, high, above_low, above_high, topk, step):
    """A key strictly between ``low`` and ``high``: interpolated, or the middle in later steps."""
    middle = low + (high - low) // 2
    a = _bits(low).to(tl.float32, bitcast=True)
    z = _bits(high).to(tl.float32, bitcast=True)
    part = (above_low - topk).to(tl.float32) / (above_low - above_high).to(tl.float32)
    part = tl.where(step % 3 == 2, 0.5, tl.minimum(tl.maximum(part, 0.02), 0.98))
    guess = a + (z - a) * part
    near = _keys(guess.to(tl.int32, bitcast=True), False)
    # NaN and infinite ends make a useless guess; a guess outside the interval is one too.
    good = (step < 9) & (tl.abs(guess) < float("inf")) & (near > low) & (near < high)
    return tl.where(good, near, middle)


@triton.jit
def select_kernel(
    values,
    index,
    ks,
    ke,
    scores,
    chosen,
    columns,
    segment,
    topk,
    rows,
    v_b,
    v_s,
    i_b,
    i_s,
    ks_b,
    ks_s,
    ke_b,
    ke_s,
    s_b,
    s_s,
    c_b,
    c_s,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_KS: tl.constexpr,
    HAS_KE: tl.constexpr,
    RANK_LAST: tl.constexpr,
    SCORES: tl.constexpr,
    LAST: tl.constexpr,
):
    """One program: one segment of one row; writes ``topk`` columns.

    ``values`` int32 [B, S, columns]. ``index`` [B, S, columns] i32 names the columns (HAS_INDEX), else they name
    themselves. LAST: scores become f32 with -inf behind the last chosen key; otherwise bits, -1 there. The index there
    is -1 either way.
    """
    row = tl.program_id(0)
    b = (row // rows).to(tl.int64)
    s = (row % rows).to(tl.int64)
    part = tl.program_id(1)
    at = part * segment + tl.arange(0, BLOCK)
    held = (tl.arange(0, BLOCK) < segment) & (at < columns)
    known = held
    if HAS_KS:
        known = known & (at >= tl.load(ks + b * ks_b + s * ks_s))
    if HAS_KE:
        known = known & (at < tl.load(ke + b * ke_b + s * ke_s))
    bits = tl.load(values + b * v_b + s * v_s + at, mask=known, other=-1)
    key = tl.where(held, _keys(bits, RANK_LAST), 0)

    eligible = key > 0
    count = tl.sum(eligible.to(tl.int32), axis=0)
    low = tl.min(tl.where(eligible, key, 0xFFFFFFFF), axis=0)
    high = tl.max(key, axis=0) + 1
    above_low = count
    above_high = tl.zeros_like(count)
    step = tl.zeros_like(count)
    while (above_low > topk) & (high - low > 1):
        trial = _trial(low, high, above_low, above_high, topk, step)
        above = tl.sum((key >= trial).to(tl.int32), axis=0)
        enough = above >= topk
        low = tl.where(enough, trial, low)
        above_low = tl.where(enough, above, above_low)
        high = tl.where(enough, high, trial)
        above_high = tl.where(enough, above_high, above)
        step += 1

    ties = above_low > topk
    take = eligible & (key >= low)
    if ties:
        equal = key == low
        rank = tl.cumsum(equal.to(tl.int32), axis=0)
        take = (key > low) | (equal & (rank <= topk - above_high))
    place = tl.cumsum(take.to(tl.int32), axis=0) - 1

    to = part.to(tl.int64) * topk + place
    if HAS_INDEX:
        name = tl.load(index + b * i_b + s * i_s + at, mask=take, other=0)
    else:
        name = at
    tl.store(chosen + b * c_b + s * c_s + to, name.to(chosen.dtype.element_ty), mask=take)
    if SCORES:
        if LAST:
            tl.store(scores + b * s_b + s * s_s + to, _bits(key).to(tl.float32, bitcast=True), mask=take)
        else:
            tl.store(scores + b * s_b + s * s_s + to, _bits(key), mask=take)

    if count < topk:
        for c0 in tl.range(count // BLOCK_K * BLOCK_K, topk, BLOCK_K):
            c = c0 + tl.arange(0, BLOCK_K)
            behind = (c >= count) & (c < topk)
            pad = part.to(tl.int64) * topk + c
            tl.store(chosen + b * c_b + s * c_s + pad, tl.full((BLOCK_K,), -1, chosen.dtype.element_ty), mask=behind)
            if SCORES:
                if LAST:
                    tl.store(
                        scores + b * s_b + s * s_s + pad, tl.full((BLOCK_K,), float("-inf"), tl.float32), mask=behind
                    )
                else:
                    tl.store(scores + b * s_b + s * s_s + pad, tl.full((BLOCK_K,), -1, tl.int32), mask=behind)
