"""Argument checks that all families share.

Sizes may be symbolic: they are compared through ``torch._check_value``, which asserts and never branches, so a check
adds no guard on the number of tokens. Dtypes, devices, ranks and names are plain Python values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["COMPUTE", "FLOATING", "INDEX", "choice", "compute_dtype", "dtypes", "rank", "same_device", "size"]

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDEX = (torch.int64, torch.int32)
# Internal arithmetic: f64 inputs keep their precision (numerical gradient checks), all others compute in f32.
COMPUTE = {torch.float64: torch.float64}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which inputs of ``dtype`` are computed: f64 for f64, f32 for everything else."""
    return COMPUTE.get(dtype, torch.float32)


def choice(op: str, argument: str, value: Any, valid: Iterable[str]) -> None:
    """``value`` must be one of ``valid``."""
    if value not in valid:
        raise ValueError(f"{op}: {argument} is {value!r}; it must be one of {', '.join(map(repr, valid))}.")


def dtypes(op: str, argument: str, tensor: torch.Tensor, valid: tuple[torch.dtype, ...]) -> None:
    """The dtype of ``tensor`` must be one of ``valid``."""
    if tensor.dtype not in valid:
        names = ", ".join(str(v).removeprefix("torch.") for v in valid)
        raise TypeError(f"{op}: {argument} has dtype {str(tensor.dtype).removeprefix('torch.')}; accepted: {names}.")


def rank(op: str, argument: str, tensor: torch.Tensor, shape: str, dims: int) -> None:
    """``tensor`` must have ``dims`` dimensions; ``shape`` says which."""
    if tensor.dim() != dims:
        raise ValueError(f"{op}: {argument} has {tensor.dim()} dimensions; it must be {shape}.")


def size(op: str, what: str, found: Any, wanted: Any, source: str) -> None:
    """Two sizes, possibly symbolic, must be equal: ``found`` (described by ``what``), ``wanted`` (by ``source``)."""
    if found is wanted or (type(found) is int and type(wanted) is int and found == wanted):
        return
    torch._check_value(found == wanted, lambda: f"{op}: {what} is {found}, but {source} is {wanted}.")


def same_device(op: str, first: str, tensor: torch.Tensor, **others: torch.Tensor | None) -> None:
    """All tensors must be on one device."""
    device = tensor.device
    for name, other in others.items():
        if other is not None and other.device != device:
            raise TypeError(
                f"{op}: {first} is on {device}, but {name} is on {other.device}; all must be on one device."
            )
