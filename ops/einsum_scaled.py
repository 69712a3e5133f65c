"""``einsum_scaled``: the four batched products of ``einsum_bf16`` on FP8 operands with a scale per block.

    bhr,hdr->bhd | bhd,hdr->bhr | bhd,bhr->hdr | bmk,bnk->mn         plus C, f32 sums, one rounding

In each, A and B are batches of matrices; MN is the letter that only one of them and the result have, K the one that is
summed. f32 scales have the dims of their operand, MN divided by gran_mn and K by gran_k, rounded up: for "bhr,hdr->bhd"
and recipes (1, 128) and (128, 128), sfa is [b, h, r / 128] and sfb [h, d / 128, r / 128]. Packed scales do not follow
the operand: they are [batch, MN, words], where the batch is h (b in the last equation). Contract: A.4 and F of the
DeepGEMM operator list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import EinsumScaled, EinsumScaledFp8Out, takes
from ascend_deep.ops import _check, _gemm, _sf
from ascend_deep.ops._gemm_samples import EQUATIONS
from ascend_deep.ops._gemm_scaled_samples import einsum_scaled_samples
from ascend_deep.ops._op import OpDef, call
from ascend_deep.ops.gemm_scaled import NO_BACKWARD, SCALED_TOLERANCE

__all__ = ["EINSUM_SCALED", "PROJECT", "check_einsum", "einsum_product", "einsum_scaled"]

PROJECT = "bhr,hdr->bhd"
# The letter of the batch, of M (a), of N (b) and of K.
_LETTERS = {
    PROJECT: ("h", "b", "d", "r"),
    "bhd,hdr->bhr": ("h", "b", "r", "d"),
    "bhd,bhr->hdr": ("h", "d", "r", "b"),
    "bmk,bnk->mn": ("b", "m", "n", "k"),
}
assert set(_LETTERS) == set(EQUATIONS)


def einsum_scaled(
    eq: str,
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    c: Tensor | None = None,
    *,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``torch.einsum(eq, A, B) + c`` of dequantised operands; see the module.

    Args:
        eq: one of the four equations, without spaces.
        a, b: float8_e4m3fn, shapes by ``eq``, any strides.
        sfa, sfb: scales, see the module; any strides.
        c: shape by ``eq``, in the dtype of the result, or ``None``.
        recipe_a, recipe_b: (gran_mn, gran_k) of the scales.
        out_dtype: bf16 or f32; ``None``: that of ``c``, bf16 without it.

    Returns:
        Contiguous, shape by ``eq``. Not differentiable.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call("einsum_scaled", a, sfa, b, sfb, c, eq=eq, recipe_a=recipe_a, recipe_b=recipe_b, out_dtype=out_dtype)


def _order(eq: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which dims of ``a`` and ``b`` are (batch, MN, K)."""
    left, right = eq.split("->")[0].split(",")
    batch, m, n, k = _LETTERS[eq]
    return tuple(left.index(letter) for letter in (batch, m, k)), tuple(right.index(letter) for letter in (batch, n, k))


def _shape(a: Tensor, b: Tensor, eq: str) -> tuple[Any, ...]:
    operands, result = eq.split("->")
    left, right = operands.split(",")
    found = {**dict(zip(right, b.shape, strict=True)), **dict(zip(left, a.shape, strict=True))}
    return tuple(found[letter] for letter in result)


def check_einsum(op: str, args: EinsumScaled | EinsumScaledFp8Out) -> None:
    """Dtypes, ranks and sizes of operands and scales; ``eq`` is known."""
    a, b = args.a, args.b
    left, right = args.eq.split("->")[0].split(",")
    for name, x, letters in (("a", a, left), ("b", b, right)):
        _check.dtypes(op, name, x, (_sf.FP8,))
        _check.rank(op, name, x, f"[{', '.join(letters)}]", 3)
    for letter, found in zip(right, b.shape, strict=True):
        if letter in left:
            _check.size(op, f"{letter} of b", found, a.shape[left.index(letter)], f"{letter} of a")
    operands = (("sfa", args.sfa, a, args.recipe_a, "recipe_a"), ("sfb", args.sfb, b, args.recipe_b, "recipe_b"))
    for order, (name, sf, x, recipe, recipe_name) in zip(_order(args.eq), operands, strict=True):
        _check.dtypes(op, name, sf, _sf.SF_DTYPES)
        _check.rank(op, name, sf, "a scale for every block of its operand, or packed [batch, MN, words]", 3)
        batch, mn, k = (x.shape[dim] for dim in order)
        matrices = sf if sf.dtype in _sf.WORDS else sf.permute(order)
        _sf.check_sf(op, name, matrices, (batch,), mn, k, recipe, recipe_name)
    _check.same_device(op, "a", a, sfa=args.sfa, b=b, sfb=args.sfb)


def einsum_product(args: EinsumScaled | EinsumScaledFp8Out) -> Tensor:
    """The product in f32, not rounded."""
    numbers = []
    operands = ((args.a, args.sfa, args.recipe_a), (args.b, args.sfb, args.recipe_b))
    for order, (x, sf, gran) in zip(_order(args.eq), operands, strict=True):
        scales = sf if sf.dtype in _sf.WORDS else sf.permute(order)
        numbers.append(_sf.dequantise(x.permute(order), scales, gran))
    batch, m, n, k = _LETTERS[args.eq]
    return torch.einsum(f"{batch}{m}{k},{batch}{n}{k}->{args.eq.split('->')[1]}", *numbers)


@takes(EinsumScaled)
def _check_args(x: EinsumScaled) -> None:
    op = "einsum_scaled"
    _check.choice(op, "eq", x.eq, _LETTERS)
    check_einsum(op, x)
    _gemm.check_accumulator(op, x.a, x.c, _shape(x.a, x.b, x.eq), x.out_dtype)


@takes(EinsumScaled)
def _reference(x: EinsumScaled) -> Tensor:
    return _sf.owned(_gemm.finish(einsum_product(x), x.c, None, _gemm.result_dtype(x.c, x.out_dtype)))


@takes(EinsumScaled)
def _fake(x: EinsumScaled) -> Tensor:
    return x.a.new_empty(_shape(x.a, x.b, x.eq), dtype=_gemm.result_dtype(x.c, x.out_dtype))


EINSUM_SCALED = OpDef(
    name="einsum_scaled",
    schema=(
        "(Tensor a, Tensor sfa, Tensor b, Tensor sfb, Tensor? c, *, str eq, SymInt[2] recipe_a, SymInt[2] recipe_b, "
        "ScalarType? out_dtype) -> Tensor"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward=NO_BACKWARD,
    tolerance=SCALED_TOLERANCE,
    samples=einsum_scaled_samples,
)
