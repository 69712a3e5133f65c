"""Exact selection of the largest scores of rows that are longer than a block: the kernels, in three launches.

* ``sample_kernel``: the row's rank in a sample, a little lower than topk, gives a bound that topk to some thousand keys
  of the row should reach;
* ``mark_kernel``: a bit for every key, whether it reaches the bound;
* ``pick_kernel``: a list of the marked keys, and the exact selection from it. Where fewer keys than topk are marked, or
  more than a block (ties at the bound, or a sample that was not like the row), it selects from the whole row, halving
  over memory.

Each is launched while the one before it runs, and waits for the end of it (``gdc_wait``) before it reads what that one
has written. The scores are older: a kernel lets the next one start (``gdc_launch_dependents``) after its own wait only,
so the marks may be prepared before the bound is there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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

__all__ = ["mark_kernel", "pick_kernel", "sample_kernel"]


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
def _deviations(n):
    """Standard deviations above the mean that one in n > 1 normal numbers is, about; at least 0.1."""
    twice = 1.3863 * gl.log2(n)
    return gl.sqrt(gl.maximum(twice - 0.6931 * gl.log2(gl.maximum(twice, 1.0)) - 1.84, 0.01))


@gluon.jit
def _near(key, topk, slack, count, low, high):
    """A bound that at least topk of the keys in registers reach, and no more than topk + slack if there is such a one.

    ``count`` keys are eligible, all in [low, high). A step counts the keys above two values at once, in 16 bits each:
    first around the place where the bound would be if the scores were normal and ``low`` and ``high`` their ends, then
    where it would be if keys thinned out exponentially, and if they were even. Where scores get rarer towards
    the top, as they do, it is between the two. Every fourth step, and every one after the twelfth, halves the interval
    whatever the scores are. This takes half as many steps as ``select.narrow`` and more work in each.
    """
    want = (topk + slack // 2) * 1.0
    bell = 0.5 + 0.5 * _deviations(count.to(gl.float32) / want) / _deviations(count.to(gl.float32))
    above_low = count
    above_high = count * 0
    step = count * 0
    while (above_low > topk + slack) & (high - low > 1):
        many = above_low.to(gl.float32)
        few = above_high.to(gl.float32)
        thin = gl.log2(many / want) / gl.log2(many / gl.maximum(few, 0.5))
        even = (many - want) / (many - few)
        halve = (step % 4 == 3) | (step >= 12)
        a = score_of(low)
        width = score_of(high) - a
        middle = low + (high - low) // 2
        upper = gl.where(halve, 0.5 * (thin + even), even)
        t0 = gl.where(halve, middle, _between(a + width * gl.where(step == 0, bell - 0.04, thin), low, high))
        t1 = _between(a + width * gl.where(step == 0, bell + 0.04, upper), low, high)
        counts = gl.sum(gl.where(key >= t0, 1, 0) + gl.where(key >= t1, 65536, 0), axis=0)
        low, above_low, high, above_high = _closer(t0, counts & 0xFFFF, topk, low, above_low, high, above_high)
        low, above_low, high, above_high = _closer(t1, counts >> 16, topk, low, above_low, high, above_high)
        step += 1
    return low


@gluon.jit
def _sampled_bound(
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
        low = gl.min(key, axis=0)
        gdc_launch_dependents()  # not before: the next kernel reads the whole row, and the sample would wait
        count = low.to(gl.int32) * 0 + SAMPLE
        if low == 0:
            count = gl.sum((key > 0).to(gl.int32), axis=0)
            low = gl.min(gl.where(key > 0, key, 0xFFFFFFFF).to(gl.uint32), axis=0)
        if count > rank:
            bound = _near(key, rank, rank // 16, count, low, gl.max(key, axis=0) + 1)
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
    """One program: one row; ``bounds`` int32 [B * S] gets the key that is enough for a mark."""
    row = gl.program_id(0)
    b = (row // rows).to(gl.int64)
    s = (row % rows).to(gl.int64)
    gdc_wait()
    first, end = bounds_of(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
    values += b * v_b + s * v_s
    bounded: gl.constexpr = HAS_KS or HAS_KE
    bound = _sampled_bound(values, first, end, columns, topk, SAMPLE, CAPACITY, PAIRS, bounded, MASKED, BARRED)
    gl.store(bounds + row, bound.to(gl.int32, bitcast=True))


@gluon.jit
def mark_kernel(
    values,
    ks,
    ke,
    bounds,
    marks,
    columns,
    rows,
    v_b,
    v_s,
    ks_b,
    ks_s,
    ke_b,
    ke_s,
    m_r,
    WORDS: gl.constexpr,
    TILE: gl.constexpr,
    HAS_KS: gl.constexpr,
    HAS_KE: gl.constexpr,
    MASKED: gl.constexpr,
    BARRED: gl.constexpr,
    EVEN: gl.constexpr,
):
    """One program: 32 * WORDS keys of a row. ``marks`` int32 [rows, words]: bit i of word w is key 32 w + i."""
    row = gl.program_id(0)
    b = (row // rows).to(gl.int64)
    s = (row % rows).to(gl.int64)
    first, end = bounds_of(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
    word = gl.program_id(1) * WORDS + gl.arange(0, WORDS, gl.SliceLayout(1, TILE))
    bit = gl.arange(0, 32, gl.SliceLayout(0, TILE))
    at = word[:, None] * 32 + bit[None, :]
    row_at = values + b * v_b + s * v_s
    bits = gl.load(row_at + at) if EVEN else gl.load(row_at + at, mask=at < columns, other=-1)
    gdc_wait()
    gdc_launch_dependents()
    bound = gl.load(bounds + row).to(gl.uint32, bitcast=True)
    # As numbers, which takes fewer operations than by keys and is the same but for NaN. No number has a key below -inf.
    take = bits.to(gl.float32, bitcast=True) >= score_of(gl.maximum(bound, 0x007FFFFF))
    take = take | (bound == 1)
    # What is outside of the bounds, or masked, is BARRED.
    if MASKED:
        take = gl.where(bits == -1, (bound <= BARRED), take)
    if HAS_KS or HAS_KE:
        take = gl.where((at >= first) & (at < end), take, (bound <= BARRED))
    if not EVEN:
        take = take & (at < columns)
    gl.store(marks + row.to(gl.int64) * m_r + word, gl.sum(take.to(gl.int32) << bit[None, :], axis=1))


@gluon.jit
def _count_bits(word):
    """How many bits of uint32 words are set."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@gluon.jit
def pick_kernel(
    values,
    ks,
    ke,
    bounds,
    marks,
    names,
    scores,
    chosen,
    columns,
    topk,
    rows,
    words,
    v_b,
    v_s,
    ks_b,
    ks_s,
    ke_b,
    ke_s,
    m_r,
    s_b,
    s_s,
    c_b,
    c_s,
    BLOCK: gl.constexpr,
    WORDS: gl.constexpr,
    SPARSE: gl.constexpr,
    HELD: gl.constexpr,
    SPREAD: gl.constexpr,
    HAS_KS: gl.constexpr,
    HAS_KE: gl.constexpr,
    MASKED: gl.constexpr,
    BARRED: gl.constexpr,
    SCORES: gl.constexpr,
):
    """One program: one row, from the marked keys where they do, else from the whole row.

    ``names`` int32 [rows, BLOCK] is for the list of the marked keys.
    """
    row = gl.program_id(0)
    b = (row // rows).to(gl.int64)
    s = (row % rows).to(gl.int64)
    first, end = bounds_of(ks, ke, b, s, columns, ks_b, ks_s, ke_b, ke_s, HAS_KS, HAS_KE)
    values += b * v_b + s * v_s
    chosen += b * c_b + s * c_s
    scores += b * s_b + s * s_s
    marks += row.to(gl.int64) * m_r
    names += row.to(gl.int64) * BLOCK
    gdc_wait()
    bound = gl.load(bounds + row).to(gl.uint32, bitcast=True)
    total = row * 0
    for w0 in range(0, words, WORDS):
        w = w0 + gl.arange(0, WORDS, SPARSE)
        mark = gl.load(marks + w, mask=w < words, other=0).to(gl.uint32, bitcast=True)
        count = _count_bits(mark).to(gl.int32)
        most = gl.max(count, axis=0)
        through = gl.associative_scan(count, 0, add)
        # Neighbouring words in neighbouring lanes now: what they hold goes side by side.
        to = gl.convert_layout(total + through - count, SPREAD)
        left = gl.convert_layout(mark, SPREAD)
        name = (w0 + gl.arange(0, WORDS, SPREAD)) * 32 - 127
        total += gl.max(through, axis=0)
        # The lowest bit of each word, then the next. Few words have more than a few.
        for _ in range(0, most):
            rest = left & (left - 1)
            power = (left ^ rest).to(gl.float32).to(gl.int32, bitcast=True)
            gl.store(names + to, name + (power >> 23), mask=(left > 0) & (to < BLOCK))
            left = rest
            to += 1
    # Lists of everything (bound 1) may be shorter than topk.
    if (total <= BLOCK) & ((total >= topk) | (bound == 1)):
        gl.thread_barrier()
        j = gl.arange(0, BLOCK, SPREAD)
        held = j < total
        name = gl.load(names + j, mask=held, other=0)
        key = keys_at(values, name, held, first, end, HAS_KS or HAS_KE, MASKED, BARRED, False)
        select_block(gl.convert_layout(key, HELD), name, total, bound, chosen, scores, topk, SPREAD, SCORES, True)
    else:
        _select_whole(
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
def _select_whole(
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
