"""The table for people, ``docs/coverage.md``, and for programs, ``docs/coverage.json``: the same results twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ascend_deep.coverage.cells import IMPLEMENTATIONS, OWN, PHASES, PREPARED, SHAPES, Cell, Result
from ascend_deep.coverage.families import FAMILIES

__all__ = ["Baseline", "to_markdown"]

SCHEMA = 1
_MOE = ("moe_route", "moe_experts")


@dataclass(frozen=True)
class Baseline:
    """Results of all cells that were ever measured, with the versions of the packages.

    Attributes:
        versions: package to version.
        cells: key to result; errors and seconds are not kept, they differ from run to run.
    """

    versions: Mapping[str, str]
    cells: Mapping[str, Result]

    @staticmethod
    def of(versions: Mapping[str, str], results: Iterable[Result]) -> Baseline:
        """A baseline of ``results``."""
        kept = {r.cell.key: replace(r, error=0.0, seconds=0.0) for r in results}
        return Baseline(dict(versions), kept)

    def updated(self, newer: Baseline) -> Baseline:
        """This baseline with the cells of ``newer``; cells of other versions or of no family are dropped."""
        names = {f.name for f in FAMILIES}
        old = self.cells if self.versions == newer.versions else {}
        both = {**{k: r for k, r in old.items() if r.cell.family in names}, **newer.cells}
        return Baseline(newer.versions, both)

    def to_json(self) -> str:
        """One cell a line, so that a change of the table is a readable difference."""
        reasons = sorted({text for r in self.cells.values() for text in r.reasons.values()})
        number = {text: i for i, text in enumerate(reasons)}
        lines = []
        for result in _ordered(self.cells.values()):
            data: dict[str, Any] = {"status": result.status, "layers": result.layers, "ops": dict(result.ops)}
            if result.breaks:
                data["breaks"] = result.breaks
            if result.reasons:
                data["reasons"] = {k: number[v] for k, v in result.reasons.items()}
            lines.append(f"  {json.dumps(result.cell.key)}: {json.dumps(data)}")
        head = f'"schema": {SCHEMA},\n"versions": {json.dumps(dict(self.versions))}'
        said = ",\n".join(f"  {json.dumps(text)}" for text in reasons)
        return f'{{\n{head},\n"reasons": [\n{said}\n],\n"cells": {{\n' + ",\n".join(lines) + "\n}\n}\n"

    @staticmethod
    def from_json(text: str) -> Baseline:
        """Inverse of ``to_json``.

        Raises:
            ValueError: the text is something else.
        """
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']!r}")
            cells = {
                key: Result(
                    Cell.parse(key),
                    cell["status"],
                    cell["layers"],
                    cell["ops"],
                    {op: data["reasons"][i] for op, i in cell.get("reasons", {}).items()},
                    breaks=cell.get("breaks", 0),
                )
                for key, cell in data["cells"].items()
            }
            return Baseline(data["versions"], cells)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"not a coverage baseline of version {SCHEMA}: {what}.") from error


def _ordered(results: Iterable[Result]) -> list[Result]:
    """By family as the table has them, then implementation, phase, shapes."""
    families = {f.name: i for i, f in enumerate(FAMILIES)}
    ways = [*IMPLEMENTATIONS, OWN], PHASES, SHAPES

    def place(result: Result) -> tuple[int, ...]:
        c = result.cell
        at = (c.implementation, c.phase, c.shapes)
        return (families.get(c.family, len(families)), *(w.index(x) for w, x in zip(ways, at, strict=True)))

    return sorted(results, key=place)


# -- the page ---------------------------------------------------------------------------------------------------------
_HEAD = """# Coverage

Every model family of transformers that has experts, compiled with `backend="ascend_deep"` in {ways} ways: written by
`make coverage`, not by hand. Models are tiny and random, weights, biases and scales are not at their defaults, and
every cell is compared with eager: the output, and in training the gradient of every parameter. Measured with torch
{torch} and transformers {transformers}; the same numbers for programs are in [coverage.json](coverage.json).

{summary}

| in a cell | means |
|---|---|
| ✓ | the choice of experts (`moe_route`) and the experts (`moe_experts`) of every MoE layer are fused |
| R | only the choice of experts is fused |
| E | only the experts are fused |
| ◐ | some layers are fused and others are not |
| · | nothing is fused |
| ✗ | compiled, but not equal to eager |
| ! | crashed, hung, or does not compile |

Four signs stand for inference static, inference dynamic, training static, training dynamic; one sign for all four.
*Prepared* is the Python loop over experts after `ascend_deep.prepare(model)`. Families whose experts have only their
own code have one implementation, shown under *grouped_mm*. Compiled are the MoE blocks of a model, in place, and the
rest of it runs eagerly; `ascend-deep coverage --whole` compiles whole models. Dynamic cells are called with two sizes.
*Layers* are MoE layers. Numbers in the last column lead to the reasons below the table.
"""


def to_markdown(baseline: Baseline) -> str:
    """The page."""
    by_family: dict[str, dict[str, Result]] = {}
    for result in _ordered(baseline.cells.values()):
        by_family.setdefault(result.cell.family, {})[result.cell.way] = result
    notes: dict[str, int] = {}
    rows = []
    for family, cells in by_family.items():
        columns = [_signs(cells, name) for name in IMPLEMENTATIONS]
        own = _signs(cells, OWN)
        if own:
            columns[0] = own
        others = _others(cells.values())
        numbers = _numbers(cells.values(), notes)
        layers = max(r.layers for r in cells.values())
        rows.append(f"| {family} | {layers} | {' | '.join(c or '–' for c in columns)} | {others} | {numbers} |")
    ways = len(IMPLEMENTATIONS) * len(PHASES) * len(SHAPES)
    head = _HEAD.format(
        ways=ways,
        torch=baseline.versions.get("torch", "?"),
        transformers=baseline.versions.get("transformers", "?"),
        summary=_summary(baseline, by_family),
    )
    table = [
        "| family | layers | grouped_mm | batched_mm | prepared | other ops | why not |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    reasons = [f"{i}. {text}" for text, i in notes.items()]
    parts = [head, "\n".join(table)]
    if reasons:
        parts.append("## Why not\n\n" + "\n".join(reasons))
    return "\n\n".join(p.strip("\n") for p in parts) + "\n"


def _summary(baseline: Baseline, by_family: Mapping[str, Mapping[str, Result]]) -> str:
    """What a reader wants to know first."""
    counted = Counter(r.status for r in baseline.cells.values())
    whole = [f for f, cells in by_family.items() if all(r.status == "fused" for r in cells.values())]
    none = [f for f, cells in by_family.items() if all(r.status in ("left", "failed") for r in cells.values())]
    lines = [
        f"* **{len(whole)} of {len(by_family)} families** are fused whole in every cell.",
        f"* {counted['fused']} of {sum(counted.values())} cells are fused whole, {counted['partial']} in part, "
        f"{counted['left']} are left as they are, {counted['wrong']} differ from eager, {counted['failed']} failed.",
    ]
    prepared = {f: [r for r in cells.values() if r.cell.implementation == PREPARED] for f, cells in by_family.items()}
    done = [f for f, cells in prepared.items() if cells and all(r.status == "fused" for r in cells)]
    lines.insert(1, f"* **{len(done)} of {len(by_family)} families** are fused whole after `prepare`.")
    known = {family.name: family.beyond for family in FAMILIES}
    beyond = [
        f
        for f, cells in prepared.items()
        if f not in done and cells and all(set(r.reasons) <= set(known.get(f, ())) for r in cells)
    ]
    if beyond:
        lines.append(
            f"* In {', '.join(beyond)} all is fused that the ops are made for; the reasons below say what is left."
        )
    if none:
        lines.append(f"* Nothing is fused in {', '.join(none)}.")
    return "\n".join(lines)


def sign(result: Result) -> str:
    """A cell of the table in one character."""
    if result.status == "wrong":
        return "✗"
    if result.status == "failed":
        return "!"
    route, experts = (result.ops.get(op, 0) for op in _MOE)
    need = result.layers
    if route >= need and experts >= need:
        return "✓"
    if not route and not experts:
        return "·"
    if route >= need and not experts:
        return "R"
    if experts >= need and not route:
        return "E"
    return "◐"


def _signs(cells: Mapping[str, Result], implementation: str) -> str:
    found = [cells.get(f"{implementation}/{phase}/{shapes}") for phase in PHASES for shapes in SHAPES]
    if not any(found):
        return ""
    marks = [sign(r) if r is not None else " " for r in found]
    return marks[0] if len(set(marks)) == 1 else " ".join(marks)


def _others(results: Iterable[Result]) -> str:
    names = {op for r in results for op in r.ops if op not in _MOE}
    return ", ".join(sorted(names))


def _numbers(results: Iterable[Result], notes: dict[str, int]) -> str:
    """The numbers of the reasons of a family; a reason that only repeats for other cells is named once."""
    own: list[int] = []
    for result in results:
        for op, text in result.reasons.items():
            way = "" if op in _MOE else f" ({result.cell.way.replace('/', ', ')})"
            note = f"{f'`{op}`: ' if op else ''}{text}{way}"
            number = notes.setdefault(note, len(notes) + 1)
            if number not in own:
                own.append(number)
    return ", ".join(map(str, own))


def missing(baseline: Baseline, cells: Sequence[Cell]) -> list[Cell]:
    """Cells that a whole table has and this one has not."""
    return [c for c in cells if c.key not in baseline.cells]
