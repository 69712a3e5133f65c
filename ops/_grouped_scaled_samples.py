"""Sample inputs of the grouped GEMM ops on quantised operands: the edge cases, seeded, on the CPU.

Padding rows hold NaN, in the data if they are FP8, and in their scales where a row has scales of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ascend_deep.ops import _sf
from ascend_deep.ops._gemm_scaled_samples import operand
from ascend_deep.ops._grouped_samples import labels_of, psum_of
from ascend_deep.ops._op import Sample

__all__ = [
    "k_grouped_scaled_acc_samples",
    "k_grouped_scaled_samples",
    "m_grouped_scaled_samples",
    "masked_scaled_samples",
]

_FULL = torch.float32


def _spoil(data: Tensor, sf: Tensor | None, padding: Tensor) -> None:
    """NaN into rows ``padding`` (bool [M]) of the data, if it is FP8, and of f32 scales."""
    if data.dtype == _sf.FP8:
        data.view(torch.uint8)[padding] = 0x7F
    if sf is not None:
        sf[padding] = torch.nan


def m_grouped_scaled_samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(51)

    def case(
        name: str,
        counts: Sequence[int],
        alignment: int,
        rows: int,
        n: int = 6,
        k: int = 40,
        formats: tuple[str, str] = ("fp8", "fp8"),
        recipe_a: tuple[int, int] = (1, 32),
        recipe_b: tuple[int, int] = (1, 32),
        layout: str = "nt",
        grouping: str = "psum",
        order: Sequence[int] | None = None,
        packed: str = "",
        **changes: object,
    ) -> Sample:
        labels = labels_of(counts, alignment, rows, order)
        a, sfa = operand(g, rows, k, recipe_a, formats[0])
        own = [operand(g, n, k, recipe_b, formats[1], layout == "nn") for _ in counts]
        b, sfb = (
            torch.stack([d.view(torch.uint8) for d, _ in own]).view(own[0][0].dtype),
            torch.stack([s for _, s in own]),
        )
        _spoil(a, sfa if recipe_a[0] == 1 and not packed else None, labels < 0)
        if packed:
            sfa, sfb = (_sf.pack(_sf.encode_ue8m0(s), packed) for s in (sfa, sfb))
        attributes = {
            "recipe_a": recipe_a,
            "recipe_b": recipe_b,
            "layout": layout,
            "grouping": grouping,
            "alignment": alignment,
            "expected_m": None,
            "zero_padding": True,
            "out_dtype": None,
            **changes,
        }
        index = psum_of(counts, alignment) if grouping == "psum" else labels
        return Sample(name, (a, sfa, b, sfb, index), attributes)

    fp4 = ("fp4", "fp4")
    yield case("fp8-nt-128", (3, 0, 5), 4, 14, k=150, recipe_a=(1, 128), recipe_b=(128, 128), expected_m=3)
    yield case("fp8-nn-f32", (0, 7), 8, 16, layout="nn", out_dtype=_FULL)
    yield case("fp8xfp4-packed_int32", (2, 3), 4, 8, k=136, formats=("fp8", "fp4"), packed="ue8m0x4")
    yield case("fp4-labels", (3, 0, 4), 4, 12, formats=fp4, grouping="labels", order=(2, 0, 1))
    yield case("fp4-nn-packed_int16", (1, 2), 4, 9, k=66, formats=fp4, layout="nn", packed="ue8m0x2")
    yield case("fp4-rows_0", (0, 0), 4, 0, formats=fp4)
    yield case("fp4-alignment_1-rows_63", (0, 63), 1, 63, n=4, k=34, formats=fp4, out_dtype=_FULL)


def masked_scaled_samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(52)
    for name, counts, rows, n, k, recipe_a, recipe_b, formats in (
        ("fp8-128", (3, 0, 5), 5, 130, 140, (1, 128), (128, 128), ("fp8", "fp8")),
        ("fp4xfp8", (2, 4), 7, 6, 40, (1, 32), (1, 32), ("fp4", "fp8")),
        ("fp4-rows_0", (0, 0), 0, 6, 34, (1, 32), (1, 32), ("fp4", "fp4")),
    ):
        a = [operand(g, rows, k, recipe_a, formats[0]) for _ in counts]
        b = [operand(g, n, k, recipe_b, formats[1]) for _ in counts]
        for (data, sf), count in zip(a, counts, strict=True):
            _spoil(data, sf, torch.arange(rows) >= count)
        args = (*_stacked(a), *_stacked(b), torch.tensor(counts, dtype=torch.int32))
        yield Sample(name, args, {"expected_m": 3, "recipe_a": recipe_a, "recipe_b": recipe_b})


def _stacked(operands: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    data = torch.stack([d.view(torch.uint8) for d, _ in operands]).view(operands[0][0].dtype)
    return data, torch.stack([s for _, s in operands])


def _k_operands(
    g: torch.Generator, counts: Sequence[int], alignment: int, rows: int, gran_k: int, formats: tuple[str, str]
) -> tuple[Tensor, ...]:
    """a [R, 6], sfa [6, blocks], b [R, 10], sfb; blocks without a row of a group have the scale NaN."""
    padding = labels_of(counts, alignment, rows) < 0
    found: list[Tensor] = []
    for width, fmt in zip((6, 10), formats, strict=True):
        data, sf = operand(g, width, rows, (1, gran_k), fmt, True)
        _spoil(data, None, padding)
        for block in range(sf.shape[1]):
            if padding[block * gran_k : (block + 1) * gran_k].all():
                sf[:, block] = torch.nan
        found += [data, sf]
    return tuple(found)


def k_grouped_scaled_samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(53)

    def case(
        name: str,
        counts: Sequence[int],
        alignment: int,
        rows: int,
        gran_k: int,
        formats: tuple[str, str] = ("fp8", "fp8"),
        c: torch.dtype | None = None,
        grouping: str = "psum",
        packed: str = "",
        ks: list[int] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Sample:
        a, sfa, b, sfb = _k_operands(g, counts, alignment, rows, gran_k, formats)
        if packed:
            sfa, sfb = (_sf.pack(_sf.encode_ue8m0(s), packed) for s in (sfa, sfb))
        index = psum_of(counts, alignment) if grouping == "psum" else torch.tensor(counts, dtype=torch.int32)
        bias = None if c is None else torch.randn(len(counts), 6, 10, generator=g).to(c)
        attributes = {
            "gran_k": gran_k,
            "ks": ks,
            "grouping": grouping,
            "alignment": alignment,
            "out_dtype": out_dtype,
        }
        return Sample(name, (a, sfa, b, sfb, index, bias), attributes)

    yield case("fp8-psum-c", (3, 0, 33), 32, 96, 32, c=_FULL)
    yield case("fp8-sizes-ks", (128, 0), 128, 130, 128, grouping="sizes", ks=[128, 0], out_dtype=_FULL)
    yield case("fp4-packed_int32", (5, 40), 64, 160, 32, ("fp4", "fp4"), packed="ue8m0x4")
    yield case("fp4xfp8-alignment_1", (2, 5), 1, 9, 4, ("fp4", "fp8"), c=torch.bfloat16)
    yield case("fp4-rows_0", (0, 0), 32, 0, 32, ("fp4", "fp4"))


def k_grouped_scaled_acc_samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(54)
    operands = _k_operands(g, (3, 0, 4), 32, 68, 32, ("fp4", "fp4"))
    d = torch.randn(3, 6, 10, generator=g)
    attributes = {"gran_k": 32, "ks": None, "grouping": "psum", "alignment": 32}
    yield Sample("fp4-psum", (d, *operands, psum_of((3, 0, 4), 32)), attributes)
    operands = _k_operands(g, (32, 32), 32, 64, 32, ("fp8", "fp8"))
    sizes = torch.tensor([32, 32], dtype=torch.int64)
    yield Sample("fp8-sizes", (d[:2].bfloat16(), *operands, sizes), {**attributes, "grouping": "sizes"})
