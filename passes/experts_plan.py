"""Small sizes and random inputs for a region of experts.

E and K stay as they are (routing is about them), T, H and I shrink. The mapping of literal sizes must keep equal sizes
equal and should keep different ones different; several plans are tried.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ascend_deep.passes.experts_products import divide
from ascend_deep.passes.normal_form import numel, size
from ascend_deep.passes.region import Dims, Region

__all__ = ["Shape", "capacity_of", "chosen_scores", "inputs", "layouts", "plans", "score_chain", "shape_of"]

_TOKENS = (5, 7, 6, 4, 3, 9, 2, 1, 12, 16, 24, 32, 40, 48)
_HIDDEN = (24, 40, 16, 8, 48, 32, 12, 20)
_INNER = (8, 16, 32, 24, 12, 20, 6)
# Never probe with weights larger than this, in elements: the sizes of a real model.
_LARGEST = 1 << 22


@dataclass(frozen=True)
class Shape:
    """Sizes of a block, as ints or expressions of the original graph: H, I and N of one weight layout.

    ``apart``: gate and up have separate weights, and N = I is the width of each.
    """

    layout: str
    tokens: Any
    slots: Any
    experts: int
    hidden: Any
    inner: Any
    wide: Any
    apart: bool = False

    @property
    def gated(self) -> bool:
        """The first product is twice as wide as the second is deep, or there are two of them."""
        return self.apart or bool(self.wide != self.inner)


def _val(node: fx.Node) -> tuple[Any, ...]:
    return tuple(size(s) for s in node.meta["val"].shape)


def layouts(region: Region) -> list[Shape]:
    """The weight layouts that the shapes allow: one, or both if the sizes coincide."""
    w13, w2 = _val(region.inputs["w13"]), _val(region.inputs["w2"])
    x = _val(region.inputs["x"])
    hidden, slots = x[-1], _slots(region)
    tokens = numel(x[:-1])
    apart = "w3" in region.inputs
    found = []
    for layout, (n, h), (h2, i) in (("enk", w13[1:], w2[1:]), ("ekn", w13[:0:-1], w2[:0:-1])):
        if h == hidden and h2 == hidden and n in ((i,) if apart else (i, 2 * i)):
            found.append(Shape(layout, tokens, slots, w13[0], hidden, i, n, apart))
    return found


def _slots(region: Region) -> Any:
    """K: what the cut found, or the number of columns of idx."""
    return int(region.hints["slots"]) or _val(region.inputs["idx"])[-1]


def shape_of(region: Region, layout: str) -> Shape:
    """The sizes under one layout."""
    return next(s for s in layouts(region) if s.layout == layout)


def plans(region: Region, shape: Shape, count: int = 2) -> list[Dims]:
    """Up to ``count`` mappings to small sizes, best first.

    Where a product of sizes (tokens × experts) equals a size (the hidden one), a literal may mean either. Mappings that
    suit both are tried first, then those that take every such literal as the size.
    """
    return _plans(region, shape, count, exact=True) or _plans(region, shape, count, exact=False)


def _plans(region: Region, shape: Shape, count: int, exact: bool) -> list[Dims]:
    literals = _literals(region)
    x = _val(region.inputs["x"])
    lead = list(x[:-1])
    perfect: list[Dims] = []
    usable: list[Dims] = []
    few = _few(shape)
    pins = [shape.experts, few, shape.experts * few]
    pins += [wanted for capacity in _capacities(region, shape.experts) for _, wanted in capacity]
    hiddens = [*_HIDDEN, *(s for s in pins if s not in _HIDDEN), *(2 * i for i in pins)]
    inners = [*_INNER, *(s for s in pins if s not in _INNER)]
    for tokens in _lead_sizes(lead, [*_at_hand(region), *_TOKENS, *pins, 2 * shape.experts]):
        rows = math.prod(tokens)
        for hidden, inner in itertools.product([*hiddens, rows * few, rows * shape.experts], inners):
            # The batched form gathers the weights of every pair of token and expert.
            if max(shape.experts, rows * few) * hidden * inner > _LARGEST:
                continue
            sizes = list(_pairs(shape, literals, lead, tokens, hidden, inner, exact))
            tried = ([*sizes, *capacity] for capacity in _capacities(region, shape.experts))
            pairs, dims = next(((p, d) for p in tried if (d := Dims.plan(p)) is not None), (sizes, None))
            if dims is None or not _room(region, dims):
                continue
            usable.append(dims)
            if _distinct(pairs):
                perfect.append(dims)
                if len(perfect) == count or len(usable) > 64:
                    return perfect
                break
            if len(usable) > 64:
                return perfect or usable[:count]
    return perfect or usable[:count]


def _capacities(region: Region, experts: int) -> list[list[tuple[Any, int]]]:
    """Sizes of C and E · C to try, if the block has a capacity and the graph has it as a number: 3, and itself."""
    if "dispatch" not in region.inputs:
        return [[]]
    slots = divide(numel(_val(region.inputs["dispatch"])), numel(_val(region.inputs["x"])[:-1]) * experts)
    if not isinstance(slots, int):  # symbolic: then it follows from the number of tokens
        return [[]]
    wanted = (slots, 3) if _at_hand(region) else (3, slots)
    return [[(slots, c), (slots * experts, c * experts)] for c in dict.fromkeys(wanted)]


def _at_hand(region: Region) -> list[int]:
    """The number of tokens that the graph was traced with, where it is symbolic and the block has a capacity.

    A capacity that became a number while tracing holds for some counts of tokens only; this is one of them.
    """
    if "dispatch" not in region.inputs:
        return []
    symbolic = [s for s in region.inputs["x"].meta["val"].shape[:-1] if isinstance(s, torch.SymInt)]
    found = [int(s.node.hint) for s in symbolic if s.node.has_hint()]
    return found if len(found) == 1 and found[0] <= 96 else []


def _room(region: Region, dims: Dims) -> bool:
    """At these sizes an expert has room for two tokens."""
    return "dispatch" not in region.inputs or capacity_of(region, dims) >= 2


def capacity_of(region: Region, dims: Dims) -> int:
    """The number of slots of an expert at these sizes."""
    tokens = math.prod(dims.shape(region.inputs["x"])[:-1])
    experts = dims.shape(region.inputs["w13"])[0]
    return math.prod(dims.shape(region.inputs["dispatch"])) // (tokens * experts)


def _few(shape: Shape) -> int:
    """K, or a small one if K is symbolic."""
    return shape.slots if isinstance(shape.slots, int) else min(2, shape.experts)


def _lead_sizes(lead: Sequence[Any], wanted: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Sizes for the leading dims of x: the first one that is free gets the number of tokens, the rest get little."""
    if len(lead) == 1:
        yield from ((t,) for t in wanted)
        return
    for t in wanted:
        for rest in ((2,), (3,), (1,), (t,)):
            sizes = [rest[0]] * len(lead)
            sizes[-1] = t
            yield tuple(1 if s == 1 else v for s, v in zip(lead, sizes, strict=True))


def _pairs(
    shape: Shape,
    literals: set[int],
    lead: Sequence[Any],
    tokens: Sequence[int],
    hidden: int,
    inner: int,
    exact: bool,
) -> Iterator[tuple[Any, int]]:
    """(original size, wanted size) for every size that the region can hold.

    Args:
        exact: also where a product of sizes equals one of them.
    """
    e, k = shape.experts, shape.slots
    few = _few(shape)
    t = 1
    for s in tokens:
        t *= s
    wide = inner if shape.wide == shape.inner else 2 * inner
    yield from ((n, n) for n in (1, 0, -1))
    yield e, e
    yield k, few
    yield from zip(lead, tokens, strict=True)  # before their product, which then has nothing left to choose
    yield shape.tokens, t
    yield shape.hidden, hidden
    yield shape.inner, inner
    yield shape.wide, wide
    products = [
        (shape.tokens * k, t * few),
        (shape.tokens * e, t * e),
        (k * shape.hidden, few * hidden),
        (k * shape.wide, few * wide),
        (k * shape.inner, few * inner),
        (e * shape.hidden, e * hidden),
        (e * shape.wide, e * wide),
        (e * shape.inner, e * inner),
        (shape.tokens * shape.hidden, t * hidden),
        *([(2 * shape.inner, 2 * inner)] if shape.apart else []),
    ]
    single = (*lead, shape.tokens, shape.hidden, shape.inner, shape.wide, e, k)
    yield from (
        (original, wanted)
        for original, wanted in products
        if original in literals and (exact or original not in single)
    )


def _literals(region: Region) -> set[int]:
    """Literal sizes in the region's program and in the shapes of its inputs."""
    found: set[int] = set()

    def add(a: Any) -> None:
        if isinstance(a, (list, tuple)):
            for x in a:
                add(x)
        elif isinstance(a, int) and not isinstance(a, bool):
            found.add(a)

    for step in region.program.steps:
        for i in step.sizes:
            if i < len(step.args):
                add(step.args[i])
    for node in region.inputs.values():
        add(_val(node))
    return found


def _distinct(pairs: Sequence[tuple[Any, int]]) -> bool:
    """Different originals stay different, so that no coincidence of small sizes can hide an error."""
    back: dict[int, Any] = {}
    return all(back.setdefault(wanted, original) == original for original, wanted in pairs)


def inputs(
    region: Region,
    dims: Dims,
    seed: int,
    dtype: torch.dtype | None = None,
    gain: float = 1.0,
    ids: str = "distinct",
    skew: bool = False,
) -> dict[str, Tensor]:
    """Random CPU tensors by role.

    Args:
        dtype: floating dtype of all of them; ``None``: that of each input.
        gain: magnitude of the first product's result; the second product's is of order 1 at gain 1.
        ids: "distinct" ids per token, "repeated" (any), "one" (all rows on one expert) or "outside" (a third of the ids
            is E or more).
        skew: routing weights over several orders of magnitude, some exactly zero.
    """
    generator = torch.Generator().manual_seed(seed)
    slots, experts = dims.size(_slots(region)), int(region.inputs["w13"].meta["val"].shape[0])
    out: dict[str, Tensor] = {}
    if "scores" in region.inputs:
        out = _scores(region, dims, slots, experts, ids, skew, generator, dtype)
    for role, node in region.inputs.items():
        if role in out:
            continue
        shape = dims.shape(node)
        if role == "idx":
            out[role] = _ids(numel(shape) // slots, slots, experts, ids, generator).reshape(shape).to(_dtype(node))
            continue
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        if role in ("w13", "w3"):
            value *= gain / dims.size(size(region.inputs["x"].meta["val"].shape[-1])) ** 0.5
        elif role == "w2":
            value *= min(shape[1:]) ** -0.5
        elif role in ("b13", "b3"):
            value *= gain / 2
        elif role == "weights" and skew:
            value = value * 10.0 ** torch.randint(-4, 2, shape, generator=generator)
            value[torch.rand(shape, generator=generator) < 0.1] = 0.0
        out[role] = value.to(dtype or _dtype(node))
    return out


def _scores(
    region: Region, dims: Dims, slots: int, experts: int, ids: str, skew: bool, generator: torch.Generator,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Scores [T, E] that are zero but for K experts of a token; with capacity, scores and mask [T, E, C]."""
    tokens = numel(dims.shape(region.inputs["x"])[:-1])
    chosen = _ids(tokens, slots, experts, ids, generator)
    weights = torch.randn(tokens, slots, generator=generator, dtype=torch.float64)
    if skew:
        weights = weights * 10.0 ** torch.randint(-4, 2, weights.shape, generator=generator)
    room = capacity_of(region, dims) if "dispatch" in region.inputs else 1
    scores = torch.zeros(tokens, experts, room, dtype=torch.float64)
    taken = [0] * experts
    for t, k in itertools.product(range(tokens), range(slots)):
        e = int(chosen[t, k])
        if "dispatch" not in region.inputs:
            scores[t, e, 0] = weights[t, k]
        elif taken[e] < room:  # the rest is dropped
            scores[t, e, taken[e]] = weights[t, k]
            taken[e] += 1
    found = {"scores": scores, "dispatch": (scores != 0).double()}
    return {
        role: found[role]
        .reshape(dims.shape(node))
        .to((dtype if _dtype(node).is_floating_point else None) or _dtype(node))
        for role, node in region.inputs.items()
        if role in found
    }


def chosen_scores(scores: Tensor, tokens: int, slots: int, experts: int) -> tuple[Tensor, Tensor]:
    """Ids and weights [T, K] of the scores [T, E] or [T, E, C] (in any shape of that order) that differ from zero."""
    table = scores.reshape(tokens, experts, -1).sum(-1)
    idx = table.abs().topk(slots, dim=-1).indices
    return idx, table.gather(1, idx)


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _ids(tokens: int, slots: int, experts: int, kind: str, generator: torch.Generator) -> Tensor:
    if kind == "repeated":
        drawn = torch.randint(0, experts, (tokens, slots), generator=generator)
        drawn[0] = drawn[0, 0]  # few tokens may hold none by chance
        return drawn
    if kind == "one":
        return torch.full((tokens, slots), int(torch.randint(0, experts, (1,), generator=generator)))
    if slots > experts:
        return torch.randint(0, experts, (tokens, slots), generator=generator)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots].clone()
    if kind == "outside":
        away = torch.rand(tokens, slots, generator=generator) < 0.34
        ids[away] = experts + torch.randint(0, 3, (int(away.sum()),), generator=generator)
    return ids


def score_chain(hints: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Calls that turn the chosen scores into routing weights (dense form), from their text in ``hints["score"]``."""
    calls = []
    for name, kwargs in json.loads(str(hints.get("score", "[]"))):
        namespace, op, overload = name.split(".")
        target = getattr(getattr(getattr(torch.ops, namespace), op), overload)
        calls.append((target, {k: getattr(torch, v) if k == "dtype" else v for k, v in kwargs.items()}))
    return calls
