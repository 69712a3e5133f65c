"""The part of a forward that is a mixture of experts: where it begins and ends, and which of its values is which.

A part is a run of statements in one block. It is executed alone, on random tokens, ids and weights of our choosing, and
compared with the mixture of experts that its parameters would give. Structure only says which runs to try: those that
contain every statement that reads an expert, and after which one tensor is all that is used.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ascend_deep.loop_families import Family
from ascend_deep.loop_masks import mask_of
from ascend_deep.loop_runs import Record, Rig, quiet
from ascend_deep.loop_solve import Assignment, assignments, expected, preactivation
from ascend_deep.loop_source import Block, forbidden, loads, read_later, stores

__all__ = ["CLOSE", "Draw", "Part", "Roles", "Solved", "candidates", "draw", "solve"]

CLOSE = 5e-6
"""Largest difference in f64, of the largest value: modules may round to f32 inside. Members differ by far more."""


@dataclass(frozen=True)
class Roles:
    """Names of the values that a part takes and gives.

    Attributes:
        x: tokens [.., H].
        idx: expert ids, one row of ``k`` per token in any shape.
        weights: of the same number of elements, or ``None`` if nothing is weighted.
        out: the result, as large as ``x``.
        k: choices per token.
        on_input: weights multiply the tokens before the first product.
        counts: values that are the number of choices of each expert, whenever the part begins.
        base: a value of the size of ``x`` that the result is added to, or ``None``.
        mask: the ids are a mask [.., E] with at most one one per row (``loop_masks``); ``k`` is 1.
    """

    x: str
    idx: str
    weights: str | None
    out: str
    k: int
    on_input: bool = False
    counts: tuple[str, ...] = ()
    base: str | None = None
    mask: bool = False


@dataclass(frozen=True)
class Part:
    """Statements ``start`` to ``end`` of a block, without those that are ``kept``, as a function; see ``Source.part``.

    Statements are kept that compute something else in between (shared experts). ``first`` are these and others that
    compute something which is read later too; they run before the replacement.
    """

    block: Block
    start: int
    end: int
    inputs: tuple[str, ...]
    out: str
    run: Callable[..., Any]
    kept: tuple[int, ...] = ()
    first: tuple[int, ...] = ()

    def values(self, record: Record) -> dict[str, Any] | None:
        """What the part starts with in a run; ``None`` if the run did not come here."""
        marks = self.block.marks
        if marks[self.start] not in record.values or marks[self.end] not in record.values:
            return None
        values = dict(record.values[marks[self.start]])
        for index in self.kept:
            after = record.values[marks[index + 1]]
            values |= {n: after[n] for n in stores([self.block.statements[index]]) if n in after}
        return values

    def masks(self, record: Record) -> set[str]:
        """Those of its inputs that hold at most one one in each row."""
        marks = [self.block.marks[self.start], *(self.block.marks[i + 1] for i in self.kept)]
        return {n for n in self.inputs if any((m, n) in record.single for m in marks)}

    def result(self, record: Record) -> Any:
        """What it ended with."""
        return record.values[self.block.marks[self.end]][self.out]


@dataclass(frozen=True)
class Solved:
    """A part, its roles, and the experts that it computes."""

    part: Part
    roles: Roles
    assignment: Assignment
    member: Any


@dataclass(frozen=True)
class Draw:
    """Random values of the roles, in the shapes of the part's values and flat, and everything that the part takes."""

    values: Mapping[str, Any]
    x: Tensor
    idx: Tensor
    weights: Tensor
    base: Tensor | None


# -- which statements -------------------------------------------------------------------------------------------------
def candidates(rig: Rig, record: Record) -> Iterator[Part | str]:
    """Parts that hold every read of an expert: innermost block first, few statements first. Sentences say why not."""
    blocks = rig.source.blocks
    every = {p for patterns in record.touched.values() for p in patterns}
    for block in sorted(blocks, key=lambda b: -b.depth):
        reads = [record.reads(block, i, blocks) for i in range(len(block.statements))]
        anchors = [i for i, r in enumerate(reads) if r]
        if not anchors or set().union(*reads) != every:
            continue
        first, last = anchors[0], anchors[-1]
        others = tuple(i for i in range(first, len(block.statements)) if record.reads_others(block, i, blocks))
        for keep in (False, True) if others else (False,):
            for end in range(last + 1, len(block.statements) + 1):
                for start in range(first, -1, -1):
                    found = part(rig, record, block, start, end, others if keep else ())
                    if found is not None and (not keep or isinstance(found, str) or found.kept):
                        yield found


def part(rig: Rig, record: Record, block: Block, start: int, end: int, keep: tuple[int, ...] = ()) -> Part | str | None:
    """The part if it can be one; a sentence if it is excluded for a reason worth telling; else ``None``.

    Args:
        keep: numbers of statements to leave out, if they can move in front of the others.
    """
    before, after = (record.values.get(block.marks[i]) for i in (start, end))
    if before is None or after is None:
        return None
    kept = tuple(i for i in keep if start <= i < end)
    statements: list[Any] = []
    for index in range(start, end):
        statement = block.statements[index]
        if index not in kept:
            statements.append(statement)
        elif (
            loads([statement]) & stores(statements)
            or stores([statement]) & (loads(statements) | stores(statements))
            or forbidden([statement]) is not None
        ):
            return None
    given = {n for i in kept for n in stores([block.statements[i]])}
    later = [*block.statements[end:], *block.after]
    live = {n for n in stores(statements) if read_later(n, later)}
    copied: tuple[int, ...] = ()
    if not live or len(live) > 1:
        live |= _written(statements, before, after, later)
    if len(live) > 1:
        copied, live = _copied(block, start, end, kept, live, after)
    if len(live) != 1:
        return None
    out = live.pop()
    if not isinstance(after.get(out), Tensor) or not after[out].is_floating_point():
        return None
    wrong = forbidden(statements)
    if wrong is not None:
        return f"the code around its experts {wrong}, which the op would not do."
    inputs = tuple(sorted(loads([*statements, ast.Name(out, ast.Load())]) & (before.keys() | given)))
    first = tuple(sorted((*kept, *copied)))
    return Part(block, start, end, inputs, out, rig.source.part(statements, inputs, out), kept, first)


def _written(statements: list[Any], before: Mapping[str, Any], after: Mapping[str, Any], later: list[Any]) -> set[str]:
    """Tensors that the statements were given and wrote into, and that are read later."""
    return {
        n
        for n in loads(statements) - stores(statements)
        if isinstance(before.get(n), Tensor) and after.get(n) is not before[n] and read_later(n, later)
    }


def _copied(
    block: Block, start: int, end: int, kept: tuple[int, ...], live: set[str], after: Mapping[str, Any]
) -> tuple[tuple[int, ...], set[str]]:
    """Statements that also compute something that is read later, a mask of the choices say: they stay as well.

    Returns:
        Their numbers, and the names that remain to be computed by the part.
    """
    copied: list[int] = []
    others: list[Any] = []
    names: set[str] = set()
    for index in range(start, end):
        statement = block.statements[index]
        if index in kept:
            continue
        own = stores([statement])
        if own & live and not loads([statement]) & stores(others) and not own & stores(others):
            copied.append(index)
            names |= own
        else:
            others.append(statement)
    return tuple(copied), live - (names - stores(others))


# -- which values -----------------------------------------------------------------------------------------------------
def roles(
    values: Mapping[str, Any], found: Part, dtype: torch.dtype, hidden: int, experts: int, offset: int,
    masks: Collection[str] = (),
) -> Iterator[Roles]:  # fmt: skip
    """Every choice of values, among those that the part takes, that has the right shapes and dtypes.

    Args:
        dtype: of the parameters and so of the tokens.
        masks: names of values that are masks with at most one one per row.
    """
    copied = [found.block.statements[i] for i in found.first if i not in found.kept]
    names = [n for n in found.inputs if n not in stores(copied)]  # these have another value where the op is called
    tensors = {n: values[n] for n in names if isinstance(values.get(n), Tensor) and values[n].dim() > 0}
    for x, tokens in tensors.items():
        if tokens.dtype != dtype or tokens.shape[-1] != hidden or tokens.dim() < 2:
            continue
        rows = tokens.numel() // hidden
        for idx, ids in tensors.items():
            if ids.dtype not in (torch.int64, torch.int32) or ids.numel() % rows or ids.numel() == 0:
                continue
            counts = tuple(
                n
                for n, v in tensors.items()
                if n != idx
                and tuple(v.shape) == (experts,)
                and torch.equal(v.long(), torch.bincount(ids.flatten(), minlength=experts))
            )
            floats = [n for n, v in tensors.items() if v.is_floating_point() and n not in counts]
            can_be_mask = idx in masks and offset == 0 and ids.shape[-1] == experts and ids.numel() == rows * experts
            for k, mask in (
                ((1, True), (ids.numel() // rows, False)) if can_be_mask else ((ids.numel() // rows, False),)
            ):
                if k > experts + offset and offset == 0:
                    continue
                for weights in [n for n in floats if n != x and tensors[n].numel() == rows * k] + [None]:
                    plain = Roles(x, idx, weights, found.out, k, counts=counts, mask=mask)
                    forms = [plain] if weights is None else [plain, replace(plain, on_input=True)]
                    yield from forms
                    for base in floats:
                        if base not in (x, weights) and tensors[base].numel() == tokens.numel():
                            yield from (replace(form, base=base) for form in forms)


def draw(
    values: Mapping[str, Any],
    found: Part,
    r: Roles,
    experts: int,
    offset: int,
    seed: int,
    scale: float = 1.0,
    ids: str = "distinct",
    weight: float = 1.0,
) -> Draw:
    """Random tokens, ids and weights in the shapes and dtypes of ``values``; all other floats are random too.

    Args:
        scale: of the tokens.
        weight: of the weights.
        ids: ``distinct`` in each row, some experts left out; ``one``: every token has the same; ``repeated``: the
            first choice twice; ``above``, ``below``: one choice of each row is no expert, greater or -1 (in every
            other row if there is one choice).
    """
    g = torch.Generator().manual_seed(seed)
    new = {
        n: torch.randn(v.shape, generator=g).to(v.dtype)
        if isinstance(v, Tensor) and v.is_floating_point()
        else (v.clone() if isinstance(v, Tensor) else v)
        for n, v in ((n, values[n]) for n in found.inputs)
    }
    hidden = new[r.x].shape[-1]
    rows = new[r.x].numel() // hidden
    x = scale * torch.randn(rows, hidden, generator=g).to(new[r.x].dtype)
    used = max(r.k, experts - experts // 3)
    idx = torch.stack([torch.randperm(used, generator=g)[: r.k] for _ in range(rows)]) if rows else torch.zeros(0, r.k)
    idx = (idx + (seed % (experts - used + 1)) + offset).long()
    if ids == "one":
        idx = idx[:1].expand(rows, r.k).clone()
    elif ids == "repeated" and r.k > 1:
        idx[:, 1] = idx[:, 0]
    elif ids == "above":
        idx[:, 0] = experts + offset
    elif ids == "below":
        idx[:: 2 if r.k == 1 else 1, 0] = -1
    weights = torch.ones(rows, r.k, dtype=x.dtype)
    if r.weights is not None:
        signs = torch.where(torch.rand(rows, r.k, generator=g) < 0.3, -1.0, 1.0)
        weights = (weight * (0.3 + torch.rand(rows, r.k, generator=g)) * signs).to(new[r.weights].dtype)
    base = new[r.base].reshape(rows, hidden).clone() if r.base is not None else None
    return _placed(new, r, x, idx, weights, base, experts)


def _placed(
    new: dict[str, Any], r: Roles, x: Tensor, idx: Tensor, weights: Tensor, base: Tensor | None, experts: int
) -> Draw:
    """The roles' values put among the others, in their own shapes and dtypes."""
    new[r.x] = x.reshape(new[r.x].shape).clone()
    ids: Tensor = new[r.idx]
    new[r.idx] = mask_of(idx, experts, ids) if r.mask else idx.to(ids.dtype).reshape(ids.shape)
    if r.weights is not None:
        new[r.weights] = weights.reshape(new[r.weights].shape).clone()
    if base is not None and r.base is not None:
        new[r.base] = base.reshape(new[r.base].shape).clone()
    for name in r.counts:
        counted = torch.bincount(idx.flatten().clamp(min=0), minlength=experts)[:experts]
        new[name] = counted.to(new[name].dtype)
    return Draw(new, x, idx, weights, base)


def run(rig: Rig, found: Part, values: Mapping[str, Any]) -> Tensor:
    """The part's result, [T, H].

    Raises:
        Exception: whatever its statements raise.
    """
    arguments = {n: v for n, v in values.items() if n in found.inputs and n != rig.source.self_name}
    out = found.run(rig.module, **arguments)
    if not isinstance(out, Tensor):
        raise TypeError("no tensor")
    return out


# -- what it computes -------------------------------------------------------------------------------------------------
def solve(
    rig: Rig, record: Record, found: Part, used: list[Family], members: Callable[[bool], list[Any]], scales: list[float]
) -> Solved | None:
    """Roles, assignment and activation such that the part is that mixture of experts, or ``None``."""
    values = found.values(record)
    assert values is not None
    after = found.result(record)
    hidden = after.shape[-1] if after.dim() else 0
    ways = list(assignments(used, hidden))
    if not ways:
        return None
    experts, offset = ways[0].experts, ways[0].offset
    for r in roles(values, found, rig.dtype, hidden, experts, offset, found.masks(record)):
        if values[r.x].numel() != after.numel() or (after.dim() != 2 and after.shape != values[r.x].shape):
            continue
        if not _row_by_row(rig, found, values, r, experts, offset, hidden):
            continue
        left: list[tuple[Assignment, Any]] | None = None
        for seed, scale in enumerate(scales):
            d = draw(values, found, r, experts, offset, seed, scale)
            try:
                with torch.no_grad(), quiet(rig.module, rig.module.training):
                    got = run(rig, found, d.values).reshape(-1, hidden)
            except Exception:
                left = []
                break
            left = _fits(rig, r, d, got, left if left is not None else _every(ways, members))
            if not left:
                break
        if left:
            best = min(range(len(left)), key=lambda i: (left[i][1].limit is not None, i))
            return Solved(found, r, *left[best])
    return None


def _every(ways: list[Assignment], members: Callable[[bool], list[Any]]) -> list[tuple[Assignment, Any]]:
    return [(a, m) for a in ways for m in members(a.gated) if len(a.w13) == 1 or not m.interleaved]


def _row_by_row(
    rig: Rig, found: Part, values: Mapping[str, Any], r: Roles, experts: int, offset: int, hidden: int
) -> bool:
    """Whether a token's result depends on its own values only, and on its ids: true of every mixture of experts.

    Cheaper than to compare with every member of the family, and wrong roles rarely pass.
    """
    first = draw(values, found, r, experts, offset, 51)
    second = draw(values, found, r, experts, offset, 52)
    other = (first.idx[0] - offset + 1) % experts + offset
    results = []
    try:
        with torch.no_grad(), quiet(rig.module, rig.module.training):
            for row in (None, first.idx[0], other):
                d = first
                if row is not None:
                    idx = torch.cat([row[None], second.idx[1:]])
                    x, weights = (
                        torch.cat([a[:1], b[1:]]) for a, b in ((first.x, second.x), (first.weights, second.weights))
                    )
                    base = None
                    if first.base is not None and second.base is not None:
                        base = torch.cat([first.base[:1], second.base[1:]])
                    d = _placed(dict(second.values), r, x, idx, weights, base, experts)
                results.append(run(rig, found, d.values).reshape(-1, hidden)[0])
    except Exception:
        return False
    return close(results[1], results[0]) and not close(results[2], results[0])


def _fits(rig: Rig, r: Roles, d: Draw, got: Tensor, left: list[tuple[Assignment, Any]]) -> list[tuple[Assignment, Any]]:
    """Those of ``left`` that agree on the first tokens, products shared between the members of an assignment."""
    fits, products = [], {}
    rows = range(min(3, d.x.shape[0]))
    for a, member in left:
        if id(a) not in products:
            scaled = (lambda t, j: d.x[t] * d.weights[t, j].to(d.x.dtype)) if r.on_input else (lambda t, j: d.x[t])
            products[id(a)] = [
                [preactivation(a, rig.parameters, int(d.idx[t, j]) - a.offset, scaled(t, j)) for j in range(r.k)]
                for t in rows
            ]
        good = True
        for t in rows:
            want = torch.zeros_like(d.x[t]) if d.base is None else d.base[t].clone()
            for j in range(r.k):
                expert = int(d.idx[t, j]) - a.offset
                y = a.w2.of(rig.parameters, expert) @ member.apply(products[id(a)][t][j], a.gated)
                y = y + a.b2.of(rig.parameters, expert) if a.b2 else y
                want += y if r.on_input else y * d.weights[t, j].to(y.dtype)
            if not close(got[t], want):
                good = False
                break
        if good:
            fits.append((a, member))
    return fits


def close(got: Tensor, want: Tensor, tolerance: float = CLOSE) -> bool:
    """Equal up to ``tolerance`` of the largest wanted value. NaN is never close."""
    if got.shape != want.shape:
        return False
    if want.numel() == 0:
        return True
    got, want = got.detach(), want.detach()
    error = float((got.double() - want.double()).abs().max())
    return error <= tolerance * float(want.double().abs().max())


def reference(rig: Rig, s: Solved, d: Draw) -> Tensor:
    """What the part should give on a draw, [T, H]."""
    out = expected(s.assignment, s.member, rig.parameters, d.x, d.idx, d.weights, s.roles.on_input)
    return out if d.base is None else out + d.base
