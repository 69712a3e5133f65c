"""The GEMM ops in graphs: what torchair makes of their expansion, for static and symbolic numbers of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from ascend_deep import ops
from ascend_deep.lowering import torchair_emit, torchair_graph
from ascend_deep.native.torch_npu import soc
from ascend_deep.ops import _sf
from ascend_deep.ops._gemm_scaled_samples import operand
from tests.npu.rig import stubs_folder

MX: dict[str, Any] = {"recipe_a": (1, 32), "recipe_b": (1, 32)}
GB: dict[str, Any] = {"recipe_a": (1, 128), "recipe_b": (128, 128)}


def _weight(rows: int, k: int, gran: tuple[int, int], fmt: str = "fp8", groups: int = 0) -> tuple[Any, Any]:
    """An operand with float32 scales, or packed ones if they belong to 32 columns; ``groups`` of them."""
    g = torch.Generator().manual_seed(3)
    made = [operand(g, rows, k, gran, fmt) for _ in range(max(groups, 1))]
    data = torch.stack([d.view(torch.uint8) for d, _ in made]).view(made[0][0].dtype)
    sf = torch.stack([s for _, s in made])
    if gran[1] == 32:
        sf = _sf.pack(_sf.encode_ue8m0(sf), "ue8m0x4")
    return (data, sf) if groups else (data[0], sf[0])


W, W_SF = _weight(160, 256, (1, 32))
B, B_SF = _weight(160, 256, (128, 128))
F, F_SF = _weight(160, 384, (1, 32), "fp4")
E, E_SF = _weight(160, 256, (1, 32), groups=3)
G, G_SF = _weight(160, 256, (128, 128), groups=3)
H, H_SF = _weight(160, 384, (1, 32), "fp4", groups=3)
ENDS = torch.tensor([5, 5, 13], dtype=torch.int32)
X = torch.randn(16, 256).bfloat16()
D = torch.randn(3, 160, 256).bfloat16()


def bf16(x: torch.Tensor) -> Any:
    outer = ops.k_grouped_gemm_bf16(x, x[:, :80], ENDS, alignment=1)
    return ops.gemm_bf16(x, D[0]), ops.m_grouped_gemm_bf16(x, D, ENDS, alignment=1), outer


def mx(x: torch.Tensor) -> Any:
    data, sf = ops.quant_fp8(x, gran=(1, 32), ue8m0=True, sf_format="ue8m0x4")
    grouped = ops.m_grouped_gemm_scaled(data, sf, E, E_SF, ENDS, alignment=1, **MX)
    return ops.gemm_scaled(data, sf, W, W_SF, **MX), grouped


def gb(x: torch.Tensor) -> Any:
    data, sf = ops.quant_fp8(x, gran=(1, 128))
    labels = torch.zeros(x.shape[0], dtype=torch.int32)
    grouped = ops.m_grouped_gemm_scaled(data, sf, G, G_SF, labels, grouping="labels", alignment=1, **GB)
    return ops.gemm_scaled(data, sf, B, B_SF, alpha=0.7, **GB), grouped


def swiglu(x: torch.Tensor) -> Any:
    return ops.swiglu_quant(x, limit=None)


def fp4(x: torch.Tensor) -> Any:
    data, sf = ops.quant_fp4(torch.cat((x, x[:, :128]), 1), sf_format="ue8m0x4")
    grouped = ops.m_grouped_gemm_scaled(data, sf, H, H_SF, ENDS, alignment=1, **MX)
    return ops.gemm_scaled(data, sf, F, F_SF, out_dtype=torch.float32, **MX), grouped


# Function: ops of the graph engine that have to be there, and how often.
GRAPHS: dict[Callable[..., Any], dict[str, int]] = {
    bf16: {"GroupedMatmul": 2},
    mx: {"DynamicMxQuant": 1, "QuantBatchMatmulV4": 1, "GroupedMatmul": 1},
    gb: {"QuantBatchMatmulV4": 1, "GroupedMatmul": 1, "MoeInitRoutingV3": 1},
    swiglu: {"SwiGlu": 1, "DynamicMxQuant": 1},
    fp4: {"QuantBatchMatmulV4": 1, "GroupedMatmul": 1},
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", GRAPHS, ids=lambda f: f.__name__)
def test_gemm_ops_become_graph_engine_ops(function: Callable[..., Any], dynamic: bool) -> None:
    emitted: list[torchair_emit.Emitted] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with soc.planned("950pr", "9.2.0"):
            emitted.extend(torchair_emit.convert(gm, inputs, "950pr", stubs_folder()))
        return gm.forward

    torch._dynamo.reset()
    x = X.clone()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(x)
    torch._dynamo.reset()
    (graph,) = emitted
    assert graph.problems == ()
    counts = torchair_graph.counts(graph.nodes)
    assert GRAPHS[function].items() <= counts.items(), counts
    for node in graph.nodes:
        attributes = dict(node.attributes)
        if node.type == "QuantBatchMatmulV4":
            assert attributes["group_size"] == str(
                (1 << 32) + (128 << 16) + 128 if function is gb else (1 << 32) + (1 << 16) + 32
            )
        if node.type == "DynamicMxQuant":
            assert (attributes["scale_alg"], attributes["axis"]) == ("1", "-1")
    if dynamic:
        assert any("-1" in s for n in graph.nodes if n.type == "Data" for s in n.shapes)
