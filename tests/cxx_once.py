"""A C++ compiler that compiles what is equal once a test run: several tests build the same kernels in different ways.

    python cxx_once.py FOLDER -O0 ... -c a.cpp -o a.o

runs the C++ compiler with these arguments, or copies the object that an earlier call with the same arguments, the same
source and the same headers beside it has left in FOLDER. All other calls, linking among them, go to it as they are.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

COMPILER = next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), "g++")


def command(folder: Path) -> Path:
    """An executable for CXX that keeps its objects in ``folder``."""
    folder.mkdir(exist_ok=True)
    made = folder / "cxx"
    own = folder / f"cxx.{os.getpid()}"
    call = shlex.join([sys.executable, "-I", "-S", __file__, str(folder)])
    own.write_text(f'#!/bin/sh\nexec {call} "$@"\n')
    own.chmod(0o755)
    own.replace(made)  # at once: another worker may be running it
    return made


def _key(arguments: list[str], source: Path) -> str:
    digest = hashlib.sha256("\0".join(arguments).encode())
    for file in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(b"\0" + file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def main(folder: Path, arguments: list[str]) -> int:
    if "-c" not in arguments or "-o" not in arguments:
        return subprocess.run([COMPILER, *arguments]).returncode
    source, target = (Path(arguments[arguments.index(flag) + 1]) for flag in ("-c", "-o"))
    kept = folder / f"{_key([a for a in arguments if a not in (str(source), str(target))], source)}.o"
    if not kept.exists():
        status = subprocess.run([COMPILER, *arguments]).returncode
        if status:
            return status
        own = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(target, own)
        own.replace(kept)
        return 0
    shutil.copyfile(kept, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
