"""What a compile did: every fused site, every refusal with its reason, graph breaks, and where the time went.

``record`` is called once per compiled graph by the backend. Graphs end up in one ``Report`` if they belong to one
compile: all graphs compiled inside ``collecting()`` (which ``ascend_deep.explain`` uses), else all graphs of one
compiled callable until its first frame is compiled again. ``last_report()`` is the newest report of the process.

A report is plain data: ``Report.from_json(report.to_json()) == report``, so it can be stored beside the artefact of
a compile and read again by a process that compiled nothing.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_deep import report_data
from ascend_deep.passes._types import Certificate, Match, Miss, Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "Collector",
    "GraphBreak",
    "GraphInfo",
    "Match",
    "Miss",
    "OwnCall",
    "Report",
    "collecting",
    "is_collecting",
    "last_report",
    "publish",
    "record",
]

SCHEMA = 1
"""Version of the JSON form."""


@dataclass(frozen=True)
class GraphBreak:
    """One place where Dynamo ended a graph. ``count`` is how often it did so there."""

    reason: str
    source: str
    hint: str = ""
    count: int = 1


@dataclass(frozen=True)
class OwnCall:
    """A call of one of our ops that was in the graph before any rewrite: ``prepare`` or the model put it there."""

    op: str
    module: str
    source: str


@dataclass(frozen=True)
class GraphInfo:
    """One compiled graph, as the backend describes it.

    Attributes:
        nodes: call nodes before the rewrite; ``nodes_after`` after it.
        training: the graph was captured with gradients on.
        dynamic: the graph has symbolic sizes.
        device: torch device type of the tensors.
        target: what the graph was planned for, e.g. ``"cpu"`` or ``"ascend950"``.
        planned: true if ``target`` is not the device the graph runs on.
        downstream: who compiled the rewritten graph, e.g. ``"inductor"``.
        compile_id: Dynamo's "frame/compile" id.
        modules: module path to class name, for the modules that ran ops of this graph.
        own_calls: calls of our ops that were there before the rewrite.
        notes: full sentences for the reader.
        untouched: why the graph was handed over as it came, if it was.
        cached: true if the outcome was read from an artefact and nothing was compiled.
    """

    nodes: int = 0
    nodes_after: int = 0
    training: bool = False
    dynamic: bool = False
    device: str = ""
    target: str = ""
    planned: bool = False
    downstream: str = ""
    compile_id: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    own_calls: tuple[OwnCall, ...] = ()
    notes: tuple[str, ...] = ()
    untouched: str = ""
    cached: bool = False


@dataclass(frozen=True)
class Report:
    """What one compile did. Immutable; ``str(report)`` is the text form.

    Attributes:
        model: name of the model's class; ``""`` unless the report comes from ``explain``.
        matches: one entry per fused site, in graph order.
        misses: one entry per site that looked like a block of a kind and was left alone.
        graph_breaks: where Dynamo ended a graph. Known for reports of ``explain``.
        timings: seconds per stage, summed over the graphs.
        unclaimed: module path to number of ops that no recogniser claims.
        graphs: the compiled graphs.
        certificates: tested equivalences behind the matches.
        modules: module path to class name of the whole model, in model order.
        versions: package name to version, for torch, ascend-deep and the providers.
        notes: full sentences for the reader.
    """

    model: str = ""
    matches: tuple[Match, ...] = ()
    misses: tuple[Miss, ...] = ()
    graph_breaks: tuple[GraphBreak, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    unclaimed: Mapping[str, int] = field(default_factory=dict)
    graphs: tuple[GraphInfo, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    # -- questions ----------------------------------------------------------------------------------------------
    def counts(self) -> dict[str, int]:
        """Number of sites per op, e.g. ``{"moe_experts": 4, "moe_route": 4}``: fused here, or there by ``prepare``."""
        found = Counter(call.op for call in self.own_calls)
        for match in self.matches:
            found[match.op] += match.count
        return dict(sorted(found.items()))

    @property
    def own_calls(self) -> tuple[OwnCall, ...]:
        """Calls of our ops that the model made itself, e.g. after ``prepare``."""
        return tuple(call for g in self.graphs for call in g.own_calls)

    @property
    def target(self) -> str:
        """What the compile was planned for: ``"cpu"``, ``"ascend950"``, …; ``""`` if no graph was compiled."""
        names = dict.fromkeys(g.target or g.device for g in self.graphs)
        return ", ".join(n for n in names if n)

    @property
    def training(self) -> bool:
        """True if any graph was captured with gradients on."""
        return any(g.training for g in self.graphs)

    def certificate(self, key: str) -> Certificate | None:
        """The certificate that a match names."""
        return next((c for c in self.certificates if c.key == key), None)

    def with_graph(self, outcome: Outcome, info: GraphInfo) -> Report:
        """This report and one more graph."""
        if outcome.untouched and not info.untouched:
            info = replace(info, untouched=outcome.untouched)
        notes = [*info.notes, *outcome.notes]
        if info.planned:
            notes.append(f"Planned for {info.target}: not executed on that hardware; the ops ran on {info.device}.")
        timings = Counter(self.timings)
        timings.update(outcome.timings)
        unclaimed = Counter(self.unclaimed)
        unclaimed.update(outcome.unclaimed)
        known = {c.key for c in self.certificates}
        return replace(
            self,
            matches=self.matches + outcome.matches,
            misses=self.misses + outcome.misses,
            certificates=self.certificates + tuple(c for c in outcome.certificates if c.key not in known),
            timings=dict(timings),
            unclaimed=dict(unclaimed),
            graphs=(*self.graphs, info),
            modules={**self.modules, **{k: v for k, v in info.modules.items() if k not in self.modules}},
            versions=self.versions or report_data.versions(),
            notes=tuple(dict.fromkeys([*self.notes, *notes])),
        )

    # -- forms --------------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data. ``counts``, ``target`` and ``parts`` are there for scripts and are not read back."""
        from ascend_deep.report_parts import unclaimed_parts

        computed = {"counts": self.counts(), "target": self.target, "parts": unclaimed_parts(self)}
        return {"schema": SCHEMA, **computed, **report_data.encode(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Report:
        """Inverse of ``to_dict``.

        Raises:
            ValueError: the data is not a report, or has a version that this release does not know.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"not a report of version {SCHEMA}: found schema {data.get('schema')!r}.")
        return report_data.decode(Report, data)

    def to_json(self, indent: int | None = 2) -> str:
        """``to_dict`` as standard JSON: infinities and NaN are the strings "inf", "-inf" and "nan"."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Report:
        """Inverse of ``to_json``."""
        return Report.from_dict(json.loads(text))

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page. Returns it, and writes it to ``path`` if given (UTF-8)."""
        from ascend_deep.report_html import render

        page = render(self)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def save(self, path: str | Path) -> None:
        """Write ``.json``, ``.html`` or, for any other ending, the text form."""
        suffix = Path(path).suffix.lower()
        html = suffix in (".html", ".htm")
        text = self.to_html() if html else self.to_json() if suffix == ".json" else str(self)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def __rich__(self) -> RenderableType:
        from ascend_deep.report_text import render

        return render(self)

    def __str__(self) -> str:
        from ascend_deep.report_text import to_text

        return to_text(self)


# -- recording ------------------------------------------------------------------------------------------------------
class Collector:
    """Gathers the graphs that are compiled while it is active; ``report`` is what it has so far."""

    def __init__(self, report: Report) -> None:
        self.report = report


@dataclass
class _Newest:
    """The newest report of the process and the compile it belongs to."""

    report: Report | None = None
    root: Any = None
    first_frame: str = ""


_LOCK = threading.Lock()
_NEWEST = _Newest()
_COLLECTOR: ContextVar[Collector | None] = ContextVar("ascend_deep_collector", default=None)


def record(outcome: Outcome, graph_info: GraphInfo) -> Report:
    """Add one compiled graph to the report it belongs to, and return that report. Thread-safe.

    The backend calls this once per graph, also for graphs that it hands over untouched.
    """
    from ascend_deep.lowering import _dynamo_compat

    collector = _COLLECTOR.get()
    graph_info = replace(graph_info, compile_id=graph_info.compile_id or _dynamo_compat.compile_id())
    with _LOCK:
        if collector is not None:
            collector.report = collector.report.with_graph(outcome, graph_info)
            _NEWEST.report, _NEWEST.root, _NEWEST.first_frame = collector.report, None, ""
            return collector.report
        root = _dynamo_compat.compile_root()
        frame = graph_info.compile_id.split("/")[0]
        known = _NEWEST.root() if _NEWEST.root is not None else None
        same = root is not None and root() is not None and known is root() and frame != _NEWEST.first_frame
        before = _NEWEST.report if same and _NEWEST.report is not None else Report()
        if not same:
            _NEWEST.root, _NEWEST.first_frame = root, frame
        _NEWEST.report = before.with_graph(outcome, graph_info)
        return _NEWEST.report


def publish(report: Report) -> Report:
    """Make ``report`` the newest one, e.g. after reading it from the artefact of a warm compile."""
    with _LOCK:
        _NEWEST.report, _NEWEST.root, _NEWEST.first_frame = report, None, ""
    return report


@contextmanager
def collecting(model: str = "", modules: Mapping[str, str] | None = None) -> Iterator[Collector]:
    """Every graph compiled inside this context, in this thread or task, goes into one report."""
    collector = Collector(Report(model=model, modules=dict(modules or {}), versions=report_data.versions()))
    token = _COLLECTOR.set(collector)
    try:
        yield collector
    finally:
        _COLLECTOR.reset(token)


def is_collecting() -> bool:
    """True inside ``collecting()``: somebody reads the report, no need to also log it."""
    return _COLLECTOR.get() is not None


def last_report() -> Report | None:
    """The report of the newest compile in this process; ``None`` if nothing was compiled yet."""
    with _LOCK:
        return _NEWEST.report
