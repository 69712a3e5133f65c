"""Builds the C++ kernels with the package. All metadata is in pyproject.toml.

The kernels are optional: without torch or a C++ compiler in the build environment the package installs without them,
says so in one sentence, and runs the reference bodies of its ops. To get them, install with ``--no-build-isolation``
in an environment that has torch, or run ``python -m ascend_deep.native.cpu.build`` afterwards.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def load_builder() -> ModuleType:
    """``native/cpu/build.py``, which is not importable as part of the package yet."""
    spec = importlib.util.spec_from_file_location("ascend_deep_build", ROOT / "native/cpu/build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """``build_py`` that also compiles the kernels: next to their sources for an editable install, else in the wheel."""

    def run(self) -> None:
        super().run()
        builder = load_builder()
        target = ROOT / "native/cpu"
        if not self.editable_mode:
            target = Path(self.build_lib) / "ascend_deep/native/cpu"
            target.mkdir(parents=True, exist_ok=True)
            # A library that an earlier build left beside the sources has been copied as package data; it may be stale.
            (target / builder.LIBRARY).unlink(missing_ok=True)
        try:
            builder.build(target)
        except builder.BuildError as error:
            print(f"ascend-deep installs without its C++ kernels: {error}", file=sys.stderr, flush=True)


class BinaryDistribution(Distribution):
    """Says that the package is not pure Python, so that it installs where platform packages go."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """A wheel for every Python of this platform: the library uses LibTorch's stable ABI and no Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(distclass=BinaryDistribution, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
