"""torch.library.opcheck over the generators, with and without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_deep import ops

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def cases() -> list[Any]:
    return [pytest.param(name, s, id=f"{name}-{s.name}") for name, d in ops.OPS.items() for s in d.samples()]


@pytest.mark.parametrize(("name", "sample"), cases())
def test_opcheck(name: str, sample: ops.Sample) -> None:
    if any(isinstance(a, torch.Tensor) and a.element_size() == 1 and a.is_floating_point() for a in sample.args):
        pytest.skip("opcheck multiplies its inputs, torch has no FP8 product; test_ops_reference compares the bits")
    definition = ops.op(name)
    torch.library.opcheck(definition.overload, sample.args, sample.kwargs)
    first = sample.args[0]
    if definition.backward is None or not first.is_floating_point():
        return  # opcheck adds up the outputs, in place, in the dtype of the first
    args = tuple(
        a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) and a.dtype in _FLOATS else a
        for a in sample.args
    )
    torch.library.opcheck(definition.overload, args, sample.kwargs)
