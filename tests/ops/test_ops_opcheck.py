"""torch.library.opcheck over the generators, with and without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_deep import ops

_CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def cases() -> list[Any]:
    return [pytest.param(name, s, id=f"{name}-{s.name}") for name, d in ops.OPS.items() for s in d.samples()]


@pytest.mark.parametrize(("name", "sample"), cases())
def test_opcheck(name: str, sample: ops.Sample) -> None:
    definition = ops.op(name)
    checks = list(_CHECKS)
    if any(isinstance(a, torch.Tensor) and a.element_size() == 1 and a.is_floating_point() for a in sample.args):
        # It multiplies its inputs, and torch has no FP8 product. test_ops_schema looks for aliases and mutations too.
        checks.remove("test_schema")
    if sample.name.startswith("nonfinite"):
        # They compare results, and NaN is not equal to NaN there.
        checks = [check for check in checks if "aot" not in check]
    first = sample.args[0]
    # opcheck adds up the outputs, in place, in the dtype of the first.
    again = "test_schema" in checks and definition.backward is not None and first.is_floating_point()
    if again:
        # The call with gradients below traces the same op once more; each trace costs half a second.
        checks = [check for check in checks if "aot" not in check]
    torch.library.opcheck(definition.overload, sample.args, sample.kwargs, test_utils=checks)
    if not again:
        return
    args = tuple(
        a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) and a.dtype in _FLOATS else a
        for a in sample.args
    )
    torch.library.opcheck(definition.overload, args, sample.kwargs)
