"""Whole models: the lowered graph runs on CPU kernels under the vendor's ops, equals eager, and becomes a GE graph.

Each model is compiled once; its rewritten graph is kept, lowered for several processors, and run for each of them.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from ascend_deep import lowering, models
from ascend_deep.backend import _Stage
from ascend_deep.lowering import _torch_compat, torchair, torchair_emit, torchair_graph
from ascend_deep.lowering.torchair_emit import Emitted
from ascend_deep.native.torch_npu import soc
from ascend_deep.options import Options
from tests.npu.rig import emitted_calls, stubs_folder

SCALARS: dict[str, Any] = {"routed_scaling_factor": 2.5}
GROUPS: dict[str, Any] = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}

PROCESSORS = ("910b", "950pr")
# Family: config fields, what is fused, vendor ops that have to run on the 910B.
EXPERTS = {"npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_moe_finalize_routing"}
MODELS: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "mixtral": ({}, {"moe_experts", "moe_route"}, EXPERTS | {"npu_swiglu", "npu_moe_gating_top_k"}),
    "qwen3_moe": ({"num_experts": 9}, {"moe_experts", "moe_route"}, EXPERTS | {"npu_swiglu", "npu_moe_gating_top_k"}),
    "deepseek_v3": (
        {**GROUPS, **SCALARS},
        {"moe_experts", "moe_route"},
        EXPERTS | {"npu_swiglu"},  # its masked groups are 0, not -inf: the choice is written out
    ),
    "glm4_moe": (
        {**GROUPS, **SCALARS, "n_group": 1, "topk_group": 1},
        {"moe_experts", "moe_route"},
        EXPERTS | {"npu_swiglu", "npu_moe_gating_top_k"},
    ),
    "deepseek_v32": (
        {**GROUPS, **SCALARS, "index_topk": 6},
        {"moe_experts", "moe_route", "mqa_topk"},
        EXPERTS | {"npu_swiglu"},  # the indexer has a mask, which the vendor's does not take: written out
    ),
    "gpt_oss": ({}, {"moe_experts"}, EXPERTS | {"npu_clipped_swiglu"}),
}
# Vendor ops of the 910B that are not made for the 950: what they compute is written out there.
ONLY_910B = {"npu_clipped_swiglu"}


@dataclass
class Captured:
    """A compiled model: its rewritten graphs with their inputs, and eager's result."""

    eager: torch.Tensor
    fused: set[str] = field(default_factory=set)
    graphs: list[tuple[fx.GraphModule, list[Any]]] = field(default_factory=list)
    ran: dict[str, set[str]] = field(default_factory=dict)
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    emitted: dict[str, list[Emitted]] = field(default_factory=dict)
    expanded: dict[str, list[fx.GraphModule]] = field(default_factory=dict)


@functools.cache
def captured(family: str) -> Captured:
    fields, _, _ = MODELS[family]
    loaded = models.load(family, fields=fields, layers=1, shape=(2, 9), dtype="float32")
    with torch.no_grad():
        model = Captured(loaded.model(*loaded.args, **loaded.kwargs).logits)

    now = PROCESSORS[0]

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        stage = _Stage(Options.parse({"downstream": "eager"}), gm)
        stage.run(gm)
        model.fused |= {m.op for m in stage.finish()[0].matches}
        lowered: dict[str, Callable[..., Any]] = {}
        for processor in PROCESSORS:
            with soc.planned(processor):
                graphs = torchair_emit.convert(gm, inputs, processor, stubs_folder())
                lowered[processor] = _torch_compat.aot_module_simplified(
                    gm,
                    inputs,
                    fw_compiler=functools.partial(_kept, model.expanded.setdefault(processor, [])),
                    decompositions=dict(torchair.decompositions()),
                )
            model.emitted.setdefault(processor, []).extend(graphs)

        def run(*args: Any) -> Any:
            # Every vendor call is asked of the limits of the processor, with the tensors that it really gets.
            with emitted_calls.Emitted(soc.Target(now)) as calls:
                out = lowered[now](*args)
            model.ran.setdefault(now, set()).update(calls.seen)
            return out

        return run

    with torch.no_grad():
        compiled = torch.compile(loaded.model, backend=backend)
        for now in PROCESSORS:
            model.results[now] = compiled(*loaded.args, **loaded.kwargs).logits
    torch._dynamo.reset()
    return model


def _kept(parts: list[fx.GraphModule], part: fx.GraphModule, _: Any) -> Callable[..., Any]:
    parts.append(part)
    return part.forward


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("family", MODELS)
def test_the_lowered_model_equals_eager(family: str, processor: str) -> None:
    model, (_, fused, vendor) = captured(family), MODELS[family]
    assert fused <= model.fused
    torch.testing.assert_close(model.results[processor], model.eager, rtol=1e-3, atol=1e-4)
    wanted = vendor if processor == "910b" else vendor - ONLY_910B
    assert wanted <= model.ran[processor], model.ran
    assert processor == "910b" or not model.ran[processor] & ONLY_910B
    left = [n for g in model.expanded[processor] for n in g.graph.nodes if str(n.target).startswith("ascend_deep.")]
    assert not left, left


# Ops of the graph engine per model and processor that stand for the fused parts: the baseline.
GE = {
    ("mixtral", "910b"): {"MoeGatingTopK": 1, "MoeInitRoutingV3": 1, "GroupedMatmul": 2, "SwiGlu": 1},
    ("qwen3_moe", "910b"): {"MoeGatingTopK": 1, "MoeInitRoutingV3": 1, "GroupedMatmul": 2, "SwiGlu": 1},
    ("deepseek_v3", "910b"): {"MoeInitRoutingV3": 1, "GroupedMatmul": 2, "SwiGlu": 1},
    ("glm4_moe", "910b"): {"MoeGatingTopK": 1, "MoeInitRoutingV3": 1, "GroupedMatmul": 2, "SwiGlu": 1},
    ("deepseek_v32", "910b"): {"MoeInitRoutingV3": 1, "GroupedMatmul": 2, "SwiGlu": 1},
    ("gpt_oss", "910b"): {"MoeInitRoutingV3": 1, "GroupedMatmul": 2, "ClippedSwiglu": 1},
    ("mixtral", "950pr"): {"MoeGatingTopK": 1, "MoeInitRoutingV3": 1, "GroupedMatmul": 2, "SwiGlu": 1},
    ("qwen3_moe", "950pr"): {"MoeGatingTopK": 1, "MoeInitRoutingV3": 1, "GroupedMatmul": 2, "SwiGlu": 1},
    ("deepseek_v3", "950pr"): {"MoeInitRoutingV3": 1, "GroupedMatmul": 2, "SwiGlu": 1},
    ("glm4_moe", "950pr"): {"MoeGatingTopK": 1, "MoeInitRoutingV3": 1, "GroupedMatmul": 2, "SwiGlu": 1},
    ("deepseek_v32", "950pr"): {"MoeInitRoutingV3": 1, "GroupedMatmul": 2, "SwiGlu": 1},
    ("gpt_oss", "950pr"): {"MoeInitRoutingV3": 1, "GroupedMatmul": 2},
}
OURS = {"MoeGatingTopK", "MoeInitRoutingV3", "GroupedMatmul", "SwiGlu", "ClippedSwiglu", "MoeFinalizeRoutingV2"}


@pytest.mark.parametrize(("family", "processor"), GE)
def test_the_graph_engine_gets_the_vendors_ops_and_whole_edges(family: str, processor: str) -> None:
    (graph,) = captured(family).emitted[processor]
    assert graph.problems == ()
    counts = torchair_graph.counts(graph.nodes)
    wanted = {**GE[family, processor], "MoeFinalizeRoutingV2": 1}
    assert {k: v for k, v in counts.items() if k in OURS} == wanted
    node = next(n for n in graph.nodes if n.type == "MoeFinalizeRoutingV2")
    assert dict(node.attributes)["drop_pad_mode"] == "3"
    product = next(n for n in graph.nodes if n.type == "GroupedMatmul")
    attributes = dict(product.attributes)
    assert (attributes["split_item"], attributes["group_type"], attributes["group_list_type"]) == ("3", "0", "1")
    # Rows, counts and the map back all come from the routing, by way of two products and one activation.
    types = {n.name: n.type for n in graph.nodes}
    fed = {n.name: {e.name: (types[e.source], e.index) for e in n.inputs if e is not None} for n in graph.nodes}
    first, second = (fed[n.name] for n in graph.nodes if n.type == "GroupedMatmul")
    assert first["x0"] == ("MoeInitRoutingV3", 0)
    assert first["group_list"] == second["group_list"] == ("MoeInitRoutingV3", 2)
    assert fed[node.name]["expanded_row_idx"] == ("MoeInitRoutingV3", 1)


def _baseline(graph: Emitted) -> dict[str, Any]:
    """What of a graph is compared: every op type with its count; the vendor's fused ops, their attributes and edges."""
    types = {n.name: n.type for n in graph.nodes}
    vendor = [
        {
            "type": n.type,
            "attributes": dict(n.attributes),
            # Which output of which kind of op feeds which input.
            "inputs": {e.name: f"{types[e.source]}:{e.index}" for e in n.inputs if e is not None},
        }
        for n in graph.nodes
        if n.type in OURS
    ]
    return {"ops": dict(sorted(torchair_graph.counts(graph.nodes).items())), "fused": vendor}


@pytest.mark.parametrize("family", MODELS)
def test_the_graph_is_the_stored_one(family: str) -> None:
    """ASCEND_DEEP_UPDATE=1 writes the files anew; the difference is then for a reader to judge."""
    found = {name: _baseline(graph) for name, (graph,) in captured(family).emitted.items()}
    file = Path(__file__).parent.parent / "baselines" / f"{family}.json"
    if os.environ.get("ASCEND_DEEP_UPDATE") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(file.read_text(encoding="utf-8"))


def test_symbolic_sizes_stay_symbolic() -> None:
    """A router with its experts, the part of a model in which vendor ops have to take any number of tokens."""
    loaded = models.load("qwen3_moe", fields={"num_experts": 9}, layers=1, dtype="float32")
    block = loaded.model.model.layers[0].mlp
    graphs: list[Emitted] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        stage = _Stage(Options.parse({"downstream": "eager"}), gm)
        stage.run(gm)
        assert {m.op for m in stage.finish()[0].matches} == {"moe_experts", "moe_route"}
        with soc.planned("910b"):
            graphs.extend(torchair_emit.convert(gm, inputs, "910b", stubs_folder()))
        return gm.forward

    x = torch.randn(2, 9, loaded.model.config.hidden_size)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        torch.compile(block, backend=backend, fullgraph=True)(x)
    torch._dynamo.reset()
    (graph,) = graphs
    assert graph.problems == ()
    assert torchair_graph.counts(graph.nodes)["GroupedMatmul"] == 2
    inputs = [n for n in graph.nodes if n.type == "Data"]
    assert any("-1" in s for n in inputs for s in n.shapes), [n.shapes for n in inputs]
    routing = next(n for n in graph.nodes if n.type == "MoeInitRoutingV3")
    assert dict(routing.attributes)["active_num"] == "-1"


def test_converters_registered_with_torchair_build_the_same_ops() -> None:
    """The other way: torchair meets our ops itself, and our converters expand them."""
    import torchair as vendor

    from ascend_deep import ops
    from ascend_deep.lowering.torchair_offline import offline

    assert set(torchair.register_converters()) == set(ops.OPS)
    compiled: list[Any] = []
    compiler = vendor.get_compiler(vendor.CompilerConfig())

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def one(part: fx.GraphModule, given: Any) -> Callable[..., Any]:
            compiled.append(compiler(*torchair_emit._on_npu(part, given)).runner)
            return part.forward

        with soc.planned("910b"), offline("910b"):
            done: Callable[..., Any] = _torch_compat.aot_module_simplified(gm, inputs, fw_compiler=one)
        return done

    h, logits = torch.randn(5, 64), torch.randn(7, 16)

    def function(h: torch.Tensor, logits: torch.Tensor) -> Any:
        quantised = ops.quant_fp8(h, gran=(1, 16))  # the reference body: amax, and a scale per block
        routed = ops.moe_route(logits, topk=3, scoring="sigmoid", renorm="sum", scale=2.5)
        return ops.swiglu(h), routed, quantised, ops.gemm_bf16(h.bfloat16(), h.bfloat16(), alpha=0.7)

    torch.compile(function, backend=backend, fullgraph=True)(h, logits)
    nodes = torchair_graph.read(torchair_emit._emitted(compiled[0].graph).message)
    assert torchair_graph.problems(nodes) == []
    counts = torchair_graph.counts(nodes)
    assert counts["SwiGlu"] == 1 and counts["MoeGatingTopK"] == 1 and counts["MatMul"] == 1
    gate = next(n for n in nodes if n.type == "MoeGatingTopK")
    assert float(dict(gate.attributes)["routed_scaling_factor"]) == 2.5


def test_torchairs_backend_gets_our_decompositions() -> None:
    table = torchair.backend().keywords["decompositions"]  # type: ignore[attr-defined]
    assert set(torchair.decompositions()) <= set(table)


def test_a_conversion_leaves_torchair_as_it_was() -> None:
    import torch_npu
    from torchair.core import _backend, _torchair

    from ascend_deep.lowering.torchair_offline import offline

    watched = [
        (_backend, "initialize_graph_engine"),
        (_torchair, "get_registered_ir_def"),
        (_torchair, "check_cann_compat"),
        (torch_npu.npu, "get_device_name"),
    ]
    before = [getattr(owner, name) for owner, name in watched]
    with pytest.raises(ZeroDivisionError), offline("950dt"):
        assert torch_npu.npu.get_device_name() == "Ascend950DT_9582"
        assert all(getattr(owner, name) is not value for (owner, name), value in zip(watched, before, strict=True))
        raise ZeroDivisionError
    assert [getattr(owner, name) for owner, name in watched] == before


def test_the_emit_option_writes_files_and_the_model_still_runs(tmp_path: Any) -> None:
    torch.manual_seed(3)
    gate = torch.nn.Linear(24, 16)

    def router(x: torch.Tensor) -> Any:
        weights, idx = gate(x).softmax(-1).topk(3, -1)
        return weights / weights.sum(-1, keepdim=True), idx

    options = {"downstream": "eager", "target": "ascend950", "emit": "ge", "emit_to": str(tmp_path)}
    x = torch.randn(7, 24)
    with torch.no_grad():
        got = torch.compile(router, backend="ascend_deep", options=options)(x)
        torch.testing.assert_close(got, router(x))
    files = {f.name for f in (tmp_path / "compile_0").iterdir()}
    assert files == {f"graph_0{ending}" for ending in torchair_emit.FILES.values()}
    listing = (tmp_path / "compile_0" / "graph_0.txt").read_text()
    assert listing.startswith("Graph for the graph engine") and "no Ascend hardware was involved" in listing
    assert "Edge check: every input is an output" in listing and "MoeGatingTopK(" in listing
    assert (tmp_path / "compile_0" / "graph_0.mmd").read_text().splitlines()[1] == "flowchart TD"
    assert lowering.stubs_folder().name == "ascend_deep_cann"


def test_training_lowers_forward_and_backward() -> None:
    from ascend_deep import ops

    idx = torch.randint(0, 4, (9, 2))

    def step(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ops.moe_experts(x, idx, weights, w13, None, w2).square().sum()

    shapes = ((9, 32), (4, 32, 32), (4, 32, 16), (9, 2))
    inputs = [torch.randn(s).mul_(0.3).requires_grad_() for s in shapes]
    graphs: list[Emitted] = []

    def backend(gm: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        with soc.planned("910_93"):
            graphs.extend(torchair_emit.convert(gm, given, "910_93", stubs_folder()))
        return gm.forward

    torch.compile(step, backend=backend, fullgraph=True)(*inputs)
    assert len(graphs) == 2 and [g.problems for g in graphs] == [(), ()]
    forward, backward = (torchair_graph.counts(g.nodes) for g in graphs)
    assert forward["GroupedMatmul"] == 2 and forward["SwiGlu"] == 1
    # Hidden activation again, its gradient, two gradients of weights, the gradient of the rows.
    assert backward["GroupedMatmul"] == 5 and backward["SwiGluGrad"] == 1
    kinds = [dict(n.attributes)["group_type"] for n in graphs[1].nodes if n.type == "GroupedMatmul"]
    assert sorted(kinds) == ["0", "0", "0", "2", "2"]
