"""The private Dynamo names that reports need; with ``_torch_compat`` the only place for private torch names.

Every function here degrades to "unknown" if a release of torch moves a name: reports then split graphs more finely
or lack graph breaks, but nothing fails.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo.config

__all__ = ["break_mark", "breaks_since", "compile_id", "compile_root", "isolated", "no_recompile_limit"]

_EVAL_FRAME = os.path.join("torch", "_dynamo", "eval_frame.py")


def compile_id() -> str:
    """``"frame/compile"`` of the graph that is being compiled, ``""`` outside a compile."""
    try:
        from torch._guards import CompileContext

        return str(CompileContext.current_compile_id() or "")
    except (ImportError, AttributeError):
        return ""


def compile_root() -> weakref.ref[Any] | None:
    """The compiled callable whose call caused the compile that is going on; ``None`` if there is none.

    All graphs of one compile, those after a graph break included, are compiled below one call of it. Dynamo runs it
    in a frame named ``compile_wrapper`` that holds the callable as ``fn``.
    """
    frame = sys._getframe()
    outermost = None
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename.endswith(_EVAL_FRAME):
            outermost = frame
        frame = frame.f_back  # type: ignore[assignment]
    function = outermost.f_locals.get("fn") if outermost is not None else None
    try:
        return weakref.ref(function) if function is not None else None
    except TypeError:
        return None


def _break_list() -> list[Any]:
    import torch._dynamo.utils as utils

    found = getattr(utils, "graph_break_reasons", None)
    return found if isinstance(found, list) else []


def break_mark() -> int:
    """A mark for ``breaks_since``."""
    return len(_break_list())


def breaks_since(mark: int) -> list[tuple[str, Sequence[traceback.FrameSummary]]]:
    """Graph breaks since ``mark``: Dynamo's reason and the user's stack, outermost frame first."""
    return [(str(b.reason), tuple(b.user_stack or ())) for b in _break_list()[mark:]]


def isolated() -> dict[str, Any]:
    """Arguments of ``torch.compile`` that keep its recompiles from counting against other compiles of the same code."""
    known = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if known else {}


@contextmanager
def no_recompile_limit() -> Iterator[None]:
    """Lift Dynamo's limit on recompiles of one function; only where ``isolated`` has nothing to offer."""
    if isolated():
        yield
        return
    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    with torch._dynamo.config.patch({name: 1 << 20, f"accumulated_{name}": 1 << 20}):
        yield
