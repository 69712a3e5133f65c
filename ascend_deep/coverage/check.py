"""Compare a run with the stored baseline: a fusion that was there has to be there still."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ascend_deep.coverage.cells import Result
from ascend_deep.coverage.table import Baseline

__all__ = ["Comparison", "compare"]

_BAD = ("wrong", "failed")


@dataclass(frozen=True)
class Comparison:
    """Sentences: ``lost`` fails the check, ``gained`` and ``unknown`` do not."""

    lost: tuple[str, ...] = ()
    gained: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.lost


def compare(baseline: Baseline, results: Iterable[Result]) -> Comparison:
    """What ``results`` lost and gained. Cells that the baseline does not have are ``unknown``, unless they are bad."""
    lost: list[str] = []
    gained: list[str] = []
    unknown: list[str] = []
    for now in results:
        name = now.cell.key.replace("/", ", ")
        before = baseline.cells.get(now.cell.key)
        if now.status in _BAD and (before is None or before.status not in _BAD):
            lost.append(f"{name}: {now.status}: {now.reasons.get('', 'no reason given')}")
            continue
        if before is None:
            unknown.append(f"{name}: the baseline has no such cell.")
            continue
        if before.status in _BAD and now.status not in _BAD:
            gained.append(f"{name}: {now.status}, was {before.status}.")
        for op in sorted({*before.ops, *now.ops}):
            was, count = before.ops.get(op, 0), now.ops.get(op, 0)
            if count < was:
                why = now.reasons.get(op) or now.reasons.get("") or "the run gives no reason."
                lost.append(f"{name}: {op} was fused {was} times and is fused {count} times: {why}")
            elif count > was:
                gained.append(f"{name}: {op} was fused {was} times and is fused {count} times.")
    return Comparison(tuple(lost), tuple(gained), tuple(unknown))
