"""The HTML form of a report: one self-contained page with a picture of the model, for light and dark screens.

The picture is an icicle drawing of the module tree, root on the left: one column per level, equal layers folded,
colours for fused, refused and unclaimed modules. Everything is inline; the page loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ascend_deep.report import Report
from ascend_deep.report_layout import (
    TreeNode,
    headline,
    kept_for_others,
    match_rows,
    miss_rows,
    own_rows,
    short_paths,
    tree,
)
from ascend_deep.report_parts import unclaimed_parts
from ascend_deep.report_text import duration, error, part_lines

__all__ = ["render"]

_ROW, _GAP = 26, 3
_WIDTH, _NARROWEST, _WIDEST = 1100, 124, 200  # pixels of the picture and of one column
_LETTER = 7.9  # pixels of one character, generously
_STATUS = {
    "fused": "fused into one op",
    "missed": "found, left as written",
    "unclaimed": "ops that no recogniser claims",
    "quiet": "no op of its own",
}

_CLASSES = {"where": 'class="where"', "certificate": 'class="hash"'}  # of the cells below a heading

_STYLE = """
:root{--bg:#fbfaf7;--ink:#1d2129;--soft:#626b78;--line:#e0ddd4;--card:#fff;--accent:#b3400f;
--fused:#1c7c54;--fused-bg:#d3eee0;--missed:#9a6200;--missed-bg:#fbe6bd;--unclaimed:#47618c;--unclaimed-bg:#e1e8f4;
--quiet:#7d8390;--quiet-bg:#f0eee8}
@media (prefers-color-scheme:dark){:root{--bg:#14171c;--ink:#e7e9ee;--soft:#99a2b1;--line:#2b3038;--card:#1a1e25;
--accent:#ff8e57;--fused:#7fdcb0;--fused-bg:#143a2a;--missed:#ffce7a;--missed-bg:#42300c;--unclaimed:#a9c1ec;
--unclaimed-bg:#212d42;--quiet:#8a92a0;--quiet-bg:#20242b}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:15px;font-weight:600;margin:0;color:var(--accent);letter-spacing:.02em}
h2{font-size:17px;margin:40px 0 10px}
.lead{font-size:28px;line-height:1.25;font-weight:650;margin:4px 0 6px;letter-spacing:-.01em}
.facts,.soft{color:var(--soft)}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:22px 0 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 16px;min-width:128px}
.tile b{display:block;font-size:24px;font-weight:650;line-height:1.2}
.tile.fused b{color:var(--fused)}.tile.missed b{color:var(--missed)}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:10px}
.picture{padding:14px}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:8px 14px;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
th{font-size:12px;font-weight:600;color:var(--soft);white-space:nowrap}
td.n,th.n{width:1%;text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td code{display:inline-block;min-width:6em}
td.where code{min-width:19em}
td.hash code{white-space:nowrap}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.key{display:flex;flex-wrap:wrap;gap:6px 18px;margin:0 0 10px;font-size:13px;color:var(--soft)}
.key i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;
vertical-align:-1px;border:1px solid}
.pill{display:inline-block;border-radius:99px;padding:1px 10px;font-size:13px;font-weight:600}
.fused.pill,.key .fused{background:var(--fused-bg);color:var(--fused)}
.missed.pill,.key .missed{background:var(--missed-bg);color:var(--missed)}
.key .unclaimed{background:var(--unclaimed-bg);color:var(--unclaimed)}
.key .quiet{background:var(--quiet-bg);color:var(--quiet)}
.hint{border-left:3px solid var(--missed);padding-left:10px;margin-top:6px}
.bar{height:10px;margin-top:6px;border-radius:5px;background:var(--accent);min-width:2px}
svg{display:block;font:12px system-ui,-apple-system,"Segoe UI",sans-serif}
svg rect{stroke-width:1}
svg .fused rect{fill:var(--fused-bg);stroke:var(--fused)}svg .fused text{fill:var(--fused)}
svg .missed rect{fill:var(--missed-bg);stroke:var(--missed)}svg .missed text{fill:var(--missed)}
svg .unclaimed rect{fill:var(--unclaimed-bg);stroke:var(--unclaimed-bg)}svg .unclaimed text{fill:var(--unclaimed)}
svg .quiet rect{fill:var(--quiet-bg);stroke:var(--quiet-bg)}svg .quiet text{fill:var(--quiet)}
svg text.name{font-weight:600}
"""


def render(report: Report) -> str:
    """The page."""
    title = f"ascend-deep: {report.model or 'report'}"
    parts = [
        _top(report),
        _picture(report),
        _matches(report),
        _own(report),
        _misses(report),
        _breaks(report),
        _untouched(report),
    ]
    parts += [_timings(report), _parts(report), _unclaimed(report), _notes(report)]
    body = "\n".join(p for p in parts if p)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f'<meta name="color-scheme" content="light dark"/>\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>"
    )


def _top(report: Report) -> str:
    facts = [
        f"target {report.target}" if report.target else "",
        "training" if report.training else "inference",
        "dynamic shapes" if any(g.dynamic for g in report.graphs) else "",
        *(f"{k} {v}" for k, v in report.versions.items()),
    ]
    tiles = [_tile(count, op, "fused") for op, count in report.counts().items()]
    tiles.append(_tile(len(report.misses), "left as written", "missed" if report.misses else ""))
    breaks = sum(b.count for b in report.graph_breaks)
    tiles.append(_tile(breaks, "graph breaks" if breaks != 1 else "graph break", "missed" if breaks else ""))
    nodes, after = sum(g.nodes for g in report.graphs), sum(g.nodes_after for g in report.graphs)
    if after:
        tiles.append(_tile(after, f"ops, {nodes} before", ""))
    return (
        f"<h1>ascend-deep</h1>\n<p class='lead'>{escape(report.model or 'Compile report')}: "
        f"{escape(headline(report))}</p>\n"
        f"<p class='facts'>{escape(' · '.join(f for f in facts if f))}</p>\n<div class='tiles'>{''.join(tiles)}</div>"
    )


def _tile(number: int, label: str, kind: str) -> str:
    return f"<div class='tile {kind}'><b>{number}</b><span class='soft'>{escape(label)}</span></div>"


# -- the picture ----------------------------------------------------------------------------------------------------
def _picture(report: Report) -> str:
    if not report.modules and not report.matches:
        return ""
    root = tree(report)
    column = min(_WIDEST, max(_NARROWEST, _WIDTH // root.depth()))
    width, height = root.depth() * column, root.leaves() * _ROW
    boxes: list[str] = []
    _draw(root, 0, 0, column, boxes)
    key = "".join(f"<span><i class='{k}'></i>{v}</span>" for k, v in _STATUS.items())
    return (
        f"<h2>The model</h2>\n<p class='key'>{key}</p>\n<div class='scroll picture'>"
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="Module tree of the model">{"".join(boxes)}</svg></div>'
    )


def _draw(node: TreeNode, x: int, row: int, column: int, boxes: list[str]) -> None:
    y, w, h = row * _ROW, column - _GAP, node.leaves() * _ROW - _GAP
    name = (node.name or node.kind) + (f" ×{node.repeats}" if node.repeats > 1 else "")
    tip = " · ".join(t for t in (node.path or name, node.kind, node.detail, f"{node.ops} ops" if node.ops else "") if t)
    letters = int((w - 16) / _LETTER)
    label = f'<text class="name" x="{x + 8}" y="{y + 16}">{escape(_cut(name, letters))}</text>'
    room = letters - len(name) - 2
    kind = node.kind if node.name else ""
    if kind and room >= min(7, len(kind)):
        at = x + w - 8
        label += f'<text x="{at}" y="{y + 16}" text-anchor="end" opacity=".75">{escape(_cut(kind, room))}</text>'
    boxes.append(
        f'<g class="{node.status}"><title>{escape(tip)}</title>'
        f'<rect x="{x}.5" y="{y}.5" width="{w - 1}" height="{h - 1}" rx="4"/>{label}</g>'
    )
    for child in node.children:
        _draw(child, x + column, row, column, boxes)
        row += child.leaves()


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


# -- tables -----------------------------------------------------------------------------------------------------------
def _table(head: Sequence[str], rows: Iterable[Iterable[str]], numbers: tuple[int, ...] = ()) -> str:
    def cells(tag: str, row: Iterable[str]) -> str:
        kinds = ['class="n"' if i in numbers else _CLASSES.get(name, "") for i, name in enumerate(head)]
        return "".join(f"<{tag} {kind}>{c}</{tag}>" for kind, c in zip(kinds, row, strict=True)).replace(" >", ">")

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='scroll'>{table}</div>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _matches(report: Report) -> str:
    if not report.matches:
        return ""
    rows = []
    for r in match_rows(report.matches):
        more = [f"<div class='soft'>{escape(n)}</div>" for n in r.notes]
        if r.outside_users:
            more.append(f"<div class='soft'>{escape(kept_for_others(r.outside_users))}</div>")
        more += [f"<div class='soft'>not on {escape(x)}</div>" for x in r.refusals]
        rows.append(
            (
                str(r.count),
                f"<span class='pill fused'>{escape(r.op)}</span>",
                _code(r.modules) + "<br/>" + "<br/>".join(_code(s) for s in r.sources[:4]),
                _code(r.spec) + "".join(more),
                escape(r.provider),
                error(r.max_error),
                "<br/>".join(_code(c) for c in r.certificates[:4]) + ("<br/>…" if len(r.certificates) > 4 else ""),
            )
        )
    head = ("sites", "op", "where", "what it computes", "provider", "max error", "certificate")
    return (
        f"<h2>Fused</h2>\n{_table(head, rows, (0, 5))}\n<p class='soft'>Every rewrite was tested: region and "
        "replacement ran on random and adversarial inputs. <code>ascend-deep replay CERTIFICATE</code> runs it again."
        "</p>"
    )


def _own(report: Report) -> str:
    rows = [
        (str(count), f"<span class='pill fused'>{escape(op)}</span>", _code(modules))
        for op, count, modules in own_rows(report)
    ]
    return f"<h2>Called by the model itself</h2>\n{_table(('calls', 'op', 'where'), rows, (0,))}" if rows else ""


def _hint(hint: str) -> str:
    return f"<div class='hint'>{escape(hint)}</div>" if hint else ""


def _misses(report: Report) -> str:
    rows = [
        (
            str(r.count),
            f"<span class='pill missed'>{escape(r.recogniser)}</span>",
            _code(r.modules) + "<br/>" + "<br/>".join(_code(s) for s in r.sources[:4]),
            escape(r.reason) + _hint(r.hint),
        )
        for r in miss_rows(report.misses)
    ]
    return f"<h2>Left as written</h2>\n{_table(('sites', 'recogniser', 'where', 'why'), rows, (0,))}" if rows else ""


def _breaks(report: Report) -> str:
    rows = [(str(b.count), _code(b.source), escape(b.reason) + _hint(b.hint)) for b in report.graph_breaks]
    return f"<h2>Graph breaks</h2>\n{_table(('times', 'where', 'why'), rows, (0,))}" if rows else ""


def _untouched(report: Report) -> str:
    reasons = dict.fromkeys(g.untouched for g in report.graphs if g.untouched)
    items = "".join(f"<li>{escape(r)}</li>" for r in reasons)
    return f"<h2>Handed over untouched</h2>\n<ul>{items}</ul>" if items else ""


def _timings(report: Report) -> str:
    if not report.timings:
        return ""
    longest = max(report.timings.values()) or 1.0
    rows = [
        (escape(stage), duration(s), f"<div class='bar' style='width:{max(0.3, 100 * s / longest):.1f}%'></div>")
        for stage, s in report.timings.items()
    ]
    return f"<h2>Time</h2>\n{_table(('stage', 'time', ''), rows, (1,))}".replace(
        "<th></th>", '<th style="width:70%"></th>'
    )


def _parts(report: Report) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in part_lines(unclaimed_parts(report)))
    return f"<h2>Parts that no recogniser claims</h2>\n<ul>{lines}</ul>" if lines else ""


def _unclaimed(report: Report) -> str:
    groups: dict[str, list[str]] = {}
    for path in report.unclaimed:
        groups.setdefault("".join("#" if c.isdigit() else c for c in path), []).append(path)
    rows = sorted(
        ((sum(report.unclaimed[p] for p in ps), short_paths(ps)) for ps in groups.values()), key=lambda r: -r[0]
    )
    cells = [(str(n), _code(where or "the model itself")) for n, where in rows]
    return f"<h2>Other ops</h2>\n{_table(('ops', 'where'), cells, (0,))}" if cells else ""


def _notes(report: Report) -> str:
    items = "".join(f"<li>{escape(n)}</li>" for n in report.notes)
    return f"<h2>Notes</h2>\n<ul>{items}</ul>" if items else ""
