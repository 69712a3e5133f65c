"""Exact selection of the largest scores of long rows in one launch, one program for a row: the kernel.

The three steps of ``select_long`` in one: a bound from a sample, a walk over the row that lists what reaches the bound,
and the exact selection from the list. A program has a multiprocessor for itself, so this is for as many rows as there
are multiprocessors, where the launches of ``select_long`` and the way between them take longer than the work.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ascend_deep.native.triton.select import (
    add,
    bounds_of,
    key_of,
    narrow,
    pad,
    places,
    score_of,
    write,
)
from ascend_deep.native.triton.select_long import near, sampled_bound, select_whole

__all__ = ["row_kernel"]


@gluon.jit
def row_kernel(
    values,
    ks,
    ke,
    names,
    kept,
    scores,
    chosen,
    columns,
    topk,
    rows,
    v_b,
    v_s,
    ks_b,
    ks_s,
    ke_b,
    ke_s,
    s_b,
    s_s,
    c_b,
    c_s,
    SAMPLE: gl.constexpr,
    BLOCK: gl.constexpr,
    PICK: gl.constexpr,
    PAIRS: gl.constexpr,
    HELD: gl.constexpr,
    PICKED: gl.constexpr,
    SPREAD: gl.constexpr,
    HAS_KS: gl.constexpr,
    HAS_KE: gl.constexpr,
    MASKED: gl.constexpr,
    BARRED: gl.constexpr,
    SCORES: gl.constexpr,
    TWO: gl.constexpr,
):
    """One program: one row of ``values`` int32 [B, S, columns]; writes ``topk`` columns in order of index.

    ``names`` and ``kept``, int32 [B * S, PICK], hold the columns that reach the bound, and their scores. TWO: the exact
    selection tries two values a step.
    """
    row = gl.program_id(0)
    b = (row // rows).to(gl.int64)
    s = (row % rows).to(gl.int64)
    first, end = bounds_of(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
    values += b * v_b + s * v_s
    chosen += b * c_b + s * c_s
    scores += b * s_b + s * s_s
    names += row.to(gl.int64) * PICK
    kept += row.to(gl.int64) * PICK
    bounded: gl.constexpr = HAS_KS or HAS_KE
    begin = row * 0
    stop = columns
    if bounded and BARRED == 0:
        begin = first // BLOCK * BLOCK
        stop = end

    # What is outside of [first, end), or masked, is -inf if it can be chosen and cannot be chosen if not.
    at = begin + gl.arange(0, BLOCK, HELD)
    following = gl.load(values + at, mask=at < stop, other=-1)
    bound = sampled_bound(values, first, end, columns, topk, SAMPLE, PICK, PAIRS, bounded, MASKED, BARRED)
    everything = bound == 1
    # No number lies between NaN and -inf.
    least = score_of(gl.maximum(bound, 0x007FFFFF))
    total = row * 0
    for c0 in range(begin, stop, BLOCK):
        bits = following
        at = c0 + gl.arange(0, BLOCK, HELD)
        following = gl.load(values + BLOCK + at, mask=at + BLOCK < stop, other=-1)
        there = at < stop
        if bounded:
            inside = (at >= first) & (at < end)
            if BARRED > 0:
                bits = gl.where(inside, bits, -8388608)
            else:
                there = there & inside
        if MASKED:
            if BARRED > 0:
                bits = gl.where(bits == -1, -8388608, bits)
            else:
                there = there & (bits != -1)
        # As numbers: fewer operations than by keys, and the same but for NaN, which reaches the bound of everything.
        take = (there & ((bits.to(gl.float32, bitcast=True) >= least) | everything)).to(gl.int32)
        place = gl.associative_scan(take, 0, add)
        to = total + place - 1
        fits = (take != 0) & (to < PICK)
        gl.store(names + to, at, mask=fits)
        gl.store(kept + to, bits, mask=fits)
        total += gl.max(place, axis=0)

    # A list of everything may be shorter than topk.
    if (total <= PICK) & ((total >= topk) | everything):
        gl.thread_barrier()
        j = gl.arange(0, PICK, PICKED)
        held = j < total
        key = gl.where(held, key_of(gl.load(kept + j, mask=held, other=0)), 0).to(gl.uint32)
        n = gl.arange(0, PICK, SPREAD)
        name = gl.load(names + n, mask=n < total, other=0)
        high = gl.max(key, axis=0) + 1
        if TWO:
            low, above, reach = near(key, topk, 0, total, bound, high)
            ties = reach > topk
        else:
            low, above, ties = narrow(key, topk, total, bound, high)
        write(key, name, places(key, low, above, ties, topk), chosen, scores, SPREAD, SCORES)
        pad(chosen, scores, total, topk, SPREAD, SCORES)
    else:
        select_whole(
            values, first, end, chosen, scores, columns, topk, PICK, PICKED, SPREAD, bounded, MASKED, BARRED, SCORES
        )
