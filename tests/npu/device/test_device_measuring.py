"""Benchmarks and calibration on a real NPU run and give figures. Skipped everywhere else, so far everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import ascend_deep
from ascend_deep import calibrate
from ascend_deep.calibrate_cases import CASES
from ascend_deep.calibration import load

if not (hasattr(torch, "npu") and torch.npu.is_available()):
    pytest.skip("not run: no Ascend device", allow_module_level=True)

from benchmarks import ascend

DEVICE = "npu"


@pytest.mark.parametrize("name", [r.name for r in ascend.ROWS if r.call is not None])
def test_a_row_of_the_published_tables_runs(name: str) -> None:
    (row,) = [r for r in ascend.ROWS if r.name == name]
    found = ascend.measure(row, DEVICE, rounds=3, divide=8)
    if found.milliseconds is None:
        pytest.skip(found.note)
    assert found.milliseconds > 0 and found.tflops is not None and found.provider != "-"


@pytest.mark.parametrize("name", sorted({c.recogniser for c in CASES}))
def test_a_block_is_measured(name: str) -> None:
    found, failed = calibrate.run(device=DEVICE, only=[name], downstream="eager", rounds=3, small=True)
    # torch's own scaled products and FP8 are not there on every processor; anything else has to give a figure.
    if not found.measured and name in ("fp8_linear", "scaled_mm", "grouped_mm", "experts_grouped"):
        pytest.skip(failed[0].reason)
    assert failed == [] and all(m.fused > 0 and m.written > 0 for m in found.measured)


def test_a_calibration_decides_on_the_device(tmp_path: Path) -> None:
    found, _ = calibrate.run(device=DEVICE, only=["linear"], downstream="eager", rounds=3, small=True)
    file = tmp_path / "device.toml"
    file.write_text(found.text().replace("profits = false", "profits = true"), encoding="utf-8")
    assert load(file).machine.device == DEVICE
    x, w = (torch.randn(24, 64, device=DEVICE).bfloat16() for _ in range(2))
    with torch.no_grad():
        report = ascend_deep.explain(F.linear, x, w, options={"downstream": "eager", "calibration": str(file)})
    assert report.counts() == {"gemm_bf16": 1}, report
