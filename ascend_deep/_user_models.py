"""Models of the user's own, by import path or file: what ``ascend-deep explain package.module:attribute`` loads."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["BadInput", "Loaded", "ModelError", "from_import", "is_path"]


class BadInput(ValueError):
    """What the user asked for cannot be done; the message is one clear sentence."""


class ModelError(RuntimeError):
    """The user's own code raised while it made the model; the message is one clear sentence."""


@dataclass(frozen=True)
class Loaded:
    """A model and inputs to call it with."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def inputs(self) -> str:
        """The tensors that the model is called with, e.g. ``"int64[2, 9]"``."""
        values = torch.utils._pytree.tree_leaves((self.args, dict(self.kwargs)))
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        return ", ".join(f"{_short(t.dtype)}{list(t.shape)}" for t in tensors) or "no tensors"

    def dtype(self) -> str:
        """Dtype of the floating parameters, e.g. ``"bfloat16"``; ``""`` without any."""
        return ", ".join(sorted({_short(p.dtype) for p in self.model.parameters() if p.is_floating_point()}))


def is_path(name: str) -> bool:
    """True for what can only be a file or a folder: no module name has a separator in it or ends in ``.py``."""
    path, colon, attribute = name.rpartition(":")
    path = path if colon and attribute.replace(".", "").isidentifier() else name
    return any(s and s in path for s in (os.sep, os.altsep)) or path.startswith((".", "~")) or path.endswith(".py")


def from_import(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Loaded:
    """The model that ``package.module:attribute`` or ``file.py:attribute`` stands for.

    Args:
        shape: whole shape of the random input of a model that comes without inputs.
        dtype: of that input, and the model is cast to it; a model that comes with inputs stays as it is.

    Raises:
        BadInput: there is no such module, file or attribute, or it is not a model.
        ModelError: the module or the callable raised.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not attribute:
        raise BadInput(f"{name!r} names no attribute; it takes package.module:attribute or file.py:attribute.")
    value: Any = _import_file(module_name) if is_path(module_name) else _import(module_name)
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise BadInput(f"module {module_name!r} has no attribute {attribute!r}.")
        value = getattr(value, part)
    made = value if isinstance(value, nn.Module) else _make(name, value)
    parts = made if isinstance(made, tuple) else (made,)
    model, args, kwargs = (*parts, *((), {})[len(parts) - 1 :]) if 1 <= len(parts) <= 3 else (None, (), {})
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"{name!r} gives a {type(made).__name__}; it takes model, (model, args) or (model, args, kwargs)."
        )
    if len(parts) == 1:
        model = model.to(dtype)
        try:
            args = (torch.randn(shape, dtype=dtype),)
        except RuntimeError as error:
            text = ",".join(map(str, shape))
            raise BadInput(f"shape is {text}; no tensor of {dtype} of that size can be made here.") from error
    elif isinstance(args, torch.Tensor):
        args = (args,)
    return Loaded(model, tuple(args), dict(kwargs), type(model).__name__)


def _import(module_name: str) -> ModuleType:
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise BadInput(f"cannot import {module_name!r}: it is not the name of a module, as in package.module.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: models beside the caller are importable
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise BadInput(f"cannot import {module_name!r}: {error}.") from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"importing {module_name!r} raised {_told(error)}") from error


def _import_file(path: str) -> ModuleType:
    """The module in a Python file, under the name of the file, so that what it defines can be looked up."""
    file = Path(path).expanduser().absolute()
    if file.suffix != ".py":
        raise BadInput(f"{path!r} is a path; it takes a Python file and an attribute of it, as in models/moe.py:build.")
    if not file.is_file():
        raise BadInput(f"there is no file {path!r}.")
    known = sys.modules.get(file.stem)
    if known is not None:
        if getattr(known, "__file__", None) == str(file):
            return known
        raise BadInput(f"cannot load {path!r}: another module named {file.stem!r} is loaded; rename the file.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # as `python file.py` does: it may import what lies beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[file.stem]
        raise ModelError(f"importing {path!r} raised {_told(error)}") from error
    return module


def _make(name: str, value: Any) -> Any:
    if not callable(value):
        raise BadInput(
            f"{name!r} is a {type(value).__name__}; it takes a module, its class, or a callable that makes one."
        )
    needed = _required(value)
    if needed:
        raise BadInput(f"{name!r} needs the argument {needed[0]!r}; name a callable without required arguments.")
    try:
        return value()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{name!r} raised {_told(error)}") from error


def _required(value: Any) -> list[str]:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


def _told(error: BaseException) -> str:
    """An error as the end of a sentence, on one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}." if lines else f"{type(error).__name__}."


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
