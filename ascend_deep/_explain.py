"""``explain``: compile a model once, run it once on the given inputs, and return the report.

Nothing that was compiled before is dropped or reused: the compile has a backend object of its own, so Dynamo never
finds an older entry for it, and on torch releases that can isolate recompiles it does not use up the recompile limit
of other compiles of the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ascend_deep.graph_breaks import first_sentence, graph_breaks
from ascend_deep.lowering import _dynamo_compat
from ascend_deep.options import Options
from ascend_deep.report import Report, collecting, publish

__all__ = ["explain", "first_sentence"]


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
        graph_breaks=graph_breaks(_dynamo_compat.breaks_since(mark)),
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
