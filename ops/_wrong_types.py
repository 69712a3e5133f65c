"""One sentence for an argument of a wrong type, where the dispatcher prints the declaration of the op.

Called when a call has failed, so that it costs nothing when none has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["wrong_type"]

_LARGEST = 1 << 63

# Type in the schema, without "Optional": what it takes, in words.
_WORDS: Mapping[str, str] = {
    "Tensor": "a tensor",
    "int": "an integer",
    "float": "a number",
    "bool": "True or False",
    "str": "a string",
    "ScalarType": "a torch.dtype",
}


def wrong_type(op: str, schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TypeError | None:
    """The error for the first argument that ``schema`` does not take, or ``None`` if all have its types."""
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        kind = str(argument.real_type)
        optional = kind.startswith("Optional[")
        kind = kind.removeprefix("Optional[").removesuffix("]") if optional else kind
        if kind not in _WORDS or (value is None and optional) or _fits(kind, value):
            continue
        word = _WORDS[kind] + (" or None" if optional else "")
        if isinstance(value, int) and word == "an integer":
            word = "an integer of 64 bits"
        return TypeError(f"{op}: {argument.name} is {_text(value)}; it must be {word}.")
    return None


def _fits(kind: str, value: Any) -> bool:
    if kind == "Tensor":
        return isinstance(value, torch.Tensor)
    if kind == "bool":
        return isinstance(value, (bool, int, torch.SymBool))
    if kind == "str":
        return isinstance(value, str)
    if kind == "ScalarType":
        return isinstance(value, torch.dtype)
    if isinstance(value, int):
        return kind == "float" or -_LARGEST <= value < _LARGEST
    # Numbers of numpy, tensors of one element and symbolic numbers are taken as what they hold.
    return hasattr(value, "__float__") and (kind == "float" or not isinstance(value, float))


def _text(value: Any) -> str:
    """The value, if that is short, else its type."""
    if isinstance(value, (str, int, float, bool, type(None), torch.dtype)):
        return repr(value)
    return f"a {type(value).__name__}"
