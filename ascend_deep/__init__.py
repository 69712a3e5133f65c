"""ascend_deep: a torch.compile backend that fuses MoE, GEMM and indexer blocks of unmodified models.

    model = torch.compile(model, backend="ascend_deep")

The names below load on first use; importing this package changes nothing in torch or transformers. Functions live in
modules of another name (``_explain``, ``_prepare``), because importing a submodule would shadow a function of its name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascend_deep import ops, testing
    from ascend_deep._explain import explain
    from ascend_deep._huge_pages import HugePages, huge_pages
    from ascend_deep._parallelize import parallelize
    from ascend_deep._prepare import Prepared, load_quantized, prepare
    from ascend_deep.options import Options, OptionsError
    from ascend_deep.report import Report, last_report

__version__ = "0.1.0"

__all__ = [
    "HugePages",
    "Options",
    "OptionsError",
    "Prepared",
    "Report",
    "explain",
    "huge_pages",
    "last_report",
    "load_quantized",
    "ops",
    "parallelize",
    "prepare",
    "testing",
]

_HOME = {
    "HugePages": "_huge_pages",
    "Options": "options",
    "OptionsError": "options",
    "Prepared": "_prepare",
    "Report": "report",
    "explain": "_explain",
    "huge_pages": "_huge_pages",
    "last_report": "report",
    "load_quantized": "_prepare",
    "parallelize": "_parallelize",
    "prepare": "_prepare",
}


def __getattr__(name: str) -> Any:
    if name in ("ops", "testing"):
        return importlib.import_module(f"ascend_deep.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(f"ascend_deep.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ascend_deep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
