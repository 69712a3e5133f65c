"""What the text and the HTML form of a report share: rows of equal sites, short module paths, the module tree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ascend_deep.passes._types import Match, Miss
from ascend_deep.report import Report

__all__ = [
    "MatchRow",
    "MissRow",
    "TreeNode",
    "headline",
    "kept_for_others",
    "match_rows",
    "miss_rows",
    "own_rows",
    "plural",
    "short_paths",
    "tree",
]


@dataclass(frozen=True)
class MatchRow:
    """Sites fused in the same way: equal op, attributes and provider."""

    recogniser: str
    op: str
    spec: str
    provider: str
    count: int
    modules: str
    sources: tuple[str, ...]
    max_error: float
    certificates: tuple[str, ...]
    outside_users: int
    notes: tuple[str, ...]
    refusals: tuple[str, ...]


@dataclass(frozen=True)
class MissRow:
    """Sites left alone for the same reason."""

    recogniser: str
    reason: str
    hint: str
    count: int
    modules: str
    sources: tuple[str, ...]


def match_rows(matches: Sequence[Match]) -> list[MatchRow]:
    """Matches grouped by (recogniser, op, spec, provider), in order of first appearance."""
    groups: dict[tuple[str, ...], list[Match]] = {}
    for m in matches:
        groups.setdefault((m.op, m.recogniser, m.spec, m.provider), []).append(m)
    rows = []
    for same in groups.values():
        first = same[0]
        rows.append(
            MatchRow(
                first.recogniser,
                first.op,
                first.spec,
                first.provider,
                sum(m.count for m in same),
                short_paths(m.module for m in same),
                tuple(dict.fromkeys(m.source for m in same if m.source)),
                max(m.max_error for m in same),
                tuple(dict.fromkeys(m.certificate for m in same if m.certificate)),
                sum(m.outside_users for m in same),
                tuple(dict.fromkeys(n for m in same for n in m.notes)),
                tuple(dict.fromkeys(r for m in same for r in m.provider_refusals)),
            )
        )
    return rows


def miss_rows(misses: Sequence[Miss]) -> list[MissRow]:
    """Misses grouped by (recogniser, reason, hint), in order of first appearance.

    Copies of one block, of a loop that was unrolled for example, have reasons that differ in the numbers of what they
    name (``experts.3.w2``, ``linear_7``) and count as one: the reason then names all of them.
    """
    groups: dict[tuple[str, str, str], list[Miss]] = {}
    for m in misses:
        groups.setdefault((m.recogniser, _unnumbered(m.reason), m.hint), []).append(m)
    return [
        MissRow(
            recogniser,
            _joined([m.reason for m in same]),
            hint,
            len(same),
            short_paths(m.module for m in same),
            tuple(dict.fromkeys(m.source for m in same if m.source)),
        )
        for (recogniser, _, hint), same in groups.items()
    ]


def _unnumbered(reason: str) -> str:
    """``reason`` without the numbers that are parts of names."""
    return re.sub(r"(?<=[a-zA-Z][._])\d+\b(?!\.\d)", "#", reason)


def _joined(reasons: Sequence[str]) -> str:
    """Reasons of the same words as one, with all the names where they differ."""
    words = [r.split(" ") for r in dict.fromkeys(reasons)]
    if len(words) == 1 or len({len(w) for w in words}) > 1:
        return reasons[0]
    return " ".join(_names(column) for column in zip(*words, strict=True))


def _names(words: Sequence[str]) -> str:
    """``a.0.w,`` and ``a.1.w,`` as ``a.{0-1}.w,``; names without dots by their first and how many more there are."""
    different = list(dict.fromkeys(words))
    if len(different) == 1:
        return words[0]
    end = words[0][len(words[0].rstrip(",.;:")) :]
    short = short_paths(w.rstrip(",.;:") for w in different)
    return (short if "{" in short else f"{words[0].rstrip(',.;:')} and {len(different) - 1} more") + end


def own_rows(report: Report) -> list[tuple[str, int, str]]:
    """(op, number of calls, modules) of the calls that the model makes itself."""
    groups: dict[str, list[str]] = {}
    for call in report.own_calls:
        groups.setdefault(call.op, []).append(call.module or call.source)
    return [(op, len(places), short_paths(places)) for op, places in groups.items()]


def short_paths(paths: Iterable[str]) -> str:
    """Paths that differ in one number become one: ``model.layers.{0-3}.mlp``. Others are separated by commas."""
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for path in paths:
        parts = re.split(r"(?<![^.])(\d+)(?![^.])", path)
        groups.setdefault(tuple(parts[::2]), []).append(tuple(int(n) for n in parts[1::2]))
    shown = []
    for texts, numbers in groups.items():
        columns = [sorted(set(c)) for c in zip(*numbers, strict=True)]
        varying = [i for i, c in enumerate(columns) if len(c) > 1]
        if len(varying) > 1:  # more than one index varies: a product would claim sites that are not there
            columns = [[n] for n in numbers[0]]
        path = texts[0]
        for column, text in zip(columns, texts[1:], strict=True):
            path += _ranges(column) + text
        rest = len(set(numbers)) - 1 if len(varying) > 1 else 0
        shown.append(path + (f" and {rest} more" if rest else ""))
    return ", ".join(s for s in shown if s)


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) + "}"


def plural(count: int, one: str, many: str = "") -> str:
    """``"1 graph"``, ``"2 graphs"``."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def kept_for_others(count: int) -> str:
    """What a match says of values inside it that something outside needs as well."""
    verb = "is" if count == 1 else "are"
    return f"{plural(count, 'value')} inside {verb} needed elsewhere as well and {verb} still computed for that."


def headline(report: Report) -> str:
    """One line that says how it went."""
    fused = sum(m.count for m in report.matches)
    breaks = sum(b.count for b in report.graph_breaks)
    parts = [
        f"{plural(fused, 'place')} fused" if fused else "nothing fused",
        f"{plural(len(report.misses), 'place')} left as written" if report.misses else "no refusals",
        plural(len(report.graphs), "graph"),
    ]
    if report.own_calls:
        parts.insert(1, f"{len(report.own_calls)} called by the model")
    if breaks or report.model:  # a plain compile does not know of breaks
        parts.append(plural(breaks, "graph break") if breaks else "no graph breaks")
    return ", ".join(parts)


# -- module tree ----------------------------------------------------------------------------------------------------
@dataclass
class TreeNode:
    """One module in the picture.

    ``status`` is ``"fused"``, ``"missed"`` (a block was found and refused), ``"unclaimed"`` (has ops that no recogniser
    claims) or ``"quiet"`` (ran no op of its own). ``repeats``: how many equal siblings the node stands for.
    """

    name: str
    path: str
    kind: str = ""
    status: str = "quiet"
    detail: str = ""
    ops: int = 0
    repeats: int = 1
    children: list[TreeNode] = field(default_factory=list)

    def leaves(self) -> int:
        """Rows that the node takes in the picture."""
        return sum(c.leaves() for c in self.children) or 1

    def depth(self) -> int:
        """Columns that the node takes in the picture."""
        return 1 + max((c.depth() for c in self.children), default=0)

    def shape(self) -> tuple[object, ...]:
        """Equal for siblings that look the same; numbers in names and details do not count."""
        name = "#" if self.name.isdigit() else self.name
        children = tuple((c.repeats, *c.shape()) for c in self.children)
        return name, self.kind, self.status, re.sub(r"\d+", "#", self.detail), self.ops, children


def tree(report: Report) -> TreeNode:
    """The model's modules with their status; runs of equal numbered siblings are folded into one node."""
    root = TreeNode("", "", report.model or "model")
    nodes: dict[str, TreeNode] = {"": root}

    def at(path: str) -> TreeNode:
        if path not in nodes:
            parent, _, name = path.rpartition(".")
            nodes[path] = TreeNode(name, path)
            at(parent).children.append(nodes[path])
        return nodes[path]

    for path, kind in report.modules.items():
        at(path).kind = kind or at(path).kind
    for path, count in report.unclaimed.items():
        # After a graph break Dynamo names modules relative to the frame it resumed in; those have no place here.
        if report.modules and path not in report.modules:
            continue
        node = at(path)
        node.status, node.ops = "unclaimed", count
    fused: dict[str, list[str]] = {}
    for match in report.matches:
        fused.setdefault(match.module, []).append(f"{match.op} on {match.provider}")
    for call in report.own_calls:
        fused.setdefault(call.module, []).append(f"{call.op}, called by the module itself")
    for path, found in fused.items():
        node = at(path)
        node.status, node.detail = "fused", ", ".join(dict.fromkeys(found))
    for miss in report.misses:  # wins over a smaller block that was fused in the same module
        node = at(miss.module)
        found_too = f"{node.detail}; " if node.detail else ""
        node.status, node.detail = "missed", f"{found_too}{miss.recogniser}: {miss.reason}"
        fused.pop(miss.module, None)
    if not report.model and not root.kind:
        root.kind = "model"
    _inherit(root, nodes, fused)
    _fold(root)
    return root


def _inherit(node: TreeNode, nodes: Mapping[str, TreeNode], fused: Mapping[str, object]) -> None:
    """Children of a fused experts or router module without ops of their own are part of the fused op."""
    for child in node.children:
        if node.path in fused and child.status == "quiet":
            child.status, child.detail = "fused", f"part of {node.name}"
        _inherit(child, nodes, {**fused, child.path: ()} if child.detail.startswith("part of") else fused)


def _fold(node: TreeNode) -> None:
    """Fold runs of equal numbered children, innermost first."""
    for child in node.children:
        _fold(child)
    folded: list[TreeNode] = []
    for child in node.children:
        last = folded[-1] if folded else None
        same = last is not None and last.name.split("–")[0].isdigit() and child.name.isdigit()
        if last is not None and same and _sameshape(last, child):
            last.repeats += 1
            last.name = f"{last.name.split('–')[0]}–{child.name}"
        else:
            folded.append(child)
    node.children = folded


def _sameshape(a: TreeNode, b: TreeNode) -> bool:
    return (a.kind, a.status, a.ops, [c.shape() for c in a.children]) == (
        b.kind,
        b.status,
        b.ops,
        [c.shape() for c in b.children],
    )
