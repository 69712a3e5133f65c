"""Indexer scores over a paged key cache: the kernel.

The product and its epilogue are those of ``mqa_logits``: rows of a tile are keys, its columns the heads of one or more
tokens of a query. The tokens of a query (``next_n``) share its pages, so each key is read once for all that fit a tile.
Keys are gathered through the block table; a page id outside of the cache is no address, and its keys are absent.

Formats: ``"plain"`` in the dtype of q, and ``"fp8"``, whose pages are planar: e4m3 data of all keys, then an f32 scale
for each. A key's scale is applied to the sum, and a negative one makes it NaN (see ``mqa_logits``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ascend_deep.native.triton.mqa_logits import negate
from ascend_deep.native.triton.portable import exact, float_of_bytes, gdc_launch_dependents

__all__ = ["paged_kernel"]


@triton.jit
def paged_kernel(
    q,
    q_sf,
    cache,
    keys,
    weights,
    lens,
    table,
    indices,
    out,
    scale,
    next_n,
    pages,
    page,
    table_rows,
    table_columns,
    columns,
    chunk,
    q_q,
    q_n,
    q_h,
    qsf_q,
    qsf_n,
    qsf_h,
    c_p,
    c_t,
    page_rows,
    w_q,
    w_n,
    w_h,
    l_q,
    l_n,
    t_r,
    t_c,
    i_q,
    o_q,
    o_n,
    H: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NEGATIVE: tl.constexpr,
    HAS_QSF: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    PLANAR: tl.constexpr,
    WHOLE: tl.constexpr,
    CLEAN: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: TOKENS tokens of one query, ``chunk`` positions of its context; ``page`` keys a page.

    ``out`` [Q, next_n, columns]. BITS: it is int32 and gets the bits of the scores, -1 for absent keys, and nothing
    behind a context (the workspace of the selection). Otherwise it is floating, -inf for absent keys and, if CLEAN,
    behind. PLANAR: ``cache`` is uint8 in the format ``"fp8"``; its keys are D bytes apart, and ``q``
    may be uint8 too. WHOLE: a tile lies in a page, and ``keys`` is a tensor descriptor of the cache in rows of keys, of
    which a page has ``page_rows``.
    """
    if BITS:
        gdc_launch_dependents()  # the selection, which waits for the end of this kernel
    i = tl.program_id(0).to(tl.int64)
    n0 = tl.program_id(2) * TOKENS
    begin = tl.program_id(1) * chunk
    stop = tl.minimum(begin + chunk, columns)

    row = tl.arange(0, TOKENS * BLOCK_H)
    row_n = n0 + row // BLOCK_H
    row_h = row % BLOCK_H
    d = tl.arange(0, BLOCK_D)
    row_in = (row_n < next_n) & (row_h < H)
    w = tl.load(weights + i * w_q + row_n * w_n + row_h * w_h, mask=row_in, other=0.0).to(tl.float32)
    rows_at = q + i * q_q + row_n * q_n + row_h * q_h
    x = tl.load(rows_at[:, None] + d[None, :], mask=row_in[:, None] & (d < D)[None, :], other=0.0)
    if HAS_QSF:
        f = tl.load(q_sf + i * qsf_q + row_n * qsf_n + row_h * qsf_h, mask=row_in, other=0.0)
        w = w * tl.abs(scale * f)
        x = negate(x, scale * f < 0)
    else:
        w = w * tl.abs(scale)
        if NEGATIVE:
            x = negate(x, row >= 0)
    operand = tl.trans(exact(x))

    n = n0 + tl.arange(0, TOKENS)
    inside = n < next_n
    end = tl.load(lens + i * l_q + n * l_n, mask=inside, other=0)
    end = tl.minimum(tl.maximum(end, 0), columns).to(tl.int32)
    high = tl.minimum(stop, tl.max(end, axis=0))
    r = i
    known = True
    if HAS_INDICES:
        r = tl.load(indices + i * i_q).to(tl.int64)
        known = (r >= 0) & (r < table_rows)
    to = out + i * o_q + n.to(tl.int64) * o_n

    for t0 in tl.range(begin, high, BLOCK_T, num_stages=STAGES):
        t = t0 + tl.arange(0, BLOCK_T)
        if WHOLE:
            # The copy engine wants one address, and gets that of page 0 for a page that does not exist.
            column = t0 // page
            found = (column < table_columns) & known
            name = tl.load(table + r * t_r + column * t_c, mask=found, other=-1).to(tl.int64)
            found = found & (name >= 0) & (name < pages)
            name = tl.where(found, name, 0)
            there = (t < high) & found
            start = cache + name * c_p
            k = keys.load([(name * page_rows).to(tl.int32) + t0 % page, 0])
        else:
            column = t // page
            there = (t < high) & (column < table_columns) & known
            name = tl.load(table + r * t_r + column * t_c, mask=there, other=-1).to(tl.int64)
            there = there & (name >= 0) & (name < pages)
            start = cache + tl.where(there, name, 0) * c_p
            keys_at = start + (t % page) * c_t
            if PLANAR and q.dtype.element_ty != tl.uint8:
                keys_at = keys_at.to(tl.pointer_type(tl.float8e4nv))
            k = tl.load(keys_at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        acc = tl.dot(exact(k).to(operand.dtype), operand, input_precision=PRECISION)
        acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
        if BLOCK_H != H:
            # A key with an infinity makes NaN of the padding's zeros.
            acc = tl.where((row_h < H)[None, :], acc, 0.0)
        score = tl.sum(tl.reshape(acc, (BLOCK_T, TOKENS, BLOCK_H)), axis=2)
        if PLANAR:
            if q.dtype.element_ty == tl.uint8:
                factor = float_of_bytes(start + page * D + 4 * (t % page), there)
            else:
                scales_at = (start + page * D).to(tl.pointer_type(tl.float32)) + t % page
                factor = tl.load(scales_at, mask=there, other=0.0)
            # Behind the ReLU a negative scale would give a wrong number.
            factor = tl.where(factor < 0, float("nan"), factor)
            score = score * factor[:, None]
        used = inside[None, :] & (t < high)[:, None]
        shown = used & there[:, None] & (t[:, None] < end[None, :])
        if BITS:
            value = tl.where(shown, score.to(tl.int32, bitcast=True), -1)
        else:
            value = tl.where(shown, score, float("-inf")).to(out.dtype.element_ty)
        tl.store(to[None, :] + t[:, None], value, mask=used)

    if CLEAN:
        for c0 in tl.range(tl.maximum(begin, high), stop, BLOCK_T):
            c = c0 + tl.arange(0, BLOCK_T)
            nothing = tl.full((BLOCK_T, TOKENS), float("-inf"), tl.float32).to(out.dtype.element_ty)
            tl.store(to[None, :] + c[:, None], nothing, mask=(c < stop)[:, None] & inside[None, :])
