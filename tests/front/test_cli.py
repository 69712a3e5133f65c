"""The command line: forms, exit codes, one sentence for bad input, and one real process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ascend_deep import Report
from ascend_deep.cli import app

SOURCE = """
import torch
from torch import nn

class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 8)
    def forward(self, x):
        weights, idx = self.gate(x).softmax(-1).topk(3, -1)
        return weights / weights.sum(-1, keepdim=True), idx

class Plain(nn.Module):
    def forward(self, x): return x.sin()

class Soft(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 8, 16))
        self.places = nn.Parameter(torch.randn(16, 12))
    def forward(self, x):
        mix = (x @ self.places).softmax(0).view(x.shape[0], 4, 3)
        slots = torch.einsum("tes,th->esh", mix, x)
        y = torch.bmm(nn.functional.silu(torch.bmm(slots, self.w1)), self.w2)
        return torch.einsum("tes,esh->th", mix, y)

class Failing(nn.Module):
    def forward(self, x): raise RuntimeError("the model is broken on purpose")

def broken():
    raise ValueError("no such weights\\nsecond line")

def leaves():
    raise SystemExit(3)

def with_inputs():
    return Router().to(torch.bfloat16), (torch.randn(5, 16).bfloat16(),)
"""

runner = CliRunner()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "cli_models.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_models", raising=False)
    torch._dynamo.reset()
    return "cli_models"


ONLY_ROUTER = ["--shape", "7,16", "--enable", "router"]


def test_explain_text(model: str) -> None:
    result = runner.invoke(app, ["explain", f"{model}:Router", *ONLY_ROUTER])
    assert result.exit_code == 0, result.output
    assert "1 place fused" in result.stdout and "moe_route" in result.stdout and "inference" in result.stdout


def test_explain_prints_blocks_before_and_after_normal_form(model: str) -> None:
    result = runner.invoke(app, ["explain", f"{model}:Router", *ONLY_ROUTER, "--normal-form"])
    assert result.exit_code == 0, result.output
    fused = result.output.index("router at ")
    text = result.output[fused:]
    assert "fused as moe_route(" in text and "  before" in text and "  normal form" in text
    assert "target=torch.ops.aten.topk.default" in text[: text.index("  normal form")]
    assert "TopIds(" in text[text.index("  normal form") :]


def test_explain_prints_what_no_block_could_be_cut_from(model: str) -> None:
    """Tokens of a soft mixture are mixed before the experts see them: the place is shown with the reason."""
    result = runner.invoke(app, ["explain", f"{model}:Soft", "--shape", "7,16", "--normal-form"])
    assert result.exit_code == 3
    assert "experts_batched at " in result.output and "left: " in result.output and "Einsum(" in result.output


def test_explain_json_and_training(model: str) -> None:
    result = runner.invoke(app, ["explain", f"{model}:Router", *ONLY_ROUTER, "--format", "json", "--training"])
    assert result.exit_code == 0, result.output
    report = Report.from_json(result.stdout)
    assert report.counts() == {"moe_route": 1} and report.training
    assert json.loads(result.stdout)["counts"] == {"moe_route": 1}


@pytest.mark.parametrize("ending", ["html", "json", "txt"])
def test_explain_output_chooses_the_form(model: str, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"out.{ending}"
    result = runner.invoke(app, ["explain", f"{model}:Router", *ONLY_ROUTER, "--target", "ascend950", "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert result.stdout == "" and str(path) in result.stderr.replace("\n", "")
    text = path.read_text(encoding="utf-8")
    assert "ascend950" in text
    assert text.startswith({"html": "<!DOCTYPE html>", "json": "{", "txt": "╭"}[ending])


def test_nothing_fused_is_exit_code_3(model: str) -> None:
    result = runner.invoke(app, ["explain", f"{model}:Plain", "--shape", "7,16"])
    assert result.exit_code == 3 and "nothing fused" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain", "cli_models:Nothing"], "no attribute 'Nothing'"),
        (["explain", "cli_models:Router", "--target", "mars"], "accepted are auto, cpu"),
        (["explain", "cli_models:Router", "--enable", "routers"], "'routers'"),
        (["explain", "cli_models:Router", "--shape", "two"], "sizes separated by commas"),
        (["explain", "mixtral", "--shape", "0,0"], "shape is 0,0; a Hugging Face model takes"),
        (["explain", "cli_models:Router", "--normal-form", "--format", "json"], "leave --format out"),
        (["explain", "cli_models:Router", "--set", "oops"], "name=value"),
        (["explain", "cli_models:Plain", "-o", "/no/such/folder/r.html"], "and there is no folder /no/such/folder."),
        (
            ["explain", "cli_models:Plain", "-o", "/"],
            "--output is '/', which is a folder; it takes the name of a file.",
        ),
        (["explain", "cli_models:Plain", "--shape", "99999999999,9999999"], "shape is 99999999999,9999999; no tensor"),
        (["explain", "mixtral", "--layers", "9" * 12], "layers is 999999999999; it takes a number from 1 to 1000."),
        (["explain", "mixtral", "--layers", "-1"], "layers is -1; it takes a number from 1 to 1000."),
        (["explain", "mixtral", "--set", "hidden_size=a"], "for field 'hidden_size': TypeError: Field 'hidden_size'"),
        (["replay", "/no/such/certificate"], "there is no file '/no/such/certificate'; a certificate is named by"),
        (["replay", "/"], "there is no file '/'; a certificate is named by its file or by its key."),
        (["replay", "*"], "begins with '*'"),
        (["lower", "mixtral", "--target", "cpu"], "--target is 'cpu'; lower takes ascend950, ascend950dt, ascend910b,"),
        (["lower", "mixtral", "--layers", "0"], "layers is 0; it takes a number from 1 to 1000."),
        (["lower", "mixtral", "--shape", "a,2"], "shape is 'a,2'; it takes sizes separated by commas"),
        (["lower", "mixtral", "-o", "/dev/null/x"], "--output is '/dev/null/x', which is to be a folder, but"),
        (["bench", "cli_models:Plain", "--against", "tpu"], "it takes eager or inductor"),
        (["replay", "no-such-certificate"], "begins with 'no-such-certificate'"),
        (["explain", "./no_such_file.py:Router"], "there is no file './no_such_file.py'"),
        (["explain", "./cli_models.py"], "names no attribute"),
        (["explain", "../models:build"], "'../models' is a path; it takes a Python file"),
        (["explain", "cli models:Router"], "not the name of a module"),
        (["explain", ":Router"], "not the name of a module"),
        (["explain", "cli_models:"], "names no attribute"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(model: str, arguments: list[str], sentence: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and "Traceback" not in result.stderr


def test_a_failing_model_is_exit_code_1(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = runner.invoke(app, ["explain", f"{model}:Failing"])
    assert result.exit_code == 1 and "the model failed" in result.stderr and "broken on purpose" in result.stderr
    monkeypatch.setenv("ASCEND_DEEP_TRACEBACK", "1")
    result = runner.invoke(app, ["explain", f"{model}:Failing"])
    assert isinstance(result.exception, Exception) and not isinstance(result.exception, SystemExit)


def test_an_impossible_model_is_one_line_without_a_traceback(model: str) -> None:
    """In a process of its own: the traceback of such an error is logged by torch, not raised."""
    arguments = ["explain", "mixtral", "--set", "num_experts_per_tok=99", "--layers", "1"]
    command = "from ascend_deep.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments], capture_output=True, text=True, timeout=300, env=dict(os.environ)
    )
    assert done.returncode == 1
    text = done.stderr.strip()
    assert "k not in range for dimension, in topk" in text and "Traceback" not in text
    assert len(text.splitlines()) == 1, text


def test_a_build_function_that_raises_is_exit_code_1(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("explain", "bench"):
        result = runner.invoke(app, [command, f"{model}:broken"])
        assert result.exit_code == 1, result.output
        (line,) = result.stderr.strip().splitlines()
        assert "'cli_models:broken' raised ValueError: no such weights." in line
    monkeypatch.setenv("ASCEND_DEEP_TRACEBACK", "1")
    result = runner.invoke(app, ["explain", f"{model}:broken"])
    assert isinstance(result.exception, RuntimeError) and isinstance(result.exception.__cause__, ValueError)


def test_a_module_that_raises_is_exit_code_1(model: str, tmp_path: Path) -> None:
    (tmp_path / "cli_raises.py").write_text("raise KeyError('weights')\n")
    for name in ("cli_raises:build", f"{tmp_path}/cli_raises.py:build"):
        result = runner.invoke(app, ["explain", name])
        assert result.exit_code == 1 and "raised KeyError: 'weights'." in result.stderr, result.output
    assert "cli_raises" not in sys.modules


def test_a_file_with_a_model(model: str, tmp_path: Path) -> None:
    arguments = ["explain", f"{tmp_path}/{model}.py:Router", *ONLY_ROUTER, "--format", "json"]
    for _ in range(2):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert Report.from_json(result.stdout).matches[0].source.startswith("cli_models.py:")
    (tmp_path / "json.py").write_text("VALUE = 3\n")
    result = runner.invoke(app, ["explain", f"{tmp_path}/json.py:VALUE"])
    assert result.exit_code == 2 and "another module named 'json' is loaded" in result.stderr


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0 and result.stdout.strip() == f"ascend-deep {importlib.metadata.version('ascend-deep')}"


def test_replay_runs_the_certificate_of_an_explain(model: str) -> None:
    explained = runner.invoke(app, ["explain", f"{model}:Router", *ONLY_ROUTER, "--format", "json"])
    key = Report.from_json(explained.stdout).matches[0].certificate
    result = runner.invoke(app, ["replay", key])
    assert result.exit_code == 0, result.output
    result = runner.invoke(app, ["replay", key[:8], "--format", "json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["ok"] is True


def test_replay_of_a_doctored_certificate_fails(model: str, tmp_path: Path) -> None:
    from ascend_deep.passes import certificates

    explained = runner.invoke(app, ["explain", f"{model}:Router", *ONLY_ROUTER, "--format", "json"])
    key = Report.from_json(explained.stdout).matches[0].certificate
    data = json.loads(certificates.find(key).read_text())
    data["attrs"]["scoring"] = "sigmoid"
    path = tmp_path / "doctored.json"
    path.write_text(json.dumps(data))
    result = runner.invoke(app, ["replay", str(path)])
    assert result.exit_code == 1, result.output


def test_doctor_text_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    from ascend_deep import doctor

    found = doctor.check_all()  # once: it imports every package in a process of its own
    monkeypatch.setattr(doctor, "check_all", lambda: found)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0 and "torch" in result.stdout
    data = json.loads(runner.invoke(app, ["doctor", "--format", "json"]).stdout)
    assert data["ok"] is True and {"python", "torch", "native.cpu"} <= {c["name"] for c in data["checks"]}


def test_bench_compares_and_checks(model: str) -> None:
    arguments = [
        "bench",
        f"{model}:Router",
        "--shape",
        "7,16",
        "--rounds",
        "3",
        "--against",
        "eager",
        "--format",
        "json",
    ]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = {r["name"]: r for r in json.loads(result.stdout)["rows"]}
    assert set(rows) == {"eager", "ascend_deep"}
    assert rows["eager"]["speedup"] == 1.0 and rows["ascend_deep"]["error"] < 1e-5
    assert all(0 < r["fastest"] <= r["median"] for r in rows.values())


def test_bench_names_the_inputs_that_were_timed(model: str) -> None:
    arguments = ["bench", f"{model}:with_inputs", "--rounds", "2", "--against", "eager"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().splitlines()[0].strip() == "Router, inference, bfloat16[5, 16], bfloat16"
    data = json.loads(runner.invoke(app, [*arguments, "--format", "json"]).stdout)
    assert (data["inputs"], data["dtype"]) == ("bfloat16[5, 16]", "bfloat16")


def test_bench_training_gives_gradients_back() -> None:
    from ascend_deep import bench
    from ascend_deep.models import Loaded

    layer = torch.nn.Linear(4, 4)
    layer.weight.grad = torch.full_like(layer.weight, 2.5)
    rows = bench.run(Loaded(layer, (torch.randn(3, 4),)), contenders=("eager",), rounds=2, training=True)
    assert [r.name for r in rows] == ["eager"]
    assert layer.bias.grad is None and torch.equal(layer.weight.grad, torch.full_like(layer.weight, 2.5))


@pytest.mark.parametrize("command", ["explain", "doctor", "replay", "bench"])
def test_help_has_examples_and_exit_codes(command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0 and f"ascend-deep {command}" in result.stdout and "Exit code" in result.stdout


@pytest.mark.skipif(importlib.util.find_spec("torchair") is not None, reason="it is installed")
@pytest.mark.parametrize("arguments", [["explain", "mixtral"], ["calibrate", "--small"]])
def test_a_compiler_that_is_not_installed_is_bad_input(arguments: list[str]) -> None:
    result = runner.invoke(app, [*arguments, "--downstream", "npu"])
    assert result.exit_code == 2
    assert "option 'downstream' is 'npu', which needs torch_npu with torchair" in result.stderr.replace("\n", " ")


def test_a_model_that_ends_the_process_has_not_been_explained(model: str) -> None:
    """Its exit code would be read as ours."""
    result = runner.invoke(app, ["explain", f"{model}:leaves"])
    assert result.exit_code == 1 and "'cli_models:leaves' raised SystemExit: 3." in result.stderr.replace("\n", " ")


def test_unknown_command_and_no_command() -> None:
    assert runner.invoke(app, ["explode"]).exit_code == 2
    assert "explain" in runner.invoke(app, []).output


def test_prepare_makes_one_graph_of_an_expert_loop() -> None:
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    arguments = ["explain", "mixtral", "--layers", "1", "--experts-implementation", "eager", "--format", "json"]
    arguments += ["--enable", "router"]
    loop = Report.from_json(runner.invoke(app, arguments).stdout)
    assert loop.graph_breaks and "prepare" in loop.graph_breaks[0].hint
    torch._dynamo.reset()
    result = runner.invoke(app, [*arguments, "--prepare"])
    report = Report.from_json(result.stdout)
    assert not report.graph_breaks
    assert report.counts() == {"moe_experts": 1, "moe_route": 1}
    assert [c.module for c in report.own_calls] == ["model.layers.0.mlp.experts"]
    assert "1× moe_experts  model.layers.0.mlp.experts" in str(report)
    assert "Called by the model itself" in report.to_html()
    assert "1 experts module swapped" in result.stderr


def test_a_real_process(model: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "ascend_deep", "explain", f"{model}:Router", *ONLY_ROUTER, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert Report.from_json(done.stdout).counts() == {"moe_route": 1}


def test_importing_the_command_line_imports_no_torch() -> None:
    code = "import sys, ascend_deep.cli, ascend_deep.doctor; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
