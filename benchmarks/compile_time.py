"""Compile time of a model with our backend against plain Inductor, cold and warm, by number of layers.

Each figure comes from a process of its own with its own compile cache; both backends alternate. Besides the wall
clock, the processor time of the process and its children is shown: it does not depend on what else the machine does.

    python benchmarks/compile_time.py --layers 4 --layers 16 --layers 48
    python benchmarks/compile_time.py --table --family deepseek_v4   # the largest graph of docs/coverage.md
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

CHILD = """
import json, resource, sys, time
import torch
from ascend_deep.models import load

family, layers, backend, training = json.loads(sys.argv[1])
if layers:
    loaded = load(family, layers=layers, experts_implementation="grouped_mm", training=training)
    model, args, kwargs = loaded.model, loaded.args, loaded.kwargs
else:  # as the table of coverage has it
    from ascend_deep.coverage import build, families
    known = families.find(family)
    built = build.build(known, None if known.own_experts else "grouped_mm")
    model, args, kwargs = built.model.train(training), (), build.inputs(known, built.config)
run = torch.compile(model, backend=backend, fullgraph=True)
usage = lambda who: sum(resource.getrusage(who)[:2])
used = lambda: usage(resource.RUSAGE_SELF) + usage(resource.RUSAGE_CHILDREN)
wall, cpu = time.perf_counter(), used()
with torch.set_grad_enabled(training):
    out = run(*args, **kwargs)
    if training:
        out.logits.square().mean().backward()
result = {"wall": time.perf_counter() - wall, "cpu": used() - cpu}
if backend == "ascend_deep":
    import ascend_deep
    report = ascend_deep.last_report()
    result["stages"] = dict(report.timings)
    result["counts"] = report.counts()
print(json.dumps(result))
"""


def measure(family: str, layers: int, backend: str, training: bool, cache: str) -> dict[str, float]:
    """Seconds of the first call in a fresh process: ``wall``, ``cpu`` and, for our backend, ``stages``."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    arguments = json.dumps([family, layers, backend, training])
    done = subprocess.run([sys.executable, "-c", CHILD, arguments], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{backend} on {layers} layers failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(
    layers: Annotated[list[int], typer.Option(help="Number of layers; may be given several times.")] = [4, 16],  # noqa: B006
    family: Annotated[str, typer.Option(help="Hugging Face model type.")] = "qwen3_moe",
    repeats: Annotated[int, typer.Option(min=1, help="Cold and warm pairs per number of layers.")] = 1,
    table: Annotated[bool, typer.Option("--table", help="The family as the coverage table builds it.")] = False,
    training: Annotated[bool, typer.Option(help="Forward and backward instead of inference.")] = False,
    output: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Measure and print one table."""
    problem = ""
    if min(layers) < 1:
        problem = f"--layers is {min(layers)}; it takes numbers of at least 1."
    elif output not in ("table", "json"):
        problem = f"--output is {output!r}; it takes table or json."
    if problem:
        print(problem, file=sys.stderr)
        raise typer.Exit(2)
    rows = []
    layers = [0] if table else layers
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("compiling", total=len(layers) * repeats * 2)
        for n in layers:
            found: dict[str, list[dict]] = {}
            for repeat in range(repeats):
                order = ("inductor", "ascend_deep") if repeat % 2 == 0 else ("ascend_deep", "inductor")
                for backend in order:
                    with tempfile.TemporaryDirectory() as cache:
                        for state in ("cold", "warm"):
                            found.setdefault(f"{backend} {state}", []).append(
                                measure(family, n, backend, training, cache)
                            )
                    progress.advance(task)
            rows.append((n, found))
    summary = []
    for n, found in rows:
        for state in ("cold", "warm"):
            entry: dict = {"layers": n, "state": state}
            for clock in ("wall", "cpu"):
                ours = statistics.median(r[clock] for r in found[f"ascend_deep {state}"])
                plain = statistics.median(r[clock] for r in found[f"inductor {state}"])
                entry |= {f"{clock}_ours": ours, f"{clock}_inductor": plain, f"{clock}_ratio": ours / plain}
            entry["stages"] = found[f"ascend_deep {state}"][-1]["stages"] if state == "cold" else {}
            entry["counts"] = found[f"ascend_deep {state}"][-1]["counts"]
            summary.append(entry)
    if output == "json":
        print(json.dumps(summary, indent=1))
        return
    shown = Table(title=f"Compile time, {family}, {'training' if training else 'inference'}: ours / Inductor")
    for column in ("layers", "cache", "wall s", "ratio", "processor s", "ratio", "stages of ours, s"):
        shown.add_column(column, justify="right" if column != "stages of ours, s" else "left")
    for e in summary:
        stages = ", ".join(f"{k} {v:.2f}" for k, v in e["stages"].items())
        shown.add_row(
            str(e["layers"] or "own"), e["state"], f"{e['wall_ours']:.1f} / {e['wall_inductor']:.1f}",
            f"{e['wall_ratio']:.2f}", f"{e['cpu_ours']:.1f} / {e['cpu_inductor']:.1f}", f"{e['cpu_ratio']:.2f}", stages,
        )  # fmt: skip
    Console().print(shown)


if __name__ == "__main__":
    typer.run(main)
