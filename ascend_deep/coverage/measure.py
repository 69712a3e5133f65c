"""One cell, measured: compile the family's model, count what was fused, compare with eager, say what is missing.

Downstream is "eager": what is fused does not depend on who compiles the rest. Every rewrite has passed its probes as
always; on top of them the whole model is compared here, output and the gradients of all parameters.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import ascend_deep
from ascend_deep._explain import first_sentence
from ascend_deep.coverage import build
from ascend_deep.coverage.build import Built
from ascend_deep.coverage.cells import OWN, PREPARED, Cell, Result
from ascend_deep.coverage.families import Family, find
from ascend_deep.lowering import _dynamo_compat
from ascend_deep.report import Report, collecting

__all__ = ["FamilyBench"]

# Relative to the largest value. Outputs pass two layers in float32; gradients sum over tokens in another order.
OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 2e-4, 2e-3

_RECOGNISERS = {"moe_route": ("router",), "moe_experts": ("experts_grouped", "experts_batched", "experts_unrolled")}
_NOTHING = {
    "moe_route": "No choice of experts by score (topk, max, argmax or sort over the experts) is in a compiled graph.",
    "moe_experts": "No experts in a form that the recognisers know (grouped, batched or dense products) are in a "
    "compiled graph.",
}


class FamilyBench:
    """The cells of one family. Holds the reference model and what eager computes, so that each is computed once.

    Args:
        family: or its name.
        whole: compile the whole model. Otherwise the modules that hold its experts, in place, within the model; what is
            fused is the same, since recognisers look at blocks, and it takes a fifth of the time.
    """

    def __init__(self, family: Family | str, whole: bool = False) -> None:
        self.family = find(family) if isinstance(family, str) else family
        self.whole = whole

    @cache  # noqa: B019 - a bench lives as long as its family is measured
    def _built(self, implementation: str) -> Built:
        return build.build(self.family, implementation)

    @cache  # noqa: B019
    def _moe_layers(self) -> int:
        built = self._built("eager")
        return build.moe_layers(self.family, built.model, built.config)

    @cache  # noqa: B019
    def _eager(self, implementation: str, phase: str, sizes: str) -> list[tuple[str, Tensor]]:
        built = self._built(implementation)
        return observe(built.model, self._inputs(sizes), phase)

    @cache  # noqa: B019
    def _inputs(self, sizes: str) -> Mapping[str, Any]:
        return build.inputs(self.family, self._built("eager").config, sizes)

    def measure(self, cell: Cell) -> Result:
        """Compile and compare. Errors of the model, of Dynamo and of the backend become a result."""
        start = time.perf_counter()
        try:
            result = self._measure(cell)
        except Exception as error:
            result = Result.failed(cell, f"{type(error).__name__}: {first_sentence(str(error))}")
        finally:
            torch.compiler.reset()
        return Result(**{**vars(result), "seconds": round(time.perf_counter() - start, 2)})

    def _measure(self, cell: Cell) -> Result:
        implementation = "eager" if cell.implementation in (PREPARED, OWN) else cell.implementation
        model = build.build(self.family, implementation).model
        left: Mapping[str, str] = {}
        if cell.implementation == PREPARED:
            left = {item.module: item.reason for item in ascend_deep.prepare(model).left}
        mark = _dynamo_compat.break_mark()
        for part in [model] if self.whole else build.blocks_of(self.family, model):
            part.compile(backend="ascend_deep", options={"downstream": "eager"}, dynamic=cell.shapes == "dynamic")

        def difference(sizes: str) -> tuple[float, str]:
            found = observe(model, self._inputs(sizes), cell.phase)
            worst = compare(found, self._eager("eager", cell.phase, sizes))
            if worst[0] > 1 and implementation != "eager":
                # transformers' implementations may differ among each other: ours follows the one that was chosen.
                worst = min(worst, compare(found, self._eager(implementation, cell.phase, sizes)))
            return worst

        with collecting() as collector:
            error = difference("static")
            report = collector.report
            if cell.shapes == "dynamic":
                error = max(error, difference("other"))
        breaks = [first_sentence(reason) for reason, _ in _dynamo_compat.breaks_since(mark)]
        layers = self._moe_layers()
        # Dynamo compiles the code of equal blocks once, and pieces between graph breaks too: count what runs.
        shared = bool(breaks) or (layers > 1 and not self.whole)
        ops = _ran(lambda: model(**self._inputs("static")), cell.phase) if shared else report.counts()
        result = _judge(cell, layers, ops, report, breaks, left, *error)
        beyond = {op: text for op, text in self.family.beyond.items() if op in result.reasons}
        return Result(**{**vars(result), "reasons": {**result.reasons, **beyond}})


def _ran(call: Callable[[], Any], phase: str) -> dict[str, int]:
    """How often one call runs each of our ops."""
    with contextlib.nullcontext() if phase == "training" else torch.no_grad():
        call()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            call()
    prefix = "ascend_deep::"
    names = Counter(e.name.removeprefix(prefix) for e in profiler.events() if e.name.startswith(prefix))
    return dict(sorted(names.items()))


# -- comparing --------------------------------------------------------------------------------------------------------
def observe(model: nn.Module, inputs: Mapping[str, Any], phase: str) -> list[tuple[str, Tensor]]:
    """What a call computes: the output, and in training the gradient of every parameter of ``model``."""
    training = phase == "training"
    model.train(training)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    with contextlib.nullcontext() if training else torch.no_grad():
        output = first_tensor(model(**inputs))
    found = [("output", output.detach())]
    if training:
        generator = torch.Generator().manual_seed(3)
        (output.float() * torch.randn(output.shape, generator=generator)).mean().backward()
        found += [(n, torch.zeros_like(p) if p.grad is None else p.grad) for n, p in model.named_parameters()]
        model.zero_grad(set_to_none=True)
    return found


def first_tensor(value: Any) -> Tensor:
    """The first floating tensor of a model's output: its logits or last hidden state."""
    for tensor in _tensors(value):
        if tensor.is_floating_point():
            return tensor
    raise TypeError(f"the model returns a {type(value).__name__} without a floating tensor.")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def compare(found: Sequence[tuple[str, Tensor]], wanted: Sequence[tuple[str, Tensor]]) -> tuple[float, str]:
    """(largest difference over its tolerance, its name): above one is a disagreement."""
    worst, where = 0.0, ""
    expected = dict(wanted)
    # A gradient that cancels to nearly nothing is rounding; it is measured against the others.
    floor = 1e-4 * max([float(g.abs().max()) for n, g in wanted if n != "output" and g.numel()], default=1e-4)
    for name, got in found:
        want = expected[name]
        if got.shape != want.shape or not bool(got.isfinite().all()) or not bool(want.isfinite().all()):
            return float("inf"), name
        tolerance = OUTPUT_TOLERANCE if name == "output" else GRADIENT_TOLERANCE
        scale = max(float(want.abs().max()), 0.0 if name == "output" else floor, 1e-12) if want.numel() else 1.0
        error = float((got.float() - want.float()).abs().max()) / scale / tolerance if want.numel() else 0.0
        if error > worst:
            worst, where = error, name
    return worst, where


# -- judging ----------------------------------------------------------------------------------------------------------
def _judge(
    cell: Cell,
    layers: int,
    ops: Mapping[str, int],
    report: Report,
    breaks: Sequence[str],
    left: Mapping[str, str],
    error: float,
    where: str,
) -> Result:
    missing = [op for op in _RECOGNISERS if ops.get(op, 0) < layers]
    reasons = {op: _reason(op, report, breaks, left) for op in missing}
    if error > 1:
        place = "the output" if where == "output" else f"the gradient of {where}"
        reasons[""] = f"{place} differs from eager by {error:.3g} times the tolerance."
        status = "wrong"
    elif not missing:
        status = "fused"
    else:
        status = "partial" if any(ops.get(op) for op in _RECOGNISERS) else "left"
    return Result(cell, status, layers, ops, reasons, float(f"{error:.3g}"), len(breaks))


def _reason(op: str, report: Report, breaks: Sequence[str], left: Mapping[str, str]) -> str:
    """Why ``op`` is missing somewhere, as sentences."""
    said: list[str] = []
    if op == "moe_experts":
        said += [f"prepare left it: {reason}" for reason in dict.fromkeys(left.values())]
    said += dict.fromkeys(m.reason for m in report.misses if m.recogniser in (*_RECOGNISERS[op], "capture"))
    if not said and (op == "moe_route" or not breaks):
        said.append(_NOTHING[op])
    if breaks and op == "moe_experts":
        said.append(f"Dynamo ends the graph inside the block: {breaks[0]}")
    return " ".join(_sentence(s) for s in said[:3])


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
