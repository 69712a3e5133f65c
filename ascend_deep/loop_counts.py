"""What code does with numbers of rows (all tokens, or those of one expert) that no number of tokens tried shows."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence

__all__ = ["Counts"]

_MANY = 99
_ROUNDED = (
    "str", "repr", "format", "hex", "oct", "bin", "divmod", "pow", "ceil", "floor", "trunc", "log", "log2", "log10",
    "sqrt", "exp", "isqrt", "gcd",
)  # fmt: skip
_SAME = ("int", "float", "abs", "min", "max", "round", "bool")


class Counts:
    """Knows which expressions in statements are a number of rows: ``x.shape[0]``, ``len(token)``, ``token.numel()``.

    Sizes of the last dimension are numbers of features, and no such thing.

    Args:
        given: parameters, which may be such a number: what is done to numbers only, not to tensors, is looked at.
    """

    def __init__(self, nodes: Sequence[ast.AST], given: Collection[str] = ()) -> None:
        self._given = frozenset(given)
        self._names: set[str] = set()
        self._shapes: set[str] = set()
        self._pieces: set[str] = set()
        every = [n for s in nodes for n in ast.walk(s)]
        bound = [n for n in every if isinstance(n, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr))]
        before = -1
        while before < len(self._names) + len(self._shapes):
            before = len(self._names) + len(self._shapes)
            for node in bound:
                if node.value is not None:
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        self._bind(target, node.value)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            if self._is_shape(value):
                self._shapes.add(target.id)
            elif self.is_count(value):
                self._names.add(target.id)
            elif _is_pieces(value):
                self._pieces.add(target.id)
        elif isinstance(target, ast.Tuple) and self._is_shape(value):
            self._names |= {n.id for n in target.elts[:-1] if isinstance(n, ast.Name)}

    def _is_shape(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._shapes
        if isinstance(node, ast.Attribute):
            return node.attr == "shape"
        return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "size" and not node.args

    def is_count(self, node: ast.AST, given: bool = False) -> bool:
        """Whether an expression is a number of rows, or is computed from one; ``given``: or may be one."""
        if isinstance(node, ast.Name):
            return node.id in self._names or (given and node.id in self._given)
        if isinstance(node, ast.BinOp):
            return self.is_count(node.left, given) or self.is_count(node.right, given)
        if isinstance(node, ast.UnaryOp):
            return self.is_count(node.operand, given)
        if isinstance(node, ast.Subscript):
            return self._is_shape(node.value) and not _is_last(node.slice)
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute):
            of_rows = node.func.attr == "size" and len(node.args) == 1 and not _is_last(node.args[0])
            return of_rows or node.func.attr in ("numel", "nelement")
        name = getattr(node.func, "id", "")
        if name == "len" and node.args:
            return isinstance(node.args[0], ast.Name) and node.args[0].id not in self._shapes
        return name in _SAME and any(self.is_count(a, given) for a in node.args)

    def looks_up(self, node: ast.AST) -> bool:
        """Whether a table is asked for a number of rows."""
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "index", "count"):
            return any(self.is_count(a) for a in node.args)
        return (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, (ast.Dict, ast.List, ast.Tuple, ast.Constant))
            and any(self.is_count(n) for n in ast.walk(node.slice))
        )

    def steps(self, node: ast.AST) -> bool:
        """Whether something grows with a number of rows in steps, or from some point on, that no trial need reach."""
        if isinstance(node, ast.Call):
            return self._rounds(node)
        if not isinstance(node, ast.BinOp) or not self.is_count(node.left, given=True):
            return False
        if isinstance(node.op, ast.RShift) or self._is_power(node):
            return True
        if not isinstance(node.op, ast.FloorDiv):
            return False
        again = any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.FloorDiv) for n in ast.walk(node.left))
        return again or isinstance(node.right, ast.BinOp) or _is_number(node.right, _MANY)

    def _is_power(self, node: ast.BinOp) -> bool:
        return isinstance(node.op, (ast.BitAnd, ast.Pow)) and self.is_count(node.left)

    def _rounds(self, call: ast.Call) -> bool:
        """``int(0.9 * n)``, ``math.ceil(n)``, ``len(str(n))``, ``max(1, n - 100)``."""
        if not any(self.is_count(a, given=True) for a in call.args):
            return False
        inside = [n for a in call.args for n in ast.walk(a)]
        name = getattr(call.func, "id", "")
        if isinstance(call.func, ast.Attribute):
            home = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
            known = home == "math" or (home in ("np", "numpy", "torch") and any(self.is_count(a) for a in call.args))
            return known and call.func.attr in _ROUNDED
        if name in ("min", "max"):
            return any(_is_number(n, 1) for n in inside)
        if name in ("int", "round"):
            return any(isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Mult, ast.Div, ast.Pow)) for n in inside)
        return name in _ROUNDED

    def cuts(self, node: ast.AST) -> bool:
        """Whether only some of a list of pieces are taken: ``x.split(64)[:100]``, ``zip(range(100), x.split(64))``."""
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            return node.slice.upper is not None and _is_number(node.slice.upper, 1) and self._is_pieces(node.value)
        if not isinstance(node, ast.Call):
            return False
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        ranges = [getattr(getattr(a, "func", None), "id", "") == "range" for a in node.args]
        return name == "islice" or (name == "zip" and any(ranges) and any(self._is_pieces(a) for a in node.args))

    def _is_pieces(self, node: ast.AST) -> bool:
        return _is_pieces(node) or (isinstance(node, ast.Name) and node.id in self._pieces)

    def compares(self, test: ast.AST) -> bool:
        """Whether a number of rows is compared with a fixed one above 1, or what is left of it by a division."""
        if not isinstance(test, ast.Compare):
            return False
        sides = [test.left, *test.comparators]
        inside = [n for s in sides for n in ast.walk(s)]
        if any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) and self.is_count(n.left) for n in inside):
            return True
        return any(_is_number(n, 1) for n in inside) and any(self.is_count(s) for s in sides)


def _is_last(index: ast.AST) -> bool:
    return isinstance(index, (ast.UnaryOp, ast.Slice))  # [-1], [:2]


def _is_pieces(node: ast.AST) -> bool:
    """A list that is as long as there are tokens, or chunks of them."""
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        return True
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
        "split", "chunk", "tensor_split", "unbind", "tolist", "list", "sorted",
    )  # fmt: skip


def _is_number(node: ast.AST, above: float) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and node.value > above
