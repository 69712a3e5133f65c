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
from tests.backend.families import build, token_ids

training, options = json.loads(sys.argv[1])
runs = []
original = backend.Pipeline.run
backend.Pipeline.run = lambda self, gm: runs.append(1) or original(self, gm)
model, ids = build("qwen3_moe"), token_ids(2, 9)
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


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_second_process(tmp_path, training):
    cold = process(tmp_path / "cache", training)
    assert cold["runs"] == 1 and not cold["cached"] and cold["counts"] == {"moe_experts": 2, "moe_route": 2}
    warm = process(tmp_path / "cache", training)
    assert warm["aot"].get("autograd_cache_hit") == 1 and not warm["aot"].get("autograd_cache_miss"), warm
    assert not warm["fx"].get("fxgraph_cache_miss"), warm
    if TORCH >= (2, 12):  # before, the rewriting runs ahead of Inductor, and the caches hold its result
        assert warm["runs"] == 0 and warm["cached"]
    assert warm["counts"] == cold["counts"] and warm["modules"] == cold["modules"]


def test_options_are_part_of_the_key_and_the_folder_is_not(tmp_path):
    process(tmp_path / "cache")
    other = process(tmp_path / "cache", disable=["router"])
    assert other["runs"] == 1 and other["counts"] == {"moe_experts": 2}
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    moved = process(tmp_path / "moved")
    assert moved["counts"] == {"moe_experts": 2, "moe_route": 2}
