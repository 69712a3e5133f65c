"""``k_grouped_gemm_bf16`` by ``npu_grouped_matmul`` with groups along the inner dimension: gradients of expert weights.

The vendor's groups follow each other without gaps, so a group takes the padding rows behind it along; they are set to
zero in both operands first, whatever they hold. What the vendor gives for an empty group is not documented, so it is
replaced by zero. Nothing looks at the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import KGroupedBf16, takes
from ascend_deep.native.torch_npu._call import Spec, known
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.gemm import EMPTY
from ascend_deep.native.torch_npu.gemm_grouped import psum_layout, zeroed
from ascend_deep.native.torch_npu.soc import Target

__all__ = ["k_grouped", "limits"]

_HOW: dict[str, Any] = {"split_item": 3, "group_type": 2, "group_list_type": 1, "act_type": 0}


def _ends(layout: Tensor, grouping: str, alignment: Any) -> Tensor:
    """The end of each group; ``sizes`` are laid out one behind the other, each from a multiple of ``alignment`` on."""
    if grouping == "psum":
        return layout
    sizes = layout.clamp(min=0)
    aligned = (sizes + alignment - 1) // alignment * alignment
    return aligned.cumsum(0) - aligned + sizes


@takes(KGroupedBf16)
def k_grouped(x: KGroupedBf16) -> Tensor:
    """As the op says."""
    counts, used = psum_layout(_ends(x.grouped_layout, x.grouping, x.alignment), x.a.shape[0], x.alignment)
    left, right = zeroed(x.a, used).contiguous(), zeroed(x.b, used).contiguous()
    (out,) = torch.ops.npu.npu_grouped_matmul([left.t()], [right], group_list=counts, **_HOW)
    return torch.where((counts > 0).view(-1, 1, 1), out, torch.zeros((), dtype=out.dtype, device=out.device))


@takes(KGroupedBf16)
def limits(target: Target, x: KGroupedBf16) -> str | None:
    """Why the vendor's op does not compute this call of ``k_grouped_gemm_bf16``; ``None`` if it does."""
    a, b = x.a, x.b
    if x.c is not None:
        return "there is a c to add; the vendor's product would be rounded before the sum."
    if x.out_dtype == torch.float32:
        return "out_dtype is float32; the vendor's grouped product of bfloat16 is bfloat16."
    for name, tensor in (("a", a), ("b", b), ("grouped_layout", x.grouped_layout)):
        if any(known(size) and size == 0 for size in tensor.shape):
            return f"{name} {EMPTY}"
    rows, weight = Spec((a.shape[1], a.shape[0]), a.dtype, swapped=True), Spec(tuple(b.shape), b.dtype)
    counts = Spec((x.grouped_layout.shape[0],), torch.int64)
    return refusal("npu_grouped_matmul", target, [rows], [weight], group_list=counts, **_HOW)
