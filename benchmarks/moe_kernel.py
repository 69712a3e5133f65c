"""The C++ expert kernel against what a user would run otherwise, and against the floor of the machine.

Every contender computes the same layer with the same weights: the Hugging Face experts in eager mode (loop over
experts, ``batched_mm``, ``grouped_mm``), the last two under ``torch.compile`` with Inductor, our op, and the module
compiled with our backend. They are timed in turns, so that whatever else the machine does hits all of them alike.

The floor is the larger of two times, both measured in the same turns: the bytes of the weights of the active experts
at the rate at which torch sums a large tensor, and the multiplications at the rate of a large float32 matrix product.
For bfloat16 the bytes are half and the rate of multiplication is the better one of float32 and bfloat16.

Ratios are of medians, to the median floor of the same turns. Best times are printed beside them: the best time of a
contender over the best floor shows what is possible on a quiet machine, and the JSON form has every single time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ascend_deep import huge_pages, ops
from ascend_deep.native.cpu.provider import CPU, isa
from benchmarks._arguments import count

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# batched_mm copies the weights of every (token, expert) pair; beyond this it would only measure the page cache.
MAX_GATHER_BYTES = 2 << 30
_READ = 32 << 20  # numbers in the tensor that is read for the floor
_SQUARE = 2048


@dataclass
class Shape:
    hidden: int
    intermediate: int
    experts: int
    topk: int

    def weights_per_expert(self) -> int:
        return 3 * self.hidden * self.intermediate


@dataclass
class Row:
    """One contender at one size. Times in milliseconds.

    ``over_floor`` is the median over the median floor, ``best_over_floor`` the best time over the best floor.
    """

    dtype: str
    tokens: int
    name: str
    median: float
    best: float
    over_floor: float
    best_over_floor: float
    error: float
    times: list[float] = field(repr=False)


@dataclass(frozen=True)
class Floor:
    """Times in ms that no contender can beat: bytes at the measured reading rate, work at the measured matmul rate.

    Build it from the times of the probes, which are measured in turns with the contenders.
    """

    median: float
    best: float
    bound: str

    @staticmethod
    def of(
        nbytes: float, flops: float, read: Sequence[float], read_bytes: int, matmul: Sequence[Sequence[float]]
    ) -> Floor:
        """``nbytes`` and ``flops`` are what the layer needs.

        Args:
            read: times of reading ``read_bytes``.
            matmul: times of products of two ``_SQUARE`` matrices, one sequence a dtype; the fastest dtype counts.
        """

        def times(of: Callable[[Sequence[float]], float]) -> tuple[float, float]:
            reading = nbytes * of(read) / read_bytes
            return reading, flops * min(of(m) for m in matmul) / (2 * _SQUARE**3)

        reading, multiplying = times(statistics.median)
        bound = "memory" if reading > multiplying else "matmul"
        return Floor(max(reading, multiplying), max(times(min)), bound)

    def row(self, dtype: str, tokens: int) -> Row:
        return Row(dtype, tokens, f"floor ({self.bound})", self.median, self.best, 1.0, 1.0, 0.0, [])

    def compare(self, dtype: str, tokens: int, name: str, times: list[float], error: float) -> Row:
        median, best = statistics.median(times), min(times)
        return Row(dtype, tokens, name, median, best, median / self.median, best / self.best, error, times)


def hf_experts(shape: Shape, implementation: str, gate_up: Tensor, down: Tensor) -> torch.nn.Module:
    """The experts of Qwen3-MoE with the given weights and ``experts_implementation``."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.topk,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
    module.down_proj = torch.nn.Parameter(down, requires_grad=False)
    return module


def contenders(
    shape: Shape, dtype: torch.dtype, gate_up: Tensor, down: Tensor, compiled: bool
) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Name to function of (x, ids, weights)."""

    def ours(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return ops.moe_experts(x, ids, weights, gate_up, None, down, None, act="silu")

    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"ascend_deep": ours}
    if compiled:
        experts = hf_experts(shape, "grouped_mm", gate_up, down)
        found["ascend_deep, compiled"] = torch.compile(experts, backend="ascend_deep")
    for name, implementation in (("eager loop", "eager"), ("batched_mm", "batched_mm"), ("grouped_mm", "grouped_mm")):
        found[name] = hf_experts(shape, implementation, gate_up, down)
        if compiled and implementation != "eager":
            found[f"{name}, compiled"] = torch.compile(hf_experts(shape, implementation, gate_up, down))
    return found


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def in_turns(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Times of every call, one of each and then the next turn, in another order (always the same ones).

    Each call comes right after the read of another large tensor: contenders share their weights, and the one that
    follows another would find part of them in the caches. What the read leaves there depends on who came before, so
    that no contender always follows the same one.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    other = torch.randn(_READ)
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(calls), len(calls)):
            other.sum()
            times[name].append(timed(calls[name]))
    return times


def floor_probes(
    dtypes: Iterable[torch.dtype], huge: bool = False
) -> tuple[dict[str, Callable[[], object]], Callable[[Mapping[str, list[float]], float, float], Floor]]:
    """Calls to time in turns with the contenders, and the function that makes the floor from their times.

    The function takes the times by name, the bytes that the layer has to read and its floating-point operations. With
    ``huge`` the probes, too, read from pages of 2 MB.
    """
    big = torch.randn(_READ)
    squares = {d: torch.randn(_SQUARE, _SQUARE).to(d) for d in dtypes}
    if huge:
        huge_pages([big, *squares.values()])
    probes: dict[str, Callable[[], object]] = {"floor: read": big.sum}
    probes |= {f"floor: {d}": partial(torch.matmul, m, m.t()) for d, m in squares.items()}

    def make(times: Mapping[str, list[float]], nbytes: float, flops: float) -> Floor:
        return Floor.of(nbytes, flops, times["floor: read"], big.nbytes, [times[f"floor: {d}"] for d in squares])

    return probes, make


def measure(shape: Shape, name: str, tokens: int, repeats: int, compiled: bool, huge: bool = False) -> list[Row]:
    """Times every contender at one size, in turns with the two floors; ``huge``: weights in pages of 2 MB for all."""
    dtype = DTYPES[name]
    torch._dynamo.reset()  # else the second size is compiled for any size
    generator = torch.Generator().manual_seed(tokens)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    gate_up = (randn(shape.experts, 2 * shape.intermediate, shape.hidden) / shape.hidden**0.5).to(dtype)
    down = (randn(shape.experts, shape.hidden, shape.intermediate) / shape.intermediate**0.5).to(dtype)
    if huge:
        huge_pages([gate_up, down])
    x = randn(tokens, shape.hidden).to(dtype)
    weights, ids = randn(tokens, shape.experts).softmax(-1).topk(shape.topk)
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)

    probes, floor_of = floor_probes({torch.float32, dtype}, huge)
    calls = dict(probes)
    gathered = tokens * shape.topk * shape.weights_per_expert() * x.element_size()
    for contender, function in contenders(shape, dtype, gate_up, down, compiled).items():
        if contender.startswith("batched_mm") and gathered > MAX_GATHER_BYTES:
            continue
        calls[contender] = partial(function, x, ids, weights)

    with torch.no_grad():
        truth = ops.moe_experts(x.double(), ids, weights.double(), gate_up.double(), None, down.double(), None)
        errors = {n: _error(call(), truth) for n, call in calls.items() if n not in probes}
        times = in_turns(calls, repeats)
    active = int(ids.unique().numel())
    floor = floor_of(
        times,
        active * shape.weights_per_expert() * x.element_size(),
        2 * tokens * shape.topk * shape.weights_per_expert(),
    )
    return [
        floor.row(name, tokens),
        *(floor.compare(name, tokens, contender, times[contender], e) for contender, e in errors.items()),
    ]


def _error(got: object, truth: Tensor) -> float:
    assert isinstance(got, Tensor)
    return float((got.double() - truth).abs().max() / truth.abs().max())


def show(rows: list[Row], shape: Shape, what: str = "moe_experts") -> None:
    table = Table(
        title=f"{what}: hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.experts} experts, "
        f"top-{shape.topk}; {torch.get_num_threads()} threads, {isa()}",
        caption="ms; ratios are of medians, those in brackets of best times; error: the largest, against float64, "
        "relative to the largest output",
    )
    for column in (
        "dtype",
        "tokens",
        "contender",
        "median",
        "best",
        "x floor",
        "(best)",
        "ascend_deep is faster by",
        "error",
    ):
        table.add_column(column, justify="left" if column in ("dtype", "contender") else "right")
    group: tuple[str, int] | None = None
    for row in rows:
        ours = next(r for r in rows if (r.dtype, r.tokens, r.name) == (row.dtype, row.tokens, "ascend_deep"))
        new = (row.dtype, row.tokens) != group
        if new and group is not None:
            table.add_section()
        group = (row.dtype, row.tokens)
        other = not row.name.startswith("floor") and row is not ours
        table.add_row(
            row.dtype if new else "",
            str(row.tokens) if new else "",
            f"[bold]{row.name}[/bold]" if row is ours else row.name,
            f"{row.median:.3f}",
            f"{row.best:.3f}",
            f"{row.over_floor:.2f}",
            f"({row.best_over_floor:.2f})",
            f"{row.median / ours.median:.2f}x" if other else "",
            f"{row.error:.0e}" if row.error else "",
        )
    # A pipe has no width of its own; cutting numbers off would be worse than long lines.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=[*DTYPES, "both"], default="both", help="dtype of x and weights (both)")
    parser.add_argument("--tokens", type=count, nargs="+", default=[1, 16, 256, 1024], help="counts (1 16 256 1024)")
    parser.add_argument("--hidden", type=count, default=1024, help="hidden size (1024)")
    parser.add_argument("--intermediate", type=count, default=512, help="intermediate size of an expert (512)")
    parser.add_argument("--experts", type=count, default=32, help="number of experts (32)")
    parser.add_argument("--topk", type=count, default=4, help="experts per token (4)")
    parser.add_argument("--repeats", type=count, default=15, help="turns per size (15)")
    parser.add_argument("--quick", action="store_true", help="five turns, nothing compiled")
    parser.add_argument("--json", action="store_true", help="print JSON with all times instead of the table")
    args = parser.parse_args()
    missing = CPU.unavailable()
    if missing is not None:
        print(f"moe_kernel: {missing}", file=sys.stderr)
        return 1
    shape = Shape(args.hidden, args.intermediate, args.experts, args.topk)
    rows: list[Row] = []
    for dtype in DTYPES if args.dtype == "both" else [args.dtype]:
        for tokens in args.tokens:
            rows += measure(shape, dtype, tokens, 5 if args.quick else args.repeats, compiled=not args.quick)
    if args.json:
        run = {"shape": asdict(shape), "threads": torch.get_num_threads(), "isa": isa()}
        print(json.dumps({**run, "rows": [asdict(r) for r in rows]}))
    else:
        show(rows, shape)
    return 0


if __name__ == "__main__":
    sys.exit(main())
