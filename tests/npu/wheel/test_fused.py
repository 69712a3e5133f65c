"""Moves with a grouped product: the vendor's schemas and fakes against ours, and what the graph engine gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ascend_deep import ops
from ascend_deep.lowering import torchair_emit, torchair_graph
from ascend_deep.native.torch_npu import parallel_gemm, provider, soc
from tests.npu.rig import stubs_folder

SENT, RECEIVED = [300, 0, 400, 5], [100, 200, 9, 9]


@pytest.fixture
def pair() -> Iterator[str]:
    """A group of two ranks in one process, which moves nothing, and HCCL's name for it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    with mock.patch.object(parallel_gemm, "communicator", lambda group: ("hccl", 1)):
        yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def _call(group: str, layout: str, back: bool = False) -> dict[str, Any]:
    sent, received = (RECEIVED, SENT) if back else (SENT, RECEIVED)
    counts = {"send_counts": sent, "recv_counts": received, "least_rows": 300}
    return {**counts, "layout": layout, "group_size": 2, "group": group}


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("op", ["alltoallv_gmm", "gmm_alltoallv"])
def test_our_fakes_are_what_the_vendors_give(op: str, layout: str, pair: str) -> None:
    back = op == "gmm_alltoallv"
    how = _call(pair, layout, back)
    weight = torch.randn(2, 64, 48) if layout == "nn" else torch.randn(2, 48, 64)
    x = torch.randn(sum(how["send_counts"]), 64)
    real = [t.bfloat16() for t in (x, weight)]
    with FakeTensorMode() as mode, soc.planned("950dt"):
        args = [mode.from_tensor(t) for t in real]
        assert ops.provider(op, "npu", tuple(args), how).name == "torch_npu"
        ours, theirs = getattr(ops, op)(*args, **how), provider.TORCH_NPU.kernels[op](*args, **how)
    ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (ours, theirs))
    assert [(t.shape, t.dtype, t.stride()) for t in ours] == [(t.shape, t.dtype, t.stride()) for t in theirs]


def _emit(function: Callable[..., Any], *args: Tensor) -> list[torchair_emit.Emitted]:
    emitted: list[torchair_emit.Emitted] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with soc.planned("950dt", "9.2.0"):
            emitted.extend(torchair_emit.convert(gm, inputs, "950dt", stubs_folder()))
        return gm.forward

    torch._dynamo.reset()
    try:
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    finally:
        torch._dynamo.reset()
    return emitted


def test_the_graph_engine_gets_both_ops_with_their_counts(pair: str) -> None:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        y, _ = ops.alltoallv_gmm(x, w, **_call(pair, "nn"))
        return ops.gmm_alltoallv(y, w, **_call(pair, "nt", back=True))

    with torch.no_grad():
        (graph,) = _emit(layer, torch.randn(705, 64).bfloat16(), torch.randn(2, 64, 48).bfloat16())
    assert graph.problems == ()
    there, back = (n for n in graph.nodes if n.type in ("AlltoAllvGroupedMatMul", "GroupedMatMulAlltoAllv"))
    for node, sent, received, transposed in ((there, SENT, RECEIVED, "False"), (back, RECEIVED, SENT, "True")):
        attributes = dict(node.attributes)
        assert attributes["group"] == "'hccl'" and attributes["ep_world_size"] == "2", attributes
        assert attributes["trans_gmm_weight"].lower() == transposed.lower(), attributes
        for name, wanted in (("send_counts", sent), ("recv_counts", received)):
            assert attributes[name].replace(" ", "").strip("[]") == ",".join(map(str, wanted)), attributes


def test_gradients_are_the_other_op_and_a_grouped_product(pair: str) -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return ops.alltoallv_gmm(x, w, **_call(pair, "nn"))[0].float().square().sum()

    given = [torch.randn(s).bfloat16().requires_grad_() for s in ((705, 64), (2, 64, 48))]
    forward, backward = (torchair_graph.counts(g.nodes) for g in _emit(step, *given))
    assert forward["AlltoAllvGroupedMatMul"] == 1 and "GroupedMatMulAlltoAllv" not in forward
    assert backward["GroupedMatMulAlltoAllv"] == 1 and backward["GroupedMatmul"] == 1


def test_without_the_promise_the_graph_moves_rows_by_itself(pair: str) -> None:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return ops.alltoallv_gmm(x, w, **{**_call(pair, "nn"), "least_rows": 0})[0]

    with torch.no_grad():
        (graph,) = _emit(layer, torch.randn(705, 64).half(), torch.randn(2, 64, 48).half())
    counts = torchair_graph.counts(graph.nodes)
    assert "AlltoAllvGroupedMatMul" not in counts and counts["HcomAllToAllV"] == 1


def test_counts_that_are_not_known_are_refused_in_graphs(pair: str) -> None:
    how = _call(pair, "nn")
    x, w = torch.randn(705, 64).bfloat16(), torch.randn(2, 64, 48).bfloat16()
    symbol = torch.fx.experimental.symbolic_shapes.ShapeEnv().create_unbacked_symint()
    how["send_counts"] = [symbol, *SENT[1:]]
    with soc.planned("950dt"), soc.in_graph():
        target = soc.current()
        assert target is not None
        assert "counts are not known" in str(parallel_gemm.limits_there(target, x, w, **how))
