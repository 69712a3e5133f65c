"""A second process with a warm cache compiles nothing again, and the report still answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascend_deep.lowering._torch_compat import TORCH

# One process takes several compiles, one after the other, each as if it were the first: starting one costs more than
# most of them. The block stands alone, because attention around it would be half a minute of C++.
SCRIPT = """
import json, sys
import torch
import ascend_deep
from ascend_deep import backend
from ascend_deep.passes import pipeline
from torch._dynamo.utils import counters
from tests.backend.block import Block

runs = []
original = backend.Pipeline.run
backend.Pipeline.run = lambda self, gm: runs.append(1) or original(self, gm)

def one(training, options):
    torch._dynamo.reset()
    torch.manual_seed(5)
    pipeline._DECIDED.clear(), counters.clear(), runs.clear()
    model, x = torch.nn.Sequential(torch.nn.LayerNorm(24), Block()), torch.randn(9, 24)
    run = torch.compile(model, backend="ascend_deep", fullgraph=True, options=options)
    if training:
        found = torch.autograd.grad(run(x).square().sum(), list(model.parameters()))
        wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    else:
        with torch.no_grad():
            found, wanted = run(x), model(x)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    report = ascend_deep.last_report()
    return {
        "runs": len(runs),
        "counts": report.counts(),
        "cached": report.graphs[0].cached,
        "timings": sorted(report.timings),
        "modules": sorted(m.module for m in report.matches),
        "aot": dict(counters["aot_autograd"]),
        "fx": {k: v for k, v in counters["inductor"].items() if "fxgraph" in k},
    }

print(json.dumps([one(*call) for call in json.loads(sys.argv[1])]))
"""
BOTH = [(False, {}), (True, {})]


def process(cache: Path, calls: list[tuple[bool, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Compile in a fresh process with ``cache`` as the compile cache; one answer for every (training, options)."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    root = Path(__file__).parents[2]
    env["PYTHONPATH"] = str(root)
    command = [sys.executable, "-c", SCRIPT, json.dumps(calls)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that one process has filled with inference and training, and what that process said."""
    cache = tmp_path_factory.mktemp("filled") / "cache"
    return cache, process(cache, BOTH)


@pytest.fixture(scope="module")
def again(filled):
    """What a second process said."""
    return process(filled[0], BOTH)


@pytest.mark.parametrize("training", [False, True])
def test_second_process(filled, again, training):
    cold, warm = filled[1][training], again[training]
    assert cold["runs"] == 1 and not cold["cached"] and cold["counts"] == {"moe_experts": 1, "moe_route": 1}
    assert warm["aot"].get("autograd_cache_hit") == 1 and not warm["aot"].get("autograd_cache_miss"), warm
    assert not warm["fx"].get("fxgraph_cache_miss"), warm
    if TORCH >= (2, 12):  # before, the rewriting runs ahead of Inductor, and the caches hold its result
        assert warm["runs"] == 0 and warm["cached"] and warm["timings"] == ["downstream"]
    assert {"capture", "downstream", "probe"} <= set(cold["timings"])
    assert warm["counts"] == cold["counts"] and warm["modules"] == cold["modules"] and any(cold["modules"])


def test_options_are_part_of_the_key_and_the_folder_is_not(filled, tmp_path):
    shutil.copytree(filled[0], tmp_path / "moved")
    other, moved = process(tmp_path / "moved", [(False, {"disable": ["router"]}), (False, {})])
    assert other["runs"] == 1 and other["counts"] == {"moe_experts": 1}
    assert moved["counts"] == {"moe_experts": 1, "moe_route": 1}
