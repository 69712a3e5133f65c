"""The reference bodies of the quantisation ops give the bits of the CPU on a GPU, and can be captured in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep import ops

EXACT = ("quant_fp8", "quant_fp4", "dequant", "pack_sf")


def on_gpu(value: Any) -> Any:
    """A copy with the same strides where they can be kept."""
    return value.cuda() if isinstance(value, Tensor) else value


def bits(x: Tensor) -> Tensor:
    x = x.cpu().clone(memory_format=torch.contiguous_format)
    # The sign and payload of NaN mean nothing.
    if x.is_floating_point():
        nan = x.float().isnan()
        x = torch.where(nan, torch.zeros_like(x, dtype=torch.float64), x.double())
        return torch.cat((x.flatten(), nan.flatten().double()))
    return x


@pytest.mark.parametrize(
    ("name", "sample"), [pytest.param(n, s, id=f"{n}-{s.name}") for n in EXACT for s in ops.op(n).samples()]
)
def test_bits_of_the_cpu(name: str, sample: ops.Sample) -> None:
    wanted = ops.reference(name)(*sample.args, **sample.kwargs)
    args = [on_gpu(a) for a in sample.args]
    for run in (ops.reference(name), ops.op(name).overload):
        found = run(*args, **sample.kwargs)
        pairs = [(found, wanted)] if isinstance(found, Tensor) else list(zip(found, wanted, strict=True))
        for f, w in pairs:
            assert f.is_cuda and f.dtype == w.dtype and f.shape == w.shape and f.stride() == w.stride()
            assert bits(f).equal(bits(w))


def test_quantisation_is_captured_in_a_graph_and_does_not_wait() -> None:
    x = torch.randn(130, 300, device="cuda")
    layout = torch.tensor([40, 100], device="cuda", dtype=torch.int32)

    def run() -> tuple[Tensor, ...]:
        x8, sf = ops.reference("quant_fp8")(x, gran=(1, 32), ue8m0=True, sf_format="fp32")
        x4, words = ops.reference("quant_fp4")(x, gran_k=32, sf_format="ue8m0x4")
        back = ops.reference("dequant")(x4, words, gran=(1, 32), sf_format="ue8m0x4", out_dtype=None)
        settings = {"mn": 130, "k": 300, "gran": (1, 32), "target": "ascend", "grouping": "psum", "alignment": 64}
        return x8.float(), sf, back, ops.reference("pack_sf")(sf, layout, **settings)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    x.copy_(torch.randn(130, 300) * 3.0)
    graph.replay()
    for found, wanted in zip(out, run(), strict=True):
        assert found.equal(wanted)
