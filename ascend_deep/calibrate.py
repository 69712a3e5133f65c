"""Measuring what rewrites gain on the device that is there. What ``ascend-deep calibrate`` runs.

Every block of ``calibrate_cases`` is compiled twice by the same compiler, as it is written and by ``ascend_deep`` with
its recogniser alone. Both take turns, medians are compared, and results have to agree. The answer of the policy table
stands unless the figures contradict it: a rewrite that is on by default goes off if it is slower on the whole, one that
is off goes on if it is faster on the whole and nowhere slower.

Only forward passes without gradients are timed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_deep import explain, lowering
from ascend_deep.calibrate_cases import CASES, Case
from ascend_deep.calibration import Calibration, Machine, Measured, here
from ascend_deep.passes import policy

__all__ = ["Failed", "decide", "run", "time_pair"]

GAIN, NOISE = 1.05, 0.95
"""Faster or slower than this on the whole contradicts the table; slower than the second at one size is a loss."""
_SAMPLE = 2e-3  # seconds of one sample: calls are repeated until they take as long, or one clock tick would count


@dataclass(frozen=True)
class Failed:
    """A block that gave no figure, and the sentence that says why."""

    recogniser: str
    sizes: str
    reason: str


def run(
    *,
    device: str,
    only: Sequence[str] = (),
    downstream: str = "auto",
    rounds: int = 15,
    small: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Calibration, list[Failed]]:
    """Measure on ``device``.

    Args:
        device: torch device type; it has to be there.
        only: recognisers; empty: all.
        downstream: who compiles both sides, ``"auto"``: Inductor, on NPUs torchair.
        rounds: samples of each side; the median counts.
        small: one small size of each block, to see that it works. Its figures mean nothing.
        progress: told what is going on, in a few words.
    """
    downstream = lowering.choose(downstream, [torch.empty(0, device=device)])
    machine = Machine(device, here(device), torch.get_num_threads(), torch.__version__, downstream)
    cases = [c for c in CASES if (not only or c.recogniser in only) and (not c.devices or device in c.devices)]
    measured: list[Measured] = []
    failed: list[Failed] = []
    for case in cases:
        for sizes in (case.small(),) if small else case.sizes:
            at = ", ".join(f"{k} = {v}" for k, v in sizes.items())
            progress(f"{case.recogniser}, {at}")
            found = _measure(case, sizes, device, downstream, rounds)
            if isinstance(found, str):
                failed.append(Failed(case.recogniser, at, found))
            else:
                measured.append(found)
    decisions = {}
    for name in dict.fromkeys(m.recogniser for m in measured):
        decisions[name] = decide(policy.profits(name, device), [m for m in measured if m.recogniser == name], machine)
    return Calibration(machine, decisions, tuple(measured)), failed


def _measure(case: Case, sizes: Mapping[str, int], device: str, downstream: str, rounds: int) -> Measured | str:
    """The figures, or why there are none."""
    state = torch.random.get_rng_state()
    torch.manual_seed(20260)
    try:
        args = [a.to(device) if isinstance(a, Tensor) else a for a in case.inputs(sizes)]
    finally:
        torch.random.set_rng_state(state)
    options: dict[str, Any] = {"enable": [case.recogniser], "downstream": downstream}
    try:
        with torch.no_grad():
            torch._dynamo.reset()
            plain = _compiled(case.written, downstream)
            want = plain(*args)
            torch._dynamo.reset()
            report = explain(case.written, *args, options={**options, "downstream": "eager"})
            match = next((m for m in report.matches if m.op == case.op), None)
            if match is None:
                why = [m.reason for m in report.misses] or list(report.notes) or ["nothing like it was found"]
                return f"{case.recogniser} left the block as it is: {why[0]}"
            ours = torch.compile(case.written, backend="ascend_deep", options=options, dynamic=False)
            difference = _difference(ours(*args), want)
            if difference > 0.02:
                return (
                    f"results differ by {difference:.2g} of the largest value; nothing is decided from such a figure."
                )
            times = time_pair(lambda: plain(*args), lambda: ours(*args), device, rounds)
    except Exception as error:  # of any compiler or kernel: the other blocks are measured all the same
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return f"{type(error).__name__}: {lines[0]}"
    finally:
        torch._dynamo.reset()
    dtype = str(case.dtype).removeprefix("torch.")
    return Measured(case.recogniser, case.op, match.provider, dtype, dict(sizes), *times)


def _compiled(function: Callable[..., Any], downstream: str) -> Callable[..., Any]:
    """As the backend hands a graph over in which nothing was rewritten."""
    if downstream == "npu":
        from ascend_deep.lowering import torchair

        return torch.compile(function, backend=torchair.backend(), dynamic=False)
    return torch.compile(function, backend=downstream, dynamic=False)


def _difference(got: Any, want: Any) -> float:
    """Largest difference of floating results, relative to the largest value; ids may differ among equal scores."""
    pairs = zip(*(torch.utils._pytree.tree_leaves(x) for x in (got, want)), strict=True)
    found = [0.0]
    for a, b in pairs:
        if isinstance(a, Tensor) and a.is_floating_point():
            scale = float(b.abs().max())
            found.append(float((a.double() - b.double()).abs().max()) / scale if scale else 0.0)
    return max(found)


def time_pair(first: Callable[[], Any], second: Callable[[], Any], device: str, rounds: int) -> tuple[float, float]:
    """Median seconds of one call of each; they take turns, so that a machine that slows down meets both."""

    def sample(call: Callable[[], Any], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        if device != "cpu":
            getattr(torch, device).synchronize()
        return (time.perf_counter() - start) / repeats

    calls = (first, second)
    for call in calls:
        sample(call, 2)
    repeats = [max(1, min(1000, round(_SAMPLE / max(sample(call, 1), 1e-7)))) for call in calls]
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, count, into in zip(calls, repeats, seconds, strict=True):
            into.append(sample(call, count))
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def decide(before: bool, measured: Sequence[Measured], machine: Machine) -> policy.Row:
    """Whether a recogniser runs on the machine that was measured.

    Args:
        before: the answer of the policy table, which stands where the figures do not contradict it.
        measured: of this recogniser, at least one.
    """
    ratios = sorted(m.ratio for m in measured)
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    profits = mean > NOISE if before else mean >= GAIN and ratios[0] > NOISE
    spread = f"{ratios[0]:.2f} times" if len(ratios) == 1 else f"{ratios[0]:.2f} to {ratios[-1]:.2f} times"
    sizes = "at one size" if len(ratios) == 1 else f"at {len(ratios)} sizes"
    why = f"measured on {machine.name}, it runs {spread} as fast as {machine.downstream} runs what is written, {sizes}"
    return policy.Row(profits, why)
