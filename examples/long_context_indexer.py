"""Time and peak memory of a lightning indexer against context length: one op, eager PyTorch, Inductor.

    python examples/long_context_indexer.py
    python examples/long_context_indexer.py --queries 4 --contexts 2048 8192 32768 --picture indexer.png

An indexer of DeepSeek-V3.2 (64 heads of 128) scores a chunk of queries against all keys so far and keeps the best 2048
per query. The plain spelling holds a score for every head, query and key at once; ``mqa_topk`` holds the keys that are
still in the running. Every measurement runs in a process of its own, so that peaks do not hide behind each other.

Exit code: 0 if the op chose the same keys as eager up to ties everywhere and took less memory at the longest context.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ascend_deep import ops

HEADS, DEPTH, TOPK = 64, 128, 2048
CONTENDERS = ("eager", "inductor", "mqa_topk")
LABELS = {"eager": "PyTorch eager", "inductor": "torch.compile (Inductor)", "mqa_topk": "ascend_deep.ops.mqa_topk"}
COLOURS = {"eager": "tab:gray", "inductor": "tab:orange", "mqa_topk": "tab:blue"}


def plain(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """As Hugging Face writes it: q [1, S, H, D], k [1, T, D], weights [1, S, H] to indices [1, S, topk]."""
    scores = torch.relu(torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * DEPTH**-0.5)
    index = torch.matmul(weights.float().unsqueeze(-2), scores).squeeze(-2)
    return index.topk(min(TOPK, index.shape[-1]), dim=-1).indices


def fused(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """The same in one op; indices in ascending order."""
    topk = min(TOPK, k.shape[1])
    return ops.mqa_topk(q, k, weights, topk=topk, scale=DEPTH**-0.5, outside="rank_last", return_scores=False)[1]


def operands(queries: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(context)
    q, k = torch.randn(1, queries, HEADS, DEPTH, generator=g), torch.randn(1, context, DEPTH, generator=g)
    return q, k, torch.randn(1, queries, HEADS, generator=g)


def resident(field: str) -> int:
    """Bytes of resident memory of this process, now (``VmRSS``) or at most (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def peak(call: Callable[[], object]) -> int | None:
    """Bytes that a call needs beyond what is resident before; ``None`` where that cannot be measured."""
    try:
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    call()
    return max(resident("VmHWM") - before, 0)


def measure(contender: str, queries: int, context: int, repeats: int) -> dict[str, float | int | None]:
    """Seconds (median), peak bytes of a call and, for the op, the rows on which it disagrees with eager."""
    function = {"eager": plain, "inductor": torch.compile(plain), "mqa_topk": fused}[contender]
    tiny = operands(queries, 4096) if contender == "inductor" else operands(1, 64)
    function(*tiny)
    q, k, weights = operands(queries, context)
    if contender == "inductor":
        function(q, k, weights)
    memory = peak(lambda: function(q, k, weights))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(q, k, weights)
        seconds.append(time.perf_counter() - start)
    wrong = 0
    if contender == "mqa_topk":
        scores = ops.mqa_logits(q, k, weights, scale=DEPTH**-0.5)
        ours, theirs = (scores.gather(-1, f(q, k, weights)).sort(-1).values for f in (fused, plain))
        # Where keys are exchanged their scores are equal to rounding.
        wrong = int((~torch.isclose(ours, theirs, rtol=1e-4, atol=1e-4)).any(-1).sum())
    return {"seconds": statistics.median(seconds), "bytes": memory, "wrong": wrong}


def in_a_process(contender: str, queries: int, context: int, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", contender, "--queries", str(queries), "--contexts", str(context)]
    command += ["--repeats", str(args.repeats), "--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{contender} at {context} keys failed:\n{done.stderr.strip()[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def draw(results: dict[str, list[dict[str, float]]], contexts: Sequence[int], queries: int, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, field, unit, label in ((axes[0], "seconds", 1e3, "milliseconds"), (axes[1], "bytes", 1e-6, "megabytes")):
        for contender, rows in results.items():
            points = [(c, row[field] * unit) for c, row in zip(contexts, rows, strict=True) if row[field]]
            axis.plot(*zip(*points, strict=True), "o-", color=COLOURS[contender], label=LABELS[contender])
        axis.set(xscale="log", yscale="log", xlabel="context length (keys)", ylabel=label)
        axis.set_xticks(contexts, [f"{c // 1024}k" if c >= 1024 else str(c) for c in contexts])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_title(f"Time of a call, {queries} queries, {HEADS} heads of {DEPTH}, top {TOPK}")
    axes[1].set_title("Peak memory beyond the operands")
    axes[0].legend()
    figure.savefig(path, dpi=130)


def count(text: str) -> int:
    """A number of at least 1 from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is given; it must be at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=count, default=16, help="queries in the chunk (default: %(default)s)")
    parser.add_argument("--contexts", type=count, nargs="+", default=[1024, 4096, 16384, 65536], metavar="T")
    parser.add_argument("--repeats", type=count, default=5, help="timed calls (default: %(default)s)")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument("--picture", default="long_context_indexer.png", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        Path(args.picture).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --picture: the folder of {args.picture} cannot be made: {error.strerror}")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("matplotlib, which draws the picture, is not installed")
    torch.set_num_threads(args.threads)
    if args.one:
        with torch.no_grad():
            print(json.dumps(measure(args.one, args.queries, args.contexts[0], args.repeats)))
        return 0
    results: dict[str, list[dict[str, float]]] = {c: [] for c in CONTENDERS}
    print(f"{'context':>8}  {'contender':<26} {'ms':>9} {'peak MB':>9}")
    for context in args.contexts:
        for contender in CONTENDERS:
            row = in_a_process(contender, args.queries, context, args)
            results[contender].append(row)
            memory = "-" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f}"
            print(f"{context:>8}  {LABELS[contender]:<26} {row['seconds'] * 1e3:>9.1f} {memory:>9}", flush=True)
    draw(results, args.contexts, args.queries, args.picture)
    last = {c: rows[-1] for c, rows in results.items()}
    faster = last["eager"]["seconds"] / last["mqa_topk"]["seconds"]
    print(f"At {args.contexts[-1]} keys the op is {faster:.1f} times as fast as eager; picture: {args.picture}")
    wrong = sum(row["wrong"] for row in results["mqa_topk"])
    if wrong:
        print(f"{wrong:.0f} rows differ from eager by more than ties")
    smaller = last["eager"]["bytes"] is None or last["mqa_topk"]["bytes"] < last["eager"]["bytes"]
    return 0 if not wrong and smaller else 1


if __name__ == "__main__":
    sys.exit(main())
