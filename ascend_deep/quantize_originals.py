"""The layers that quantised ones took the place of, kept for ``restore()``, and the conversions that they missed.

A kept layer is no part of the model, so ``model.half()`` and ``model.to(dtype)`` do not reach it. It is not converted
with the model, which would cost its precision and move it along; what was asked for is noted on empty tensors instead
and made up for when it comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["Missed", "bring_back"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Missed:
    """Conversions since the layer was replaced.

    Attributes:
        shared: names of parameters that both layers have, as the same objects: these were converted.
        marks: an empty tensor for each other parameter, which goes through every conversion. Layers that were
            quantised already have none: their numbers have no other dtype.
    """

    shared: tuple[str, ...] = ()
    marks: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def since(original: nn.Module, new: nn.Module) -> Missed:
        """Nothing yet, of a layer that ``new`` takes the place of."""
        held = dict(original.named_parameters())
        shared = tuple(n for n, p in held.items() if new._parameters.get(n) is p)
        if any(p.dtype not in _FLOATS for p in held.values()):
            return Missed(shared)
        return Missed(shared, {n: p.detach().new_empty(0) for n, p in held.items() if n not in shared})

    def note(self, convert: Callable[[Tensor], Tensor]) -> None:
        """A conversion of all parameters."""
        self.marks = {name: convert(mark) for name, mark in self.marks.items()}


def bring_back(original: nn.Module, new: nn.Module, missed: Missed) -> None:
    """Give ``original`` the device, mode and dtypes that it would have if it had stayed in the place of ``new``."""
    for name in missed.shared:
        holder, _, last = name.rpartition(".")
        original.get_submodule(holder)._parameters[last] = new._parameters[name]
    original.to(next(new.parameters()).device)
    for name, mark in missed.marks.items():
        parameter = original.get_parameter(name)
        parameter.data = parameter.data.to(mark.dtype)
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.to(mark.dtype)
    original.train(new.training)
