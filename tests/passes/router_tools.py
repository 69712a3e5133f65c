"""Tools of the router tests: a gate around a router, the recogniser on one graph, and a backend that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ascend_deep.passes import gates, rewrite
from ascend_deep.passes._types import Refusal, Solution
from ascend_deep.passes.capture import capture, install
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.probe import isolated
from ascend_deep.passes.region import Region
from ascend_deep.passes.router import RECOGNISER
from tests.passes.router_spellings import E, H


class Gate(nn.Module):
    """A gate matmul and a router after it."""

    def __init__(self, router: Callable[..., Any], bias: bool, dtype: torch.dtype, shift: float = 0.0) -> None:
        super().__init__()
        self.router = router
        self.weight = nn.Parameter((torch.randn(E, H) * 0.4).to(dtype))
        self.bias = nn.Parameter(torch.randn(E) * 0.3 + shift) if bias else None

    def forward(self, x: Tensor) -> Any:
        logits = F.linear(x, self.weight)
        return self.router(logits) if self.bias is None else self.router(logits, self.bias)


@dataclass
class Found:
    """What the recogniser did to one graph."""

    solutions: list[Solution] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)


def recognise(graph: fx.Graph) -> Found:
    """Find, cut, solve, prove and rewrite, as the pipeline does, without its caches."""
    found = Found()
    view = GraphView(graph)
    for anchor in RECOGNISER.find(view):
        regions = RECOGNISER.cut(view, anchor)
        if isinstance(regions, Refusal):
            found.refusals.append(regions)
            continue
        for region in regions:
            with isolated():
                solution = RECOGNISER.solve(region)
                proof = solution if isinstance(solution, Refusal) else gates.prove(RECOGNISER, region, solution)
            if isinstance(solution, Refusal) or isinstance(proof, Refusal):
                assert isinstance(proof, Refusal)
                found.refusals.append(proof)
                continue
            call = rewrite.apply(RECOGNISER, region, solution, {}, None)
            if isinstance(call, Refusal):
                found.refusals.append(call)
                continue
            found.solutions.append(solution)
            found.regions.append(region)
            found.errors.append(proof.max_error)
            break
    return found


class Backend:
    """A Dynamo backend that runs the recogniser on every graph and AOT eager on the result."""

    def __init__(self, change: Callable[[fx.GraphModule], None] | None = None) -> None:
        self.found: list[Found] = []
        self.graphs: list[fx.GraphModule] = []
        self.change = change

    def __call__(self, gm: fx.GraphModule, example_inputs: Any) -> Any:
        captured = capture(gm)
        if self.change is not None:
            self.change(captured)
        self.found.append(recognise(captured.graph))
        rewrite.tidy(captured)
        install(gm, captured)
        self.graphs.append(captured)
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

    def names(self) -> list[str]:
        return [op_name(n) for g in self.graphs for n in g.graph.nodes if n.op == "call_function"]

    @property
    def one(self) -> Found:
        assert len(self.found) == 1
        return self.found[0]


def compiled(f: Callable[..., Any], **kwargs: Any) -> tuple[Callable[..., Any], Backend]:
    backend = Backend()
    return torch.compile(f, backend=backend, fullgraph=True, **kwargs), backend


def tokens(gate: Gate, count: int, dtype: torch.dtype) -> Tensor:
    """[count, H] for which no two logits of a token are equal, so that every choice has one answer."""
    for _ in range(200):
        x = torch.randn(count, H).to(dtype)
        ordered = F.linear(x, gate.weight).float().sort(-1).values
        distinct = (ordered[:, 1:] > ordered[:, :-1]).all(-1)
        if count == 0 or bool(distinct.all()):
            return x
        good = x[distinct]
        if len(good):  # mix rows that are fine until there are enough
            pool = [good]
            while sum(len(p) for p in pool) < count:
                more = torch.randn(4 * count, H).to(dtype)
                ordered = F.linear(more, gate.weight).float().sort(-1).values
                pool.append(more[(ordered[:, 1:] > ordered[:, :-1]).all(-1)])
            return torch.cat(pool)[:count]
    raise AssertionError("no distinct logits found")


def by_id(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Columns in order of ids."""
    order = ids.argsort(-1)
    return weights.gather(-1, order), ids.gather(-1, order)


__all__ = ["Backend", "Found", "Gate", "by_id", "compiled", "recognise", "tokens"]
