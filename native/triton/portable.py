"""What lets kernels compile for Ascend: no FP8 among the types, no pointers to other types, no launches that overlap.

On CUDA nothing of this is in a kernel: which branch is taken is known when it is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["exact", "float_of_bytes", "gdc_launch_dependents"]

try:
    from triton.language.extra.cuda import gdc_launch_dependents
except ImportError:  # Triton for Ascend has no CUDA in it, and its launches do not overlap

    @triton.jit
    def gdc_launch_dependents():
        """Nothing."""
        return


@triton.jit
def exact(x):
    """``x``, or if it is uint8 the e4m3 numbers whose codes it holds, as float16, which has all of them."""
    if x.dtype == tl.uint8:
        code = x.to(tl.int32)
        size = code & 0x7F
        # Exponent and mantissa where float32 has them; below 2^-6 a code counts steps of 2^-9.
        large = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, large)
        value = tl.where(size == 0x7F, float("nan"), value)
        x = tl.where(code > 127, -value, value).to(tl.float16)
    return x


@triton.jit
def float_of_bytes(at, mask):
    """The float32 whose four bytes lie from the uint8 pointers ``at`` on, 0 outside ``mask``."""
    bits = tl.load(at, mask=mask, other=0).to(tl.int32)
    bits += tl.load(at + 1, mask=mask, other=0).to(tl.int32) << 8
    bits += tl.load(at + 2, mask=mask, other=0).to(tl.int32) << 16
    bits += tl.load(at + 3, mask=mask, other=0).to(tl.int32) << 24
    return bits.to(tl.float32, bitcast=True)
