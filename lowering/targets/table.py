"""What is known of each Ascend processor, with where it is written: one TOML file per target in this folder."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["TARGETS", "Target", "parse"]

# Keys of [sources]: each figure of a file belongs to one of these groups.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "cores": ("cores",),
    "clock": ("clock",),
    "rates": ("flops_per_cycle",),
    "buffers": ("unified", "l1", "l0a", "l0b", "l0c", "l2"),
    "memory": ("memory",),
    "bandwidth": ("bandwidth",),
    "link": ("link",),
}


@dataclass(frozen=True)
class Target:
    """One processor.

    Attributes:
        name: as ``options={"target": ...}`` takes it.
        device: the model whose figures these are, as ``get_device_name`` gives it.
        cores: cube cores, each with two vector cores.
        clock: of the cube, Hz.
        flops_per_cycle: of one cube core, by precision; multiply and add count as two.
        unified, l1, l0a, l0b, l0c: on-chip buffers of one core, bytes.
        l2: bytes.
        memory: bytes.
        sources: where each group of figures is from, see ``GROUPS``.
        bandwidth: of the memory, bytes per second.
        link: to other processors, bytes per second and direction, or an upper bound of that.

    ``None`` is a figure that no public source of ours gives; a roofline leaves out the bound that needs it.
    """

    name: str
    device: str
    cores: int
    clock: float
    flops_per_cycle: Mapping[str, int]
    unified: int
    l1: int
    l0a: int
    l0b: int
    l0c: int
    l2: int
    memory: int
    sources: Mapping[str, str]
    bandwidth: float | None = None
    link: float | None = None

    def peak(self, precision: str) -> float:
        """Floating (or integer) operations per second. Raises KeyError for a precision that it does not have."""
        return self.cores * self.clock * self.flops_per_cycle[precision]


def parse(text: str, file: str) -> Target:
    """The target in the text of a file.

    Raises:
        ValueError: a field is missing, unknown or no number above 0, or a figure has no source; one sentence.
    """
    # Part of Python from 3.11 on; before, the package of the same interface.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    data: dict[str, Any] = toml.loads(text)
    known = {f.name: f for f in fields(Target)}
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ValueError(f"{file} has {unknown[0]!r}, which is no field of a target; there are {', '.join(known)}.")
    missing = [n for n, f in known.items() if n not in data and f.default is MISSING]
    if missing:
        raise ValueError(f"{file} has no {missing[0]!r}.")
    for name, value in (*data.items(), *data["flops_per_cycle"].items()):
        if name not in ("name", "device", "sources", "flops_per_cycle") and not (
            type(value) in (int, float) and value > 0
        ):
            raise ValueError(f"{name} of {file} is {value!r}; it takes a number above 0.")
    for group, names in GROUPS.items():
        if any(n in data for n in names) and not data["sources"].get(group):
            raise ValueError(f"{file} has {names[0]!r} and no source of {group!r}.")
    return Target(**data)


class _Table(Mapping[str, Target]):
    """The targets by name; files are read when the first one is asked for."""

    @functools.cached_property
    def _all(self) -> dict[str, Target]:
        files = sorted(Path(__file__).parent.glob("*.toml"))
        found = [parse(f.read_text(encoding="utf-8"), f.name) for f in files]
        return {t.name: t for t in found}

    def __getitem__(self, name: str) -> Target:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


TARGETS: Mapping[str, Target] = _Table()
