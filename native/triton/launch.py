"""Launches of Triton kernels with little time on the host.

Triton looks at every argument of every launch to find the variant that was compiled for it, about 60 of them for the
logits kernel. Two things are kept here instead:

* ``launch`` keeps the variant under what Triton specialises on. Numbers count as Triton counts them (1, multiples of
  16, others), so a context that grows by a token finds the variant of the last one.
* ``repeat`` keeps a whole launch under what its tensors look like. A call like an earlier one, as the next layer of a
  model makes it, only fills in addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["Rows", "key_of", "launch", "on_device", "repeat"]

_MANY = 4096
_WORD = 1 << 31
_HERE = nullcontext()

# What Triton specialises on, to the compiled kernel and its constants.
_VARIANTS: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
# ``key_of`` a call, to compiled kernel, grid and arguments; tensors are yet to be filled in.
_LAUNCHES: dict[tuple[Any, ...], tuple[Any, tuple[int, int, int], list[Any]]] = {}


class Rows:
    """A matrix that the copy engine reads in blocks: what a ``TensorDescriptor`` holds, without its checks."""

    __slots__ = ("base", "block_shape", "padding", "shape", "strides")

    def __init__(self, base: Tensor | None, rows: int, columns: int, pitch: int, block: tuple[int, int]) -> None:
        self.base = base
        self.shape = [rows, columns]
        self.strides = [pitch, 1]
        self.block_shape = list(block)
        self.padding = "zero"

    def at(self, base: Tensor | None) -> Rows:
        """The same matrix in another place."""
        rows, columns = self.shape
        return Rows(base, rows, columns, self.strides[0], (self.block_shape[0], self.block_shape[1]))


def key_of(tensors: Sequence[Tensor | None], *attributes: Any) -> tuple[Any, ...]:
    """What launches over ``tensors`` depend on: the current device, how they look, and hashable ``attributes``."""
    key = [torch.cuda.current_device(), *attributes]
    for t in tensors:
        if t is None:
            key.append(None)
        else:
            key += (t.dtype, t.shape, t.stride(), t.data_ptr() & 15 == 0)
    return tuple(key)


def repeat(key: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> bool:
    """The launch that was remembered under ``key``, over ``tensors``; False if there is none."""
    found = _LAUNCHES.get(key)
    if found is None:
        return False
    compiled, grid, template = found
    args = template.copy()
    for i, t in enumerate(tensors):
        if t is not None:
            a = args[i]
            args[i] = a.at(t) if isinstance(a, Rows) else t.data_ptr()
    compiled[grid](*args)
    return True


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    known: tuple[tuple[Any, ...], Sequence[Tensor | None]] | None = None,
) -> None:
    """``kernel[grid](*args, **options)`` on the current device and stream.

    Args:
        kernel: a function of ``triton.jit`` or Gluon; its parameters are ``args`` and then constants.
        grid: programs.
        args: tensors, ``Rows``, ``None``, ints and floats, in the order of the parameters.
        options: the constants and launch options, hashable, in the same order in every call.
        known: a key for ``repeat`` and its tensors. It is kept if they are where the first of ``args`` are, and not if
            one had to be copied.
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
            assert a.base is not None
            key.append(a.base.dtype)
            key += a.block_shape
        else:
            key.append(type(a))
        plain.append(a)
    found = _VARIANTS.get(tuple(key))
    if found is None:
        full = [TensorDescriptor(a.base, a.shape, a.strides, a.block_shape) if isinstance(a, Rows) else a for a in args]
        compiled = kernel[grid](*full, **options)
        if compiled is not None:  # Triton's interpreter has no variants.
            _keep(_VARIANTS, tuple(key), (compiled, tuple(options[name] for name in kernel.arg_names[len(args) :])))
        return
    compiled, constants = found
    compiled[grid](*plain, *constants)
    if known is not None and _in_place(plain, known[1]):
        template = [a.at(None) if isinstance(a, Rows) else a for a in (*plain, *constants)]
        _keep(_LAUNCHES, known[0], (compiled, grid, template))


def _in_place(plain: Sequence[Any], tensors: Sequence[Tensor | None]) -> bool:
    for a, t in zip(plain, tensors, strict=False):
        at = a.base.data_ptr() if isinstance(a, Rows) and a.base is not None else a
        if at != (None if t is None else t.data_ptr()):
            return False
    return True


def _keep(memory: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    if len(memory) >= _MANY:
        memory.clear()
    memory[key] = value


def on_device(t: Tensor) -> AbstractContextManager[Any]:
    """The device of ``t`` as the current one; nothing, which is faster, where it is that already."""
    return _HERE if t.device.index == torch.cuda.current_device() else torch.cuda.device_of(t)
