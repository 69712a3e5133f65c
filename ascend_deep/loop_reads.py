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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ascend_deep.loop_checks import INTERNALS

__all__ = ["Reader", "Reads", "is_simple", "settings"]

_UNTRIED = 5000
_LIBRARIES = ("torch", "math", "numpy", "builtins", "functools", "itertools", "operator", "typing", "einops")
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, torch.jit.ScriptFunction)
_BY_NAME = ("getattr", "setattr", "vars", "globals", "locals", "eval", "exec")
_MODES = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_inference")
_BOUNDING = ("min", "max", "clamp", "clamp_", "topk", "narrow", "minimum", "maximum")
_SIZES = ("shape", "size", "numel", "nelement", "ndim")


@dataclass(frozen=True)
class Reads:
    """Numbers that a part reads, which must stay what they are.

    Attributes:
        attributes: (path of a module below the one with the loop, name).
        outside: (globals of a function, name).
    """

    attributes: tuple[tuple[str, str], ...] = ()
    outside: tuple[tuple[dict[str, Any], str], ...] = ()

    def merged(self, other: Reads) -> Reads:
        """Both, each entry once."""
        outside = {(id(g), n): (g, n) for g, n in (*self.outside, *other.outside)}
        return Reads(tuple(dict.fromkeys((*self.attributes, *other.attributes))), tuple(outside.values()))


class Left(Exception):
    """Something was read that cannot be watched; the text is the sentence."""


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
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            return node
    return None


class Reader:
    """Reads the source of statements of the forward of ``module``. ``numbers`` are the float constants found.

    Args:
        sides: sizes of parameters; whole numbers that are one of them are no capacity.
    """

    def __init__(self, module: nn.Module, sides: set[int]) -> None:
        self.module, self.sides = module, sides
        self.paths = {id(m): n for n, m in module.named_modules(remove_duplicate=True)}
        self.attributes: dict[tuple[str, str], None] = {}
        self.outside: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.numbers: dict[float, None] = {}
        self._seen: set[tuple[int, int]] = set()

    @property
    def reads(self) -> Reads:
        """What is to be watched."""
        return Reads(tuple(self.attributes), tuple(self.outside.values()))

    # -- functions and modules ----------------------------------------------------------------------------------------
    def called(self, function: Any, owner: Any = None) -> None:
        """Read a function that is called; ``owner``: what its first argument is."""
        function = inspect.unwrap(function) if callable(function) else function
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
        _tests(nodes, given)
        _bounds(nodes, fixed)

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
                self._outside(value, names, root, None)
        elif root in function.__globals__:
            value = self._outside(function.__globals__[root], names, root, function.__globals__)
            if is_simple(value):
                fixed[id(node)] = value
        elif root in _BY_NAME and hasattr(builtins, root):
            raise Left(f"the code around its experts calls {root}(), which may read anything.")

    def _outside(self, value: Any, names: Sequence[str], root: str, scope: dict[str, Any] | None) -> Any:
        """A global or a variable of an enclosing function."""
        if isinstance(value, types.ModuleType):
            library = value.__name__.split(".")[0] in _LIBRARIES
            for name in names:
                value = getattr(value, name, None)
                if library and not isinstance(value, types.ModuleType):
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
            self.called(value)
            return None
        if is_simple(value) and scope is not None:
            self._number(value, root)
            self.outside[id(scope), root] = (scope, root)
            return value
        if is_simple(value):
            self._number(value, root)
            return None
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
            held = vars(owner)[name] if name in vars(owner) else inspect.getattr_static(type(owner), name, None)
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
    return (getattr(value, "__module__", None) or "").split(".")[0] in _LIBRARIES


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


# -- tests and bounds -------------------------------------------------------------------------------------------------
def _tests(nodes: Sequence[ast.AST], given: set[str]) -> None:
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
    for node in (n for s in nodes for n in ast.walk(s)):
        if isinstance(node, ast.Attribute) and node.attr in _MODES:
            raise Left(f"its code asks {node.attr}(), so what it computes depends on a mode.")
        tests: list[ast.AST] = [node] if isinstance(node, ast.Compare) else []
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            tests.append(node.test)
        for test in tests:
            asked = (n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute))
            if id(node) not in converted and any(n in ("dtype", "is_floating_point") for n in asked):
                raise Left("its code tests a dtype.")
            if any(_has_size(part, given, sized) for part in _operands(test)):
                raise Left("its code tests how many tokens there are (a size of a batch or a sequence).")


def _only_converts(node: ast.If) -> bool:
    """``if x.dtype != w.dtype: x = x.to(w.dtype)``: the same in every dtype of which all things are."""
    return not node.orelse and all(
        isinstance(s, ast.Assign) and isinstance(s.value, ast.Call) and isinstance(s.value.func, ast.Attribute)
        and s.value.func.attr in ("to", "type_as") and isinstance(s.value.func.value, ast.Name)
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


def _bounds(nodes: Sequence[ast.AST], known: Mapping[int, Any]) -> None:
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
