"""Stand-ins for the CANN libraries that torch_npu links to, so that the wheel imports where there is no CANN.

The wheel's own libraries say what they miss: every symbol that nothing in this process defines becomes a C function
that counts its call and returns 0. That is enough to register ops, run the vendor's fakes and convert graphs, and for
nothing else: a stand-in that is reached has done nothing, and whoever uses them asks ``Stubs.reached`` whether one was.
Needs a C compiler and ``nm``.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LIBRARIES", "Stubs", "build", "cann_is_there", "load"]

LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libfmk_parser.so",
    "libascend_protobuf.so",
    "libatb.so",
)
"""What the wheel's libraries need, by name; the first holds all stand-ins, the others only lead to it."""

_DEVICES = "aclrtGetDeviceCount"
"""The one stand-in that answers: there are no devices, which is true. Being reached says nothing against a result."""


@dataclass(frozen=True)
class Stubs:
    """Loaded stand-ins."""

    library: ctypes.CDLL

    def counts(self) -> Counter[str]:
        """Calls of each stand-in so far; those that were never reached are left out."""
        total = self.library.ascend_deep_stub_total()
        found: Counter[str] = Counter()
        for i in range(total):
            calls = self.library.ascend_deep_stub_calls(i)
            if calls:
                found[ctypes.string_at(self.library.ascend_deep_stub_name(i)).decode()] = calls
        return found

    def reached(self, since: Counter[str]) -> list[str]:
        """Stand-ins that were called after ``since`` (an earlier ``counts()``) and pretended to do something."""
        return sorted(set(self.counts() - since) - {_DEVICES})


def cann_is_there() -> bool:
    """True if the real libraries can be loaded."""
    try:
        ctypes.CDLL("libascendcl.so")
        ctypes.CDLL("libhccl.so")
    except OSError:
        return False
    return True


def _wheel() -> Path:
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package torch_npu is not installed in this environment.")
    return Path(spec.origin).parent


def _symbols(library: Path, flag: str) -> set[str]:
    listing = subprocess.run(["nm", "-D", flag, str(library)], capture_output=True, text=True, check=True).stdout
    found = set()
    for line in listing.splitlines():
        *_, kind, name = line.split()
        if flag == "--defined-only" or kind == "U":
            found.add(name.split("@")[0])
    return found


def missing_symbols() -> list[str]:
    """What the wheel's libraries leave undefined and neither they, torch, Python nor the system define."""
    import torch

    libraries = sorted(_wheel().glob("**/*.so*"))
    needed = set().union(*(_symbols(lib, "--undefined-only") for lib in libraries))
    needed -= set().union(*(_symbols(lib, "--defined-only") for lib in libraries))
    directory = Path(torch.__file__).parent / "lib"
    handles = [ctypes.CDLL(None)]
    for name in (*(f"lib{n}.so" for n in ("torch", "torch_python", "torch_cpu", "c10")), "libstdc++.so.6", "libm.so.6"):
        path = directory / name
        try:
            handles.append(ctypes.CDLL(str(path) if path.exists() else name))
        except OSError:
            continue
    return sorted(s for s in needed if s.isidentifier() and not any(_has(h, s) for h in handles))


def _has(handle: ctypes.CDLL, symbol: str) -> bool:
    try:
        handle[symbol]
    except AttributeError:
        return False
    return True


def build(directory: Path) -> Path:
    """Make the libraries in ``directory``, unless they are there for this wheel. Returns the directory.

    Raises:
        RuntimeError: torch_npu, a C compiler or ``nm`` is missing, or the compiler fails; one sentence.
    """
    _wheel()
    wheel = importlib.metadata.version("torch_npu")
    stamp = directory / "built_for"
    if stamp.exists() and stamp.read_text() == wheel:
        return directory
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    for tool, found in (("a C compiler", compiler), ("nm", shutil.which("nm"))):
        if not found:
            raise RuntimeError(f"stand-ins for CANN need {tool}, which was not found.")
    assert compiler is not None
    directory.mkdir(parents=True, exist_ok=True)
    source = directory / "stubs.c"
    source.write_text(_source(missing_symbols()))
    first, *others = LIBRARIES
    _compile(compiler, directory, first, str(source), "-fno-builtin")
    empty = directory / "empty.c"
    empty.write_text("")
    for name in others:
        _compile(compiler, directory, name, str(empty), "-Wl,--no-as-needed", f"-L{directory}", "-lascendcl")
    stamp.write_text(wheel)
    return directory


def _compile(compiler: str, directory: Path, name: str, *arguments: str) -> None:
    command = [compiler, "-shared", "-fPIC", "-w", "-o", str(directory / name), f"-Wl,-soname,{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(f"the stand-in {name} could not be compiled: {lines[-1]}.")


def _source(symbols: list[str]) -> str:
    names = "".join(f'    "{s}",\n' for s in symbols)
    functions = "".join(
        f"long {s}(unsigned *n) {{ *n = 0; return reached({i}); }}\n"
        if s == _DEVICES
        else f"long {s}(void) {{ return reached({i}); }}\n"
        for i, s in enumerate(symbols)
    )
    return f"""static const char *names[] = {{
{names}}};
static unsigned long calls[{max(len(symbols), 1)}];
static long reached(int i) {{ __sync_fetch_and_add(&calls[i], 1); return 0; }}
int ascend_deep_stub_total(void) {{ return {len(symbols)}; }}
unsigned long ascend_deep_stub_calls(int i) {{ return calls[i]; }}
const char *ascend_deep_stub_name(int i) {{ return names[i]; }}
{functions}"""


def load(directory: Path) -> Stubs:
    """Load the libraries of ``directory`` for the whole process, so that ``import torch_npu`` finds them."""
    handles = [ctypes.CDLL(str(directory / name), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES]
    library = handles[0]
    library.ascend_deep_stub_calls.restype = ctypes.c_ulong
    library.ascend_deep_stub_name.restype = ctypes.c_void_p
    return Stubs(library)
