"""Reference bodies and whatever the provider table picks, against loops over Python floats."""

from __future__ import annotations

from typing import Any

import ops_naive
import pytest
import torch
from torch import Tensor

from ascend_deep import ops

RUNNERS = {"reference": lambda op: op.reference, "op": lambda op: op.overload}


def cases(name: str) -> list[Any]:
    return [
        pytest.param(sample, runner, id=f"{sample.name}-{runner}")
        for sample in ops.op(name).samples()
        for runner in RUNNERS
    ]


def close(name: str, result: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    tolerance = ops.op(name).tolerance[dtype]
    torch.testing.assert_close(result.double(), wanted, rtol=tolerance.rtol, atol=tolerance.atol)


@pytest.mark.parametrize(("sample", "runner"), cases("swiglu"))
def test_swiglu(sample: ops.Sample, runner: str) -> None:
    h = sample.args[0]
    out = RUNNERS[runner](ops.op("swiglu"))(*sample.args, **sample.kwargs)
    assert out.dtype == h.dtype and out.is_contiguous()
    close("swiglu", out, ops_naive.swiglu(*sample.args, **sample.kwargs), h.dtype)


@pytest.mark.parametrize(("sample", "runner"), cases("moe_experts"))
def test_moe_experts(sample: ops.Sample, runner: str) -> None:
    x = sample.args[0]
    out = RUNNERS[runner](ops.op("moe_experts"))(*sample.args, **sample.kwargs)
    assert out.dtype == (sample.kwargs["out_dtype"] or x.dtype) and out.is_contiguous()
    close("moe_experts", out, ops_naive.moe_experts(*sample.args, **sample.kwargs), x.dtype)


@pytest.mark.parametrize(("sample", "runner"), cases("moe_route"))
def test_moe_route(sample: ops.Sample, runner: str) -> None:
    weights, idx = RUNNERS[runner](ops.op("moe_route"))(*sample.args, **sample.kwargs)
    wanted_weights, wanted_idx = ops_naive.moe_route(*sample.args, **sample.kwargs)
    assert idx.dtype == torch.int64 and weights.dtype == torch.float32
    torch.testing.assert_close(idx, wanted_idx)
    close("moe_route", weights, wanted_weights, torch.float32)


@pytest.mark.parametrize(("sample", "runner"), cases("moe_permute"))
def test_moe_permute(sample: ops.Sample, runner: str) -> None:
    x, x_sf, _, weights = sample.args
    rows, row_sf, row_weights, psum, row_map = RUNNERS[runner](ops.op("moe_permute"))(*sample.args, **sample.kwargs)
    source, wanted_psum, wanted_map = ops_naive.moe_permute(*sample.args, **sample.kwargs)
    torch.testing.assert_close(psum, wanted_psum)
    torch.testing.assert_close(row_map, wanted_map)
    assert rows.shape == (len(source), x.shape[1]) and rows.dtype == x.dtype

    def same(a: Tensor, b: Tensor) -> bool:
        return a.contiguous().view(torch.uint8).tolist() == b.contiguous().view(torch.uint8).tolist()

    for r, slot in enumerate(source):
        if slot is None:
            assert same(rows[r], torch.zeros_like(rows[r]))
            assert x_sf is None or (row_sf[r].float() == (1 if x_sf.is_floating_point() else 0)).all()
            assert weights is None or row_weights[r] == 0
        else:
            assert same(rows[r], x[slot[0]])
            assert x_sf is None or same(row_sf[r], x_sf[slot[0]])
            assert weights is None or row_weights[r] == weights[slot]
    assert x_sf is not None or row_sf.shape == (0,)
    assert weights is not None or row_weights.shape == (0,)


@pytest.mark.parametrize(("sample", "runner"), cases("moe_combine"))
def test_moe_combine(sample: ops.Sample, runner: str) -> None:
    out = RUNNERS[runner](ops.op("moe_combine"))(*sample.args, **sample.kwargs)
    assert out.dtype == sample.args[0].dtype
    close("moe_combine", out, ops_naive.moe_combine(*sample.args, **sample.kwargs), sample.args[0].dtype)


def test_combine_undoes_permute() -> None:
    x, idx = torch.randn(9, 6), torch.stack([torch.randperm(5)[:3] for _ in range(9)])
    weights = torch.rand(9, 3)
    rows, _, row_weights, _, row_map = ops.moe_permute(x, idx, weights, num_experts=5, alignment=8)
    back = ops.moe_combine(rows * row_weights[:, None], row_map)
    torch.testing.assert_close(back, x * weights.sum(1, keepdim=True))


def test_bias_order_is_the_order_of_the_sum() -> None:
    """In f32 (a + b) + c differs from a + (b + c): the attribute is not decoration."""
    y = torch.tensor([[1.0], [2.0**-24]])
    bias, row_map = torch.tensor([[2.0**-24]]), torch.tensor([[0, 1]])
    assert ops.moe_combine(y, row_map, bias, order="topk_first") == 1.0
    first = torch.tensor([[2.0**-24], [1.0]])
    assert ops.moe_combine(first, row_map, bias, order="bias_first") == 1.0 + 2.0**-23


@pytest.mark.parametrize("name", list(ops.OPS))
def test_every_sample_name_is_unique_and_every_dtype_has_a_tolerance(name: str) -> None:
    definition = ops.op(name)
    samples = list(definition.samples())
    assert len({s.name for s in samples}) == len(samples)
    for s in samples:
        leading = s.args[1] if name == "moe_experts_backward" else s.args[0]
        assert definition.tolerance[leading.dtype].reason
