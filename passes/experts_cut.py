"""Where the experts of a MoE layer begin and end: the cut that the grouped and the batched recogniser share.

Experts are two products with a small function between them. Three forms are known, by how a row meets its expert:

grouped  rows are sorted by expert, both products are grouped GEMMs over the same offsets;
batched  each row gathers the weights of its expert, both products are batched over rows;
dense    every expert runs on every token, and a router score that is zero for the experts not chosen weighs them.

From the second product the first one, the stored weights, the expert ids, the tokens, the biases and the routing
weights are found backwards, and the sum over a token's experts forwards. Only structure that says *where* is read here;
*what* the block computes is decided by running it (``experts_family.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from ascend_deep.passes._types import Refusal
from ascend_deep.passes.experts_products import MOVES, Pair, Product, arrangements, divide, moved, stored_problem
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.normal_form import Term, size
from ascend_deep.passes.region import Region, slice_region

__all__ = ["between", "bias_role", "cut_routed", "outputs_of", "read_by", "settle"]


# What may happen to the rows of the second product on their way to the sum over a token's experts.
_ON_THE_WAY = frozenset(
    f"aten.{name}"
    for name in (
        "mul", "div", "add", "masked_fill", "where", "index", "index_select", "gather", "index_copy", "index_put",
        "scatter", "view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "permute",
        "transpose", "t", "_to_copy", "to", "type_as", "clone", "contiguous", "expand", "select", "slice",
    )
)  # fmt: skip
_SUMS = frozenset(
    f"aten.{name}"
    for name in ("sum", "index_add", "scatter_add", "index_put", "bmm", "matmul", "baddbmm", "einsum", "mm")
)
_OTHER_REDUCTIONS = frozenset(
    f"aten.{name}" for name in ("mean", "amax", "amin", "max", "min", "prod", "median", "logsumexp", "scatter_reduce")
)


def cut_routed(view: GraphView, name: str, pair: Pair) -> Sequence[Region] | Refusal:
    """The regions of a grouped or batched block, largest first."""
    refusal = stored_problem(pair)
    if refusal is not None:
        return refusal
    # Ids of other ranks are clamped before they gather weights, and masked where they are compared: the block then
    # reads the ids as they were. A block that only clamps reads the clamped ones.
    routed = [_expert_ids(pair.first, clamps) for clamps in (True, False)]
    found = [ids for ids in dict.fromkeys(routed) if ids is not None]
    tried = [_cut_at(view, name, turned, *ids) for turned in arrangements(pair) for ids in found]
    if not tried:
        return Refusal("no tensor of expert ids was found that puts rows and experts together.", pair.second.term.node)
    return [region for cut in tried if not isinstance(cut, Refusal) for region in cut] or tried[0]


def _cut_at(view: GraphView, name: str, pair: Pair, ids: Term, slots: Any) -> Sequence[Region] | Refusal:
    """The regions that begin at ``ids`` [.., K]."""
    first, second = pair.first, pair.second
    rows = ids.numel
    tokens = divide(rows, slots)
    hidden = divide(second.term.numel, rows)
    if tokens is None or hidden is None:
        return Refusal(
            f"the second product has {second.term.numel} elements for {rows} pairs of token and expert.",
            second.term.node,
        )
    x = _moved_tokens(first.rows, tokens * hidden, hidden, ids)
    if x is None:
        *_, last = moved(first.rows)
        name = last.op.removeprefix("aten.")
        return Refusal(f"the tokens that enter the first product were not found behind {name}.", first.term.node)
    return _regions(view, name, pair, {"x": x, "idx": ids}, tokens, hidden, rows, slots)


def _regions(
    view: GraphView, name: str, pair: Pair, leaves: Mapping[str, Term], tokens: Any, hidden: Any, rows: Any, slots: Any
) -> Sequence[Region] | Refusal:
    """Find what is still missing (biases, routing weights, the sum) and slice.

    Args:
        leaves: the inputs known so far, "x" and "idx".
        tokens, hidden, rows: number of tokens, hidden size, rows of the second product.
        slots: experts per token.
    """
    first, second = pair.first, pair.second
    outputs = outputs_of(view, second, tokens, hidden, rows, leaves["x"])
    if isinstance(outputs, Refusal):
        return outputs
    found: dict[str, Term] = dict(leaves)
    problem = _frontier(view, pair, outputs[0], rows, slots, found)
    if problem is not None:
        return problem
    if "weights" not in found:
        return Refusal(f"the routing weights were not found: no tensor of {rows} elements scales the rows.", outputs[0])
    order = {
        "x": found["x"],
        "idx": found["idx"],
        "weights": found["weights"],
        "w13": first.stored,
        "b13": found.get("b13"),
        "w2": second.stored,
        "b2": found.get("b2"),
        "w3": pair.others[0].stored if pair.others else None,
        "b3": found.get("b3"),
    }
    inputs = read_by(view, outputs[0], {role: term for role, term in order.items() if term is not None})
    if isinstance(inputs, Refusal):
        return inputs
    compute = str(first.weight.dtype).removeprefix("torch.")
    if not isinstance(slots, int) and len(found["idx"].shape) != 2:
        return Refusal("the number of experts per token is only known at run time, and ids are not [T, K].", outputs[0])
    columns = slots if isinstance(slots, int) else 0  # 0: as many as idx has
    facts = {"kind": first.kind, "slots": columns, "compute": compute}
    cuts = [slice_region(view, name, inputs, [out], facts) for out in outputs]
    good = [c for c in cuts if isinstance(c, Region)]
    return good or next(c for c in cuts if isinstance(c, Refusal))


def read_by(view: GraphView, out: fx.Node, roles: Mapping[str, Term]) -> dict[str, fx.Node] | Refusal:
    """The node of each role that the block itself reads: a model may compute one value twice.

    Of several copies of one value (a clone before each of two views) it is the one that the others are made from.
    """
    leaves = {term.number: role for role, term in roles.items()}
    found: dict[str, fx.Node] = {}
    seen: set[fx.Node] = set()
    pending = [out]
    while pending:
        node = pending.pop()
        if node in seen or (view.tensor(node) is None and op_name(node) == ""):
            continue
        seen.add(node)
        role = leaves.get(view.terms.term(node).number)
        if role is not None:
            first = found.setdefault(role, node)
            if first is not node:
                found[role] = _common(view, first, node)
        else:
            pending.extend(node.all_input_nodes)
    for role in roles:
        if role not in found:
            return Refusal(f"the block does not read the {role} that its products belong to.", out)
    return {role: found[role] for role in roles}


def _common(view: GraphView, a: fx.Node, b: fx.Node) -> fx.Node:
    """The node of their value that both are made from; ``a`` if there is none."""
    value = view.terms.term(a)

    def origins(node: fx.Node) -> list[fx.Node]:
        chain = [node]
        while True:
            same = [n for n in chain[-1].all_input_nodes if view.tensor(n) is not None and view.terms.term(n) is value]
            if not same:
                return chain
            chain.append(same[0])

    others = set(origins(b))
    return next((node for node in origins(a) if node in others), a)


# -- leaves ---------------------------------------------------------------------------------------------------------
def _expert_ids(first: Product, clamps: bool) -> tuple[Term, Any] | None:
    """The ids [.., K] that route rows to experts, and K (an expression if it is symbolic).

    Args:
        clamps: look through clamps of the ids.
    """
    slots = None
    start = first.ids
    if start is None:
        order = next((t for t in _index_terms(first.rows) if t.op == "Order"), None)
        if order is None and first.offs is not None:
            order = next((t for t in _ints(first.offs) if t.op in ("Order", "Sorted", "Offsets")), None)
        if order is None:
            return None
        start = order.args[0]
        division = next((t for t in _index_terms(first.rows) if t.op == "IntDiv"), None)
        slots = division.attrs[0] if division is not None else None
    ids = start
    while (ids.op in ("Reshape", "Cast", "Sorted") or (clamps and ids.op.startswith("aten.clamp"))) and ids.args:
        if ids.op == "Reshape" and ids.nodes and slots is None and len(ids.shape) == 1 and not ids.args[0].nodes:
            break
        ids = ids.args[0]
    if ids.dtype is None or ids.is_float or not ids.nodes:
        return None
    if slots is None:
        slots = ids.shape[-1] if len(ids.shape) > 1 else 1
    return (ids, slots) if slots != 0 else None


def _index_terms(rows: Term) -> Iterator[Term]:
    """Integer terms that decide which token a row is, outermost gather first."""
    term = rows
    while True:
        if term.op == "Rows":
            yield from _ints(term.args[1])
        if term.op in (*MOVES, "Rows"):
            term = term.args[0]
        elif term.op == "aten.mul":
            term = max(term.args, key=lambda t: len(t.shape) and t.shape[-1] != 1)
        else:
            return


def _ints(term: Term, limit: int = 24) -> Iterator[Term]:
    for inner, _ in zip(term.walk(), range(limit), strict=False):
        yield inner


def _moved_tokens(rows: Term, elements: Any, hidden: Any, ids: Term) -> Term | None:
    """The tokens [.., H] of which ``rows`` are copies, or ``None``."""
    term = rows
    while True:
        routed = term.op == "Rows" and term.args[1].mentions(ids)
        if term.op == "aten.mul" and (term.numel != elements or _leads_to_rows(term, ids)):
            # Routing weights on the input: the wider operand is the tokens'.
            wide = [t for t in term.args if t.numel == term.numel and t.shape and t.shape[-1] != 1]
            if not wide:
                return None
            if term.numel == elements and not any(t.shape[-1:] == (1,) or t.op == "Expand" for t in term.args):
                break  # a product that makes the tokens, a norm's weight for one, is not a routing weight
            term = wide[0]
        elif routed or (term.op in (*MOVES, "Rows") and (term.numel != elements or _leads_to_rows(term, ids))):
            term = term.args[0]
        else:
            break
    while term.op in ("Reshape",) and (not term.nodes or term.args[0].shape[-1:] == (hidden,)):
        term = term.args[0]
    fits = term.numel == elements and term.shape[-1:] == (hidden,) and term.nodes
    return term if fits else None


def _is_weighed(term: Term, ids: Term) -> bool:
    """True for rows times a column that was made from the ids, or from what they were chosen from."""
    while ids.op in MOVES:
        ids = ids.args[0]
    origins = [ids, *(ids.args[:1] if ids.op in ("TopIds", "aten.argmax") else ())]
    return any(t.mentions(o) for t in term.args if t.shape[-1:] == (1,) for o in origins)


def _leads_to_rows(term: Term, ids: Term) -> bool:
    """True if below movement there is a product with routing weights, or a gather by ``ids`` below such a product."""
    pending = [term]
    while pending:
        term = pending.pop()
        if term.op == "Rows" and term.args[1].mentions(ids):
            return True
        if term.op in MOVES:
            pending.append(term.args[0])
        elif term.op == "aten.mul":
            if _is_weighed(term, ids):
                return True
            pending.extend(t for t in term.args if t.numel == term.numel and t.shape[-1:] != (1,) and _is_moved(t))
    return False


def _is_moved(term: Term) -> bool:
    return term.op in (*MOVES, "Rows")


def _weights(term: Term, rows: Any, slots: Any, ids: Term) -> Term | None:
    """The routing weights [.., K] of which ``term`` is a moved copy."""
    gathers = [
        t for t in _chain(term) if (t.op == "Rows" and t.args[1].mentions(ids)) or (t.op == "Mask" and t.mentions(ids))
    ]
    if gathers:
        term = gathers[-1].args[0]
    while term.op == "Reshape" and (not term.nodes or term.args[0].numel == rows):
        term = term.args[0]
    while term.op in ("Expand",) and term.args[0].numel == rows:
        term = term.args[0]
    return term if term.numel == rows and term.nodes else None


def _chain(term: Term) -> list[Term]:
    """``term`` and what it is moved from."""
    chain = []
    while term.op in (*MOVES, "Rows"):
        chain.append(term)
        term = term.args[0]
    return chain


def _frontier(
    view: GraphView, pair: Pair, out: fx.Node, rows: Any, slots: Any, found: dict[str, Term]
) -> Refusal | None:
    """Classify every tensor that the block reads beside tokens, ids and expert weights: biases, routing weights."""
    first, second = pair.first, pair.second
    table = view.terms
    ids = found["idx"]
    weighed = [product.weight for product in (first, second, *pair.others)]
    inside = between(view, pair.starts, out)
    before_second = between(view, pair.starts, second.term.nodes[0])
    on_the_way = itertools.takewhile(lambda t: t is not found["x"], moved(first.rows))
    product = next((t for t in on_the_way if t.op == "aten.mul"), None)
    if product is not None:
        for side in product.args:
            leaf = _weights(side, rows, slots, ids) if side.is_float and _is_narrow(side, product) else None
            if leaf is not None and "weights" not in found:
                found["weights"] = leaf
    for node in inside:
        for read in node.all_input_nodes:
            if read in inside:
                continue
            term = table.term(read)
            if not term.is_float or term is first.rows or term in weighed:
                continue
            bias = _bias(term, first.stored.shape[0])
            if bias is not None:
                role = bias_role(view, pair, node, before_second)
                if isinstance(role, Refusal):
                    return role
                if found.setdefault(role, bias) is not bias:
                    return Refusal(f"the block adds two different biases to its {role[1:]} product.", node)
            elif term.numel == rows and "weights" not in found:
                leaf = _weights(term, rows, slots, ids)
                if leaf is not None:
                    found["weights"] = leaf
    return None


def bias_role(view: GraphView, pair: Pair, node: fx.Node, before_second: set[fx.Node]) -> str | Refusal:
    """Which product the bias belongs to that ``node`` adds: "b13", "b2" or, with separate gate and up, "b3"."""
    if node not in before_second or node in pair.second.term.nodes:
        return "b2"
    if not pair.others:
        return "b13"
    gate = bool(between(view, pair.first.term.nodes, node))
    up = bool(between(view, pair.others[0].term.nodes, node))
    if gate == up:
        return Refusal("a bias is added after gate and up have met.", node)
    return "b13" if gate else "b3"


def _is_narrow(side: Term, product: Term) -> bool:
    return side.numel != product.numel or side.shape[-1:] == (1,) or side.op == "Expand"


def _bias(term: Term, experts: Any) -> Term | None:
    """The stored bias [E, n] of which ``term`` gathers rows."""
    for t in _chain(term):
        if t.op == "Rows" and len(t.args[0].shape) == 2 and t.args[0].shape[0] == experts and t.args[0].nodes:
            return t.args[0]
    return None


def between(view: GraphView, starts: Sequence[fx.Node], end: fx.Node) -> set[fx.Node]:
    """Nodes on a path from ``starts`` to ``end``, both included."""
    last = view.order[end]
    forward: set[fx.Node] = set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node in forward or view.order.get(node, last + 1) > last:
            continue
        forward.add(node)
        pending.extend(node.users)
    backward: set[fx.Node] = set()
    pending = [end]
    while pending:
        node = pending.pop()
        if node in backward or node not in forward:
            continue
        backward.add(node)
        pending.extend(node.all_input_nodes)
    return backward


# -- the sum --------------------------------------------------------------------------------------------------------
def outputs_of(
    view: GraphView, second: Product, tokens: Any, hidden: Any, rows: Any, x: Term
) -> list[fx.Node] | Refusal:
    """Where the block may end: the cast after the sum over a token's experts, and the sum itself."""
    wanted, wide = tokens * hidden, rows * hidden
    table = view.terms
    if second.kind == "dense" and second.term.numel == wanted:  # the product sums over experts as well
        return settle(view, second.term.nodes[0], (tokens, hidden), x)
    pending = list(second.term.nodes)
    seen: set[fx.Node] = set(pending)
    sums: list[fx.Node] = []
    others: list[str] = []
    passed: list[fx.Node] = []
    while pending:
        node = pending.pop(0)
        for user in node.users:
            name = op_name(user)
            if user in seen or view.tensor(user) is None:
                continue
            seen.add(user)
            elements = table.term(user).numel
            if name in _SUMS and elements == wanted and (name != "aten.index_put" or _accumulates(user)):
                sums.append(user)
            elif name in _ON_THE_WAY and elements == wide:
                passed.append(user)
                pending.append(user)
            elif name in _OTHER_REDUCTIONS and elements == wanted:
                others.append(f"they are combined by {name.removeprefix('aten.')}")
            elif elements == wide:
                others.append(f"{name.removeprefix('aten.')} is applied to them before")
    if not sums and wide == wanted and passed:  # one expert per token: there is nothing to sum
        return sorted(passed, key=view.order.__getitem__, reverse=True)
    if not sums:
        why = others[0] if others else "no sum over the experts of a token follows"
        return Refusal(f"the experts' outputs are not summed per token: {why}.", second.term.node)
    end = min(sums, key=view.order.__getitem__)
    return settle(view, end, (tokens, hidden), x)


def _accumulates(node: fx.Node) -> bool:
    return bool(node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False))


def settle(view: GraphView, end: fx.Node, flat: tuple[Any, Any], x: Term) -> list[fx.Node] | Refusal:
    """``end`` in a shape that can be emitted, and the cast of it if that is its only use; largest first."""
    table = view.terms
    good = (tuple(size(s) for s in flat), x.shape)
    while table.term(end).shape not in good:
        only = list(end.users)
        moved_only = len(only) == 1 and (table.term(only[0]).op == "Reshape" or table.term(only[0]) is table.term(end))
        if not moved_only:
            shape = list(table.term(end).shape)
            return Refusal(f"the sum over experts has the shape {shape}, not tokens × hidden.", end)
        end = only[0]
    users = list(end.users)
    if len(users) == 1 and table.term(users[0]).op == "Cast" and op_name(users[0]) != "aten.clone":
        return [users[0], end]
    return [end]
