"""doctor: versions, broken packages, the torch_npu trap, and that it works where torch does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_deep import doctor
from ascend_deep.doctor import Check, cann_version, worst

Fake = Callable[..., None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Installs a made-up distribution in front of everything else: ``fake(name, version, code, entry_points)``."""

    def install(name: str, version: str, code: str = "", entry_points: str = "") -> None:
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(code or f"__version__ = {version!r}\n")
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("")
        if entry_points:
            (info / "entry_points.txt").write_text(entry_points)

    monkeypatch.syspath_prepend(tmp_path)
    for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    return install


def checks() -> dict[str, Check]:
    return {c.name: c for c in doctor.check_all()}


def test_here() -> None:
    found = checks()
    assert found["python"].status == "ok" and found["torch"].status == "ok"
    assert found["native.cpu"].status in ("ok", "warn")
    assert found["torch_npu"].status == found["CANN"].status == "absent"
    assert worst(list(found.values())) != "fail"


def test_torch_npu_without_cann_is_named_with_the_way_out(fake: Fake) -> None:
    broken = "raise ImportError('libhccl.so: cannot open shared object file')\n"
    fake("torch_npu", "2.13.0", broken, "[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    found = checks()
    assert found["torch"].status == "fail"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found["torch"].fix and "torch_npu" in found["torch"].found
    assert found["torch_npu"].status == "fail" and "libhccl.so" in found["torch_npu"].found
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found["torch_npu"].fix
    assert found["CANN"].status == "fail"


def test_each_package_has_its_own_finding(fake: Fake) -> None:
    """A look around imports torch several times, so all these packages are there at once."""
    fake("torch_npu", "2.9.1")
    for name in ("triton", "deep_gemm", "deep_ep"):
        fake(name, "3.1", f"import a_library_of_{name}\n")
    fake("transformers", "5.9.0")  # as text, "5.9" is larger than "5.24"
    found = checks()
    assert found["torch"].status == "ok"
    npu = found["torch_npu"]
    assert npu.status == "fail" and "2.9.1" in npu.found and "Install torch_npu 2." in npu.fix
    for name in ("triton", "deep_gemm", "deep_ep"):
        assert found[name].status == "warn" and f"a_library_of_{name}" in found[name].found
        assert found[name].fix.endswith(".")
    assert found["transformers"].status == "warn" and found["transformers"].found == "5.9.0"


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.10.1", "fail"), ("2.9.0", "fail"), ("2.15.0", "fail"), ("2.11.0", "ok"), ("odd", "fail")],
)
def test_versions_compare_as_versions(fake: Fake, version: str, status: str) -> None:
    fake("torch", version)
    assert doctor._torch().status == status


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("package_name=Ascend-cann-toolkit\nversion=9.10.T5\n", "9.10.T5"),
        ("version=8.5.RC1\narch=x86_64\n", "8.5.RC1"),
    ],
)
def test_cann_version(tmp_path: Path, text: str, version: str) -> None:
    folder = tmp_path / "x86_64-linux"
    folder.mkdir()
    (folder / "ascend_toolkit_install.info").write_text(text)
    assert cann_version({"ASCEND_TOOLKIT_HOME": str(tmp_path)}) == version


def test_cann_absent_and_without_a_version(tmp_path: Path) -> None:
    assert cann_version({"ASCEND_HOME_PATH": str(tmp_path)}) == "unknown version"
    if not Path("/usr/local/Ascend").exists():
        assert cann_version({}) is None


def test_works_where_nothing_can_be_imported(tmp_path: Path) -> None:
    for name in ("torch", "transformers", "triton", "torch_npu"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('{name} is broken on purpose')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "ascend_deep", "doctor", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    found = {c["name"]: c for c in data["checks"]}
    assert data["ok"] is False
    assert found["torch"]["status"] == "fail" and "torch is broken on purpose" in found["torch"]["found"]
    assert found["native.cpu"]["status"] == "warn" and "broken on purpose" in found["native.cpu"]["found"]
    assert found["transformers"]["status"] == "warn"


def test_worst() -> None:
    assert worst([]) == "ok"
    lines = [Check("a", s, "") for s in ("ok", "warn", "absent")]
    assert worst(lines) == "warn" and worst([*lines, Check("b", "fail", "")]) == "fail"
