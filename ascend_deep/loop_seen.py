"""What a part of a forward reads of its module when it runs, however its code gets hold of it.

Code can reach its module under another name (``me = self``), in a function that is given it, or by a string. So the
part is run with modules that note which of their attributes are read, and with an eye on every buffer that a torch
function takes.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ascend_deep.loop_checks import INTERNALS

__all__ = ["loose_names", "seen", "tensors_of"]

_OWN_CODE = "torch.nn.modules."


def seen(module: nn.Module, call: Callable[[], Any]) -> tuple[set[tuple[str, str]], set[str]]:
    """Run ``call``.

    Returns:
        (path of a submodule, name) of every attribute that was read and is no parameter, buffer, submodule or internal
        of ``nn.Module``; and the names of buffers and other tensors of the module that were used.

    Raises:
        Exception: whatever ``call`` raises.
    """
    tensors = tensors_of(module)
    touched: set[str] = set()
    found: set[tuple[int, str]] = set()
    with _noted(module, found), _Touched(tensors, touched):
        call()
    paths = {id(m): n for n, m in module.named_modules()}
    return {(paths[i], n) for i, n in found if i in paths and not _is_internal(n)}, touched


def tensors_of(module: nn.Module) -> dict[int, str]:
    """Names of the buffers of a module, and of tensors that are plain attributes, by ``id``."""
    found: dict[int, str] = {}
    for part in module.modules():
        for name, value in (*part._buffers.items(), *vars(part).items()):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                found[id(value)] = name
    return found


def _is_internal(name: str) -> bool:
    return name in INTERNALS or (name.startswith("__") and name.endswith("__"))


@contextmanager
def _noted(module: nn.Module, found: set[tuple[int, str]]) -> Iterator[None]:
    """Within this context the modules have classes that add (id of a module, name) for every attribute read."""
    before: list[tuple[nn.Module, type]] = []
    try:
        for part in dict.fromkeys(module.modules()):
            kind = type(part)
            if kind.__module__.startswith("torch."):
                continue
            before.append((part, kind))
            part.__class__ = _noting(kind, found)
        yield
    finally:
        for part, kind in before:
            part.__class__ = kind


def _noting(kind: type, found: set[tuple[int, str]]) -> type:
    plain: Any = kind.__getattribute__

    def read(self: Any, name: str) -> Any:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith(_OWN_CODE):
            found.add((id(self), name))
        return plain(self, name)

    def fill(space: dict[str, Any]) -> None:
        space |= {"__getattribute__": read, "__module__": kind.__module__, "__qualname__": kind.__qualname__}

    return types.new_class(kind.__name__, (kind,), {}, fill)


class _Touched(TorchFunctionMode):
    """Adds the names of those of ``tensors`` that a torch function takes."""

    def __init__(self, tensors: dict[int, str], touched: set[str]) -> None:
        super().__init__()
        self._tensors, self._touched = tensors, touched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, Tensor) and id(value) in self._tensors:
                self._touched.add(self._tensors[id(value)])
        return func(*args, **(kwargs or {}))


def loose_names(module: nn.Module, names: Sequence[str]) -> Iterator[tuple[nn.Module, str]]:
    """Attributes read of something that reading the code does not identify, where they could be a module's.

    Yields:
        The submodules that have an attribute, method or buffer of such a name; parameters and submodules, which are
        looked at when the code runs, excluded.
    """
    for part in module.modules():
        kind = type(part)
        if kind.__module__.startswith("torch."):
            continue
        for name in names:
            if _is_internal(name) or name == "forward" or name in part._parameters or name in part._modules:
                continue
            if name in vars(part) or name in part._buffers or name in _own_names(kind):  # type: ignore[arg-type]
                yield part, name


@functools.lru_cache(maxsize=512)
def _own_names(kind: type) -> frozenset[str]:
    """What the classes of a module define themselves, above ``nn.Module``."""
    own = [base for base in inspect.getmro(kind) if base is not object and not base.__module__.startswith("torch.")]
    return frozenset(name for base in own for name in vars(base))
