"""Which rewrites profit on which device: a table, and what it leaves out.

Most recognisers replace many calls by one, which profits everywhere. The ones here replace one product by another that
computes the same; whether that is faster depends on the device alone. Where a row says no, the recogniser does not run,
the report says so in one sentence, and ``options={"force": [name]}`` (or naming it in ``enable``) runs it nevertheless.

A calibration of the machine (``ascend-deep calibrate``) may hold rows that stand in front of these, for any recogniser.

A row says yes only for a reason that can be stated. Where nothing was measured, the reason says that too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ascend_deep.native import table

__all__ = ["POLICY", "Row", "left_out", "profits", "wanted"]


@dataclass(frozen=True)
class Row:
    """One recogniser on one device type.

    Attributes:
        profits: whether it runs by default.
        why: the reason, the rest of a sentence.
        by: names of providers; it profits only where one of them is there. Empty: in any case.
    """

    profits: bool
    why: str
    by: tuple[str, ...] = ()


_SAME_WORK = "torch's own product does the same work"
_SAME_UNITS = "torch's own product runs on the same matrix units"

# recogniser -> device type -> row. Recognisers that are not listed run everywhere; devices that are not listed do not
# profit.
POLICY: Mapping[str, Mapping[str, Row]] = {
    "upcast_matmul": {
        # Measured with one thread and AVX-512, 1 to 1024 rows, 7168 x 256, 2048 x 64: never slower than converting and
        # multiplying, twice as fast for few rows.
        "cpu": Row(True, "operands are read in bfloat16 instead of being converted on every call", ("native.cpu",)),
        "cuda": Row(False, "the share of such products in a model's time was not measured"),
        "npu": Row(True, "matrix units multiply bfloat16 at full rate, float32 in several passes", ("deep_gemm",)),
    },
    "linear": {
        "cpu": Row(False, _SAME_UNITS),
        "cuda": Row(False, _SAME_UNITS),
        "npu": Row(False, f"{_SAME_UNITS}, as far as is known without a measurement"),
    },
    "scaled_mm": {
        "cpu": Row(False, _SAME_WORK),
        "cuda": Row(False, _SAME_UNITS),
        "npu": Row(True, "no kernel of torch._scaled_mm is known there", ("deep_gemm",)),
    },
    "grouped_loop": {
        # Measured with one thread and AVX-512, 256 x 512 to 1024 x 512, 8 groups: 1.3 to 1.5 times as fast with 64
        # rows per group and more, 0.8 times with 8.
        "cpu": Row(False, "it gains for dozens of rows in every group, and loses for few"),
        "cuda": Row(False, "whether one product for all groups is faster was not measured there"),
        "npu": Row(True, "one kernel for all groups instead of one for each", ("torch_npu", "deep_gemm")),
    },
    "grouped_mm": {
        "cpu": Row(False, _SAME_WORK),
        "cuda": Row(False, _SAME_WORK),
        "npu": Row(False, f"{_SAME_WORK}, as far as is known without a measurement"),
    },
}


def _row(name: str, device: str, measured: Mapping[str, Row] | None = None) -> Row:
    """The row, with ``profits`` false and the reason if none of the providers is there that it needs."""
    if measured and name in measured:
        return measured[name]
    if name not in POLICY:
        return Row(True, "it replaces many calls by one")
    row = POLICY[name].get(device, Row(False, "nothing is known of it there"))
    if not row.profits or not row.by:
        return row
    missing = {p.name: p.unavailable() for p in table.PRIORITY.get(device, ()) if p.name in row.by}
    if any(sentence is None for sentence in missing.values()):
        return row
    reasons = "; ".join((sentence or "").rstrip(".") for sentence in missing.values()) or "there is none"
    return Row(False, f"only {' or '.join(row.by)} has a kernel that is faster ({reasons})")


def profits(name: str, device: str) -> bool:
    """Whether the table lets recogniser ``name`` run on device type ``device``."""
    return _row(name, device).profits


def wanted(
    names: Sequence[str], device: str, forced: Iterable[str] = (), measured: Mapping[str, Row] | None = None
) -> tuple[str, ...]:
    """Those of ``names`` (recognisers) that run on device type ``device``: all but what the table leaves out.

    Args:
        forced: run in any case.
        measured: rows of a calibration of this device, which stand in front of the table's.
    """
    forced = set(forced)
    return tuple(n for n in names if n in forced or _row(n, device, measured).profits)


def left_out(
    names: Sequence[str], device: str, found: Mapping[str, int], measured: Mapping[str, Row] | None = None
) -> tuple[str, ...]:
    """One sentence for each recogniser of ``names`` that the table leaves out and that found places.

    Args:
        found: recogniser to number of places at which it would have looked.
        measured: as for ``wanted``.
    """
    sentences = []
    for name in names:
        count = found.get(name, 0)
        if not count:
            continue
        row = _row(name, device, measured)
        if not row.profits:
            what = "product" if name in POLICY else "place"
            places = f"{count} {what}s stay" if count > 1 else f"one {what} stays"
            sentences.append(
                f"{name} is not profitable on this target ({device}), so {places} as written: {row.why}. "
                f"options={{'force': ['{name}']}} runs it nevertheless."
            )
    return tuple(sentences)
