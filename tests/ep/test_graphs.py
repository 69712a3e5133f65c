"""Graphs of sixteen ranks, by a process group that moves nothing; and what ``parallelize`` refuses."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ascend_deep
from ascend_deep import _parallelize, backend, models, ops
from ascend_deep.graph_breaks import EXACT_HINT, graph_breaks
from ascend_deep.lowering import _dynamo_compat, _torch_compat, torchair
from ascend_deep.lowering.npugraph_check import host_syncs
from ascend_deep.native.torch_npu import soc
from ascend_deep.ops import _op
from ascend_deep.options import Options
from ascend_deep.passes.pipeline import Pipeline

LAYERS, EXPERTS, TOKENS, MOST, TOPK, HIDDEN = 2, 32, 9, 12, 2, 64


@pytest.fixture
def sixteen(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """A mesh of sixteen ranks, of which this process is the one that the test asks for."""
    dist.init_process_group("fake", rank=getattr(request, "param", 3), world_size=16, store=FakeStore())
    yield init_device_mesh("cpu", (16,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


def _model(**fields: Any) -> nn.Module:
    model = models.load("qwen3_moe", layers=LAYERS, fields={"num_experts": EXPERTS, **fields}).model
    return model.eval()


def _blocks(count: int) -> nn.Module:
    """The MoE layers of a model, one after the other."""
    return nn.Sequential(*(layer.mlp for layer in _model().model.layers[:count]))


def _graphs(model: nn.Module, x: Tensor) -> list[fx.GraphModule]:
    """The graphs of one forward as the backend rewrites them. They are not run: nobody would answer."""
    graphs = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        Pipeline(Options().recognisers()).run(gm)
        graphs.append(gm)
        (output,) = (n for n in gm.graph.nodes if n.op == "output")
        results = [n.meta["val"] for n in output.args[0]]
        return lambda *args: tuple(torch.zeros([int(s) for s in v.shape], dtype=v.dtype) for v in results)

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(x)
    return graphs


def _calls(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target is ops.op(name).overload]


def test_sixteen_ranks_have_static_dispatch_and_combine(sixteen: DeviceMesh) -> None:
    model = ascend_deep.parallelize(_blocks(LAYERS), sixteen, max_tokens_per_rank=MOST)
    assert model[1].experts.gate_up_proj.shape[0] == EXPERTS // 16
    (gm,) = _graphs(model, torch.randn(1, TOKENS, HIDDEN))
    dispatches, combines = _calls(gm, "ep_dispatch"), _calls(gm, "ep_combine")
    assert len(dispatches) == len(combines) == len(_calls(gm, "moe_experts")) == len(_calls(gm, "moe_route")) == LAYERS
    group = sixteen.get_group("ep").group_name
    for node in (*dispatches, *combines):
        wanted = {"group": group, "group_size": 16, "num_experts": EXPERTS, "max_tokens_per_rank": MOST}
        assert wanted.items() <= node.kwargs.items()
        assert node.kwargs["cpu_sync"] is False and node.kwargs["expand"] is False
    for node in dispatches:
        shapes = [tuple(t.shape) for t in node.meta["val"]]
        rows, local = 16 * MOST, EXPERTS // 16
        assert shapes == [
            (rows, HIDDEN), (0, 0), (rows, TOPK), (rows, TOPK), (local,),
            (16,), (local,), (rows, TOPK + 2), (TOKENS, TOPK), (0,), (3, 16),
        ]  # fmt: skip
        assert all(type(size) is int for shape in shapes for size in shape)
    for node in combines:
        assert tuple(node.meta["val"][0].shape) == (TOKENS, HIDDEN)
    for node in _calls(gm, "moe_experts"):
        assert tuple(node.meta["val"].shape) == (16 * MOST, HIDDEN) and node.kwargs["expert_offset"] == 0


def test_exact_sizes_are_sizes_that_only_the_data_know(sixteen: DeviceMesh) -> None:
    (gm,) = _graphs(ascend_deep.parallelize(_blocks(1), sixteen), torch.randn(1, TOKENS, HIDDEN))
    assert len(_calls(gm, "ep_combine")) == 1
    for node in _calls(gm, "ep_dispatch"):
        rows = node.meta["val"][0].shape[0]
        assert isinstance(rows, torch.SymInt) and node.kwargs["cpu_sync"] is True
        assert torch.fx.experimental.symbolic_shapes.free_unbacked_symbols(rows)


def test_a_break_between_ranks_says_what_helps(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """Dynamo's list of breaks as a model compiled without fullgraph leaves it."""
    frames = [
        traceback.FrameSummary("modeling.py", 263, "forward"),
        traceback.FrameSummary(_parallelize.__file__, 60, "forward"),
        traceback.FrameSummary(_op.__file__, 172, "call"),
    ]
    found = [("Data-dependent output shape", frames)]
    (one,) = graph_breaks(found)
    assert one.hint == EXACT_HINT and one.source == "_op.py:172"
    assert graph_breaks([("Data-dependent output shape", frames[:1])])[0].hint == ""
    monkeypatch.setattr(_dynamo_compat, "breaks_since", lambda mark: found)
    with caplog.at_level("WARNING"):
        backend._Breaks().tell()
    assert "compile with fullgraph=True" in caplog.text and "max_tokens_per_rank" in caplog.text
    assert "prepare" not in caplog.text


def _code(rank: int) -> str:
    dist.init_process_group("fake", rank=rank, world_size=16, store=FakeStore())
    try:
        torch._dynamo.reset()
        mesh = init_device_mesh("cpu", (16,), mesh_dim_names=("ep",))
        block = ascend_deep.parallelize(_blocks(1), mesh, max_tokens_per_rank=MOST)
        (gm,) = _graphs(block, torch.ones(1, TOKENS, HIDDEN))
        return gm.code
    finally:
        dist.destroy_process_group()


def test_all_ranks_have_the_same_program() -> None:
    assert _code(2) == _code(13)


def test_one_dimension_of_a_larger_mesh() -> None:
    dist.init_process_group("fake", rank=6, world_size=16, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "experts"))
        model = ascend_deep.parallelize(_model(), mesh, ep_dim="experts")
        experts = model.model.layers[1].mlp.experts
        assert experts.experts == (16, 24) and experts.ranks == 4
        assert experts.group == mesh.get_group("experts").group_name != mesh.get_group("dp").group_name
        assert "experts 16 to 23 of 32" in repr(model)
        with pytest.raises(ValueError, match="ep_dim is 'ep'; the dimensions of mesh are 'dp', 'experts'"):
            ascend_deep.parallelize(_model(), mesh)
        unnamed = init_device_mesh("cpu", (4, 4))
        with pytest.raises(ValueError, match="ep_dim is 'ep', but the 2 dimensions of mesh have no names"):
            ascend_deep.parallelize(_model(), unnamed)
    finally:
        dist.destroy_process_group()


def test_parameters_keep_their_order(sixteen: DeviceMesh) -> None:
    """By which optimizers number their states. Experts of gpt-oss have each bias behind its weight."""
    model = models.load("gpt_oss", layers=1, fields=dict.fromkeys(("num_experts", "num_local_experts"), 16)).model
    names = [name for name, _ in model.named_parameters()]
    ascend_deep.parallelize(model, sixteen)
    assert [name for name, _ in model.named_parameters()] == names


class _Between(nn.Module):
    """Dispatch and combine, with nothing between."""

    def __init__(self, group: str, sync: bool) -> None:
        super().__init__()
        self.how = {
            "num_experts": EXPERTS, "max_tokens_per_rank": MOST, "expand": True, "cpu_sync": sync, "group_size": 16,
            "group": group,
        }  # fmt: skip

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        out = ops.ep_dispatch(x, None, idx, weights, **self.how)
        return ops.ep_combine(out.recv_x * 2.0, None, x, None, idx, *out[5:], **self.how)[0]


def test_on_npus_static_sizes_become_collectives_and_exact_ones_are_refused(sixteen: DeviceMesh) -> None:
    args = (torch.randn(TOKENS, HIDDEN), torch.randint(0, EXPERTS, (TOKENS, TOPK)), torch.rand(TOKENS, TOPK))
    group = str(sixteen.get_group("ep").group_name)

    def lowered(sync: bool) -> list[fx.GraphModule]:
        graphs: list[fx.GraphModule] = []

        def keep(gm: fx.GraphModule, _: Any) -> Any:
            graphs.append(gm)
            return gm.forward

        def backend(gm: fx.GraphModule, inputs: Any) -> Any:
            found = [str(f) for f in host_syncs(gm)]
            assert bool(found) == sync and all("waits for the number of rows" in f for f in found), found
            with soc.planned("910_93"):
                table = dict(torchair.decompositions())
                _torch_compat.aot_module_simplified(gm, inputs, fw_compiler=keep, decompositions=table)
            return lambda *_: (torch.zeros(TOKENS, HIDDEN),)

        torch._dynamo.reset()
        with torch.no_grad(), soc.planned("910_93"):
            torch.compile(_Between(group, sync), backend=backend, fullgraph=True)(*args)
        return graphs

    (gm,) = lowered(False)
    exchanges = [n for n in gm.graph.nodes if "all_to_all_single" in str(n.target)]
    # What the rows are, the rows, the weights; and the rows back.
    assert len(exchanges) == 4 and all(list(n.args[1]) == list(n.args[2]) == [MOST] * 16 for n in exchanges)
    assert {str(n.args[3]) for n in exchanges} == {group}
    assert not [n for n in gm.graph.nodes if "ascend_deep" in str(n.target)]
    with pytest.raises(Exception, match="ep_dispatch cannot be lowered to the graph engine with cpu_sync=True"):
        lowered(True)


class _Cosine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos()


class _Loop(nn.Module):
    """Experts in a list: not an experts module of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def test_what_cannot_be_shared_out_is_refused_and_left_whole(sixteen: DeviceMesh) -> None:
    def refused(model: nn.Module, sentence: str, **how: Any) -> None:
        before = [(n, p.shape) for n, p in model.named_parameters()]
        with pytest.raises(ValueError, match=sentence):
            ascend_deep.parallelize(model, sixteen, **how)
        assert before == [(n, p.shape) for n, p in model.named_parameters()]

    path = "model.layers.0.mlp.experts"
    refused(_model(num_experts=24), f"{path} cannot be shared out: its 24 experts do not divide over 16 ranks. .1 more")
    hooked = _model()
    hooked.get_submodule(path).register_forward_hook(lambda *_: None)
    refused(hooked, "it has hooks, which would be lost")
    tied = _model()
    tied.model.layers[1].mlp.experts.down_proj = tied.model.layers[0].mlp.experts.down_proj
    refused(tied, "its weights are also those of another module")
    already = _model()
    already.get_submodule(path)._is_expert_parallel = True
    refused(already, "transformers has shared its experts out already")
    strange = _model()
    strange.get_submodule(path).act_fn = _Cosine()
    refused(strange, "its activation .* is none of those that moe_experts knows")
    refused(nn.Sequential(nn.Linear(4, 4)), "nothing in this Sequential can be shared out: it has no experts module")
    refused(nn.Sequential(_Loop()), "0.experts cannot be shared out: its class does not dispatch through transformers'")
    refused(_model().get_submodule(path), "model is an experts module itself")
    refused(_model(), "max_tokens_per_rank is 0; it must be at least 1", max_tokens_per_rank=0)
    with pytest.raises(TypeError, match="model is a compiled model; parallelize it before"):
        ascend_deep.parallelize(torch.compile(_model()), sixteen)
    with pytest.raises(TypeError, match="mesh is a int; it takes a torch"):
        ascend_deep.parallelize(_model(), 16)  # type: ignore[arg-type]

    # Left whole on request: one layer is, the other is not.
    half = _model()
    half.get_submodule(path).register_forward_hook(lambda *_: None)
    ascend_deep.parallelize(half, sixteen, partial=True)
    assert half.get_submodule(path).gate_up_proj.shape[0] == EXPERTS
    assert half.model.layers[1].mlp.experts.gate_up_proj.shape[0] == EXPERTS // 16
