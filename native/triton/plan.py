"""Tile sizes of the indexer kernels, as data. Measured on an H200; no Triton needed here.

The figures come from ``benchmarks/indexer_gpu.py --sweep``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "MAX_DEPTH",
    "MAX_HEADS",
    "MAX_SEGMENT",
    "MAX_TOPK",
    "Segment",
    "Tile",
    "power_of_two",
    "segment_for",
    "selection_limit",
    "tile_for",
]

# By bytes of an element of q and kv: what fits into shared memory.
MAX_HEADS = {1: 256, 2: 256, 4: 64}
MAX_DEPTH = {1: 256, 2: 256, 4: 128}
MAX_SEGMENT = 16384  # keys that one program of the selection holds in registers
MAX_TOPK = MAX_SEGMENT // 2  # two segments' candidates fit into one program of the next round


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
class Segment:
    """Launch of the selection: keys per program and warps."""

    keys: int
    warps: int


# By bytes of an element of q and kv.
_TILES = {
    1: Tile(columns=128, keys=64, warps=4, stages=3),
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


def segment_for(rows: int, columns: int, topk: int) -> Segment:
    """How a row of ``columns`` scores is cut when ``rows`` of them are selected at once."""
    few = rows < 512
    keys = min(power_of_two(columns, 256), 8192 if few else MAX_SEGMENT)
    # The candidates of two segments have to fit into one of the next round.
    keys = min(max(keys, power_of_two(2 * topk)), MAX_SEGMENT, power_of_two(columns, 256))
    return Segment(keys, min(max(keys // 512, 1), 16))


def selection_limit(topk: int, keys: int) -> str | None:
    """Why the selection does not take ``topk`` of ``keys``; ``None`` if it does."""
    if topk > MAX_TOPK and keys > MAX_SEGMENT:
        return (
            f"topk is {topk} of {keys} keys; the selection takes up to {MAX_TOPK}, or any number of up to "
            f"{MAX_SEGMENT} keys."
        )
    return None
