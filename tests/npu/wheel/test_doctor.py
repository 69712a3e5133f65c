"""The doctor where the wheel is: without CANN, beside another torch, and over stand-ins for CANN."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_deep import doctor
from tests.npu.rig import stubs_folder

_CANN = ("LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD", "ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")


@pytest.fixture(autouse=True)
def _no_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/usr/local/Ascend/ascend-toolkit").exists():
        pytest.skip("CANN is installed here")
    for name in _CANN:
        monkeypatch.delenv(name, raising=False)


def test_the_wheel_without_cann() -> None:
    """The whole command, in an environment in which ``import torch`` fails."""
    command = [sys.executable, "-m", "ascend_deep", "doctor", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    found = {c["name"]: c for c in data["checks"]}
    assert data["ok"] is False and {n for n, c in found.items() if c["status"] == "fail"} == {
        "torch",
        "torch_npu",
        "CANN",
    }
    assert (
        "imports only without its device backends (torch_npu): RuntimeError: Failed to load" in found["torch"]["found"]
    )
    assert found["torch"]["fix"].startswith("Set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use torch on the CPU")
    assert found["torch_npu"]["found"].startswith("2.13.0 cannot be imported: ImportError: libhccl.so: cannot open")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found["torch_npu"]["fix"]
    assert found["CANN"] == {
        **{"name": "CANN", "status": "fail", "found": "not found"},
        "fix": "source Ascend's set_env.sh",
    }
    assert found["native.cpu"]["status"] == "ok" and found["transformers"]["status"] == "ok"


def test_the_right_pair_over_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stubs_folder()))
    torch = doctor._torch()
    assert torch.status == "ok" and torch.found.startswith("2.13.0"), torch
    found = {c.name: (c.status, c.found) for c in doctor._npu(broken=False)}
    assert found == {
        "torch_npu": ("ok", "2.13.0"),
        "CANN": ("fail", "not found"),
        "Ascend driver": ("absent", "not found"),
        "Ascend firmware": ("absent", "not found"),
        "torchair": ("ok", "part of torch_npu 2.13.0"),
        "HCCL": ("ok", "libhccl.so loads"),
        "NPU": ("absent", "no device; ops run on the CPU, and graphs can be written by ascend-deep lower"),
    }


def test_the_wheel_beside_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "torch-2.12.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    pair = doctor._pair("2.13.0")
    assert (pair.status, pair.found, pair.fix) == ("fail", "2.13.0 with torch 2.12.1", "Install torch_npu 2.12.")
