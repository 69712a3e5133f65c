"""The recognisers there are, in the order in which they run: one table, no registration on import.

Larger blocks come first: once the experts of a layer are one op, the router that feeds them is a clean cut, and
activations that remain are not part of either.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from ascend_deep.passes._types import Recogniser

__all__ = ["NAMES", "TRIGGERS", "load"]

# name: (module, attribute)
_TABLE: Mapping[str, tuple[str, str]] = {
    "experts_grouped": ("ascend_deep.passes.experts_grouped", "RECOGNISER"),
    "experts_batched": ("ascend_deep.passes.experts_batched", "RECOGNISER"),
    "router": ("ascend_deep.passes.router", "RECOGNISER"),
    "mqa_indexer": ("ascend_deep.passes.mqa_indexer", "RECOGNISER"),
    "swiglu": ("ascend_deep.passes.swiglu", "RECOGNISER"),
}

NAMES: tuple[str, ...] = tuple(_TABLE)

# Names of calls in a Dynamo graph without any of which no recogniser can match: the gate before capture.
TRIGGERS = frozenset(
    {
        "topk", "sort", "argsort", "argmax", "grouped_mm", "_grouped_mm", "grouped_mm_fallback", "bmm", "baddbmm",
        "einsum", "matmul", "silu", "gelu", "sigmoid", "chunk", "split",
    }
)  # fmt: skip


def load(names: Sequence[str]) -> list[Recogniser]:
    """The recognisers of the given names, in table order."""
    found = []
    for name in NAMES:
        if name in names:
            module, attribute = _TABLE[name]
            found.append(getattr(importlib.import_module(module), attribute))
    return found
