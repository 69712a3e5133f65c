"""Calls of ops with long argument lists, each as one value: what providers take where several functions read a call.

    @takes(MGroupedScaled)
    def limits(target: Target, x: MGroupedScaled) -> str | None: ...

is called like any limit, with the arguments of the op's schema, and reads ``x.layout``. Fields are in the schema's
order; what they hold is said where the op is defined, in ``ops/``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["GemmScaled", "MGroupedScaled", "MaskedScaled", "takes"]

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


def takes(call: type[tuple[Any, ...]]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """The function with the op's arguments in place of its last parameter, a ``call``."""

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        before = len(inspect.signature(function).parameters) - 1

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> R:
            return function(*args[:before], call(*args[before:], **kwargs))

        return run

    return decorate
