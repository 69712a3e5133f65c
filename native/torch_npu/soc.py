"""Which Ascend processor and CANN release a call is for: what the process runs on, or what it plans for.

Limits differ per processor family, so every check needs one. On a machine with NPUs it is asked of torch_npu, once. A
plan for other hardware (``planned``) takes precedence, so that a laptop can say what a 950 would take.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

__all__ = ["FAMILIES", "Target", "cann", "current", "family", "in_graph", "is_planned", "planned"]

FAMILIES = ("910b", "910_93", "950pr", "950dt")


@dataclass(frozen=True)
class Target:
    """A family of ``FAMILIES``, the CANN release where it is known, and whether torchair converts the call."""

    family: str
    cann: Version | None = None
    graph: bool = False


_PLANNED: ContextVar[Target | None] = ContextVar("ascend_deep_npu_target", default=None)
_GRAPH: ContextVar[bool] = ContextVar("ascend_deep_npu_graph", default=False)


def family(device_name: str) -> str | None:
    """The family of a device as ``torch_npu.npu.get_device_name`` names it; ``None``: one that we have no limits of.

    >>> family("Ascend910B3"), family("Ascend910_9392"), family("Ascend950PR_9599"), family("Ascend310P3")
    ('910b', '910_93', '950pr', None)
    """
    name = device_name.lower().removeprefix("ascend")
    # 910_95xx is what early releases called the 950PR.
    for prefix, found in (
        ("910b", "910b"),
        ("910_93", "910_93"),
        ("950dt", "950dt"),
        ("950", "950pr"),
        ("910_95", "950pr"),
    ):
        if name.startswith(prefix):
            return found
    return None


def cann(text: str | None) -> Version | None:
    """A CANN release as a version that compares: ``8.2.RC1`` comes before ``8.2.0``, ``8.10`` after ``8.9``.

    ``None`` for a text that names no release.
    """
    found = re.match(r"\s*[vV]?(\d+(?:\.\d+)*)(?:\.?(RC|rc|alpha|beta)\.?(\d+))?", text or "")
    if found is None:
        return None
    number, stage, count = found.groups()
    try:
        return Version(number + (f"{stage.lower()}{count}" if stage else ""))
    except InvalidVersion:
        return None


@contextmanager
def planned(name: str, release: str | None = None) -> Iterator[Target]:
    """Within this context, check for processor family ``name`` and CANN ``release`` instead of this machine's.

    Raises:
        ValueError: ``name`` is not in ``FAMILIES``.
    """
    if name not in FAMILIES:
        raise ValueError(f"planned: the processor family is {name!r}; accepted are {', '.join(FAMILIES)}.")
    target = Target(name, cann(release))
    token = _PLANNED.set(target)
    try:
        yield target
    finally:
        _PLANNED.reset(token)


@contextmanager
def in_graph() -> Iterator[None]:
    """Within this context calls are for torchair: ops that it cannot convert are refused."""
    token = _GRAPH.set(True)
    try:
        yield
    finally:
        _GRAPH.reset(token)


@functools.cache
def _device() -> Target | None:
    torch_npu = sys.modules["torch_npu"]
    if not torch_npu.npu.is_available():
        return None
    found = family(str(torch_npu.npu.get_device_name(0)))
    if found is None:
        return None
    try:
        release = cann(str(torch_npu.npu.utils.get_cann_version()))
    except Exception:  # a release without that function; limits that need it then do not apply
        release = None
    return Target(found, release)


def current() -> Target | None:
    """The planned target, else this machine's; ``None`` where there is neither. Never imports torch_npu."""
    chosen = _PLANNED.get() or (_device() if "torch_npu" in sys.modules else None)
    return replace(chosen, graph=True) if chosen is not None and _GRAPH.get() else chosen


def is_planned() -> bool:
    """True inside ``planned``."""
    return _PLANNED.get() is not None
