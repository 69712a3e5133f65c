"""What a part of a forward really calls while it runs: bounds that no trial reaches, and questions about its values.

Trials show what a part computes for the values that were tried. A clamp at 3e5, a replacement of NaN, or a capacity
that is only reached with thousands of tokens shows in none of them, so every op that the part runs (in helpers and
experts too) is looked at: those are reasons to leave the loop, unless the attributes of the op say the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Watch"]

_GUARDS = frozenset(
    ("nan_to_num", "nan_to_num_", "isnan", "isinf", "isfinite", "isposinf", "isneginf", "isreal", "fmin", "fmax",
     "nansum", "nanmean", "nanmedian", "nanquantile", "signbit", "frexp")
)  # fmt: skip
_CLAMPS = frozenset(
    ("clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "threshold", "minimum", "maximum", "renorm", "fmod",
     "remainder", "heaviside", "hardshrink", "softshrink", "bucketize", "searchsorted")
)  # fmt: skip
_COMPARES = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_ASKS = frozenset(("_local_scalar_dense", "equal", "is_nonzero", "item", "allclose", "isclose"))
_LEAVES = frozenset(("tolist", "numpy", "__array__"))
_ORDER = frozenset(("topk", "kthvalue"))
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.float16, torch.bfloat16)
_KINDS = ("tokens", "weights", "parameters")
_TEXT = "which moe_experts would not do: no trial with ordinary numbers shows what it is for"


class Watch:
    """Two modes for one run of a part: ``with watch.modes(values): ...``, then ``watch.wrong()``.

    Args:
        limit: of the activation; bounds by it are part of the op.
        experts: how many there are.
        parameters: of the experts; what is decided by their values would be decided once, when the loop is replaced.
    """

    def __init__(self, limit: float | None, experts: int, parameters: Iterable[Tensor]) -> None:
        self.limit, self.experts, self.parameters = limit, experts, tuple(parameters)
        self._reason: str | None = None
        self._bounds: list[set[tuple[str, int]]] = []

    def run(self, tokens: Iterable[Tensor], weights: Iterable[Tensor], function: Any) -> None:
        """Call ``function()`` and look. ``tokens``, ``weights``: what it computes with.

        Raises:
            Exception: whatever ``function`` raises.
        """
        self._bounds.append(set())
        ops = _Ops(self, tokens, weights)
        with _Functions(self, ops), ops:
            function()

    def wrong(self) -> str | None:
        """A sentence if something was called that the op does not do, or bounds depend on how many tokens there are."""
        if self._reason is None and len(self._bounds) > 1:
            first = self._bounds[0]
            odd = next((b ^ first for b in self._bounds[1:] if b != first), None)
            if odd:
                name, number = min(odd)
                return (
                    f"its code compares whole numbers with one that depends on how many tokens there are ({name} "
                    f"{number}), as a capacity would, and the op has none."
                )
        return self._reason

    def refuse(self, what: str) -> None:
        """Keep the first reason."""
        self._reason = self._reason or what

    def bound(self, name: str, number: int) -> None:
        """A whole number that tensors of whole numbers are compared with."""
        self._bounds[-1].add((name, number))

    def explained(self, number: Any) -> bool:
        """Zero, no bound, and the limit of the activation."""
        number = abs(float(number))
        return number == 0.0 or math.isinf(number) or (self.limit is not None and math.isclose(number, self.limit))


class _Functions(TorchFunctionMode):
    """What Python code calls: slices, and values that leave torch."""

    def __init__(self, watch: Watch, ops: _Ops) -> None:
        super().__init__()
        self._watch, self._ops = watch, ops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _GUARDS:
            self._watch.refuse(f"its code calls {name}, {_TEXT}.")
        elif name in _LEAVES and args and self._ops.kind(args[0]) is not None:
            self._watch.refuse(f"its code calls {name} of values of its tokens, and may decide by them.")
        elif name == "__getitem__":
            self._sliced(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _sliced(self, tensor: Tensor, index: Any) -> None:
        """``token[:capacity]`` where there are fewer."""
        first = index[0] if isinstance(index, tuple) and index else index
        if not isinstance(first, slice) or first.stop is None or first.start not in (None, 0) or not tensor.dim():
            return
        if isinstance(first.stop, int) and first.stop > tensor.shape[0]:
            self._watch.refuse(
                f"its code takes at most {first.stop} of {tensor.shape[0]} rows, as a capacity would, and the op has "
                "none."
            )


class _Ops(TorchDispatchMode):
    """Every op that runs, and which tensors come from the tokens or the weights.

    Tensors are known by their storages, which are kept alive so that no other tensor gets the same place.
    """

    def __init__(self, watch: Watch, tokens: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._watch = watch
        self._kinds: dict[int, str] = {}
        self._held: list[Any] = []
        for kind, tensors in (("parameters", watch.parameters), ("weights", weights), ("tokens", tokens)):
            for tensor in tensors:
                self._mark(tensor, kind)

    def kind(self, value: Any) -> str | None:
        """``tokens``, ``weights`` or ``parameters``: the first of these that a tensor is computed from."""
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        return self._kinds.get(value.untyped_storage().data_ptr())

    def _mark(self, tensor: Tensor, kind: str) -> None:
        if tensor.layout == torch.strided and tensor.numel():
            storage = tensor.untyped_storage()
            self._held.append(storage)
            known = self._kinds.get(storage.data_ptr(), kind)
            self._kinds[storage.data_ptr()] = min(known, kind, key=_KINDS.index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        kinds = [self.kind(v) for v in leaves]
        name = func.overloadpacket.__name__
        name = name[:-1] if name.endswith("_") else name
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        self._look(name, leaves, kinds, {**named, **kwargs})
        out = func(*args, **kwargs)
        kind = next((k for k in _KINDS if k in kinds), None)
        results = [out, *(args[:1] if func._schema.is_mutable else ())]
        for tensor in (v for v in tree_leaves(results) if isinstance(v, Tensor)):
            if kind is not None:
                self._mark(tensor, kind)
            elif tensor.layout == torch.strided:
                self._held.append(tensor.untyped_storage())
        return out

    def _look(self, name: str, leaves: list[Any], kinds: list[str | None], given: dict[str, Any]) -> None:
        floats = [
            k for k, v in zip(kinds, leaves, strict=True) if k and isinstance(v, Tensor) and v.is_floating_point()
        ]
        if name in _GUARDS:
            self._watch.refuse(f"its code calls {name}, {_TEXT}.")
        elif name in _ORDER and (given.get("k") is not None):
            self._watch.refuse(f"its code calls {name} besides the choice of experts, as a capacity would.")
        elif name in _ASKS and "tokens" in kinds:
            self._watch.refuse("its code decides by values of its tokens or of what its experts compute.")
        elif name in _ASKS and "parameters" in kinds:
            self._watch.refuse("its code decides by values of its parameters, which may have others later.")
        elif name == "_to_copy" and leaves[0].dtype in (torch.int64, torch.int32) and given.get("dtype") in _NARROW:
            if leaves[0].numel() and int(leaves[0].max()) > max(self._watch.experts, 2):
                narrow = str(given["dtype"]).removeprefix("torch.")
                self._watch.refuse(f"its code has numbers of tokens in {narrow}, which does not hold large ones.")
        elif floats and name in ("eq", "ne"):
            self._watch.refuse("its code asks whether values of its tokens or weights are equal to others.")
        elif floats and name in (*_CLAMPS, *_COMPARES):
            bounds = list(_numbers(leaves, kinds, name, given))
            both = len(floats) > 1 and name in (*_COMPARES, "minimum", "maximum", "clamp", "fmod", "remainder")
            odd = [b for b in bounds if not self._watch.explained(b)]
            if name in _COMPARES:
                odd += [b for b in bounds if math.isinf(b)]
                verb = "compares"
            else:
                odd += bounds if name in ("renorm", "fmod", "remainder") else []
                verb = f"calls {name} on"
            if both or odd:
                what = {"tokens": "values of its tokens or weights", "weights": "its weights"}.get(
                    next(k for k in _KINDS if k in floats), "its parameters"
                )
                number = f" with {odd[0]:g}" if odd else " with each other"
                self._watch.refuse(f"its code {verb} {what}{number}, {_TEXT}.")
        elif name in _CLAMPS or (name in _COMPARES and name not in ("eq", "ne")):
            for bound in _numbers(leaves, kinds, name, given):
                if math.isfinite(bound):
                    self._watch.bound(name, int(bound))


def _numbers(leaves: list[Any], kinds: list[str | None], name: str, given: dict[str, Any]) -> Iterator[float]:
    """Literal bounds: Python numbers, and tensors of one number that come from neither tokens nor weights."""
    for key, value in given.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and key not in ("p", "dim"):
            yield float(value)
    for value, kind in zip(leaves, kinds, strict=True):
        if kind is None and isinstance(value, Tensor) and value.is_floating_point():
            yield from (float(n) for n in value.detach().flatten()[:8].tolist())
