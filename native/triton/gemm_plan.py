"""Tile sizes of the matrix product kernels, as data. Measured on an H200 (docs/measurements/gemm_h200.md)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DECODE_ROWS", "Tile", "Vector", "parts_for", "tile_for", "vector_for"]

# Up to this many rows the weight takes the place of the rows in the tensor cores, and K is split.
DECODE_ROWS = 64

_PROCESSORS = 132


@dataclass(frozen=True)
class Tile:
    """Launch of ``gemm_kernel``.

    Attributes:
        rows, columns, depth: of a tile: M, N, K.
        warps, stages: as Triton wants them.
        swap: the weight is the left operand of the tensor cores.
        splits: parts of K that are computed apart.
        height: tiles of rows that run together (L2).
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False
    splits: int = 1
    height: int = 8


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _splits(tiles: int, steps: int, programs: int) -> int:
    """Parts of K, a power of two, so that up to ``programs`` read, each at least four steps."""
    wanted = max(1, min(programs // max(tiles, 1), steps // 4, 16))
    return 1 << wanted.bit_length() - 1


def _few(m: int, n: int, k: int, scaled: bool, groups: int, grouped: bool) -> Tile:
    rows = 16 if m <= 16 else 32 if m <= 32 else 64
    columns = 128 if scaled and rows == 64 else 64
    tiles = groups * _ceil(m, rows) * _ceil(n, columns)
    splits = 1 if grouped else _splits(tiles, _ceil(k, 128), 2 * _PROCESSORS if scaled else 3 * _PROCESSORS // 2)
    stages = 6 if splits <= 2 and (rows < 64 or not scaled) else 4
    return Tile(rows, columns, 128, 4, stages, swap=True, splits=splits)


def tile_for(m: int, n: int, k: int, *, scaled: bool, groups: int = 1, grouped: bool = False) -> Tile:
    """The launch for ``m`` rows (of a group, where ``grouped``), ``n`` columns and ``k`` elements to sum over.

    Args:
        scaled: fp8 operands with scales; then a tile is at most 128 columns wide and 128 deep.
        groups: number of matrices b.
    """
    if m <= DECODE_ROWS:
        return _few(m, n, k, scaled, groups, grouped)
    if scaled:
        return Tile(128, 128, 128, 8, 4)
    # Rounds of the processors, and what a tile of half the size takes of a large one's time.
    rows = groups * _ceil(m, 128)
    wide, narrow = (_ceil(rows * _ceil(n, width), _PROCESSORS) for width in (256, 128))
    return Tile(128, 256, 64, 8, 4) if wide <= 0.53 * narrow else Tile(128, 128, 64, 8, 4, height=16)


@dataclass(frozen=True)
class Vector:
    """Launch of ``vector_kernel``: rows of the matrix and elements of K per step of a program, warps, stages."""

    rows: int
    depth: int
    warps: int
    stages: int


def vector_for(n: int, k: int, element_size: int) -> Vector | None:
    """The launch for a matrix [n, k]; ``None`` where reading through the tensor cores is faster."""
    depth = 1024 if k % 1024 == 0 else 512
    if element_size == 2:
        return Vector(4 if depth == 1024 else 16, depth, 4, 1)
    return Vector(8, depth, 4, 1) if n <= 8192 and n * k <= 40 << 20 else None


def parts_for(m: int, n: int) -> int:
    """Warp groups of 64 rows in a tile of the fp8 kernel: 3 where that takes fewer rounds of the processors, or 2."""
    columns = _ceil(n, 128)
    two, three = (parts * _ceil(_ceil(m, 64 * parts) * columns, _PROCESSORS) for parts in (2, 3))
    return 3 if three < two else 2
