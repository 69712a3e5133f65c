"""Compare a model in eager mode, compiled by Inductor, and compiled by ascend_deep. What ``ascend-deep bench`` runs.

Repetitions are interleaved (one of each, then the next round), so that a change of the machine's speed meets all
contenders alike; the figure is the median. Ratios of one run are worth comparing, absolute times are not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep.models import Loaded

__all__ = ["CONTENDERS", "Timing", "run"]

CONTENDERS = ("eager", "inductor", "ascend_deep")


@dataclass(frozen=True)
class Timing:
    """One contender: seconds of the first call (compile included), median seconds of a warm call, and its ratios.

    ``speedup`` is the eager median divided by this one. ``error`` is the largest difference of the first floating
    output from eager, relative to the largest value there.
    """

    name: str
    first: float
    median: float
    fastest: float
    speedup: float
    error: float


def run(
    loaded: Loaded,
    *,
    contenders: tuple[str, ...] = CONTENDERS,
    rounds: int = 20,
    training: bool = False,
    options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Timing]:
    """Time ``loaded`` under every contender.

    Args:
        contenders: any of ``CONTENDERS``; eager always runs, it is what the others are compared with.
        rounds: warm repetitions of each.
        training: time forward and backward instead of a forward without gradients.
        options: for ascend_deep.
        progress: told what is going on, in a few words.
    """
    names = ("eager", *(n for n in contenders if n != "eager"))
    makers: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
        "eager": lambda m: m,
        "inductor": lambda m: torch.compile(m),
        "ascend_deep": lambda m: torch.compile(m, backend="ascend_deep", options=options or {}),
    }
    calls: dict[str, Callable[[], Tensor]] = {}
    first: dict[str, float] = {}
    outputs: dict[str, Tensor] = {}
    with _quiet_gradients(loaded.model):
        for name in names:
            progress(f"{name}: first call")
            call = _call(makers[name](loaded.model), loaded, training)
            start = time.perf_counter()
            outputs[name] = call().detach().clone()
            first[name] = time.perf_counter() - start
            calls[name] = call
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for name in names:
            calls[name]()
        for i in range(rounds):
            progress(f"round {i + 1} of {rounds}")
            for name in names:
                start = time.perf_counter()
                calls[name]()
                seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["eager"])
    return [
        Timing(
            name,
            first[name],
            statistics.median(seconds[name]),
            min(seconds[name]),
            base / statistics.median(seconds[name]),
            _error(outputs[name], outputs["eager"]),
        )
        for name in names
    ]


def _call(model: Callable[..., Any], loaded: Loaded, training: bool) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with nullcontext() if training else torch.no_grad():
            out = _first_tensor(model(*loaded.args, **loaded.kwargs))
        if training:
            loaded.model.zero_grad()
            out.float().square().mean().backward()
        if out.device.type != "cpu":
            getattr(torch, out.device.type).synchronize()
        return out

    return call


def _first_tensor(value: Any) -> Tensor:
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError("the model returns no floating-point tensor to compare.")


def _error(got: Tensor, wanted: Tensor) -> float:
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    return float((got.double() - wanted.double()).abs().max()) / scale if scale else 0.0


@contextmanager
def _quiet_gradients(model: nn.Module) -> Iterator[None]:
    """Give parameters back the gradients they had."""
    before = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad
