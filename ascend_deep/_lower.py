"""``ascend-deep lower``: the graph that Ascend's graph engine would get, without an Ascend machine.

Imports neither torch nor transformers until it runs. torch_npu has to be loaded before transformers, which looks for
it, and without CANN it must not be loaded by torch itself.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ascend_deep._paths import folder_problem

__all__ = ["lower"]

_FAILED, _BAD_INPUT = 1, 2


def lower(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="As for explain: package.module:attribute, or a Hugging Face family.")
    ],
    target: Annotated[str, typer.Option(help="ascend950, ascend950dt, ascend910b or ascend910_93.")] = "ascend950",
    emit: Annotated[str, typer.Option(help="ge: the graph of the graph engine.")] = "ge",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the files go.")] = Path(
        "ascend_deep_ge"
    ),
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Config field of a family. Repeatable.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers of a Hugging Face family.")] = None,
    shape: Annotated[str, typer.Option(metavar="B,S", help="Shape of the input: batch and sequence.")] = "2,9",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    experts_implementation: Annotated[
        str | None, typer.Option(metavar="NAME", help="eager, batched_mm or grouped_mm, as transformers takes it.")
    ] = None,
    training: Annotated[bool, typer.Option("--training", help="Training mode, with gradients.")] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Symbolic sizes instead of those of the input.")] = False,
) -> None:
    """Write the graph that Ascend's graph engine would get: message text, listing, Mermaid and Graphviz.

    Needs the torch_npu wheel. It needs neither an NPU nor CANN, and says nothing about what they would do with the
    graph: it is not compiled and not run.

    [bold]Examples[/bold]

      ascend-deep lower qwen3_moe
      ascend-deep lower DeepseekV3Config --target ascend910b --dynamic -o graphs

    Exit code: 0, 2 for bad input, 1 if a graph cannot be converted.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    console = Console(stderr=True)

    def stop(sentence: str, code: int) -> typer.Exit:
        console.print(f"ascend-deep: {sentence}", style="red", soft_wrap=True, markup=False)
        return typer.Exit(code)

    if emit != "ge":
        raise stop(f"--emit is {emit!r}; it takes ge.", _BAD_INPUT)
    try:
        import torch

        from ascend_deep import lowering, models
        from ascend_deep.lowering.torchair_offline import OfflineError, import_torch_npu
        from ascend_deep.options import TARGETS, Options

        targets = [t for t in TARGETS if t.startswith("ascend")]
        if target not in targets:
            raise models.BadInput(f"--target is {target!r}; lower takes {', '.join(targets)}.")
        options = Options.parse({"target": target, "emit": emit, "emit_to": str(output), "downstream": "eager"})
        fields, sizes = models.parse_fields(set_ or ()), models.parse_shape(shape)
        models.check_arguments(dtype, layers)
        wrong_place = folder_problem("--output", output)
        if wrong_place is not None:
            raise models.BadInput(wrong_place)
        import_torch_npu(lowering.stubs_folder())
        loaded = models.load(
            model,
            fields=fields,
            layers=layers,
            shape=sizes,
            dtype=dtype,
            experts_implementation=experts_implementation,
            training=training,
        )
    except OfflineError as error:
        raise stop(str(error), _FAILED) from None
    except (ValueError, FileNotFoundError) as error:
        raise stop(str(error), _BAD_INPUT) from None
    except RuntimeError as error:
        # Compared by name: the class comes with torch. It is the user's own code that raised.
        if type(error).__name__ != "ModelError" or os.environ.get("ASCEND_DEEP_TRACEBACK") == "1":
            raise
        raise stop(f"{error} (ASCEND_DEEP_TRACEBACK=1 shows where)", _FAILED) from None
    before = set(output.glob("compile_*")) if output.is_dir() else set()
    try:
        with contextlib.nullcontext() if training else torch.no_grad():
            compiled: Any = torch.compile(
                loaded.model, backend="ascend_deep", options=_as_mapping(options), dynamic=dynamic or None
            )
            compiled(*loaded.args, **loaded.kwargs)
    except Exception as error:
        if os.environ.get("ASCEND_DEEP_TRACEBACK") == "1":
            raise
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise stop(f"the graph cannot be lowered: {' '.join(lines[:2])}", _FAILED) from None
    _show(sorted(set(output.glob("compile_*")) - before), console)


def _as_mapping(options: Any) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("target", "emit", "emit_to", "downstream")}


def _show(folders: list[Path], console: Console) -> None:
    """Ops per graph, on stdout; where the files are, on stderr."""
    table = Table("graph", "edge check", "ops")
    for folder in folders:
        for listing in sorted(folder.glob("*.txt")):
            lines = listing.read_text(encoding="utf-8").splitlines()
            start = next((i for i, line in enumerate(lines) if line.endswith("ops besides inputs and constants:")), 0)
            counts = [" ".join(line.split()[::-1]) for line in lines[start + 1 :]]
            verdict = "FAILED" if "FAILED" in lines[1] else "passed"
            table.add_row(f"{folder.name}/{listing.stem}", verdict, ", ".join(counts))
    Console().print(table)
    for folder in folders:
        console.print(f"Wrote {folder}.", markup=False)
    console.print("Not compiled and not run: no Ascend hardware was involved.", markup=False)
