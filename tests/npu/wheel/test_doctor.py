"""The doctor where the wheel is: without CANN, and over stand-ins for it."""

from __future__ import annotations

import pytest

from ascend_deep import doctor
from tests.npu.rig import stubs_folder


def test_the_wheel_without_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    found = {c.name: c for c in doctor._npu(broken=True)}
    assert found["torch_npu"].status == "fail" and "libhccl.so" in found["torch_npu"].found
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found["torch_npu"].fix and found["CANN"].status == "fail"


def test_the_wheel_over_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stubs_folder()))
    found = {c.name: c for c in doctor._npu(broken=False)}
    assert found["torch_npu"].status == "ok" and found["torchair"].found == "part of torch_npu 2.13.0"
    assert found["NPU"].status == "absent" and found["CANN"].status == "fail"
