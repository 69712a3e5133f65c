"""Writes -inf behind the last valid column of each row, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["fill_behind"]


@triton.jit
def _fill_kernel(out, length, columns, o_s, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(length + row)
    first = tl.program_id(1) * BLOCK
    if first + BLOCK > count:
        c = first + tl.arange(0, BLOCK)
        nothing = tl.full((BLOCK,), float("-inf"), tl.float32).to(out.dtype.element_ty)
        tl.store(out + row * o_s + c, nothing, mask=(c >= count) & (c < columns))


def fill_behind(out: Tensor, length: Tensor) -> None:
    """``out`` [S, C] gets -inf in the columns ``length[s]`` and above; ``length`` is i32 [S], contiguous, on CUDA."""
    rows, columns = out.shape
    if rows and columns:
        with torch.cuda.device_of(out):
            _fill_kernel[(rows, triton.cdiv(columns, 2048))](out, length, columns, out.stride(0), BLOCK=2048)
