"""An indexer at the edges of its numbers: every ReLU off, weights of 0, 1e42 and 1e-42, NaN and infinity.

The scores of the op are proportional to q, k and the weights, and exactly 0 where all products are off. Functions that
are close to a ReLU (a leaky one with a slope of 1e-12, softplus with a large beta, a cap far away, an epsilon) have the
same scores as the op on ordinary numbers, within any tolerance, and rank keys differently where this matters. So the
block runs in f64 on operands whose sums cannot cancel, where each score must be right by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.mqa_family import Bench, open_masks
from ascend_deep.passes.region import Dims

__all__ = ["differs"]

# Powers of two by which q, k and the weights are multiplied: beyond those of f32, and exact in f64.
_POWERS = ((-140, 0, 0), (140, 0, 0), (0, 0, -140), (0, 0, 140), (140, 140, 140), (-140, -140, -140))
_CLOSE = 1e-9


def differs(bench: Bench, scale: float) -> Refusal | None:
    """A sentence if the block is not the op of ``scale`` at one of the edges, ``None`` if it is at all of them."""
    for dims in bench.plans():
        try:
            for tensors, sentence in _edges(bench, dims, scale):
                if not _same(bench, dims, tensors, scale):
                    return Refusal(sentence, bench.scores)
        except Exception:  # any op may refuse these sizes
            continue
        return None
    return Refusal("no sizes were found at which the block can run on its own.", bench.scores)


def _same(bench: Bench, dims: Dims, tensors: dict[str, Tensor], scale: float) -> bool:
    products, weights = bench.products(tensors)
    want = (weights * (scale * products).relu()).sum(2)
    return torch.allclose(bench.run_wide(dims, tensors), want, rtol=_CLOSE, atol=0.0, equal_nan=True)


def _edges(bench: Bench, dims: Dims, scale: float) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Inputs by role in f64, and what a difference there says."""
    g = torch.Generator().manual_seed(78)
    plain = open_masks(bench, bench.tensors(dims, 78, torch.float64))
    sign = 1.0 if scale > 0 else -1.0
    # Numbers of one sign per head, so that nothing cancels in the products, and weights of one sign.
    plain["kv"] = plain["kv"].abs() + 0.1
    plain["weights"] = plain["weights"].abs() + 0.1
    off = {**plain, "q": -sign * (plain["q"].abs() + 0.1)}
    yield off, "a key for which every product is negative does not get a score of exactly 0, as with a ReLU."
    mixed = {**plain, "q": off["q"] * _per_head(bench, off["q"], g)}
    yield mixed, "a product that is negative adds to the scores, or a positive one is not taken as it is."
    unweighted = mixed["weights"].masked_fill(torch.rand(mixed["weights"].shape, generator=g) < 0.5, 0.0)
    yield {**mixed, "weights": unweighted}, "a head whose weight is 0 adds to the scores."
    for powers in _POWERS:
        grown = {r: mixed[r] * 2.0**n for r, n in zip(("q", "kv", "weights"), powers, strict=True)}
        yield (
            {**mixed, **grown},
            "the scores are not proportional to q, k and the weights: something in the block acts on very large or "
            "very small numbers.",
        )
    for held, what in ((torch.nan, "NaN"), (torch.inf, "infinity")):
        kv = mixed["kv"].clone()
        kv[(0,) * kv.dim()] = held
        yield {**mixed, "kv": kv}, f"a key that holds {what} gets another score than by a ReLU and a sum."


def _per_head(bench: Bench, q: Tensor, g: torch.Generator) -> Tensor:
    """1 or -1 for each query and head, in a shape that broadcasts to ``q``."""
    at = bench.layouts["q"].find("D")
    shape = [1 if i == at else n for i, n in enumerate(q.shape)]
    return torch.where(torch.rand(shape, generator=g) < 0.5, 1.0, -1.0).double()
