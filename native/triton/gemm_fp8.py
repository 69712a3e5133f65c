"""Large fp8 products with scales on Hopper, in Gluon: copies and parts of the rows in warp groups of their own.

What ``gemm_kernel`` lacks for them: the sums of 128 elements of K have to be scaled and added in registers, and the
tensor cores wait meanwhile, unless another warp group has a product of its own for them. Here PARTS groups of four
warps take 64 rows each of a tile, and one more only starts copies.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["gemm_fp8"]

_BLOCK = 128  # elements of K per step, columns of one product of the tensor cores, and of a block of scales
_PART = 64  # rows of one product of the tensor cores


@gluon.jit
def _tile(t, m_tiles, n_tiles, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SUPER: gl.constexpr):
    """First row and column of tile ``t``: tiles that run together read a compact part of both operands."""
    in_super = SUPER * n_tiles
    first = t // in_super * SUPER
    height = gl.minimum(m_tiles - first, SUPER)
    return (first + t % in_super % height) * ROWS, t % in_super // height * COLUMNS


@gluon.jit
def _group(blocks, m0, N, M, GROUPED: gl.constexpr):
    """Group, first row in b and end of the valid rows of a tile of 128 rows; a tile without valid rows has group -1."""
    group = 0
    end = M
    if GROUPED:
        at = blocks + m0 // 128 * 2
        group = gl.load(at)
        end = gl.load(at + 1)
    return group, group * N, end


@gluon.jit
def _produce(
    a,
    b,
    a_held,
    b_held,
    full,
    empty,
    blocks,
    M,
    N,
    m_tiles,
    n_tiles,
    steps,
    PARTS: gl.constexpr,
    HALVES: gl.constexpr,
    GROUPED: gl.constexpr,
    SUPER: gl.constexpr,
    STAGES: gl.constexpr,
):
    done = 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m0, n0 = _tile(t, m_tiles, n_tiles, PARTS * 64, HALVES * 128, SUPER)
        group, first, _ = _group(blocks, m0, N, M, GROUPED)
        n0 += first
        for k in range(gl.where(group < 0, 0, steps)):
            stage = done % STAGES
            mbarrier.wait(empty.index(stage), (done // STAGES & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (PARTS * 64 + HALVES * 128) * 128)
            for p in gl.static_range(PARTS):
                tma.async_copy_global_to_shared(a, [m0 + p * 64, k * 128], ready, a_held.index(PARTS * stage + p))
            for h in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(b, [n0 + h * 128, k * 128], ready, b_held.index(HALVES * stage + h))
            done += 1


@gluon.jit
def _store(out, to, m0, n0, acc):
    tma.store_wait(0)
    to.store(acc.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [m0, n0], to)


@gluon.jit
def _consume(
    out,
    a_held,
    b_held,
    out_held,
    full,
    empty,
    sfa,
    sfb,
    blocks,
    M,
    N,
    m_tiles,
    n_tiles,
    steps,
    sfa_m,
    sfa_k,
    sfb_g,
    sfb_n,
    sfb_k,
    MINE: gl.constexpr,
    PARTS: gl.constexpr,
    HALVES: gl.constexpr,
    GROUPED: gl.constexpr,
    SUPER: gl.constexpr,
    STAGES: gl.constexpr,
):
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    to = out_held.index(MINE)
    done = 0
    for t in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m0, n0 = _tile(t, m_tiles, n_tiles, PARTS * 64, HALVES * 128, SUPER)
        group, _, end = _group(blocks, m0, N, M, GROUPED)
        m0 += MINE * 64
        m = m0 + gl.arange(0, 64, gl.SliceLayout(1, mma))
        at = gl.minimum(m, M - 1) * sfa_m
        left_at = gl.maximum(group, 0) * sfb_g + n0 // 128 * sfb_n
        right_at = left_at + gl.where(n0 + 128 < N, sfb_n, 0)
        sa = gl.load(sfa + at)
        left = gl.load(sfb + left_at)
        acc_left = gl.zeros((64, 128), gl.float32, mma)
        if HALVES == 2:
            right = gl.load(sfb + right_at)
            acc_right = gl.zeros((64, 128), gl.float32, mma)
        for k in range(gl.where(group < 0, 0, steps)):
            stage = done % STAGES
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            x = a_held.index(PARTS * stage + MINE)
            nothing = gl.zeros((64, 128), gl.float32, mma)
            w = b_held.index(HALVES * stage).permute((1, 0))
            part = warpgroup_mma(x, w, nothing, use_acc=False, is_async=True)
            # The scales of the next step are on their way meanwhile.
            after = gl.minimum(k + 1, steps - 1)
            sa_next = gl.load(sfa + after * sfa_k + at)
            left_next = gl.load(sfb + (left_at + after * sfb_k))
            if HALVES == 2:
                right_next = gl.load(sfb + (right_at + after * sfb_k))
            part = warpgroup_mma_wait(0, deps=(part,))
            if HALVES == 2:
                acc_left += part * gl.expand_dims(sa * left, 1)
                w = b_held.index(HALVES * stage + 1).permute((1, 0))
                part = warpgroup_mma(x, w, nothing, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(stage))
                acc_right += part * gl.expand_dims(sa * right, 1)
                right = right_next
            else:
                mbarrier.arrive(empty.index(stage))
                acc_left += part * gl.expand_dims(sa * left, 1)
            sa = sa_next
            left = left_next
            done += 1
        if GROUPED:
            acc_left = gl.where(gl.expand_dims(m < end, 1), acc_left, 0.0)
        _store(out, to, m0, n0, acc_left)
        if HALVES == 2:
            _store(out, to, m0, n0 + 128, acc_right)
    tma.store_wait(0)


@gluon.jit
def fp8_kernel(
    a,
    b,
    out,
    sfa,
    sfb,
    blocks,
    M,
    N,
    K,
    sfa_m,
    sfa_k,
    sfb_g,
    sfb_n,
    sfb_k,
    PARTS: gl.constexpr,
    HALVES: gl.constexpr,
    GROUPED: gl.constexpr,
    SUPER: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``out = A B^T`` with scales of 1 x 128 and 128 x 128; descriptors of blocks [64, 128], [128, 128], [64, 128].

    A tile has 64 PARTS rows and 128 HALVES columns; PARTS is 2 or 3, HALVES 1 or 2. GROUPED (with 2 and 1): ``blocks``
    has the group and the end of its rows for each 128 rows of a, and b and its scales have a matrix per group.
    """
    m_tiles = gl.cdiv(M, PARTS * 64)
    n_tiles = gl.cdiv(N, HALVES * 128)
    steps = gl.cdiv(K, 128)
    a_held = gl.allocate_shared_memory(a.dtype, [PARTS * STAGES, 64, 128], a.layout)
    b_held = gl.allocate_shared_memory(b.dtype, [HALVES * STAGES, 128, 128], b.layout)
    out_held = gl.allocate_shared_memory(out.dtype, [PARTS, 64, 128], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    if PARTS == 3:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (out, a_held, b_held, out_held, full, empty, sfa, sfb, blocks, M, N, m_tiles, n_tiles, steps, sfa_m,
                     sfa_k, sfb_g, sfb_n, sfb_k, 0, PARTS, HALVES, GROUPED, SUPER, STAGES),
                ),
                (
                    _consume,
                    (out, a_held, b_held, out_held, full, empty, sfa, sfb, blocks, M, N, m_tiles, n_tiles, steps, sfa_m,
                     sfa_k, sfb_g, sfb_n, sfb_k, 1, PARTS, HALVES, GROUPED, SUPER, STAGES),
                ),
                (
                    _consume,
                    (out, a_held, b_held, out_held, full, empty, sfa, sfb, blocks, M, N, m_tiles, n_tiles, steps, sfa_m,
                     sfa_k, sfb_g, sfb_n, sfb_k, 2, PARTS, HALVES, GROUPED, SUPER, STAGES),
                ),
                (
                    _produce,
                    (a, b, a_held, b_held, full, empty, blocks, M, N, m_tiles, n_tiles, steps, PARTS, HALVES, GROUPED,
                     SUPER, STAGES),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (out, a_held, b_held, out_held, full, empty, sfa, sfb, blocks, M, N, m_tiles, n_tiles, steps, sfa_m,
                     sfa_k, sfb_g, sfb_n, sfb_k, 0, PARTS, HALVES, GROUPED, SUPER, STAGES),
                ),
                (
                    _consume,
                    (out, a_held, b_held, out_held, full, empty, sfa, sfb, blocks, M, N, m_tiles, n_tiles, steps, sfa_m,
                     sfa_k, sfb_g, sfb_n, sfb_k, 1, PARTS, HALVES, GROUPED, SUPER, STAGES),
                ),
                (
                    _produce,
                    (a, b, a_held, b_held, full, empty, blocks, M, N, m_tiles, n_tiles, steps, PARTS, HALVES, GROUPED,
                     SUPER, STAGES),
                ),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def gemm_fp8(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    out: Tensor,
    *,
    blocks: Tensor | None = None,
    parts: int = 2,
    halves: int = 1,
    height: int = 8,
    stages: int | None = None,
) -> None:
    """``out`` [M, N] bf16 of e4m3 a [M, K] and b [N, K], K contiguous, f32 scales; rows at multiples of 16 bytes.

    With ``blocks``, int32 [ceil(M / 128), 2] with the group (or -1) and the end of its rows, b [G, N, K] and sfb have a
    matrix per group, without gaps, and rows behind the end come out as zeros.
    """
    (m, k), n = a.shape, b.shape[-2]
    groups = b.shape[0] if blocks is not None else 1
    eight = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    sixteen = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tiles = -(-m // (parts * _PART)) * -(-n // (halves * _BLOCK))
    fp8_kernel[(min(tiles, _processors(a.device.index)),)](
        TensorDescriptor(a, [m, k], [a.stride(0), 1], [_PART, _BLOCK], eight),
        TensorDescriptor(b, [groups * n, k], [b.stride(-2), 1], [_BLOCK, _BLOCK], eight),
        TensorDescriptor(out, [m, n], [out.stride(0), 1], [_PART, _BLOCK], sixteen),
        sfa,
        sfb,
        blocks,
        m,
        n,
        k,
        *sfa.stride(),
        sfb.stride(0) if blocks is not None else 0,
        *sfb.stride()[-2:],
        PARTS=parts,
        HALVES=halves,
        GROUPED=blocks is not None,
        SUPER=height,
        STAGES=stages or (4 if parts == 3 or halves == 2 else 5),
        num_warps=4,
    )
