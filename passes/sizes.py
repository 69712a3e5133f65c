"""Sizes to run a region at: what stands for a size in a program, and the mapping to small ones."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

import sympy
import torch
from torch import fx

__all__ = ["Dims", "Ref", "Size", "few", "give_leading", "give_product", "give_symbols"]


@dataclass(frozen=True)
class Ref:
    """Argument of a step: the result of an input (negative: ``-1 - i``) or of an earlier step."""

    index: int


@dataclass(frozen=True)
class Size:
    """Argument of a step: a symbolic size, as an expression of the graph's size symbols."""

    expr: str


@dataclass(frozen=True)
class Dims:
    """Sizes to run a region at: a value per size symbol, and a replacement per literal size."""

    symbols: Mapping[str, int] = field(default_factory=dict)
    literals: Mapping[int, int] = field(default_factory=dict)

    def size(self, value: Any) -> int:
        """The size to use for an int, SymInt or expression of the original graph."""
        if isinstance(value, torch.SymInt):
            value = value.node.expr
        if isinstance(value, sympy.Expr):
            if not value.free_symbols:
                return self.literals.get(int(value), int(value))
            return self.size_of_text(str(value))
        return self.literals.get(value, value)

    def size_of_text(self, expr: str) -> int:
        """The size of an expression in text form, e.g. ``"2*s33*s50"``."""
        code = _arithmetic(expr)
        if code is not None:
            return int(eval(code, {"__builtins__": {}}, dict(self.symbols)))
        parsed = sympy.sympify(expr, locals=_Symbols(expr))
        return int(parsed.subs({s: self.symbols[str(s)] for s in parsed.free_symbols}))

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape that ``node`` has at these sizes."""
        return tuple(self.size(s) for s in node.meta["val"].shape)

    @staticmethod
    def plan(pairs: Iterable[tuple[Any, int]]) -> Dims | None:
        """Sizes that map each original size (int or SymInt) to the wanted one; ``None`` if two wishes conflict.

        A symbolic original is solved by giving its first free symbol the wanted value and the others 1; later
        pairs of the same expression must then agree.
        """
        symbols: dict[str, int] = {}
        literals: dict[int, int] = {}
        for original, wanted in pairs:
            expr = original.node.expr if isinstance(original, torch.SymInt) else original
            if isinstance(expr, sympy.Expr) and expr.free_symbols:
                names = sorted(str(s) for s in expr.free_symbols)
                for i, name in enumerate(n for n in names if n not in symbols):
                    symbols[name] = wanted if i == 0 else 1
                if Dims(symbols, literals).size(expr) != wanted:
                    return None
            elif literals.setdefault(int(expr), wanted) != wanted:
                return None
        return Dims(symbols, literals)


@lru_cache(maxsize=4096)
def _arithmetic(expr: str) -> CodeType | None:
    """Code of an expression that holds only size symbols, integers, ``+ - *`` and parentheses; sympy is slow."""
    if re.fullmatch(r"(?:[suz]\d+|\d+|[-+*() ])+", expr) is None:
        return None
    return compile(expr, "size", "eval")


class _Symbols(dict):  # type: ignore[type-arg]
    """Names of size symbols for ``sympify``: every identifier is a plain positive integer symbol."""

    def __init__(self, expr: str) -> None:
        super().__init__({n: sympy.Symbol(n, positive=True, integer=True) for n in re.findall(r"\b[suz]\d+\b", expr)})


def few(first: int) -> Iterator[int]:
    """Small sizes without end, to be given to the sizes of a block: ``first``, then others."""
    return itertools.chain((first, 2, 3, 4, 6), itertools.count(7))


def give_symbols(expr: sympy.Expr, small: Iterator[int], symbols: dict[str, int]) -> None:
    """A value for every symbol of a size that has none yet."""
    for name in sorted(str(s) for s in expr.free_symbols):
        if name not in symbols:
            symbols[name] = next(small)


def give_leading(
    sizes: Iterable[int | sympy.Expr], small: Iterator[int], literals: dict[int, int], symbols: dict[str, int]
) -> None:
    """Values for the leading sizes of a tensor, where they have none yet. Literal sizes below 9 stay."""
    for s in sizes:
        if isinstance(s, int):
            literals.setdefault(s, s if s < 9 else next(small))
        else:
            give_symbols(s, small, symbols)


def give_product(sizes: Sequence[int | sympy.Expr], literals: dict[int, int]) -> bool:
    """The value of several literal sizes joined to one dim; ``False`` if it has another one already."""
    whole = [s for s in sizes if isinstance(s, int)]
    if len(whole) < len(sizes) or len(whole) < 2:
        return True
    wanted = math.prod(literals[s] for s in whole)
    return literals.setdefault(math.prod(whole), wanted) == wanted
