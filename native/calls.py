"""Calls of ops with long argument lists, each as one value: what checks, reference bodies and providers take.

    @takes(MGroupedScaled)
    def limits(target: Target, x: MGroupedScaled) -> str | None: ...

is called like any limit, with the arguments of the op's schema, and reads ``x.layout``. Fields are in the schema's
order, tensors before attributes; what they hold is said where the op is defined, in ``ops/``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

__all__ = [
    "EinsumScaled",
    "EinsumScaledFp8Out",
    "GemmScaled",
    "GemmScaledAcc",
    "GemmScaledFp8Out",
    "GemmScaledOut",
    "KGroupedBf16",
    "KGroupedBf16Acc",
    "KGroupedScaled",
    "KGroupedScaledAcc",
    "MGroupedBf16",
    "MGroupedScaled",
    "MaskedScaled",
    "PackSf",
    "takes",
]

R = TypeVar("R")


class GemmScaled(NamedTuple):
    """A call of ``gemm_scaled``."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    c: Tensor | None
    recipe_a: Sequence[int]
    recipe_b: Sequence[int]
    layout: str
    out_dtype: torch.dtype | None
    alpha: float | None


class GemmScaledOut(NamedTuple):
    """A call of ``gemm_scaled_out``."""

    d: Tensor
    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    c: Tensor | None
    recipe_a: Sequence[int]
    recipe_b: Sequence[int]
    layout: str
    alpha: float | None


class GemmScaledAcc(NamedTuple):
    """A call of ``gemm_scaled_acc_``."""

    d: Tensor
    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    recipe_a: Sequence[int]
    recipe_b: Sequence[int]
    layout: str


class GemmScaledFp8Out(NamedTuple):
    """A call of ``gemm_scaled_fp8out``."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    recipe_a: Sequence[int]
    recipe_b: Sequence[int]
    layout: str
    clamp: float | None
    sf_format: str


class EinsumScaled(NamedTuple):
    """A call of ``einsum_scaled``."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    c: Tensor | None
    eq: str
    recipe_a: Sequence[int]
    recipe_b: Sequence[int]
    out_dtype: torch.dtype | None


class EinsumScaledFp8Out(NamedTuple):
    """A call of ``einsum_scaled_fp8out``."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    eq: str
    recipe_a: Sequence[int]
    recipe_b: Sequence[int]
    clamp: float | None
    sf_format: str


class MGroupedBf16(NamedTuple):
    """A call of ``m_grouped_gemm_bf16``."""

    a: Tensor
    b: Tensor
    grouped_layout: Tensor
    layout: str
    grouping: str
    alignment: int
    expected_m: int | None
    zero_padding: bool
    out_dtype: torch.dtype | None


class MGroupedScaled(NamedTuple):
    """A call of ``m_grouped_gemm_scaled``."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    grouped_layout: Tensor
    recipe_a: Sequence[int]
    recipe_b: Sequence[int]
    layout: str
    grouping: str
    alignment: int
    expected_m: int | None
    zero_padding: bool
    out_dtype: torch.dtype | None


class MaskedScaled(NamedTuple):
    """A call of ``m_grouped_gemm_scaled_masked``."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    masked_m: Tensor
    expected_m: int
    recipe_a: Sequence[int]
    recipe_b: Sequence[int]


class KGroupedBf16(NamedTuple):
    """A call of ``k_grouped_gemm_bf16``."""

    a: Tensor
    b: Tensor
    grouped_layout: Tensor
    c: Tensor | None
    ks: Sequence[int] | None
    grouping: str
    alignment: int
    out_dtype: torch.dtype | None


class KGroupedBf16Acc(NamedTuple):
    """A call of ``k_grouped_gemm_bf16_acc_``."""

    d: Tensor
    a: Tensor
    b: Tensor
    grouped_layout: Tensor
    ks: Sequence[int] | None
    grouping: str
    alignment: int


class KGroupedScaled(NamedTuple):
    """A call of ``k_grouped_gemm_scaled``."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    grouped_layout: Tensor
    c: Tensor | None
    gran_k: int
    ks: Sequence[int] | None
    grouping: str
    alignment: int
    out_dtype: torch.dtype | None


class KGroupedScaledAcc(NamedTuple):
    """A call of ``k_grouped_gemm_scaled_acc_``."""

    d: Tensor
    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    grouped_layout: Tensor
    gran_k: int
    ks: Sequence[int] | None
    grouping: str
    alignment: int


class PackSf(NamedTuple):
    """A call of ``pack_sf``."""

    sf: Tensor
    grouped_layout: Tensor | None
    mn: int
    k: int
    gran: Sequence[int]
    target: str
    grouping: str
    alignment: int


@functools.cache
def _parameters(call: type[tuple[Any, ...]]) -> tuple[inspect.Parameter, ...]:
    """The arguments as every schema has them: tensors by position, attributes by keyword."""
    hints = get_type_hints(call)
    tensors = [name for name, hint in hints.items() if hint is Tensor or Tensor in get_args(hint)]
    return tuple(
        inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD if name in tensors else inspect.Parameter.KEYWORD_ONLY
        )
        for name in hints
    )


def takes(call: type[tuple[Any, ...]]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """The function with the op's arguments in place of its last parameter, a ``call``; and with their signature."""

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        *before, _ = inspect.signature(function).parameters.values()
        count = len(before)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> R:
            return function(*args[:count], call(*args[count:], **kwargs))

        run.__signature__ = inspect.Signature([*before, *_parameters(call)])  # type: ignore[attr-defined]
        return run

    return decorate
