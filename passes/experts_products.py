"""Products with expert weights, and the pairs of them that make a block of experts: part of ``experts_cut.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.normal_form import Term, size

__all__ = [
    "MOVES",
    "Pair",
    "Product",
    "arrangements",
    "below",
    "divide",
    "expert_product",
    "fused_product",
    "impure_between",
    "moved",
    "pair_of",
    "stored_problem",
    "stored_weight",
]

_PRODUCTS = ("Gemm", "Einsum", "GroupedGemm")
MOVES = ("Reshape", "Permute", "Expand", "Cast", "Mask")

# What the gate goes through and up does not: a guess at which is which, before both ways are run.
_ACTIVATIONS = frozenset(f"aten.{n}" for n in ("silu", "gelu", "sigmoid", "relu", "tanh"))
# What no activation is made of: behind it lies another layer.
_NEVER_BETWEEN = ("Rows", "AddRows", "Expand", "aten.sum", "aten.mean")


@dataclass(frozen=True)
class Product:
    """A product with expert weights.

    Attributes:
        term: the product.
        rows: the operand that comes from the tokens.
        weight: the other operand, as the product reads it.
        stored: the weight as it is stored: gathers and transposes looked through.
        ids: what the rows of ``stored`` are gathered by (batched form).
        offs: where the groups end (grouped form).
    """

    term: Term
    rows: Term
    weight: Term
    stored: Term
    ids: Term | None = None
    offs: Term | None = None

    @property
    def kind(self) -> str:
        """``"grouped"``, ``"batched"`` or ``"dense"``."""
        if self.offs is not None:
            return "grouped"
        return "dense" if self.ids is None else "batched"


@dataclass(frozen=True)
class Pair:
    """The two products of one block of experts. ``others``: more products beside the first (separate gate and up)."""

    first: Product
    second: Product
    others: tuple[Product, ...] = ()

    @property
    def starts(self) -> list[fx.Node]:
        """The nodes of the products that read the tokens."""
        return [node for product in (self.first, *self.others) for node in product.term.nodes]


def expert_product(term: Term) -> Product | None:
    """``term`` as a product with expert weights, or ``None`` if it is something else."""
    if term.op == "GroupedGemm":
        rows, weight, offs = term.args
        return Product(term, rows, weight, stored_weight(weight), offs=offs) if len(weight.shape) == 3 else None
    if term.op == "aten.add":
        inner = fused_product(term)
        found = expert_product(inner) if inner is not None else None
        return None if found is None else replace(found, term=term)
    if term.op not in ("Gemm", "Einsum"):
        return None
    for rows, weight in (term.args, term.args[::-1]):
        gathered = _gather(weight)
        if gathered is not None:
            return Product(term, rows, weight, stored_weight(gathered.args[0]), ids=gathered.args[1])
    for rows, weight in (term.args, term.args[::-1]):
        stored = stored_weight(weight)
        if len(stored.shape) == 3 and _is_stored(stored, ("Cast", "Reshape", "Permute")) and not _may_be_weight(rows):
            return Product(term, rows, weight, stored)
    return None


def _may_be_weight(rows: Term) -> bool:
    """True for an operand that could be stored expert weights as well."""
    return len(rows.shape) == 3 and rows.shape[0] != 1 and _is_stored(rows)


def _is_stored(term: Term, through: tuple[str, ...] = ("Cast", "Reshape")) -> bool:
    """An input of the graph, perhaps cast or seen in another shape."""
    while term.op in through:
        term = term.args[0]
    return term.op in ("placeholder", "get_attr")


def fused_product(term: Term) -> Term | None:
    """The product inside a sum that one call computes (baddbmm, addmm), or ``None``."""
    if term.op != "aten.add":
        return None
    return next((t for t in term.args if t.op == "Gemm" and not t.nodes), None)


def _gather(weight: Term) -> Term | None:
    """The deepest gather of rows of a tensor [E, a, b] that ``weight`` is moved from."""
    found = None
    term = weight
    while term.op in (*MOVES, "Rows"):
        if term.op == "Rows" and len(term.args[0].shape) == 3 and term.is_float:
            found = term
        term = term.args[0]
    return found


def stored_weight(weight: Term) -> Term:
    """``weight`` without transposes of its last two dims."""
    while weight.op == "Permute" and weight.attrs == (0, 2, 1) and weight.args[0].nodes:
        weight = weight.args[0]
    return weight


def pair_of(term: Term) -> Pair | None:
    """The block whose second product is ``term``, or ``None`` if no product of the same kind feeds it."""
    second = expert_product(term)
    if second is None:
        return None
    found: list[Product] = []
    for inner in below(second.rows):
        product = expert_product(inner)
        if product is None or product.kind != second.kind or product.stored is second.stored:
            continue
        if _experts(product) != _experts(second) or (found and product.rows is not found[0].rows):
            continue
        found.append(product)
    return Pair(found[0], second, tuple(found[1:])) if found else None


def arrangements(pair: Pair) -> list[Pair]:
    """``pair``; where gate and up have separate weights, with either of them as the first product, likelier one first.

    Which of the two is the gate is decided by running the block.
    """
    if len(pair.others) != 1:
        return [pair]
    (other,) = pair.others
    turned = Pair(other, pair.second, (pair.first,))
    for term, _ in zip(pair.second.rows.walk(), range(48), strict=False):
        if term.op in _ACTIVATIONS:
            gate, up = term.mentions(pair.first.term, 16), term.mentions(other.term, 16)
            if gate != up:
                return [pair, turned] if gate else [turned, pair]
    return [pair, turned]


def impure_between(term: Term) -> fx.Node | None:
    """The nearest op without a known value (dropout, say) between the product ``term`` and whatever feeds it."""
    product = expert_product(term)
    if product is None or pair_of(term) is not None:
        return None
    pending, seen = [product.rows], 0
    while pending and seen < 12:
        current = pending.pop(0)
        seen += 1
        if current.op == "call_function":
            return current.node
        if current.op not in _PRODUCTS:
            pending.extend(current.args)
    return None


def _experts(product: Product) -> Any:
    return product.stored.shape[0]


def below(term: Term, limit: int = 48) -> Iterator[Term]:
    """Products that feed ``term`` with no other product between, nearest first."""
    seen = {term.number}
    pending = [term]
    while pending and len(seen) < limit:
        current = pending.pop(0)
        if current is not term and (current.op in _PRODUCTS or fused_product(current) is not None):
            yield current
            continue
        if current.op in _NEVER_BETWEEN:
            continue
        for inner in current.args:
            if (inner.number not in seen and inner.is_float) or inner.op in ("Split", "SplitSizes"):
                seen.add(inner.number)
                pending.append(inner)


def stored_problem(pair: Pair) -> Refusal | None:
    """Why the op cannot read the experts: too many products, permuted weights, shapes or routing that differ."""
    first, second = pair.first, pair.second
    if len(pair.others) > 1:
        return Refusal(
            f"{1 + len(pair.others)} products with expert weights read the tokens; gate and up are two at most.",
            first.term.node,
        )
    named = [(first, "first"), (second, "second"), *((up, "up") for up in pair.others)]
    for product, role in named:
        stored = product.stored
        if stored.op == "Permute":
            dims = list(stored.attrs)
            return Refusal(
                f"the weights of the {role} product are permuted by {dims}, which is not a transpose of their last two "
                "dims.",
                product.term.node,
                "Store the expert weights with the expert dim first.",
            )
        if len(stored.shape) != 3:
            return Refusal(
                f"the weights of the {role} product have {len(stored.shape)} dims; [E, N, H] has three.",
                product.term.node,
            )
    if first.stored.shape[0] != second.stored.shape[0]:
        return Refusal(
            f"the first product has {first.stored.shape[0]} experts and the second {second.stored.shape[0]}.",
            second.term.node,
        )
    if first.offs is not None and first.offs is not second.offs:
        return Refusal("the two grouped products have different offsets.", second.term.node)
    for up in pair.others:
        if up.stored.shape != first.stored.shape or up.weight.dtype != first.weight.dtype:
            return Refusal(
                f"gate and up have separate weights, {list(first.stored.shape)} {_dtype(first)} and "
                f"{list(up.stored.shape)} {_dtype(up)}; the op takes two of one shape and dtype.",
                up.term.node,
            )
        if up.offs is not first.offs or up.ids is not first.ids:
            return Refusal("gate and up are routed by different ids or offsets.", up.term.node)
    return None


def _dtype(product: Product) -> str:
    return str(product.weight.dtype).removeprefix("torch.")


def moved(term: Term) -> Iterator[Term]:
    """``term`` and what it is moved from, up to and including the first term that is not movement."""
    while True:
        yield term
        if term.op not in (*MOVES, "Rows"):
            return
        term = term.args[0]


def divide(a: Any, b: Any) -> Any:
    """a / b if that is exact (also for symbolic sizes), else ``None``."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else (0 if a == 0 else None)
    quotient = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    return None if sympy.denom(quotient) != 1 else size(quotient)
