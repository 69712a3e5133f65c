"""What probing cannot see, refused by structure: thresholds out of range, positions of tokens, cut gradients.

A probe shows a difference only where it reaches: a clamp at 50 is invisible to logits of size 10, a rule for tokens
beyond the hundredth to probes of sixty tokens, a ``detach`` to a comparison of forward results. These checks read the
region instead, and refuse what the solution does not account for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ascend_deep.passes._types import Refusal, Solution
from ascend_deep.passes.graph_view import op_name
from ascend_deep.passes.region import Region
from ascend_deep.passes.sizes import Dims

__all__ = ["beyond_probes", "cut_gradients", "is_whole", "position_dependence", "unexplained_thresholds"]

_THRESHOLDS = frozenset(
    f"aten.{name}"
    for name in (
        "clamp", "clamp_min", "clamp_max", "hardtanh", "relu6", "hardswish", "hardsigmoid", "threshold", "minimum",
        "maximum", "fmin", "fmax", "nan_to_num", "gt", "ge", "lt", "le", "round", "floor", "ceil", "trunc", "sign",
        "fmod", "remainder", "heaviside", "softshrink", "hardshrink", "isnan", "isinf", "isfinite", "isposinf",
        "isneginf", "nansum", "nanmean",
    )
)  # fmt: skip
# Those that change or look for NaNs and infinities are seen by no probe: its inputs have none.
_ALWAYS = frozenset(
    f"aten.{name}"
    for name in (
        "relu6", "hardswish", "hardsigmoid", "softshrink", "hardshrink", "nan_to_num", "isnan", "isinf", "isfinite",
        "isposinf", "isneginf", "nansum", "nanmean",
    )
)  # fmt: skip
_ROUNDING = frozenset(f"aten.{name}" for name in ("round", "floor", "ceil", "trunc", "sign", "fmod", "remainder"))

# Ops that treat rows differently by position when they work along the tokens: position of the dim argument, default.
_ALONG: Mapping[str, tuple[int, Any]] = {
    "aten.cumsum": (1, None), "aten.cumprod": (1, None), "aten.cummax": (1, None), "aten.cummin": (1, None),
    "aten.logcumsumexp": (1, None), "aten.flip": (1, None), "aten.roll": (2, []), "aten.slice": (1, 0),
    "aten.narrow": (1, 0), "aten.select": (1, 0), "aten.cat": (1, 0), "aten.index_select": (1, None),
    "aten.sort": (1, -1), "aten.argsort": (1, -1), "aten.sum": (1, None), "aten.mean": (1, None),
    "aten.amax": (1, None), "aten.amin": (1, None), "aten.softmax": (1, None), "aten._softmax": (1, None),
    "aten.split": (2, 0), "aten.split_with_sizes": (2, 0), "aten.diff": (2, -1),
}  # fmt: skip
_POSITIONS = frozenset({"aten.arange", "aten.linspace", "aten.tril", "aten.triu", "aten.constant_pad_nd"})


# Ops that take or replace a part along one dim: positions of the dim argument and of the numbers.
_CUTS: Mapping[str, tuple[int, slice]] = {
    "aten.slice": (1, slice(2, 4)), "aten.narrow": (1, slice(2, 4)), "aten.select": (1, slice(2, 3)),
    "aten.slice_scatter": (2, slice(3, 5)), "aten.select_scatter": (2, slice(3, 4)),
}  # fmt: skip
# Those whose numbers a program takes for sizes, hence maps.
_MAPPED = frozenset({"aten.slice", "aten.narrow"})


def unexplained_thresholds(
    region: Region, solution: Solution, explained: Collection[float] = (), roundings: Collection[str] = ()
) -> Refusal | None:
    """Refuse clamps and comparisons of floats at a number that no attribute of the solution stands for.

    Args:
        explained: numbers that the op's own rule has, and that the recogniser tries.
        roundings: names of rounding ops that are part of the op's rule.
    """
    known = {0.0, *explained}
    for value in solution.attrs.values():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            known |= {float(value), -float(value)}
    for node in region.nodes:
        name = op_name(node)
        if name not in _THRESHOLDS or not _reads_floats(node):
            continue
        bare = name.removeprefix("aten.")
        if name in _ALWAYS or (name in _ROUNDING and bare not in roundings):
            return Refusal(f"the block applies {bare}, which no attribute of {solution.op} stands for.", node)
        for number in _literals([node.args[1:], list(node.kwargs.values())]):
            if math.isfinite(number) and not any(math.isclose(number, k, rel_tol=1e-6) for k in known):
                return Refusal(
                    f"the block has a {bare} at {number:g}, which no attribute of {solution.op} stands for.", node
                )
    return None


def cut_gradients(region: Region) -> Refusal | None:
    """Refuse ``detach``: the forward results would agree and the gradients would not."""
    for node in region.nodes:
        if op_name(node) == "aten.detach":
            return Refusal("the block detaches a value, and the op has gradients there.", node)
    return None


def position_dependence(region: Region, rows: torch.Tensor) -> Refusal | None:
    """Refuse a block in which a row of the result may depend on other rows or on where the row is.

    Args:
        rows: a (fake) tensor [.., E] whose dims but the last are tokens.
    """
    sizes = list(rows.shape[:-1])
    total: Any = math.prod(sizes) if all(isinstance(s, int) for s in sizes) else None
    own = {int(s) for s in rows.shape[-1:] if isinstance(s, int)}

    def is_tokens(size: Any) -> bool:
        if isinstance(size, torch.SymInt):
            return True  # in these blocks only the number of tokens is symbolic
        return size == total and size > 1 and size not in own

    for node in region.nodes:
        name = op_name(node)
        value = node.meta.get("val")
        if name in _POSITIONS and isinstance(value, torch.Tensor) and any(is_tokens(s) for s in value.shape):
            return Refusal("the block depends on the position of a token.", node)
        if name not in _ALONG:
            continue
        place, default = _ALONG[name]
        source = node.args[0][0] if isinstance(node.args[0], (list, tuple)) else node.args[0]
        held = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(held, torch.Tensor) or held.dim() == 0 or is_whole(node, name, held):
            continue
        dims: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
        every = dims if isinstance(dims, (list, tuple)) else [dims]
        for dim in every or range(held.dim()):
            index = 0 if dim is None else int(dim) % held.dim()
            if dim is None or (is_tokens(held.shape[index]) and index < max(1, held.dim() - 1)):
                return Refusal(
                    f"{name.removeprefix('aten.')} works along the tokens, and the op treats every token alone.", node
                )
    return None


def beyond_probes(region: Region, plans: Sequence[Dims]) -> Refusal | None:
    """Refuse a block that takes or moves a part of a tensor, by a number that lies outside the tensor at all ``plans``.

    Such a part is the whole tensor, or none of it, wherever the block is run, and something else in the model.

    Args:
        plans: sizes of the probes.
    """
    for node in region.nodes:
        name = op_name(node)
        source = node.args[0] if node.args else None
        held = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(held, torch.Tensor) or held.dim() == 0:
            continue
        assert isinstance(source, fx.Node)
        for dim, numbers in _numbers_along(node, name, held.dim()):
            real = held.shape[dim]
            for number in numbers:
                reach = abs(number)
                if reach < 2 or reach >= 1 << 62 or (name in _CUTS and isinstance(real, int) and reach >= real):
                    continue
                mapped = name in _MAPPED
                if all((dims.literals.get(reach, reach) if mapped else reach) >= dims.size(real) for dims in plans):
                    return Refusal(
                        f"{name.removeprefix('aten.')} has the number {number}, which is more than the sizes that the "
                        "block was run at.",
                        node,
                    )
    return None


# -- details --------------------------------------------------------------------------------------------------------
def is_whole(node: fx.Node, name: str, held: torch.Tensor) -> bool:
    """True for a slice of ``held`` that takes everything."""
    if name != "aten.slice":
        return False
    start = node.args[2] if len(node.args) > 2 else 0
    end = node.args[3] if len(node.args) > 3 else None
    step = node.args[4] if len(node.args) > 4 else 1
    return bool(start in (0, None) and (end is None or (isinstance(end, int) and end >= 1 << 62)) and step == 1)


def _reads_floats(node: fx.Node) -> bool:
    first = node.args[0] if node.args else None
    value = first.meta.get("val") if isinstance(first, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _literals(a: Any) -> Iterator[float]:
    if isinstance(a, (list, tuple)):
        for x in a:
            yield from _literals(x)
    elif isinstance(a, fx.Node):
        if op_name(a) in ("aten.scalar_tensor", "aten.full", "aten.full_like"):
            yield from _literals([x for x in a.args if not isinstance(x, (list, tuple, fx.Node))])
    elif isinstance(a, (int, float)) and not isinstance(a, bool):
        yield float(a)


def _numbers_along(node: fx.Node, name: str, rank: int) -> Iterator[tuple[int, list[int]]]:
    """Dims of the first operand and the numbers by which a part of them is taken or moved."""
    if name in _CUTS:
        place, numbers = _CUTS[name]
        dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
        given = [*node.args[numbers], *(node.kwargs.get(k) for k in ("start", "end", "length", "index"))]
        yield int(dim) % rank, [n for n in given if isinstance(n, int)]  # type: ignore[arg-type]
    elif name == "aten.roll":
        shifts, dims = (list(a) if isinstance(a, (list, tuple)) else [a] for a in (*node.args[1:], [])[:2])
        for dim, shift in zip(dims or range(rank), shifts if dims else shifts * rank, strict=False):
            yield int(dim) % rank, [shift] if isinstance(shift, int) else []  # type: ignore[arg-type]
    elif name in ("aten.tril", "aten.triu"):
        diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
        for dim in range(max(0, rank - 2), rank):
            yield dim, [abs(diagonal) + 1] if isinstance(diagonal, int) and diagonal else []
