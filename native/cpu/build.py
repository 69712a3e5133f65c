"""Builds the C++ kernels: ``python -m ascend_deep.native.cpu.build`` compiles them next to their sources.

The library uses only LibTorch's stable ABI, so one build serves torch 2.11 to 2.14. It is compiled with the system's
C++ compiler (``CXX``, else ``g++``, ``c++`` or ``clang++``) and needs torch's headers and ``libtorch_cpu``, of which it
uses the C shim only; at run time the library finds the ``libtorch_cpu`` that ``import torch`` has loaded. Flags in
``ASCEND_DEEP_CXXFLAGS`` come last; ``CXXFLAGS`` is not read: an ``-march`` in it would end up in every kernel.

This file also serves ``setup.py``, before the package is installed: it imports nothing of ascend_deep.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["LIBRARY", "BuildError", "build"]

LIBRARY = "_ascend_deep_cpu.so"
_HERE = Path(__file__).resolve().parent
# The oldest torch that the library has to load into: 2.11.
_TARGET = "0x020b000000000000"
_COMMON = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wno-psabi"]
# The kernels count on fused multiply-add wherever the CPU has it; they do not read errno or floating-point traps.
_KERNEL = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512"]
_GENERIC = (
    "bind_experts.cpp",
    "bind_rowwise.cpp",
    "coded.cpp",
    "dispatch.cpp",
    "experts_call.cpp",
    "gemm_bind.cpp",
    "gemm_bind_quant.cpp",
    "gemm_call.cpp",
    "mqa_bind.cpp",
    "mqa_bind_attention.cpp",
    "mqa_bind_topk.cpp",
    "mqa_call.cpp",
    "mqa_select.cpp",
    "plan.cpp",
    "route_call.cpp",
)
_X86 = {
    "gemm_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "gemm_avx512.cpp": [*_AVX512, "-mf16c"],
    "gemm_avx512_bf16.cpp": [*_AVX512, "-mf16c", "-mavx512bf16", "-mavx512vbmi"],
    "isa_avx2.cpp": ["-mavx2", "-mfma"],
    "isa_avx512.cpp": _AVX512,
    "isa_avx512_bf16.cpp": [*_AVX512, "-mavx512bf16"],
    "mqa_avx2.cpp": ["-mavx2", "-mfma"],
    "mqa_avx512.cpp": _AVX512,
}


class BuildError(RuntimeError):
    """The kernels could not be built; the message is one sentence (and the compiler's output, if there is any)."""


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path:
            return path
    raise BuildError(f"no C++ compiler found (looked for {wanted or 'g++, c++ and clang++'}).")


def _torch_home() -> Path:
    """torch's package directory, with headers and libraries, found without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("torch is not installed where the build runs (with pip: use --no-build-isolation).")
    home = Path(next(iter(spec.submodule_search_locations)))
    if not (home / "include/torch/csrc/stable/library.h").exists():
        raise BuildError(f"{home} has no stable-ABI headers; torch 2.11 or newer is needed.")
    return home


def _run(command: list[str], verbose: bool) -> None:
    if verbose:
        print(" ".join(command), flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{Path(command[0]).name} failed with status {done.returncode}.\n{done.stderr[-4000:]}")


def build(target_dir: str | os.PathLike[str], verbose: bool = False) -> Path:
    """Compile the kernels into ``target_dir`` and return the path of the library.

    Args:
        target_dir: existing directory that gets ``_ascend_deep_cpu.so``; an older one is replaced atomically.
        verbose: print the compiler's command lines.

    Raises:
        BuildError: no compiler, no torch headers, or a compiler error.
    """
    compiler, home = _compiler(), _torch_home()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    sources = {f"{family}_portable.cpp": _KERNEL for family in ("gemm", "isa", "mqa")}
    sources.update({name: [] for name in _GENERIC})
    if x86:
        sources.update({name: [*_KERNEL, *flags] for name, flags in _X86.items()})
    headers = ["-isystem", str(home / "include")]
    target = Path(target_dir) / LIBRARY
    with tempfile.TemporaryDirectory(prefix="ascend_deep_build_") as tmp:

        def compile_one(name: str) -> str:
            own = os.environ.get("ASCEND_DEEP_CXXFLAGS", "").split()
            obj = str(Path(tmp) / f"{Path(name).stem}.o")
            generic = [*headers, f"-DTORCH_TARGET_VERSION={_TARGET}"] if name in _GENERIC else []
            _run([compiler, *_COMMON, *sources[name], *generic, *own, "-c", str(_HERE / name), "-o", obj], verbose)
            return obj

        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            objects = list(pool.map(compile_one, sources))
        # A compiler may come with a static C++ library. Were its symbols exported, or the unwinder in it used, an
        # exception that leaves a kernel would end the process.
        shared = (
            ["-shared", "-shared-libgcc", "-Wl,--exclude-libs,ALL"]
            if sys.platform != "darwin"
            else ["-dynamiclib", "-undefined", "dynamic_lookup"]
        )
        linked = Path(tmp) / LIBRARY
        _run([compiler, *shared, *objects, f"-L{home / 'lib'}", "-ltorch_cpu", "-o", str(linked)], verbose)
        # Not in place: a running process may have the old library mapped.
        staged = target.with_name(f".{LIBRARY}.{os.getpid()}")
        shutil.copy2(linked, staged)
        os.replace(staged, target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ascend_deep.native.cpu.build", description=__doc__)
    parser.add_argument("--target", default=str(_HERE), help="directory that gets the library (default: %(default)s)")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the compiler's command lines")
    args = parser.parse_args()
    try:
        print(build(args.target, args.verbose))
    except BuildError as error:
        print(f"The C++ kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
