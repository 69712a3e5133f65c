"""One row times a matrix: ``d[n] = c[n] + alpha * sum_k x[k] W[n, k]``, bound by reading W once.

No tensor cores and no second launch: a program holds whole rows of W, 16 bytes per thread and load, and adds them up in
registers. With scales, those of x and of the block of W go into x, since a program's rows lie in one block.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ascend_deep.native.triton.gemm_plan import Vector
from ascend_deep.native.triton.launch import launch
from ascend_deep.native.triton.portable import exact

__all__ = ["takes", "vector"]


@triton.jit
def vector_kernel(
    x,
    w,
    c,
    out,
    sfa,
    sfb,
    alpha,
    N,
    K,
    x_k,
    w_n,
    c_n,
    sfa_k,
    sfb_n,
    sfb_k,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_C: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: BN rows of w; BN divides 128. EVEN: no tail in N and K. Codes of FP8 may be uint8."""
    n0 = tl.program_id(0) * BN
    n = n0 + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = w + n.to(tl.int64)[:, None] * w_n
    acc = tl.zeros((BN, BK), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        at = k0 + k
        if EVEN:
            weight = exact(tl.load(rows + at[None, :])).to(tl.float32)
            value = exact(tl.load(x + at * x_k)).to(tl.float32)
        else:
            inside = (n < N)[:, None] & (at < K)[None, :]
            weight = exact(tl.load(rows + at[None, :], mask=inside, other=0.0)).to(tl.float32)
            value = exact(tl.load(x + at * x_k, mask=at < K, other=0.0)).to(tl.float32)
        if SCALED:
            block = at // 128
            sa = tl.load(sfa + block * sfa_k, mask=at < K, other=0.0)
            value = value * (sa * tl.load(sfb + n0 // 128 * sfb_n + block * sfb_k, mask=at < K, other=0.0))
        acc += weight * value[None, :]
    total = tl.sum(acc, 1) * alpha
    if HAS_C:
        total += tl.load(c + n.to(tl.int64) * c_n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


def takes(b: Tensor, scales: tuple[Tensor, Tensor] | None) -> bool:
    """Whether the kernel is made for the matrix ``b`` [N, K]: K contiguous, and blocks of 128 rows per scale."""
    unit = 16 // b.element_size()
    wide = scales is None or scales[1].shape[-2] != b.shape[-2] or b.shape[-2] == 1
    return b.dim() == 2 and b.stride(1) == 1 and b.stride(0) % unit == 0 and b.data_ptr() % 16 == 0 and wide


def vector(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    alpha: float | None,
    scales: tuple[Tensor, Tensor] | None,
    plan: Vector,
    known: Any = None,
) -> None:
    """``out = c + alpha * a @ b.t()`` for a [1, K]; arguments as for ``gemm.launch``, ``known`` as for ``launch``."""
    n, k = b.shape
    sfa, sfb = scales or (None, None)
    args = (
        a,
        b,
        c,
        out,
        sfa,
        sfb,
        1.0 if alpha is None else float(alpha),
        n,
        k,
        a.stride(-1),
        b.stride(0),
        0 if c is None else c.stride(1),
        0 if sfa is None else sfa.stride(1),
        *((0, 0) if sfb is None else sfb.stride()),
    )
    options = {
        "BN": plan.rows,
        "BK": plan.depth,
        "SCALED": scales is not None,
        "HAS_C": c is not None,
        "EVEN": n % plan.rows == 0 and k % plan.depth == 0,
        "STAGES": plan.stages,
        "num_warps": plan.warps,
    }
    launch(vector_kernel, (-(-n // plan.rows), 1, 1), args, options, known)
