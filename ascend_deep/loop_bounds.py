"""Decisions in the code of a loop that no run shows: tests of dtypes, devices and sizes, and computed bounds."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ascend_deep.loop_counts import Counts
from ascend_deep.loop_world import Left

__all__ = ["check_bounds", "check_tests"]

_BOUNDING = ("min", "max", "clamp", "clamp_", "topk", "narrow", "minimum", "maximum")
_MEMORY = (
    "is_contiguous", "stride", "storage_offset", "data_ptr", "untyped_storage", "_version", "is_leaf", "requires_grad",
    "grad_fn", "is_pinned", "is_shared",
)  # fmt: skip
"""What a tensor may be asked that says nothing of its values."""
_SIZES = ("shape", "size", "numel", "nelement", "ndim")


def check_tests(nodes: Sequence[ast.AST], given: set[str]) -> None:
    """Decisions by dtype, by mode, or by a size of what was given."""
    sized: set[str] = set()
    grown = True
    while grown:
        before = len(sized)
        for node in (n for s in nodes for n in ast.walk(s)):
            value: Any = None
            targets: list[ast.AST] = []
            if isinstance(node, ast.Assign):
                value, targets = node.value, list(node.targets)
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
                value, targets = node.value, [node.target]
            if value is None or not _has_size(value, given, sized):
                continue
            if isinstance(value, ast.Call) and not _is_size(value, given, sized):
                continue  # zeros(batch, ..): a tensor of that size
            sized |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        grown = len(sized) > before
    converted = {
        id(n) for s in nodes for i in ast.walk(s) if isinstance(i, ast.If) and _only_converts(i)
        for n in (i, *ast.walk(i.test))
    }  # fmt: skip
    counts = Counts(nodes, given)
    for node in (n for s in nodes for n in ast.walk(s)):
        if counts.looks_up(node) or counts.steps(node) or counts.cuts(node):
            raise Left("its code computes a factor or a decision from how many tokens there are.")
        if isinstance(node, ast.Attribute) and node.attr in _MEMORY and id(node) not in converted:
            raise Left(f"its code asks {node.attr!r} of a tensor, which says nothing of its values and may change.")
        tests: list[ast.AST] = [node] if isinstance(node, ast.Compare) else []
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            tests.append(node.test)
        if isinstance(node, ast.Match) and (_has_size(node.subject, given, sized) or counts.is_count(node.subject)):
            raise Left("its code tests how many tokens there are (a size of a batch or a sequence).")
        for test in tests:
            asked = (n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute))
            for n in asked if id(node) not in converted else ():
                if n in ("dtype", "is_floating_point"):
                    raise Left("its code tests a dtype.")
                if n in ("device", "is_cuda", "is_cpu", "is_meta", "get_device"):
                    raise Left("its code tests on which device it runs.")
            if counts.compares(test) or any(_has_size(part, given, sized) for part in _operands(test)):
                raise Left("its code tests how many tokens there are (a size of a batch or a sequence).")


def _only_converts(node: ast.If) -> bool:
    """``if x.dtype != w.dtype: x = x.to(w.dtype)``: the same in every dtype of which all things are."""
    return not node.orelse and all(
        isinstance(s, ast.Assign) and isinstance(s.value, ast.Call) and isinstance(s.value.func, ast.Attribute)
        and s.value.func.attr in ("to", "type_as", "contiguous") and isinstance(s.value.func.value, ast.Name)
        and [ast.unparse(t) for t in s.targets] == [s.value.func.value.id]
        for s in node.body
    )  # fmt: skip


def _operands(test: ast.AST) -> Iterator[ast.AST]:
    """The compared values, without comparisons with zero."""
    if isinstance(test, ast.Compare):
        if not any(isinstance(c, ast.Constant) and c.value == 0 and c.value is not False for c in test.comparators):
            yield from (test.left, *test.comparators)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _operands(value)
    elif isinstance(test, ast.UnaryOp):
        yield from _operands(test.operand)
    elif isinstance(test, ast.BinOp):
        yield test


def _is_size(node: ast.AST, given: set[str], sized: set[str]) -> bool:
    """``x.shape``, ``x.size(0)``, ``len(x)`` of something given, or a number made of it."""
    if isinstance(node, ast.Name):
        return node.id in sized
    if isinstance(node, ast.Attribute):
        return node.attr in _SIZES and isinstance(node.value, ast.Name) and node.value.id in given
    if isinstance(node, ast.Subscript):
        return _is_size(node.value, given, sized)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in ("len", "int", "min", "max", "float", "bool"):
            return any(_is_size(a, given, sized) or (isinstance(a, ast.Name) and node.func.id == "len"
                       and a.id in given) for a in node.args)  # fmt: skip
        return _is_size(node.func, given, sized)
    return False


def _has_size(node: ast.AST, given: set[str], sized: set[str]) -> bool:
    return any(_is_size(n, given, sized) for n in ast.walk(node))


def check_bounds(nodes: Sequence[ast.AST], known: Mapping[int, Any]) -> None:
    """Whole numbers that are computed from fixed ones, and then limit something: no run shows what they do."""
    fixed: set[str] = set()
    computed: set[str] = set()

    def is_fixed(node: ast.AST) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, (int, float))
        if isinstance(node, ast.Name) and node.id in fixed:
            return True
        if isinstance(node, ast.BinOp):
            return is_fixed(node.left) and is_fixed(node.right)
        if isinstance(node, ast.UnaryOp):
            return is_fixed(node.operand)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("int", "min", "max"):
            return all(is_fixed(a) for a in node.args)
        return id(node) in known

    def is_computed(node: ast.AST) -> bool:
        return any(
            (isinstance(n, ast.Name) and n.id in computed)
            or (isinstance(n, ast.BinOp) and is_fixed(n)
                and isinstance(n.op, (ast.LShift, ast.Pow, ast.Mult, ast.FloorDiv)))
            for n in ast.walk(node)
        )  # fmt: skip

    grown = True
    while grown:
        before = len(fixed) + len(computed)
        for node in (n for s in nodes for n in ast.walk(s)):
            if isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) for t in node.targets):
                names = {t.id for t in node.targets if isinstance(t, ast.Name)}
                if is_fixed(node.value):
                    fixed |= names
                    computed |= names if is_computed(node.value) else set()
        grown = len(fixed) + len(computed) > before
    for node in (n for s in nodes for n in ast.walk(s)):
        inside: list[ast.AST] = [node] if isinstance(node, (ast.Slice, ast.Compare)) else []
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            inside += [*node.args, *(k.value for k in node.keywords)] if name in _BOUNDING else []
        if any(is_computed(n) for n in inside):
            raise Left("its code computes a bound from fixed numbers, which cannot be tried.")
