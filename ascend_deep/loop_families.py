"""Parameters of experts that come in equal sets, and copies of a module in which their values are random.

A family is one parameter of every expert: ``experts.*.gate_proj.weight`` of a ``ModuleList``, or ``w1`` [E, I, H] of
a module that keeps all experts in one tensor. What a loop computes is found on a copy of its module (``twin``):
parameters have random values there, so that experts which are equal or zero in the model can be told apart, and
running the copy changes nothing in the model.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Family", "alias", "copied_elements", "families", "is_owner", "twin"]

_MOST_MATRICES = 5  # gate, up and down, and two to spare for a reason; most decoder layers have more
_MOST_NAMED = 12  # if they are called experts: with adapters, to be left with a reason
_STEP = 977  # elements by which the windows of two experts are apart


@dataclass(frozen=True)
class Family:
    """One parameter of every expert.

    Attributes:
        pattern: name with ``*`` for the number of the expert.
        names: names of the parameters; one name if a single tensor holds all experts.
        stacked: a single tensor holds all experts, in its first dimension.
        shape: of one expert's parameter.
        experts: how many.
        offset: number of the first (0, unless other processes have the experts before it).
    """

    pattern: str
    names: tuple[str, ...]
    stacked: bool
    shape: tuple[int, ...]
    experts: int
    offset: int = 0

    def of(self, parameters: Mapping[str, Tensor], expert: int) -> Tensor:
        """The parameter of expert number ``expert`` (counted from ``offset``)."""
        return parameters[self.names[0]][expert] if self.stacked else parameters[self.names[expert]]


def families(module: nn.Module) -> list[Family]:
    """Families among the parameters of ``module``, in the order of their names' first appearance.

    Single tensors with a leading dimension of experts are families if they have three dimensions, or two and lie in
    the same submodule as one of three.
    """
    lists: dict[str, dict[int, tuple[str, Tensor]]] = {}
    stacked: dict[str, list[tuple[str, Tensor]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        pattern, number = _pattern(name)
        if number is not None:
            lists.setdefault(pattern, {})[number] = (name, parameter)
        elif parameter.dim() in (2, 3):
            stacked.setdefault(name.rpartition(".")[0], []).append((name, parameter))
    found = []
    for pattern, members in lists.items():
        numbers = sorted(members)
        tensors = [members[n][1] for n in numbers]
        if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))) and _equal(tensors):
            shape = tuple(tensors[0].shape)
            names = tuple(members[n][0] for n in numbers)
            found.append(Family(pattern, names, False, shape, len(numbers), numbers[0]))
    for group in stacked.values():
        counts = {p.shape[0] for _, p in group if p.dim() == 3}
        if len(counts) == 1 and (experts := counts.pop()) > 1:
            found += [
                Family(name, (name,), True, tuple(p.shape[1:]), experts) for name, p in group if p.shape[0] == experts
            ]
    return found


def is_owner(module: nn.Module) -> bool:
    """True for modules that may loop over experts: their own parameters, or those of direct children, are families."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        return False
    own = [n for n, p in module.named_parameters(recurse=False) if p.dim() == 3]
    containers = [
        child
        for name, child in module.named_children()
        if _pattern(name)[1] is not None
        or isinstance(child, nn.ParameterList)
        or (isinstance(child, (nn.ModuleList, nn.ModuleDict)) and type(child).forward is nn.Module.forward)
    ]
    if len(own) < 2 and not containers:
        return False
    near = [f for f in families(module) if len(f.shape) == 2 and _depth(f) <= 1]
    named = all("expert" in f.pattern.lower() for f in near)
    return 2 <= len(near) <= (_MOST_NAMED if named else _MOST_MATRICES)


def copied_elements(module: nn.Module) -> int:
    """How many elements ``twin`` has to make for parameters that are no expert's."""
    held = {name for family in families(module) for name in family.names}
    return sum(p.numel() for name, p in module.named_parameters() if name not in held)


def _depth(family: Family) -> int:
    """How deep below the module the experts are counted."""
    return 0 if family.stacked and "." not in family.pattern else family.pattern.split("*")[0].count(".")


def _pattern(name: str) -> tuple[str, int | None]:
    """(``experts.*.w1.weight``, 3) of ``experts.3.w1.weight`` or ``experts.expert_3.w1.weight``; else (name, None)."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        match = re.fullmatch(r"(\D*_)?(\d+)", part)
        if match:
            return ".".join([*parts[:i], f"{match[1] or ''}*", *parts[i + 1 :]]), int(match[2])
    return name, None


def _equal(tensors: list[Tensor]) -> bool:
    first = tensors[0]
    return all(t.shape == first.shape and t.dtype == first.dtype and t.device == first.device for t in tensors)


# -- copies -----------------------------------------------------------------------------------------------------------
def twin(module: nn.Module, dtype: torch.dtype, seed: int) -> nn.Module:
    """A copy of ``module`` on the CPU with random parameters in ``dtype``; buffers keep their values.

    The parameters of a family are windows into one random vector, so that a copy of 64 experts needs little more
    memory than one of them. Nothing may write into them.

    Raises:
        Exception: whatever ``copy.deepcopy`` raises for modules that cannot be copied.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(count: int) -> Tensor:
        return torch.randn(count, generator=generator).to(dtype)

    parameters = dict(module.named_parameters(remove_duplicate=False))
    values: dict[str, Tensor] = {}
    for family in families(module):
        count = math.prod(family.shape)
        pool = noise(count + family.experts * _STEP) * _size(family.shape)
        strides = torch.empty(family.shape, device="meta").stride()
        if family.stacked:
            values[family.names[0]] = pool.as_strided((family.experts, *family.shape), (_STEP, *strides))
        else:
            for i, name in enumerate(family.names):
                values[name] = pool.as_strided(family.shape, strides, i * _STEP)
    for name, parameter in parameters.items():
        if name not in values:
            values[name] = (noise(parameter.numel()) * _size(tuple(parameter.shape))).view(parameter.shape)
    return _copy(
        module,
        {id(p): nn.Parameter(values[n], requires_grad=dtype.is_floating_point) for n, p in parameters.items()},
        lambda b: (torch.zeros(b.shape, dtype=b.dtype) if b.is_meta else b.detach().cpu().clone()).to(
            dtype if b.is_floating_point() else b.dtype
        ),
    )


def alias(module: nn.Module) -> nn.Module:
    """A copy of ``module`` with the same parameter objects and buffers of its own."""
    return _copy(module, {id(p): p for p in module.parameters()}, lambda b: b.detach().clone())


def _copy(module: nn.Module, memo: dict[int, object], buffer: Callable[[Tensor], Tensor]) -> nn.Module:
    for tensor in module.buffers():
        memo[id(tensor)] = buffer(tensor)
    return copy.deepcopy(module, memo)  # type: ignore[arg-type]


def _size(shape: tuple[int, ...]) -> float:
    """Standard deviation: products keep the size of their input, vectors are about one half."""
    return 1.2 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.5
