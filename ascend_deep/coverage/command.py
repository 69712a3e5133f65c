"""``ascend-deep coverage``: the command line. Imports neither torch nor transformers until it runs."""

from __future__ import annotations

import importlib.metadata
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ascend_deep import _paths
from ascend_deep._paths import file_problem, folder_problem

if TYPE_CHECKING:
    from ascend_deep.coverage.cells import Cell, Result
    from ascend_deep.coverage.table import Baseline

__all__ = ["coverage"]

_STATE = Path("out/coverage.jsonl")
_TABLE = "coverage.json"
_STYLES = {"fused": "green", "partial": "yellow", "left": "yellow", "wrong": "bold red", "failed": "bold red"}


def coverage(
    family: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this family of transformers. Repeatable.")
    ] = None,
    third: Annotated[bool, typer.Option("--third", help="Only the representative third of the families.")] = False,
    implementation: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="grouped_mm, batched_mm or prepared. Repeatable.")
    ] = None,
    phase: Annotated[list[str] | None, typer.Option(metavar="NAME", help="inference or training. Repeatable.")] = None,
    shapes: Annotated[list[str] | None, typer.Option(metavar="NAME", help="static or dynamic. Repeatable.")] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Compile whole models, not only their MoE blocks: five times slower.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Worker processes, of one thread each.")] = 1,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one cell may take.")] = 300.0,
    check: Annotated[
        Path | None,
        typer.Option(metavar="BASELINE", help="Write nothing; exit with 1 if a fusion of this file disappeared."),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Where coverage.md and coverage.json go.")] = Path(
        "docs"
    ),
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"Finished cells of a run; default {_STATE}, none for --check.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure cells again that the state file has.")] = False,
    stale: Annotated[
        bool, typer.Option("--stale", help="Take cells of the state file that other sources of this package made.")
    ] = False,
) -> None:
    """Compile every model family of transformers that has experts, and say what is fused and what is not, and why.

    Each family is compiled in 12 ways: grouped_mm, batched_mm or the expert loop after prepare, inference or training,
    static or dynamic shapes; and compared with eager, gradients included. A run that is stopped goes on where it was. A
    run of some cells updates these cells of the table and keeps the others.

    [bold]Examples[/bold]

      ascend-deep coverage --jobs 2
      ascend-deep coverage --family mixtral --family gpt_oss --phase inference
      ascend-deep coverage --third --shapes static --check docs/coverage.json

    Exit code: 0; 1 if a fusion disappeared or a cell differs from eager; 2 for bad input.
    """
    from ascend_deep import cli

    with cli._bad_input():
        wanted = _cells(family, third, implementation, phase, shapes)
        baseline = _read(check) if check is not None else None
        from ascend_deep.coverage.run import State, run

        kept = State(state or (None if check is not None else _STATE), "" if stale else _stamp(whole))
        _look(kept.path, output if check is None else None)
        if fresh:
            kept.clear(c.key for c in wanted)
    start = time.monotonic()
    with _Display(wanted, jobs) as display:
        results = run(wanted, state=kept, listener=display, jobs=jobs, limit=limit, whole=whole)
    counted = Counter(r.status for r in results.values())
    Console(stderr=True).print(
        f"{len(results)} cells in {time.monotonic() - start:.0f} s: "
        + ", ".join(f"{n} {status}" for status, n in counted.most_common())
    )
    if baseline is not None:
        raise typer.Exit(_compare(baseline, list(results.values())))
    _write(output, list(results.values()))
    raise typer.Exit(1 if counted["wrong"] else 0)


def _cells(
    family: list[str] | None,
    third: bool,
    implementation: list[str] | None,
    phase: list[str] | None,
    shapes: list[str] | None,
) -> list[Cell]:
    from ascend_deep.coverage import cells
    from ascend_deep.coverage.families import FAMILIES, find
    from ascend_deep.models import BadInput

    def among(option: str, given: list[str] | None, accepted: Sequence[str]) -> Sequence[str]:
        for name in given or ():
            if name not in accepted:
                raise BadInput(f"--{option} is {name!r}; it takes {', '.join(accepted)}.")
        return [name for name in accepted if name in given] if given else accepted

    chosen = [find(name) for name in family] if family else [f for f in FAMILIES if f.third or not third]
    ways = (
        among("implementation", implementation, cells.IMPLEMENTATIONS),
        among("phase", phase, cells.PHASES),
        among("shapes", shapes, cells.SHAPES),
    )
    return [cell for f in chosen for cell in cells.cells_of(f, *ways)]


def _look(state: Path | None, output: Path | None) -> None:
    """Make the folders of what will be written; raise ``ValueError`` now if it cannot be, or is something else."""
    problems: list[str | None] = []
    if state is not None:
        problems += [folder_problem("the folder of --state", state.parent)]
        problems += [file_problem("--state", state) if state.parent.is_dir() else None]
    if output is not None:
        problems += [folder_problem("--output", output)]
    for problem in problems:
        if problem is not None:
            raise ValueError(problem)
    for folder in (state.parent if state is not None else None, output):
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"the folder {folder} cannot be made: {error.strerror}.") from None
    if state is not None and state.exists():
        _paths.read("--state", state)
    if output is not None and (output / _TABLE).exists():
        _read(output / _TABLE, "the table in --output")


def _read(path: Path, option: str = "--check") -> Baseline:
    from ascend_deep.coverage.table import Baseline

    text = _paths.read(option, path)
    try:
        return Baseline.from_json(text)
    except ValueError as error:
        raise ValueError(f"{option} is {str(path)!r}, which is {error}") from None


def versions() -> dict[str, str]:
    """The packages that decide what is in a cell."""
    return {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "transformers")}


def _stamp(whole: bool) -> str:
    """What finished cells must have been measured with: the packages, our own sources, and what was compiled."""
    from ascend_deep.backend import sources

    return " ".join([*(f"{k}={v}" for k, v in versions().items()), f"sources={sources()}", f"whole={whole}"])


def _write(folder: Path, results: Sequence[Result]) -> None:
    from ascend_deep.coverage.table import Baseline, to_markdown

    data = folder / _TABLE
    baseline = Baseline.of(versions(), results)
    if data.exists():
        baseline = _read(data).updated(baseline)
    folder.mkdir(parents=True, exist_ok=True)
    data.write_text(baseline.to_json(), encoding="utf-8")
    (folder / "coverage.md").write_text(to_markdown(baseline), encoding="utf-8")
    Console(stderr=True).print(f"Wrote {folder / 'coverage.md'} and {data}.")


def _compare(baseline: Baseline, results: Sequence[Result]) -> int:
    from ascend_deep.coverage.check import compare

    console = Console(soft_wrap=True)
    found = compare(baseline, results)
    if dict(baseline.versions) != versions():
        text = ", ".join(f"{k} {v}" for k, v in baseline.versions.items())
        console.print(f"The baseline was measured with {text}.", style="yellow")
    for style, sentences in (("green", found.gained), ("yellow", found.unknown), ("bold red", found.lost)):
        for sentence in sentences:
            console.print(escape(sentence), style=style)
    lost = len(found.lost)
    console.print("No fusion disappeared." if found.ok else f"{lost} {'fusion' if lost == 1 else 'fusions'} lost.")
    return 0 if found.ok else 1


class _Display:
    """A bar for all cells and a line for every worker on a terminal; elsewhere a line for every finished cell."""

    def __init__(self, cells: Sequence[Cell], jobs: int) -> None:
        self._console = Console(stderr=True)
        self._left = {c.key for c in cells}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._all = self._bar.add_task("cells", total=len(cells))
        self._jobs: list[TaskID] = [self._bar.add_task("starting", total=None) for _ in range(jobs)]

    def __enter__(self) -> _Display:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def begin(self, job: int, cell: Cell) -> None:
        if len(self._left) and self._bar.tasks[0].completed == 0:
            self._bar.update(self._all, completed=0)
        self._bar.update(self._jobs[job], description=cell.key)

    def finish(self, job: int, result: Any) -> None:
        self._left.discard(result.cell.key)
        total = self._bar.tasks[0].total or 0
        self._bar.update(self._all, completed=total - len(self._left))
        text = f"[{_STYLES[result.status]}]{result.status:8}[/] {escape(result.cell.key)} {result.seconds:.1f} s"
        if result.status != "fused":
            first = next(iter(result.reasons.values()), "")
            text += f"  [dim]{escape(first[:160])}[/]"
        self._console.print(text, soft_wrap=True, highlight=False)
