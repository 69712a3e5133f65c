"""Which graphs can be captured: a look at the host is found, with its node and line; harmless spellings pass."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from ascend_deep import ops
from ascend_deep.lowering.npugraph_check import NotCapturable, capture_sizes, host_syncs, pick, require_capturable
from ascend_deep.lowering.torchair import ON_HOST


def graph_of(function: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    """The Dynamo graph of ``function``, with data-dependent values and sizes captured."""
    kept: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        kept.append(gm)
        return gm.forward

    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(settings):
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    return kept[0]


def reads_a_value(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    n = counts.max().item()
    return x * n


def finds_positions(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return x[counts.nonzero().squeeze(1)]


def picks_by_mask(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return x[counts > 1].sum(0)


def where_of_one(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return x[torch.where(counts > 1)[0]].sum(0)


def repeats(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(counts, 0).sum(0)


def counts_experts(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch.bincount(counts).sum() + x


def writes_by_mask(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[counts > 1] = x.new_ones(2, 4)
    return y


def harmless(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    y = torch.where(counts.unsqueeze(1) > 1, x, 0.0) + x[counts.clamp(0, 2)]
    y[counts > 1] = 0.5
    return y.repeat_interleave(2, 0).to(torch.float64).cumsum(0)


X, COUNTS = torch.randn(5, 4), torch.tensor([2, 0, 1, 3, 1])


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (reads_a_value, "reads a value"),
        (finds_positions, "has a size that depends on values"),
        (picks_by_mask, "has a size that depends on values"),
        (where_of_one, "has a size that depends on values"),
        (repeats, "has a size that depends on values"),
        (writes_by_mask, "writes a number of values that depends on a mask"),
        (counts_experts, "has a size that depends on values"),
    ],
)
def test_a_look_at_the_host_is_named_with_its_line(function: Callable[..., Any], what: str) -> None:
    gm = graph_of(function, X, COUNTS)
    found = host_syncs(gm)
    assert found, gm.graph
    lines, first = inspect.getsourcelines(function)
    assert found[0].what == what
    path, _, line = found[0].source.rpartition(":")
    assert path == __file__ and first < int(line) < first + len(lines)
    assert found[0].node in {n.name for n in gm.graph.nodes}
    with pytest.raises(
        NotCapturable, match=rf"cannot be captured for npugraph_ex: {found[0].node} {what}, at .*:{line}"
    ):
        require_capturable(gm)


def test_harmless_spellings_pass() -> None:
    gm = graph_of(harmless, X, COUNTS)
    assert host_syncs(gm) == []
    require_capturable(gm)


@pytest.mark.parametrize(("largest", "waste"), [(1, 0.25), (7, 0.25), (512, 0.25), (1000, 0.1), (4096, 0.5)])
def test_captured_sizes_hold_every_batch_and_bound_the_padding(largest: int, waste: float) -> None:
    sizes = capture_sizes(largest, waste)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == largest
    for tokens in range(1, largest + 1):
        size = pick(sizes, tokens)
        assert size is not None and size >= tokens
        assert size - tokens <= max(8, waste * size), (tokens, size)
    assert pick(sizes, largest + 1) is None


def test_capture_sizes_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match=r"largest is 0, multiple 8 and waste 0.25"):
        capture_sizes(0)


# They look at values for rows that see no key, with one kind of mask; the rest of them is tensor code.
SOMETIMES = {"sparse_mqa_attention", "sparse_mqa_attention_backward"}


@pytest.mark.parametrize("name", sorted(set(ops.OPS) - SOMETIMES - ON_HOST))
def test_reference_bodies_that_read_the_host_are_known(name: str) -> None:
    """A body that looks at values cannot run on fake tensors; one that does not can be traced for any engine."""
    for sample in itertools.islice(ops.op(name).samples(), 3):
        with FakeTensorMode() as mode:
            args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in sample.args]
            try:
                ops.reference(name)(*args, **sample.kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                pytest.fail(f"the reference body of {name} looks at values ({error}); ON_HOST has to name it.")
