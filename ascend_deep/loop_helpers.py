"""Loops over experts that are in what a module's ``forward`` calls: found by reading the code, for reports.

Followed are methods of the module, and functions that get the module or one of its lists of experts as an argument.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_deep.loop_runs import Record

__all__ = ["given_ids", "loop_elsewhere"]

# Without any of these in its function, a loop over a list of modules runs all of them one after another: layers.
_CHOOSING = frozenset(
    ("argmax", "argsort", "bincount", "cumsum", "index_add", "index_add_", "masked_select", "nonzero", "one_hot",
     "scatter_add", "scatter_add_", "sort", "split", "topk", "where")
)  # fmt: skip
_LOOPS = (ast.For, ast.While, ast.comprehension, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)


def loop_elsewhere(kind: type, lists: set[str]) -> str | None:
    """Where a loop reads one of the ``lists`` (names of attributes) of a module of class ``kind``, if not in forward.

    Returns:
        ``"the method 'run'"`` or ``"the function 'dispatch'"``: the first that ``forward`` reaches.
    """
    reader = _Reader(kind, lists)
    first = reader.method("forward")
    todo = list(reader.calls(first, first.tree)) if first is not None else []
    seen: set[tuple[types.FunctionType, frozenset[str], frozenset[str]]] = set()
    while todo:
        called = todo.pop(0)
        if called.key in seen:
            continue
        seen.add(called.key)
        loops = [n for n in ast.walk(called.tree) if isinstance(n, _LOOPS)]
        if _chooses(called.tree) and any(reader.reads(called, loop, set()) for loop in loops):
            return f"the {'method' if called.is_method else 'function'} {called.function.__name__!r}"
        todo += reader.calls(called, called.tree)
    return None


def given_ids(record: Record) -> bool:
    """Whether forward holds whole numbers, ids say, where a statement that reads experts begins."""
    values = [v for mark in record.touched for v in record.values.get(mark, {}).values()]
    return any(isinstance(v, Tensor) and v.dim() > 0 and v.dtype in (torch.int64, torch.int32) for v in values)


@dataclass(frozen=True)
class _Called:
    """A function that is called, and what its parameters are.

    Attributes:
        owner: names of the parameters that are the module.
        held: names of those that are one of its lists.
    """

    function: types.FunctionType
    tree: ast.FunctionDef
    owner: frozenset[str]
    held: frozenset[str]
    is_method: bool

    @property
    def key(self) -> tuple[types.FunctionType, frozenset[str], frozenset[str]]:
        return self.function, self.owner, self.held


class _Reader:
    """Reads the code of a class for attributes in ``lists``."""

    def __init__(self, kind: type, lists: set[str]) -> None:
        self.kind, self.lists = kind, lists

    def method(self, name: str) -> _Called | None:
        """A method, whatever its first parameter is called."""
        found = inspect.getattr_static(self.kind, name, None)
        tree = _tree(found)
        if tree is None or not tree.args.args:
            return None
        return _Called(_plain(found), tree, frozenset((tree.args.args[0].arg,)), frozenset(), True)

    def calls(self, inside: _Called, node: ast.AST) -> Iterator[_Called]:
        """What the code below ``node`` calls with the module or one of its lists."""
        for call in ast.walk(node):
            if not isinstance(call, ast.Call):
                continue
            if isinstance(call.func, ast.Attribute) and self._is_owner(inside, call.func.value):
                method = self.method(call.func.attr)
                if method is not None:
                    yield method
            elif isinstance(call.func, ast.Name):
                function = inside.function.__globals__.get(call.func.id)
                tree = _tree(function) if isinstance(function, types.FunctionType) else None
                if tree is not None:
                    called = self._bound(inside, call, _plain(function), tree)
                    if called.owner or called.held:
                        yield called

    def reads(self, inside: _Called, node: ast.AST, seen: set[types.FunctionType]) -> bool:
        """Whether the code below ``node``, or what it calls, reads one of the lists."""
        if any(self._is_list(inside, n) for n in ast.walk(node)):
            return True
        for called in self.calls(inside, node):
            if called.function not in seen:
                seen.add(called.function)
                if self.reads(called, called.tree, seen):
                    return True
        return False

    def _bound(self, inside: _Called, call: ast.Call, function: types.FunctionType, tree: ast.FunctionDef) -> _Called:
        names = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
        given = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords if k.arg)]
        owner = frozenset(n for n, value in given if self._is_owner(inside, value))
        held = frozenset(n for n, value in given if self._is_list(inside, value))
        return _Called(function, tree, owner, held, False)

    @staticmethod
    def _is_owner(inside: _Called, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in inside.owner

    def _is_list(self, inside: _Called, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in inside.held and isinstance(node.ctx, ast.Load)
        return isinstance(node, ast.Attribute) and node.attr in self.lists and self._is_owner(inside, node.value)


def _chooses(tree: ast.FunctionDef) -> bool:
    """Whether a function looks for the tokens of an expert."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in _CHOOSING:
                return True
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            return True
    return False


def _plain(function: object) -> types.FunctionType:
    found = getattr(function, "__wrapped__", function)  # torch.no_grad()
    assert isinstance(found, types.FunctionType)
    return found


def _tree(function: object) -> ast.FunctionDef | None:
    """The source of a function, parsed; ``None`` for anything else and where there is none."""
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, types.FunctionType):
        return None
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return parsed if isinstance(parsed, ast.FunctionDef) else None
