"""Runs a function through one recogniser of products, whatever the policy says, and compares with eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ascend_deep.passes._types import Outcome
from ascend_deep.passes.pipeline import Pipeline


@dataclass
class Run:
    """Backend that rewrites with the given recognisers and runs the graph as it then is."""

    recognisers: Sequence[str]
    outcomes: list[Outcome] = field(default_factory=list)
    graphs: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.outcomes.append(Pipeline(self.recognisers, forced=self.recognisers).run(gm))
        self.graphs.append(gm)
        # AOT Autograd takes most of the time of such a test, and matters only for gradients.
        return torch._dynamo.lookup_backend("aot_eager" if torch.is_grad_enabled() else "eager")(gm, inputs)

    @property
    def reasons(self) -> list[str]:
        return [m.reason for m in self.outcomes[-1].misses]

    @property
    def ops(self) -> list[str]:
        return [m.op for m in self.outcomes[-1].matches]

    def calls(self, name: str) -> list[fx.Node]:
        target = getattr(torch.ops.ascend_deep, name).default
        return [n for n in self.graphs[-1].graph.nodes if n.target is target]

    def call(self, name: str) -> fx.Node:
        (node,) = self.calls(name)
        return node


def compiled(f: Callable[..., Any], *args: Any, recognisers: Sequence[str], dynamic: bool = False) -> tuple[Any, Run]:
    """``f(*args)`` compiled with the first size of the first argument dynamic or not, and what the passes did."""
    run = Run(recognisers)
    torch._dynamo.reset()
    if dynamic:
        torch._dynamo.mark_dynamic(args[0], 0)
    return torch.compile(f, backend=run, fullgraph=True, dynamic=None if dynamic else False)(*args), run


def near(got: Tensor, want: Tensor, rtol: float, strides: bool = True) -> None:
    """Equal within ``rtol`` of the largest value."""
    assert got.dtype == want.dtype and got.shape == want.shape
    assert not strides or got.stride() == want.stride()
    scale = float(want.double().abs().max()) or 1.0
    assert float((got.double() - want.double()).abs().max()) <= rtol * scale


def together(
    spellings: Mapping[str, Callable[..., Any]], *args: Any, recognisers: Sequence[str], dynamic: bool = False
) -> tuple[dict[str, Any], Run]:
    """All functions on the same arguments in one graph: results by name. One compile for many spellings."""

    def everything(*inputs: Any) -> list[Any]:
        return [f(*inputs) for f in spellings.values()]

    with torch.no_grad():
        results, run = compiled(everything, *args, recognisers=recognisers, dynamic=dynamic)
    return dict(zip(spellings, results, strict=True)), run
