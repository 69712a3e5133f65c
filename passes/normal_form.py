"""The normal form: what each node of a graph computes, written so that spellings of the same value look the same.

``ValueTable.term(node)`` gives a hash-consed ``Term``: two nodes that compute the same value in the same grad-mode and
autocast segment share one term, and a term points back to its nodes. The FX graph is not touched. Recognisers read
terms to find where a block begins and ends; what the block computes is decided by running it, so a rule that is too
eager costs a match and can never cause a wrong rewrite.

The rules are in ``rules.py``: *reading* rules turn a call into a term, *simplifying* rules replace a term by a smaller
one. Every simplifying rule removes at least one term, so they end.

Terms made by rules (arguments, then attributes):

=============  ======================================================================================================
Reshape        x; shape                      any view, flatten, squeeze, unsqueeze
Permute        x; dims                       permute, transpose, t
Expand         x; shape                      expand, repeat and repeat_interleave as far as they only repeat
Part           x; dim, start, step, length   slice, narrow, select, and the items of split, chunk and unbind
Cast           x; dtype                      a rounding step: it never vanishes unless the dtype stays the same
Gemm           a, b                          a [.., m, k] @ b [.., k, n]: mm, bmm, matmul, linear, addmm, baddbmm
Einsum         a, b; equation                einsum of two operands
GroupedGemm    a, b, offs                    a [S, k] @ b [E, k, n] with rows grouped by ``offs``
Sorted, Order  x; dim, descending, stable    values and permutation of a sort
TopValues      x; k, dim, largest            values of topk; TopIds: its indices
IntDiv         x; k                          floor division of integers by a constant
Range          ; n                           0 … n-1
Counts         ids; E                        how often each of 0 … E-1 occurs
Offsets        ids; E                        running sum of ``Counts``
Inverse        p                             inverse of the permutation ``p``
Rows           x, i                          x[i] along dim 0: index, index_select, embedding, gather with a row index
AddRows        base, i, src                  base with ``src`` added at rows ``i``: index_add, scatter_add, index_put
Mask           x, m; value                   x where m is False, ``value`` elsewhere
Size           ; expression                  a size
=============  ======================================================================================================

Any other call is a term of its ATen name whose attributes are all its other arguments, defaults included.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.purity import is_pure

__all__ = ["Call", "Term", "ValueTable", "numel"]


@dataclass(eq=False)
class Term:
    """One value.

    Attributes:
        op: name of the term, see the module.
        args: the values it is made of.
        attrs: everything else it depends on, hashable.
        shape: sizes, each an int or a sympy expression; ``()`` for what is not a tensor.
        dtype: dtype, or ``None`` for what is not a tensor.
        number: position in the table.
        nodes: the FX nodes that compute exactly this value, in graph order. Empty for a term that only a rule made.
    """

    op: str
    args: tuple[Term, ...]
    attrs: tuple[Any, ...]
    shape: tuple[Any, ...]
    dtype: torch.dtype | None
    number: int
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def node(self) -> fx.Node | None:
        """The first node that computes this value."""
        return self.nodes[0] if self.nodes else None

    @cached_property
    def numel(self) -> Any:
        """Number of elements, an int or a sympy expression."""
        return numel(self.shape)

    @property
    def is_float(self) -> bool:
        """True for a floating-point tensor."""
        return self.dtype is not None and self.dtype.is_floating_point

    def walk(self) -> Iterator[Term]:
        """This term and everything it is made of, each once, outermost first."""
        seen: set[int] = set()
        pending = [self]
        while pending:
            term = pending.pop()
            if term.number not in seen:
                seen.add(term.number)
                yield term
                pending.extend(reversed(term.args))

    def mentions(self, other: Term, limit: int = 64) -> bool:
        """True if ``other`` is among the nearest ``limit`` terms that this one is made of."""
        return any(term is other for term, _ in zip(self.walk(), range(limit), strict=False))

    def __repr__(self) -> str:
        inner = [f"%{a.number}" for a in self.args] + [_text(a) for a in self.attrs]
        return f"%{self.number} = {self.op}({', '.join(inner)})"


@dataclass(frozen=True)
class Call:
    """A call as reading rules see it: arguments by schema name with defaults, tensors as terms, sizes as values."""

    table: ValueTable
    node: fx.Node
    name: str
    args: dict[str, Any]
    shape: tuple[Any, ...]
    dtype: torch.dtype | None

    def dim(self, name: str = "dim", of: str = "self") -> int:
        """The argument ``name`` as a dimension counted from the front."""
        value, rank = self.args[name], len(self.args[of].shape)
        return int(value) % rank if rank else 0

    def make(self, op: str, args: Iterable[Term], attrs: Iterable[Any] = ()) -> Term:
        """A term of the shape and dtype of the call's result."""
        return self.table.make(op, tuple(args), tuple(attrs), self.shape, self.dtype)


class ValueTable:
    """Terms of the nodes of one graph, computed on demand.

    Args:
        view: the graph. It must not change while the table is in use.
    """

    def __init__(self, view: GraphView) -> None:
        from ascend_deep.passes import rules

        self.view = view
        self._reading = rules.READING
        self._simplifying = rules.SIMPLIFYING
        self._of: dict[fx.Node, Term] = {}
        self._known: dict[tuple[Any, ...], Term] = {}
        self._count = 0
        self._segment: Any = None  # modes of the node that is being read

    def term(self, node: fx.Node) -> Term:
        """The value of ``node``."""
        found = self._of.get(node)
        if found is not None:
            return found
        pending = [node]
        while pending:  # no recursion: a model is thousands of nodes deep
            current = pending[-1]
            if current in self._of:
                pending.pop()
                continue
            missing = [n for n in current.all_input_nodes if n not in self._of] if current.op == "call_function" else []
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            self._segment = self.view.modes.get(current)
            term = self._read(current)
            term.nodes.append(current)
            if len(term.nodes) > 1:
                term.nodes.sort(key=lambda n: self.view.order.get(n, 0))
            self._of[current] = term
        return self._of[node]

    def make(self, op: str, args: tuple[Term, ...], attrs: tuple[Any, ...], shape: tuple[Any, ...], dtype: Any) -> Term:
        """The term of these parts, simplified."""
        for rule in self._simplifying.get(op, ()):
            smaller = rule(self, args, attrs, shape, dtype)
            if smaller is not None:
                return smaller
        key = (op, tuple(a.number for a in args), attrs, shape, dtype, self._segment)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._new(op, args, attrs, shape, dtype)
        return found

    def show(self, nodes: Iterable[fx.Node]) -> str:
        """The normal form of ``nodes``, one line per term, for ``explain --normal-form``."""
        wanted = [self.term(n) for n in nodes]
        terms = {t.number: t for t in wanted}
        for term in wanted:
            for inner in term.walk():
                # What only rules made has no node; what has one was asked for, or is shown as an input.
                if not inner.nodes or inner in term.args:
                    terms.setdefault(inner.number, inner)
        lines = []
        for number in sorted(terms):
            term = terms[number]
            sizes = ", ".join(map(str, term.shape))
            kind = f"{str(term.dtype).removeprefix('torch.')}[{sizes}]" if term.dtype is not None else ""
            lines.append(f"{term!r:<72} {kind}".rstrip())
        return "\n".join(lines)

    # -- reading ----------------------------------------------------------------------------------------------------
    def _new(self, op: str, args: tuple[Term, ...], attrs: tuple[Any, ...], shape: Any, dtype: Any) -> Term:
        self._count += 1
        return Term(op, args, attrs, shape, dtype, self._count - 1)

    def _read(self, node: fx.Node) -> Term:
        value = self.view.val(node)
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            return self.make("Size", (), (size(value),), (), None)
        tensor = value if isinstance(value, torch.Tensor) else None
        shape = tuple(size(s) for s in tensor.shape) if tensor is not None else ()
        dtype = tensor.dtype if tensor is not None else None
        if node.op != "call_function" or not is_pure(node):
            return self._new(node.op, (), (node.name,), shape, dtype)
        name = op_name(node)
        rules = self._reading.get(name, ())
        if rules:
            call = Call(self, node, name, self._arguments(node), shape, dtype)
            for rule in rules:
                term = rule(call)
                if term is not None:
                    return term
        return self._generic(node, name, shape, dtype)

    def _generic(self, node: fx.Node, name: str, shape: Any, dtype: Any) -> Term:
        args: list[Term] = []

        def key(a: Any) -> Any:
            if isinstance(a, fx.Node):
                term = self._of[a]
                if term.op == "Size":
                    return term.attrs[0]
                args.append(term)
                return "%"
            if isinstance(a, (list, tuple)):
                return tuple(key(x) for x in a)
            if isinstance(a, (torch.SymInt, sympy.Expr)):
                return size(a)
            return a if isinstance(a, (int, float, str, bool, type(None))) else str(a)

        attrs = {k: key(v) for k, v in _bind(node).items()}
        if args and "dim" in attrs:
            attrs["dim"] = _from_front(attrs["dim"], len(args[0].shape))
        return self.make(name, tuple(args), tuple(attrs.items()), shape, dtype)

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        def value(a: Any) -> Any:
            if isinstance(a, fx.Node):
                term = self._of[a]
                return term.attrs[0] if term.op == "Size" else term
            if isinstance(a, (list, tuple)):
                return [value(x) for x in a]
            return size(a) if isinstance(a, torch.SymInt) else a

        return {k: value(v) for k, v in _bind(node).items()}


def _from_front(dim: Any, rank: int) -> Any:
    """Dims counted from the front; what is not an int stays."""
    if isinstance(dim, tuple):
        return tuple(_from_front(d, rank) for d in dim)
    return dim % rank if isinstance(dim, int) and not isinstance(dim, bool) and rank else dim


def _bind(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call by schema name, defaults filled in; for ``getitem`` and other functions by position."""
    if not isinstance(node.target, torch._ops.OpOverload):
        named = {str(i): a for i, a in enumerate(node.args)}
        return {**named, **node.kwargs}
    bound: dict[str, Any] = {}
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        elif i < len(node.args):
            bound[argument.name] = node.args[i]
        else:
            bound[argument.name] = argument.default_value
    return bound


def size(value: Any) -> Any:
    """A size as an int or a sympy expression; anything else unchanged."""
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    if isinstance(value, sympy.Expr) and value.is_Integer:
        return int(value)
    return value


def numel(shape: Iterable[Any]) -> Any:
    """Product of sizes, an int or a sympy expression; usable with ``==`` (structural, adds no guard)."""
    product: Any = 1
    for s in shape:
        product = product * size(s)
    return size(product)


def _text(a: Any) -> str:
    if isinstance(a, tuple):
        return "[" + ", ".join(_text(x) for x in a) + "]"
    return str(a)


Simplify = Callable[[ValueTable, "tuple[Term, ...]", "tuple[Any, ...]", "tuple[Any, ...]", Any], "Term | None"]
Read = Callable[[Call], "Term | None"]
GETITEM = operator.getitem.__name__
