"""torchair without NPU and CANN: what it asks of the graph engine is answered here, for the time of a conversion.

Answered: starting the engine (nothing happens), the processor, because converters branch on it, and, where CANN is not
there to be asked, which op types the engine knows (those that the wheel's own converters name). Everything up to the
finished graph is the wheel's own code. The engine's own checks (op registry, shapes, versions) then do not take place.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ascend_deep.lowering import torchair_stubs

__all__ = ["DEVICES", "OfflineError", "import_torch_npu", "offline"]

DEVICES = {"910b": "Ascend910B1", "910_93": "Ascend910_9392", "950pr": "Ascend950PR_9599", "950dt": "Ascend950DT_9582"}
"""Processor family to one device name of it, as ``torch_npu.npu.get_device_name`` gives it."""

_STUBS: dict[str, torchair_stubs.Stubs] = {}
_AFTER_IMPORT: Counter[str] = Counter()


class OfflineError(RuntimeError):
    """The wheel is not usable here; one sentence says why."""


def import_torch_npu(directory: Path) -> tuple[ModuleType, torchair_stubs.Stubs | None]:
    """``torch_npu``, with stand-ins for CANN (made in ``directory``) where CANN is not there.

    Raises:
        OfflineError: it is not installed, or does not import.
    """
    try:
        if not torchair_stubs.cann_is_there() and "stubs" not in _STUBS:
            _STUBS["stubs"] = torchair_stubs.load(torchair_stubs.build(directory))
        module = importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise OfflineError(f"torch_npu cannot be used here: {lines[0]}") from error
    stubs = _STUBS.get("stubs")
    if stubs is not None and not _AFTER_IMPORT:
        _AFTER_IMPORT.update(stubs.counts())
    return module, stubs


@functools.cache
def known_op_types() -> frozenset[str]:
    """Graph engine op types that the wheel's converters name: its generated ops, and those it builds by name."""
    import torchair

    root = Path(torchair.__file__).parent
    types = set(re.findall(r"REG_OP\((\w+)\)", (root / "_ge_concrete_graph/auto_generated_ge_raw_ops.py").read_text()))
    for file in root.glob("_ge_concrete_graph/**/*.py"):
        text = file.read_text()
        types |= set(re.findall(r"custom_op\(\s*[\"'](\w+)[\"']", text))
        types |= set(re.findall(r"op_type\s*=\s*[\"'](\w+)[\"']", text))
        types |= set(re.findall(r"op\.type\s*=\s*[\"'](\w+)[\"']", text))
    return frozenset(types)


@contextmanager
def offline(family: str) -> Iterator[None]:
    """Within this context torchair converts graphs for a processor of ``family`` without asking the graph engine.

    Nothing is left behind. Not for concurrent use: torchair's module state is what changes.
    """
    import torch_npu
    from torchair._ge_concrete_graph import compat_ir, fx2ge_converter
    from torchair.core import _backend, _torchair

    without_cann = "stubs" in _STUBS
    if without_cann:
        atexit.unregister(_backend.finalize_graph_engine)  # it would stop an engine that was never started

    def no_engine(*_: Any, **__: Any) -> None:
        return None

    def registered(op_type: str) -> tuple[Any, ...]:
        return ("SUCCESS" if op_type in known_op_types() else "ERROR", [], [], [])

    def compatible(op_type: str, *_: Any) -> str:
        return "" if op_type in known_op_types() else f"the wheel names no graph engine op {op_type}."

    replaced: list[tuple[Any, str, Any]] = [
        (fx2ge_converter, "initialize_graph_engine", no_engine),
        (_backend, "initialize_graph_engine", no_engine),
        (torch_npu.npu, "get_device_name", lambda *_, **__: DEVICES[family]),
    ]
    if without_cann:
        replaced += [(_torchair, "get_registered_ir_def", registered), (_torchair, "check_cann_compat", compatible)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    compat_ir.is_cann_compat.cache_clear()
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        compat_ir.is_cann_compat.cache_clear()
