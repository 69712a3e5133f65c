"""The doctor's Ascend findings, on files and answers of every kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ascend_deep._doctor_npu import findings, installed_version, triton_clash


@dataclass(frozen=True)
class Answer:
    ok: bool
    output: str = ""
    error: str = ""


def ask(tmp_path: Path, devices: Answer, hccl: bool = True, torchair: bool = True) -> dict[str, tuple[str, str, str]]:
    (tmp_path / "driver").write_text("Version=25.3.rc1\nascendhal_version=7.35.19\n")

    def probe(code: str, **_: str) -> Answer:
        if "libhccl" in code:
            return Answer(hccl, error="OSError: libhccl.so: cannot open shared object file")
        return Answer(torchair, error="ImportError: google.protobuf") if "torchair" in code else devices

    found = findings(probe, {"torch_npu": "2.13.0"}.get, files=(tmp_path / "driver", tmp_path / "none"))
    return {name: tuple(rest) for name, *rest in found}  # type: ignore[misc]


def test_a_machine_where_all_is_well(tmp_path: Path) -> None:
    found = ask(tmp_path, Answer(True, "warning: something\n8 Ascend910B3 910b\n"))
    assert found["Ascend driver"][:2] == ("ok", "25.3.rc1") and found["Ascend firmware"][0] == "absent"
    assert found["torchair"] == ("ok", "part of torch_npu 2.13.0", "")
    assert found["NPU"][:2] == ("ok", "8 of Ascend910B3 (limits of 910b; never tested on hardware)")
    assert found["HCCL"][0] == "ok" and "triton-ascend" not in found


def test_what_is_missing_is_named_with_a_way_out(tmp_path: Path) -> None:
    found = ask(tmp_path, Answer(True, "0 - -\n"), hccl=False, torchair=False)
    assert found["NPU"][0] == "absent" and "ascend-deep lower" in found["NPU"][1]
    assert found["HCCL"][0] == "warn" and "set_env.sh" in found["HCCL"][2]
    assert found["torchair"][0] == "warn" and "protobuf" in found["torchair"][2]
    assert (
        ask(tmp_path, Answer(True, "1 Ascend310P3 -\n"))["NPU"][1] == "1 of Ascend310P3, of which no limits are known"
    )
    broken = ask(tmp_path, Answer(False, error="RuntimeError: 507899"))["NPU"]
    assert broken[0] == "warn" and "507899" in broken[1] and "npu-smi" in broken[2]


@pytest.mark.parametrize(
    ("text", "version"), [("Version=24.1.0\n", "24.1.0"), ("a=b\nVersion = 25.0\n", "25.0"), ("", None)]
)
def test_versions_of_driver_files(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version.info").write_text(text)
    assert installed_version(tmp_path / "version.info") == version
    assert installed_version(tmp_path / "nothing") is None


def test_two_tritons_overwrite_each_other() -> None:
    assert triton_clash({}.get) is None and triton_clash({"triton": "3.9.0"}.get) is None
    both = triton_clash({"triton": "3.9.0", "triton-ascend": "3.2.0"}.get)
    assert both is not None and both[1] == "warn" and "pip uninstall triton" in both[3]
    alone = triton_clash({"triton-ascend": "3.2.0"}.get)
    assert alone is not None and alone[1:3] == ("ok", "3.2.0")
