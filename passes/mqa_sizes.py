"""What a run at small sizes cannot show of an indexer, read from its graph: parts of tensors, positions, NaNs.

The scores are found by running the block with the model's own number of heads, but with few queries and keys. So
whatever takes a part of the queries or keys, or treats them by their position, could act beyond the sizes of the run:
it is refused. Parts of the heads are seen by the run.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import torch
from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import op_name
from ascend_deep.passes.mqa_family import Bench, expr
from ascend_deep.passes.safeguards import is_whole

__all__ = ["unseen"]

# Ops that treat entries by their position: they are none of the op's, whatever their numbers are.
_POSITIONS = frozenset(
    f"aten.{name}"
    for name in (
        "tril", "triu", "roll", "flip", "fliplr", "flipud", "rot90", "cumsum", "cumprod", "cummax", "cummin",
        "logcumsumexp", "diff", "index_select", "constant_pad_nd", "diagonal", "masked_select", "take",
    )
)  # fmt: skip
# Ops that take a part: position of the dim argument.
_PARTS = {
    "aten.slice": 1, "aten.narrow": 1, "aten.select": 1, "aten.unbind": 1, "aten.split": 2, "aten.split_with_sizes": 2,
    "aten.chunk": 2, "aten.tensor_split": 2, "aten.unsafe_chunk": 2, "aten.unsafe_split": 2,
}  # fmt: skip
# Comparisons by which a block finds NaNs; random inputs have none.
_NANS = frozenset({"aten.eq", "aten.ne"})


def unseen(bench: Bench) -> Refusal | None:
    """Refuse a block that may act beyond the sizes that it is run at."""
    real = {n: bench.size(n) for n in "BSTH"}
    fixed = [int(real[n]) for n in "BST" if isinstance(real[n], int)]
    rows = {math.prod(group) for count in (1, 2, 3) for group in combinations(fixed, count)} - {1}
    for node in bench.region.nodes:
        name = op_name(node)
        source = node.args[0] if node.args else None
        held = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(held, torch.Tensor):
            continue
        if name in _POSITIONS:
            return Refusal(f"{name.removeprefix('aten.')} treats queries, keys or heads by their position.", node)
        if name in _NANS and held.is_floating_point():
            return Refusal("scores or products are compared for equality, as one does to find NaNs.", node)
        if name not in _PARTS or is_whole(node, name, held):
            continue
        size = held.shape[_dim(node, _PARTS[name]) % held.dim()]
        if expr(size).free_symbols:
            what = "heads, whose number is symbolic" if expr(size) == expr(real["H"]) else "queries or keys"
            return Refusal(f"{name.removeprefix('aten.')} takes a part of the {what}.", node)
        if int(size) in rows and int(size) != real["H"]:
            return Refusal(f"{name.removeprefix('aten.')} takes a part of the queries or keys.", node)
    return None


def _dim(node: fx.Node, place: int) -> int:
    dim: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    return int(dim)
