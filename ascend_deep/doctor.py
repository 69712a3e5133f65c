"""``ascend-deep doctor``: is this environment fit, and if not, what is missing.

Nothing is imported in this process but the standard library, ``packaging`` and, through our own package, nothing of
torch: a broken torch or torch_npu must not break the tool that says so. Versions come from package metadata; whether
a package can be imported is tried in a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ascend_deep import _doctor_npu

__all__ = ["Check", "cann_version", "check_all", "worst"]

TORCH = SpecifierSet(">=2.11,<2.15", prereleases=True)
TRANSFORMERS = SpecifierSet(">=5.24,<6", prereleases=True)
PYTHON = SpecifierSet(">=3.10")
_PROBE_SECONDS = 120


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    ``status``: ``"ok"``; ``"absent"`` (optional, not there); ``"warn"`` (there, but something else runs instead);
    ``"fail"`` (the backend does not work). ``fix`` says what to do.
    """

    name: str
    status: str
    found: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """JSON form."""
        return asdict(self)


def worst(checks: Sequence[Check]) -> str:
    """The most serious status of all."""
    order = ("ok", "absent", "warn", "fail")
    return max((c.status for c in checks), key=order.index, default="ok")


def check_all() -> list[Check]:
    """Every check, in reading order. Takes some seconds: each package is imported in a process of its own."""
    torch = _probe(_IMPORT_TORCH)
    autoload = _autoload_trap(torch)
    return [
        _python(),
        autoload or _torch(torch),
        _native(),
        *_npu(broken=autoload is not None),
        _optional(
            "transformers", TRANSFORMERS, "pip install 'ascend-deep[hf]'", "models by family name, and prepare()"
        ),
        _optional("triton", None, "it comes with the CUDA builds of torch", "Triton kernels on CUDA"),
        _optional("deep_gemm", None, "build DeepGEMM (CUDA) or DeepGEMM-Ascend", "DeepGEMM kernels"),
        _optional("deep_ep", None, "build DeepEP (CUDA) or DeepEP-Ascend", "DeepEP dispatch and combine"),
    ]


_IMPORT_TORCH = "import torch; print(torch.__version__)"


# -- the parts --------------------------------------------------------------------------------------------------------
def _python() -> Check:
    found = platform.python_version()
    if Version(found) not in PYTHON:
        return Check("python", "fail", found, f"Python {PYTHON} is needed.")
    return Check("python", "ok", f"{found} on {platform.machine()}")


def _torch(imported: _Result | None = None) -> Check:
    found = _version("torch")
    if found is None:
        return Check("torch", "fail", "not installed", f"pip install 'torch{TORCH}'")
    result = imported or _probe(_IMPORT_TORCH)
    if not result.ok:
        return Check("torch", "fail", f"{found} cannot be imported: {result.error}", "Reinstall torch.")
    try:
        inside = Version(found) in TORCH
    except InvalidVersion:
        inside = False
    if not inside:
        return Check("torch", "fail", f"{found}", f"ascend-deep is built and tested for torch {TORCH}.")
    # Backends that torch loads by itself may print something before.
    return Check("torch", "ok", (result.output.strip().splitlines() or [found])[-1])


def _native() -> Check:
    """The C++ kernels: built, loadable, and for which instruction set."""
    code = (
        "import json\nfrom ascend_deep.native.cpu import provider as p\n"
        "missing = p.CPU.unavailable()\n"
        "isa = getattr(p, 'isa', lambda: '')\n"
        "print(json.dumps({'missing': missing, 'isa': '' if missing else str(isa())}))"
    )
    result = _probe(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    if not result.ok:
        return Check("native.cpu", "warn", f"cannot be loaded: {result.error}", "The reference bodies run instead.")
    data = _last_json(result.output)
    if data.get("missing"):
        return Check("native.cpu", "warn", str(data["missing"]), "The reference bodies run instead, and are slower.")
    return Check("native.cpu", "ok", f"C++ kernels, {data['isa']}" if data.get("isa") else "C++ kernels")


def _autoload_trap(imported: _Result) -> Check | None:
    """torch imports device backends that register themselves. One that fails takes ``import torch`` down with it."""
    if _version("torch") is None or imported.ok:
        return None
    without = _probe(_IMPORT_TORCH, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    if not without.ok:
        return None
    names = [e.name for e in importlib.metadata.entry_points(group="torch.backends")]
    return Check(
        "torch",
        "fail",
        f"{without.output.strip()} imports only without its device backends ({', '.join(names) or 'unknown'}): "
        f"{imported.error}",
        "Set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use torch on the CPU, or repair the backend (for torch_npu: source "
        "CANN's set_env.sh).",
    )


def _npu(broken: bool) -> list[Check]:
    found, cann = _version("torch_npu"), cann_version()
    if found is None:
        fix = "needed on Ascend hardware only"
        return [Check("torch_npu", "absent", "not installed", fix), _cann(cann, needed=False)]
    result = _probe("import torch_npu; print(torch_npu.__version__)", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    if not result.ok:
        fix = (
            "Source CANN's set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0: without CANN, torch_npu "
            "breaks `import torch`."
        )
        return [
            Check("torch_npu", "fail" if broken else "warn", f"{found} cannot be imported: {result.error}", fix),
            _cann(cann, needed=True),
        ]
    checks = [_pair(found), _cann(cann, needed=True)]
    return [*checks, *(Check(*finding) for finding in _doctor_npu.findings(_probe, _version))]


def _pair(npu: str) -> Check:
    """torch_npu is built for one release of torch; the first two numbers must agree."""
    torch = _version("torch") or "0"
    if _release(npu) != _release(torch):
        return Check(
            "torch_npu",
            "fail",
            f"{npu} with torch {torch}",
            f"Install torch_npu {'.'.join(map(str, _release(torch)))}.",
        )
    return Check("torch_npu", "ok", npu)


def _cann(found: str | None, needed: bool) -> Check:
    if found is not None:
        return Check("CANN", "ok", found)
    return Check("CANN", "fail" if needed else "absent", "not found", "source Ascend's set_env.sh" if needed else "")


def cann_version(environment: Mapping[str, str] | None = None) -> str | None:
    """Version of the CANN toolkit that the environment points to, ``None`` if there is none."""
    env = os.environ if environment is None else environment
    roots = [env.get("ASCEND_TOOLKIT_HOME"), env.get("ASCEND_HOME_PATH"), "/usr/local/Ascend/ascend-toolkit/latest"]
    for root in filter(None, roots):
        files = [*Path(root).glob("*/ascend_toolkit_install.info"), *Path(root).glob("version.cfg")]
        for file in files:
            match = re.search(
                r"^(?:version|.*toolkit_running_version)\s*=\s*\[?(?:[\d.]+:)?([\w.]+)", file.read_text(), re.M
            )
            if match:
                return match.group(1)
        if Path(root).is_dir():
            return "unknown version"
    return None


def _optional(name: str, wanted: SpecifierSet | None, how: str, purpose: str) -> Check:
    found = _version(name)
    if found is None:
        return Check(name, "absent", "not installed", f"For {purpose}: {how}.")
    result = _probe(f"import {name}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    if not result.ok:
        return Check(name, "warn", f"{found} cannot be imported: {result.error}", f"For {purpose}: {how}.")
    if wanted is not None:
        try:
            if Version(found) not in wanted:
                return Check(name, "warn", found, f"Tested with {name} {wanted}.")
        except InvalidVersion:
            return Check(name, "warn", f"{found} is not a version", f"Tested with {name} {wanted}.")
    return Check(name, "ok", found)


# -- tools ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Result:
    ok: bool
    output: str
    error: str


def _probe(code: str, **environment: str) -> _Result:
    """Run ``code`` in a fresh interpreter with our import path. ``error`` is the last line of what went wrong."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_SECONDS, env=env, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _Result(False, "", f"{type(error).__name__} after at most {_PROBE_SECONDS} s")
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return _Result(done.returncode == 0, done.stdout, lines[-1] if lines else f"exit code {done.returncode}")


def _last_json(text: str) -> dict[str, Any]:
    lines = text.strip().splitlines()
    try:
        data = json.loads(lines[-1]) if lines else {}
    except ValueError:
        data = {}
    return data if isinstance(data, dict) else {}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()
