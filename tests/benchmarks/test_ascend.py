"""The benchmark for NPUs: what it prints without one, and its rows at small sizes on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ascend

SCRIPT = Path(ascend.__file__).with_suffix(".sh")
ROOT = SCRIPT.parent.parent


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "HOME": "/nonexistent"}
    environment.pop("ASCEND_HOME_PATH", None)
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env=environment, cwd="/", timeout=300)


def test_the_script_refuses_with_one_sentence_where_there_is_no_npu() -> None:
    done = _run("--only", "dense-bf16")
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("benchmarks/ascend.sh: there is no Ascend NPU that this process can use: ")
    assert line.endswith(".")


def test_the_list_labels_the_vendors_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert ascend.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ascend.ROWS)
    for row, line in zip(ascend.ROWS, lines, strict=True):
        assert row.published in line and line.endswith(row.source)
        assert ("not built" in line) == (row.call is None)
    assert {r.name for r in ascend.ROWS if r.call is None} == {
        "mega-moe", "dispatch-ep8", "combine-ep8", "dispatch-ep128", "combine-ep128"
    }  # fmt: skip


@pytest.mark.parametrize("name", [r.name for r in ascend.ROWS if r.call is not None])
def test_rows_run_at_small_sizes(name: str) -> None:
    (row,) = [r for r in ascend.ROWS if r.name == name]
    found = ascend.measure(row, "cpu", rounds=2, divide=64)
    if found.provider == "-":
        assert name == "mqa-logits" and found.note.startswith("no provider: "), found
        return
    assert found.milliseconds is not None and found.tflops is not None and found.tflops > 0
    assert "over 2 calls" in found.note
    text = ascend._table([found], "a test")
    assert "were not measured here" in text and row.published in text and row.source in text


def test_what_is_not_built_says_so() -> None:
    found = ascend.measure(next(r for r in ascend.ROWS if r.name == "mega-moe"), "npu", rounds=2)
    assert (found.note, found.tflops) == ("not built", None)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_script_is_clean() -> None:
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
