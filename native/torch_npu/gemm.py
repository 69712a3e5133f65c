"""``gemm_bf16`` by aten's matrix product and ``gemm_scaled`` by ``npu_quant_matmul``.

    a 1 x 128, b 128 x 128, float32 scales      the vendor's G-B       float8_e4m3fn
    a and b 128 x 128, float32 scales           B-B                    float8_e4m3fn
    a and b 1 x 32, packed scales               MX                     float8_e4m3fn, or FP4 with b as [N, K]
    one float32 scale per row of a and of b     K-C                    float8_e4m3fn

float32 scales of 1 x 32 blocks are refused: MX takes powers of two, and shapes do not say whether these are. ``c`` and
``alpha`` are applied to a float32 product, so that the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import GemmScaled, takes
from ascend_deep.native.torch_npu._call import Spec, known
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.formats import E8M0, FP4_PAIRS, NUMBER, is_fp4, last_size, mx_pairs
from ascend_deep.native.torch_npu.soc import Target

__all__ = [
    "EMPTY",
    "Blocks",
    "as_stored",
    "bf16_limits",
    "blocks_of",
    "gemm_bf16",
    "gemm_scaled",
    "mixed",
    "scaled_limits",
    "swapped",
]

EMPTY = "is empty; the vendor's documents do not allow empty tensors."


@dataclass(frozen=True)
class Blocks:
    """How the vendor names a pair of recipes.

    Attributes:
        name: its letters.
        sizes: ``group_sizes``; ``None``: one scale per row and column.
        mx: the scales are E8M0.
    """

    name: str
    sizes: tuple[int, int, int] | None
    mx: bool = False


_MX = Blocks("MX", (1, 1, 32), True)
_GB = Blocks("G-B", (1, 128, 128))
_BB = Blocks("B-B", (128, 128, 128))
_KC = Blocks("K-C", None)


def blocks_of(
    recipe_a: Sequence[int], recipe_b: Sequence[int], k: Any, sf: tuple[torch.dtype, torch.dtype]
) -> Blocks | str:
    """The vendor's name of a pair of recipes and dtypes of scales, or one sentence that says why there is none."""
    a, b = (int(recipe_a[0]), int(recipe_a[1])), (int(recipe_b[0]), int(recipe_b[1]))
    words = [dtype != torch.float32 for dtype in sf]
    if a[0] == b[0] == 1 and known(k) and a[1] >= k and b[1] >= k and not any(words):
        return _KC
    if (a, b) == ((1, 32), (1, 32)):
        if not all(words):
            return (
                "the blocks of 32 have float32 scales, of which the vendor's MX product takes powers of two only; "
                "whether these are cannot be told beforehand. Pass packed scales."
            )
        return _MX
    if any(words):
        return f"scales are packed for blocks of {a[1]} and {b[1]}; the vendor takes E8M0 for blocks of 32 only."
    if (a, b) == ((1, 128), (128, 128)):
        return _GB
    if (a, b) == ((128, 128), (128, 128)):
        return _BB
    return (
        f"the blocks are {a[0]} x {a[1]} and {b[0]} x {b[1]}; the vendor's quantised products have 1 x 128 with "
        "128 x 128, 128 x 128 twice, 1 x 32 twice, and one scale per row."
    )


def mixed(a: Tensor, b: Tensor, blocks: Blocks) -> str | None:
    """Why these data formats are not multiplied with such scales; ``None`` if they are."""
    if is_fp4(a) != is_fp4(b):
        return "one operand is FP8 and the other FP4; the vendor's mixed product is not used by this provider."
    if is_fp4(a) and not blocks.mx:
        return (
            f"the operands are FP4 with {blocks.name} scales; the vendor takes FP4 with packed scales of 1 x 32 only."
        )
    return None


def as_stored(x: Tensor, other_way: bool) -> Tensor:
    """``x`` [..., R, C], or its transpose if ``other_way``, contiguous or as a transposed view of contiguous memory."""
    logical = x.mT if other_way else x
    if logical.is_contiguous() or logical.mT.is_contiguous():
        return logical
    return x.contiguous().mT if other_way else x.contiguous()


def swapped(x: Tensor) -> bool:
    """True for a transposed view of contiguous memory."""
    return not x.is_contiguous()


def along(scale: Tensor, dim: int, memory_swapped: bool) -> Tensor:
    """``scale`` with dimensions ``dim`` and ``dim + 1`` transposed in memory, or not, like its operand."""
    if memory_swapped:
        return scale.transpose(dim, dim + 1).contiguous().transpose(dim, dim + 1)
    return scale.contiguous()


# -- bfloat16 ---------------------------------------------------------------------------------------------------------
def gemm_bf16(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    *,
    layout: str,
    out_dtype: torch.dtype | None,
    alpha: float | None,
) -> Tensor:
    """As the op says; the schema's arguments. The cube sums in float32 and rounds once."""
    left = a if layout[0] == "n" else a.mT
    right = b if layout[1] == "n" else b.mT
    return torch.mm(left, right)


def bf16_limits(
    target: Target,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    *,
    layout: str,
    out_dtype: torch.dtype | None,
    alpha: float | None,
) -> str | None:
    """Why aten's product is not this call of ``gemm_bf16``; ``None`` if it is."""
    if c is not None or alpha is not None:
        what = "a c to add" if c is not None else f"a factor of {alpha}"
        return f"there is {what}; whether aten's addmm rounds the product before on NPUs is not documented."
    if out_dtype == torch.float32:
        return "out_dtype is float32; aten's product of bfloat16 is bfloat16."
    for name, x in (("a", a), ("b", b)):
        if any(known(size) and size == 0 for size in x.shape):
            return f"{name} {EMPTY}"
    return None


# -- quantised --------------------------------------------------------------------------------------------------------
@takes(GemmScaled)
def gemm_scaled(x: GemmScaled) -> Tensor:
    """As the op says."""
    k = _k(x)
    blocks = blocks_of(x.recipe_a, x.recipe_b, k, (x.sfa.dtype, x.sfb.dtype))
    assert isinstance(blocks, Blocks)  # the limits refuse all others
    four = is_fp4(x.a)
    x1 = as_stored(x.a.view(torch.uint8) if four else x.a, x.layout[0] == "t")
    x2 = as_stored(x.b.view(torch.uint8) if four else x.b, x.layout[1] == "t")
    if blocks.mx:
        groups = (k + 31) // 32
        own = along(mx_pairs(x.sfa, groups), 0, swapped(x1))
        scale = along(mx_pairs(x.sfb, groups).transpose(0, 1), 0, swapped(x2))
    elif blocks.sizes is not None:
        own, scale = along(x.sfa, 0, swapped(x1)), along(x.sfb.t(), 0, swapped(x2))
    else:
        own, scale = x.sfa.reshape(-1), x.sfb.reshape(-1)
    out: Tensor = torch.ops.npu.npu_quant_matmul(
        x1,
        x2,
        scale,
        pertoken_scale=own,
        group_sizes=None if blocks.sizes is None else list(blocks.sizes),
        **_numbers(x, blocks),
    )
    if x.alpha is not None:
        out = out * x.alpha
    if x.c is not None:
        out = out + x.c.to(torch.float32)
    return out.to(_dtype(x))


def _k(x: GemmScaled) -> Any:
    return last_size(x.a) if x.layout[0] == "n" else x.a.shape[0]


def _dtype(x: GemmScaled) -> torch.dtype:
    return x.out_dtype or (torch.bfloat16 if x.c is None else x.c.dtype)


def _numbers(x: GemmScaled, blocks: Blocks) -> dict[str, Any]:
    """The vendor's numbers of dtypes. What is scaled or added to afterwards is float32 until then."""
    wide = torch.float32 if x.c is not None or x.alpha is not None else _dtype(x)
    kwargs: dict[str, Any] = {"output_dtype": NUMBER[wide]}
    if blocks.mx:
        kwargs |= {"pertoken_scale_dtype": E8M0, "scale_dtype": E8M0}
        if is_fp4(x.a):
            kwargs |= {"x1_dtype": FP4_PAIRS, "x2_dtype": FP4_PAIRS}
    return kwargs


@takes(GemmScaled)
def scaled_limits(target: Target, x: GemmScaled) -> str | None:
    """Why the vendor's op does not compute this call of ``gemm_scaled``; ``None`` if it does."""
    k = _k(x)
    blocks = blocks_of(x.recipe_a, x.recipe_b, k, (x.sfa.dtype, x.sfb.dtype))
    if isinstance(blocks, str):
        return blocks
    reason = mixed(x.a, x.b, blocks)
    if reason is not None:
        return reason
    for name, operand in (("a", x.a), ("b", x.b)):
        if any(known(size) and size == 0 for size in operand.shape):
            return f"{name} {EMPTY}"
    if is_fp4(x.a) and x.layout != "nt":
        return f"the operands are FP4 in layout {x.layout!r}; the vendor takes a as [M, K] and b as [N, K]."
    rows, _ = _logical(x.a, x.layout[0] == "t")
    weight, _ = _logical(x.b, x.layout[1] == "t")
    m, n = rows.shape[0], weight.shape[1]
    if blocks.mx:
        own, scale = Spec((m, (k + 63) // 64, 2), torch.uint8), Spec(((k + 63) // 64, n, 2), torch.uint8)
    elif blocks.sizes is not None:
        own = Spec((x.sfa.shape[0], x.sfa.shape[1]), x.sfa.dtype, rows.swapped)
        scale = Spec((x.sfb.shape[1], x.sfb.shape[0]), x.sfb.dtype, weight.swapped)
    else:
        own, scale = Spec((m,), x.sfa.dtype), Spec((n,), x.sfb.dtype)
    return refusal(
        "npu_quant_matmul",
        target,
        rows,
        weight,
        scale,
        pertoken_scale=own,
        group_sizes=None if blocks.sizes is None else blocks.sizes,
        **_numbers(x, blocks),
    )


def _logical(x: Tensor, other_way: bool) -> tuple[Spec, bool]:
    """What ``as_stored`` gives, without making it."""
    logical = x.mT if other_way else x
    if logical.is_contiguous():
        memory = False
    elif logical.mT.is_contiguous():
        memory = True
    else:
        memory = other_way
    return Spec(tuple(logical.shape), torch.uint8 if is_fp4(x) else x.dtype, memory), memory
