"""The examples run, at small sizes, and say what they promise to say.

One of them runs in a process of its own, as users start it. The others run as scripts in this one, which has imported
transformers and tried out its C++ compiler already.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py"))


def _process(*command: object) -> str:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a file with arguments as ``python FILE ...`` would; its output."""

    def run(*command: object) -> str:
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        threads = torch.get_num_threads()
        try:
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
        finally:
            torch.set_num_threads(threads)
        out, errors = capsys.readouterr()
        assert not ended.value.code, f"{command}\n{out[-4000:]}\n{errors[-4000:]}"
        return out

    return run


def test_this_file_knows_every_example() -> None:
    assert EXAMPLES == ["compile_qwen3_moe.py", "graph_capture_test.py", "long_context_indexer.py", "train_tiny_moe.py"]


@pytest.mark.parametrize("name", [n for n in EXAMPLES if not n.endswith("_test.py")])
def test_help(name: str, script: Callable[..., str]) -> None:
    out = script(f"examples/{name}", "--help")
    assert name in out and len(out) > 400


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo(dtype: str, tmp_path: Path, script: Callable[..., str]) -> None:
    sizes = ("--layers", 1, "--hidden", 128, "--intermediate", 64, "--experts", 8, "--topk", 3, "--shapes", "1x7")
    report = tmp_path / "report.json"
    run = _process if dtype == "float32" else script
    out = run("examples/compile_qwen3_moe.py", *sizes, "--dtype", dtype, "--rounds", 3, "--report", report)
    assert "Every MoE layer was fused; the result agrees with eager." in out
    assert "over Inductor" in out
    counts = json.loads(report.read_text())["counts"]
    assert counts["moe_experts"] == counts["moe_route"] == 1


@pytest.mark.slow
def test_training(tmp_path: Path, script: Callable[..., str]) -> None:
    picture = tmp_path / "new" / "loss.png"
    out = script("examples/train_tiny_moe.py", "--steps", 40, "--layers", 1, "--batch", 8, "--picture", picture)
    assert out.count("\nyes  ") == 4 and "\nNO " not in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_long_context(tmp_path: Path, script: Callable[..., str]) -> None:
    picture = tmp_path / "indexer.png"
    command = ("--queries", 4, "--contexts", 4096, "--repeats", 3, "--picture", picture)
    assert "times as fast as eager" in script("examples/long_context_indexer.py", *command)
    assert picture.stat().st_size > 10_000


@pytest.fixture(scope="module")
def graph_capture() -> Iterator[ModuleType]:
    """``examples/graph_capture_test.py`` as a module. Dynamo looks modules up by their names."""
    spec = importlib.util.spec_from_file_location("graph_capture_test", ROOT / "examples/graph_capture_test.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_graph_capture_tests_pass(graph_capture: ModuleType) -> None:
    tests = [value for name, value in vars(graph_capture).items() if name.startswith("test_")]
    assert len(tests) == 5
    for test in tests:
        torch._dynamo.reset()
        test()
