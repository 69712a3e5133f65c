"""``explain``: compile a model once, run it once on the given inputs, and return the report.

Nothing that was compiled before is dropped or reused: the compile has a backend object of its own, so Dynamo never
finds an older entry for it, and on torch releases that can isolate recompiles it does not use up the recompile limit
of other compiles of the same code.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn

from ascend_deep.lowering import _dynamo_compat
from ascend_deep.options import Options
from ascend_deep.report import GraphBreak, Report, collecting, publish

__all__ = ["explain", "first_sentence"]

_PREPARE_HINT = "The break is inside an expert loop: ascend_deep.prepare(model) replaces such loops before compiling."


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | Options | None = None, **kwargs: Any
) -> Report:
    """What ``torch.compile(model, backend="ascend_deep", options=options)`` fuses when called with these inputs.

    Compiles under the caller's grad mode and autocast state and runs the model once, so its side effects (caches,
    batch-norm statistics) happen; the state of the random number generators is put back. Recognition does not depend
    on the downstream compiler, so the rewritten graph is run as it is (``downstream="eager"``) unless the options name
    one; name ``"inductor"`` to see the time of the whole compile.

    Args:
        model: module or function.
        *args, **kwargs: its inputs.
        options: as for the backend.

    Returns:
        The report, with graph breaks. It is also ``last_report()``.

    Raises:
        OptionsError: an option is unknown or has a value that is not accepted.
        TypeError: ``model`` cannot be called.
        Whatever the model raises on these inputs.
    """
    if not callable(model):
        raise TypeError(f"explain: model is a {type(model).__name__}; it takes a module or a function.")
    chosen = Options.parse(options)
    if chosen.downstream == "auto":
        chosen = replace(chosen, downstream="eager")
    original = getattr(model, "_orig_mod", model)
    mark = _dynamo_compat.break_mark()
    with collecting(_name(original), _modules(original)) as collector, _random_state(original):
        compiled = torch.compile(original, backend=_Backend(chosen), **_dynamo_compat.isolated())
        start = time.perf_counter()
        with _dynamo_compat.no_recompile_limit():
            compiled(*args, **kwargs)
        seconds = time.perf_counter() - start
    report = collector.report
    notes = () if report.graphs else ("Dynamo handed over no graph: there was nothing to compile on these inputs.",)
    report = replace(
        report,
        graph_breaks=_breaks(_dynamo_compat.breaks_since(mark)),
        timings={**report.timings, "everything else": max(0.0, seconds - sum(report.timings.values()))},
        notes=(*report.notes, *notes),
    )
    if chosen.report:
        report.save(chosen.report)
    return publish(report)


def _random_state(model: Any) -> AbstractContextManager[None]:
    """Puts back the random state of the CPU and of the devices that hold parameters of the model."""
    tensors = model.parameters() if isinstance(model, nn.Module) else ()
    devices = {p.device for p in tensors if p.device.type not in ("cpu", "meta")}
    if not devices:
        return torch.random.fork_rng(devices=[])
    kind = next(iter(devices)).type
    return torch.random.fork_rng(devices=[d.index or 0 for d in devices if d.type == kind], device_type=kind)


class _Backend:
    """The backend of one ``explain``. Compared by identity: Dynamo never reuses what another backend compiled."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.__name__ = "ascend_deep"  # what Dynamo's messages call it

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from ascend_deep.backend import ascend_deep

        return ascend_deep(gm, example_inputs, options=self._options)


def _name(model: Any) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", type(model).__name__)


def _modules(model: Any) -> dict[str, str]:
    if not isinstance(model, nn.Module):
        return {}
    return {path: type(module).__name__ for path, module in model.named_modules()}


# -- graph breaks ---------------------------------------------------------------------------------------------------
def _breaks(found: Sequence[tuple[str, Sequence[traceback.FrameSummary]]]) -> tuple[GraphBreak, ...]:
    """Dynamo's breaks, one per place and reason, with a hint where we can help."""
    breaks: dict[tuple[str, str], GraphBreak] = {}
    for reason, stack in found:
        frame = stack[-1] if stack else None
        source = f"{os.path.basename(frame.filename)}:{frame.lineno}" if frame is not None else ""
        text = first_sentence(reason)
        known = breaks.get((text, source))
        if known is not None:
            breaks[text, source] = replace(known, count=known.count + 1)
        else:
            hint = _PREPARE_HINT if any(_in_experts(f) for f in stack[-3:]) else ""
            breaks[text, source] = GraphBreak(text, source, hint)
    return tuple(breaks.values())


def first_sentence(text: str) -> str:
    """Dynamo's many lines as one or two sentences: what, and the explanation."""
    title = text.strip().splitlines()[0].strip() if text.strip() else "unknown reason"
    explanation = re.search(r"^\s*Explanation: (.*)$", text, re.MULTILINE)
    return f"{title}: {explanation.group(1).strip()}" if explanation else title


def _in_experts(frame: traceback.FrameSummary) -> bool:
    """True if the frame is code of a class that holds experts."""
    if frame.filename.replace(os.sep, "/").endswith("transformers/integrations/moe.py"):
        return True
    for first, last, name in _classes(frame.filename):
        if first <= (frame.lineno or 0) <= last and re.search(r"[Ee]xpert|M[oO]E|SparseM[lL][pP]|Moe(?![a-z])", name):
            return True
    return False


@lru_cache(maxsize=64)
def _classes(filename: str) -> tuple[tuple[int, int, str], ...]:
    """First line, last line and name of every class in a source file; empty if it cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    classes = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    return tuple((c.lineno, c.end_lineno or c.lineno, c.name) for c in classes)
