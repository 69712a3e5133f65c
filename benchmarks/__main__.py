"""The benchmark table of the README: the expert kernel, and a whole model around it.

    python -m benchmarks            everything, about ten minutes on two cores
    python -m benchmarks --quick    fewer turns, nothing compiled by Inductor

Other benchmarks are commands of their own: ``benchmarks/compile_time.py``, ``benchmarks/indexer.py``,
``benchmarks/gemm.py``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from ascend_deep.native.cpu.provider import CPU, isa
from benchmarks import moe_kernel, moe_model
from benchmarks.moe_kernel import DTYPES, Row, Shape


def main(
    tokens: Annotated[list[int], typer.Option(help="Token counts; may be given several times.")] = [1, 16, 256, 1024],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help=f"Any of {', '.join(DTYPES)}.")] = list(DTYPES),  # noqa: B006
    hidden: Annotated[int, typer.Option(min=64, help="Hidden size.")] = 1024,
    intermediate: Annotated[int, typer.Option(min=8, help="Intermediate size of an expert.")] = 512,
    experts: Annotated[int, typer.Option(min=1, help="Number of experts.")] = 32,
    topk: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Turns per size.")] = 11,
    kernel: Annotated[bool, typer.Option(help="Measure the op alone.")] = True,
    model: Annotated[bool, typer.Option(help="Measure the whole model.")] = True,
    quick: Annotated[bool, typer.Option(help="Three turns, nothing compiled by Inductor.")] = False,
    huge: Annotated[
        bool,
        typer.Option(
            "--huge-pages", help="Put the tensors of all contenders in pages of 2 MB, see ascend_deep.huge_pages."
        ),
    ] = False,
    output: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Measure, in one run and in turns, and print one table."""
    unknown = [d for d in dtype if d not in DTYPES]
    problem = ""
    if unknown:
        problem = f"--dtype is {unknown[0]!r}; it takes {' or '.join(DTYPES)}."
    elif min(tokens) < 1:
        problem = f"--tokens is {min(tokens)}; it takes numbers of at least 1."
    elif topk > experts:
        problem = f"--topk is {topk}; it takes at most the number of experts, {experts}."
    elif output not in ("table", "json"):
        problem = f"--output is {output!r}; it takes table or json."
    if problem:
        print(problem, file=sys.stderr)
        raise typer.Exit(2)
    missing = CPU.unavailable()
    if missing is not None:
        print(missing, file=sys.stderr)
        raise typer.Exit(1)
    shape = Shape(hidden, intermediate, experts, topk)
    sections: dict[str, list[Row]] = {}
    parts = [("moe_experts", moe_kernel.measure)] * kernel + [("model", moe_model.measure)] * model
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(parts) * len(dtype) * len(tokens))
        for title, measure in parts:
            for d in dtype:
                for t in tokens:
                    progress.update(task, description=f"{title}, {d}, {t} tokens")
                    turns = 3 if quick else repeats
                    sections.setdefault(title, []).extend(measure(shape, d, t, turns, not quick, huge=huge))
                    progress.advance(task)
    if output == "json":
        run = {"shape": asdict(shape), "threads": torch.get_num_threads(), "isa": isa()}
        print(json.dumps({**run, **{title: [asdict(r) for r in rows] for title, rows in sections.items()}}))
        return
    for title, rows in sections.items():
        moe_kernel.show(rows, shape, title if title != "model" else f"Qwen3-MoE, {moe_model.LAYERS} layers")


if __name__ == "__main__":
    typer.run(main)
