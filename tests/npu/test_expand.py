"""What ops become in graphs where no vendor op takes the call: their reference bodies, traced and run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from ascend_deep import ops
from ascend_deep.lowering import _torch_compat, torchair
from ascend_deep.native.torch_npu import soc

X = torch.randn(9, 64)
CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "two results, changed in place": lambda x: ops.quant_fp4(x, gran_k=16, sf_format="ue8m0x4"),
    "blocks of rows": lambda x: ops.quant_fp8(x, gran=(4, 16)),
    "float64": lambda x: ops.swiglu(x.double(), limit=0.7),
    "accumulated": lambda x: ops.gemm_bf16(x.bfloat16(), x.bfloat16(), x[:, :9].bfloat16(), alpha=-0.6),
    "float32 scales of 32": lambda x: ops.gemm_scaled(
        *2 * ops.quant_fp8(x, gran=(1, 32), ue8m0=True), recipe_a=(1, 32), recipe_b=(1, 32)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reference_bodies_are_traced(name: str) -> None:
    graphs: list[fx.GraphModule] = []

    def keep(part: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(part)
        return part.forward

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        with soc.planned("910b"):
            table = dict(torchair.decompositions())
            return _torch_compat.aot_module_simplified(gm, inputs, fw_compiler=keep, decompositions=table)

    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(CASES[name], backend=backend, fullgraph=True)(X)
    torch._dynamo.reset()
    want = CASES[name](X)
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-6, atol=1e-6)
    targets = [str(n.target) for g in graphs for n in g.graph.nodes if n.op == "call_function"]
    assert targets and not [t for t in targets if t.startswith("ascend_deep.") or "amax" in t or ".copy_" in t], targets


def test_shifts_and_masks() -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32):
        x = torch.randint(-90 if dtype.is_signed else 0, 90, (57,)).to(dtype)
        for bits in (1, 4, 7):
            mask = torchair._bits(torch.ops.aten.bitwise_and.Tensor, x, 90 >> bits)
            assert torch.equal(mask, x & (90 >> bits)) and mask.dtype == dtype
            right, left = torchair._right_shift(x, bits), torchair._left_shift(x, bits)
            assert torch.equal(right, x >> bits) and torch.equal(left, x << bits) and right.dtype == left.dtype == dtype


def test_amax_over_several_dimensions() -> None:
    x = torch.randn(3, 4, 5)
    x[1, 2, 3] = torch.nan
    for dim, keepdim in (((-1, 0), False), ((1,), True), ((), False)):
        torch.testing.assert_close(torchair._amax(x, dim, keepdim), x.amax(dim, keepdim), equal_nan=True)
