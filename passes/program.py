"""A region detached from its graph: a list of calls that runs on its own, at sizes of our choosing.

The region of a real model has real sizes (a MoE layer of DeepSeek-V3 has 11 GB of expert weights), so ``Program`` runs
it at small sizes instead: symbolic sizes are substituted, and literal sizes (``view(x, [4096, 7168])``) are replaced
through one mapping for the whole region (``sizes.Dims``). The mapping keeps equal literals equal; if it is wrong for a
region, the run fails or the results differ and the region is left alone, so a wrong mapping cannot cause a wrong
rewrite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ascend_deep.lowering import _torch_compat
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.program_json import from_json, short_name, target_name, target_of, to_json
from ascend_deep.passes.sizes import Dims, Ref, Size
from ascend_deep.passes.stand_ins import STAND_INS

if TYPE_CHECKING:
    from ascend_deep.passes.region import Region

__all__ = ["Program", "Step", "reads_shape_only", "small_constant"]

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

# Calls that make a tensor of the default dtype if none is named. It is written out, as the default may be another when
# the program runs, and ``stand_ins.widened`` sees it then.
_DEFAULT_DTYPE = frozenset(
    f"aten.{n}" for n in ("zeros", "ones", "full", "empty", "scalar_tensor", "arange", "eye", "linspace")
)


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
                steps.append(Step("constant", torch.clone, (small_constant(node),), {}))
            elif reads_shape_only(node) and node.args[0] not in index:
                steps.append(_as_full(node))
            else:
                args = tuple(_encode(a, index) for a in node.args)
                kwargs = {
                    k: torch.device("cpu") if k == "device" and v is not None else _encode(v, index)
                    for k, v in node.kwargs.items()
                    if k != "pin_memory"
                }
                if _takes_one(node):
                    # A position is no size. Keyword arguments are not replaced.
                    args, kwargs = args[:2], {"start": args[2], "end": args[3]}
                value = node.meta.get("val")
                default = op_name(node) in _DEFAULT_DTYPE and kwargs.get("dtype") is None
                if default and value is not None and value.is_floating_point():
                    kwargs["dtype"] = value.dtype
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
                [target_name(s.target), [to_json(a) for a in s.args], {k: to_json(v) for k, v in s.kwargs.items()}]
                for s in self.steps
            ],
            "results": list(self.results),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Program:
        """Inverse of ``to_dict``. Ops of packages that are not imported raise a sentence that names them."""
        steps = []
        for name, args, kwargs in data["steps"]:
            target = target_of(name)
            steps.append(
                Step(
                    short_name(name),
                    target,
                    tuple(from_json(a) for a in args),
                    {k: from_json(v) for k, v in kwargs.items()},
                )
            )
        return Program(tuple(data["roles"]), tuple(steps), tuple(data["results"]))


# -- encoding -------------------------------------------------------------------------------------------------------
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


def _takes_one(node: fx.Node) -> bool:
    """True for ``x[:, e : e + 1]`` with a number e that is not negative."""
    if op_name(node) != "aten.slice" or len(node.args) != 4 or node.kwargs:
        return False
    start, end = node.args[2:4]
    return type(start) is int and type(end) is int and start >= 0 and end == start + 1


def reads_shape_only(node: fx.Node) -> bool:
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


def small_constant(node: fx.Node) -> torch.Tensor | None:
    """The value of a ``get_attr`` node if it is a small constant tensor."""
    module = node.graph.owning_module
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    small = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and value.numel() <= 64
    return value.detach().cpu() if small else None
