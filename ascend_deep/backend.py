"""The backend: what ``torch.compile(model, backend="ascend_deep")`` calls for every graph that Dynamo hands over."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ascend_deep import _predict, lowering
from ascend_deep.graph_breaks import EXACT_HINT, graph_breaks
from ascend_deep.lowering import _dynamo_compat
from ascend_deep.native import table
from ascend_deep.native.torch_npu import soc
from ascend_deep.options import Options
from ascend_deep.passes import certificates
from ascend_deep.passes._types import Outcome
from ascend_deep.passes.graph_view import GraphView, clean_module_path
from ascend_deep.passes.pipeline import NO_TOKENS, Pipeline
from ascend_deep.passes.policy import Row
from ascend_deep.report import GraphInfo, OwnCall, Report, is_collecting, record
from ascend_deep.report_data import decode, encode
from ascend_deep.report_layout import miss_rows

__all__ = ["ascend_deep", "sources"]

log = logging.getLogger("ascend_deep")

_FAMILY_OF_TARGET = {"ascend950": "950pr", "ascend950dt": "950dt", "ascend910b": "910b", "ascend910_93": "910_93"}
_DEVICE_OF_TARGET = {"auto": "", "cpu": "cpu", "cuda": "cuda", **dict.fromkeys(_FAMILY_OF_TARGET, "npu")}
_DONE = "ascend_deep_stage"


def ascend_deep(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | Options | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: rewrite what can be proven, hand the result to the downstream compiler.

    Args:
        gm: Dynamo's graph, placeholders with example values.
        example_inputs: the inputs of the first call.
        options: see ``ascend_deep.Options``.
        mode: ``mode=`` of torch.compile, passed on to Inductor.

    Raises:
        OptionsError: an option is unknown or has a value that is not accepted.
        StrictError: ``strict=True`` and an op has no provider.
    """
    chosen = Options.parse(options)
    downstream = lowering.choose(chosen.downstream, example_inputs)
    stage = _Stage(chosen, gm)
    info = _describe(gm, chosen, downstream)
    start = time.perf_counter()
    if chosen.emit:
        with _planned(chosen.target):
            stage.run(gm)
            family = _FAMILY_OF_TARGET[chosen.target]
            for file in lowering.emit(gm, example_inputs, family, Path(chosen.emit_to)):
                log.info("wrote %s", file)
    compiled = lowering.hand_off(downstream, gm, example_inputs, stage, mode, chosen.inductor)
    seconds = time.perf_counter() - start
    outcome, cached = stage.finish()
    # A stored outcome has the times of the compile that made it; this one did nothing but look it up.
    ours = {} if cached else dict(outcome.timings)
    outcome = replace(outcome, timings={**ours, "downstream": max(0.0, seconds - sum(ours.values()))})
    after = sum(n.op == "call_function" for n in gm.graph.nodes)
    device = _DEVICE_OF_TARGET[chosen.target] or info.device
    notes = _predict.notes(gm, chosen.target) if outcome.matches else ()
    notes += _predict.measured_notes(gm, chosen.calibrated(), device, _FAMILY_OF_TARGET.get(chosen.target))
    done = replace(info, cached=cached, untouched=outcome.untouched, nodes_after=after, notes=notes)
    report = record(outcome, done)
    _tell(outcome, report)
    if chosen.report:
        try:
            report.save(chosen.report)
        except OSError as error:
            log.warning("the report could not be written to %s: %s.", chosen.report, error)
    return compiled


def _planned(target: str) -> AbstractContextManager[Any]:
    """Providers answer for ``target`` if it is an Ascend processor, whatever this machine is."""
    family = _FAMILY_OF_TARGET.get(target)
    return soc.planned(family) if family is not None else nullcontext()


def _measured_rows(options: Options) -> dict[str, Mapping[str, Row]]:
    """Device type to the rows of the calibration, if it is one of the device that is compiled for."""
    found = options.calibrated()
    if found is None:
        return {}
    device = _DEVICE_OF_TARGET[options.target] or found.machine.device
    return {} if found.fits(device, _FAMILY_OF_TARGET.get(options.target)) else {device: found.decide}


class _Stage:
    """The rewriting of one graph, and the stored outcome for when a warm cache skips it."""

    def __init__(self, options: Options, gm: fx.GraphModule) -> None:
        self._options = options
        self._outcome: Outcome | None = None
        self._path = _outcome_path(gm, self.uuid())

    def run(self, gm: fx.GraphModule) -> None:
        """Rewrite ``gm`` in place, once."""
        if gm.meta.get(_DONE):
            return
        gm.meta[_DONE] = True
        pipeline = Pipeline(
            self._options.recognisers(),
            verify=self._options.verify,
            device=_DEVICE_OF_TARGET[self._options.target],
            strict=self._options.strict and self._options.target == "auto",
            allow_fp8=self._options.allow_fp8,
            forced=self._options.forced(),
            measured=_measured_rows(self._options),
        )
        with _planned(self._options.target):
            self._outcome = pipeline.run(gm)
        certificates.write_text(self._path, json.dumps(encode(self._outcome)))

    def uuid(self) -> str:
        return f"ascend_deep-{sources()}-{table.fingerprint()}-{_packages()}-{self._options.key()}"

    def finish(self) -> tuple[Outcome, bool]:
        """The outcome, and whether it comes from the store because a warm cache skipped the rewriting."""
        if self._outcome is not None:
            return self._outcome, False
        try:
            return decode(Outcome, json.loads(self._path.read_text())), True
        except (OSError, ValueError, TypeError, KeyError):
            return Outcome(untouched="compiled from a cache that holds no report of this graph."), True


def _outcome_path(gm: fx.GraphModule, uuid: str) -> Path:
    """Where the outcome of this graph under these options is stored: a content hash, the same in every process."""
    parts = [uuid, str(torch.is_grad_enabled())]
    parts += [f"{d}{torch.get_autocast_dtype(d)}" for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("example_value")
            shape = tuple(map(str, value.shape)) if isinstance(value, torch.Tensor) else str(value)
            parts.append(f"{shape}{getattr(value, 'dtype', '')}{getattr(value, 'requires_grad', '')}")
        else:
            name = node.target if isinstance(node.target, str) else torch.typename(node.target)
            name = getattr(node.target, "__name__", name)
            parts.append(f"{node.name}{name}{node.args}{node.kwargs}")
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return certificates.store() / "outcomes" / f"{digest}.json"


@lru_cache(maxsize=1)
def sources() -> str:
    """Hash of all Python sources of the package: any change of ours invalidates compiled graphs."""
    import ascend_deep.native
    import ascend_deep.ops
    import ascend_deep.passes

    digest = hashlib.sha256()
    for package in (ascend_deep, ascend_deep.ops, ascend_deep.passes, lowering, ascend_deep.native):
        for file in sorted(Path(package.__path__[0]).glob("**/*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def _packages() -> str:
    """Versions of the packages whose ops and graphs we read."""
    found = []
    for name in ("torch", "transformers", "torch_npu", "deep_gemm", "deep_ep"):
        try:
            found.append(f"{name}={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ",".join(found)


def _own_calls(gm: fx.GraphModule) -> tuple[OwnCall, ...]:
    """Calls of our ops that the model makes itself, which is what ``prepare`` is for."""
    view = GraphView(gm.graph)
    calls = ((n, re.match(r"ascend_deep(?:\.|::)(\w+)", str(n.target))) for n in gm.graph.nodes)
    return tuple(OwnCall(name.group(1), view.module(n), view.source(n)) for n, name in calls if name)


def _describe(gm: fx.GraphModule, options: Options, downstream: str) -> GraphInfo:
    """What the report says of the graph itself."""
    values = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    devices = [t.device.type for t in tensors]
    device = next((d for d in devices if d != "cpu"), "cpu")
    target = options.target if options.target != "auto" else device
    modules: dict[str, str] = {}
    for node in gm.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            modules.setdefault(clean_module_path(str(path)), kind if isinstance(kind, str) else kind.__name__)
    return GraphInfo(
        nodes=sum(n.op in ("call_function", "call_method") for n in gm.graph.nodes),
        training=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        dynamic=any(isinstance(s, torch.SymInt) for t in tensors for s in t.shape),
        device=device,
        target=target,
        planned=_DEVICE_OF_TARGET.get(target, device) not in ("", device),
        downstream=downstream,
        modules=modules,
        own_calls=_own_calls(gm),
    )


@lru_cache(maxsize=1)
def _warn_once() -> None:
    log.warning(
        "ascend_deep fused nothing in the graph it was given; ascend_deep.explain(model, ...) says what was looked at "
        "and why it was left."
    )


class _Breaks:
    """Breaks inside expert loops that were told already, and how far Dynamo's list has been read."""

    def __init__(self) -> None:
        self._mark = _dynamo_compat.break_mark()
        self._told: set[str] = set()

    def tell(self) -> None:
        """One WARNING for each expert loop that ended a graph: what is in it cannot be fused, and the way out."""
        # The list starts anew when Dynamo is reset.
        mark = self._mark if self._mark <= _dynamo_compat.break_mark() else 0
        self._mark = _dynamo_compat.break_mark()
        for found in graph_breaks(_dynamo_compat.breaks_since(mark)):
            if found.hint and found.source not in self._told and not is_collecting():
                self._told.add(found.source)
                if found.hint == EXACT_HINT:
                    log.warning("the graph breaks between ranks. %s", found.hint)
                    continue
                log.warning(
                    "the graph breaks inside a loop over experts at %s, which therefore is not fused: call "
                    "ascend_deep.prepare(model) before torch.compile.",
                    found.source,
                )


_BREAKS = _Breaks()


def _tell(outcome: Outcome, report: Report) -> None:
    """One WARNING per process for a compile without matches and one per broken expert loop, details at INFO."""
    _BREAKS.tell()
    without_tokens = bool(outcome.misses) and all(m.reason == NO_TOKENS for m in outcome.misses)
    if not (outcome.matches or report.matches or report.own_calls or is_collecting() or without_tokens):
        _warn_once()
    if outcome.untouched:
        log.info("graph handed over untouched: %s", outcome.untouched)
    for match in outcome.matches:
        log.info("%s: %s by %s", match.module or match.source, match.spec, match.provider)
    for row in miss_rows(outcome.misses):
        where = row.modules or ", ".join(row.sources)
        log.info("%s (%d times): not fused by %s: %s", where, row.count, row.recogniser, row.reason)
