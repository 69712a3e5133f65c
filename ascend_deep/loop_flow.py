"""Where the values that a part of a forward takes come from: which statements before it, and which arguments."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep.loop_reads import Left, Reader, Reads, is_simple
from ascend_deep.loop_regions import Solved, draw, run
from ascend_deep.loop_runs import Record, Rig, quiet
from ascend_deep.loop_source import inlined, loads, stores

__all__ = ["reads"]

_PLAIN = (Tensor, torch.Size, nn.Module, torch.Generator)


def reads(rig: Rig, s: Solved, records: Sequence[Record]) -> tuple[Reads, list[float]] | str:
    """What the part reads that has to be watched and the numbers in its code; or a sentence why it must be left."""
    record = records[0]
    values = s.part.values(record)
    if values is None:
        return "its experts are computed elsewhere for some numbers of tokens."
    function, name = rig.source.function, rig.source.self_name
    block, r = s.part.block, s.roles
    own = [n for i, n in enumerate(block.statements[s.part.start : s.part.end], s.part.start) if i not in s.part.kept]
    taken = [values[n] for n in (r.x, r.idx, r.weights, r.base, *r.counts) if n is not None and n in values]
    others = {n for n in s.part.inputs if n != name and not _is_role(values.get(n), taken)}
    others -= {r.x, r.idx, r.weights, r.base, *r.counts}
    before, arguments = _before(rig, s, record, others, taken)
    tokens = _tokens(rig, s, record, taken)
    foreign = sorted(arguments - tokens - {name})
    if foreign:
        return (
            f"the code around its experts depends on the argument {foreign[0]!r}, which may be another at every call."
        )
    for n in sorted(others):
        value = values.get(n)
        items = value if isinstance(value, (list, tuple)) else [value]
        if not all(is_simple(v) or isinstance(v, _PLAIN) or callable(v) or _is_array(v) for v in items):
            return f"its code reads {n!r}, a {type(value).__name__}, which may change without being noticed."
    varying = {n for n in others if _varies(n, s, records)}
    sides = {n for p in rig.parameters.values() for n in p.shape}
    reader = Reader(rig.module, sides)
    try:
        for family in s.assignment.families:
            for held in family.names:
                top = held.split(".")[0]
                if "." in held:
                    reader.whole(rig.module.get_submodule(top))
        given = {n for n in s.part.inputs if n != name}
        reader.statements(inlined([*before, *own]), function, {name: rig.module}, given)
        for node in (n for o in own for n in ast.walk(o)):
            test = node if isinstance(node, ast.Compare) else getattr(node, "test", None)
            for n in sorted(loads([test]) & varying if isinstance(test, ast.AST) else ()):
                return f"its code tests {n!r}, which depends on the size of the batch or the sequence."
        reader.ran(lambda: _once(rig, s, values))
    except Left as error:
        return str(error)
    return reader.reads, list(reader.numbers)


def _once(rig: Rig, s: Solved, values: Any) -> None:
    """Run the part on random values."""
    d = draw(values, s.part, s.roles, s.assignment.experts, s.assignment.offset, 51)
    with torch.no_grad(), quiet(rig.module, rig.module.training):
        run(rig, s.part, d.values)


def _is_array(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "numpy"


def _is_role(value: Any, taken: Sequence[Any]) -> bool:
    """Whether a value is the tokens, ids or weights in another shape."""
    return isinstance(value, Tensor) and any(
        isinstance(t, Tensor) and (value is t or (value.numel() == t.numel() > 0 and value.dtype == t.dtype
                                                  and torch.equal(value.flatten(), t.flatten())))
        for t in taken
    )  # fmt: skip


def _varies(name: str, s: Solved, records: Sequence[Record]) -> bool:
    found = []
    for record in records:
        values = s.part.values(record)
        if values is not None and isinstance(values.get(name), (bool, int, float, tuple)):
            found.append(values[name])
    return any(v != found[0] for v in found)


def _tokens(rig: Rig, s: Solved, record: Record, taken: Sequence[Any]) -> set[str]:
    """Arguments that are the tokens, or another of the roles; the first if the tokens are not given as they are."""
    at_first = record.values.get(rig.source.blocks[0].marks[0], {})
    names = _arguments(rig)
    same = {n for n in names if _is_role(at_first.get(n), taken)}
    return same | (
        {names[1]} if len(names) > 1 and not any(_is_role(at_first.get(n), taken[:1]) for n in same) else set()
    )


def _arguments(rig: Rig) -> list[str]:
    a = rig.source.tree.args
    every = (*a.posonlyargs, *a.args, *([a.vararg] if a.vararg else []), *a.kwonlyargs, *([a.kwarg] if a.kwarg else []))
    return [x.arg for x in every]


def _before(
    rig: Rig, s: Solved, record: Record, names: set[str], taken: Sequence[Any]
) -> tuple[list[ast.stmt], set[str]]:
    """Statements before the part that ``names`` come from, and the arguments that they need."""
    needed, found = set(names), []
    block, index = s.part.block, s.part.start
    while True:
        for i in range(index - 1, -1, -1):
            statement = block.statements[i]
            values = record.values.get(block.marks[i + 1], {})
            needed = {n for n in needed if not _is_role(values.get(n), taken)}
            bound = stores([statement]) & needed
            if not bound and not (_may_write(statement) and loads([statement]) & needed):
                continue
            found.append(statement)
            if isinstance(statement, ast.Assign):
                needed -= bound
            needed |= loads([statement])
            values = record.values.get(block.marks[i], {})
            needed = {n for n in needed if n == rig.source.self_name or not _is_role(values.get(n), taken)}
        if block.parent is None:
            return found[::-1], needed & set(_arguments(rig))
        block, index = block.parent


def _may_write(statement: ast.stmt) -> bool:
    """Whether it may write into what it reads: a call for its effect, an assignment to elements, a block."""
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if any(isinstance(n, (ast.Subscript, ast.Attribute)) for t in targets for n in ast.walk(t)):
            return True
        return any(
            isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr.endswith("_")
            for n in ast.walk(statement)
        )
    return not isinstance(statement, (ast.Return, ast.Pass))
