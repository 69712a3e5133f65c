"""Reports as JSON data and back, and the versions they name.

Fields declared as tuples become lists and are read back as tuples. Inside free-form mappings (attributes of an op,
a serialised program) a value that JSON has no form for is tagged: ``{"$tuple": […]}``, ``{"$dtype": "torch.float32"}``,
``{"$float": "inf"}``. Number fields that JSON cannot hold are the strings "inf", "-inf" and "nan".
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import types
import typing
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch

__all__ = ["decode", "encode", "versions"]

T = TypeVar("T")
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_PROVIDERS = ("triton", "torch_npu", "deep_gemm", "deep_ep", "transformers")


@lru_cache(maxsize=1)
def versions() -> Mapping[str, str]:
    """Versions of torch, ascend-deep, and those of the optional packages that are installed. Imports nothing."""
    found = {"torch": str(torch.__version__)}
    for name in ("ascend-deep", *_PROVIDERS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def encode(value: Any) -> Any:
    """JSON data of a dataclass (as an object), and of anything that its fields may hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _field(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return _free(value)


def _field(value: Any) -> Any:
    if isinstance(value, tuple):
        return [encode(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return encode(value)


def _free(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, tuple):
        return {"$tuple": [_free(v) for v in value]}
    if isinstance(value, list):
        return [_free(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _free(v) for k, v in value.items()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a report cannot hold a {type(value).__name__}: {value!r}.")


def decode(kind: type[T], data: Mapping[str, Any]) -> T:
    """Read a dataclass of type ``kind`` from ``encode``'s form. Unknown keys are skipped, missing ones are defaults."""
    hints: Mapping[str, Any] = _hints(kind)  # type: ignore[arg-type]
    values = {}
    for f in dataclasses.fields(kind):  # type: ignore[arg-type]
        if f.name in data:
            values[f.name] = _read(hints[f.name], data[f.name])
    return kind(**values)


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _read(hint: Any, value: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin is tuple:
        item = typing.get_args(hint)[0]
        return tuple(_read(item, v) for v in value)
    if origin in (typing.Union, types.UnionType):
        return _read_free(value)
    if dataclasses.is_dataclass(hint):
        return decode(hint, value)  # type: ignore[arg-type]
    if hint is float:
        return _FLOATS[value] if isinstance(value, str) else float(value)
    if hint is str:
        return value
    if origin is not None and issubclass(origin, Mapping) and typing.get_args(hint)[1] is float:
        return {k: _read(float, _read_free(v)) for k, v in value.items()}
    if origin is not None and issubclass(origin, Mapping) and typing.get_args(hint)[1] is str:
        return dict(value)
    return _read_free(value)


def _read_free(value: Any) -> Any:
    if isinstance(value, list):
        return [_read_free(v) for v in value]
    if isinstance(value, dict):
        if set(value) == {"$tuple"}:
            return tuple(_read_free(v) for v in value["$tuple"])
        if set(value) == {"$dtype"}:
            return _DTYPES[value["$dtype"]]
        if set(value) == {"$float"}:
            return _FLOATS[value["$float"]]
        return {k: _read_free(v) for k, v in value.items()}
    return value
