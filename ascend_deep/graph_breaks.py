"""Graph breaks as a report shows them: one entry per place and reason, with a hint where ``prepare`` helps."""

from __future__ import annotations

import ast
import linecache
import os
import re
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ascend_deep.report import GraphBreak

__all__ = ["EXACT_HINT", "first_sentence", "graph_breaks"]

_PREPARE_HINT = (
    "The break is inside an expert loop: ascend_deep.prepare(model) replaces such loops before compiling; if it was "
    "called already, what it returned says why it left this one."
)
EXACT_HINT = (
    "How many rows come from other ranks is only known at run time: compile with fullgraph=True, which allows for such "
    "sizes, or make them static by parallelize(model, mesh, max_tokens_per_rank=...)."
)
_PARALLEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_parallelize.py")


def graph_breaks(found: Sequence[tuple[str, Sequence[traceback.FrameSummary]]]) -> tuple[GraphBreak, ...]:
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
            breaks[text, source] = GraphBreak(text, source, _hint(stack))
    return tuple(breaks.values())


def _hint(stack: Sequence[traceback.FrameSummary]) -> str:
    if any(os.path.abspath(f.filename) == _PARALLEL for f in stack):
        return EXACT_HINT
    return _PREPARE_HINT if any(_in_experts(f) for f in stack[-3:]) else ""


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
