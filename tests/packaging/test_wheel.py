"""The distribution as a user gets it: source archive, wheel, normal install and editable install, each in a venv.

The venvs see torch and the other packages of the test environment through a path file, so nothing is downloaded. The
sources are copied first, without anything that git ignores: what is in the wheel was built, not found.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).resolve().parents[2]
TREE = ("ascend_deep", "passes", "ops", "native", "lowering", "pyproject.toml", "setup.py", "README.md", "LICENSE")
FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]  # by package
KERNELS = "ascend_deep/native/cpu/_ascend_deep_cpu.so"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the C++ kernels of the wheel need g++")


def _run(*command: object, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def _copy(to: Path) -> Path:
    to.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.o", "*.egg-info")
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=ignore)
        else:
            shutil.copy2(source, to / name)
    return to


def _venv(at: Path) -> Path:
    """A new environment that sees the packages of this one, but not this one's ascend_deep. Returns its python."""
    _run(sys.executable, "-m", "venv", "--without-pip", at, cwd=at.parent)
    python = at / "bin/python"
    own = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=at.parent).strip())
    outer = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *site.getsitepackages()}
    (own / "outer.pth").write_text("\n".join(sorted(outer)) + "\n")
    return python


def _install(python: Path, *what: object, cwd: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", python)
    _run(*pip, "install", "--no-index", "--no-deps", "--no-build-isolation", *what, cwd=cwd)


@pytest.fixture(scope="module", autouse=True)
def _quick_builds(compiler: Path) -> Iterator[None]:
    """Three builds of the same kernels: what they compute is tested elsewhere, what is in them here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_DEEP_CXXFLAGS", "-O0")
        patch.setenv("CXX", str(compiler))
        yield


class Built(NamedTuple):
    """A copy of the sources, the source archive made of it, and the wheel that was built from the archive."""

    tree: Path
    archive: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    work = tmp_path_factory.mktemp("built")
    tree = _copy(work / "tree")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "dist", tree, cwd=work)
    (archive,) = (work / "dist").glob("*.tar.gz")
    (wheel,) = (work / "dist").glob("*.whl")
    return Built(tree, archive, wheel)


@pytest.fixture(scope="module")
def python(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment with the wheel in it."""
    at = tmp_path_factory.mktemp("wheel") / "venv"
    python = _venv(at)
    _install(python, built.wheel, cwd=at.parent)
    return python


def test_wheel_holds_packages_kernels_and_their_sources(built: Built) -> None:
    names = set(zipfile.ZipFile(built.wheel).namelist())
    expected = {KERNELS}
    for package, folder in FOLDERS.items():
        home = package.replace(".", "/")
        files = [f for pattern in ("*.py", "*.cpp", "*.h", "*.toml") for f in (built.tree / folder).glob(pattern)]
        assert files, folder
        expected |= {f"{home}/{f.name}" for f in files}
    assert sorted(expected - names) == []
    assert [n for n in sorted(names - expected) if ".dist-info/" not in n] == []
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_wheel_is_for_the_platform_and_for_every_python(built: Built) -> None:
    name = built.wheel.name
    assert "-py3-none-" in name and not name.endswith("-any.whl"), name


def test_source_archive_holds_what_a_build_needs(built: Built) -> None:
    with tarfile.open(built.archive) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    cpp = {f"native/cpu/{f.name}" for pattern in ("*.cpp", "*.h") for f in (built.tree / "native/cpu").glob(pattern)}
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "native/cpu/build.py", *cpp} <= names
    assert not [n for n in names if n.endswith(".so")]


FROM_WHEEL = """
import importlib, pkgutil, sys, sysconfig
from pathlib import Path

home = Path(sysconfig.get_paths()["purelib"]).resolve()
import ascend_deep
assert Path(ascend_deep.__file__).resolve().is_relative_to(home), ascend_deep.__file__
seen = []
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    seen.append(name)
    for found in pkgutil.iter_modules(module.__path__):
        if found.name in ("__main__", "_ascend_deep_cpu"):  # the kernels are not a Python module
            continue
        try:
            seen.append(importlib.import_module(f"{name}.{found.name}").__name__)
        except ModuleNotFoundError as missing:  # kernels of a library that is not installed
            assert missing.name in ("triton", "deep_gemm", "deep_ep", "torch_npu"), missing
            assert name.startswith("ascend_deep.native."), name
for name in seen:
    file = Path(sys.modules[name].__file__).resolve()
    assert file.is_relative_to(home), (name, file)
print(len(seen))
"""


def test_every_module_imports_from_the_wheel(built: Built, python: Path, tmp_path: Path) -> None:
    count = int(_run(python, "-c", FROM_WHEEL, *FOLDERS, cwd=tmp_path))
    files = [f for folder in FOLDERS.values() for f in (built.tree / folder).glob("*.py") if "triton" not in f.parts]
    assert count >= len(files) - 1  # __main__ runs when it is imported


BACKEND_BY_NAME = """
import sys
import torch, torch._dynamo
assert "ascend_deep" in torch._dynamo.list_backends()
assert "ascend_deep" not in sys.modules
w = torch.randn(6, 5)
f = torch.compile(lambda x: torch.nn.functional.silu(x @ w), backend="ascend_deep", options={"downstream": "eager"})
x = torch.randn(3, 6)
torch.testing.assert_close(f(x), torch.nn.functional.silu(x @ w))
import ascend_deep
print(ascend_deep.__file__)
"""


def test_backend_is_found_by_name(python: Path, tmp_path: Path) -> None:
    assert str(python.parent.parent) in _run(python, "-c", BACKEND_BY_NAME, cwd=tmp_path)


KERNELS_RUN = """
import torch
from ascend_deep import ops
from ascend_deep.native.cpu.provider import CPU
assert CPU.unavailable() is None, CPU.unavailable()
x, w13, w2 = torch.randn(5, 16), torch.randn(4, 24, 16) / 4, torch.randn(4, 16, 12) / 4
idx, weights = torch.stack([torch.randperm(4)[:2] for _ in range(5)]), torch.rand(5, 2)
got = ops.moe_experts(x, idx, weights, w13, None, w2, None, act="silu", weight_layout="enk")
want = torch.zeros(5, 16)
for t in range(5):
    for k in range(2):
        gate, up = (w13[idx[t, k]] @ x[t]).chunk(2)
        want[t] += weights[t, k] * (w2[idx[t, k]] @ (torch.nn.functional.silu(gate) * up))
torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
print("same")
"""


def test_kernels_of_the_wheel_run(python: Path, tmp_path: Path) -> None:
    assert _run(python, "-c", KERNELS_RUN, cwd=tmp_path).strip() == "same"


@pytest.mark.parametrize("command", [["ascend-deep"], ["python", "-m", "ascend_deep"]], ids=["script", "module"])
def test_command_line(python: Path, tmp_path: Path, command: list[str]) -> None:
    out = _run(python.parent / command[0], *command[1:], "--help", cwd=tmp_path)
    for name in ("explain", "doctor", "replay", "bench"):
        assert name in out


def test_editable_install_builds_kernels_beside_the_sources(tmp_path: Path) -> None:
    tree = _copy(tmp_path / "tree")
    python = _venv(tmp_path / "venv")
    _install(python, "--editable", tree, cwd=tmp_path)
    code = "import ascend_deep.native.cpu as c, ascend_deep.passes as p; print(c.__path__[0]); print(p.__path__[0])"
    cpu, passes = _run(python, "-c", code, cwd=tmp_path).split()
    assert Path(cpu) == tree / "native/cpu" and Path(passes) == tree / "passes"
    assert (tree / "native/cpu" / Path(KERNELS).name).exists()
    (tree / "passes/fresh.py").write_text("VALUE = 40 + 2\n")
    assert _run(python, "-c", "from ascend_deep.passes.fresh import VALUE as v; print(v)", cwd=tmp_path).strip() == "42"


def test_normal_install_from_the_folder(tmp_path: Path) -> None:
    tree = _copy(tmp_path / "tree")
    python = _venv(tmp_path / "venv")
    _install(python, tree, cwd=tmp_path)
    shutil.rmtree(tree)
    assert int(_run(python, "-c", FROM_WHEEL, *FOLDERS, cwd=tmp_path)) > len(FOLDERS)
