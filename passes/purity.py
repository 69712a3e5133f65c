"""Which ops may stand inside a region: pure functions of their arguments, without randomness or mutation."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

__all__ = ["IGNORABLE", "is_pure"]

# Checks that capture inserts and that no result depends on.
IGNORABLE = frozenset({"aten._assert_tensor_metadata", "aten._assert_async", "aten.sym_constrain_range_for_size"})

# ATen ops that carry a random state or read uninitialised memory in a way their schema does not show.
_IMPURE = frozenset(
    {
        "native_dropout",
        "bernoulli",
        "multinomial",
        "randn",
        "rand",
        "randint",
        "randn_like",
        "rand_like",
        "randint_like",
        "normal",
        "uniform",
        "exponential",
        "rrelu_with_noise",
        "item",
        "_local_scalar_dense",
        "nonzero",
        "as_strided",
        "set_",
    }
)

# Ops that are random only if their arguments ask for it: place and name of the probability and of the training flag.
_DROPPING: Mapping[str, tuple[tuple[int, str], tuple[int, str] | None]] = {
    "aten::dropout": ((1, "p"), (2, "train")),
    "aten::scaled_dot_product_attention": ((4, "dropout_p"), None),
}

# Custom ops of other packages that are known to be pure.
_PURE_CUSTOM = frozenset({"transformers::grouped_mm_fallback"})


def _drops(node: fx.Node) -> bool:
    """True for a call with dropout switched on."""
    (place, name), training = _DROPPING[node.target._schema.name]  # type: ignore[union-attr]

    def argument(at: int, key: str, default: Any) -> Any:
        return node.args[at] if len(node.args) > at else node.kwargs.get(key, default)

    return argument(place, name, 0.0) != 0 and (training is None or bool(argument(*training, True)))


def is_pure(node: fx.Node) -> bool:
    """True if ``node`` is a call whose result depends on its arguments alone and that changes none of them."""
    if node.op != "call_function":
        return False
    target = node.target
    if target in (operator.getitem, torch.tensor):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    if schema.is_mutable:
        return False
    namespace, name = schema.name.split("::")
    if schema.name in _DROPPING:
        return not _drops(node)
    if namespace in ("aten", "prims"):
        return name not in _IMPURE
    return schema.name in _PURE_CUSTOM or namespace == "ascend_deep"
