"""No op depends on ``torch.get_default_dtype()``, which frameworks change while they load models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ascend_deep import ops


def run(sample: ops.Sample, name: str) -> list[torch.Tensor]:
    """Results and, for ops that write in place, what they wrote."""
    args = copy.deepcopy(sample.args)
    found = ops.op(name).overload(*args, **sample.kwargs)
    results: Any = args[0] if found is None else found
    return list(results) if isinstance(results, (tuple, list)) else [results]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
@pytest.mark.parametrize("name", ops.OPS)
def test_the_default_dtype_changes_nothing(name: str, dtype: torch.dtype) -> None:
    samples = list(ops.op(name).samples())
    wanted = [run(s, name) for s in samples]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = [run(s, name) for s in samples]
    finally:
        torch.set_default_dtype(before)
    for sample, a, b in zip(samples, found, wanted, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.dtype == y.dtype, sample.name
            assert torch.equal(x.float().nan_to_num(7.0), y.float().nan_to_num(7.0)), sample.name
