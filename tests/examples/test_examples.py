"""The examples run, at small sizes, and say what they promise to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py"))


def _run(*command: object) -> str:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_this_file_knows_every_example() -> None:
    assert EXAMPLES == ["compile_qwen3_moe.py", "graph_capture_test.py", "long_context_indexer.py", "train_tiny_moe.py"]


@pytest.mark.parametrize("name", [n for n in EXAMPLES if not n.endswith("_test.py")])
def test_help(name: str) -> None:
    out = _run(f"examples/{name}", "--help")
    assert name in out and len(out) > 400


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo(dtype: str, tmp_path: Path) -> None:
    sizes = ("--layers", 1, "--hidden", 128, "--intermediate", 64, "--experts", 8, "--topk", 3, "--shapes", "1x7")
    report = tmp_path / "report.json"
    out = _run("examples/compile_qwen3_moe.py", *sizes, "--dtype", dtype, "--rounds", 3, "--report", report)
    assert "Every MoE layer was fused; the result agrees with eager." in out
    assert "over Inductor" in out
    counts = json.loads(report.read_text())["counts"]
    assert counts["moe_experts"] == counts["moe_route"] == 1


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "loss.png"
    out = _run("examples/train_tiny_moe.py", "--steps", 40, "--layers", 2, "--batch", 8, "--picture", picture)
    assert out.count("\nyes  ") == 4 and "\nNO " not in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_long_context(tmp_path: Path) -> None:
    picture = tmp_path / "indexer.png"
    command = ("--queries", 4, "--contexts", 4096, "--repeats", 3, "--picture", picture)
    assert "times as fast as eager" in _run("examples/long_context_indexer.py", *command)
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_graph_capture_tests_pass() -> None:
    out = _run("-m", "pytest", "-p", "no:cacheprovider", "examples/graph_capture_test.py")
    assert "5 passed" in out
