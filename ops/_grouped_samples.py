"""Sample inputs of the grouped GEMM ops on bfloat16: the edge cases, seeded, on the CPU.

Padding rows of the operands hold NaN in every sample that has any: what reads them cannot pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ascend_deep.ops._op import Sample

__all__ = [
    "k_grouped_acc_samples",
    "k_grouped_samples",
    "labels_of",
    "m_grouped_samples",
    "masked_samples",
    "padded_rows",
    "psum_of",
]

_LOW, _FULL = torch.bfloat16, torch.float32


def psum_of(counts: Sequence[int], alignment: int) -> Tensor:
    """Ends of groups of ``counts`` rows, [G] i32."""
    ends, start = [], 0
    for count in counts:
        ends.append(start + count)
        start = -(-ends[-1] // alignment) * alignment
    return torch.tensor(ends, dtype=torch.int32)


def labels_of(counts: Sequence[int], alignment: int, rows: int, order: Sequence[int] | None = None) -> Tensor:
    """Group of each of ``rows`` rows, -1 for padding, [M] i32; the groups lie in ``order``."""
    labels, start = torch.full((rows,), -1, dtype=torch.int32), 0
    for g in range(len(counts)) if order is None else order:
        labels[start : start + counts[g]] = g
        start += -(-counts[g] // alignment) * alignment
    return labels


def padded_rows(counts: Sequence[int], alignment: int, rows: int, width: int, g: torch.Generator) -> Tensor:
    """[rows, width] bf16, NaN in the rows that belong to no group."""
    data = torch.randn(rows, width, generator=g).to(_LOW)
    data[labels_of(counts, alignment, rows) < 0] = torch.nan
    return data


def m_grouped_samples() -> Iterator[Sample]:
    """Both layouts and groupings, empty groups, gaps with NaN, odd strides, float32 results."""
    g = torch.Generator().manual_seed(41)

    def case(
        name: str,
        counts: Sequence[int],
        alignment: int,
        rows: int,
        n: int = 5,
        k: int = 6,
        layout: str = "nt",
        grouping: str = "psum",
        order: Sequence[int] | None = None,
        **changes: object,
    ) -> Sample:
        groups = len(counts)
        b = torch.randn(groups, n, k, generator=g).to(_LOW)
        labels = labels_of(counts, alignment, rows, order)
        a = torch.randn(rows, k, generator=g).to(_LOW)
        a[labels < 0] = torch.nan
        attributes = {
            "layout": layout,
            "grouping": grouping,
            "alignment": alignment,
            "expected_m": None,
            "zero_padding": True,
            "out_dtype": None,
            **changes,
        }
        index = psum_of(counts, alignment) if grouping == "psum" else labels
        return Sample(name, (a, b if layout == "nt" else b.mT.contiguous(), index), attributes)

    yield case("psum-nt", (3, 0, 5, 1), 4, 20, expected_m=3)
    yield case("psum-nn-f32", (0, 7, 2), 8, 24, layout="nn", out_dtype=_FULL)
    yield case("alignment_1", (2, 0, 3), 1, 7)
    yield case("alignment_128-rows_63", (63,), 128, 63, 3, 4, layout="nn")
    yield case("alignment_256-one_group", (0, 9, 0), 256, 256, 3, 4)
    yield case("rows_0", (0, 0), 4, 0)
    yield case("rows_1-k_0", (1,), 4, 1, k=0)
    yield case("labels-nt", (3, 0, 5), 4, 16, grouping="labels", order=(2, 0, 1))
    yield case("labels-nn-f32", (4, 2), 4, 10, layout="nn", grouping="labels", out_dtype=_FULL)
    yield case("labels-all_padding", (0, 0), 4, 6, grouping="labels")
    a, b, index = case("", (2, 3), 4, 9).args
    a = torch.stack((a, a), 2)[:, :, 1]
    strided = (a, b.mT.contiguous().mT, index.long())
    yield Sample("strided-i64", strided, dict(case("", (2, 3), 4, 9).kwargs))


def k_grouped_samples() -> Iterator[Sample]:
    """Both groupings, empty groups, gaps with NaN, something to add."""
    g = torch.Generator().manual_seed(42)

    def case(
        name: str,
        counts: Sequence[int],
        alignment: int,
        rows: int,
        m: int = 4,
        n: int = 5,
        c: torch.dtype | None = None,
        grouping: str = "psum",
        ks: list[int] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Sample:
        a, b = (padded_rows(counts, alignment, rows, width, g) for width in (m, n))
        index = psum_of(counts, alignment) if grouping == "psum" else torch.tensor(counts, dtype=torch.int32)
        bias = None if c is None else torch.randn(len(counts), m, n, generator=g).to(c)
        attributes = {"ks": ks, "grouping": grouping, "alignment": alignment, "out_dtype": out_dtype}
        return Sample(name, (a, b, index, bias), attributes)

    yield case("psum-c_f32", (3, 0, 6), 4, 16, c=_FULL)
    yield case("psum-ks", (5, 2), 8, 20, ks=[5, 2])
    yield case("sizes-f32", (4, 0, 8), 4, 12, grouping="sizes", ks=[4, 0, 8], out_dtype=_FULL)
    yield case("alignment_1-c_bf16", (1, 2, 0), 1, 3, c=_LOW)
    yield case("alignment_128-rows_63", (0, 63), 128, 63, 2, 3)
    yield case("rows_0-c", (0, 0), 4, 0, c=_FULL, out_dtype=_FULL)
    a, b, index, _ = case("", (3, 4), 4, 9).args
    strided = (torch.stack((a, a), 2)[:, :, 0], b.t().contiguous().t(), index.long(), None)
    yield Sample("strided-i64", strided, {"ks": None, "grouping": "psum", "alignment": 4, "out_dtype": None})


def k_grouped_acc_samples() -> Iterator[Sample]:
    """The same into a tensor that is there."""
    g = torch.Generator().manual_seed(43)
    for name, counts, rows, dtype, grouping in (
        ("psum-f32", (3, 0, 2), 12, _FULL, "psum"),
        ("sizes-bf16", (4, 4), 8, _LOW, "sizes"),
    ):
        a, b = (padded_rows(counts, 4, rows, width, g) for width in (3, 6))
        index = psum_of(counts, 4) if grouping == "psum" else torch.tensor(counts, dtype=torch.int32)
        d = torch.randn(len(counts), 3, 6, generator=g).to(dtype)
        yield Sample(name, (d, a, b, index), {"ks": None, "grouping": grouping, "alignment": 4})


def masked_samples() -> Iterator[Sample]:
    """Counts from none to all rows, NaN in the others."""
    g = torch.Generator().manual_seed(44)

    def case(name: str, counts: Sequence[int], rows: int, n: int = 5, k: int = 6, hint: int = 3) -> Sample:
        a = torch.randn(len(counts), rows, k, generator=g).to(_LOW)
        for i, count in enumerate(counts):
            a[i, count:] = torch.nan
        b = torch.randn(len(counts), n, k, generator=g).to(_LOW)
        return Sample(name, (a, b, torch.tensor(counts, dtype=torch.int32)), {"expected_m": hint})

    yield case("uneven", (3, 0, 7, 1), 7)
    yield case("rows_63", (63, 2), 63, 3, 4, hint=40)
    yield case("rows_0", (0, 0), 0)
    yield case("k_0", (2, 1), 3, k=0)
    a, b, index = case("", (4, 1), 5).args
    yield Sample("strided-i64", (a.mT.contiguous().mT, b[:, ::2], index.long()), {"expected_m": 1})
