"""What a part of a forward reads beside its tokens, ids and weights: found in its source, before it is replaced.

Running a part shows what it computes with the values that things have now. An argument, a buffer, a list or a number of
its module may have another value later, and the op would not look at it. So the source of the part, of the statements
that its values come from, and of the functions and experts that they call is read: for numbers that can be watched
(``Reads``), and for everything else that is a reason to leave the loop.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ascend_deep.loop_bounds import check_bounds, check_tests
from ascend_deep.loop_checks import INTERNALS
from ascend_deep.loop_seen import loose_names, seen
from ascend_deep.loop_world import BY_NAME, LIBRARIES, Left, asks, is_foreign

__all__ = ["Left", "Reader", "Reads", "is_simple", "settings"]

_UNTRIED = 5000
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, torch.jit.ScriptFunction)
_MISSING = object()


@dataclass(frozen=True)
class Reads:
    """Numbers that a part reads, which must stay what they are.

    Attributes:
        attributes: (path of a module below the one with the loop, name).
        outside: (globals of a function, name); or (a cell, name), for a variable of an enclosing function.
    """

    attributes: tuple[tuple[str, str], ...] = ()
    outside: tuple[tuple[dict[str, Any] | types.CellType, str], ...] = ()

    def merged(self, other: Reads) -> Reads:
        """Both, each entry once."""
        outside = {(id(g), n): (g, n) for g, n in (*self.outside, *other.outside)}
        return Reads(tuple(dict.fromkeys((*self.attributes, *other.attributes))), tuple(outside.values()))


def is_simple(value: Any) -> bool:
    """Numbers, strings and the like, which change only by being replaced."""
    if isinstance(value, tuple):
        return all(is_simple(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device))


def settings(module: nn.Module) -> list[str]:
    """Names of the simple attributes of a module of torch that its forward may read."""
    if isinstance(module, nn.Linear):
        return []
    return [n for n, v in vars(module).items() if n not in INTERNALS and is_simple(v)]


@functools.lru_cache(maxsize=512)
def _tree(function: types.FunctionType) -> ast.FunctionDef | ast.Lambda | None:
    """The code of a function; ``None`` if it is not available, or several lambdas of its line could be it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, TypeError, SyntaxError):
        return None
    kind = ast.Lambda if function.__code__.co_name == "<lambda>" else ast.FunctionDef
    found = [n for n in ast.walk(tree) if isinstance(n, kind)]
    if kind is ast.FunctionDef:
        return next((n for n in found if getattr(n, "name", "") == function.__code__.co_name), None)
    return found[0] if len(found) == 1 else None


class Reader:
    """Reads the source of statements of the forward of ``module``. ``numbers`` are the float constants found.

    Args:
        sides: sizes of parameters; whole numbers that are one of them are no capacity.
    """

    def __init__(self, module: nn.Module, sides: set[int]) -> None:
        self.module, self.sides = module, sides
        self.paths = {id(m): n for n, m in module.named_modules(remove_duplicate=True)}
        self.attributes: dict[tuple[str, str], None] = {}
        self.outside: dict[tuple[int, str], tuple[dict[str, Any] | types.CellType, str]] = {}
        self.numbers: dict[float, None] = {}
        self._seen: set[tuple[int, int]] = set()

    @property
    def reads(self) -> Reads:
        """What is to be watched."""
        return Reads(tuple(self.attributes), tuple(self.outside.values()))

    # -- functions and modules ----------------------------------------------------------------------------------------
    def called(self, function: Any, owner: Any = None) -> None:
        """Read a function that is called, and what it wraps; ``owner``: what its first argument is."""
        inner = getattr(function, "__wrapped__", None) if callable(function) else None
        if inner is not None:
            self.called(inner, owner)
        held = getattr(function, "__self__", None)
        if isinstance(function, types.MethodType) and not isinstance(held, type):
            if not isinstance(held, nn.Module):
                raise Left(f"it calls {function.__name__!r} of a {type(held).__name__}, which may change.")
            self._path(held)
            owner = held
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or _in_library(function):
            return
        key = (id(function), id(owner))
        if key in self._seen:
            return
        self._seen.add(key)
        tree = _tree(function)
        if tree is None:
            raise Left(f"it calls {function.__name__!r}, whose source is not available.")
        arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
        bound = {arguments[0]: owner} if owner is not None and arguments else {}
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not (is_simple(value) or isinstance(value, _CALLABLE)):
                raise Left(f"{function.__name__!r} has a {type(value).__name__} as a default, which may change.")
            self._number(value, function.__name__)
        body = tree.body if isinstance(tree.body, list) else [tree.body]
        given = {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)}
        self.statements(body, function, bound, given - bound.keys())

    def whole(self, module: nn.Module) -> None:
        """Read a module that may be called, and all in it."""
        for part in module.modules():
            if (id(part), 0) in self._seen:
                continue
            self._seen.add((id(part), 0))
            path = self.paths.get(id(part))
            if path is None:
                raise Left(f"it calls a {type(part).__name__} that is no submodule.")
            if type(part).__module__.startswith("torch.nn"):
                for name, buffer in part._buffers.items():
                    if buffer is not None:
                        raise Left(f"its experts read the buffer {name!r}, which the op would not read.")
                self.attributes.update(((path, n), None) for n in settings(part))
            elif not isinstance(part, (nn.ModuleList, nn.ModuleDict)) or "forward" in vars(type(part)):
                self.called(type(part).forward, part)

    def ran(self, call: Callable[[], Any]) -> None:
        """Run the code too, and see what it reads of the module and all in it."""
        names, touched = seen(self.module, call)
        for name in sorted(touched):
            raise Left(f"the code around its experts reads the buffer {name!r}, which the op would not read.")
        for path, name in sorted(names):
            part = self.module.get_submodule(path)
            if (path, name) not in self.attributes and not any(
                p == path and n.startswith(f"{name}.") for p, n in self.attributes
            ):
                self._attribute(part, [name], type(part).__name__, ast.Name(name), {})

    # -- statements ---------------------------------------------------------------------------------------------------
    def statements(
        self, nodes: Sequence[ast.AST], function: types.FunctionType, bound: Mapping[str, Any], given: set[str]
    ) -> None:
        """Read statements of ``function``, whose names have the values ``bound`` or are local."""
        free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        local = set(function.__code__.co_varnames) | set(function.__code__.co_cellvars)
        local |= {n.id for s in nodes for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        inner = {a.arg for s in nodes for n in ast.walk(s) if isinstance(n, ast.Lambda) for a in ast.walk(n.args)
                 if isinstance(a, ast.arg)}  # fmt: skip
        local = (local | inner) - bound.keys()
        fixed: dict[int, Any] = {}
        for statement in nodes:
            for names in _chains(statement):
                self._chain(names, function, bound, local, free, fixed)
            for node in ast.walk(statement):
                if isinstance(node, ast.Constant):
                    self._number(node.value, "its code")
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    raise Left(f"its code runs {ast.unparse(node)!r}, which may bring anything; import it at the top.")
                if isinstance(node, ast.Attribute):
                    self._loose(node, bound, local)
        check_tests(nodes, given)
        check_bounds(nodes, fixed)

    def _loose(self, node: ast.Attribute, bound: Mapping[str, Any], local: set[str]) -> None:
        """An attribute of something: of a module too, if what it is of is not known and a module has one."""
        wrong = asks([node.attr])
        if wrong is not None:
            raise Left(wrong)
        inner = node.value
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "super":
            for kind in (type(owner) for owner in bound.values() if isinstance(owner, nn.Module)):
                for base in kind.__mro__[1:]:
                    if not base.__module__.startswith("torch.") and node.attr in vars(base):
                        self.called(vars(base)[node.attr], next(o for o in bound.values() if type(o) is kind))
            return
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id not in local:
            return
        for part, name in loose_names(self.module, [node.attr]):
            self._attribute(part, [name], type(part).__name__, node, {})

    def _chain(
        self, node: ast.expr, function: types.FunctionType, bound: Mapping[str, Any], local: set[str],
        free: Mapping[str, types.CellType], fixed: dict[int, Any],
    ) -> None:  # fmt: skip
        names: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            names.insert(0, inner.attr)
            inner = inner.value
        assert isinstance(inner, ast.Name)
        root = inner.id
        if root in bound:
            self._attribute(bound[root], names, root, node, fixed)
        elif root in local:
            return
        elif root in free:
            value = free[root].cell_contents
            if root != "__class__":
                self._outside(value, names, root, free[root])
        elif root in function.__globals__:
            value = self._outside(function.__globals__[root], names, root, function.__globals__)
            if is_simple(value):
                fixed[id(node)] = value
        elif root in BY_NAME and hasattr(builtins, root):
            raise Left(f"the code around its experts calls {root}(), which may read anything.")

    def _outside(self, value: Any, names: Sequence[str], root: str, scope: dict[str, Any] | types.CellType) -> Any:
        """A global or a variable of an enclosing function."""
        wrong = asks([*names, getattr(value, "__name__", "")])
        if wrong is not None:
            raise Left(wrong)
        if isinstance(value, types.ModuleType):
            library = value.__name__.split(".")[0] in LIBRARIES
            for name in names:
                value = getattr(value, name, None)
                if library and not isinstance(value, types.ModuleType):
                    if is_foreign(value, names):
                        raise Left(
                            f"its code uses {'.'.join((root, *names))!r}, which depends on more than its arguments."
                        )
                    return None
            if not isinstance(value, (types.ModuleType, *_CALLABLE)):
                raise Left(f"its code reads {'.'.join((root, *names))!r}, a global that may change.")
        if isinstance(value, types.ModuleType):
            return None
        if isinstance(value, type):
            if names and not callable(getattr(value, names[0], None)):
                raise Left(f"its code reads {'.'.join((root, *names))!r}, a global that may change.")
            return None
        if isinstance(value, nn.Module):
            self.whole(value)
            return None
        if isinstance(value, _CALLABLE) or _in_library(value):
            if is_foreign(value, names):
                raise Left(f"its code uses {'.'.join((root, *names))!r}, which depends on more than its arguments.")
            if not names and not _in_library(value):
                self.outside[id(scope), root] = (scope, root)  # another function may take its place
            self.called(value)
            return None
        if is_simple(value):
            self._number(value, root)
            self.outside[id(scope), root] = (scope, root)
            return value
        raise Left(f"its code reads the global {root!r}, a {type(value).__name__} that may change.")

    def _attribute(self, owner: Any, names: Sequence[str], root: str, node: ast.expr, fixed: dict[int, Any]) -> None:
        """``self.a.b``."""
        text = root
        if not names:
            return
        for position, name in enumerate(names):
            if not isinstance(owner, nn.Module):
                return
            text = f"{text}.{name}"
            if owner._buffers.get(name) is not None:
                raise Left(f"the code around its experts reads the buffer {name!r}, which the op would not read.")
            if name in owner._parameters or name in INTERNALS:
                return
            if name in owner._modules:
                child = owner._modules[name]
                if child is None:
                    self.attributes[self._path(owner), name] = None
                    return
                if position == len(names) - 1 or names[position + 1] == "forward":
                    self.whole(child)
                owner = child
                continue
            held = vars(owner).get(name, inspect.getattr_static(type(owner), name, _MISSING))
            if held is _MISSING:
                raise Left(f"its code reads {text!r}, which its module does not have, and may have later.")
            if name not in vars(nn.Module):
                self.attributes[self._path(owner), name] = None  # another method may take its place
            if isinstance(held, property):
                self.called(held.fget, owner)
                return
            if isinstance(held, (staticmethod, classmethod)):
                self.called(held.__func__, None if isinstance(held, staticmethod) else type(owner))
                return
            if isinstance(held, types.FunctionType) and name not in vars(owner):
                self.called(held, owner)
                return
            self.attributes[self._path(owner), name] = None
            if isinstance(held, nn.Module):
                raise Left(f"its code reads {text!r}, a module that is no submodule.")
            if isinstance(held, functools.partial):
                if not all(is_simple(v) for v in (*held.args, *held.keywords.values())):
                    raise Left(f"its code reads {text!r}, a partial of something that may change.")
                held = held.func
            if isinstance(held, _CALLABLE) or (callable(held) and _in_library(held)):
                self.called(held)
            elif is_simple(held):
                self._number(held, text)
                fixed[id(node)] = held
            elif len(names) == position + 2 and (key := config_key(held, names[-1])) is not None:
                self.attributes[self._path(owner), f"{name}.{key}"] = None
                fixed[id(node)] = vars(held)[key]
                self._number(vars(held)[key], f"{text}.{names[-1]}")
                return
            else:
                raise Left(f"its code reads {text!r}, a {type(held).__name__}, which may change without being noticed.")
            return

    def _path(self, owner: nn.Module) -> str:
        path = self.paths.get(id(owner))
        if path is None:
            raise Left(f"it reads a {type(owner).__name__} that is no submodule.")
        return path

    def _number(self, value: Any, where: str) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if isinstance(value, float):
            self.numbers[abs(value)] = None
        elif abs(value) < _UNTRIED:
            self.numbers[float(abs(value))] = None
        if isinstance(value, int) and value >= _UNTRIED and value not in self.sides:
            raise Left(f"its code has the number {value} ({where}), more tokens than can be tried.")


def config_key(held: Any, name: str) -> str | None:
    """The entry of ``vars(held)`` that ``held.name`` is, if it is a number or the like of a plain object.

    Plain objects are those that look nowhere else: namespaces, data classes, and the configs of transformers, which
    have other names for some entries.
    """
    kind = type(held)
    lookup: Any = kind.__getattribute__
    if kind is not types.SimpleNamespace and lookup is not object.__getattribute__:
        if getattr(lookup, "__module__", "") != "transformers.configuration_utils":
            return None
        name = getattr(kind, "attribute_map", {}).get(name, name)
    if hasattr(kind, "__getattr__") or not hasattr(held, "__dict__") or hasattr(kind.__dict__.get(name), "__set__"):
        return None
    return name if name in vars(held) and is_simple(vars(held)[name]) else None


def _in_library(value: Any) -> bool:
    """By where a function was written: wrapping changes its ``__module__``."""
    home = value.__globals__.get("__name__") if isinstance(value, types.FunctionType) else None
    return (home or getattr(value, "__module__", None) or "").split(".")[0] in LIBRARIES


def _chains(statement: ast.AST) -> Iterator[ast.expr]:
    """Names that are read, with the attributes that follow."""
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        inner = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        if isinstance(inner, ast.Name):
            if isinstance(inner.ctx, ast.Load):
                yield node  # type: ignore[misc]
            continue
        todo += list(ast.iter_child_nodes(node))
