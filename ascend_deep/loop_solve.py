"""Which of an expert's parameters is which, and with what activation: found by comparing numbers.

An ``Assignment`` says which families are gate, up and down, whether each matrix is stored as ``nn.Linear`` stores it
([out, in]) or transposed, and which vectors are their biases. ``expected`` computes the mixture of experts from an
assignment and a member of the activation family in plain torch, and is the yardstick for the loops.
"""

from __future__ import annotations

import inspect
import itertools
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep.loop_families import Family

__all__ = ["Assignment", "Matrix", "assignments", "constants", "expected", "preactivation", "whole_numbers"]


@dataclass(frozen=True)
class Matrix:
    """A family of matrices; ``transposed`` ones are stored [in, out]."""

    family: Family
    transposed: bool

    def of(self, parameters: Mapping[str, Tensor], expert: int) -> Tensor:
        """[out, in] of one expert."""
        value = self.family.of(parameters, expert)
        return value.t() if self.transposed else value


@dataclass(frozen=True)
class Assignment:
    """The parts of an expert.

    Attributes:
        w13: the first product: one matrix, or gate and up.
        w2: the second.
        b13: biases of the first, as many as matrices, or none.
        b2: bias of the second.
        gated: the first product yields a gate and an up half.
    """

    w13: tuple[Matrix, ...]
    w2: Matrix
    b13: tuple[Family, ...]
    b2: Family | None
    gated: bool

    @property
    def families(self) -> tuple[Family, ...]:
        """Every family that takes part."""
        return (*(m.family for m in self.w13), self.w2.family, *self.b13, *((self.b2,) if self.b2 else ()))

    @property
    def experts(self) -> int:
        """How many experts this process has."""
        return self.w2.family.experts

    @property
    def offset(self) -> int:
        """Number of the first of them."""
        return self.w2.family.offset


def assignments(found: Sequence[Family], hidden: int) -> Iterator[Assignment]:
    """Every way in which the families can be an expert for tokens of size ``hidden``; all of them must be used."""
    if len({(f.experts, f.offset) for f in found}) != 1:
        return
    matrices = [f for f in found if len(f.shape) == 2]
    vectors = [f for f in found if len(f.shape) == 1]
    if len(matrices) not in (2, 3) or len(vectors) > len(matrices) or len(matrices) + len(vectors) != len(found):
        return
    for order in itertools.permutations(matrices):
        for flags in itertools.product((False, True), repeat=len(order)):
            *first, second = (Matrix(f, t) for f, t in zip(order, flags, strict=True))
            if any(_sizes(m)[1] != hidden for m in first) or _sizes(second)[0] != hidden:
                continue
            rows, width = sum(_sizes(m)[0] for m in first), _sizes(second)[1]
            if len({_sizes(m)[0] for m in first}) != 1 or rows not in (
                (width, 2 * width) if len(first) == 1 else (2 * width,)
            ):
                continue
            for b13, b2 in _biases(vectors, first, hidden):
                yield Assignment(tuple(first), second, b13, b2, rows == 2 * width)


def _sizes(matrix: Matrix) -> tuple[int, int]:
    a, b = matrix.family.shape
    return (b, a) if matrix.transposed else (a, b)


def _biases(
    vectors: Sequence[Family], first: Sequence[Matrix], hidden: int
) -> Iterator[tuple[tuple[Family, ...], Family | None]]:
    size = _sizes(first[0])[0]
    for order in itertools.permutations(vectors):
        if len(order) in (0, len(first)) and all(f.shape == (size,) for f in order):
            yield order, None
        front, last = order[:-1], order[-1:]
        sizes = [(size,) for _ in front] + [(hidden,) for _ in last]
        if len(order) in (1, len(first) + 1) and [f.shape for f in order] == sizes:
            yield front, last[0]


def preactivation(a: Assignment, parameters: Mapping[str, Tensor], expert: int, x: Tensor) -> Tensor:
    """[T, N] of x [T, H]: gate and up of one expert, gate first unless they are one matrix that interleaves them."""
    h = torch.cat([x @ m.of(parameters, expert).t() for m in a.w13], dim=-1)
    return h + torch.cat([f.of(parameters, expert) for f in a.b13]) if a.b13 else h


def expected(
    a: Assignment,
    member: Any,
    parameters: Mapping[str, Tensor],
    x: Tensor,
    idx: Tensor,
    weights: Tensor,
    on_input: bool,
) -> Tensor:
    """What ``moe_experts`` computes, [T, H] in the dtype of ``x``; differentiable.

    Args:
        member: an ``Activated``.
        x, idx, weights: [T, H], [T, K], [T, K]. Ids of experts elsewhere contribute zero.
    """
    out = torch.zeros_like(x)
    for expert in range(a.experts):
        rows, slots = torch.where(idx == expert + a.offset)
        if rows.numel() == 0:
            continue
        scale = weights[rows, slots, None].to(x.dtype)
        taken = x[rows] * scale if on_input else x[rows]
        y = member.apply(preactivation(a, parameters, expert, taken), a.gated) @ a.w2.of(parameters, expert).t()
        y = y + a.b2.of(parameters, expert) if a.b2 else y
        out = out.index_add(0, rows, y if on_input else y * scale)
    return out


def constants(module: nn.Module) -> list[float]:
    """Numbers that the module, what it holds, its configs and its code carry: candidates for limits and factors."""
    found: dict[float, None] = {}
    for name, value in _attributes(module):
        # Whole numbers are sizes and counts unless the name says otherwise.
        if isinstance(value, float) or any(word in name for word in ("limit", "clamp", "alpha")):
            found.setdefault(abs(float(value)))
    for value in _code(module):
        found.setdefault(abs(float(value)))
    return [n for n in found if 0 < n < 1e4]


def whole_numbers(module: nn.Module) -> list[int]:
    """Whole numbers that its attributes and its code carry: a capacity, or a number of tokens, may be among them."""
    values = [*(v for _, v in _attributes(module)), *_code(module)]
    return list(dict.fromkeys(int(v) for v in values if float(v).is_integer()))


def _attributes(module: nn.Module) -> Iterator[tuple[str, int | float]]:
    for part in module.modules():
        for name, value in list(vars(part).items()):
            fields = getattr(value, "__dict__", {}) if "config" in name or "args" in name else {}
            for key, number in ((name, value), *fields.items()):
                if _is_number(number) and key != "training":
                    yield key, number


def _code(module: nn.Module) -> Iterator[int | float]:
    """Constants of the functions of all classes in the module, and of functions of the same files that they call."""
    seen: set[int] = set()
    for kind in dict.fromkeys(type(part) for part in module.modules()):
        if kind.__module__.startswith("torch.nn."):
            continue
        todo = [f for base in kind.__mro__ if not base.__module__.startswith("torch.") for f in vars(base).values()]
        while todo:
            function: Any = todo.pop()
            function = inspect.unwrap(function) if callable(function) else function
            if not isinstance(function, types.FunctionType) or id(function) in seen or function.__name__ == "__init__":
                continue
            seen.add(id(function))
            code = [function.__code__]
            while code:
                for value in (current := code.pop()).co_consts:
                    if isinstance(value, types.CodeType):
                        code.append(value)
                    elif _is_number(value):
                        yield value
                names = (function.__globals__.get(n) for n in current.co_names)
                todo += [f for f in names if getattr(f, "__module__", None) == function.__module__]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
