"""What an indexer region computes, found by running it: layouts, sizes to run at, and the fit to ``mqa_topk``.

A layout says which dim of a tensor is which, one letter per dim: B batch, S query, H head, D depth, T key, and ``1``
for a dim of size 1 that stands for nothing. Layouts are hypotheses made from sizes alone (``mqa_cut``); running the
region tells whether one holds, so equal sizes (T == H) cannot mislead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import op_name
from ascend_deep.passes.region import Dims, Program, Region
from ascend_deep.passes.stand_ins import widened

__all__ = [
    "CANONICAL", "Bench", "arrange", "assignments", "expr", "fit", "open_masks", "restore", "run", "size_plan", "snap",
]  # fmt: skip

CANONICAL: Mapping[str, str] = {"q": "BSHD", "kv": "BTD", "weights": "BSH"}
_SMALL = {"B": 2, "S": 3, "H": 3, "D": 6, "T": 11}
_OTHER = {"B": 1, "S": 2, "H": 2, "D": 1, "T": 3}  # more than that in a second run, which has to give the same
_LARGEST = 2 * 10**7  # scores of all heads that a run may hold
_aten = torch.ops.aten


def expr(size: Any) -> sympy.Expr:
    """An int or SymInt as an expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def assignments(shape: Sequence[Any], names: str, sizes: Mapping[str, sympy.Expr]) -> Iterator[str]:
    """Layouts of ``shape`` that hold each of ``names`` whose size is not 1 once, the order of ``names`` first."""
    wanted = [n for n in names if sizes[n] != 1]

    def walk(dims: list[sympy.Expr], left: list[str]) -> Iterator[str]:
        if not dims:
            if not left:
                yield ""
            return
        if dims[0] == 1:
            for rest in walk(dims[1:], left):
                yield "1" + rest
            return
        for name in left:
            if sizes[name] == dims[0]:
                for rest in walk(dims[1:], [n for n in left if n != name]):
                    yield name + rest

    yield from walk([expr(s) for s in shape], wanted)


def _same_order(layout: str, names: str) -> bool:
    return len(layout) == len(names) and all(
        a == b or (a == "1" and b not in layout) for a, b in zip(layout, names, strict=True)
    )


def arrange(call: Callable[..., Any], x: Any, layout: str, names: str) -> Any:
    """``x`` with the dims ``names``; those it lacks become 1. ``call(op, *args)`` runs or records an op."""
    if _same_order(layout, names):
        return x
    ones = [i for i, n in enumerate(layout) if n == "1"]
    if ones:
        x = call(_aten.squeeze.dims, x, ones)
    kept = [n for n in layout if n != "1"]
    order = sorted(range(len(kept)), key=lambda i: names.index(kept[i]))
    if order != list(range(len(kept))):
        x = call(_aten.permute.default, x, order)
    for i, n in enumerate(names):
        if n not in kept:
            x = call(_aten.unsqueeze.default, x, i)
    return x


def restore(call: Callable[..., Any], x: Any, layout: str) -> Any:
    """``x`` [B, S, columns] in the layout of the scores."""
    names = "BST"
    if _same_order(layout, names):
        return x
    missing = [i for i, n in enumerate(names) if n not in layout]
    if missing:
        x = call(_aten.squeeze.dims, x, missing)
    for i, n in enumerate(layout):
        if n == "1":
            x = call(_aten.unsqueeze.default, x, i)
    return x


def _selected(node: fx.Node) -> int:
    """The index that a ``select`` takes, or -1."""
    index = node.args[2] if op_name(node) == "aten.select" and len(node.args) > 2 else -1
    return index if isinstance(index, int) else -1


def run(op: Callable[..., Any], *args: Any) -> Any:
    return op(*args)


def size_plan(wanted: Mapping[str, int], real: Mapping[str, Any]) -> Dims | None:
    """Sizes at which each dim is at least as large as wanted; None if none were found.

    Args:
        wanted: size to run at, by name of a dim.
        real: the size in the model, int or SymInt, by name.
    """
    symbols: dict[str, int] = {}
    literals: dict[int, int] = {}
    for name, size in real.items():
        e = expr(size)
        if e.is_Symbol:
            symbols[str(e)] = max(symbols.get(str(e), 0), wanted[name])
        elif not e.free_symbols and int(e) > 1:
            literals[int(e)] = max(literals.get(int(e), 0), wanted[name])
    for name, size in real.items():
        e = expr(size)
        if e.is_Symbol or not e.free_symbols:
            continue
        for s in e.free_symbols:
            symbols.setdefault(str(s), 2)
        for _ in range(16):
            if Dims(symbols, literals).size(size) >= wanted[name]:
                break
            symbols.update({str(s): 2 * symbols[str(s)] for s in e.free_symbols})
        else:
            return None
    # Products of literal sizes, as in view(x, [B * S, H, D]).
    known = [int(s) for s in real.values() if isinstance(s, int) and s > 1]
    for count in (2, 3):
        for group in combinations(known, count):
            a = b = 1
            for s in group:
                a, b = a * s, b * literals[s]
            literals.setdefault(a, b)
    return Dims(symbols, literals)


@dataclass(frozen=True)
class Fit:
    """The scale (inside the ReLU) and the value that hidden keys get (None: no mask hides)."""

    scale: float
    fill: float | None


class Bench:
    """A region of ``mqa_cut`` on a test bench.

    Attributes:
        layouts: role to layout; ``"scores"`` is that of the scores.
        masks: role to kind: ``"hide"`` (True hides), ``"keep"`` (True takes part), ``"add"``.
        chosen: topk, or 0 for a region that returns scores.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        items = str(region.hints["layout"]).split(";")
        self.layouts: dict[str, str] = {i.split("=")[0]: i.split("=")[1] for i in items}
        kinds = [k for k in str(region.hints["masks"]).split(",") if k]
        self.masks = {f"mask{i}": kind for i, kind in enumerate(kinds)}
        self.chosen = int(region.hints["topk"])
        self.scores: fx.Node = next(n for n in region.nodes if n.name == region.hints["scores"])

    @property
    def scored(self) -> Program:
        """The region's program with the scores as its result: one step per node."""
        return replace(self.region.program, results=(self.region.nodes.index(self.scores),))

    def size(self, name: str) -> Any:
        """The size of a dim."""
        for role in ("q", "kv", "weights"):
            at = self.layouts[role].find(name)
            if at >= 0:
                size = self.region.inputs[role].meta["val"].shape[at]
                return size if expr(size).free_symbols else int(expr(size))
        return 1

    # -- sizes --------------------------------------------------------------------------------------------------
    def plans(self, more: Mapping[str, int] = MappingProxyType({})) -> Iterator[Dims]:
        """Sizes to try: all small but the heads, then the model's own depth, too, then its own sizes if they are small.

        Args:
            more: what to add to a size, by name of a dim.
        """
        wanted = dict(_SMALL)
        wanted["T"] = max(wanted["T"], self.chosen + 5)
        real = {n: self.size(n) for n in wanted}
        # A block may treat heads unlike each other, so it runs with all of them. If their number is symbolic, with one
        # more than a loop over them has.
        last = max((_selected(n) for n in self.region.nodes), default=-1)
        wanted["H"] = max(wanted["H"], last + 2) if not isinstance(real["H"], int) else real["H"]
        fixed = {n: s for n, s in real.items() if isinstance(s, int) and n in "HD"}
        for plan in (wanted, {**wanted, **fixed}):
            plan = {n: s + more.get(n, 0) * (n != "H" or not isinstance(real["H"], int)) for n, s in plan.items()}
            dims = size_plan(plan, real)
            if dims is not None and self._fits(dims, real):
                yield dims
        if all(isinstance(s, int) for s in real.values()) and self._fits(Dims(), real):
            yield Dims()

    @staticmethod
    def _fits(dims: Dims, real: Mapping[str, Any]) -> bool:
        held = 1
        for n in "BSHT":
            held *= dims.size(real[n])
        return held <= _LARGEST

    # -- runs ---------------------------------------------------------------------------------------------------
    def tensors(
        self, dims: Dims, seed: int, dtype: torch.dtype | None = None, ladder: bool = False, sign: float = 1.0
    ) -> dict[str, Tensor]:
        """Random inputs by role at sizes ``dims``, masks that hide few keys included.

        Args:
            dtype: of floating inputs; None: the region's own.
            ladder: keys whose scores differ by equal steps, so that thousands of them have one order.
            sign: that of the scale, for which the first head is on in a ladder.
        """
        g = torch.Generator().manual_seed(seed)
        found: dict[str, Tensor] = {}
        for role, node in self.region.inputs.items():
            shape = dims.shape(node)
            own: torch.dtype = node.meta["val"].dtype
            kind = self.masks.get(role)
            if kind is None:
                found[role] = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype or own)
                continue
            keep = self._keep(shape, self.layouts[role], g)
            if kind == "add":
                values = torch.zeros(shape) if ladder else torch.randn(shape, generator=g)
                found[role] = values.masked_fill(~keep, -torch.inf).to(dtype or own)
            else:
                found[role] = ~keep if kind == "hide" else keep
        if ladder:
            self._make_ladder(found, g, sign)
        return found

    @staticmethod
    def _keep(shape: Sequence[int], layout: str, g: torch.Generator) -> Tensor:
        """Bool: up to two keys of each row are hidden."""
        noise = torch.rand(tuple(shape), generator=g)
        at = layout.find("T")
        if at < 0 or shape[at] < 5:
            return torch.ones(tuple(shape), dtype=torch.bool)
        return noise.argsort(at).argsort(at) >= 2

    def _make_ladder(self, tensors: dict[str, Tensor], g: torch.Generator, sign: float) -> None:
        """kv[t] = (hi, lo, ...), q = a (64, 1, 0, ...): the products are a (64 hi + lo), exactly, in any dtype."""
        q, kv = tensors["q"], tensors["kv"]
        d_q, d_kv, t = self.layouts["q"].index("D"), self.layouts["kv"].index("D"), self.layouts["kv"].index("T")
        rung = torch.rand(kv.select(d_kv, 0).shape, generator=g).argsort(t - (d_kv < t)) + 1
        kv.select(d_kv, 0).copy_(rung // 64)
        kv.select(d_kv, 1).copy_(rung % 64)
        first = q.select(d_q, 0).clone()
        head = self.layouts["q"].find("H")
        if head >= 0:
            first.select(head - (d_q < head), 0).abs_().mul_(sign)
        else:
            first.abs_().mul_(sign)
        q.zero_()
        q.select(d_q, 0).copy_(64 * first)
        q.select(d_q, 1).copy_(first)

    def run_scores(self, dims: Dims, tensors: Mapping[str, Tensor]) -> Tensor:
        """The scores [B, S, T] of the region, as it is."""
        (found,) = self.scored.run(dims, tensors)
        return arrange(run, found, self.layouts["scores"], "BST")

    def run_wide(self, dims: Dims, tensors: Mapping[str, Tensor]) -> Tensor:
        """The scores in f64 arithmetic."""
        (found,) = widened(self.scored).run(dims, tensors)
        return arrange(run, found, self.layouts["scores"], "BST")

    def products(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """q . k [B, S, H, T] and the weights [B, S, H, 1]."""
        q, kv, w = (arrange(run, tensors[r], self.layouts[r], CANONICAL[r]) for r in ("q", "kv", "weights"))
        return torch.einsum("bshd,btd->bsht", q, kv), w.unsqueeze(-1)

    def masked(self, tensors: Mapping[str, Tensor], scores: Tensor) -> tuple[Tensor, Tensor]:
        """``scores`` with additive masks, and bool [B, S, T]: hidden by a boolean one."""
        hidden = torch.zeros_like(scores, dtype=torch.bool)
        for role, kind in self.masks.items():
            mask = arrange(run, tensors[role], self.layouts[role], "BST")
            if kind == "add":
                scores = scores + mask
            else:
                hidden = hidden | (mask if kind == "hide" else ~mask)
        return scores, hidden


def open_masks(bench: Bench, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with masks that change nothing."""
    neutral = {"hide": torch.zeros_like, "keep": torch.ones_like, "add": torch.zeros_like}
    return {r: neutral[bench.masks[r]](t) if r in bench.masks else t for r, t in tensors.items()}


def _multiple(found: Tensor, of: Tensor) -> float | None:
    """a if ``found`` = a ``of``, within rounding of f64."""
    norm = float((of * of).sum())
    if norm == 0 or found.shape != of.shape or not bool(found.isfinite().all()):
        return None
    a = float((found * of).sum()) / norm
    return a if float((found - a * of).abs().max()) <= 1e-9 * float(found.abs().max()) + 1e-300 else None


def snap(value: float, constants: Sequence[float]) -> float | None:
    """``value`` as one of the constants, or a product or quotient of two or three; None if it is none."""
    known = [abs(c) for c in constants if c not in (0.0, 1.0) and abs(c) < 1e30 and c == c]
    factors = [1.0, *known, *(1 / c for c in known)]
    for a in factors:
        if abs(a - value) <= 1e-9 * value:
            return a
    for a in factors:
        for b in factors:
            if abs(a * b - value) <= 1e-9 * value:
                return a * b
    for a in factors:
        for b in factors:
            if any(abs(a * b * c - value) <= 1e-9 * value for c in factors[:12]):
                return next(a * b * c for c in factors[:12] if abs(a * b * c - value) <= 1e-9 * value)
    return None


def fit(bench: Bench) -> Fit | Refusal:
    """The member of the family that the region computes under its layout, or a sentence that says what differs."""
    found = _fit(bench, bench.plans())
    if isinstance(found, Refusal):
        return found
    again = _fit(bench, bench.plans(_OTHER))
    if found != again:
        return Refusal(
            "its scale, or what it computes, changes with the numbers of queries, keys or heads or with the depth.",
            bench.scores,
        )
    return found


def _fit(bench: Bench, plans: Iterable[Dims]) -> Fit | Refusal:
    where = bench.scores
    error = "no sizes were found at which the block can run on its own."
    for dims in plans:
        tensors = bench.tensors(dims, 77, torch.float64)
        bare = open_masks(bench, tensors)
        try:
            plain = bench.run_wide(dims, bare)
            under_mask = bench.run_wide(dims, tensors)
        except Exception as e:  # any op may refuse these sizes
            first = (str(e).strip().splitlines() or [""])[0][:160]
            error = f"the block does not run on its own: {type(e).__name__}: {first}"
            continue
        return _explain(bench, bare, tensors, plain, under_mask)
    return Refusal(error, where)


def _explain(
    bench: Bench, bare: Mapping[str, Tensor], tensors: Mapping[str, Tensor], plain: Tensor, under_mask: Tensor
) -> Fit | Refusal:
    where = bench.scores
    p, w = bench.products(bare)
    up, down = (w * p.relu()).sum(2), (w * (-p).relu()).sum(2)
    a, b = _multiple(plain, up), _multiple(plain, down)
    if a is None and b is None:
        return Refusal(_difference(plain, p, w), where)
    size = a if a is not None else b
    assert size is not None
    if size <= 0:
        return Refusal(
            "the scores are multiplied by a negative number after the ReLU; the op's scale stands before it.",
            where,
            "Multiply the weights of the heads instead.",
        )
    snapped = snap(size, bench.region.constants())
    if snapped is None:
        return Refusal(f"the scale of the products is {size:.9g}, which no constant of the block gives.", where)
    wanted, hidden = bench.masked(tensors, plain)
    visible = ~hidden
    if not torch.allclose(under_mask[visible], wanted[visible], rtol=1e-9, atol=1e-12):
        return Refusal("the mask does more than to hide keys or to be added to the scores.", where)
    fill = None
    if bool(hidden.any()):
        values = under_mask[hidden]
        fill = float(values[0])
        if not bool((values == fill).all()):
            return Refusal("hidden keys do not all get the same score.", where)
    return Fit(snapped if a is not None else -snapped, fill)


def _difference(found: Tensor, p: Tensor, w: Tensor) -> str:
    """Which near miss of the family the block is."""
    if _multiple(found, (w * p).sum(2)) is not None:
        return "the products have no ReLU before the heads are summed, so heads of opposite sign cancel."
    if _multiple(found, (w * p).sum(2).relu()) is not None:
        return "the ReLU follows the sum over the heads; the op has it before, on each head."
    if _multiple(found, (w * p).relu().sum(2)) is not None:
        return "the weights are multiplied before the ReLU; the op multiplies them after it, where their sign counts."
    totals = found.sum(-1, keepdim=True)
    if _multiple(totals, w.sum(2)) is not None and float(found.abs().max()) > 0:
        return "the products go through a softmax over the keys instead of a ReLU."
    return (
        "the scores are not the weighted sum over the heads of relu(q . k) in any layout of q, k and the weights that "
        "the sizes allow: another function, or a permutation of the keys that is not a transpose."
    )
