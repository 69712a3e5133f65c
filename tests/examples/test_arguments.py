"""Numbers and files that the demo, the training run and the benchmarks of products and experts cannot use."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import __main__ as benchmarks
from benchmarks import compile_time, gemm

EXAMPLES = Path(__file__).parents[2] / "examples"


def _example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("compile_qwen3_moe", "--layers 0", "argument --layers: 0 is given; it must be at least 1"),
        ("compile_qwen3_moe", "--shapes 1x4 0x3", "argument --shapes: '0x3' is given; it takes batch x sequence"),
        (
            "compile_qwen3_moe",
            "--topk 33",
            "argument --topk: 33 is given; it must be at most the number of experts, 32",
        ),
        ("compile_qwen3_moe", "--report /no/r.html", "argument --report: the folder of /no/r.html does not exist"),
        ("train_tiny_moe", "--steps -1", "argument --steps: -1 is given; it must be at least 1"),
        ("train_tiny_moe", "--picture /dev/null/l.png", "the folder of /dev/null/l.png cannot be made: "),
    ],
)
def test_examples(name: str, arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        _example(name).parse(arguments.split())
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--repeats 0", "--tokens 4 -1"])
def test_products(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gemm._parser().parse_args(arguments.split())
    assert stopped.value.code == 2 and "it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "arguments", "sentence"),
    [
        (benchmarks, ["--tokens", "4", "--tokens", "0"], "--tokens is 0; it takes numbers of at least 1."),
        (compile_time, ["--layers", "0"], "--layers is 0; it takes numbers of at least 1."),
        (compile_time, ["--output", "html"], "--output is 'html'; it takes table or json."),
    ],
)
def test_tables(module: Any, arguments: list[str], sentence: str) -> None:
    app = typer.Typer()
    app.command()(module.main)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and sentence in done.output
