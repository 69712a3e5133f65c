"""The GEMM ops on the shapes of real models, against what a user would call otherwise.

    python -m benchmarks.gemm                           two shapes, M of 1, 16 and 128: a minute on two cores
    python -m benchmarks.gemm --shapes all              all of them; M of 4096 needs --tokens 4096 and patience
    python -m benchmarks.gemm --ops dense --tokens 1    decoding only

Contenders are timed in turns, so that whatever else the machine does hits all of them alike, and the weights of a call
are not in the caches: in a model they are not either, since all other layers came between. ``--warm`` leaves them in.

Columns: median time; TFLOP/s (2 M N K over it); that as a fraction of the largest rate of a matrix product of torch in
the same turns; bytes of weights, activations and result over the time as a fraction of the rate of ``Tensor.copy_`` in
the same turns; how many times faster than the baseline (the last line of a group); error against the same operands
multiplied in float32 or better, in DeepGEMM's measure, 1 - 2 <x, y> / (<x, x> + <y, y>). Below the table: what our op
costs over calling the kernel itself, on operands so small that nothing else takes time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from types import ModuleType

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks._arguments import count

__all__ = ["SHAPES", "Case", "Contender", "Row", "main", "measure"]

# (N, K) of DeepSeek-V3: what its linear layers multiply a token with.
SHAPES = {
    "kv_a": (576, 7168),
    "q_a + kv_a": (2112, 7168),
    "expert down": (7168, 2048),
    "expert gate + up": (4096, 7168),
    "kv_b": (32768, 512),
    "q_b": (24576, 1536),
    "o": (7168, 16384),
    "router": (256, 7168),
}
SMALL = ("expert down", "expert gate + up")
KINDS = ("dense", "grouped", "einsum")


@dataclass(frozen=True)
class Contender:
    """One way to compute a case. ``nbytes`` is what it has to read and write at least."""

    call: Callable[[], object]
    nbytes: int
    ours: bool = False


@dataclass(frozen=True)
class Case:
    """Contenders that compute the same product up to the rounding of their operands; the last one is the baseline.

    ``truth`` returns the float64 result that belongs to a contender's own operands, or ``None``.
    """

    title: str
    tokens: int
    flops: float
    contenders: dict[str, Contender]
    truth: Callable[[str], Tensor | None]


@dataclass
class Row:
    """One line of the table. Times in milliseconds."""

    title: str
    tokens: int
    name: str
    ours: bool
    median: float
    best: float
    tflops: float
    of_matmul: float
    of_copy: float
    faster: float
    error: float | None
    times: list[float] = field(repr=False)


def difference(x: Tensor, y: Tensor) -> float:
    """DeepGEMM's measure of two results."""
    x, y = x.double().flatten(), y.double().flatten()
    total = float(x @ x + y @ y)
    return 1 - 2 * float(x @ y) / total if total else 0.0


def measure(case: Case, back_end: ModuleType, repeats: int, warm: bool) -> list[Row]:
    """Time every contender and the two probes of the machine, one of each in every turn.

    ``back_end`` has ``timed(call)`` in ms, ``clean()``, after which weights are in no cache, and ``probes()``: names
    beginning with "matmul" and "copy" to (call, flops or bytes).
    """
    probes = back_end.probes()
    calls = {name: call for name, (call, _) in probes.items()} | {n: c.call for n, c in case.contenders.items()}
    errors: dict[str, float | None] = {}
    for name, contender in case.contenders.items():
        out, truth = contender.call(), case.truth(name)
        errors[name] = difference(out, truth) if truth is not None and isinstance(out, Tensor) else None
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            if not warm:
                back_end.clean()
            times[name].append(back_end.timed(call))
    median = {name: statistics.median(t) for name, t in times.items()}
    rate = {
        kind: max(w / median[n] for n, (_, w) in probes.items() if n.startswith(kind)) for kind in ("matmul", "copy")
    }
    baseline = list(case.contenders)[-1]
    return [
        Row(
            title=case.title,
            tokens=case.tokens,
            name=name,
            ours=c.ours,
            median=median[name],
            best=min(times[name]),
            tflops=case.flops / median[name] / 1e9,
            of_matmul=case.flops / median[name] / rate["matmul"],
            of_copy=c.nbytes / median[name] / rate["copy"],
            faster=median[baseline] / median[name],
            error=errors[name],
            times=times[name],
        )
        for name, c in case.contenders.items()
    ]


def overhead(
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]], timed: Callable[..., float]
) -> dict[str, float]:
    """Microseconds that an op costs over its kernel, by op: medians over batches of calls taken in turns."""

    def batch(call: Callable[[], object]) -> float:
        def calls() -> None:
            for _ in range(_BATCH):
                call()

        return timed(calls)

    found = {}
    for name, (op, kernel) in pairs.items():
        times = [(batch(op), batch(kernel)) for _ in range(16)][1:]
        found[name] = (statistics.median(a for a, _ in times) - statistics.median(b for _, b in times)) * 1e3 / _BATCH
    return found


_BATCH = 300


def show(rows: list[Row], costs: dict[str, float], heading: str) -> None:
    table = Table(title=heading)
    right = ("M", "ms", "best", "TFLOP/s", "of matmul", "of copy", "faster by", "error")
    for column in ("product", "M", "contender", *right[1:]):
        table.add_column(column, justify="right" if column in right else "left")
    group: tuple[str, int] | None = None
    for row in rows:
        new = (row.title, row.tokens) != group
        if new and group is not None:
            table.add_section()
        group = (row.title, row.tokens)
        table.add_row(
            row.title if new else "",
            str(row.tokens) if new else "",
            f"[bold]{row.name}[/bold]" if row.ours else row.name,
            f"{row.median:.3f}",
            f"{row.best:.3f}",
            f"{row.tflops:.4g}",
            f"{row.of_matmul:.0%}",
            f"{row.of_copy:.0%}",
            f"{row.faster:.2f}x",
            "" if row.error is None else f"{row.error:.0e}",
        )
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    for name, cost in costs.items():
        console.print(f"{name}: the op costs {cost:.1f} us more than its kernel.")


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock milliseconds of a call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (cpu)")
    parser.add_argument("--ops", choices=KINDS, nargs="+", default=list(KINDS), help="kinds of products (all)")
    parser.add_argument(
        "--shapes",
        choices=("small", "all", *SHAPES),
        nargs="+",
        default=["small"],
        metavar="NAME",
        help=f"small (that is {' and '.join(map(repr, SMALL))}), all, or any of {', '.join(map(repr, SHAPES))} (small)",
    )
    parser.add_argument("--tokens", type=count, nargs="+", default=[1, 16, 128], help="values of M (1 16 128)")
    parser.add_argument("--repeats", type=count, default=9, help="turns per size (9)")
    parser.add_argument("--warm", action="store_true", help="leave weights in the caches between calls")
    parser.add_argument("--json", action="store_true", help="print JSON with all times instead of the table")
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if min(args.tokens) < 1 or args.repeats < 1:
        print("gemm: --tokens and --repeats must be at least 1.", file=sys.stderr)
        return 2
    back_end = importlib.import_module("benchmarks.gemm_cpu" if args.device == "cpu" else "benchmarks.gemm_gpu")
    missing = back_end.missing()
    if missing is not None:
        print(f"gemm: {missing}", file=sys.stderr)
        return 1
    wanted = {"small": SMALL, "all": tuple(SHAPES)}
    shapes = {name: SHAPES[name] for given in args.shapes for name in wanted.get(given, (given,))}
    todo: list[Callable[[], Iterator[Case]]] = back_end.cases(args.ops, shapes, args.tokens)
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress, torch.no_grad():
        task = progress.add_task("measuring", total=len(todo))
        for make in todo:
            # One case's operands at a time: they are large.
            for case in make():
                progress.update(task, description=f"{case.title}, M = {case.tokens}")
                rows += measure(case, back_end, args.repeats, args.warm)
            progress.advance(task)
        costs = overhead(back_end.tiny(), back_end.timed)
    if args.json:
        print(json.dumps({"machine": back_end.heading(), "overhead_us": costs, "rows": [asdict(r) for r in rows]}))
    else:
        show(rows, costs, back_end.heading())
    return 0


if __name__ == "__main__":
    sys.exit(main())
