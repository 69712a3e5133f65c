"""The doctor's findings about Ascend beyond torch_npu and CANN: driver, devices, torchair, HCCL, Triton.

Imports nothing of torch. Each function returns ``(name, status, found, fix)`` as ``doctor.Check`` takes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["DRIVER", "FIRMWARE", "Finding", "findings", "installed_version", "triton_clash"]

Finding = tuple[str, str, str, str]
DRIVER, FIRMWARE = Path("/usr/local/Ascend/driver/version.info"), Path("/usr/local/Ascend/firmware/version.info")
_WHEEL = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
_HCCL = "import ctypes; ctypes.CDLL('libhccl.so')"
_DEVICES = (
    "import torch, torch_npu\n"
    "from ascend_deep.native.torch_npu import soc\n"
    "n = torch.npu.device_count() if torch.npu.is_available() else 0\n"
    "name = torch_npu.npu.get_device_name(0) if n else ''\n"
    "print(n, name or '-', soc.family(name) or '-')"
)


class Result(Protocol):
    """What a probe gives: whether the code ran, what it printed, the last line of its error."""

    @property
    def ok(self) -> bool: ...
    @property
    def output(self) -> str: ...
    @property
    def error(self) -> str: ...


def installed_version(file: Path) -> str | None:
    """``Version=…`` of a driver's or firmware's ``version.info``; ``None`` if there is no such file or line."""
    try:
        found = re.search(r"^Version\s*=\s*(\S+)", file.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return found.group(1) if found else None


def findings(
    probe: Callable[..., Result], version: Callable[[str], str | None], *, files: Sequence[Path] = (DRIVER, FIRMWARE)
) -> list[Finding]:
    """Everything about Ascend that needs torch_npu to import, and the driver. Called where it does.

    Args:
        probe: runs code in a fresh interpreter.
        version: of an installed distribution.
        files: version files of driver and firmware.
    """
    found: list[Finding] = []
    for name, file in zip(("Ascend driver", "Ascend firmware"), files, strict=True):
        text = installed_version(file)
        fix = "install the driver package of your device; npu-smi info shows whether it works"
        found.append((name, "ok", text, "") if text else (name, "absent", "not found", fix))
    result = probe("import torch_npu, torchair; torchair.get_npu_backend", **_WHEEL)
    npu = version("torch_npu") or "unknown"
    if result.ok:
        found.append(("torchair", "ok", f"part of torch_npu {npu}", ""))
    else:
        found.append(("torchair", "warn", f"does not import: {result.error}", "pip install 'protobuf>=3.13'"))
    result = probe(_HCCL)
    if result.ok:
        found.append(("HCCL", "ok", "libhccl.so loads", ""))
    else:
        found.append(("HCCL", "warn", result.error, "source CANN's set_env.sh; several NPUs need it"))
    found.append(_devices(probe(_DEVICES, **_WHEEL)))
    clash = triton_clash(version)
    return [*found, clash] if clash is not None else found


def _devices(result: Result) -> Finding:
    if not result.ok:
        return "NPU", "warn", f"asking for devices fails: {result.error}", "npu-smi info shows whether the driver works"
    lines = result.output.strip().splitlines() or ["0 - -"]
    count, name, family = (lines[-1].split() + ["-"] * 3)[:3]
    if count == "0":
        return "NPU", "absent", "no device; ops run on the CPU, and graphs can be written by ascend-deep lower", ""
    if family == "-":
        return "NPU", "warn", f"{count} of {name}, of which no limits are known", "the reference bodies run on it"
    return "NPU", "ok", f"{count} of {name} (limits of {family}; never tested on hardware)", ""


def triton_clash(version: Callable[[str], str | None]) -> Finding | None:
    """triton and triton-ascend are two distributions of one package: the later one overwrites the earlier."""
    ascend, upstream = version("triton-ascend"), version("triton")
    if ascend is None:
        return None
    if upstream is not None:
        text = f"triton-ascend {ascend} and triton {upstream} write the same files"
        return "triton-ascend", "warn", text, "keep one of them in an environment: pip uninstall triton"
    return "triton-ascend", "ok", ascend, ""
