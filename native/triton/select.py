"""Exact selection of the largest scores of a row: the kernels.

Scores are compared as unsigned *keys* in their order: -0.0 is 0.0, NaN is 1 (below -inf), 0 cannot be chosen. The
topk-th largest key of a block of keys in registers is found by narrowing an interval: each step counts the keys above a
trial value, first by interpolation between the counts at both ends, which takes about eight steps on smooth data, then
by halving, at most 32 more. The chosen keys are written in ascending order of their index through a prefix sum, ties at
the threshold by lowest index. Nothing depends on the order in which threads run.

The layouts are explicit (Gluon): a thread holds neighbouring keys, so that the prefix sum is mostly inside threads, and
the chosen keys change to one key per lane before they are written, so that writes of a warp go side by side.

Rows of up to one block take one program (``select_kernel``). Longer ones take three launches:

* ``sample_kernel``: the row's rank in a sample, a little lower than topk, gives a bound that topk to some thousand keys
  of the row should reach;
* ``filter_kernel``: lists the keys that reach the bound, segment by segment, in order of index;
* ``pick_kernel``: the exact selection from the lists. Where the lists hold fewer keys than topk or more than a block
  (ties at the bound, or a sample that was not like the row), it selects from the whole row, halving over memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["filter_kernel", "pick_kernel", "sample_kernel", "select_kernel"]


@gluon.jit
def _key(bits):
    """uint32 keys of f32 score bits (int32)."""
    u = gl.where(bits << 1 == 0, 0, bits)
    key = (u ^ ((u >> 31) | -2147483648)).to(gl.uint32, bitcast=True)
    return gl.where((bits & 0x7FFFFFFF) > 0x7F800000, 1, key)


@gluon.jit
def _score(key):
    """The f32 score of a key, NaN for 1; keys in the gap around NaN and the numbers only come from trial values."""
    k = key.to(gl.int32, bitcast=True)
    bits = k ^ (((k ^ -1) >> 31) | -2147483648)
    return gl.where(key == 1, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def _bounds(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS: gl.constexpr, HAS_KE: gl.constexpr):
    """First and end column that a row may choose, clamped to [0, columns]."""
    first = 0
    end = columns
    if HAS_KS:
        first = gl.minimum(gl.maximum(gl.load(ks + b * ks_b + s * ks_s), 0), columns).to(gl.int32)
    if HAS_KE:
        end = gl.minimum(gl.maximum(gl.load(ke + b * ke_b + s * ke_s), 0), columns).to(gl.int32)
    return first, end


@gluon.jit
def _load(
    row, at, held, first, end, BOUNDED: gl.constexpr, MASKED: gl.constexpr, BARRED: gl.constexpr, EVEN: gl.constexpr
):
    """Keys of the f32 bits at the columns ``at``: 0 where not ``held``, BARRED outside [first, end).

    MASKED: bits of -1, a NaN that arithmetic never makes, are BARRED too. EVEN: every column is held.
    """
    known = held
    if BOUNDED:
        known = known & (at >= first) & (at < end)
    bits = gl.load(row + at) if EVEN and not BOUNDED else gl.load(row + at, mask=known, other=0)
    key = _key(bits)
    if MASKED:
        key = gl.where(bits == -1, BARRED, key).to(gl.uint32)
    if BOUNDED:
        key = gl.where(known, key, BARRED).to(gl.uint32)
    return key if EVEN else gl.where(held, key, 0).to(gl.uint32)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _write(key, name, place, chosen, scores, SPREAD: gl.constexpr, SCORES: gl.constexpr):
    """Name and score of the keys with a ``place`` of 0 or more; ``name`` is in the layout SPREAD already."""
    to = gl.convert_layout(place, SPREAD)
    gl.store(chosen + to, name.to(chosen.dtype.element_ty), mask=to >= 0)
    if SCORES:
        gl.store(scores + to, _score(gl.convert_layout(key, SPREAD)), mask=to >= 0)


@gluon.jit
def _narrow(key, topk, slack, count, low, high):
    """(bound, above, ties) of the keys in registers.

    Keys above ``bound`` are chosen, and so are the first ``topk - above`` of those equal to it if there are ``ties``,
    all of them otherwise. ``count`` keys are eligible, all in [low, high). With ``slack``, any bound will do that
    topk to topk + slack keys reach, if there is one.
    """
    above_low = count
    above_high = count * 0
    step = count * 0
    while (above_low > topk + slack) & (high - low > 1):
        part = (above_low - topk).to(gl.float32) / (above_low - above_high).to(gl.float32)
        part = gl.where(step % 3 == 2, 0.5, gl.minimum(gl.maximum(part, 0.02), 0.98))
        a = _score(low)
        guess = a + (_score(high) - a) * part
        middle = low + (high - low) // 2
        # Infinite ends make a useless guess; the steps after the ninth do without.
        trial = gl.where(step < 9, _key(guess.to(gl.int32, bitcast=True)), middle)
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
def _places(key, bound, above, ties, topk):
    """The place of each chosen key of a block in the result, -1 for the others."""
    take = (key >= bound).to(gl.int32)
    if ties:
        equal = (key == bound).to(gl.int32)
        rank = gl.associative_scan(equal, 0, _add)
        take = gl.where(rank <= topk - above, take, (key > bound).to(gl.int32))
    return gl.where(take != 0, gl.associative_scan(take, 0, _add) - 1, -1)


@gluon.jit
def _pad(chosen, scores, count, topk, SPREAD: gl.constexpr, SCORES: gl.constexpr):
    """-1 and -inf behind the ``count`` chosen keys of a row."""
    if count < topk:
        for c0 in range(count // 1024 * 1024, topk, 1024):
            c = c0 + gl.arange(0, 1024, SPREAD)
            behind = (c >= count) & (c < topk)
            gl.store(chosen + c, gl.full((1024,), -1, chosen.dtype.element_ty, SPREAD), mask=behind)
            if SCORES:
                gl.store(scores + c, gl.full((1024,), float("-inf"), gl.float32, SPREAD), mask=behind)


@gluon.jit
def _select_block(key, name, chosen, scores, topk, BLOCK: gl.constexpr, SPREAD: gl.constexpr, SCORES: gl.constexpr):
    """Selection from one block in registers, written out."""
    low = gl.min(key, axis=0)
    high = gl.max(key, axis=0) + 1
    count = low.to(gl.int32) * 0 + BLOCK
    if low == 0:
        count = gl.sum((key > 0).to(gl.int32), axis=0)
        low = gl.min(gl.where(key > 0, key, 0xFFFFFFFF).to(gl.uint32), axis=0)
    bound, above, ties = _narrow(key, topk, 0, count, low, high)
    _write(key, name, _places(key, bound, above, ties, topk), chosen, scores, SPREAD, SCORES)
    _pad(chosen, scores, count, topk, SPREAD, SCORES)


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
    first, end = _bounds(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
    at = gl.arange(0, BLOCK, HELD)
    key = _load(values + b * v_b + s * v_s, at, at < columns, first, end, HAS_KS or HAS_KE, MASKED, BARRED, EVEN)
    name = gl.arange(0, BLOCK, SPREAD)
    _select_block(key, name, chosen + b * c_b + s * c_s, scores + b * s_b + s * s_s, topk, BLOCK, SPREAD, SCORES)


@gluon.jit
def sample_kernel(
    values,
    ks,
    ke,
    bounds,
    columns,
    topk,
    rows,
    v_b,
    v_s,
    ks_b,
    ks_s,
    ke_b,
    ke_s,
    SAMPLE: gl.constexpr,
    CAPACITY: gl.constexpr,
    SPREAD: gl.constexpr,
    HAS_KS: gl.constexpr,
    HAS_KE: gl.constexpr,
    MASKED: gl.constexpr,
    BARRED: gl.constexpr,
):
    """One program: one row; ``bounds`` int32 [B * S] gets the key that the filter lets through."""
    row = gl.program_id(0)
    b = (row // rows).to(gl.int64)
    s = (row % rows).to(gl.int64)
    first, end = _bounds(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
    # Where columns outside the bounds can be chosen too, the sample is one of the whole row.
    begin = 0 if BARRED > 0 else first
    stop = columns if BARRED > 0 else end
    length = gl.maximum(stop - begin, 0)
    bound = (row * 0 + 1).to(gl.uint32)
    if length > CAPACITY:
        at = begin + gl.arange(0, SAMPLE, SPREAD) * (length // SAMPLE)
        key = _load(values + b * v_b + s * v_s, at, at < stop, first, end, HAS_KS or HAS_KE, MASKED, BARRED, False)
        expected = topk * (SAMPLE * 1.0) / length.to(gl.float32)
        rank = (expected + 4.0 * gl.sqrt(expected) + 8.0).to(gl.int32)
        count = gl.sum((key > 0).to(gl.int32), axis=0)
        low = gl.min(gl.where(key > 0, key, 0xFFFFFFFF).to(gl.uint32), axis=0)
        if count > rank:
            bound, _, _ = _narrow(key, rank, rank // 16, count, low, gl.max(key, axis=0) + 1)
    gl.store(bounds + row, bound.to(gl.int32, bitcast=True))


@gluon.jit
def filter_kernel(
    values,
    ks,
    ke,
    bounds,
    lists,
    counts,
    columns,
    rows,
    segment,
    v_b,
    v_s,
    ks_b,
    ks_s,
    ke_b,
    ke_s,
    l_r,
    BLOCK: gl.constexpr,
    HELD: gl.constexpr,
    SPREAD: gl.constexpr,
    HAS_KS: gl.constexpr,
    HAS_KE: gl.constexpr,
    MASKED: gl.constexpr,
    BARRED: gl.constexpr,
    EVEN: gl.constexpr,
):
    """One program: one segment of one row. ``lists`` int16 [rows, columns] gets offsets inside the segment, ``counts``
    int32 [rows, segments] their number."""
    row = gl.program_id(0)
    part = gl.program_id(1)
    b = (row // rows).to(gl.int64)
    s = (row % rows).to(gl.int64)
    first, end = _bounds(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
    bound = gl.load(bounds + row).to(gl.uint32, bitcast=True)
    begin = part * segment
    stop = gl.minimum(begin + segment, columns)
    if (HAS_KS or HAS_KE) and BARRED == 0:
        begin = gl.maximum(begin, first // BLOCK * BLOCK)
        stop = gl.minimum(stop, end)
    total = part * 0
    to = lists + row.to(gl.int64) * l_r + part * segment
    for c0 in range(begin, stop, BLOCK):
        at = c0 + gl.arange(0, BLOCK, HELD)
        key = _load(values + b * v_b + s * v_s, at, at < stop, first, end, HAS_KS or HAS_KE, MASKED, BARRED, EVEN)
        take = (key >= bound).to(gl.int32)
        place = gl.associative_scan(take, 0, _add)
        offset = (c0 - part * segment + gl.arange(0, BLOCK, SPREAD)).to(gl.int16)
        spread = gl.convert_layout(gl.where(take != 0, place + total, 0), SPREAD)
        gl.store(to + spread - 1, offset, mask=spread > 0)
        total += gl.max(place, axis=0)
    gl.store(counts + row * gl.num_programs(1) + part, total)


@gluon.jit
def pick_kernel(
    values,
    ks,
    ke,
    bounds,
    lists,
    counts,
    scores,
    chosen,
    columns,
    topk,
    rows,
    segment,
    segments,
    v_b,
    v_s,
    ks_b,
    ks_s,
    ke_b,
    ke_s,
    l_r,
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
):
    """One program: one row, from its lists where they do, else from the whole row."""
    row = gl.program_id(0)
    b = (row // rows).to(gl.int64)
    s = (row % rows).to(gl.int64)
    first, end = _bounds(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
    values += b * v_b + s * v_s
    chosen += b * c_b + s * c_s
    scores += b * s_b + s * s_s
    # Entry j of all lists together is entry j - total of the list of a segment.
    j = gl.arange(0, BLOCK, SPREAD)
    name = j * 0
    total = row * 0
    for group in range(0, segments, 8):
        # Loads side by side: one after another they would take longer than all the rest.
        for n in gl.static_range(8):
            part = group + n
            count = gl.load(counts + row * segments + part, mask=part < segments, other=0)
            name = gl.where((j >= total) & (j < total + count), part * segment + j - total, name)
            total += count
    # Lists of everything (bound 1) may be shorter than topk.
    if (total <= BLOCK) & ((total >= topk) | (gl.load(bounds + row) == 1)):
        held = j < total
        offset = gl.load(lists + row.to(gl.int64) * l_r + name, mask=held, other=0).to(gl.int32)
        name = name // segment * segment + (offset & 0xFFFF)
        key = _load(values, name, held, first, end, HAS_KS or HAS_KE, MASKED, BARRED, False)
        _select_block(gl.convert_layout(key, HELD), name, chosen, scores, topk, BLOCK, SPREAD, SCORES)
    else:
        _select_long(
            values,
            first,
            end,
            chosen,
            scores,
            columns,
            topk,
            BLOCK,
            HELD,
            SPREAD,
            HAS_KS or HAS_KE,
            MASKED,
            BARRED,
            SCORES,
        )


@gluon.jit
def _select_long(
    values,
    first,
    end,
    chosen,
    scores,
    columns,
    topk,
    BLOCK: gl.constexpr,
    HELD: gl.constexpr,
    SPREAD: gl.constexpr,
    BOUNDED: gl.constexpr,
    MASKED: gl.constexpr,
    BARRED: gl.constexpr,
    SCORES: gl.constexpr,
):
    """Selection from a row in memory: up to 33 passes that count, one that writes."""
    zero = gl.program_id(0) * 0
    # Separate values: two names of one would be one variable of the loop.
    low = (zero + 1).to(gl.uint32)
    high = (zero - 1).to(gl.uint32, bitcast=True)
    above_low = zero + 0
    above_high = zero + 0
    count = zero - 1
    while (count < 0) | ((above_low > topk) & (high - low > 1)):
        # The first pass counts what can be chosen.
        trial = gl.where(count < 0, low, low + (high - low) // 2)
        at = gl.arange(0, BLOCK, HELD)
        above = at * 0
        for c0 in range(0, columns, BLOCK):
            key = _load(values, c0 + at, c0 + at < columns, first, end, BOUNDED, MASKED, BARRED, False)
            above += (key >= trial).to(gl.int32)
        total = gl.sum(above, axis=0)
        enough = (count < 0) | (total >= topk)
        count = gl.where(count < 0, total, count)
        low = gl.where(enough, trial, low)
        above_low = gl.where(enough, total, above_low)
        high = gl.where(enough, high, trial)
        above_high = gl.where(enough, above_high, total)
    ties = above_low > topk
    written = zero + 0
    equal_before = zero + 0
    for c0 in range(0, columns, BLOCK):
        at = c0 + gl.arange(0, BLOCK, HELD)
        key = _load(values, at, at < columns, first, end, BOUNDED, MASKED, BARRED, False)
        place = _places(key, low, above_high + equal_before, ties, topk)
        to = gl.where(place >= 0, place + written, -1)
        _write(key, c0 + gl.arange(0, BLOCK, SPREAD), to, chosen, scores, SPREAD, SCORES)
        written += gl.max(place, axis=0) + 1
        equal_before += gl.sum((key == low).to(gl.int32), axis=0)
    _pad(chosen, scores, count, topk, SPREAD, SCORES)
