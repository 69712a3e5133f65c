"""The source of a ``forward`` as statements that can be run up to any point, run in part, and replaced in part.

``read`` parses the function that Python runs, makes sure that the text is what was compiled, and brings it into a form
in which every call is a statement of its own, so that a block of the function can begin and end at any call. From that
form three functions are compiled: one that reports its local variables before every statement, one that is a part of a
block, and one in which such a part is replaced. Nothing is interpreted here: statements that stay, stay as they are
written, with the names and the closure of the original.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import linecache
import textwrap
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Block", "Source", "inlined", "read"]

_MARK = "__ascend_deep_mark__"
_TEMPORARY = "_ascend_deep_t"
_WITHOUT_GRADIENT = ("torch.no_grad()", "torch.no_grad", "torch.inference_mode()", "torch.inference_mode")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(eq=False)
class Block:
    """A list of statements that run one after the other, and what runs after it.

    Attributes:
        statements: in the tree of the function, changed in place by nobody.
        marks: number of each statement, and one more for the end of the block.
        after: the statements that may run when the block is done.
        parent: block that holds it and number of the statement there; ``None`` for the body of the function.
    """

    statements: list[ast.stmt]
    marks: list[int]
    after: list[ast.stmt]
    parent: tuple[Block, int] | None

    @property
    def depth(self) -> int:
        """0 for the body of the function."""
        return 0 if self.parent is None else self.parent[0].depth + 1


@dataclass
class Source:
    """A function, its tree and its blocks (innermost last)."""

    function: types.FunctionType
    decorators: list[str]
    tree: ast.FunctionDef
    blocks: list[Block] = field(default_factory=list)

    @property
    def self_name(self) -> str:
        """What the function calls its module."""
        return self.tree.args.args[0].arg

    def instrumented(self, mark: Callable[[int, dict[str, Any]], None]) -> Callable[..., Any]:
        """The function; it calls ``mark(number, locals())`` before every statement and at the end of every block."""
        tree = copy.deepcopy(self.tree)
        for block, twin in zip(self.blocks, _blocks(tree), strict=True):
            marked: list[ast.stmt] = []
            for number, statement in zip(twin.marks, twin.statements, strict=False):
                marked += [_mark(number), statement]
            if not isinstance(twin.statements[-1], (ast.Return, ast.Raise)):
                marked.append(_mark(block.marks[-1]))
            twin.statements[:] = marked
        return self._compile(tree, mark)

    def part(self, statements: Sequence[ast.stmt], inputs: Sequence[str], output: str) -> Callable[..., Any]:
        """Statements as a function of the module and ``inputs`` that returns ``output``."""
        body = copy.deepcopy(list(statements))
        names = [self.self_name, *(n for n in inputs if n != self.self_name)]
        arguments = ast.arguments(
            posonlyargs=[], args=[ast.arg(n) for n in names], kwonlyargs=[], kw_defaults=[], defaults=[]
        )
        tree = ast.FunctionDef(
            name="part", args=arguments, body=[*body, ast.Return(_load(output))], decorator_list=[], returns=None
        )
        return self._compile(tree, None, defaults=False)

    def replaced(self, parts: Sequence[tuple[Block, int, int, tuple[int, ...], ast.stmt]]) -> Callable[..., Any]:
        """The function with parts (block, start, end, kept, statement) replaced by one statement, decorated as before.

        Statements of a part that are kept come first, in their order.
        """
        tree = copy.deepcopy(self.tree)
        twins = _blocks(tree)
        # Twins are found by position first: replacing one part moves the statements of no other block.
        for index, (block, start, end, kept, statement) in enumerate(parts):
            assert all(block is not other for other, *_ in parts[index + 1 :]), "one part per block"
            statements = twins[self.blocks.index(block)].statements
            statements[start:end] = [*(statements[i] for i in kept), statement]
        for twin in twins:
            twin.statements[:] = _as_written(twin.statements)
        function = self._compile(tree, None)
        for text in reversed(self.decorators):
            decorator = eval(text, self.function.__globals__)
            function = decorator(function)
        return function

    def _compile(self, tree: ast.FunctionDef, mark: Any, defaults: bool = True) -> Callable[..., Any]:
        free = self.function.__code__.co_freevars
        make = ast.FunctionDef(
            name="__make__",
            args=ast.arguments(
                posonlyargs=[], args=[ast.arg(n) for n in (_MARK, *free)], kwonlyargs=[], kw_defaults=[], defaults=[]
            ),
            body=[tree, ast.Return(_load(tree.name))],
            decorator_list=[],
            returns=None,
        )
        for node in (make, tree):
            if "type_params" in node._fields:  # from Python 3.12 on
                node.type_params = []  # type: ignore[attr-defined]
        module = ast.fix_missing_locations(ast.Module([make], type_ignores=[]))
        code = compile(
            module, self.function.__code__.co_filename, "exec", flags=_future(self.function), dont_inherit=True
        )
        scope: dict[str, Any] = {}
        exec(code, self.function.__globals__, scope)
        cells = self.function.__closure__ or ()
        made = scope["__make__"](mark, *(cell.cell_contents for cell in cells))
        if defaults:
            made.__defaults__ = self.function.__defaults__
            made.__kwdefaults__ = self.function.__kwdefaults__
            made.__qualname__ = self.function.__qualname__
            made.__module__ = self.function.__module__
        return made


def read(kind: type) -> Source | str:
    """The ``forward`` of a module class, or one sentence that says why it cannot be read."""
    function: Any = kind.__dict__.get("forward") or getattr(kind, "forward", None)
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, types.FunctionType):
        return "its forward is not a Python function."
    try:
        text = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError, IndentationError):
        return "the source of its forward is not available, so that its loop cannot be replaced."
    if not isinstance(tree, ast.FunctionDef):
        return "its forward is not a plain function definition."
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)  # tracebacks name the lines of the file
    decorators = [ast.unparse(d) for d in tree.decorator_list]
    unknown = [d for d in decorators if d not in _WITHOUT_GRADIENT]
    if unknown:
        return f"its forward is decorated with @{unknown[0]}, which a rewritten forward might not honour."
    if not decorators and hasattr(getattr(kind, "forward", None), "__wrapped__"):
        return "its forward is wrapped by another function, which a rewritten forward might not honour."
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    if names & {"locals", "eval", "exec", "vars"}:
        return "its forward looks at its own local variables by name."
    if any(n.startswith("__") and not n.endswith("__") for n in names | attributes):
        return "its forward uses names that are private to its class (two underscores)."
    if any(isinstance(n, (ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal)) for n in ast.walk(tree)):
        return "its forward is a generator or assigns to variables outside of itself."
    if not tree.args.args or (function.__closure__ and any(_empty(c) for c in function.__closure__)):
        return "its forward has no argument for the module, or a closure that is not filled."
    source = Source(function, decorators, _plain(tree))
    if not _is_running(function):
        return "the source file of its forward is not what is running; it has changed since it was imported."
    body: list[ast.stmt] = []
    names_of_temporaries = iter(range(10**6))
    for statement in source.tree.body:
        body += _flat(statement, names_of_temporaries)
    source.tree.body = body
    source.blocks = _blocks(source.tree)
    return source


def _empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell  # never true; reading an empty cell raises
    except ValueError:
        return True


def _future(function: types.FunctionType) -> int:
    import __future__

    mask = 0
    for name in __future__.all_feature_names:
        mask |= getattr(__future__, name).compiler_flag
    return function.__code__.co_flags & mask


def _plain(tree: ast.FunctionDef) -> ast.FunctionDef:
    """Without decorators, annotations and default values: these belong to the function object, which keeps them."""
    tree.decorator_list, tree.returns = [], None
    arguments = tree.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if d is None else ast.Constant(None) for d in arguments.kw_defaults]
    return tree


def _is_running(function: types.FunctionType) -> bool:
    """True if the file, compiled now, has this very function: the same instructions, constants and names.

    The whole file, because the compiler looks at a module's imports when it compiles calls.
    """
    code = function.__code__
    try:
        whole = compile("".join(linecache.getlines(code.co_filename, function.__globals__)), code.co_filename, "exec",
                        dont_inherit=True)  # fmt: skip
    except SyntaxError:
        return False
    todo = [whole]
    while todo:
        found = todo.pop()
        here = (found.co_name, found.co_firstlineno) == (code.co_name, code.co_firstlineno)
        if here and _bytecode(found) == _bytecode(code):
            return True
        todo += [c for c in found.co_consts if isinstance(c, types.CodeType)]
    return False


def _bytecode(code: types.CodeType) -> Any:
    """What a function does, without where it stands: instructions, constants, names."""
    constants = tuple(_bytecode(c) if isinstance(c, types.CodeType) else (type(c), c) for c in code.co_consts)
    return (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars)


# -- one call, one statement ------------------------------------------------------------------------------------------
def _flat(statement: ast.stmt, numbers: Any) -> list[ast.stmt]:
    """The statement with every call in it made a statement of its own, in the order in which Python evaluates them."""
    before: list[ast.stmt] = []
    written = copy.deepcopy(statement)
    if isinstance(statement, (ast.If, ast.With)):
        for name in ("body", "orelse"):
            inner = getattr(statement, name, None)
            if inner:
                setattr(statement, name, [s for old in inner for s in _flat(old, numbers)])
        return [statement]
    if any(isinstance(n, (ast.NamedExpr, ast.Await)) for n in ast.walk(statement)):
        return [statement]
    value = getattr(statement, "value", None)
    plain_target = not isinstance(statement, ast.AugAssign) or isinstance(statement.target, ast.Name)
    if (
        isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr))
        and value
        and plain_target
    ):
        if isinstance(statement, ast.Return):
            statement.value = _atom(value, before, numbers)
        else:
            statement.value = _parts(value, before, numbers)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            statement = ast.copy_location(ast.Assign([statement.target], statement.value), statement)
    group = [*before, statement]
    for part in group:
        part.written = (written, len(group))  # type: ignore[attr-defined]
    return group


def _as_written(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Groups of which no part was replaced go back to one statement, whose intermediate values live no longer."""
    found: list[ast.stmt] = []
    for _, run in itertools.groupby(statements, lambda s: id(getattr(s, "written", (s,))[0])):
        group = list(run)
        written, size = getattr(group[0], "written", (group[0], -1))
        found += [written] if len(group) == size else group
    return found


class _Inline(ast.NodeTransformer):
    """Puts the values of intermediate names where these are read.

    Args:
        read: names that are read; what is read elsewhere only stays an assignment.
    """

    def __init__(self, read: set[str]) -> None:
        self._read = read
        self._values: dict[str, ast.expr] = {}

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        self.generic_visit(node)
        target = node.targets[0]
        if not isinstance(target, ast.Name) or not target.id.startswith(_TEMPORARY) or target.id not in self._read:
            return node
        self._values[target.id] = node.value
        return None

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node)


def inlined(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Copies of statements without the intermediate names that taking expressions apart made, to be read."""
    inline = _Inline(loads(statements))
    found = [inline.visit(copy.deepcopy(s)) for s in statements]
    return [s for s in found if s is not None]


def _atom(node: ast.expr, before: list[ast.stmt], numbers: Any) -> ast.expr:
    """A name or a constant for the value of ``node``; what it takes to compute it is appended to ``before``."""
    if isinstance(node, (ast.Name, ast.Constant)):
        return node
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
        return node
    if isinstance(node, ast.Starred):
        return ast.copy_location(ast.Starred(_atom(node.value, before, numbers), ast.Load()), node)
    if isinstance(node, ast.Slice):
        for name in ("lower", "upper", "step"):
            part = getattr(node, name)
            setattr(node, name, part and _atom(part, before, numbers))
        return node
    if isinstance(node, ast.Tuple) and any(isinstance(e, (ast.Slice, ast.Starred)) for e in node.elts):
        return _parts(node, before, numbers)
    value = _parts(node, before, numbers)
    name = f"{_TEMPORARY}{next(numbers)}"
    before.append(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), node))
    return ast.copy_location(_load(name), node)


def _parts(node: ast.expr, before: list[ast.stmt], numbers: Any) -> ast.expr:
    """``node`` with atoms for operands. Expressions that evaluate their parts conditionally or lazily stay whole."""

    def atom(part: ast.expr) -> ast.expr:
        return _atom(part, before, numbers)

    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            node.func.value = _chain(node.func.value, before, numbers)
        elif not isinstance(node.func, ast.Name):
            node.func = atom(node.func)
        node.args = [atom(a) for a in node.args]
        for keyword in node.keywords:
            keyword.value = atom(keyword.value)
    elif isinstance(node, ast.BinOp):
        node.left, node.right = atom(node.left), atom(node.right)
    elif isinstance(node, ast.UnaryOp):
        node.operand = atom(node.operand)
    elif isinstance(node, ast.Compare) and len(node.comparators) == 1:
        node.left, node.comparators = atom(node.left), [atom(node.comparators[0])]
    elif isinstance(node, ast.Subscript):
        node.value, node.slice = atom(node.value), atom(node.slice)
    elif isinstance(node, ast.Attribute):
        node.value = _chain(node.value, before, numbers)
    elif isinstance(node, (ast.Tuple, ast.List)):
        node.elts = [atom(e) for e in node.elts]
    return node


def _chain(node: ast.expr, before: list[ast.stmt], numbers: Any) -> ast.expr:
    """The object of an attribute: ``self.mlp`` of ``self.mlp.experts`` stays, anything that is computed is an atom."""
    inner = node
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    return node if isinstance(inner, ast.Name) else _atom(node, before, numbers)


# -- blocks -----------------------------------------------------------------------------------------------------------
def _blocks(tree: ast.FunctionDef) -> list[Block]:
    """The body and the bodies of ``if`` and ``with`` in it. Loops and ``try`` are statements like any other."""
    found: list[Block] = []
    count = 0

    def visit(statements: list[ast.stmt], after: list[ast.stmt], parent: tuple[Block, int] | None) -> None:
        nonlocal count
        marks = list(range(count, count + len(statements) + 1))
        count += len(marks)
        block = Block(statements, marks, after, parent)
        found.append(block)
        for index, statement in enumerate(statements):
            if isinstance(statement, (ast.If, ast.With)):
                for inner in (statement.body, getattr(statement, "orelse", [])):
                    if inner:
                        visit(inner, [*statements[index + 1 :], *after], (block, index))

    visit(tree.body, [], None)
    return found


def loads(statements: Sequence[ast.AST]) -> set[str]:
    """Names that are read or deleted in the statements, in functions inside them too."""
    return {
        n.id for s in statements for n in ast.walk(s) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)
    } | {
        n.target.id
        for s in statements
        for n in ast.walk(s)
        if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)
    }


def read_later(name: str, statements: Sequence[ast.stmt]) -> bool:
    """Whether a name's value may be read when these statements run: it is, unless it is bound anew before."""
    for statement in statements:
        if name in loads([statement]):
            return True
        if isinstance(statement, ast.Assign) and name in stores([statement]):
            return False
    return False


def stores(statements: Sequence[ast.AST]) -> set[str]:
    """Names that are bound in the statements."""
    return {n.id for s in statements for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def forbidden(statements: Sequence[ast.stmt]) -> str | None:
    """What in the statements does more than compute a value, or ``None``."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Return):
                return "returns from the middle"
            if isinstance(node, (ast.Raise, ast.Assert)):
                return "checks something and raises"
            if isinstance(node, (ast.Import, ast.ImportFrom, *_SCOPES[:3])):
                return "imports or defines something"
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
                return f"assigns to the attribute {node.attr!r}"
    return None


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _mark(number: int) -> ast.stmt:
    call = ast.Call(_load(_MARK), [ast.Constant(number), ast.Call(_load("locals"), [], [])], [])
    return ast.Expr(call)
