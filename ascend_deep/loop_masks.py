"""Expert ids that a loop gets as a mask [.., E] of zeros and ones, with at most one one per row.

Switch Transformers hands its experts ``one_hot(ids, E) * (position <= capacity)``: the one of a row is its expert, and
a row without one is a token that no expert takes. Numbers alone do not say that a mask has never two ones in a row, so
it is followed from ``one_hot`` on, through what keeps that property.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["OneHot", "ids_of", "mask_of"]

_KEEPS = frozenset(
    {
        "view", "reshape", "unsqueeze", "squeeze", "clone", "contiguous", "detach", "to", "long", "int", "flatten",
        "unflatten", "view_as", "reshape_as", "type", "type_as",
    }
)  # fmt: skip
_PRODUCTS = frozenset({"mul", "__mul__", "__rmul__", "multiply"})


class OneHot(TorchFunctionMode):
    """Follows the results of ``one_hot``.

    A tensor is known by where its data lie and by its version, so that writing into it ends what is known of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, tuple[Tensor, int]] = {}

    def holds(self, tensor: Tensor) -> bool:
        """True if the last dimension of ``tensor`` is known to hold at most one one, and zeros."""
        known = self._known.get(_place(tensor))
        return known is not None and known[0]._version == known[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = getattr(func, "__name__", "")
        before = [isinstance(a, Tensor) and a.layout == torch.strided and self.holds(a) for a in args[:2]]
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor) or out.layout != torch.strided or out.dtype not in (torch.int64, torch.int32):
            return out
        if kept == "one_hot":
            self._note(out)
        elif kept in _KEEPS and any(before[:1]):
            # The same elements in the same order, in rows of the same length.
            if out.shape[-1:] == args[0].shape[-1:] and out.numel() == args[0].numel():
                self._note(out)
        elif kept in _PRODUCTS and any(before) and len(args) == 2:
            mask, other = args if before[0] else (args[1], args[0])
            if isinstance(other, Tensor) and other.dtype == torch.bool and out.shape == mask.shape:
                self._note(out)
        return out

    def _note(self, tensor: Tensor) -> None:
        self._known[_place(tensor)] = (tensor, tensor._version)


def _place(tensor: Tensor) -> Any:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def ids_of(mask: Tensor) -> Tensor:
    """[T, 1] ids of a mask [.., E]; -1 for rows without a one."""
    rows = mask.reshape(-1, mask.shape[-1])
    return torch.where(rows.amax(-1) > 0, rows.argmax(-1), -1).unsqueeze(-1)


def mask_of(ids: Tensor, experts: int, like: Tensor) -> Tensor:
    """The mask of ids [T, 1] in shape and dtype of ``like``; a row of zeros where an id is no expert's."""
    return (ids == torch.arange(experts)).to(like.dtype).reshape(like.shape)
