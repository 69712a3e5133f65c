"""A second process with a warm cache compiles nothing again, and the report still answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_deep.lowering._torch_compat import TORCH

SCRIPT = """
import json, sys
import torch
import ascend_deep
from ascend_deep import backend
from torch._dynamo.utils import counters
from ascend_deep.models import load

training, options = json.loads(sys.argv[1])
runs = []
original = backend.Pipeline.run
backend.Pipeline.run = lambda self, gm: runs.append(1) or original(self, gm)
loaded = load("qwen3_moe", layers=1, experts_implementation="grouped_mm")
model, ids = loaded.model, loaded.kwargs["input_ids"]
run = torch.compile(model, backend="ascend_deep", fullgraph=True, options=options)
if training:
    run(ids, labels=ids).loss.backward()
else:
    with torch.no_grad():
        run(ids)
report = ascend_deep.last_report()
print(json.dumps({
    "runs": len(runs),
    "counts": report.counts(),
    "cached": report.graphs[0].cached,
    "timings": sorted(report.timings),
    "modules": sorted(m.module for m in report.matches),
    "aot": dict(counters["aot_autograd"]),
    "fx": {k: v for k, v in counters["inductor"].items() if "fxgraph" in k},
}))
"""


def process(cache: Path, training: bool = False, **options) -> dict:
    """Compile in a fresh process with ``cache`` as the compile cache."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    root = Path(__file__).parents[2]
    env["PYTHONPATH"] = str(root)
    command = [sys.executable, "-c", SCRIPT, json.dumps([training, options])]
    done = subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def inference(tmp_path_factory):
    """A cache that one process has filled, and what that process said."""
    cache = tmp_path_factory.mktemp("inference") / "cache"
    return cache, process(cache)


def test_second_process(inference):
    _check_warm(*inference, training=False)


def test_second_process_training(tmp_path):
    _check_warm(tmp_path / "cache", process(tmp_path / "cache", training=True), training=True)


def _check_warm(cache, cold, training):
    assert cold["runs"] == 1 and not cold["cached"] and cold["counts"] == {"moe_experts": 1, "moe_route": 1}
    warm = process(cache, training)
    assert warm["aot"].get("autograd_cache_hit") == 1 and not warm["aot"].get("autograd_cache_miss"), warm
    assert not warm["fx"].get("fxgraph_cache_miss"), warm
    if TORCH >= (2, 12):  # before, the rewriting runs ahead of Inductor, and the caches hold its result
        assert warm["runs"] == 0 and warm["cached"] and warm["timings"] == ["downstream"]
    assert {"capture", "downstream", "probe"} <= set(cold["timings"])
    assert warm["counts"] == cold["counts"] and warm["modules"] == cold["modules"]


def test_options_are_part_of_the_key_and_the_folder_is_not(inference, tmp_path):
    cache, _ = inference
    shutil.copytree(cache, tmp_path / "moved")
    other = process(tmp_path / "moved", disable=["router"])
    assert other["runs"] == 1 and other["counts"] == {"moe_experts": 1}
    moved = process(tmp_path / "moved")
    assert moved["counts"] == {"moe_experts": 1, "moe_route": 1}
