"""torch.library.opcheck over the generators, with and without gradients.

Schemas, registrations and fakes are checked on every sample. AOT Autograd takes a hundred times as long, so it gets
one of the samples that are alike to it: it sees tensors, which of them there are, and the code of the backward.
Numbers, and names of functions of numbers, ride along.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ascend_deep import ops

_QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
_STATIC, _DYNAMIC = "test_aot_dispatch_static", "test_aot_dispatch_dynamic"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# What was found alike, so that it is run once; filled as the tests run.
_DONE: set[tuple[str, str]] = set()
_FUNCTIONS = ("act", "scoring", "select", "renorm", "group_score", "group_fill")


def _seen(value: Any, sizes: bool) -> Any:
    """What of an argument or a result decides how AOT Autograd goes; sizes 0 and 1 are not symbolic there."""
    if isinstance(value, Tensor):
        size = tuple(s if s < 2 else 2 for s in value.shape) if sizes else value.dim()
        return value.dtype, size, value.is_contiguous()
    return type(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _structures(definition: ops.OpDef, sample: ops.Sample) -> Iterator[Any]:
    """Equal for samples that go through AOT Autograd alike: with static sizes, and with symbolic ones."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in sample.args]
        results = definition.fake(*fakes, **sample.kwargs)
    tensors = (*sample.args, *(results if isinstance(results, tuple) else (results,)))
    names: list[Any] = []
    if definition.backward is not None:
        # Names reach the code of a backward only; what they do to the results is seen in these.
        names = [(k, _seen(v, False)) for k, v in sample.kwargs.items() if k not in _FUNCTIONS]
    for sizes in (False, definition.backward is not None):
        yield repr((definition.name, sizes, names, [_seen(t, sizes) for t in tensors]))


def _tests(definition: ops.OpDef, sample: ops.Sample) -> list[str]:
    """What ``sample`` goes through, given what the samples before it went through."""
    tests = list(_QUICK)
    if any(isinstance(a, Tensor) and a.element_size() == 1 and a.is_floating_point() for a in sample.args):
        # It multiplies its inputs, and torch has no FP8 product. test_ops_schema looks for aliases and mutations too.
        tests.remove("test_schema")
    # Those with AOT compare results, and NaN is not equal to NaN there.
    if not sample.name.startswith("nonfinite"):
        for test, structure in zip((_STATIC, _DYNAMIC), _structures(definition, sample), strict=True):
            if (test, structure) not in _DONE:
                _DONE.add((test, structure))
                tests.append(test)
    return tests


def cases() -> list[Any]:
    return [pytest.param(name, s, id=f"{name}-{s.name}") for name, d in ops.OPS.items() for s in d.samples()]


@pytest.mark.parametrize(("name", "sample"), cases())
def test_opcheck(name: str, sample: ops.Sample) -> None:
    definition = ops.op(name)
    tests = _tests(definition, sample)
    first = sample.args[0]
    # opcheck adds up the outputs, in place, in the dtype of the first.
    again = "test_schema" in tests and definition.backward is not None and first.is_floating_point()
    if again:
        # The call with gradients below goes through AOT Autograd.
        torch.library.opcheck(definition.overload, sample.args, sample.kwargs, test_utils=_QUICK)
    args = tuple(
        a.detach().clone().requires_grad_() if again and isinstance(a, Tensor) and a.dtype in _FLOATS else a
        for a in sample.args
    )
    torch.library.opcheck(definition.overload, args, sample.kwargs, test_utils=tests)
