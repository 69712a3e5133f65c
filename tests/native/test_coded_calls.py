"""Calls of the kernels as compiled graphs hold them: the same bits, and joined only where that is right."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

from ascend_deep import ops
from ascend_deep.lowering import direct
from ascend_deep.native.cpu.coded import code_calls
from ascend_deep.native.cpu.provider import CPU
from ascend_deep.ops._op import Sample
from ascend_deep.ops.moe_experts import MOE_EXPERTS
from ascend_deep.ops.moe_route import MOE_ROUTE

pytestmark = pytest.mark.skipif(CPU.unavailable() is not None, reason="the C++ kernels are not built")

ROUTINGS: tuple[dict[str, Any], ...] = (
    {"scoring": "softmax", "renorm": "sum", "eps": 0.01},
    {"scoring": "sigmoid", "renorm": "clamp", "eps": 0.7, "bias": True, "group_fill": "zero", "groups": True},
    {"scoring": "sqrtsoftplus", "select": "logits", "scale": 2.5},
    {"scoring": "sigmoid", "bias": True, "group_score": "max", "groups": True, "scale": 0.3},
)


def accepted(samples: Any, name: str) -> list[Sample]:
    return [s for s in samples if CPU.refusal(name, s.args, s.kwargs) is None]


def coded(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Graph:
    """A graph of one call of kernel ``name``, after coding; tensors are placeholders in the order of ``args``."""
    graph = fx.Graph()
    node = graph.call_function(CPU.direct[name](), tuple(placeholder(graph, a) for a in args), dict(kwargs))
    graph.output(node)
    code_calls(graph)
    return graph


def placeholder(graph: fx.Graph, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    first = next(iter(graph.nodes), None)
    with graph.inserting_before(first) if first is not None and first.op != "placeholder" else graph.inserting_after():
        node = graph.placeholder(f"a{len(graph.nodes)}")
    node.meta["val"] = value
    return node


def names(graph: fx.Graph) -> list[str]:
    return [str(n.target).removesuffix(".default") for n in graph.nodes if n.op == "call_function"]


def run(graph: fx.Graph, args: tuple[Any, ...]) -> Any:
    return fx.GraphModule({}, graph)(*(a for a in args if isinstance(a, Tensor)))


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype and found.stride() == wanted.stride()
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num()) and torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize("name", ["moe_route", "moe_experts"])
def test_every_sample_gives_the_same_bits(name: str) -> None:
    op = {"moe_route": MOE_ROUTE, "moe_experts": MOE_EXPERTS}[name]
    found = accepted(op.samples(), name)
    assert len(found) > 15
    for sample in found:
        args = tuple(a.detach() if isinstance(a, Tensor) else a for a in sample.args)
        graph = coded(name, args, sample.kwargs)
        assert names(graph) == [f"ascend_deep_cpu.{name}_coded"], sample.name
        wanted = CPU.kernels[name](*args, **sample.kwargs)
        call = next(n for n in graph.nodes if n.op == "call_function")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(n.meta["val"]) if isinstance(n, fx.Node) else n for n in call.args]
            fake = call.target(*fakes)
        got = run(graph, args)
        for g, w, f in zip(*((v if isinstance(v, tuple) else (v,)) for v in (got, wanted, fake)), strict=True):
            same(g, w)
            assert (f.shape, f.dtype, f.stride()) == (g.shape, g.dtype, g.stride()), sample.name


def layer_graph(args: tuple[Any, ...], kwargs: Mapping[str, Any], logits: Tensor, bias: Tensor | None,
                routing: Mapping[str, Any], rounded: bool) -> fx.Graph:  # fmt: skip
    """moe_route and the moe_experts that uses it, as Inductor's graph has them; x is ``args[0]``."""
    graph = fx.Graph()
    tensors = [placeholder(graph, a) for a in (args[0], logits, bias, *args[3:])]
    route = graph.call_function(CPU.direct["moe_route"](), tuple(tensors[1:3]), dict(routing))
    weights = graph.call_function(operator.getitem, (route, 0))
    idx = graph.call_function(operator.getitem, (route, 1))
    if rounded:
        weights = graph.call_function(torch.ops.prims.convert_element_type.default, (weights, torch.bfloat16))
    call = (tensors[0], idx, weights, *tensors[3:])
    graph.output(graph.call_function(CPU.direct["moe_experts"](), call, dict(kwargs)))
    return graph


@pytest.mark.parametrize("rounded", [False, True])
def test_routing_joins_the_experts_and_gives_the_same_bits(rounded: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    for i, sample in enumerate(accepted(MOE_EXPERTS.samples(), "moe_experts")):
        x, idx, _, w13, *_ = args = tuple(a.detach() if isinstance(a, Tensor) else a for a in sample.args)
        experts = w13.shape[0] + sample.kwargs["expert_offset"] + i % 3
        if not 1 <= idx.shape[1] <= experts:
            continue
        routing = dict(ROUTINGS[i % len(ROUTINGS)])
        groups = 2 if routing.pop("groups", False) and experts % 2 == 0 and idx.shape[1] <= experts // 2 else 1
        bias = torch.randn(experts, generator=generator) if routing.pop("bias", False) else None
        routing = {"scoring": "softmax", "select": "scores", "renorm": "none", "eps": 0.0, "scale": 1.7, **routing}
        routing = {"topk": idx.shape[1], "group_score": "top2", "group_fill": "neg_inf", **routing}
        routing.update(n_group=groups, topk_group=1)
        logits = torch.randn(x.shape[0], experts, generator=generator).to((torch.float32, torch.bfloat16)[i % 2])
        graph = layer_graph(args, sample.kwargs, logits, bias, routing, rounded)
        flat = tuple(a for a in (x, logits, bias, *args[3:]) if isinstance(a, Tensor))
        wanted = run(graph, flat)
        code_calls(graph)
        graph.lint()
        assert names(graph) == ["ascend_deep_cpu.moe_layer"], sample.name
        same(run(graph, flat), wanted)


KEPT: dict[str, Callable[[fx.Graph, dict[str, fx.Node]], None]] = {
    "the ids are a result too": lambda g, n: n["output"].update_arg(0, (n["moe_experts"], n["getitem_1"])),
    "the weights are a result too": lambda g, n: n["output"].update_arg(0, (n["moe_experts"], n["getitem"])),
    "ids and weights changed places": lambda g, n: (
        n["getitem"].update_arg(1, 1),
        n["getitem_1"].update_arg(1, 0),
    ),
    "the weights are doubled": lambda g, n: n["moe_experts"].replace_input_with(
        n["getitem"], before(g, n["moe_experts"], torch.ops.aten.mul.Tensor, n["getitem"], 2.0)
    ),
    "the weights are rounded to float16": lambda g, n: n["moe_experts"].replace_input_with(
        n["getitem"],
        before(g, n["moe_experts"], torch.ops.prims.convert_element_type.default, n["getitem"], torch.float16),
    ),
    "the logits are overwritten": lambda g, n: before(g, n["moe_experts"], torch.ops.aten.zero_.default, n["a1"]),
    "too many experts are chosen for a code": lambda g, n: n["moe_route"].update_kwarg("topk", 2**16),
}  # fmt: skip


def before(graph: fx.Graph, node: fx.Node, target: Any, *args: Any) -> fx.Node:
    with graph.inserting_before(node):
        return graph.call_function(target, args)


@pytest.mark.parametrize("why", KEPT)
def test_routing_stays_a_call_of_its_own_if(why: str) -> None:
    sample = random.Random(3).choice(accepted(MOE_EXPERTS.samples(), "moe_experts"))
    args = tuple(a.detach() if isinstance(a, Tensor) else a for a in sample.args)
    routing = {"topk": 2, "scoring": "softmax", "select": "scores", "renorm": "none", "eps": 0.0, "scale": 1.7,
               "n_group": 1, "topk_group": 1, "group_score": "top2", "group_fill": "neg_inf"}  # fmt: skip
    graph = layer_graph(args, sample.kwargs, torch.randn(args[0].shape[0], 9), None, routing, False)
    assert "ascend_deep_cpu.moe_layer" in names(joined(graph))
    KEPT[why](graph, {n.name.removesuffix("_default"): n for n in graph.nodes})
    after = names(joined(graph))
    assert "ascend_deep_cpu.moe_layer" not in after and "ascend_deep_cpu.moe_experts_coded" in after
    code = "" if why.startswith("too many") else "_coded"
    assert f"ascend_deep_cpu.moe_route{code}" in after


def joined(graph: fx.Graph) -> fx.Graph:
    """A coded copy."""
    copy = fx.Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    code_calls(copy)
    copy.lint()
    return copy


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (("experts_code", {"act": "tanh"}), "act is 'tanh'"),
        (("experts_code", {"weight_layout": "nek"}), "weight_layout is 'nek'"),
        (("experts_code", {"limit": -0.5}), "limit is -0.5, it has to be positive"),
        (("experts_code", {"out_dtype": torch.float64}), "out_dtype is float64"),
        (("route_code", {"topk": 0}), "topk is 0"),
        (("route_code", {"topk": 70000}), "topk is 70000, a coded call takes up to 65535"),
        (("route_code", {"n_group": 4, "topk_group": 5}), "topk_group is 5"),
        (("route_code", {"renorm": "l2"}), "renorm is 'l2'"),
    ],
)
def test_what_has_no_code_is_refused(call: tuple[str, dict[str, Any]], text: str) -> None:
    name, changes = call
    plain: dict[str, dict[str, Any]] = {
        "experts_code": {"act": "gelu", "alpha": 1.0, "limit": 0.7, "interleaved": False, "weight_layout": "ekn",
                         "weight_on_input": True, "out_dtype": None},
        "route_code": {"topk": 3, "scoring": "sigmoid", "select": "scores", "renorm": "sum", "n_group": 2,
                       "topk_group": 1, "group_score": "max", "group_fill": "zero", "rounded": False},
    }  # fmt: skip
    encode = getattr(torch.ops.ascend_deep_cpu, name)
    assert isinstance(encode(**plain[name]), int)
    with pytest.raises(RuntimeError, match=text):
        encode(**{**plain[name], **changes})


def test_numbers_that_are_no_code_are_refused() -> None:
    x, w13, w2 = torch.randn(2, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    idx, weights, logits = torch.randint(4, (2, 2)), torch.rand(2, 2), torch.randn(2, 4)
    kernels = torch.ops.ascend_deep_cpu
    for code in (-1, 1 << 10, 8, 3 << 8):
        with pytest.raises(RuntimeError, match="is not a code of experts"):
            kernels.moe_experts_coded(x, idx, weights, w13, None, w2, None, None, code, 1.0, 0.0, 0)
    for code in (-1, 0, 3, 3 << 3, 2 << 8):
        with pytest.raises(RuntimeError, match="is not a code of routing"):
            kernels.moe_route_coded(logits, None, code, 0.0, 1.0)
    code = kernels.route_code(topk=2, scoring="softmax", select="scores", renorm="none", n_group=1, topk_group=1,
                              group_score="top2", group_fill="neg_inf", rounded=True)  # fmt: skip
    with pytest.raises(RuntimeError, match="it does not round them"):
        kernels.moe_route_coded(logits, None, code, 0.0, 1.0)
    with pytest.raises(RuntimeError, match="the routing is of 2 tokens, x has 1 rows"):
        kernels.moe_layer(x[:1], logits, None, w13, None, w2, None, None, code, 0.0, 1.0, 0, 1.0, 0.0, 0)


def test_compiled_layers_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all numbers of tokens, through Inductor, joined once and once not."""
    monkeypatch.delenv("ASCEND_DEEP_DEBUG", raising=False)
    w13, w2 = torch.randn(6, 12, 8) / 3, torch.randn(6, 8, 6) / 3

    def block(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        weights, idx = ops.moe_route(x @ gate, topk=2, scoring="sigmoid", renorm="sum", eps=0.05, scale=2.5)
        y = ops.moe_experts(x, idx, weights, w13, None, w2, act="gelu_tanh")
        weights, idx = ops.moe_route(y @ gate, topk=3, scale=0.4)
        return ops.moe_experts(y, idx, weights, w13, None, w2), idx

    compiled = torch.compile(block, backend="ascend_deep", dynamic=True)
    gate = torch.randn(8, 6)
    with torch.no_grad():
        for tokens in (5, 33):
            x = torch.randn(tokens, 8)
            (found, idx), code = run_and_get_code(compiled, x, gate)
            wanted, ids = block(x, gate)
            assert torch.equal(idx, ids)
            torch.testing.assert_close(found, wanted)
            if tokens == 5:
                kernels = re.findall(r"= torch\.ops\.ascend_deep_cpu\.(\w+)\.default\(", "".join(code))
                assert sorted(kernels) == ["moe_experts_coded", "moe_layer", "moe_route_coded"]


def test_calls_of_the_ops_are_coded_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the op to the coded kernel, with the strides that Inductor has to keep."""
    monkeypatch.delenv("ASCEND_DEEP_DEBUG", raising=False)
    sample = accepted(MOE_ROUTE.samples(), "moe_route")[0]
    graph = fx.Graph()
    args = tuple(placeholder(graph, a) for a in sample.args)
    node = graph.call_function(MOE_ROUTE.overload, args, dict(sample.kwargs))
    node.meta["eager_input_vals"] = (sample.args, dict(sample.kwargs))
    graph.output(node)
    assert direct.replace(graph) == 1
    call = next(n for n in graph.nodes if n.op == "call_function")
    assert names(graph) == ["ascend_deep_cpu.moe_route_coded"]
    strides, keywords = call.meta["eager_input_vals"]
    assert strides[0] is sample.args[0] and strides[2:] == call.args[2:] and keywords == {}


def test_kernels_leave_gradients_to_the_ops() -> None:
    """The dispatcher goes from a call to the kernel at once, whatever needs a gradient: the ops have the backward."""
    x, w13, w2 = torch.randn(3, 8, requires_grad=True), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    args = (x, torch.randint(4, (3, 2)), torch.rand(3, 2), w13, None, w2, None, None)
    kwargs = {"act": "gelu", "alpha": 1.0, "limit": 0.9, "interleaved": True, "weight_layout": "enk",
              "weight_on_input": True, "expert_offset": 0, "out_dtype": torch.bfloat16}  # fmt: skip
    wanted = MOE_EXPERTS.overload(*args, **kwargs)
    found = CPU.kernels["moe_experts"](*args, **kwargs)
    assert wanted.requires_grad and not found.requires_grad
    same(found, wanted.detach())
