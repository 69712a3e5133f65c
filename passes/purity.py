"""Which ops may stand inside a region: pure functions of their arguments, without randomness or mutation."""

from __future__ import annotations

import operator

import torch
from torch import fx

__all__ = ["IGNORABLE", "is_pure"]

# Checks that capture inserts and that no result depends on.
IGNORABLE = frozenset({"aten._assert_tensor_metadata", "aten._assert_async", "aten.sym_constrain_range_for_size"})

# ATen ops that carry a random state or read uninitialised memory in a way their schema does not show.
_IMPURE = frozenset(
    {
        "dropout",
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

# Custom ops of other packages that are known to be pure.
_PURE_CUSTOM = frozenset({"transformers::grouped_mm_fallback"})


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
    if namespace in ("aten", "prims"):
        return name not in _IMPURE
    return schema.name in _PURE_CUSTOM or namespace == "ascend_deep"
