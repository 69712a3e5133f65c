"""One cell of the table: a family compiled in one way; and what came of it, as one line of JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ascend_deep.coverage.families import Family

__all__ = ["IMPLEMENTATIONS", "OWN", "PHASES", "PREPARED", "SHAPES", "Cell", "Result", "cells_of"]

PREPARED, OWN = "prepared", "own"
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", PREPARED)
PHASES = ("inference", "training")
SHAPES = ("static", "dynamic")


@dataclass(frozen=True)
class Cell:
    """``implementation``: as transformers takes it, ``"own"`` for experts that have only their own code, or
    ``"prepared"``: the expert loop (``"eager"``) after ``ascend_deep.prepare``."""

    family: str
    implementation: str
    phase: str
    shapes: str

    @property
    def key(self) -> str:
        """The cell in one word."""
        return "/".join((self.family, self.implementation, self.phase, self.shapes))

    @property
    def way(self) -> str:
        """The key without the family."""
        return "/".join((self.implementation, self.phase, self.shapes))

    @staticmethod
    def parse(key: str) -> Cell:
        """Inverse of ``key``."""
        return Cell(*key.split("/"))


@dataclass(frozen=True)
class Result:
    """What was measured in one cell.

    Attributes:
        status: ``"fused"`` (choice and experts of every MoE layer, equal to eager), ``"partial"``, ``"left"``,
            ``"wrong"`` (compiled, but not equal to eager) or ``"failed"`` (crashed, hung, or raised).
        layers: MoE layers of the model.
        ops: op to number of sites in the compiled graphs.
        reasons: op to why it is missing somewhere, one sentence each; key ``""`` for the cell as a whole.
        error: largest difference from eager, relative to the largest value; gradients included.
        breaks: graph breaks.
        seconds: of the whole cell.
    """

    cell: Cell
    status: str
    layers: int = 0
    ops: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    error: float = 0.0
    breaks: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**dataclasses.asdict(self), "cell": self.cell.key}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Result:
        """Inverse of ``to_dict``.

        Raises:
            KeyError, TypeError: ``data`` is something else.
        """
        return Result(**{**data, "cell": Cell.parse(data["cell"])})

    def to_line(self) -> str:
        """One line of JSON, without the line's end."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @staticmethod
    def failed(cell: Cell, reason: str, seconds: float = 0.0) -> Result:
        """The result of a cell that came to no result."""
        return Result(cell, "failed", reasons={"": reason}, seconds=seconds)


def cells_of(
    family: Family,
    implementations: Sequence[str] = IMPLEMENTATIONS,
    phases: Sequence[str] = PHASES,
    shapes: Sequence[str] = SHAPES,
) -> Iterator[Cell]:
    """The cells of ``family``. Families with their own experts have one implementation beside ``"prepared"``."""
    names = list(implementations)
    if family.own_experts:
        named = [n for n in names if n != PREPARED]
        names = [OWN] * bool(named) + [n for n in names if n == PREPARED]
    for name in names:
        for phase in phases:
            for shape in shapes:
                yield Cell(family.name, name, phase, shape)
