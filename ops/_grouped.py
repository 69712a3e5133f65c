"""Grouped layouts: which rows of a buffer belong to which group. ``align(x)`` rounds up to a multiple of ``alignment``.

    psum     [G]  end of each group's rows: group g has the rows [align(psum[g - 1]), psum[g]), the first starts at 0
    labels   [M]  the group of each row; anything outside [0, G), -1 above all, is a padding row
    sizes    [G]  number of rows of each group, multiples of ``alignment``: group g starts at the sum of those before it
    masked   [G]  a buffer [G, Mmax, ...] of its own for each group, of which the first masked_m[g] rows count

Indices are i32 or i64. Ends and counts are clamped to the buffer, an end before its start is an empty group.
A row that belongs to no group is padding: it is never read, so it may hold NaN, and it is zero in results.

``alignment`` is also a promise that fast kernels rely on: with ``labels``, no block of ``alignment`` rows holds rows of
two groups. It depends on values, so it is checked with ASCEND_DEEP_DEBUG=1 only, as are ends that decrease or lie
behind the buffer and sizes that are no multiples. Contract: section A.3 of the DeepGEMM operator list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import MGroupedBf16, MGroupedScaled
from ascend_deep.ops import _check

__all__ = [
    "K_GROUPINGS",
    "M_GROUPINGS",
    "bounds",
    "check_index",
    "check_m_grouped",
    "debug_ends",
    "debug_labels",
    "debug_m_grouped",
    "debug_masked",
    "ends_of_sizes",
    "rows_of_groups",
    "valid_rows",
]

M_GROUPINGS = ("psum", "labels")
K_GROUPINGS = ("psum", "sizes")


def check_index(op: str, name: str, index: Tensor, shape: str, length: Any, source: str) -> None:
    """An i32 or i64 vector of ``length`` entries."""
    _check.dtypes(op, name, index, (torch.int32, torch.int64))
    _check.rank(op, name, index, shape, 1)
    _check.size(op, f"the size of {name}", index.shape[0], length, source)


def check_m_grouped(
    op: str, a: Tensor, grouped_layout: Tensor, groups: Any, grouping: str, alignment: Any, expected_m: Any
) -> None:
    """The index tensor, the alignment and the hint of an m-grouped product; A is [M, ...]."""
    _check.choice(op, "grouping", grouping, M_GROUPINGS)
    if grouping == "psum":
        check_index(op, "grouped_layout", grouped_layout, "[G]", groups, "the number of groups of b")
    else:
        check_index(op, "grouped_layout", grouped_layout, "[M]", a.shape[0], "the number of rows of a")
    check_alignment(op, alignment)
    if expected_m is not None:
        check_expected(op, expected_m)
    _check.same_device(op, "a", a, grouped_layout=grouped_layout)


def check_alignment(op: str, alignment: Any) -> None:
    """An alignment of at least 1."""
    torch._check_value(alignment >= 1, lambda: f"{op}: alignment is {alignment}; it must be at least 1.")


def check_expected(op: str, expected_m: Any) -> None:
    """A hint of at least one row."""
    torch._check_value(
        expected_m >= 1, lambda: f"{op}: expected_m is {expected_m}; it is a number of rows, at least 1."
    )


def ends_of_sizes(sizes: Tensor, alignment: Any) -> Tensor:
    """``sizes`` as ``psum``, without looking at the host. One that is no multiple of ``alignment`` leaves a gap."""
    sizes = sizes.clamp(min=0)
    aligned = (sizes + alignment - 1).div(alignment, rounding_mode="floor") * alignment
    return (aligned.cumsum(0) - aligned + sizes).to(sizes.dtype)


def bounds(ends: Tensor, rows: int, alignment: int) -> list[tuple[int, int]]:
    """Start and end of each group of a psum layout within ``rows`` rows. Reads the ends on the host."""
    found, start = [], 0
    for end in ends.tolist():
        first = min(start, rows)
        found.append((first, max(first, min(end, rows))))
        start = -(-max(end, 0) // alignment) * alignment
    return found


def rows_of_groups(grouped_layout: Tensor, groups: int, rows: int, grouping: str, alignment: int) -> list[Any]:
    """Per group what indexes its rows: a slice (psum), or the positions of its label. Reads values on the host."""
    if grouping == "psum":
        return [slice(start, end) for start, end in bounds(grouped_layout, rows, alignment)]
    return [(grouped_layout == g).nonzero().squeeze(1) for g in range(groups)]


def valid_rows(masked_m: Tensor, rows: Any) -> Tensor:
    """[G, Mmax, 1] bool: the rows of a masked layout that count."""
    return (torch.arange(rows, device=masked_m.device) < masked_m.unsqueeze(1)).unsqueeze(2)


# -- debug mode: promises that depend on values -----------------------------------------------------------------------
def debug_m_grouped(op: str, x: MGroupedBf16 | MGroupedScaled) -> None:
    """Raises RuntimeError if the layout of an m-grouped product breaks its promise."""
    if x.grouping == "psum":
        debug_ends(op, x.grouped_layout, x.a.shape[0])
    else:
        debug_labels(op, x.grouped_layout, x.b.shape[0], x.alignment)


def debug_ends(op: str, ends: Tensor, rows: int, name: str = "grouped_layout") -> None:
    """Raises RuntimeError if a psum layout decreases or leaves the buffer."""
    before = 0
    for g, end in enumerate(ends.tolist()):
        if not before <= end <= rows:
            raise RuntimeError(
                f"{op}: {name}[{g}] is {end}; the end of a group must be in [{before}, {rows}], from the end of the "
                "group before it to the number of rows."
            )
        before = end


def debug_labels(op: str, labels: Tensor, groups: int, alignment: int) -> None:
    """Raises RuntimeError if a label is neither -1 nor a group, or if a block of ``alignment`` rows mixes groups."""
    block, seen = -1, -1
    for row, label in enumerate(labels.tolist()):
        if not -1 <= label < groups:
            raise RuntimeError(
                f"{op}: grouped_layout[{row}] is {label}; a label must be in [0, {groups}), or -1 for padding."
            )
        if row // alignment != block:
            block, seen = row // alignment, -1
        if label >= 0:
            if seen not in (-1, label):
                raise RuntimeError(
                    f"{op}: rows {block * alignment} to {row} hold rows of groups {seen} and {label}; with alignment "
                    f"{alignment} a block of that many rows belongs to one group."
                )
            seen = label


def debug_masked(op: str, masked_m: Tensor, rows: int) -> None:
    """Raises RuntimeError if a count is not in [0, Mmax]."""
    for g, count in enumerate(masked_m.tolist()):
        if not 0 <= count <= rows:
            raise RuntimeError(f"{op}: masked_m[{g}] is {count}; it must be in [0, {rows}], the rows of a group.")
