"""Exact selection of the largest scores of rows that are longer than a block: the kernels, in three launches.

* ``sample_kernel``: the row's rank in a sample, a little lower than topk, gives a bound that topk to some thousand keys
  of the row should reach;
* ``filter_kernel``: lists the keys that reach the bound, segment by segment, in order of index;
* ``pick_kernel``: the exact selection from the lists. Where the lists hold fewer keys than topk or more than a block
  (ties at the bound, or a sample that was not like the row), it selects from the whole row, halving over memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ascend_deep.native.triton.select import (
    add,
    bounds_of,
    key_of,
    keys_at,
    pad,
    places,
    score_of,
    select_block,
    write,
)

__all__ = ["filter_kernel", "near", "pick_kernel", "sample_kernel", "sampled_bound", "select_whole"]


@gluon.jit
def _closer(trial, above, topk, low, above_low, high, above_high):
    """The interval [low, high) and its counts after a trial value that ``above`` keys reach."""
    enough = above >= topk
    raises = enough & (trial > low)
    lowers = (above < topk) & (trial < high)
    return (
        gl.where(raises, trial, low),
        gl.where(raises, above, above_low),
        gl.where(lowers, trial, high),
        gl.where(lowers, above, above_high),
    )


@gluon.jit
def _between(guess, low, high):
    """The key of a score, or the nearest one inside the interval (low, high)."""
    trial = key_of(guess.to(gl.int32, bitcast=True))
    return gl.minimum(gl.maximum(trial, low + 1), high - 1)


@gluon.jit
def near(key, topk, slack, count, low, high):
    """(bound, above, reach): a bound that ``reach`` >= topk of the keys in registers reach, topk + slack at most if there
    is such a one; ``above`` < topk of them are greater, where reach is more than that.

    ``count`` keys are eligible, all in [low, high). A step counts the keys above two values at once, in 16 bits each:
    where the bound would be if keys thinned out exponentially, and if they were even. Where scores get rarer towards
    the top, as they do, it is between the two. Every fourth step, and every one after the twelfth, halves the interval
    whatever the scores are. This takes half as many steps as ``select.narrow`` and more work in each.
    """
    above_low = count
    above_high = count * 0
    step = count * 0
    while (above_low > topk + slack) & (high - low > 1):
        many = above_low.to(gl.float32)
        few = above_high.to(gl.float32)
        want = (topk + slack // 2) * 1.0
        thin = gl.log2(many / want) / gl.log2(many / gl.maximum(few, 0.5))
        even = (many - want) / (many - few)
        halve = (step % 4 == 3) | (step >= 12)
        a = score_of(low)
        width = score_of(high) - a
        middle = low + (high - low) // 2
        t0 = gl.where(halve, middle, _between(a + width * thin, low, high))
        t1 = _between(a + width * gl.where(halve, 0.5 * (thin + even), even), low, high)
        counts = gl.sum(gl.where(key >= t0, 1, 0) + gl.where(key >= t1, 65536, 0), axis=0)
        low, above_low, high, above_high = _closer(t0, counts & 0xFFFF, topk, low, above_low, high, above_high)
        low, above_low, high, above_high = _closer(t1, counts >> 16, topk, low, above_low, high, above_high)
        step += 1
    return low, above_high, above_low


@gluon.jit
def sampled_bound(
    row,
    first,
    end,
    columns,
    topk,
    SAMPLE: gl.constexpr,
    CAPACITY: gl.constexpr,
    PAIRS: gl.constexpr,
    BOUNDED: gl.constexpr,
    MASKED: gl.constexpr,
    BARRED: gl.constexpr,
):
    """A key that topk and some more keys of a row should reach, estimated from SAMPLE of them.

    1, which every key reaches, where the row has no more than CAPACITY keys, or the sample no more than it needs.
    """
    # Where columns outside the bounds can be chosen too, the sample is one of the whole row.
    begin = 0 if BARRED > 0 else first
    stop = columns if BARRED > 0 else end
    length = gl.maximum(stop - begin, 0)
    bound = (length * 0 + 1).to(gl.uint32)
    if length > CAPACITY:
        # Pairs of neighbours: half the memory transactions, and still spread over the row.
        n = gl.arange(0, SAMPLE, PAIRS)
        at = begin + n // 2 * (2 * gl.maximum(length // SAMPLE, 1)) + n % 2
        key = keys_at(row, at, at < stop, first, end, BOUNDED, MASKED, BARRED, False)
        expected = topk * gl.minimum(length, SAMPLE).to(gl.float32) / length.to(gl.float32)
        rank = (expected + 4.0 * gl.sqrt(expected) + 8.0).to(gl.int32)
        count = gl.sum((key > 0).to(gl.int32), axis=0)
        low = gl.min(gl.where(key > 0, key, 0xFFFFFFFF).to(gl.uint32), axis=0)
        if count > rank:
            bound, above, reach = near(key, rank, rank // 16, count, low, gl.max(key, axis=0) + 1)
    return bound


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
    PAIRS: gl.constexpr,
    HAS_KS: gl.constexpr,
    HAS_KE: gl.constexpr,
    MASKED: gl.constexpr,
    BARRED: gl.constexpr,
):
    """One program: one row; ``bounds`` int32 [B * S] gets the key that the filter lets through."""
    row = gl.program_id(0)
    b = (row // rows).to(gl.int64)
    s = (row % rows).to(gl.int64)
    first, end = bounds_of(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
    values += b * v_b + s * v_s
    bounded: gl.constexpr = HAS_KS or HAS_KE
    bound = sampled_bound(values, first, end, columns, topk, SAMPLE, CAPACITY, PAIRS, bounded, MASKED, BARRED)
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
    first, end = bounds_of(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
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
        key = keys_at(values + b * v_b + s * v_s, at, at < stop, first, end, HAS_KS or HAS_KE, MASKED, BARRED, EVEN)
        take = (key >= bound).to(gl.int32)
        place = gl.associative_scan(take, 0, add)
        # Few keys are kept: changing to one key per lane would take longer than writes here and there.
        offset = (at - part * segment).to(gl.int16)
        gl.store(to + total + place - 1, offset, mask=take != 0)
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
    first, end = bounds_of(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
    bound = gl.load(bounds + row).to(gl.uint32, bitcast=True)
    values += b * v_b + s * v_s
    chosen += b * c_b + s * c_s
    scores += b * s_b + s * s_s
    # Entry j of all lists together is, in its list, entry j less those of the lists before.
    j = gl.arange(0, BLOCK, SPREAD)
    name = j
    total = row * 0
    for group in range(0, segments, 8):
        # Loads side by side: one after another they would take longer than all the rest.
        for n in gl.static_range(8):
            count = gl.load(counts + row * segments + group + n, mask=group + n < segments, other=0)
            total += count
            name += gl.where((j >= total) & (group + n < segments), segment - count, 0)
    # Lists of everything (bound 1) may be shorter than topk.
    if (total <= BLOCK) & ((total >= topk) | (bound == 1)):
        held = j < total
        offset = gl.load(lists + row.to(gl.int64) * l_r + name, mask=held, other=0).to(gl.int32)
        name = name // segment * segment + (offset & 0xFFFF)
        key = keys_at(values, name, held, first, end, HAS_KS or HAS_KE, MASKED, BARRED, False)
        select_block(gl.convert_layout(key, HELD), name, total, bound, chosen, scores, topk, SPREAD, SCORES)
    else:
        select_whole(
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
def select_whole(
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
            key = keys_at(values, c0 + at, c0 + at < columns, first, end, BOUNDED, MASKED, BARRED, False)
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
        key = keys_at(values, at, at < columns, first, end, BOUNDED, MASKED, BARRED, False)
        place = places(key, low, above_high + equal_before, ties, topk)
        to = gl.where(place >= 0, place + written, -1)
        write(key, c0 + gl.arange(0, BLOCK, SPREAD), to, chosen, scores, SPREAD, SCORES)
        written += gl.max(place, axis=0) + 1
        equal_before += gl.sum((key == low).to(gl.int32), axis=0)
    pad(chosen, scores, count, topk, SPREAD, SCORES)
