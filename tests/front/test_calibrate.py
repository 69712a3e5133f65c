"""Calibration: the file, what follows from it in a compile, and the command that measures."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

import ascend_deep
from ascend_deep import calibrate
from ascend_deep.calibrate_cases import CASES, Case
from ascend_deep.calibration import ENVIRONMENT, Calibration, Machine, Measured, here, load, nearest
from ascend_deep.cli import app
from ascend_deep.options import Options, OptionsError
from ascend_deep.passes.catalogue import NAMES
from ascend_deep.passes.policy import POLICY, Row

runner = CliRunner()
CPU = Machine("cpu", here("cpu"), torch.get_num_threads(), torch.__version__, "eager")
MEASURED = (
    Measured("swiglu", "swiglu", "native.cpu", "bfloat16", {"T": 4, "I": 1024}, 3.2e-5, 6.4e-5),
    Measured("swiglu", "swiglu", "native.cpu", "bfloat16", {"T": 512, "I": 1024}, 7.5e-4, 2.5e-4),
)


def gated(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def written(folder: Path, *, machine: Machine = CPU, **decide: bool) -> str:
    """A file that decides as told."""
    rows = {name: Row(profits, f'measured with a "{name}"') for name, profits in decide.items()}
    file = folder / "c.toml"
    file.write_text(Calibration(machine, rows, MEASURED).text(), encoding="utf-8")
    return str(file)


def plan(function: Any, *args: torch.Tensor, **options: Any) -> ascend_deep.Report:
    torch._dynamo.reset()  # or the second call of a function has symbolic sizes
    with torch.no_grad():
        report: ascend_deep.Report = ascend_deep.explain(function, *args, options={"downstream": "eager", **options})
    return report


# -- the file ---------------------------------------------------------------------------------------------------------
def test_a_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    odd = dataclasses.replace(CPU, name='Chip "5\\6" é', threads=7)
    found = load(written(tmp_path, machine=odd, swiglu=False, linear=True))
    assert found.machine == odd and found.measured == MEASURED
    assert found.decide == {
        "swiglu": Row(False, 'measured with a "swiglu"'),
        "linear": Row(True, 'measured with a "linear"'),
    }
    assert MEASURED[1].ratio == pytest.approx(3.0) and MEASURED[0].at() == "T = 4, I = 1024"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("format = 1", "format = 2"), "has format 2; this version reads 1"),
        (("[machine]", "[machine"), "cannot be read"),
        (("profits = false", "profits = 0"), "decide.swiglu.profits is 0; it takes true or false"),
        (("decide.swiglu", "decide.swigloo"), "decide.swigloo is no recogniser; there are experts_grouped, "),
        (("written = 3.2e-05", "written = -1.0"), "written of a measured swiglu is -1.0; it takes seconds above 0"),
        (("written = 3.2e-05", "written = nan"), "written of a measured swiglu is nan"),
        (("T = 4,", "T = 0,"), "sizes of a measured swiglu are {'T': 0, 'I': 1024}; they take integers above 0"),
        (("threads = ", "heads = "), "not as ascend-deep calibrate writes it: .*heads"),
        (("[machine]", "[machines]"), "'machine' is missing"),
        (("format = 1", "format = 1\ndecide = 3"), "cannot be read|decide is 3; it takes a table"),
        (("[decide.swiglu]\nprofits = false", "[decide]\nswiglu = 3\n[rest]"), "decide.swiglu is 3; it takes a table"),
        (("sizes = { T = 4, I = 1024 }", "sizes = 3"), "sizes of a measured swiglu is 3; it takes a table"),
        (("threads = ", 'threads = "a" # '), "machine.threads is 'a'; it takes an integer above 0"),
        (("device = ", "device = 7 # "), "machine.device is 7; it takes a string"),
        (("[[measured]]", "[measured]"), "cannot be read|takes a list of tables"),
    ],
)
def test_a_bad_file_is_an_error_in_one_sentence(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    file = Path(written(tmp_path, swiglu=False))
    text = file.read_text()
    assert change[0] in text
    file.write_text(text.replace(*change))
    with pytest.raises(
        OptionsError, match=f"^option 'calibration': the calibration .*c.toml .*{sentence}.*\\.$"
    ) as error:
        Options.parse({"calibration": str(file)})
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "none.toml"))
    with pytest.raises(OptionsError, match=r"none\.toml cannot be read: No such file or directory\."):
        Options.parse({})


def test_the_option_wins_over_the_environment_and_both_are_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    first, second = written(tmp_path / "a", swiglu=False), written(tmp_path / "b", swiglu=True)
    plain = Options.parse({})
    monkeypatch.setenv(ENVIRONMENT, first)
    by_environment, by_option = Options.parse({}), Options.parse({"calibration": second})
    assert (by_environment.calibration, by_option.calibration) == (first, second)
    assert len({plain.key(), by_environment.key(), by_option.key()}) == 3
    text = Path(first).read_text()
    Path(first).write_text(text.replace("profits = false", "profits = true "))
    assert Options.parse({}).key() != by_option.key() and Options.parse({}).calibrated().decide["swiglu"].profits  # type: ignore[union-attr]


def test_the_nearest_size_is_by_ratios() -> None:
    assert nearest(MEASURED, "swiglu", {"T": 40, "I": 512}) is MEASURED[0]
    assert nearest(MEASURED, "swiglu", {"T": 50, "I": 512}) is MEASURED[1]
    assert nearest(MEASURED, "moe_route", {"T": 40}) is None


# -- in a compile -----------------------------------------------------------------------------------------------------
def test_what_does_not_pay_stays_and_the_report_says_why(tmp_path: Path) -> None:
    file = written(tmp_path, swiglu=False)
    h = torch.randn(5, 24)
    assert plan(gated, h).counts() == {"swiglu": 1}
    report = plan(gated, h, calibration=file)
    assert report.counts() == {}
    assert (
        'swiglu is not profitable on this target (cpu), so one place stays as written: measured with a "swiglu"'
        in (report.notes[-1])
    )
    assert plan(gated, h, calibration=file, force=["swiglu"]).counts() == {"swiglu": 1}


def test_what_pays_runs_where_the_table_leaves_it_out(tmp_path: Path) -> None:
    x, w = torch.randn(6, 48).bfloat16(), torch.randn(40, 48).bfloat16()
    assert plan(F.linear, x, w).counts() == {}
    assert plan(F.linear, x, w, calibration=written(tmp_path, linear=True)).counts() == {"gemm_bf16": 1}


def test_figures_of_the_nearest_size_are_in_the_report(tmp_path: Path) -> None:
    file = written(tmp_path, swiglu=True)
    (exact,) = [n for n in plan(gated, torch.randn(512, 2048), calibration=file).notes if "measured on" in n]
    assert exact == (
        f"swiglu measured on {CPU.name}: 250 us by native.cpu, 3.00 times as fast as what is written, "
        "with T = 512, I = 1024 in bfloat16."
    )
    (near,) = [n for n in plan(gated, torch.randn(3, 48), calibration=file).notes if "measured on" in n]
    assert ": 64 us by" in near and near.endswith(", with T = 4, I = 1024 in bfloat16, and this is T = 3, I = 24.")


@pytest.mark.parametrize(
    ("change", "target", "used"),
    [
        ({}, "auto", True),
        ({"name": "another processor"}, "auto", False),
        ({"device": "cuda", "name": "a GPU"}, "auto", False),
        ({}, "ascend950", False),
        ({"device": "npu", "name": "Ascend950PR_9589"}, "ascend950", True),
        ({"device": "npu", "name": "Ascend950PR_9589"}, "ascend910b", False),
        ({"device": "npu", "name": "Ascend950PR_9589"}, "auto", False),
    ],
)
def test_it_counts_for_the_processor_it_was_measured_on(
    tmp_path: Path, change: dict[str, Any], target: str, used: bool
) -> None:
    file = written(tmp_path, machine=dataclasses.replace(CPU, **change), swiglu=False)
    report = plan(gated, torch.randn(5, 64), calibration=file, target=target)
    assert (report.counts() == {}) == used, report.notes
    assert used != any(n.startswith("the calibration is not used: it was measured on ") for n in report.notes)


def test_another_torch_and_other_threads_are_said(tmp_path: Path) -> None:
    other = dataclasses.replace(CPU, torch="2.0.0", threads=99)
    notes = "\n".join(plan(gated, torch.randn(5, 24), calibration=written(tmp_path, machine=other)).notes)
    assert f"measured with torch 2.0.0, and this is {torch.__version__}; it is used." in notes
    assert f"measured with 99 threads, and these are {torch.get_num_threads()}; it is used." in notes


# -- measuring --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("before", "ratios", "profits"),
    [
        (True, (1.0, 0.98), True),  # nothing that contradicts the table
        (False, (1.0, 1.02), False),
        (True, (0.5, 0.9), False),
        (True, (0.5, 4.0), True),  # on the whole it gains
        (False, (0.9, 4.0), False),  # but not everywhere
        (False, (0.97, 1.3), True),
        (False, (1.2,), True),
    ],
)
def test_the_table_stands_unless_the_figures_contradict_it(
    before: bool, ratios: tuple[float, ...], profits: bool
) -> None:
    found = [Measured("swiglu", "swiglu", "p", "float32", {"T": 2}, r * 1e-3, 1e-3) for r in ratios]
    row = calibrate.decide(before, found, CPU)
    assert row.profits == profits
    assert f"{min(ratios):.2f}" in row.why and f"{max(ratios):.2f}" in row.why and CPU.name in row.why


def test_the_slower_one_of_two_is_measured_as_that() -> None:
    fast, slow = calibrate.time_pair(lambda: time.sleep(1e-3), lambda: time.sleep(4e-3), "cpu", 5)
    assert 1e-3 <= fast < 3e-3 and 4e-3 <= slow < 9e-3


def test_every_recogniser_of_which_it_is_doubtful_whether_it_pays_has_a_case() -> None:
    measured = {c.recogniser for c in CASES}
    assert set(POLICY) <= measured <= set(NAMES)


def _raises(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("on purpose")


def test_a_block_without_a_figure_says_why_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def inputs(sizes: Any) -> tuple[torch.Tensor, ...]:
        return (torch.randn(sizes["T"], 16),)

    size = ({"T": 3},)
    cases = (
        Case("swiglu", "swiglu", torch.sin, inputs, size),
        Case("swiglu", "swiglu", _raises, inputs, size),
        Case("swiglu", "swiglu", gated, inputs, size, torch.float32),
    )
    monkeypatch.setattr(calibrate, "CASES", cases)
    before = torch.random.get_rng_state()
    found, failed = calibrate.run(device="cpu", downstream="eager", rounds=2)
    assert torch.equal(before, torch.random.get_rng_state())
    assert [m.sizes for m in found.measured] == [{"T": 3}] and found.measured[0].provider == "native.cpu"
    assert len(failed) == 2 and failed[0].reason == "swiglu left the block as it is: nothing like it was found"
    assert "ZeroDivisionError" in failed[1].reason or "on purpose" in failed[1].reason


def test_results_that_differ_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("swiglu", "swiglu", gated, lambda s: (torch.randn(3, 16),), ({"T": 3},))
    plain = torch.compile(lambda h: gated(h) * 1.1, backend="eager")
    monkeypatch.setattr(calibrate, "_compiled", lambda function, downstream: plain)
    found = calibrate._measure(case, {"T": 3}, "cpu", "eager", 2)
    assert isinstance(found, str) and found.startswith("results differ by 0.09")


# -- the command ------------------------------------------------------------------------------------------------------
def test_the_command_measures_writes_and_a_compile_uses_it(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    names = ["--only", "swiglu", "--only", "upcast_matmul", "--downstream", "eager", "--rounds", "3", "--small"]
    done = runner.invoke(app, ["calibrate", "--device", "cpu", *names, "-o", str(file), "--format", "json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert set(data["decide"]) == {"swiglu", "upcast_matmul"} and data["failed"] == []
    assert data["machine"]["name"] == here("cpu") and all(m["fused"] > 0 for m in data["measured"])
    found = load(file)
    assert {m.op: m.sizes for m in found.measured} == {
        "swiglu": {"T": 4, "I": 1024},
        "gemm_bf16": {"M": 4, "N": 256, "K": 2048},
    }
    fused = plan(gated, torch.randn(4, 2048), calibration=str(file)).counts()
    assert fused == ({"swiglu": 1} if found.decide["swiglu"].profits else {})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "swigloo"], "--only is 'swigloo'; it takes experts_grouped, "),
        (["--device", "tpu"], "--device is 'tpu'; it takes auto, cpu, cuda, npu."),
        (["--device", "npu"], "--device is 'npu', and there is none that torch can use here."),
        (["--downstream", "gcc"], "--downstream is 'gcc'; it takes auto, "),
        (["--format", "html"], "--format is 'html'; it takes text, json."),
        (["-o", "/nowhere/at/all.toml"], "there is no folder /nowhere/at."),
        (["-o", "/"], "--output is '/', which is a folder; it takes the name of a file."),
    ],
)
def test_bad_input(arguments: list[str], sentence: str) -> None:
    done = runner.invoke(app, ["calibrate", *arguments])
    assert done.exit_code == 2 and sentence in " ".join(done.stderr.split()), done.stderr
