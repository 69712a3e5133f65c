"""``ascend-deep calibrate``: what rewrites gain on this device, measured and written to a file.

Imports neither torch nor transformers until it runs.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ascend_deep._paths import file_problem

if TYPE_CHECKING:
    from ascend_deep.calibrate import Failed
    from ascend_deep.calibration import Calibration

__all__ = ["calibrate"]

_FAILED, _BAD_INPUT = 1, 2
_DEVICES = ("auto", "cpu", "cuda", "npu")


def calibrate(
    device: Annotated[str, typer.Option(help="cpu, cuda or npu; auto: the accelerator, if there is one.")] = "auto",
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Measure this recogniser alone. Repeatable.")
    ] = None,
    downstream: Annotated[
        str, typer.Option(help="Who compiles both sides; auto: Inductor, on NPUs torchair.")
    ] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each side; the median counts.")] = 15,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch on the CPU.")] = None,
    small: Annotated[
        bool, typer.Option("--small", help="One small size of each block: to see that it works, not to be used.")
    ] = False,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the calibration goes.")] = Path(
        "ascend_deep_calibration.toml"
    ),
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    """Measure what each rewrite gains on this device, and write what follows from it.

    Each block is compiled as it is written and rewritten, by the same compiler; both take turns. Let nothing else run
    meanwhile: the file stands for this machine until it is measured again. A compile uses it if
    options={"calibration": FILE} or ASCEND_DEEP_CALIBRATION names it; nothing else changes.

    [bold]Examples[/bold]

      ascend-deep calibrate
      ascend-deep calibrate --device cpu --threads 8 -o cpu8.toml
      ascend-deep calibrate --only linear --only swiglu --downstream eager --format json

    Exit code: 0, 2 for bad input, 1 if no block gave a figure.
    """
    console = Console(stderr=True)

    def stop(sentence: str, code: int) -> typer.Exit:
        console.print(f"ascend-deep: {sentence}", style="red", soft_wrap=True, markup=False)
        return typer.Exit(code)

    from ascend_deep import calibrate as measuring
    from ascend_deep import lowering
    from ascend_deep.calibrate_cases import CASES
    from ascend_deep.options import DOWNSTREAMS

    measurable = list(dict.fromkeys(c.recogniser for c in CASES))
    for option, values, accepted in (
        ("--device", [device], _DEVICES),
        ("--only", only or [], measurable),
        ("--downstream", [downstream], DOWNSTREAMS),
        ("--format", [format_], ("text", "json")),
    ):
        wrong = [v for v in values if v not in accepted]
        if wrong:
            raise stop(f"{option} is {wrong[0]!r}; it takes {', '.join(accepted)}.", _BAD_INPUT)
    import torch

    chosen = _device() if device == "auto" else device
    module: Any = getattr(torch, chosen, None)
    if chosen != "cpu" and not (module is not None and module.is_available()):
        raise stop(f"--device is {chosen!r}, and there is none that torch can use here.", _BAD_INPUT)
    wrong_place = file_problem("--output", output)
    if wrong_place is not None:
        raise stop(wrong_place, _BAD_INPUT)
    try:
        lowering.lookup(lowering.choose(downstream, [torch.empty(0, device=chosen)]))
    except RuntimeError as error:
        raise stop(str(error), _BAD_INPUT) from None
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with console.status("Measuring") as status:
            found, failed = measuring.run(
                device=chosen,
                only=only or (),
                downstream=downstream,
                rounds=rounds,
                small=small,
                progress=lambda text: status.update(f"Measuring {text}"),
            )
    finally:
        torch.set_num_threads(before)
    if not found.measured:
        raise stop(f"no block gave a figure; the first: {failed[0].reason}", _FAILED)
    try:
        output.write_text(found.text(), encoding="utf-8")
    except OSError as error:
        raise stop(f"cannot write {output}: {error.strerror}.", _BAD_INPUT) from None
    if format_ == "json":
        print(json.dumps(_data(found, failed), indent=2))
    else:
        _show(found, failed)
    console.print(
        f"Wrote {output}. options={{'calibration': '{output}'}} uses it in a compile.", markup=False, soft_wrap=True
    )


def _device() -> str:
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None and found.type in _DEVICES else "cpu"


def _data(found: Calibration, failed: list[Failed]) -> dict[str, Any]:
    return {
        "machine": dataclasses.asdict(found.machine),
        "decide": {n: {"profits": r.profits, "why": r.why} for n, r in found.decide.items()},
        "measured": [{**dataclasses.asdict(m), "ratio": m.ratio} for m in found.measured],
        "failed": [dataclasses.asdict(f) for f in failed],
    }


def _show(found: Calibration, failed: list[Failed]) -> None:
    machine = found.machine
    table = Table(title=f"{machine.name}, {machine.downstream}, torch {machine.torch}")
    for column, justify in (("block", "left"), ("rows", "left"), ("by", "left"), ("written", "right")):
        table.add_column(column, justify=justify, no_wrap=column != "by")  # type: ignore[arg-type]
    for column in ("rewritten", "times as fast", "runs"):
        table.add_column(column, justify="right")
    for m in found.measured:
        runs = "yes" if found.decide[m.recogniser].profits else "no"
        times = (_time(m.written), _time(m.fused), f"{m.ratio:.2f}", runs)
        rows = m.at().split(", ")[0]  # the others are the same for all sizes of a block, and in the file
        table.add_row(m.recogniser, rows, m.provider, *times)
    Console().print(table)
    for f in failed:
        Console().print(f"{f.recogniser} with {f.sizes}: {f.reason}", markup=False, highlight=False)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
