"""The figures of the benchmark table: medians over the median floor, from times that were taken in turns."""

from __future__ import annotations

import statistics

import pytest
import torch

from ascend_deep.native.cpu.provider import CPU
from benchmarks import moe_kernel
from benchmarks.moe_kernel import Floor, Shape, in_turns


def test_the_floor_is_the_larger_of_reading_and_multiplying_by_medians() -> None:
    read, slow, fast = [4.0, 1.0, 3.0], [90.0, 50.0, 70.0], [30.0, 20.0, 60.0]
    square = 2 * 2048**3
    memory = Floor.of(500.0, square / 100, read, 100, [slow, fast])
    assert (memory.median, memory.best, memory.bound) == (15.0, 5.0, "memory")
    matmul = Floor.of(50.0, square / 2, read, 100, [slow, fast])
    assert (matmul.median, matmul.best, matmul.bound) == (15.0, 10.0, "matmul")


def test_calls_take_turns() -> None:
    orders: list[list[str]] = [[], []]
    for order in orders:
        times = in_turns({n: lambda n=n, o=order: o.append(n) for n in "abc"}, 5)  # type: ignore[misc]
        assert {n: len(t) for n, t in times.items()} == {"a": 5, "b": 5, "c": 5}
    turns = ["".join(orders[0][i : i + 3]) for i in range(0, 15, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns) and len(set(turns)) > 1
    assert orders[0] == orders[1], "a second run must have the same order"


@pytest.mark.skipif(CPU.unavailable() is not None, reason="needs the C++ kernels")
def test_ratios_are_of_medians_and_best_times_stand_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    shape = Shape(hidden=64, intermediate=24, experts=5, topk=2)
    floor, *rows = moe_kernel.measure(shape, "bfloat16", tokens=3, repeats=3, compiled=False)
    assert [r.name for r in rows] == ["ascend_deep", "eager loop", "batched_mm", "grouped_mm"]
    assert floor.best <= floor.median and floor.over_floor == 1.0
    for row in rows:
        assert len(row.times) == 3 and (row.median, row.best) == (statistics.median(row.times), min(row.times))
        assert row.over_floor == pytest.approx(row.median / floor.median)
        assert row.best_over_floor == pytest.approx(row.best / floor.best)
        assert 0 < row.error < 2 * torch.finfo(torch.bfloat16).eps
    moe_kernel.show([floor, *rows], shape)
    shown = capsys.readouterr().out
    loop = next(line for line in shown.splitlines() if "eager loop" in line)
    assert f"{rows[1].over_floor:.2f}" in loop and f"{rows[1].median / rows[0].median:.2f}x" in loop
