"""Exact selection of the largest scores of a row: the kernels.

Scores are compared as unsigned *keys* in their order: -0.0 is 0.0, NaN is 1 (below -inf), 0 cannot be chosen. The
topk-th largest key of a block of keys in registers is found by narrowing an interval: each step counts the keys above a
trial value, first by interpolation between the counts at both ends, which takes about eight steps on smooth data, then
by halving, at most 32 more. The chosen keys are written in ascending order of their index through a prefix sum, ties at
the threshold by lowest index. Nothing depends on the order in which threads run.

The layouts are explicit (Gluon): a thread holds neighbouring keys, so that the prefix sum is mostly inside threads, and
the chosen keys change to one key per lane before they are written, so that writes of a warp go side by side.

Rows of more than a block: ``select_long``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "add",
    "bounds_of",
    "key_of",
    "keys_at",
    "narrow",
    "pad",
    "places",
    "score_of",
    "select_block",
    "select_kernel",
    "write",
]


@gluon.jit
def key_of(bits):
    """uint32 keys of f32 score bits (int32)."""
    u = gl.where(bits << 1 == 0, 0, bits)
    key = (u ^ ((u >> 31) | -2147483648)).to(gl.uint32, bitcast=True)
    return gl.where((bits & 0x7FFFFFFF) > 0x7F800000, 1, key)


@gluon.jit
def score_of(key):
    """The f32 score of a key, NaN for 1; keys in the gap around NaN and the numbers only come from trial values."""
    k = key.to(gl.int32, bitcast=True)
    bits = k ^ (((k ^ -1) >> 31) | -2147483648)
    return gl.where(key == 1, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def bounds_of(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS: gl.constexpr, HAS_KE: gl.constexpr):
    """First and end column that a row may choose, clamped to [0, columns]."""
    first = 0
    end = columns
    if HAS_KS:
        first = gl.minimum(gl.maximum(gl.load(ks + b * ks_b + s * ks_s), 0), columns).to(gl.int32)
    if HAS_KE:
        end = gl.minimum(gl.maximum(gl.load(ke + b * ke_b + s * ke_s), 0), columns).to(gl.int32)
    return first, end


@gluon.jit
def keys_at(
    row, at, held, first, end, BOUNDED: gl.constexpr, MASKED: gl.constexpr, BARRED: gl.constexpr, EVEN: gl.constexpr
):
    """Keys of the f32 bits at the columns ``at``: 0 where not ``held``, BARRED outside [first, end).

    MASKED: bits of -1, a NaN that arithmetic never makes, are BARRED too. EVEN: every column is held.
    """
    known = held
    if BOUNDED:
        known = known & (at >= first) & (at < end)
    bits = gl.load(row + at) if EVEN and not BOUNDED else gl.load(row + at, mask=known, other=0)
    key = key_of(bits)
    if MASKED:
        key = gl.where(bits == -1, BARRED, key).to(gl.uint32)
    if BOUNDED:
        key = gl.where(known, key, BARRED).to(gl.uint32)
    return key if EVEN else gl.where(held, key, 0).to(gl.uint32)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def write(key, name, place, chosen, scores, SPREAD: gl.constexpr, SCORES: gl.constexpr):
    """Name and score of the keys with a ``place`` of 0 or more; ``name`` is in the layout SPREAD already."""
    to = gl.convert_layout(place, SPREAD)
    gl.store(chosen + to, name.to(chosen.dtype.element_ty), mask=to >= 0)
    if SCORES:
        gl.store(scores + to, score_of(gl.convert_layout(key, SPREAD)), mask=to >= 0)


@gluon.jit
def narrow(key, topk, count, low, high, TAIL: gl.constexpr):
    """(bound, above, ties) of the keys in registers.

    Keys above ``bound`` are chosen, and so are the first ``topk - above`` of those equal to it if there are ``ties``,
    all of them otherwise. ``count`` keys are eligible, all in [low, high). TAIL: they are the largest of more, so they
    thin out from ``low`` on, and the first trial value is just above the place where they would be topk if they did so
    exponentially; that saves two of nine steps.
    """
    start = gl.minimum(1.5 * gl.log2(count.to(gl.float32) / topk) / gl.log2(count.to(gl.float32) * 2.0), 0.5)
    above_low = count
    above_high = count * 0
    step = count * 0
    while (above_low > topk) & (high - low > 1):
        part = (above_low - topk).to(gl.float32) / (above_low - above_high).to(gl.float32)
        part = gl.where(step % 5 == 4, 0.5, gl.minimum(gl.maximum(part, 0.02), 0.98))
        if TAIL:
            part = gl.where(step == 0, start, part)
        a = score_of(low)
        guess = a + (score_of(high) - a) * part
        middle = low + (high - low) // 2
        # Infinite ends make a useless guess; the steps after the ninth do without.
        trial = gl.where(step < 9, key_of(guess.to(gl.int32, bitcast=True)), middle)
        trial = gl.minimum(gl.maximum(trial, low + 1), high - 1)
        above = gl.sum((key >= trial).to(gl.int32), axis=0)
        enough = above >= topk
        low = gl.where(enough, trial, low)
        above_low = gl.where(enough, above, above_low)
        high = gl.where(enough, high, trial)
        above_high = gl.where(enough, above_high, above)
        step += 1
    return low, above_high, above_low > topk


@gluon.jit
def places(key, bound, above, ties, topk):
    """The place of each chosen key of a block in the result, -1 for the others."""
    take = (key >= bound).to(gl.int32)
    if ties:
        equal = (key == bound).to(gl.int32)
        rank = gl.associative_scan(equal, 0, add)
        take = gl.where(rank <= topk - above, take, (key > bound).to(gl.int32))
    return gl.where(take != 0, gl.associative_scan(take, 0, add) - 1, -1)


@gluon.jit
def pad(chosen, scores, count, topk, SPREAD: gl.constexpr, SCORES: gl.constexpr):
    """-1 and -inf behind the ``count`` chosen keys of a row."""
    if count < topk:
        for c0 in range(count // 1024 * 1024, topk, 1024):
            c = c0 + gl.arange(0, 1024, SPREAD)
            behind = (c >= count) & (c < topk)
            gl.store(chosen + c, gl.full((1024,), -1, chosen.dtype.element_ty, SPREAD), mask=behind)
            if SCORES:
                gl.store(scores + c, gl.full((1024,), float("-inf"), gl.float32, SPREAD), mask=behind)


@gluon.jit
def select_block(
    key, name, count, low, chosen, scores, topk, SPREAD: gl.constexpr, SCORES: gl.constexpr, TAIL: gl.constexpr
):
    """Selection from the ``count`` keys of ``low`` and more of a block in registers, written out; others are 0."""
    high = gl.max(key, axis=0) + 1
    bound, above, ties = narrow(key, topk, count, low, high, TAIL)
    write(key, name, places(key, bound, above, ties, topk), chosen, scores, SPREAD, SCORES)
    pad(chosen, scores, count, topk, SPREAD, SCORES)


@gluon.jit
def select_kernel(
    values,
    ks,
    ke,
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
    BLOCK: gl.constexpr,
    HELD: gl.constexpr,
    SPREAD: gl.constexpr,
    HAS_KS: gl.constexpr,
    HAS_KE: gl.constexpr,
    MASKED: gl.constexpr,
    BARRED: gl.constexpr,
    SCORES: gl.constexpr,
    EVEN: gl.constexpr,
):
    """One program: one row of ``values`` int32 [B, S, columns], columns <= BLOCK; writes ``topk`` columns."""
    b = (gl.program_id(0) // rows).to(gl.int64)
    s = (gl.program_id(0) % rows).to(gl.int64)
    first, end = bounds_of(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
    at = gl.arange(0, BLOCK, HELD)
    key = keys_at(values + b * v_b + s * v_s, at, at < columns, first, end, HAS_KS or HAS_KE, MASKED, BARRED, EVEN)
    low = gl.min(key, axis=0)
    count = low.to(gl.int32) * 0 + BLOCK
    if low == 0:
        count = gl.sum((key > 0).to(gl.int32), axis=0)
        low = gl.min(gl.where(key > 0, key, 0xFFFFFFFF).to(gl.uint32), axis=0)
    name = gl.arange(0, BLOCK, SPREAD)
    chosen += b * c_b + s * c_s
    scores += b * s_b + s * s_s
    select_block(key, name, count, low, chosen, scores, topk, SPREAD, SCORES, False)
