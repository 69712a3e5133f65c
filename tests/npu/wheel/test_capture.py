"""Hand-off to npugraph_ex: a graph that looks at the host is turned down before the vendor's backend sees it."""

from __future__ import annotations

import inspect

import pytest
import torch

from ascend_deep import ops
from ascend_deep.lowering.npugraph_check import host_syncs
from ascend_deep.native.torch_npu import soc
from tests.npu.test_npugraph import graph_of


def reads_a_value(x: torch.Tensor) -> torch.Tensor:
    return x * x.max().item()


def test_the_hand_off_names_the_line() -> None:
    assert "npugraph_ex" in torch._dynamo.list_backends(exclude_tags=())
    compiled = torch.compile(
        reads_a_value, backend="ascend_deep", options={"downstream": "npugraph_ex"}, fullgraph=True
    )
    _, first = inspect.getsourcelines(reads_a_value)
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(Exception, match=rf"cannot be captured for npugraph_ex: item reads a value, at .*:{first + 1}"),
    ):
        compiled(torch.randn(5))


def test_an_op_of_ours_is_capturable_if_the_vendor_computes_it() -> None:
    idx = torch.randint(0, 4, (7, 2))

    def experts(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ops.moe_experts(x, idx, weights, w13, None, w2)

    given = torch.randn(7, 16), torch.randn(4, 24, 16), torch.randn(4, 16, 12), torch.rand(7, 2)
    for dtype, taken in ((torch.float32, True), (torch.float64, False)):
        gm = graph_of(experts, *(t.to(dtype) for t in given))
        with soc.planned("910b"):
            found = host_syncs(gm)
        assert bool(found) != taken
        if found:
            assert "runs the reference body of moe_experts" in found[0].what and "float64" in found[0].what
