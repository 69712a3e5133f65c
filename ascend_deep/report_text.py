"""The text form of a report: what was fused, what was not and why, graph breaks, and where the time went."""

from __future__ import annotations

import io
from collections.abc import Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ascend_deep.report import Report
from ascend_deep.report_layout import headline, kept_for_others, match_rows, miss_rows, own_rows, plural, short_paths
from ascend_deep.report_parts import unclaimed_parts

__all__ = ["duration", "error", "part_lines", "render", "to_text"]

WIDTH = 110
_UNCLAIMED_SHOWN = 6


def to_text(report: Report, width: int = WIDTH) -> str:
    """The report without colours, ``width`` columns wide."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False, emoji=False, markup=False)
    console.print(render(report))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def render(report: Report) -> RenderableType:
    """The report for a rich console."""
    parts: list[RenderableType] = [_head(report)]
    if report.matches:
        parts += [_title("Fused", "green"), _matches(report)]
    if report.own_calls:
        calls = (f"{count}× {op}  {modules}" for op, count, modules in own_rows(report))
        parts += [_title("Called by the model itself", "green"), *(_sentence(c) for c in calls)]
    if report.misses:
        parts += [_title("Left as written", "yellow"), _misses(report)]
    if report.graph_breaks:
        parts += [_title("Graph breaks", "yellow"), _breaks(report)]
    untouched = dict.fromkeys(g.untouched for g in report.graphs if g.untouched)
    if untouched:
        parts += [_title("Handed over untouched", "yellow"), *(_sentence(u) for u in untouched)]
    if report.timings:
        parts += [_title("Time", "cyan"), _timings(report)]
    unclaimed = unclaimed_parts(report)
    if unclaimed:
        parts += [_title("Parts that no recogniser claims", "yellow"), *(_sentence(t) for t in part_lines(unclaimed))]
    if report.unclaimed:
        parts += [_title("Other ops", "cyan"), _unclaimed(report)]
    if report.notes:
        parts += [_title("Notes", "cyan"), *(_sentence(n) for n in report.notes)]
    return Group(*parts)


def _head(report: Report) -> RenderableType:
    nodes, after = sum(g.nodes for g in report.graphs), sum(g.nodes_after for g in report.graphs)
    facts = [
        f"target {report.target}" if report.target else "",
        ("training" if report.training else "inference") if report.graphs else "no graph was compiled",
        "dynamic shapes" if any(g.dynamic for g in report.graphs) else "",
        f"{nodes} → {after} ops" if after else (f"{nodes} ops" if nodes else ""),
        ", ".join(f"{k} {v}" for k, v in report.versions.items() if k in ("torch", "ascend-deep", "torch_npu")),
    ]
    body = Text(headline(report), style="bold green" if report.matches else "bold yellow")
    body.append("\n" + " · ".join(f for f in facts if f), style="not bold dim")
    title = f"ascend-deep · {report.model}" if report.model else "ascend-deep"
    return Panel(body, title=Text(title), title_align="left", box=box.ROUNDED, padding=(0, 1))


def _title(text: str, style: str) -> RenderableType:
    return Padding(Text(text, style=f"bold {style}"), (1, 0, 0, 0))


def _sentence(text: str, indent: int = 2) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, indent))


def _matches(report: Report) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True, show_edge=False, expand=False)
    table.add_column("sites", justify="right", style="bold")
    table.add_column("op", style="green", no_wrap=True)
    table.add_column("provider", overflow="fold")
    table.add_column("max error", justify="right", no_wrap=True)
    table.add_column("where", overflow="fold")
    rows = match_rows(report.matches)
    for row in rows:
        source = row.sources[0] if row.sources else ""
        more = f" +{len(row.sources) - 1}" if len(row.sources) > 1 else ""
        where = Text.assemble(row.modules or "the model itself", ("\n" + source + more, "dim"))
        table.add_row(str(row.count), row.op, row.provider, error(row.max_error), where)
    details: list[RenderableType] = []
    for row in rows:
        details.append(_sentence(row.spec if row.spec.startswith(row.op) else f"{row.op}: {row.spec}"))
        if row.certificates:
            shown = ", ".join(row.certificates[:3]) + (" …" if len(row.certificates) > 3 else "")
            details.append(_sentence(f"tested by {row.recogniser}, certificate {shown}", 4))
        if row.outside_users:
            details.append(_sentence(kept_for_others(row.outside_users), 4))
        details += [_sentence(note, 4) for note in row.notes]
        details += [_sentence(f"not on {refusal}", 4) for refusal in row.refusals]
    return Group(table, Text(), *details)


def _misses(report: Report) -> RenderableType:
    lines: list[RenderableType] = []
    for row in miss_rows(report.misses):
        where = row.modules + (f"  ({', '.join(row.sources[:3])})" if row.sources else "")
        head = Text.assemble((f"{row.count}× ", "bold"), (row.recogniser, "yellow"), f"  {where}")
        lines.append(Padding(head, (0, 0, 0, 2)))
        lines.append(_sentence(row.reason, 5))
        if row.hint:
            lines.append(_sentence(f"Hint: {row.hint}", 5))
    return Group(*lines)


def _breaks(report: Report) -> RenderableType:
    lines: list[RenderableType] = []
    for b in report.graph_breaks:
        lines.append(Padding(Text.assemble((f"{b.count}× ", "bold"), b.source), (0, 0, 0, 2)))
        lines.append(_sentence(b.reason, 5))
        if b.hint:
            lines.append(_sentence(f"Hint: {b.hint}", 5))
    return Group(*lines)


def _timings(report: Report) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    longest = max(report.timings.values()) or 1.0
    for stage, seconds in report.timings.items():
        bar = "━" * max(1, round(30 * seconds / longest)) if seconds else ""
        table.add_row(f"  {stage}", Text(duration(seconds), justify="right"), Text(bar, style="cyan"))
    return table


def part_lines(unclaimed: Mapping[str, str]) -> list[str]:
    """One line a class: where it is, and what it is called."""
    groups: dict[str, list[str]] = {}
    for path, kind in unclaimed.items():
        groups.setdefault(kind, []).append(path)
    return [
        f"{len(paths)}× {kind}  {short_paths(paths) or 'the model itself'}: it looks like part of a mixture of "
        "experts by its name, and no recogniser found a block that it knows in it."
        for kind, paths in groups.items()
    ]


def _unclaimed(report: Report) -> RenderableType:
    # One line per place in the model, layers folded; the largest first.
    groups: dict[str, list[str]] = {}
    for path in report.unclaimed:
        groups.setdefault("".join("#" if c.isdigit() else c for c in path), []).append(path)
    rows = sorted(((sum(report.unclaimed[p] for p in ps), ps) for ps in groups.values()), key=lambda r: -r[0])
    lines = [
        _sentence(f"{ops:5d} ops  {short_paths(ps) or '(the model itself)'}") for ops, ps in rows[:_UNCLAIMED_SHOWN]
    ]
    if len(rows) > _UNCLAIMED_SHOWN:
        rest = sum(ops for ops, _ in rows[_UNCLAIMED_SHOWN:])
        lines.append(_sentence(f"{rest:5d} ops  in {plural(len(rows) - _UNCLAIMED_SHOWN, 'other place')}"))
    return Group(*lines)


def error(value: float) -> str:
    """An error relative to the result, e.g. ``3.1e-07``; ``0`` if exact."""
    return "0" if value == 0 else f"{value:.1e}"


def duration(seconds: float) -> str:
    """``"12 ms"``, ``"3.4 s"``."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
