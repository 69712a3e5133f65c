"""Proof, by running it, that a matrix of scores gives at most K experts per token a say.

A dense block weighs every expert's result with a score [T, E]; where only K of a token's scores can differ from zero, K
experts are all there is to compute. A block with capacity moves tokens into slots [E, C] with a mask [T, E, C] and back
with the same places, weighted. Whether that holds depends on how scores and mask are made, often on positions and
capacities, so that part of the graph is run as it stands. What it starts from, router logits or ids, is random and
free: equal logits (a comparison with the K-th largest lets more than K through), large ones, all on one expert.

The part stays in the graph and goes on deciding who is served, dropped tokens included. What is proved is

* at most K scores of a token differ from zero, K being the number of choices that the part makes;
* no gradient flows into the scores through the others;
* with capacity: a slot holds one token at most, tokens enter unscaled, and only a token that entered gets a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.normal_form import Term
from ascend_deep.passes.probe import isolated
from ascend_deep.passes.region import Dims, Region, slice_region
from ascend_deep.passes.stand_ins import widened

__all__ = ["prove_scores"]

_STORED = ("placeholder", "get_attr")
_PRODUCTS = frozenset(f"aten.{n}" for n in ("linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "einsum"))
_LOOKUPS = frozenset({"aten.index", "aten.index_select", "aten.embedding", "aten.gather"})
_MOST_NODES = 160
_LARGEST = 1 << 22
# Running sums in these are exact as far as tokens go; in half precision they are not, and slots would collide.
_EXACT = (torch.int64, torch.int32, torch.float32, torch.float64)
_POSITIONAL = frozenset({"aten.cumsum", "aten.sum"})

Decided = int | str


def prove_scores(
    view: GraphView, scores: fx.Node, experts: int, rows: Any, capacity: Any = None, dispatch: fx.Node | None = None
) -> int | Refusal:
    """K, the number of experts per token that ``scores`` can weigh, or why there is no such number below E.

    Args:
        scores: [T, E], or with ``dispatch`` [T, E, C], in any shape of that order; [E, T] is not.
        experts, rows, capacity: E, T and C, sizes or expressions.
        dispatch: [T, E, C], the mask by which tokens are put into slots.
    """
    outputs = [scores] if dispatch is None else [scores, dispatch]
    frontier = _frontier(view, outputs)
    if isinstance(frontier, Refusal):
        return frontier
    region = slice_region(view, "scores", {f"free{i}": n for i, n in enumerate(frontier)}, outputs)
    if isinstance(region, Refusal):
        return region
    counts = [k for k in _choices(region, rows) if k < experts]
    if not counts:
        return Refusal(
            "every expert runs on every token and none is left out: the scores are not made from a choice of experts.",
            scores,
        )
    inexact = next((n for n in region.nodes if _is_inexact(n, capacity)), None)
    if inexact is not None:
        return Refusal("positions of tokens are counted in half precision, where they are not exact.", inexact)
    key = (region.fingerprint(), experts, str(rows), str(capacity), tuple(counts))
    decided = _DECIDED.get(key)
    if decided is None:
        with isolated():
            decided = _DECIDED[key] = _run(region, experts, rows, capacity, counts)
    return Refusal(decided, scores) if isinstance(decided, str) else decided


_DECIDED: dict[tuple[Any, ...], Decided] = {}


def _choices(region: Region, rows: Any) -> list[int]:
    """How many experts per token the scores may give a say: candidates for K, smallest first.

    Every top-k, argmax or tensor of ids [rows, K] that they are made of is a choice. One choice may prepare another
    (groups before experts), so the last alone and all together are candidates. What stands before the frontier does
    not count: a router further up says nothing about these scores.
    """
    terms = region.view.terms
    found: dict[int, tuple[Term, int]] = {}
    for node in (*region.inputs.values(), *region.nodes):
        term = terms.term(node)
        if term.op in ("TopIds", "TopValues") and isinstance(term.attrs[0], int):
            found.setdefault(term.args[0].number, (term, term.attrs[0]))
        elif term.op == "aten.argmax" or (term.op == "getitem" and term.args and term.args[0].op == "aten.max"):
            found[term.number] = (term, 1)
        elif term.dtype in (torch.int64, torch.int32) and _from_table(term):
            if term.numel == rows:
                found[term.number] = (term, 1)
            elif term.shape and isinstance(term.shape[-1], int) and term.numel == rows * term.shape[-1]:
                found[term.number] = (term, term.shape[-1])
    if not found:
        return []
    chosen = list(found.values())
    last = [k for t, k in chosen if not any(o is not t and o.mentions(t, 400) for o, _ in chosen)]
    return sorted({max(last), sum(last), sum(k for _, k in chosen)})


# -- what the scores are made of ------------------------------------------------------------------------------------
def _frontier(view: GraphView, outputs: Sequence[fx.Node]) -> list[fx.Node] | Refusal:
    """The tensors that the scores start from: stored ones, products with stored ones, ids from tables."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node in seen or node in found or (view.tensor(node) is None and op_name(node) == ""):
            continue
        if node.op != "call_function" or (node not in outputs and _starts_here(view, node)):
            if view.tensor(node) is not None:
                found[node] = None
            continue
        seen.add(node)
        if len(seen) > _MOST_NODES:
            return Refusal("the scores of the experts are made by too large a part of the graph to be followed.", node)
        pending.extend(node.all_input_nodes)
    return sorted(found, key=view.order.__getitem__)


def _starts_here(view: GraphView, node: fx.Node) -> bool:
    value = view.tensor(node)
    if value is None:
        return False
    if op_name(node) in _PRODUCTS:
        return value.is_floating_point() and any(_is_stored(view.terms.term(n)) for n in node.all_input_nodes)
    lookup = op_name(node) in _LOOKUPS and not value.is_floating_point()
    return lookup and any(_is_stored(view.terms.term(n)) for n in node.all_input_nodes)


@lru_cache(maxsize=1)
def _movement() -> tuple[str, ...]:
    from ascend_deep.passes.experts_products import MOVES

    return MOVES


def _is_stored(term: Term) -> bool:
    while term.op in _movement():
        term = term.args[0]
    return term.op in _STORED


def _from_table(ids: Term) -> bool:
    """True for ids that are given or looked up: inputs, parts of them, and rows of tables."""
    while ids.op in ("Part", *_movement()):
        ids = ids.args[0]
    return ids.op in (*_STORED, "Rows")


def _is_inexact(node: fx.Node, capacity: Any) -> bool:
    value = node.meta.get("val")
    return (
        capacity is not None
        and op_name(node) == "aten.cumsum"
        and isinstance(value, Tensor)
        and value.dtype not in _EXACT
    )


# -- runs -----------------------------------------------------------------------------------------------------------
def _run(region: Region, experts: int, rows: Any, capacity: Any, counts: Sequence[int]) -> Decided:
    """K or a sentence. Runs at the first size that works; sizes of the graph itself are the last resort."""
    error = "no mapping to small sizes keeps equal sizes equal"
    for dims, tokens, slots in _plans(region, experts, rows, capacity):
        try:
            return _at(region, dims, tokens, experts, slots, counts)
        except _Unlike as unlike:
            return str(unlike)
        except Exception as problem:  # any op of the part may refuse the sizes of this plan
            text = str(problem).strip()
            error = f"{type(problem).__name__}: {text.splitlines()[0][:160] if text else ''}"
    return f"the part that makes the scores did not run at small sizes: {error}."


class _Unlike(Exception):
    """The scores do not have the property; the text is the refusal."""


def _plans(region: Region, experts: int, rows: Any, capacity: Any) -> list[tuple[Dims, int, int]]:
    found: list[tuple[Dims, int, int]] = []
    fixed = capacity if isinstance(capacity, int) else 0
    wanted = [2 * fixed + 3, fixed + 5] if fixed else [13, 24, 37, 64]
    symbolic = [s for n in region.inputs.values() for s in n.meta["val"].shape if isinstance(s, torch.SymInt)]
    if isinstance(rows, int):
        wanted.append(rows)
    elif len(symbolic) == 1 and capacity is not None and symbolic[0].node.has_hint():
        # A capacity that is a number here holds for some counts of tokens only; the one at hand is among them.
        wanted.insert(0, min(int(symbolic[0].node.hint), 96))
    for tokens in wanted:
        pairs: list[tuple[Any, int]] = [(experts, experts)]
        pairs += [(fixed, fixed)] if fixed else []
        if isinstance(rows, int):
            pairs += [
                (rows, tokens),
                *((rows * k, tokens * k) for k in range(2, 9)),
                (rows * experts, tokens * experts),
            ]
        elif symbolic:
            pairs += [(rows, tokens)]
        dims = Dims.plan(pairs)
        if dims is None or (not isinstance(rows, int) and dims.size(rows) != tokens):
            continue
        slots = dims.size(capacity) if capacity is not None else 0
        if tokens * experts * max(slots, 1) <= _LARGEST and (capacity is None or slots > 0):
            found.append((dims, tokens, slots))
    return found


def _at(region: Region, dims: Dims, tokens: int, experts: int, slots: int, counts: Sequence[int]) -> Decided:
    most, overflow = 0, False
    for seed, kind in enumerate(_kinds(region)):
        results = region.program.run(dims, _tensors(region, dims, experts, seed, kind, None))
        scores = results[0].reshape(tokens, experts, -1)
        nonzero = scores != 0
        if slots:
            overflow |= _check_slots(results[1].reshape(tokens, experts, slots), nonzero)
        most = max(most, int(nonzero.any(-1).sum(-1).max()))
    fitting = [k for k in counts if k >= most]
    if not fitting:
        raise _Unlike(
            f"the scores let {most} experts have a say in a token where {max(counts)} are chosen; equal scores do that "
            "if experts are chosen by comparing with a threshold."
        )
    if fitting[0] >= experts:
        raise _Unlike("every expert runs on every token and none is left out.")
    if slots and not overflow:
        raise _Unlike("no run could fill the capacity of an expert, so what happens to the tokens beyond is not known.")
    for seed in (50, 51):
        _check_gradients(region, dims, tokens, experts, fitting[0], seed)
    return fitting[0]


def _kinds(region: Region) -> list[str]:
    beyond = sorted({abs(c) for c in region.constants() if 1 < abs(c) < 1e4})
    # Small logits make flat scores, of which many pass a threshold; large ones make a single winner.
    return [
        "1",
        "1",
        "0.3",
        "0.05",
        "4",
        "30",
        "ties",
        "equal",
        "one",
        "ids",
        *(f"{1.7 * c:g}" for c in beyond[:1] + beyond[-1:]),
    ]


def _check_slots(dispatch: Tensor, nonzero: Tensor) -> bool:
    """Raise if slots are not used as the op needs it. True if an expert was full, or can never be."""
    mask = dispatch != 0
    if not torch.equal(dispatch.double(), mask.double()):
        raise _Unlike("tokens are scaled on their way into the experts' slots.")
    if bool((mask.sum(0) > 1).any()):
        raise _Unlike("more than one token is put into the same slot of an expert.")
    if bool((nonzero & ~mask).any()):
        raise _Unlike("a token takes the result of a slot that it was not put into.")
    slots, tokens = mask.shape[2], mask.shape[0]
    return slots >= tokens or bool((mask.sum((0, 2)) == slots).any())


def _check_gradients(region: Region, dims: Dims, tokens: int, experts: int, count: int, seed: int) -> None:
    """Raise unless gradients reach the scores' origins through the chosen scores alone."""
    tensors = _tensors(region, dims, experts, seed, "1", torch.float64)
    with torch.enable_grad():
        leaves = [t.requires_grad_() for t in tensors.values() if t.is_floating_point()]
        results = widened(region.program).run(dims, tensors)
        scores = results[0].reshape(tokens, experts, -1)
        if len(results) > 1 and results[1].requires_grad:
            raise _Unlike("gradients flow through the mask that puts tokens into slots.")
        if not scores.requires_grad:
            return
        weight = torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed)).double()
        if len(results) > 1:
            kept = results[1].reshape(scores.shape) != 0
        else:
            chosen = scores.detach().abs().sum(-1).topk(count, dim=-1).indices
            kept = torch.zeros(tokens, experts, 1, dtype=torch.bool).scatter(1, chosen.unsqueeze(-1), True)
        all_of_them = torch.autograd.grad(scores, leaves, weight, retain_graph=True, allow_unused=True)
        through_chosen = torch.autograd.grad(scores, leaves, weight * kept, allow_unused=True)
    for a, b in zip(all_of_them, through_chosen, strict=True):
        if (a is None) != (b is None) or (a is not None and b is not None and not torch.allclose(a, b, 1e-9, 1e-12)):
            raise _Unlike("gradients flow through the scores of experts that were not chosen.")


def _tensors(
    region: Region, dims: Dims, experts: int, seed: int, kind: str, dtype: torch.dtype | None
) -> Mapping[str, Tensor]:
    """Random values of the frontier. ``kind``: a magnitude, "ties", "equal", "one" (expert) or "ids" (one id)."""
    generator = torch.Generator().manual_seed(900 + seed)
    favourite = int(torch.randint(0, experts, (1,), generator=generator))
    out: dict[str, Tensor] = {}
    for role, node in region.inputs.items():
        like = node.meta["val"]
        shape = dims.shape(node)
        if not like.is_floating_point():
            high = 2 if like.dtype == torch.bool else experts
            value = torch.randint(0, high, shape, generator=generator)
            out[role] = (torch.full(shape, min(favourite, high - 1)) if kind == "ids" else value).to(like.dtype)
            continue
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        if kind == "ties":
            value = value.round()
        elif kind == "equal":
            value = torch.full_like(value, 0.5)
        elif kind == "one" and shape and shape[-1] == experts:
            value[..., favourite] += 20.0
        elif kind not in ("one", "ids"):
            value = value * float(kind)
        out[role] = value.to(dtype or like.dtype)
    return out
