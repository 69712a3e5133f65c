"""A region of a graph as a program that runs on its own, at sizes of our choosing.

Recognisers decide by running what they found. The region of a real model has real sizes (a MoE layer of
DeepSeek-V3 has 11 GB of expert weights), so ``Program`` runs it at small sizes instead: symbolic sizes are
substituted, and literal sizes (``view(x, [4096, 7168])``) are replaced through one mapping for the whole region.
The mapping keeps equal literals equal; if it is wrong for a region, the run fails or the results differ and the
region is left alone, so a wrong mapping cannot cause a wrong rewrite.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import CodeType
from typing import Any

import sympy
import torch
from torch import fx

from ascend_deep.lowering import _torch_compat
from ascend_deep.passes._types import Refusal
from ascend_deep.passes.graph_view import GraphView, clean_module_path, op_name
from ascend_deep.passes.purity import is_pure
from ascend_deep.passes.stand_ins import STAND_INS

__all__ = ["Dims", "Program", "Ref", "Region", "Size", "slice_region"]

# Which positional arguments of an op are sizes or lengths, hence replaced when a region runs at other sizes.
_SIZE_ARGS: Mapping[str, tuple[int, ...]] = {
    "aten.view": (1,),
    "aten.reshape": (1,),
    "aten._unsafe_view": (1,),
    "aten.expand": (1,),
    "aten.unflatten": (2,),
    "aten.arange": (0, 1),
    "aten.full": (0,),
    "aten.zeros": (0,),
    "aten.ones": (0,),
    "aten.empty": (0,),
    "aten.new_zeros": (1,),
    "aten.new_ones": (1,),
    "aten.new_empty": (1,),
    "aten.new_full": (1,),
    "aten.split": (1,),
    "aten.split_with_sizes": (1,),
    "aten.slice": (2, 3),
    "aten.narrow": (2, 3),
}

# Ops that read only the shape of their first argument, and what they fill with: they run as ``aten.full``, so that a
# region may take the shape of a tensor from elsewhere without reading it.
_SHAPE_ONLY: Mapping[str, float | None] = {
    "aten.zeros_like": 0,
    "aten.ones_like": 1,
    "aten.full_like": None,
    "aten.new_zeros": 0,
    "aten.new_ones": 1,
}


@dataclass(frozen=True)
class Ref:
    """Argument of a step: the result of an input (negative: ``-1 - i``) or of an earlier step."""

    index: int


@dataclass(frozen=True)
class Size:
    """Argument of a step: a symbolic size, as an expression of the graph's size symbols."""

    expr: str


@dataclass(frozen=True)
class Dims:
    """Sizes to run a region at: a value per size symbol, and a replacement per literal size."""

    symbols: Mapping[str, int] = field(default_factory=dict)
    literals: Mapping[int, int] = field(default_factory=dict)

    def size(self, value: Any) -> int:
        """The size to use for an int, SymInt or expression of the original graph."""
        if isinstance(value, torch.SymInt):
            value = value.node.expr
        if isinstance(value, sympy.Expr):
            if not value.free_symbols:
                return self.literals.get(int(value), int(value))
            return self.size_of_text(str(value))
        return self.literals.get(value, value)

    def size_of_text(self, expr: str) -> int:
        """The size of an expression in text form, e.g. ``"2*s33*s50"``."""
        code = _arithmetic(expr)
        if code is not None:
            return int(eval(code, {"__builtins__": {}}, dict(self.symbols)))
        parsed = sympy.sympify(expr, locals=_Symbols(expr))
        return int(parsed.subs({s: self.symbols[str(s)] for s in parsed.free_symbols}))

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape that ``node`` has at these sizes."""
        return tuple(self.size(s) for s in node.meta["val"].shape)

    @staticmethod
    def plan(pairs: Iterable[tuple[Any, int]]) -> Dims | None:
        """Sizes that map each original size (int or SymInt) to the wanted one; ``None`` if two wishes conflict.

        A symbolic original is solved by giving its first free symbol the wanted value and the others 1; later
        pairs of the same expression must then agree.
        """
        symbols: dict[str, int] = {}
        literals: dict[int, int] = {}
        for original, wanted in pairs:
            expr = original.node.expr if isinstance(original, torch.SymInt) else original
            if isinstance(expr, sympy.Expr) and expr.free_symbols:
                names = sorted(str(s) for s in expr.free_symbols)
                for i, name in enumerate(n for n in names if n not in symbols):
                    symbols[name] = wanted if i == 0 else 1
                if Dims(symbols, literals).size(expr) != wanted:
                    return None
            elif literals.setdefault(int(expr), wanted) != wanted:
                return None
        return Dims(symbols, literals)


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a graph that one op could replace.

    Attributes:
        recogniser: name of the recogniser that cut it.
        view: the graph.
        inputs: role to node. Roles are the tensor arguments of the op ("x", "idx", …).
        outputs: the nodes that the replacement will stand for.
        nodes: every node between, outputs included, in graph order.
        hints: what the recogniser learned while cutting (constants, layouts); not part of the mathematics.
    """

    recogniser: str
    view: GraphView
    inputs: Mapping[str, fx.Node]
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    hints: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def program(self) -> Program:
        """The region as a program."""
        return Program.of(self)

    @cached_property
    def outside_users(self) -> tuple[fx.Node, ...]:
        """Interior nodes (not outputs) whose results are also used outside the region."""
        inside = set(self.nodes)
        kept = set(self.outputs)
        return tuple(n for n in self.nodes if n not in kept and any(u not in inside for u in n.users))

    def constants(self) -> tuple[float, ...]:
        """Every number literal of the region that is not a size, in graph order, without duplicates."""
        found: dict[float, None] = {}
        for step in self.program.steps:
            for i, arg in enumerate(step.args):
                if i not in step.sizes:
                    _numbers(arg, found)
            _numbers(list(step.kwargs.values()), found)
        return tuple(found)

    def portable_hints(self) -> dict[str, Any]:
        """``hints`` with names of the region's nodes replaced by ``Ref`` to their position."""
        position = {node.name: Ref(i) for i, node in enumerate(self.nodes)}
        return {k: position.get(v, v) if isinstance(v, str) else v for k, v in self.hints.items()}

    def fingerprint(self) -> str:
        """Equal for regions that compute the same function of their inputs at the same shapes and dtypes."""
        ins = [
            (role, str(n.meta["val"].dtype), [str(s) for s in n.meta["val"].shape], str(n.meta["val"].device.type))
            for role, n in self.inputs.items()
        ]
        hints = sorted(map(str, self.portable_hints().items()))
        text = json.dumps([self.recogniser, ins, self.program.to_dict(), hints])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def slice_region(
    view: GraphView,
    recogniser: str,
    inputs: Mapping[str, fx.Node],
    outputs: Sequence[fx.Node],
    hints: Mapping[str, Any] | None = None,
) -> Region | Refusal:
    """Everything between ``inputs`` and ``outputs``, or why that is not a region.

    Refused are: a tensor from elsewhere that is not one of the inputs, an op that is not known to be pure, and
    nodes in different grad-mode or autocast segments.
    """
    stop = set(inputs.values())
    inside: set[fx.Node] = set()
    pending = [o for o in outputs if o not in stop]
    while pending:
        node = pending.pop()
        if node in inside:
            continue
        if node.op == "get_attr" and _small_constant(node) is not None:
            inside.add(node)
            continue
        value = view.val(node)
        if isinstance(value, torch.SymBool) or (isinstance(value, torch.SymFloat) and not value.node.has_hint()):
            return Refusal("the block depends on a number that is only known at run time.", node)
        if isinstance(value, (torch.SymInt, int, torch.SymFloat, float)):
            continue  # a size, also one that Dynamo passes as an input of its own: evaluated, not computed
        if node.op != "call_function":
            return Refusal(f"the block also reads {_readable(node)}, which is not one of its known inputs.", node)
        if not is_pure(node):
            return Refusal(f"{op_name(node)} inside the block is not on the list of pure ops.", node)
        inside.add(node)
        if not _reads_shape_only(node):
            pending.extend(a for a in node.all_input_nodes if a not in stop)
    modes = {view.modes[n] for n in inside if n.op == "call_function"}
    if len(modes) > 1:
        return Refusal("the block spans a change of grad mode or autocast.", outputs[0])
    nodes = tuple(sorted(inside, key=view.order.__getitem__))
    return Region(recogniser, view, dict(inputs), tuple(outputs), nodes, dict(hints or {}))


@dataclass(frozen=True)
class Step:
    """One call: op name without overload (for tables), target, encoded arguments."""

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Positions of arguments that are sizes."""
        return _SIZE_ARGS.get(self.name, ())


@dataclass(frozen=True)
class Program:
    """A region detached from its graph."""

    roles: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    @staticmethod
    def of(region: Region) -> Program:
        """Detach ``region``: arguments become references, sizes become expressions, devices become the CPU."""
        index: dict[fx.Node, int] = {}
        roles = tuple(region.inputs)
        for i, node in enumerate(region.inputs.values()):
            index.setdefault(node, -1 - i)
        steps: list[Step] = []
        for node in region.nodes:
            if node.op == "get_attr":
                steps.append(Step("constant", torch.clone, (_small_constant(node),), {}))
            elif _reads_shape_only(node) and node.args[0] not in index:
                steps.append(_as_full(node))
            else:
                args = tuple(_encode(a, index) for a in node.args)
                kwargs = {
                    k: torch.device("cpu") if k == "device" and v is not None else _encode(v, index)
                    for k, v in node.kwargs.items()
                    if k != "pin_memory"
                }
                steps.append(Step(op_name(node), node.target, args, kwargs))
            index[node] = len(steps) - 1
        return Program(roles, tuple(steps), tuple(index[o] for o in region.outputs))

    def run(self, dims: Dims, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run at sizes ``dims`` on CPU tensors by role. Outputs in region order. Errors of the ops propagate."""
        inputs: list[Any] = [tensors.get(r) for r in self.roles]
        env: list[Any] = []

        def decode(a: Any, resize: bool) -> Any:
            if isinstance(a, Ref):
                return inputs[-1 - a.index] if a.index < 0 else env[a.index]
            if isinstance(a, Size):
                return dims.size_of_text(a.expr)
            if isinstance(a, (list, tuple)):
                return type(a)(decode(x, resize) for x in a)
            if resize and isinstance(a, int) and not isinstance(a, bool):
                return dims.size(a)
            return a

        for step in self.steps:
            args = [decode(a, i in step.sizes) for i, a in enumerate(step.args)]
            kwargs = {k: decode(v, False) for k, v in step.kwargs.items()}
            env.append(STAND_INS.get(step.name, step.target)(*args, **kwargs))
        return tuple(inputs[-1 - r] if r < 0 else env[r] for r in self.results)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; ``from_dict`` reads it again in another process."""
        return {
            "roles": list(self.roles),
            "steps": [
                [_target_name(s.target), [_to_json(a) for a in s.args], {k: _to_json(v) for k, v in s.kwargs.items()}]
                for s in self.steps
            ],
            "results": list(self.results),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Program:
        """Inverse of ``to_dict``. Ops of packages that are not imported raise a sentence that names them."""
        steps = []
        for name, args, kwargs in data["steps"]:
            target = _target(name)
            steps.append(
                Step(
                    _short(name),
                    target,
                    tuple(_from_json(a) for a in args),
                    {k: _from_json(v) for k, v in kwargs.items()},
                )
            )
        return Program(tuple(data["roles"]), tuple(steps), tuple(data["results"]))


@lru_cache(maxsize=4096)
def _arithmetic(expr: str) -> CodeType | None:
    """Code of an expression that holds only size symbols, integers, ``+ - *`` and parentheses; sympy is slow."""
    if re.fullmatch(r"(?:[suz]\d+|\d+|[-+*() ])+", expr) is None:
        return None
    return compile(expr, "size", "eval")


# -- encoding -------------------------------------------------------------------------------------------------------
class _Symbols(dict):  # type: ignore[type-arg]
    """Names of size symbols for ``sympify``: every identifier is a plain positive integer symbol."""

    def __init__(self, expr: str) -> None:
        super().__init__({n: sympy.Symbol(n, positive=True, integer=True) for n in re.findall(r"\b[suz]\d+\b", expr)})


def _encode(a: Any, index: Mapping[fx.Node, int]) -> Any:
    if isinstance(a, fx.Node):
        if a in index:
            return Ref(index[a])
        value = GraphView.val(a)
        if isinstance(value, torch.SymInt):
            return Size(str(value.node.expr))
        if isinstance(value, torch.SymFloat):
            # An attribute such as a clamp limit under dynamic=True. AOT Autograd specialises what it cannot keep as a
            # tensor in the same way: with a guard, after which Dynamo traces once more with the constant.
            return float(_torch_compat.guard_scalar(value))
        if isinstance(value, (int, float)):
            return value
        raise AssertionError(f"{a} is neither inside the region nor a size")
    if isinstance(a, (list, tuple)):
        return [_encode(x, index) for x in a]
    if isinstance(a, torch.SymInt):
        return Size(str(a.node.expr))
    return a


def _readable(node: fx.Node) -> str:
    """What a node is called in the model, as far as that is known: path of a parameter, else name in the graph."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", node.name)
    return re.sub(r"\._(?:parameters|buffers)\b", "", clean_module_path(str(name() if callable(name) else name)))


def _reads_shape_only(node: fx.Node) -> bool:
    """True for a fill of a given tensor's shape with a number."""
    name = op_name(node)
    if name not in _SHAPE_ONLY or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    fill = node.args[1] if name == "aten.full_like" and len(node.args) > 1 else node.kwargs.get("fill_value")
    return not isinstance(fill, fx.Node)


def _as_full(node: fx.Node) -> Step:
    value = node.meta["val"]
    fill = _SHAPE_ONLY[op_name(node)]
    if fill is None:
        fill = node.args[1] if len(node.args) > 1 else node.kwargs["fill_value"]  # type: ignore[assignment]
    sizes = [_encode(s, {}) for s in value.shape]
    return Step("aten.full", torch.ops.aten.full.default, (sizes, fill), {"dtype": value.dtype})


def _small_constant(node: fx.Node) -> torch.Tensor | None:
    """The value of a ``get_attr`` node if it is a small constant tensor."""
    module = node.graph.owning_module
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    small = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and value.numel() <= 64
    return value.detach().cpu() if small else None


def _numbers(a: Any, found: dict[float, None]) -> None:
    if isinstance(a, (list, tuple)):
        for x in a:
            _numbers(x, found)
    elif isinstance(a, (int, float)) and not isinstance(a, bool):
        found.setdefault(float(a))
    elif isinstance(a, torch.Tensor) and a.numel() <= 64:
        for x in a.flatten().tolist():
            found.setdefault(float(x))


_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_FORMATS = {str(f): f for f in (torch.contiguous_format, torch.preserve_format, torch.channels_last)}


def _to_json(a: Any) -> Any:
    if isinstance(a, Ref):
        return {"ref": a.index}
    if isinstance(a, Size):
        return {"size": a.expr}
    if isinstance(a, torch.dtype):
        return {"dtype": str(a)}
    if isinstance(a, torch.memory_format):
        return {"format": str(a)}
    if isinstance(a, torch.layout):
        return {"layout": str(a)}
    if isinstance(a, torch.device):
        return {"device": str(a)}
    if isinstance(a, torch.Tensor):
        return {"tensor": a.tolist(), "of": str(a.dtype)}
    if isinstance(a, float) and a in (float("inf"), float("-inf")):
        return {"float": str(a)}
    if isinstance(a, (list, tuple)):
        return [_to_json(x) for x in a]
    return a


def _from_json(a: Any) -> Any:
    if isinstance(a, list):
        return [_from_json(x) for x in a]
    if not isinstance(a, dict):
        return a
    ((kind, value), *more) = a.items()
    readers: Mapping[str, Callable[[Any], Any]] = {
        "ref": Ref,
        "size": Size,
        "dtype": _DTYPES.__getitem__,
        "format": _FORMATS.__getitem__,
        "layout": lambda v: torch.strided,
        "device": torch.device,
        "float": float,
        "tensor": lambda v: torch.tensor(v, dtype=_DTYPES[more[0][1]]),
    }
    return readers[kind](value)


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{target.__module__}:{target.__name__}"


def _short(name: str) -> str:
    return ".".join(name.split(".")[:2]) if ":" not in name else name.split(":")[1]


def _target(name: str) -> Any:
    if ":" in name:
        known = {"_operator:getitem": operator.getitem, f"{torch.clone.__module__}:clone": torch.clone}
        if name not in known:
            raise ValueError(f"the certificate calls {name}, which this version does not know.")
        return known[name]
    namespace, op, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if packet is None:
        raise ValueError(f"the certificate calls {name}; import the package that registers it and try again.")
    return getattr(packet, overload)
