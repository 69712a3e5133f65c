"""Normal form: every rule reads its spellings as one value, and every term means what its nodes compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.normal_form import Term, ValueTable
from ascend_deep.passes.stand_ins import _by_group


def traced(f: Callable[..., Any], *args: Any, symbolic: bool = False) -> fx.GraphModule:
    return make_fx(f, pre_dispatch=True, tracing_mode="symbolic" if symbolic else "fake")(*args)


class Values(fx.Interpreter):
    """Runs a graph and keeps every node's value."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def _part(x, dim, start, step, length):
    index = start + step * torch.arange(length)
    return x.index_select(dim, index)


def _sorted(x, dim, descending, stable):
    return x.sort(dim=dim, descending=descending, stable=stable)


def _mask(x, m, value):
    return torch.where(m, torch.tensor(value, dtype=x.dtype), x)


# What each term means, written from the table in the module docstring of normal_form.
MEANING: dict[str, Callable[..., Any]] = {
    "Reshape": lambda x, *shape: x.reshape(shape),
    "Permute": lambda x, *dims: x.permute(dims),
    "Expand": lambda x, *shape: x.expand(shape),
    "Part": _part,
    "Cast": lambda x, dtype: x.to(dtype),
    "Gemm": lambda a, b: a @ b,
    "Einsum": lambda a, b, equation: torch.einsum(equation, a, b),
    "GroupedGemm": lambda a, b, offs: _by_group(a, b, offs, 0.0),
    "Sorted": lambda *a: _sorted(*a).values,
    "Order": lambda *a: _sorted(*a).indices,
    "TopValues": lambda x, k, dim, largest: x.topk(k, dim, largest).values,
    "TopIds": lambda x, k, dim, largest: x.topk(k, dim, largest).indices,
    "IntDiv": lambda x, k: torch.div(x, k, rounding_mode="floor"),
    "Range": lambda n: torch.arange(n),
    "Counts": lambda ids, e: torch.bincount(ids.flatten().long(), minlength=e)[:e],
    "Offsets": lambda ids, e: torch.bincount(ids.flatten().long(), minlength=e)[:e].cumsum(0),
    "Inverse": lambda p: p.argsort(),
    "Rows": lambda x, i: x[i],
    "AddRows": lambda base, i, src: base.index_add(0, i, src),
    "Mask": _mask,
    "Size": lambda n: n,
}


def meaning(term: Term, values: dict[fx.Node, Any], top: bool = True) -> Any:
    """The value of ``term`` by MEANING; what no rule read is taken from the graph."""
    if term.op not in MEANING:
        if term.nodes:
            return values[term.nodes[0]]
        assert term.op in ("Sort", "TopK", "Split", "SplitSizes", "aten.add"), term
        return sum(meaning(a, values, False) for a in term.args)
    value = MEANING[term.op](*(meaning(a, values, False) for a in term.args), *term.attrs)
    return value.to(term.dtype) if isinstance(value, Tensor) else value


def check(f: Callable[..., Any], *args: Any) -> tuple[ValueTable, fx.GraphModule]:
    """Every node of ``f`` has the value that its term means."""
    gm = traced(f, *args)
    run = Values(gm)
    run.run(*args)
    table = ValueTable(GraphView(gm.graph))
    for node in gm.graph.nodes:
        value = run.values.get(node)
        if node.op == "call_function" and isinstance(value, Tensor) and "empty" not in str(node.target):
            torch.testing.assert_close(meaning(table.term(node), run.values), value, msg=f"{node}: {table.term(node)}")
    return table, gm


def results(f: Callable[..., Any], *args: Any) -> list[Term]:
    """Terms of the outputs of ``f``, after the numeric check."""
    table, gm = check(f, *args)
    output = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    return [table.term(n) for n in (output if isinstance(output, (tuple, list)) else [output])]


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
W = torch.randn(3, 6, generator=torch.Generator().manual_seed(3))
A3 = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(4))
B3 = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(5))
IDS = torch.tensor([[2, 0], [1, 2], [4, 3], [0, 1]])
FLAT = torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])
E = 5


def inverse_by_put(p):
    return torch.empty_like(p).index_put([p], torch.arange(p.shape[0]))


def offsets_by(count):
    return lambda i: torch.cumsum(count(i), 0, dtype=torch.int32)


# name -> (term expected, spellings: functions that all must give the same term), arguments
SPELLINGS: dict[str, tuple[str, list[Callable[..., Any]], tuple[Any, ...]]] = {
    "reshape": (
        "Reshape",
        [
            lambda x: x.view(2, 12),
            lambda x: x.reshape(2, 2, 6).flatten(1),
            lambda x: torch.ops.aten._unsafe_view(x.clone(), [2, 12]),
            lambda x: x.unsqueeze(0).squeeze(0).unflatten(0, (2, 2)).view(2, -1),
        ],
        (X,),
    ),
    "reshape vanishes": ("placeholder", [lambda x: x.view(24).view(4, 6), lambda x: x[None][0].contiguous()], (X,)),
    "copies": ("placeholder", [lambda x: x.clone(), lambda x: torch.ops.aten.alias(x)], (X,)),
    "permute": (
        "Permute",
        [lambda x: x.permute(2, 0, 1), lambda x: x.transpose(1, 2).transpose(0, 1), lambda x: x.permute(-1, 0, -2)],
        (A3,),
    ),
    "transpose": ("Permute", [lambda x: x.t(), lambda x: x.transpose(-1, -2), lambda x: x.permute(1, 0)], (X,)),
    "permute vanishes": ("placeholder", [lambda x: x.t().t(), lambda x: x.permute(0, -1)], (X,)),
    "expand": (
        "Expand",
        [lambda x: x.unsqueeze(1).expand(4, 3, 6), lambda x: x.view(4, 1, 6).expand(-1, 3, -1).expand(4, 3, 6)],
        (X,),
    ),
    "expand twice": (
        "Expand",
        [
            lambda x: x.view(4, 1, 1, 6).expand(4, 3, 1, 6).expand(4, 3, 5, 6),
            lambda x: x[:, None, None].expand(-1, 3, 5, -1),
        ],
        (X,),
    ),
    "expand vanishes": ("placeholder", [lambda x: x.expand(4, 6), lambda x: x.expand(-1, -1).broadcast_to(4, 6)], (X,)),
    "repeat": (
        "Reshape",
        [lambda x: x.repeat(3, 1), lambda x: x.unsqueeze(0).expand(3, 4, 6).reshape(12, 6)],
        (X,),
    ),
    "repeat along a later dim": (
        "Reshape",
        [
            lambda x: x.repeat(1, 3),
            lambda x: x[:, None].expand(-1, 3, -1).flatten(1),
            lambda x: x.repeat_interleave(3, 0).view(4, 18),
        ],
        (X,),
    ),
    "repeat_interleave": (
        "Reshape",
        [lambda x: x.repeat_interleave(3, dim=0), lambda x: x.unsqueeze(1).expand(4, 3, 6).reshape(12, 6)],
        (X,),
    ),
    "half": (
        "Part",
        [
            lambda x: x.chunk(2, -1)[1],
            lambda x: x.split(3, dim=1)[1],
            lambda x: x.split([3, 3], dim=-1)[1],
            lambda x: x[:, 3:],
            lambda x: x.narrow(1, 3, 3),
            lambda x: x[..., -3:],
        ],
        (X,),
    ),
    "odd columns": ("Part", [lambda x: x[:, 1::2], lambda x: torch.ops.aten.slice(x, -1, 1, 6, 2)], (X,)),
    "row": ("Reshape", [lambda x: x[2], lambda x: x.select(0, 2), lambda x: x.unbind(0)[2]], (X,)),
    "whole part": ("placeholder", [lambda x: x[:, 0:], lambda x: x.split(6, dim=1)[0]], (X,)),
    "cast": ("Cast", [lambda x: x.double(), lambda x: x.to(torch.float64)], (X,)),
    "cast vanishes": ("placeholder", [lambda x: x.to(torch.float32), lambda x: x.float()], (X,)),
    "gemm": ("Gemm", [lambda x, y: x @ y, lambda x, y: torch.mm(x, y), lambda x, y: torch.matmul(x, y)], (X, Y)),
    "linear": ("Gemm", [lambda x, w: F.linear(x, w), lambda x, w: x @ w.t(), lambda x, w: torch.mm(x, w.T)], (X, W)),
    "batched gemm": ("Gemm", [lambda a, b: torch.bmm(a, b), lambda a, b: a @ b], (A3, B3)),
    "gemm with bias": (
        "aten.add",
        [lambda x, y, b: torch.addmm(b, x, y), lambda x, y, b: (x @ y) + b, lambda x, y, b: b + x @ y],
        (X, Y, torch.randn(3)),
    ),
    "linear with bias": (
        "aten.add",
        [lambda x, w, b: F.linear(x, w, b), lambda x, w, b: F.linear(x, w) + b],
        (X, W, torch.randn(3)),
    ),
    "baddbmm": (
        "aten.add",
        [lambda a, b, c: torch.baddbmm(c, a, b), lambda a, b, c: torch.bmm(a, b) + c],
        (A3, B3, torch.randn(2, 4, 3)),
    ),
    "einsum": (
        "Einsum",
        [lambda x, y: torch.einsum("ij,jk->ik", x, y), lambda x, y: torch.einsum("td, de -> te", x, y)],
        (X, Y),
    ),
    "grouped gemm": (
        "GroupedGemm",
        [lambda x, b, o: torch._grouped_mm(x, b, o)],
        (
            torch.randn(8, 8, dtype=torch.bfloat16),
            torch.randn(3, 8, 8, dtype=torch.bfloat16),
            torch.tensor([2, 5, 8], dtype=torch.int32),
        ),
    ),
    "order": (
        "Order",
        [lambda i: i.sort()[1], lambda i: torch.argsort(i, dim=0), lambda i: i.sort(dim=-1)[1]],
        (FLAT,),
    ),
    "sorted": ("Sorted", [lambda i: i.sort()[0], lambda i: torch.sort(i, 0).values], (FLAT,)),
    "topk": ("TopIds", [lambda x: x.topk(2)[1], lambda x: torch.topk(x, 2, dim=1).indices], (X,)),
    "token of a row": (
        "IntDiv",
        [
            lambda i: i.argsort() // 2,
            lambda i: torch.div(i.sort()[1], 2, rounding_mode="floor"),
            lambda i: torch.div(i.argsort(), 2, rounding_mode="trunc"),
        ],
        (FLAT,),
    ),
    "range": (
        "Range",
        [lambda x: torch.arange(4), lambda x: torch.arange(0, 4), lambda x: torch.arange(0, 4, 1)],
        (X,),
    ),
    "offsets": (
        "Offsets",
        [
            offsets_by(lambda i: torch.histc(i.flatten().float(), E, 0, E - 1)),
            offsets_by(lambda i: torch.histc(i.view(-1).sort()[0].float(), bins=E, min=0, max=E)),
            offsets_by(lambda i: torch.bincount(i.reshape(-1), minlength=E)),
            offsets_by(lambda i: F.one_hot(i, E).sum((0, 1))),
            offsets_by(lambda i: F.one_hot(i.flatten(), E).float().sum(0)),
        ],
        (IDS,),
    ),
    "inverse": (
        "Inverse",
        [
            lambda i: inverse_by_put(i.argsort()),
            lambda i: torch.zeros_like(i).scatter(0, i.argsort(), torch.arange(8)),
            lambda i: i.argsort().argsort(),
        ],
        (FLAT,),
    ),
    "rows": (
        "Rows",
        [
            lambda x, i: x[i],
            lambda x, i: x.index_select(0, i),
            lambda x, i: F.embedding(i, x),
            lambda x, i: torch.gather(x, 0, i.reshape(-1, 1).expand(-1, 6)),
            lambda x, i: x.gather(0, i[:, None].expand(-1, x.shape[1])),
        ],
        (X, torch.tensor([3, 1, 1, 0, 2])),
    ),
    "rows added": (
        "AddRows",
        [
            lambda x, i, s: x.index_add(0, i, s),
            lambda x, i, s: x.scatter_add(0, i[:, None].expand(-1, 6), s),
            lambda x, i, s: x.index_put([i], s, accumulate=True),
        ],
        (X, torch.tensor([3, 1, 1, 0, 2]), torch.randn(5, 6)),
    ),
    "mask": (
        "Mask",
        [lambda x: x.masked_fill(x > 0, -2.5), lambda x: torch.where(x > 0, -2.5, x)],
        (X,),
    ),
    "commuted": ("aten.mul", [lambda x, y: x * y, lambda x, y: y * x], (X, torch.randn(4, 6))),
    "commuted sum": ("aten.add", [lambda x, y: x + y, lambda x, y: torch.add(y, x)], (X, torch.randn(4, 6))),
    "positive dims": (
        "aten.softmax",
        [lambda x: torch.softmax(x, -1), lambda x: x.softmax(dim=1)],
        (X,),
    ),
    "defaults": (
        "aten.cumsum",
        [lambda x: torch.cumsum(x, -1), lambda x: torch.cumsum(x, 1, dtype=None)],
        (X,),
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_one_value_share_one_term(name):
    op, spellings, args = SPELLINGS[name]
    terms = results(lambda *a: tuple(f(*a) for f in spellings), *args)
    assert [t.op for t in terms] == [op] * len(terms), terms
    assert len({t.number for t in terms}) == 1, terms


# Pairs that look alike and must not share a term.
DIFFERENT: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "casts stay": (lambda x: x.bfloat16().float(), lambda x: x, (X,)),
    "order of dims": (lambda x: x.permute(2, 0, 1), lambda x: x.permute(1, 2, 0), (A3,)),
    "which half": (lambda x: x.chunk(2, -1)[0], lambda x: x.chunk(2, -1)[1], (X,)),
    "halves and columns": (lambda x: x[:, :3], lambda x: x[:, ::2], (X,)),
    "descending": (lambda i: i.argsort(), lambda i: i.argsort(descending=True), (FLAT,)),
    "detached": (lambda x: x.detach() * 2, lambda x: x * 2, (X,)),
    "operands": (lambda x, y: x - y, lambda x, y: y - x, (X, torch.randn(4, 6))),
    "alpha": (lambda x, y: torch.add(x, y, alpha=2), lambda x, y: x + y, (X, torch.randn(4, 6))),
    "keyword": (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh"), (X,)),
    "counts of other bins": (
        lambda i: torch.bincount(i.flatten(), minlength=E),
        lambda i: torch.bincount(i.flatten(), minlength=E + 1),
        (IDS,),
    ),
    "histogram of shifted ids": (
        lambda i: torch.histc(i.flatten().float(), E, 0, E - 1),
        lambda i: torch.histc(i.flatten().float(), E, 1, E),
        (IDS,),
    ),
    "addmm with a factor": (
        lambda b, x, y: torch.addmm(b, x, y, beta=0.5),
        lambda b, x, y: torch.addmm(b, x, y),
        (torch.randn(3), X, Y),
    ),
    "rows kept or added": (
        lambda x, i, s: x.index_put([i], s),
        lambda x, i, s: x.index_put([i], s, accumulate=True),
        (X, torch.tensor([3, 1, 0]), torch.randn(3, 6)),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_values_have_different_terms(name):
    f, g, args = DIFFERENT[name]
    a, b = results(lambda *x: (f(*x), g(*x)), *args)
    assert a is not b


def test_terms_point_back_to_every_node_that_computes_them():
    table, gm = check(lambda x: (x.view(-1), x.flatten(), x.reshape(24)), X)
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert len(nodes) == 3
    assert table.term(nodes[0]).nodes == nodes


def test_the_graph_is_left_alone():
    gm = traced(lambda x: x.t().t().view(-1).view(4, 6) + 1, X)
    before = str(gm.graph)
    table = ValueTable(GraphView(gm.graph))
    for node in gm.graph.nodes:
        table.term(node)
    assert str(gm.graph) == before


def test_symbolic_sizes_are_compared_as_expressions():
    gm = traced(lambda x: (x.view(-1, 6).view(x.shape), x.flatten()), torch.randn(5, 7, 6), symbolic=True)
    table = ValueTable(GraphView(gm.graph))
    a, b = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    assert table.term(a).op == "placeholder"
    assert table.term(b).numel == table.term(a).numel
    assert not isinstance(table.term(b).numel, int)


def test_values_of_different_grad_modes_stay_apart():
    class Two(torch.nn.Module):
        def forward(self, x):
            with torch.no_grad():
                a = x.t() * 2.5
            return a + x.t() * 2.5

    from ascend_deep.passes.capture import capture

    graphs = []

    def backend(gm, inputs):
        graphs.append(capture(gm))
        return gm.forward

    torch.compile(Two(), backend=backend)(torch.randn(3, 3, requires_grad=True))
    view = GraphView(graphs[0].graph)
    table = view.terms
    scaled = [n for n in graphs[0].graph.nodes if "mul" in str(n.target)]
    assert len(scaled) == 2
    assert table.term(scaled[0]) is not table.term(scaled[1])


def test_deep_graphs_do_not_recurse():
    def deep(x):
        for _ in range(3000):
            x = x.sin()
        return x

    (term,) = results(deep, X)
    assert term.op == "aten.sin"


def test_show_is_one_line_per_value():
    table, gm = check(lambda x, w: F.linear(x, w).relu(), X, W)
    text = table.show(n for n in gm.graph.nodes if n.op == "call_function")
    assert "Gemm(" in text and "aten.relu(" in text and "float32[4, 3]" in text and "Permute(" in text
    assert len(text.splitlines()) == len(set(text.splitlines()))
