"""Programs as JSON, so that a certificate can be run again in another process."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ascend_deep.passes.sizes import Ref, Size

__all__ = ["from_json", "short_name", "target_name", "target_of", "to_json"]

_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_FORMATS = {str(f): f for f in (torch.contiguous_format, torch.preserve_format, torch.channels_last)}


def to_json(a: Any) -> Any:
    """An argument of a step as JSON; what JSON has no word for becomes a dict of one entry, its kind."""
    if isinstance(a, Ref):
        return {"ref": a.index}
    if isinstance(a, Size):
        return {"size": a.expr}
    if isinstance(a, torch.dtype):
        return {"dtype": str(a)}
    if isinstance(a, torch.memory_format):
        return {"format": str(a)}
    if isinstance(a, torch.layout):
        return {"layout": str(a)}
    if isinstance(a, torch.device):
        return {"device": str(a)}
    if isinstance(a, torch.Tensor):
        return {"tensor": a.tolist(), "of": str(a.dtype)}
    if isinstance(a, float) and a in (float("inf"), float("-inf")):
        return {"float": str(a)}
    if isinstance(a, (list, tuple)):
        return [to_json(x) for x in a]
    return a


def from_json(a: Any) -> Any:
    """The argument that ``to_json`` wrote."""
    if isinstance(a, list):
        return [from_json(x) for x in a]
    if not isinstance(a, dict):
        return a
    ((kind, value), *more) = a.items()
    readers: Mapping[str, Callable[[Any], Any]] = {
        "ref": Ref,
        "size": Size,
        "dtype": _DTYPES.__getitem__,
        "format": _FORMATS.__getitem__,
        "layout": lambda v: torch.strided,
        "device": torch.device,
        "float": float,
        "tensor": lambda v: torch.tensor(v, dtype=_DTYPES[more[0][1]]),
    }
    return readers[kind](value)


def target_name(target: Any) -> str:
    """The name of what a step calls, ``"aten.mul.Tensor"`` or ``"module:function"``."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{target.__module__}:{target.__name__}"


def short_name(name: str) -> str:
    """A target's name without overload or module, for people."""
    return ".".join(name.split(".")[:2]) if ":" not in name else name.split(":")[1]


def target_of(name: str) -> Any:
    """What ``target_name`` named. Raises ValueError for what this version does not know."""
    if ":" in name:
        known = {"_operator:getitem": operator.getitem, f"{torch.clone.__module__}:clone": torch.clone}
        if name not in known:
            raise ValueError(f"the certificate calls {name}, which this version does not know.")
        return known[name]
    namespace, op, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if packet is None:
        raise ValueError(f"the certificate calls {name}; import the package that registers it and try again.")
    return getattr(packet, overload)
