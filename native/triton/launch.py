"""Launches of Triton kernels with little time on the host.

Triton looks at every argument of every launch to find the variant that was compiled for it, about 60 of them for the
logits kernel. ``launch`` keeps the variant under what Triton specialises on, and calls with a known key go straight to
the compiled kernel with the addresses of their tensors. Numbers count as Triton counts them (1, multiples of 16,
others), so a context that grows by a token finds the variant of the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["Rows", "launch", "on_device"]

_MANY = 4096
_KNOWN: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_WORD = 1 << 31
_HERE = nullcontext()


class Rows:
    """A matrix that the copy engine reads in blocks: what a ``TensorDescriptor`` holds, without its checks."""

    __slots__ = ("base", "block_shape", "padding", "shape", "strides")

    def __init__(self, base: Tensor, rows: int, columns: int, pitch: int, block: tuple[int, int]) -> None:
        self.base = base
        self.shape = [rows, columns]
        self.strides = [pitch, 1]
        self.block_shape = list(block)
        self.padding = "zero"


def launch(kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """``kernel[grid](*args, **options)`` on the current device and stream.

    Args:
        kernel: a function of ``triton.jit`` or Gluon; its parameters are ``args`` and then constants.
        grid: programs.
        args: tensors, ``Rows``, ``None``, ints and floats, in the order of the parameters.
        options: the constants and launch options, hashable, in the same order in every call.
    """
    plain: list[Any] = []
    key: list[Any] = [id(kernel), torch.cuda.current_device(), *options.values()]
    for a in args:
        if isinstance(a, int):
            key.append(1 if a == 1 else (2 if a & 15 else 3) if -_WORD <= a < _WORD else (4 if a & 15 else 5))
        elif isinstance(a, Tensor):
            key.append(a.dtype)
            a = a.data_ptr()
            key.append(a & 15 == 0)
        elif isinstance(a, Rows):
            key.append(a.base.dtype)
            key += a.block_shape
        else:
            key.append(type(a))
        plain.append(a)
    found = _KNOWN.get(tuple(key))
    if found is not None:
        compiled, constants = found
        compiled[grid](*plain, *constants)
        return
    full = [TensorDescriptor(a.base, a.shape, a.strides, a.block_shape) if isinstance(a, Rows) else a for a in args]
    compiled = kernel[grid](*full, **options)
    if compiled is None:
        return  # Triton's interpreter has no variants.
    if len(_KNOWN) >= _MANY:
        _KNOWN.clear()
    _KNOWN[tuple(key)] = (compiled, tuple(options[name] for name in kernel.arg_names[len(args) :]))


def on_device(t: Tensor) -> AbstractContextManager[Any]:
    """The device of ``t`` as the current one; nothing, which is faster, where it is that already."""
    return _HERE if t.device.index == torch.cuda.current_device() else torch.cuda.device_of(t)
