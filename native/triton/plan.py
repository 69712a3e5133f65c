"""Tile sizes of the indexer kernels, as data. Measured on an H200; no Triton needed here.

The figures come from ``benchmarks/indexer_gpu.py --sweep``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "MAX_BLOCK",
    "MAX_DEPTH",
    "MAX_HEADS",
    "Block",
    "Long",
    "Tile",
    "block_for",
    "long_for",
    "paged_tile_for",
    "power_of_two",
    "tile_for",
]

# By bytes of an element of q and kv: what fits into shared memory.
MAX_HEADS = {1: 256, 2: 256, 4: 64}
MAX_DEPTH = {1: 256, 2: 256, 4: 128}
MAX_BLOCK = 16384  # keys that one program of the selection holds in registers


@dataclass(frozen=True)
class Tile:
    """Launch of the logits kernel.

    Attributes:
        columns: queries * heads of a tile (N of the product); heads are padded to a power of two.
        keys: keys of a tile (M of the product).
        warps, stages: as Triton wants them.
        programs: about how many programs a launch should have; decides how many keys one of them walks.
    """

    columns: int
    keys: int
    warps: int
    stages: int
    programs: int = 2112


@dataclass(frozen=True)
class Block:
    """Keys in registers of a program of the selection, its warps, and a cap on registers per thread (0: none)."""

    keys: int
    warps: int
    registers: int = 0


@dataclass(frozen=True)
class Long:
    """Launch of the selection of long rows.

    Attributes:
        sample: keys of a row that its bound is estimated from.
        mark: keys that one program compares with the bound; a multiple of 32.
        pick: block that should hold what reaches the bound.
    """

    sample: Block
    mark: Block
    pick: Block


# By bytes of an element of q and kv.
_TILES = {
    1: Tile(columns=128, keys=64, warps=4, stages=4),
    2: Tile(columns=128, keys=64, warps=4, stages=2),
    4: Tile(columns=64, keys=64, warps=4, stages=2),
}
# By elements of q and kv rows beyond 128: one query at a time, so that shared memory suffices.
_DEEP = Tile(columns=64, keys=64, warps=4, stages=2)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def tile_for(element_size: int, depth: int) -> Tile:
    """The tile for q and kv with ``element_size`` bytes per element and D = ``depth``."""
    return _TILES[element_size] if depth <= 128 else _DEEP


def paged_tile_for(element_size: int, depth: int, page: int) -> Tile:
    """The tile over a paged cache with ``page`` keys a page; keys that have to be gathered take larger ones."""
    if element_size > 1 or depth > 128:
        return tile_for(element_size, depth)
    return Tile(columns=128, keys=64 if page % 64 == 0 else 128, warps=4, stages=2)


def block_for(columns: int) -> Block:
    """The selection from rows of up to ``MAX_BLOCK`` scores."""
    keys = power_of_two(columns, 128)
    return Block(keys, min(max(keys // 1024, 1), 16), 128)


def long_for(columns: int, topk: int) -> Long:
    """The selection from longer rows: ``topk`` of ``columns`` scores."""
    sample = Block(4096, 8)
    # What a sample aims at, its slack, and four standard deviations more.
    expected = topk * sample.keys / columns
    rank = expected + 4 * math.sqrt(expected) + 8
    survivors = (rank + rank / 16 + 4 * math.sqrt(rank)) * columns / sample.keys
    pick = min(power_of_two(math.ceil(survivors), 1024), MAX_BLOCK)
    return Long(sample=sample, mark=Block(2048, 4), pick=Block(pick, min(pick // 512, 16)))
