"""What an attention region computes, found by running it in f64: its scale, and what rows without a visible key give.

The family is a softmax over all keys in which keys that are not chosen have a mask value below every score. The three
ways in which models write that value differ only in rows where no chosen key is visible:

* ``"zero"``: -inf and the safe softmax of SDPA; ``"nan"``: -inf and a plain softmax;
* ``"mean"``: a finite number such as ``finfo.min``, which leaves an equal softmax over all keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.mqa_family import arrange, expr, run, size_plan
from ascend_deep.passes.region import Dims, Region
from ascend_deep.passes.stand_ins import widened

__all__ = ["CANONICAL", "Bench", "Fit", "fit"]

CANONICAL: Mapping[str, str] = {"q": "BHSD", "k": "BGTD", "v": "BGTE", "idx": "BSK"}
_SMALL = {"B": 2, "S": 5, "T": 13}
_CHOSEN = 4
_LARGEST = 10**7
_LOW = -1e30
_LARGE = 2.0**60  # factor of scores that numbers far away, above _LOW, do not hide


@dataclass(frozen=True)
class Fit:
    """The scale, and ``empty`` and ``fill`` of the op."""

    scale: float
    empty: str
    fill: float


class Bench:
    """A region of ``sparse_attention_cut`` on a test bench.

    Attributes:
        layouts: role to layout, one letter per dim: B batch, H query head, G key head, S query, T key, K chosen key,
            D depth, E depth of the values, and ``1``; ``"out"`` is that of the output.
        masks: role to kind: ``"hide"`` (True hides), ``"keep"`` (True is visible), ``"add"``.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        items = str(region.hints["layout"]).split(";")
        self.layouts: dict[str, str] = {i.split("=")[0]: i.split("=")[1] for i in items}
        kinds = [k for k in str(region.hints["masks"]).split(",") if k]
        self.masks = {f"mask{i}": kind for i, kind in enumerate(kinds)}

    def size(self, name: str) -> Any:
        """The size of a dim in the model."""
        for role, text in self.layouts.items():
            at = text.find(name)
            if at >= 0:
                node = self.region.outputs[0] if role == "out" else self.region.inputs[role]
                size = node.meta["val"].shape[at]
                return size if expr(size).free_symbols else int(expr(size))
        return 1

    # -- sizes --------------------------------------------------------------------------------------------------
    def plans(self) -> Iterator[Dims]:
        """Sizes to try: few tokens and the model's own heads and depths, few heads if they are many, its own sizes."""
        real = {n: self.size(n) for n in "BHGSTDE"}
        own = {n: real[n] if isinstance(real[n], int) else 6 for n in "HGDE"}
        for small in (_SMALL, {**_SMALL, "T": 29, "S": 7}):
            # A literal size stands for one number of the run: those that coincide with heads or depths stay.
            kept = {n: real[n] for n in small if isinstance(real[n], int) and real[n] in own.values()}
            dims = size_plan({**small, **kept, **own}, real)
            if dims is not None and self._fits(dims, real):
                yield dims
        if all(isinstance(s, int) for s in real.values()) and self._fits(Dims(), real):
            yield Dims()

    @staticmethod
    def _fits(dims: Dims, real: Mapping[str, Any]) -> bool:
        at = {n: dims.size(s) for n, s in real.items()}
        if isinstance(real["D"], int) and at["D"] != real["D"]:
            return False  # the default scale of SDPA depends on the depth
        tokens = at["B"] * at["H"] * max(at["S"], 1)
        return at["T"] > _CHOSEN + 1 and tokens * max(at["T"], at["D"], at["E"]) <= _LARGEST

    # -- inputs -------------------------------------------------------------------------------------------------
    def tensors(
        self,
        dims: Dims,
        seed: int,
        dtype: torch.dtype | None = None,
        low: float = -math.inf,
        visible: bool = False,
        nothing: bool = False,
    ) -> dict[str, Tensor]:
        """Random inputs by role at sizes ``dims``.

        Of the rows of each mask the first hides every key, the second none, the others some.

        Args:
            dtype: of floating inputs; None: the region's own.
            low: what floating masks hold where they hide.
            visible: masks that hide nothing and add nothing.
            nothing: masks of a single row hide every key.
        """
        g = torch.Generator().manual_seed(seed)
        found: dict[str, Tensor] = {}
        for role, node in self.region.inputs.items():
            own: torch.dtype = node.meta["val"].dtype
            text, kind = self.layouts[role], self.masks.get(role)
            if role == "idx":
                found[role] = self._choice(dims, node, text, g).to(own)
                continue
            shape = dims.shape(node)
            if role == "sink" and visible:
                found[role] = torch.zeros(shape, dtype=dtype or own)
                continue
            if kind is None:
                found[role] = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype or own)
                continue
            keep = torch.ones(shape, dtype=torch.bool) if visible else _visible(shape, text, g, nothing)
            if kind == "add":
                values = torch.zeros(shape) if visible else torch.randn(shape, generator=g)
                found[role] = values.to(dtype or own).masked_fill(~keep, low)
            else:
                found[role] = ~keep if kind == "hide" else keep
        return found

    def _choice(self, dims: Dims, node: fx.Node, text: str, g: torch.Generator) -> Tensor:
        """Distinct keys per row; the number of columns is our own, since no node of a region depends on it."""
        keys = dims.size(self.size("T"))
        shape = tuple(_CHOSEN if n == "K" else s for n, s in zip(text, dims.shape(node), strict=True))
        return torch.rand((*shape[:-1], keys), generator=g).argsort(-1)[..., : shape[-1]]

    # -- runs ---------------------------------------------------------------------------------------------------
    def run_wide(self, dims: Dims, tensors: Mapping[str, Tensor]) -> Tensor:
        """The output [B, H, S, E] of the region in f64 arithmetic."""
        (found,) = widened(self.region.program).run(dims, tensors)
        return arrange(run, found, self.layouts["out"], "BHSE")

    def operands(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and idx in the order of the op's dims."""
        q, k, v, idx = (arrange(run, tensors[r], self.layouts[r], CANONICAL[r]) for r in ("q", "k", "v", "idx"))
        return q, k, v, idx

    def dense(self, tensors: Mapping[str, Tensor], scale: float, empty: str, fill: float) -> Tensor:
        """The member of the family [B, H, S, E], as a softmax over all keys."""
        q, k, v, idx = self.operands(tensors)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        hidden = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool)
        hidden.scatter_(-1, idx.long().unsqueeze(1), False)
        added = torch.zeros((), dtype=q.dtype)
        for role, kind in self.masks.items():
            mask = arrange(run, tensors[role], self.layouts[role], "BHST")
            if kind == "add":
                added = added + mask
            else:
                hidden = hidden | (mask if kind == "hide" else ~mask)
        logits = q @ k.transpose(-1, -2) * scale
        low = fill if empty == "mean" else -math.inf
        added, hidden = added.expand(logits.shape), hidden.expand(logits.shape)
        logits = logits + added.masked_fill(hidden, low)
        if "sink" in tensors:
            sink = arrange(run, tensors["sink"], self.layouts["sink"], "H").view(1, -1, 1, 1)
            logits = torch.cat((logits, sink.expand(*logits.shape[:-1], 1)), -1)
        nothing = (logits == -math.inf).all(-1, keepdim=True)
        p = logits.softmax(-1)[..., : k.shape[2]]
        return torch.where(nothing & (empty == "zero"), 0.0, p) @ v


def _visible(shape: Sequence[int], text: str, g: torch.Generator, nothing: bool) -> Tensor:
    """Bool: the first row hides every key, the second none, the others a third of them; a single row if ``nothing``."""
    keep = torch.rand(tuple(shape), generator=g) > 0.35
    if "T" not in text:
        return keep
    rows = keep.movedim(text.index("T"), -1).reshape(-1, shape[text.index("T")]).clone()
    lead = keep.movedim(text.index("T"), -1).shape
    if rows.shape[0] > 1:
        rows[0] = False
        rows[1] = True
    elif nothing:
        rows[:] = False
    return rows.reshape(lead).movedim(-1, text.index("T"))


def fit(bench: Bench) -> Fit | Refusal:
    """The member of the family that the region computes under its layout, or a sentence that says what differs."""
    where = bench.region.outputs[0]
    error = "no sizes were found at which the block can run on its own."
    for dims in bench.plans():
        tensors = bench.tensors(dims, 71, torch.float64, visible=True)
        if tensors["q"].numel() == 0:
            continue
        try:
            scale = _scale(bench, dims, tensors)
        except Exception as e:  # any op may refuse these sizes
            first = (str(e).strip().splitlines() or [""])[0][:160]
            error = f"the block does not run on its own: {type(e).__name__}: {first}"
            continue
        if isinstance(scale, Refusal):
            return scale
        return _rows(bench, dims, scale)
    return Refusal(error, where)


def _scale(bench: Bench, dims: Dims, tensors: dict[str, Tensor]) -> float | Refusal:
    """The number that the products are multiplied by, from two keys whose values differ."""
    where = bench.region.outputs[0]
    tensors = {**tensors, "q": 0.5 * tensors["q"]}
    q, k, _, idx = bench.operands(tensors)
    # One chosen key of the first row has the value 1, all others 0: the output is that key's weight.
    key = int(idx[0, 0, 0])
    value = tensors["v"].zero_()
    value.select(bench.layouts["v"].index("T"), key).fill_(1.0)
    out = bench.run_wide(dims, tensors)[0, 0, 0]
    weight = float(out[0])
    if not 0 < weight < 1:
        return Refusal("the block does not weigh chosen keys by a softmax, or hides other keys than those.", where)
    odds = math.log(weight) - math.log1p(-weight)
    products = q[0, 0, 0] @ k[0, 0].t()
    others = idx[0, 0, 1:].long()

    column = products.new_zeros(1 if "sink" in tensors else 0)

    def excess(s: float) -> float:
        return float(s * products[key] - torch.cat((s * products[others], column)).logsumexp(0) - odds)

    depth = bench.size("D")
    constants = bench.region.constants()
    for s in _numbers([*constants, depth**-0.5] if isinstance(depth, int) else constants):
        if abs(excess(s)) < 1e-9:
            return s
    if not isinstance(depth, int):
        return Refusal(
            "the scale of the products is not a number: it follows the depth of the heads, which is symbolic.",
            where,
            "Compile with a static head dim, or pass scale.",
        )
    return Refusal("the scale of the products is none that the constants of the block give.", where)


def _numbers(constants: Sequence[float]) -> Iterator[float]:
    """1, the constants, and their products and quotients, of either sign."""
    known = list(dict.fromkeys(abs(c) for c in constants if 0 < abs(c) < 1e15))
    factors = list(dict.fromkeys([1.0, *known, *(1 / c for c in known)]))
    seen: set[float] = set()
    for a in factors:
        for b in factors:
            for c in factors[: 1 + len(known)]:
                for s in (a * b * c, -a * b * c):
                    if s not in seen:
                        seen.add(s)
                        yield s


def _rows(bench: Bench, dims: Dims, scale: float) -> Fit | Refusal:
    """Which member agrees on rows of every kind, rows without a visible key included."""
    where = bench.region.outputs[0]
    fills = [c for c in bench.region.constants() if -math.inf < c <= _LOW]
    members = [("zero", _LOW), ("nan", _LOW), *(("mean", f) for f in fills)]
    if "sink" in bench.layouts:
        members = members[:1]  # whatever hides keys, the sink takes rows without a visible one
    lows = [-math.inf, *fills] if "add" in bench.masks.values() else [-math.inf]
    for seed, low in ((s, low) for s in (72, 73) for low in lows):
        tensors = bench.tensors(dims, seed, torch.float64, low=low, nothing=seed == 73)
        found = bench.run_wide(dims, tensors)
        members = [
            m for m in members if torch.allclose(found, bench.dense(tensors, scale, *m), 1e-9, 1e-11, equal_nan=True)
        ]
        if not members:
            return _difference(bench, tensors, scale, found, where)
    large = bench.tensors(dims, 74, torch.float64)
    large["q"] = large["q"] * _LARGE
    wanted = bench.dense(large, scale, *members[0])
    if not torch.allclose(bench.run_wide(dims, large), wanted, 1e-9, 1e-11, equal_nan=True):
        return Refusal(
            "where scores are very large the block is another function: keys that were not chosen get a number that "
            "scores can reach, or scores are limited.",
            where,
            "Hide keys with -inf or the lowest number of the dtype.",
        )
    return Fit(scale, *members[0])


def _difference(bench: Bench, tensors: Mapping[str, Tensor], scale: float, found: Tensor, where: fx.Node) -> Refusal:
    wanted = bench.dense(tensors, scale, "nan", _LOW)
    seen = ~wanted.isnan()
    if torch.allclose(found[seen], wanted[seen], 1e-9, 1e-11):
        return Refusal(
            "rows in which no chosen key is visible give neither 0, nor NaN, nor an equal softmax over all keys.", where
        )
    return Refusal("the block is not a softmax over the chosen keys under its masks: another function.", where)
