"""Calls as one value: their fields are the arguments of the op, and functions that take one are called like the op."""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native import calls, calls_moe

CALLS = [getattr(module, name) for module in (calls, calls_moe) for name in module.__all__ if name != "takes"]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_fields_are_the_arguments_of_the_schema(call: Any) -> None:
    found = re.fullmatch(r"A call of ``(\w+)``( or ``(\w+)``)?\.", call.__doc__)
    assert found is not None, call.__doc__
    for op in filter(None, (found[1], found[3])):
        assert list(call._fields) == [a.name for a in ops.op(op).overload._schema.arguments], op


class _Call(NamedTuple):
    x: Tensor
    bias: Tensor | None
    axis: int


@calls.takes(_Call)
def _limits(target: str, x: _Call) -> tuple[str, int, bool]:
    """Says what it was given."""
    return target, x.axis, x.bias is None


def test_a_function_that_takes_a_call_has_the_signature_of_the_op() -> None:
    assert str(inspect.signature(_limits)) == "(target: 'str', x, bias, *, axis)"
    assert _limits.__doc__ == "Says what it was given."
    assert _limits("910b", torch.randn(3), None, axis=2) == ("910b", 2, True)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'axis'"):
        _limits("910b", torch.randn(3), None)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'dim'"):
        _limits("910b", torch.randn(3), None, axis=1, dim=2)
