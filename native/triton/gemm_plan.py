"""Tile sizes of the matrix product kernels, as data. Measured on an H200 (``benchmarks/gemm_gpu.py --sweep``)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DECODE_ROWS", "GROUPED_ROWS", "Tile", "tile_for"]

# Up to this many rows the weight takes the place of the rows in the tensor cores, and K is split.
DECODE_ROWS = 64
# Rows of a tile of a grouped product with labels; segments are multiples of it.
GROUPED_ROWS = 128

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


def _splits(tiles: int, steps: int) -> int:
    """Parts of K so that about four programs per multiprocessor read, each at least eight steps."""
    wanted = max(1, round(4 * _PROCESSORS / max(tiles, 1)))
    return max(1, min(wanted, steps // 8, 16))


def tile_for(m: int, n: int, k: int, *, scaled: bool, groups: int = 1, grouped: bool = False) -> Tile:
    """The launch for ``m`` rows (of a group, where ``grouped``), ``n`` columns and ``k`` elements to sum over.

    Args:
        scaled: fp8 operands with scales; then a tile is at most 128 columns wide and 128 deep.
        groups: number of matrices b.
    """
    depth = 128 if scaled else 64
    if m <= DECODE_ROWS:
        rows = 16 if m <= 16 else 32 if m <= 32 else 64
        depth = 128
        tiles = groups * _ceil(m, rows) * _ceil(n, 64)
        splits = 1 if grouped else _splits(tiles, _ceil(k, depth))
        return Tile(rows, 64, depth, 4, 6 if scaled else 4, swap=True, splits=splits)
    if scaled:
        return Tile(128, 128, depth, 8, 4)
    if m * groups <= 512 or n <= 256:
        return Tile(64 if m <= 64 else 128, 128, depth, 4, 4)
    return Tile(128, 256, depth, 8, 4)
