"""Numbers and files that the indexer example and benchmark cannot use: a sentence and exit code 2, at once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import indexer as benchmark

EXAMPLE = Path(__file__).parents[2] / "examples" / "long_context_indexer.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("long_context_indexer", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said(module: ModuleType, command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line that a refused command prints."""
    with pytest.raises(SystemExit) as stopped:
        module.main(command)
    assert stopped.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("argument", ["--queries", "--contexts", "--repeats", "--threads"])
@pytest.mark.parametrize("number", ["0", "-1"])
def test_the_example_counts_from_one(
    example: ModuleType, argument: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(example, [argument, number], capsys)
    assert line.endswith(f"error: argument {argument}: {number} is given; it must be at least 1")


def test_the_example_needs_a_folder(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    line = said(example, ["--picture", str(tmp_path / "file" / "x.png")], capsys)
    assert "argument --picture: the folder of " in line and "cannot be made" in line


@pytest.mark.parametrize("argument", ["--repeats", "--threads"])
def test_the_benchmark_counts_from_one(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(benchmark, [argument, "0"], capsys).endswith(f"argument {argument}: 0 is given; it must be at least 1")


def test_the_benchmark_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = said(benchmark, ["--json", str(tmp_path / "none" / "rows.json")], capsys)
    assert "argument --json: the folder of " in line and line.endswith("does not exist")
