"""What checks of vendor calls are written with: the call under examination, and stand-ins for tensors.

Checks read shapes, dtypes, strides and scalars only; tensors may be real, fake, or a ``Spec`` that stands for one
that does not exist yet. A symbolic size is not compared (that would fix the number of tokens in the compiled graph), so
limits on it are left to the vendor's own checks at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.torch_npu import rows
from ascend_deep.native.torch_npu.soc import Target

__all__ = ["Call", "Refused", "Spec", "T", "known", "listed", "named", "transposed"]


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a contiguous tensor that has not been made yet; ``swapped``: with its last two dimensions
    exchanged afterwards."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    swapped: bool = False

    def stride(self) -> tuple[Any, ...]:
        """Strides of a contiguous tensor, or of a transposed view of one."""
        sizes = list(self.shape)
        if self.swapped:
            sizes[-2:] = sizes[:-3:-1]
        strides: list[Any] = [1]
        for size in reversed(sizes[1:]):
            strides.insert(0, strides[0] * size)
        if self.swapped:
            strides[-2:] = strides[:-3:-1]
        return tuple(strides[-len(self.shape) :]) if self.shape else ()


T = Tensor | Spec


class Refused(Exception):
    """Carries the sentence out of a check."""


@dataclass(frozen=True)
class Call:
    """One call under examination: the op and who it is for."""

    op: str
    target: Target

    def row(self, what: str) -> rows.Row | None:
        return rows.limit(self.op, what, self.target)

    def refuse(self, sentence: str, source: str = "") -> None:
        raise Refused(f"torch_npu's {self.op} {sentence}{f' ({source})' if source else ''}.")

    def need(self, ok: bool, sentence: str, source: str = "the vendor's documentation") -> None:
        if not ok:
            self.refuse(sentence, source)

    def within(self, what: str, found: Any, name: str) -> None:
        """``found`` is one of the accepted values of the row ``what``."""
        row = self.row(what)
        if row is not None and known(found) and found not in row.value:
            self.refuse(f"takes {listed(row.value)} for {name}, not {named(found)}", row.source)

    def at_most(self, what: str, found: Any, name: str) -> None:
        row = self.row(what)
        if row is not None and known(found) and found > row.value:
            self.refuse(f"takes at most {row.value} for {name}, not {found}", row.source)

    def at_least(self, what: str, found: Any, name: str) -> None:
        row = self.row(what)
        if row is not None and known(found) and found < row.value:
            self.refuse(f"takes at least {row.value} for {name}, not {found}", row.source)

    def rank(self, name: str, tensor: T, *ranks: int) -> None:
        found = len(tensor.shape)
        self.need(found in ranks, f"takes {listed(ranks)} dimensions for {name}, not {found}")

    def same(self, name: str, found: Any, other: str, wanted: Any) -> None:
        differ = known(found) and known(wanted) and found != wanted
        self.need(not differ, f"takes the same size for {name} and {other}, not {found} and {wanted}")

    def dtype(self, name: str, tensor: T, wanted: torch.dtype) -> None:
        self.need(tensor.dtype == wanted, f"takes {named(wanted)} for {name}, not {named(tensor.dtype)}")

    def contiguous(self, name: str, tensor: T) -> None:
        if isinstance(tensor, Tensor):
            self.need(tensor.is_contiguous(), f"takes {name} contiguous only, and its strides are {tensor.stride()}")


def known(size: Any) -> bool:
    return isinstance(size, (int, torch.dtype)) and not isinstance(size, torch.SymInt)


def named(value: Any) -> str:
    return str(value).removeprefix("torch.")


def listed(values: Sequence[Any]) -> str:
    """``a, b or c``; a long run of integers by its ends."""
    names = [named(v) for v in values]
    if len(names) > 12 and all(isinstance(v, int) for v in values):
        starts = [v for v in values if v - 1 not in values]
        runs = []
        for start in starts:
            end = start
            while end + 1 in values:
                end += 1
            runs.append(f"{start}" if end == start else f"{start} to {end}")
        names = runs
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def transposed(tensor: T) -> bool:
    """Stride 1 in the dimension before the last, as a transposed view of a contiguous tensor has it."""
    if isinstance(tensor, Spec):
        return tensor.swapped
    strides = tensor.stride()
    return strides[-2] == 1 and strides[-1] != 1
