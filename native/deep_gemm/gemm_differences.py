"""What DeepGEMM's matrix products want on each platform, as data.

One row per platform, from the libraries' host checks. SM90 is what runs in our tests (the 0.1 line of the fork that
wheels are published of, 2.6 of the original); SM100 and Ascend have never been run by us, and their rows are as good as
the documents they were written from. ``gemm_limits`` reads the row of the device it is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["ASCEND", "SM90", "SM100", "Gemm", "row_of"]

_BF16, _F32 = torch.bfloat16, torch.float32
FP8, FP4 = "fp8", "fp4"


@dataclass(frozen=True)
class Gemm:
    """Limits and layouts of the matrix products of one platform.

    Attributes:
        platform: for messages.
        executed: False for a platform that has never run this adapter.
        least_rows: fewer rows of a dense product are faster elsewhere (measured), by kind of operand; 1: not measured.
        least_group: the same for the rows of an average group of a grouped product: the two small kernels around the
            library's, which make its layout safe and clear padding rows, weigh less from there on (measured at 128
            rows, where they do not pay, and at 4096; where the two cross is an estimate).
        alpha: the dense functions take a factor.
        adds_into: dtypes of D that C can be added in. The library adds the rounded product to D, so with bf16 the sum
            would be rounded twice.
        compiled_dims: sizes that a kernel is compiled for; ``None``: the library's own choice. With "" a new size of an
            activation compiles nothing.
        unit: bytes that rows and bases must be multiples of.
        pairs: formats of (a, b) that scaled products take.
        gran_k: elements of K per scale.
        sf_dtype: f32 scales, or packed words, which hold powers of two only. Platforms that want powers of two trap on
            other f32 values, which no limit can see, so there only words are taken.
        fp8_k_major: fp8 operands must have K contiguous; others are copied.
        scaled: dtypes of D by rows of B per scale, and whether C must be given (zeros, if there is none).
        groupings: of grouped products along M.
        align: rows that groups start at multiples of; ``padded``: A and D must hold the padding of the last group too.
        grouped_depth: multiple that K of a grouped bf16 product must be.
        grouped_out: dtypes of D of grouped products.
        masked: there is a masked form; ``masked_rows``: multiple that the rows of a group must be, since the last tile
            of a group is written whole.
        k_grouped: "sizes": groups by their sizes, on the host as well; "psum": by their ends.
        k_align: rows of a group of a k-grouped product are padded to a multiple of it.
        einsum: dtypes of D by equation; ``einsum_unit``: multiples that M, N and K of "bmk,bnk->mn" must be.
        hc_columns, hc_column_unit, hc_depth, hc_splits: of ``tf32_hc_prenorm_gemm``: N at most, N and K multiples of,
            and whether it splits K.
    """

    platform: str
    executed: bool
    least_rows: Mapping[str, int]
    least_group: int
    alpha: bool
    adds_into: tuple[torch.dtype, ...]
    compiled_dims: str | None
    unit: int
    pairs: tuple[tuple[str, str], ...]
    gran_k: tuple[int, ...]
    sf_dtype: torch.dtype
    fp8_k_major: bool
    scaled: Mapping[int, tuple[torch.dtype, bool]]
    groupings: tuple[str, ...]
    align: int
    padded: bool
    grouped_depth: int
    grouped_out: tuple[torch.dtype, ...]
    masked: bool
    masked_rows: int
    k_grouped: str
    k_align: int
    einsum: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    einsum_unit: tuple[int, int, int] = (64, 64, 64)
    hc_columns: int = 32
    hc_column_unit: int = 8
    hc_depth: int = 64
    hc_splits: bool = True


_PROJECT, _BACK, _WEIGHT, _SUM = "bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr", "bmk,bnk->mn"

SM90 = Gemm(
    platform="CUDA SM90",
    executed=True,
    least_rows={"bf16": 65, "fp8": 65},
    least_group=256,
    alpha=False,
    adds_into=(_F32,),
    compiled_dims="",
    unit=16,
    pairs=((FP8, FP8),),
    gran_k=(128,),
    sf_dtype=_F32,
    fp8_k_major=True,
    scaled={128: (_BF16, False), 1: (_F32, True)},
    groupings=("psum", "labels"),
    align=128,
    padded=False,
    grouped_depth=64,
    grouped_out=(_BF16,),
    masked=True,
    masked_rows=128,
    k_grouped="sizes",
    k_align=128,
    einsum={_PROJECT: (_BF16,), _BACK: (_BF16,), _SUM: (_BF16, _F32)},
)

SM100 = Gemm(
    platform="CUDA SM100",
    executed=False,
    least_rows={"bf16": 1, "fp8": 1, "fp4": 1},
    least_group=1,
    alpha=False,
    adds_into=(_F32,),
    compiled_dims="",
    unit=16,
    pairs=((FP8, FP8), (FP8, FP4), (FP4, FP8), (FP4, FP4)),
    gran_k=(32, 128),
    sf_dtype=torch.int32,
    fp8_k_major=False,
    scaled={1: (_BF16, False)},
    groupings=("psum", "labels"),
    align=128,
    padded=False,
    grouped_depth=1,
    grouped_out=(_BF16,),
    masked=True,
    masked_rows=256,
    k_grouped="sizes",
    k_align=128,
    einsum={_PROJECT: (_BF16,), _BACK: (_BF16,), _SUM: (_BF16, _F32)},
    hc_columns=128,
)

ASCEND = Gemm(
    platform="Ascend",
    executed=False,
    least_rows={"bf16": 1, "fp8": 1, "fp4": 1},
    least_group=1,
    alpha=True,
    adds_into=(_F32,),
    compiled_dims=None,
    unit=16,
    pairs=((FP8, FP8), (FP8, FP4), (FP4, FP4)),
    gran_k=(32,),
    sf_dtype=torch.int16,
    fp8_k_major=False,
    scaled={1: (_BF16, False)},
    groupings=("psum",),
    align=256,
    padded=True,
    grouped_depth=1,
    grouped_out=(_BF16, _F32),
    masked=False,
    masked_rows=256,
    k_grouped="psum",
    k_align=256,
    einsum={_PROJECT: (_BF16, _F32), _BACK: (_BF16, _F32), _WEIGHT: (_F32,)},
    hc_columns=64,
    hc_column_unit=1,
    hc_depth=256,
    hc_splits=False,
)


def row_of(device_type: str, capability: tuple[int, int] | None) -> Gemm | None:
    """The row of a device: ``device_type`` as torch names it, ``capability`` of CUDA devices; ``None``: no row."""
    if device_type == "npu":
        return ASCEND
    if device_type == "cuda" and capability is not None:
        return {9: SM90, 10: SM100}.get(capability[0])
    return None
