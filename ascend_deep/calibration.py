"""Calibration files: what ``ascend-deep calibrate`` measured on one machine, and what follows from it.

    format = 1
    [machine]                  whose figures these are
    [decide.swiglu]            overrides of the policy table: profits = false, why = "..."
    [[measured]]               one block at one size: seconds as written and rewritten

A file counts only where ``options={"calibration": FILE}`` or ``ASCEND_DEEP_CALIBRATION`` names it, and only for the
processor that it was measured on. ``[decide]`` may be edited by hand.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ascend_deep.passes.catalogue import NAMES
from ascend_deep.passes.policy import Row

__all__ = ["ENVIRONMENT", "BadCalibration", "Calibration", "Machine", "Measured", "here", "load", "nearest"]

ENVIRONMENT = "ASCEND_DEEP_CALIBRATION"
_FORMAT = 1


class BadCalibration(ValueError):
    """The file is not there, or not what ``ascend-deep calibrate`` writes; one sentence."""


@dataclass(frozen=True)
class Machine:
    """``device``: torch's type; ``name``: of the processor; ``threads`` of torch, which matter on CPUs only."""

    device: str
    name: str
    threads: int
    torch: str
    downstream: str


@dataclass(frozen=True)
class Measured:
    """One block at one size: medians of a call, in seconds, as written and with ``op`` in its place."""

    recogniser: str
    op: str
    provider: str
    dtype: str
    sizes: Mapping[str, int]
    written: float
    fused: float

    @property
    def ratio(self) -> float:
        """How many times as fast the op is."""
        return self.written / self.fused

    def at(self) -> str:
        """The sizes for people."""
        return ", ".join(f"{k} = {v}" for k, v in self.sizes.items())


@dataclass(frozen=True)
class Calibration:
    """A file's content."""

    machine: Machine
    decide: Mapping[str, Row]
    measured: tuple[Measured, ...]
    digest: str = ""
    """Of the file; part of the cache key of compiled graphs."""

    def fits(self, device: str, family: str | None = None) -> str | None:
        """Why these figures do not count for ``device``; ``None`` if they do.

        Args:
            device: torch device type of the model or of the plan.
            family: of the Ascend processor that is planned for, see ``native/torch_npu/soc.py``.
        """
        if device != self.machine.device:
            return f"it was measured on {self.machine.name} ({self.machine.device}), and this is for {device}."
        if family is not None:
            from ascend_deep.native.torch_npu import soc

            of = soc.family(self.machine.name)
            return None if of == family else f"it was measured on {self.machine.name}, and the plan is for {family}."
        name = here(device)
        return None if name == self.machine.name else f"it was measured on {self.machine.name}, and this is {name}."

    def text(self) -> str:
        """The file. TOML's strings and numbers are written as in JSON."""
        lines = [
            "# Written by `ascend-deep calibrate`; [decide] may be edited. It is used where the option 'calibration'",
            f"# or {ENVIRONMENT} names it.",
            f"format = {_FORMAT}",
            "",
            "[machine]",
            *(f"{k} = {json.dumps(v)}" for k, v in asdict(self.machine).items()),
        ]
        for name, row in self.decide.items():
            lines += ["", f"[decide.{name}]", f"profits = {json.dumps(row.profits)}", f"why = {json.dumps(row.why)}"]
        for m in self.measured:
            sizes = ", ".join(f"{k} = {v}" for k, v in m.sizes.items())
            lines += ["", "[[measured]]"]
            lines += [f"{k} = {json.dumps(getattr(m, k))}" for k in ("recogniser", "op", "provider", "dtype")]
            lines += [f"sizes = {{ {sizes} }}", f"written = {m.written:.4g}", f"fused = {m.fused:.4g}"]
        return "\n".join(lines) + "\n"


def load(path: str | Path) -> Calibration:
    """The calibration in ``path``, read once per state of the file.

    Raises:
        BadCalibration: one sentence that names the file and what is wrong.
    """
    try:
        state = os.stat(path)
    except OSError as error:
        raise BadCalibration(f"the calibration {path} cannot be read: {error.strerror}.") from None
    return _load(str(path), state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=8)
def _load(path: str, _time: int, _size: int) -> Calibration:
    try:
        # Part of Python from 3.11 on; before, the package of the same interface.
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        content = Path(path).read_bytes()
        data = toml.loads(content.decode("utf-8"))
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise BadCalibration(f"the calibration {path} cannot be read: {error}.") from None
    if data.get("format") != _FORMAT:
        raise BadCalibration(f"the calibration {path} has format {data.get('format')!r}; this version reads {_FORMAT}.")
    try:
        machine = Machine(**_fields("machine", data["machine"], Machine))
        decide = {name: _row(name, row) for name, row in _table("decide", data.get("decide", {})).items()}
        rows = data.get("measured", [])
        if not isinstance(rows, list):
            raise ValueError(f"measured is {rows!r}; it takes a list of tables")
        measured = tuple(_measured(m) for m in rows)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise BadCalibration(f"the calibration {path} is not as ascend-deep calibrate writes it: {what}.") from None
    return Calibration(machine, decide, measured, hashlib.sha256(content).hexdigest()[:16])


_STRINGS = ("device", "name", "torch", "downstream", "recogniser", "op", "provider", "dtype")


def _table(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {value!r}; it takes a table")
    return value


def _fields(key: str, value: Any, kind: type) -> Mapping[str, Any]:
    """A table with exactly the fields of ``kind``, strings where it has strings."""
    table = _table(key, value)
    names = [f.name for f in fields(kind)]
    unknown = [n for n in table if n not in names]
    if unknown:
        raise ValueError(f"{key}.{unknown[0]} is unknown; there are {', '.join(names)}")
    for name in names:
        if name not in table:
            raise ValueError(f"{key}.{name} is missing")
        if name in _STRINGS and not isinstance(table[name], str):
            raise ValueError(f"{key}.{name} is {table[name]!r}; it takes a string")
        if name == "threads" and (type(table[name]) is not int or table[name] < 1):
            raise ValueError(f"{key}.{name} is {table[name]!r}; it takes an integer above 0")
    return table


def _row(name: str, value: Any) -> Row:
    if name not in NAMES:
        raise ValueError(f"decide.{name} is no recogniser; there are {', '.join(NAMES)}")
    row = _table(f"decide.{name}", value)
    if "profits" not in row:
        raise ValueError(f"decide.{name}.profits is missing")
    if not isinstance(row["profits"], bool):
        raise ValueError(f"decide.{name}.profits is {row['profits']!r}; it takes true or false")
    return Row(row["profits"], str(row.get("why", "the calibration says so")))


def _measured(row: Any) -> Measured:
    found = Measured(**_fields("measured", row, Measured))
    _table(f"sizes of a measured {found.op}", found.sizes)
    for name in ("written", "fused"):
        value = getattr(found, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
            raise ValueError(f"{name} of a measured {found.op} is {value!r}; it takes seconds above 0")
    if not all(type(v) is int and v > 0 for v in found.sizes.values()):
        raise ValueError(f"sizes of a measured {found.op} are {dict(found.sizes)!r}; they take integers above 0")
    return found


def here(device: str) -> str:
    """Name of the processor of this machine for a torch device type."""
    import torch

    if device == "cpu":
        return _cpu()
    module = getattr(torch, device, None)
    return (
        str(module.get_device_name(0))
        if module is not None and module.is_available()
        else f"a machine without {device}"
    )


@functools.lru_cache(maxsize=1)
def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def nearest(measured: Iterable[Measured], op: str, sizes: Mapping[str, Any]) -> Measured | None:
    """What was measured of ``op`` at the sizes nearest to ``sizes``, by the product of ratios; symbols do not count."""

    def distance(m: Measured) -> float:
        shared = [(m.sizes[k], v) for k, v in sizes.items() if k in m.sizes and isinstance(v, int) and v > 0]
        return sum(abs(math.log(a / b)) for a, b in shared)

    return min((m for m in measured if m.op == op), key=distance, default=None)
