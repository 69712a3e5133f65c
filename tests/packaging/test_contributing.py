"""The worked examples of CONTRIBUTING.md, taken from the page and run: op, recogniser, provider."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import ascend_deep
from ascend_deep import ops
from ascend_deep.native import table
from ascend_deep.ops._op import register
from ascend_deep.passes import catalogue

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
NAMES = ("ascend_deep.ops.scale_rows", "ascend_deep.passes.scale_rows", "ascend_deep.native.example")


@pytest.fixture(scope="module")
def modules() -> Iterator[list[ModuleType]]:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == len(NAMES)
    made = []
    for name, block in zip(NAMES, blocks, strict=True):
        module = ModuleType(name)
        sys.modules[name] = module
        exec(compile(block, f"CONTRIBUTING.md:{name}", "exec"), module.__dict__)
        made.append(module)
    register(made[0].SCALE_ROWS)
    yield made
    for name in NAMES:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _installed(modules: list[ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page says to write into the three tables."""
    op, recogniser, provider = modules
    monkeypatch.setattr(ops, "OPS", {**ops.OPS, "scale_rows": op.SCALE_ROWS})
    monkeypatch.setattr(catalogue, "load", lambda names: [recogniser.RECOGNISER])
    monkeypatch.setattr(catalogue, "TRIGGERS", catalogue.TRIGGERS | {"mul"})
    monkeypatch.setattr(table, "PRIORITY", {**table.PRIORITY, "cpu": (provider.EXAMPLE, *table.PRIORITY["cpu"])})


def test_op(modules: list[ModuleType]) -> None:
    definition = modules[0].SCALE_ROWS
    for sample in definition.samples():
        args = [a.requires_grad_() for a in sample.args]
        torch.library.opcheck(definition.overload, tuple(args), sample.kwargs)
        got = definition.overload(*args, **sample.kwargs)
        want = args[0] * args[1][:, None] * sample.kwargs["factor"]
        torch.testing.assert_close(got, want)
        grad = torch.randn(want.shape)
        for ours, theirs in zip(
            torch.autograd.grad(got, args, grad), torch.autograd.grad(want, args, grad), strict=True
        ):
            torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="the length of scale is 4, but the number of rows of x is 3"):
        modules[0].scale_rows(torch.randn(3, 5), torch.randn(4), factor=2.5)


def _written(x: Tensor, scale: Tensor) -> Tensor:
    return (torch.tanh(x) * scale.unsqueeze(1)) * 0.37


def _swapped(x: Tensor, scale: Tensor) -> Tensor:
    return scale.view(-1, 1) * x


def _not_a_vector(x: Tensor, scale: Tensor) -> Tensor:
    return x * x.sum(1, keepdim=True)


def _explain(function: Any, dtype: torch.dtype = torch.float32, columns: int = 33) -> Any:
    x, scale = torch.randn(21, columns).to(dtype), torch.randn(21).to(dtype)
    want = function(x, scale)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="ascend_deep", options={"downstream": "eager"})
    torch.testing.assert_close(compiled(x, scale), want, rtol=1e-2, atol=1e-2)
    return ascend_deep.last_report()


@pytest.mark.parametrize(("function", "factor"), [(_written, 0.37), (_swapped, 1.0)])
def test_recogniser(function: Any, factor: float) -> None:
    report = _explain(function)
    (match,) = report.matches
    assert (match.op, match.provider) == ("scale_rows", "example")
    assert report.certificate(match.certificate).attrs == {"factor": factor}
    assert match.max_error < 1e-6


def test_recogniser_refuses_what_it_does_not_know() -> None:
    report = _explain(_not_a_vector)
    assert not report.matches
    assert [m.reason for m in report.misses] == ["the column is not a vector that was given a second dimension."]


@pytest.mark.parametrize(
    ("dtype", "columns", "reason"),
    [(torch.bfloat16, 33, "takes float32"), (torch.float32, 5000, "takes at most 4096")],
)
def test_provider_limits_are_in_the_report(dtype: torch.dtype, columns: int, reason: str) -> None:
    (match,) = _explain(_swapped, dtype, columns).matches
    assert match.provider == "reference"
    assert reason in match.provider_refusals[0]
