"""The command line: ``ascend-deep explain | doctor | replay | bench``.

Exit codes: 0 success; 1 the check or the model failed; 2 bad input, in one sentence; 3 (``explain``) nothing was
fused. This file imports neither torch nor transformers: ``doctor`` has to work where they are broken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from ascend_deep._calibrate import calibrate
from ascend_deep._lower import lower
from ascend_deep._paths import file_problem
from ascend_deep._show import finite, plain, short_error, status
from ascend_deep.coverage.command import coverage

if TYPE_CHECKING:
    from ascend_deep.models import Loaded
    from ascend_deep.report import Report

__all__ = ["app", "main"]

FAILED, BAD_INPUT, NOTHING_FUSED = 1, 2, 3

app = typer.Typer(
    name="ascend-deep",
    help="A torch.compile backend that fuses MoE, GEMM and indexer blocks of unmodified models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Format(str, Enum):
    """Forms of a report."""

    text = "text"
    json = "json"
    html = "html"


class Plain(str, Enum):
    """Forms of a table."""

    text = "text"
    json = "json"


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:attribute or file.py:attribute (a module, its class, or a callable that returns model, "
        "(model, args) or (model, args, kwargs)), or a Hugging Face model type or config class: "
        "qwen3_moe, Qwen3MoeConfig.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Config field of a Hugging Face family. May be repeated."),
]
LayersOption = Annotated[int | None, typer.Option(help="Number of layers of a Hugging Face family.")]
ShapeOption = Annotated[str, typer.Option(metavar="B,S", help="Shape of the input: batch and sequence.")]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
TrainingOption = Annotated[bool, typer.Option("--training", help="Training mode, with gradients.")]
ExpertsOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="eager, batched_mm or grouped_mm, as transformers takes it.")
]
PrepareOption = Annotated[
    bool, typer.Option("--prepare", help="Call ascend_deep.prepare(model) first: replaces expert loops.")
]


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"ascend-deep {importlib.metadata.version('ascend-deep')}")
        raise typer.Exit(0)


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A torch.compile backend that fuses MoE, GEMM and indexer blocks of unmodified models."""


@app.command()
def explain(
    model: ModelArgument,
    set_: SetOption = None,
    layers: LayersOption = None,
    shape: ShapeOption = "2,9",
    dtype: DtypeOption = "float32",
    training: TrainingOption = False,
    experts_implementation: ExpertsOption = None,
    prepare: PrepareOption = False,
    target: Annotated[
        str,
        typer.Option(help="Plan for cpu, cuda, ascend950, ascend950dt, ascend910b or ascend910_93; ops run here."),
    ] = "auto",
    enable: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Use only this recogniser. Repeatable.")
    ] = None,
    disable: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Do not use this recogniser. Repeatable.")
    ] = None,
    force: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Use this recogniser even if it may not pay. Repeatable."),
    ] = None,
    downstream: Annotated[
        str, typer.Option(help="Who compiles the rewritten graph; inductor to see the time of a whole compile.")
    ] = "auto",
    calibration: Annotated[
        str, typer.Option(metavar="FILE", help="What `calibrate` wrote: it decides what pays, and figures are shown.")
    ] = "",
    format_: Annotated[
        Format | None, typer.Option("--format", help="Default: by the ending of --output, else text.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there instead.")] = None,
    normal_form: Annotated[
        bool,
        typer.Option("--normal-form", help="Also print every block, fused or left, before and after normal form."),
    ] = False,
) -> None:
    """Compile a model once and say what was fused, what was not and why.

    Hugging Face families are built from their config class with small sizes and random weights; nothing is downloaded.

    [bold]Examples[/bold]

      ascend-deep explain qwen3_moe
      ascend-deep explain DeepseekV3Config --layers 4 --target ascend950 -o report.html
      ascend-deep explain mixtral --experts-implementation eager --prepare --training
      ascend-deep explain mypackage.mymodel:build --format json

    Exit code: 0 if something was fused, 3 if nothing was, 2 for bad input, 1 if the model fails.
    """
    with _bad_input():
        from ascend_deep.options import Options

        chosen = {"enable": enable or (), "disable": disable or (), "force": force or ()}
        options = Options.parse({"target": target, "downstream": downstream, "calibration": calibration, **chosen})
        form = format_ or _format_of(output)
        if options.downstream != "auto":
            _installed(options.downstream)
        wrong_place = file_problem("--output", output) if output is not None else None
        if wrong_place is not None:
            raise ValueError(wrong_place)
        with status(f"Building {model}"):
            loaded = _load(model, set_, layers, shape, dtype, experts_implementation, training)
        if prepare:
            _prepare(loaded)
        if normal_form and output is None and form is not Format.text:
            raise ValueError(
                "--normal-form is text; add --output FILE to write the report there, or leave --format out."
            )
    from ascend_deep.passes import show

    with _model_errors(), status(f"Compiling {loaded.name}"), show.recording() as blocks:
        report = _explain(loaded, options, training)
    _emit(report, form, output)
    if normal_form:
        print("\n" + "\n\n".join(blocks))
    raise typer.Exit(0 if report.counts() else NOTHING_FUSED)


@app.command()
def doctor(format_: Annotated[Plain, typer.Option("--format", help="text or json.")] = Plain.text) -> None:
    """Check this environment: torch, C++ kernels, Ascend software, optional packages.

    Works where torch or torch_npu cannot be imported, and says why.

    [bold]Examples[/bold]

      ascend-deep doctor
      ascend-deep doctor --format json

    Exit code: 0 if the backend works here, 1 if something is broken.
    """
    from ascend_deep.doctor import check_all, worst

    with status("Looking around"):
        checks = check_all()
    failed = worst(checks) == "fail"
    if format_ is Plain.json:
        print(json.dumps({"ok": not failed, "checks": [c.to_dict() for c in checks]}, indent=2))
    else:
        marks = {"ok": ("✓", "green"), "absent": ("·", "dim"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}
        table = Table.grid(padding=(0, 2))
        for check in checks:
            mark, style = marks[check.status]
            fix = "" if check.status == "ok" else check.fix
            table.add_row(f"[{style}]{mark}[/]", check.name, plain(check.found + (f"\n{fix}" if fix else "")))
        Console().print(table)
    raise typer.Exit(FAILED if failed else 0)


@app.command()
def replay(
    certificate: Annotated[
        str, typer.Argument(metavar="CERT", help="Key of a certificate (or its beginning), or a file.")
    ],
    format_: Annotated[Plain, typer.Option("--format", help="text or json.")] = Plain.text,
) -> None:
    """Run a stored certificate again: region and replacement, on the recogniser's probes.

    [bold]Examples[/bold]

      ascend-deep replay 3f9c2a71
      ascend-deep replay ./certificates/3f9c2a71d0b4e856.json --format json

    Exit code: 0 if they agree, 1 if not, 2 if there is no such certificate.
    """
    with _bad_input():
        from ascend_deep.passes.replay import replay as run_again

        with status("Running the probes"):
            result = run_again(certificate)
    if format_ is Plain.json:
        print(json.dumps({k: finite(v) for k, v in dataclasses.asdict(result).items()}, indent=2))
    else:
        Console().print(plain(result.text), style="green" if result.ok else "red")
    raise typer.Exit(0 if result.ok else FAILED)


@app.command()
def bench(
    model: ModelArgument,
    set_: SetOption = None,
    layers: LayersOption = None,
    shape: ShapeOption = "2,9",
    dtype: DtypeOption = "float32",
    training: TrainingOption = False,
    experts_implementation: ExpertsOption = None,
    prepare: PrepareOption = False,
    rounds: Annotated[int, typer.Option(min=1, help="Warm repetitions of each contender.")] = 20,
    against: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="eager or inductor; default both. Repeatable.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch on the CPU.")] = None,
    format_: Annotated[Plain, typer.Option("--format", help="text or json.")] = Plain.text,
) -> None:
    """Time a model: eager, compiled by Inductor, compiled by ascend_deep. Interleaved; medians.

    [bold]Examples[/bold]

      ascend-deep bench qwen3_moe --set hidden_size=512 --set num_experts=32 --shape 1,64
      ascend-deep bench mypackage.mymodel:build --training --against eager

    Exit code: 0, 2 for bad input, 1 if the model fails.
    """
    with _bad_input():
        from ascend_deep import bench as timing
        from ascend_deep.models import BadInput

        wanted = tuple(against or ("eager", "inductor"))
        unknown = [n for n in wanted if n not in timing.CONTENDERS]
        if unknown:
            raise BadInput(f"--against is {unknown[0]!r}; it takes eager or inductor.")
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        with status(f"Building {model}"):
            loaded = _load(model, set_, layers, shape, dtype, experts_implementation, training)
        if prepare:
            _prepare(loaded)
    with _model_errors(), status(f"Timing {loaded.name}") as say:
        names = tuple(dict.fromkeys((*wanted, "ascend_deep")))
        rows = timing.run(loaded, contenders=names, rounds=rounds, training=training, progress=say)
    if format_ is Plain.json:
        data = {
            "model": loaded.name,
            "training": training,
            "inputs": loaded.inputs(),
            "dtype": loaded.dtype(),
            "rows": [dataclasses.asdict(r) for r in rows],
        }
        print(json.dumps(data, indent=2))
        return
    facts = (loaded.name, "training" if training else "inference", loaded.inputs(), loaded.dtype())
    table = Table(title=plain(", ".join(f for f in facts if f)))
    table.add_column("")
    for column in ("first call", "median", "fastest", "speed-up", "difference"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = (f"{row.first:.2f} s", f"{row.median * 1e3:.2f} ms", f"{row.fastest * 1e3:.2f} ms")
        table.add_row(row.name, *cells, f"{row.speedup:.2f}×", f"{row.error:.1e}")
    Console().print(table)


app.command()(coverage)
app.command()(lower)
app.command()(calibrate)


# -- steps ------------------------------------------------------------------------------------------------------------
def _load(
    model: str,
    set_: list[str] | None,
    layers: int | None,
    shape: str,
    dtype: str,
    experts_implementation: str | None,
    training: bool,
) -> Loaded:
    from ascend_deep import models

    return models.load(
        model,
        fields=models.parse_fields(set_ or ()),
        layers=layers,
        shape=models.parse_shape(shape),
        dtype=dtype,
        experts_implementation=experts_implementation,
        training=training,
    )


def _installed(downstream: str) -> None:
    from ascend_deep import lowering

    try:
        lowering.lookup(downstream)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _prepare(loaded: Loaded) -> None:
    import ascend_deep

    with status("Preparing"):
        prepared = ascend_deep.prepare(loaded.model)
    Console(stderr=True).print(plain(str(prepared)))


def _explain(loaded: Loaded, options: Any, training: bool) -> Report:
    import torch

    import ascend_deep

    with contextlib.nullcontext() if training else torch.no_grad():
        report: Report = ascend_deep.explain(loaded.model, *loaded.args, options=options, **loaded.kwargs)
    return report


def _emit(report: Report, form: Format, output: Path | None) -> None:
    if form is Format.text and output is None:
        # rich would assume 80 columns for a pipe or a file
        Console().print(report) if Console().is_terminal else print(report)
        return
    text = {Format.text: report.__str__, Format.json: report.to_json, Format.html: report.to_html}[form]()
    if output is None:
        print(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        _stop(f"cannot write {output}: {error.strerror or error}.", BAD_INPUT)
    Console(stderr=True).print(plain(f"Wrote {output}."))


def _format_of(output: Path | None) -> Format:
    suffix = output.suffix.lower() if output is not None else ""
    return {".json": Format.json, ".html": Format.html, ".htm": Format.html}.get(suffix, Format.text)


# -- errors and progress ----------------------------------------------------------------------------------------------
def _stop(sentence: str, code: int) -> NoReturn:
    Console(stderr=True).print(plain(f"ascend-deep: {sentence}"), style="red", soft_wrap=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def _bad_input() -> Iterator[None]:
    """Errors that carry a sentence for the user end the program with exit code 2."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:  # BadInput and OptionsError are ValueErrors
        _stop(str(error), BAD_INPUT)
    except RuntimeError as error:
        # Compared by name: the class comes with torch, which this file does not import.
        if type(error).__name__ != "ModelError" or os.environ.get("ASCEND_DEEP_TRACEBACK") == "1":
            raise
        _stop(f"{error} (ASCEND_DEEP_TRACEBACK=1 shows where)", FAILED)
    except ImportError as error:
        _stop(f"{error}. `ascend-deep doctor` says what is missing.", FAILED)


@contextlib.contextmanager
def _model_errors() -> Iterator[None]:
    """Whatever the model raises becomes one sentence; ASCEND_DEEP_TRACEBACK=1 shows the traceback."""
    wanted = os.environ.get("ASCEND_DEEP_TRACEBACK") == "1"
    # An op that fails on fake tensors is logged with its traceback, then raised.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, log.disabled or not wanted
    try:
        yield
    except Exception as error:
        if wanted:
            raise
        _stop(f"the model failed: {short_error(error)} (ASCEND_DEEP_TRACEBACK=1 shows where).", FAILED)
    finally:
        log.disabled = before


def main() -> None:
    """Entry point of the console script."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach out to the network
    app()
