"""A Triton kernel to optimised HIVM for an Ascend processor, without the processor and without CANN.

triton-ascend makes linalg of it and bishengir-compile HIVM, with the buffers of the processor: what does not fit is an
error. The last step, to an object, needs ``hivmc`` of CANN, so the command always ends with an error of its own; only
other errors count. Nothing is run.
"""

from __future__ import annotations

import importlib
import os
import stat
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Compiled", "compile_kernel", "host_types"]

_KERNELS = "ascend_deep.native.triton"


@dataclass(frozen=True)
class Compiled:
    """What came of a kernel: ``hivm`` if it got that far, else the first error, and the tool that gave it."""

    hivm: str | None
    tool: str
    error: str


def host_types() -> None:
    """A name that host code beside the kernels imports and that Triton 3.2 lacks; no kernel here is given one."""
    name = "triton.tools.tensor_descriptor"
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.TensorDescriptor = type("TensorDescriptor", (), {})  # type: ignore[attr-defined]
        sys.modules[name] = module


def compile_kernel(
    module: str, kernel: str, pointers: Mapping[str, str], constants: Mapping[str, Any], processor: str
) -> Compiled:
    """Compile ``kernel`` of ``native/triton/<module>.py``.

    Args:
        pointers: dtype of every argument that is a pointer, as ``*bf16``; others are i32, factors f32.
        constants: value of every ``tl.constexpr``.
        processor: as the compilers name it, such as ``Ascend950PR_9599``.
    """
    host_types()
    function = getattr(importlib.import_module(f"{_KERNELS}.{module}"), kernel)
    needed = {p.name for p in function.params if p.is_constexpr}
    assert needed == set(constants), needed ^ set(constants)
    signature = {p.name: pointers.get(p.name, "i32") for p in function.params if not p.is_constexpr}
    signature |= {name: "fp32" for name in ("alpha", "scale") if name in signature}
    try:
        linalg = _linalg(function, signature, constants, processor)
    except subprocess.CalledProcessError as error:
        lines = [x for x in error.stderr.decode(errors="replace").splitlines() if "error" in x]
        return Compiled(None, "triton-adapter-opt", lines[0] if lines else str(error))
    except Exception as error:  # of the front end: there is no common class
        return Compiled(None, "triton-ascend", f"{type(error).__name__}: {error}")
    return _hivm(linalg, processor)


def _linalg(function: Any, signature: Mapping[str, str], constants: Mapping[str, Any], processor: str) -> str:
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target = GPUTarget("npu", processor, 0)
    backend = make_backend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn=function, signature=dict(signature), constants=dict(constants))
    made = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    metadata = {"target": target, "hash": "0", **options.__dict__}
    return str(stages["ttadapter"](stages["ttir"](made, metadata), metadata))


def _hivm(linalg: str, processor: str) -> Compiled:
    import ascendnpuir

    # The -a5 binary knows the 950, the other one the 910.
    name = "bishengir-compile-a5" if processor.startswith("Ascend950") else "bishengir-compile"
    tool = Path(str(ascendnpuir.__path__[0])) / "bin" / name
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.mlir"
        source.write_text(linalg, encoding="utf-8")
        options = ("--enable-hfusion-compile=true", "--enable-triton-kernel-compile=true", f"--save-temps={folder}")
        command = [str(tool), str(source), f"--target={processor}", *options, "-o", str(Path(folder) / "kernel")]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env={**os.environ, "PATH": "/nowhere"}
        )
        errors = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()]
        other = [e for e in errors if "hivmc" not in e and "Failed to run" not in e]
        dumps = sorted(Path(folder).glob("*hivm*.mlir"))
        if other or not dumps:
            return Compiled(None, name, (other or errors or ["no HIVM was written"])[0])
        return Compiled(dumps[-1].read_text(encoding="utf-8"), name, "")
