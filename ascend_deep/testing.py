"""For the tests of a model's owner: pin what the backend fuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ascend_deep
from ascend_deep.options import Options
from ascend_deep.report import Report
from ascend_deep.report_layout import miss_rows

__all__ = ["assert_fused"]


def assert_fused(
    model: Callable[..., Any],
    *args: Any,
    expect: Mapping[str, int],
    options: Mapping[str, Any] | Options | None = None,
    **kwargs: Any,
) -> Report:
    """Compile ``model`` on these inputs and check how many sites were fused into which op.

    Under the caller's grad mode: call it inside ``torch.no_grad()`` to test inference.

        assert_fused(model, input_ids, expect={"moe_route": 4, "moe_experts": 4})

    Args:
        model, *args, **kwargs: as for ``ascend_deep.explain``.
        expect: op to number of sites. Exact: an op that is not named must not be there, ``{}`` means nothing fused. Ops
            that ``ascend_deep.prepare`` put into the model count too.
        options: as for the backend.

    Returns:
        The report.

    Raises:
        AssertionError: the counts differ. The message shows both, the refusals with their reasons, and graph breaks.
        TypeError: ``expect`` is not a mapping of names to numbers.
    """
    if not isinstance(expect, Mapping) or not all(isinstance(n, int) for n in expect.values()):
        raise TypeError(f"assert_fused: expect is {expect!r}; it takes a mapping of op names to numbers of sites.")
    report = ascend_deep.explain(model, *args, options=options, **kwargs)
    found = report.counts()
    wanted = {op: n for op, n in expect.items() if n}
    if found != wanted:
        raise AssertionError(_message(report, found, wanted))
    return report


def _message(report: Report, found: Mapping[str, int], wanted: Mapping[str, int]) -> str:
    lines = [f"{report.model or 'the model'} does not fuse as expected:"]
    for op in sorted({*found, *wanted}):
        have, want = found.get(op, 0), wanted.get(op, 0)
        lines.append(f"  {op}: {have} fused, {want} expected{'' if have == want else '   <--'}")
    for row in miss_rows(report.misses):
        lines.append(
            f"  left as written, {row.count}× {row.recogniser} at {row.modules or ', '.join(row.sources)}: {row.reason}"
        )
        if row.hint:
            lines.append(f"    hint: {row.hint}")
    for b in report.graph_breaks:
        lines.append(f"  graph break, {b.count}× at {b.source}: {b.reason}")
        if b.hint:
            lines.append(f"    hint: {b.hint}")
    lines += [f"  untouched graph: {g.untouched}" for g in report.graphs if g.untouched]
    if not report.graphs:
        lines.append("  no graph was compiled.")
    return "\n".join(lines)
