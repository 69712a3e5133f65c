"""The indexer: ``mqa_topk`` and ``mqa_logits`` against eager PyTorch and Inductor, in time and in peak memory.

    python benchmarks/indexer.py
    python benchmarks/indexer.py --case prefill --dtype bf16 --threads 2 --json indexer.json

All contenders compute what models write, ``relu(q @ k^T * scale)``, weighted over the heads, then the top-k:

    eager, inductor    the plain spelling, uncompiled and compiled
    mqa_topk           one op, no [S, H, T] and no [S, T]
    mqa_logits         the scores alone (no top-k)

They are timed in turns, so that whatever else the machine does hits all of them alike; ratios are of medians. The floor
is the number of multiplications at the rate of the best large float32 matrix product measured in the same turns. Peak
memory is that of one call in a process of its own, beyond what the process held before (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ascend_deep import ops

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """S queries of H heads over T keys of D elements; ``causal``: the last query sees all keys, the others fewer."""

    queries: int
    keys: int
    heads: int = 64
    depth: int = 128
    topk: int = 2048
    causal: bool = False


CASES = {
    "prefill": Case(64, 8192),
    "self": Case(1024, 1024, causal=True),
    "decode": Case(1, 8192),
    "decode-long": Case(1, 65536),
    "chunk-long": Case(16, 65536),
    "small-heads": Case(64, 8192, heads=8, depth=64, topk=512),
}
CONTENDERS = ("eager", "inductor", "mqa_topk", "mqa_logits")


@dataclass(frozen=True)
class Row:
    """One contender on one case. Milliseconds, bytes; ratios over eager and over Inductor are how much faster it is."""

    case: str
    dtype: str
    contender: str
    median: float
    best: float
    over_eager: float
    over_inductor: float
    over_floor: float
    peak_bytes: int | None
    wrong: int


def plain(q: Tensor, kv: Tensor, weights: Tensor, mask: Tensor | None, depth: int, heads: int, topk: int) -> Tensor:
    """The indexer of Hugging Face's DeepSeek-V3.2."""
    scores = torch.relu(torch.matmul(q.float(), kv.transpose(-1, -2).float().unsqueeze(1)) * depth**-0.5)
    index = torch.matmul((weights.float() * heads**-0.5).unsqueeze(-2), scores).squeeze(-2)
    if mask is not None:
        index = index.masked_fill(~mask, -torch.inf)
    return index.topk(min(topk, index.shape[-1]), dim=-1).indices.to(torch.int32)


def operands(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, kv, weights and the causal mask, random, the same for all contenders."""
    g = torch.Generator().manual_seed(3)
    q = torch.randn(1, case.queries, case.heads, case.depth, generator=g).to(dtype)
    kv = torch.randn(1, case.keys, case.depth, generator=g).to(dtype)
    weights = torch.randn(1, case.queries, case.heads, generator=g)
    visible = torch.ones(1, case.queries, case.keys, dtype=torch.bool).tril(case.keys - case.queries)
    return q, kv, weights, visible if case.causal else None


def contender(name: str, case: Case, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A call without arguments that gives indices, or scores for ``mqa_logits``."""
    q, kv, weights, mask = operands(case, dtype)
    scale, topk = case.depth**-0.5, min(case.topk, case.keys)
    if name in ("eager", "inductor"):
        function = plain if name == "eager" else torch.compile(plain, fullgraph=True)
        return lambda: function(q, kv, weights, mask, case.depth, case.heads, case.topk)
    if name == "mqa_logits":
        return lambda: ops.mqa_logits(q, kv, weights * case.heads**-0.5, mask=mask, scale=scale)
    return lambda: ops.mqa_topk(
        q,
        kv,
        weights * case.heads**-0.5,
        mask=mask,
        topk=topk,
        scale=scale,
        outside="rank_last",
        return_scores=False,
        index_dtype=torch.int32,
    )[1]


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_of_this_process(name: str, case: str, dtype: str) -> int:
    """Bytes that the first call of a contender needs beyond its operands. Compiled code is warmed up on a copy."""
    call = contender(name, CASES[case], DTYPES[dtype])
    if name == "inductor":
        call()  # compiles; what it allocated is free again, but has been the peak
    else:
        contender(name, Case(2, 64, heads=2, depth=16, topk=4), DTYPES[dtype])()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    call()
    return max(resident("VmHWM") - before, 0)


def peak(name: str, case: str, dtype: str, threads: int) -> int | None:
    """The same in a fresh process; ``None`` where the peak cannot be measured."""
    command = [sys.executable, __file__, "--peak-of", name, "--case", case, "--dtype", dtype, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) if done.returncode == 0 else None


def differing(case: Case, dtype: torch.dtype, ours: Tensor) -> int:
    """Rows whose set is wrong by more than the rounding of f32 sums explains, against float64."""
    q, kv, weights, mask = operands(case, dtype)
    wrong = 0
    for s in range(0, case.queries, max(case.queries // 8, 1)):
        p = torch.relu(q[0, s].double() @ kv[0].double().t() * case.depth**-0.5)
        score = (weights[0, s].double() * case.heads**-0.5) @ p
        if mask is not None:
            score = score.masked_fill(~mask[0, s], -torch.inf)
        inside = torch.zeros(case.keys, dtype=torch.bool)
        inside[ours[0, s].long()] = True
        margin = 1e-5 * float(score[score.isfinite()].abs().max())
        complete = int(inside.sum()) == ours.shape[-1]
        wrong += not complete or bool(score[~inside].amax() > score[inside].amin() + margin)
    return wrong


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure(name: str, dtype: str, repeats: int, threads: int, memory: bool) -> list[Row]:
    """Times all contenders on one case, in turns."""
    case = CASES[name]
    calls: dict[str, Callable[[], object]] = {c: contender(c, case, DTYPES[dtype]) for c in CONTENDERS}
    square = torch.randn(1536, 1536)
    calls["floor"] = lambda: square @ square
    wrong: dict[str, int] = {}
    for c, call in calls.items():
        result = call()
        wrong[c] = 0
        if isinstance(result, Tensor) and result.dtype == torch.int32 and case.keys > case.topk:
            wrong[c] = differing(case, DTYPES[dtype], result)
    times: dict[str, list[float]] = {c: [] for c in calls}
    for _ in range(repeats):
        for c, call in calls.items():
            times[c].append(timed(call))
    rate = 2 * 1536**3 / min(times["floor"])
    pairs = case.queries * case.keys - (case.queries * (case.queries - 1) // 2 if case.causal else 0)
    floor = 2 * pairs * case.heads * case.depth / rate
    median = {c: statistics.median(t) for c, t in times.items()}
    return [
        Row(
            case=name,
            dtype=dtype,
            contender=c,
            median=median[c],
            best=min(times[c]),
            over_eager=median["eager"] / median[c],
            over_inductor=median["inductor"] / median[c],
            over_floor=min(times[c]) / floor,
            peak_bytes=peak(c, name, dtype, threads) if memory else None,
            wrong=wrong[c],
        )
        for c in CONTENDERS
    ]


def table(rows: Sequence[Row]) -> Table:
    out = Table(title="Indexer on the CPU")
    for heading in ("case", "dtype", "contender", "ms", "best", "× eager", "× inductor", "× floor", "peak MB", "wrong"):
        out.add_column(heading, justify="left" if heading in ("case", "dtype", "contender") else "right")
    last = ("", "")
    for row in rows:
        if (row.case, row.dtype) != last and last != ("", ""):
            out.add_section()
        last = (row.case, row.dtype)
        out.add_row(
            row.case,
            row.dtype,
            row.contender,
            f"{row.median:.1f}",
            f"{row.best:.1f}",
            f"{row.over_eager:.2f}",
            f"{row.over_inductor:.2f}",
            f"{row.over_floor:.2f}",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}",
            str(row.wrong),
        )
    return out


def count(text: str) -> int:
    """A number of at least 1 from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is given; it must be at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="may be repeated (default: all)")
    parser.add_argument("--dtype", action="append", choices=sorted(DTYPES), help="may be repeated (default: f32)")
    parser.add_argument("--repeats", type=count, default=9, help="turns (default: %(default)s)")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--peak-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.json and not args.json.parent.is_dir():
        parser.error(f"argument --json: the folder of {args.json} does not exist")
    torch.set_num_threads(args.threads)
    names, dtypes = args.case or list(CASES), args.dtype or ["f32"]
    with torch.no_grad():
        if args.peak_of:
            print(peak_of_this_process(args.peak_of, names[0], dtypes[0]))
            return 0
        memory = not args.no_memory and os.path.exists("/proc/self/clear_refs")
        rows = [
            row
            for name in names
            for dtype in dtypes
            for row in measure(name, dtype, args.repeats, args.threads, memory)
        ]
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(rows))
    console.print(f"{args.threads} threads, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
