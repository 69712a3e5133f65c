"""Runs that are stopped, cells that crash, hang or raise: each is the result of its cell, and the rest is measured."""

from __future__ import annotations

import json
import sys

import pytest

from ascend_deep.coverage.cells import Cell, Result, cells_of
from ascend_deep.coverage.families import find
from ascend_deep.coverage.run import State, groups, run

CELLS = list(cells_of(find("mixtral"), ("grouped_mm",)))

# A worker in which some cells go wrong, each in its own way.
FAULTY = """
import os, sys, time
from ascend_deep.coverage import measure, worker
from ascend_deep.coverage.cells import Result

real = measure.FamilyBench.measure

def faulty(self, cell):
    fault = FAULTS.get(cell.way)
    if fault == "crash":
        os.abort()
    if fault == "exit":
        print("out of luck", file=sys.stderr)
        sys.stderr.flush()
        os._exit(7)
    if fault == "hang":
        time.sleep(600)
    if fault == "quick":
        return Result(cell, "left", 1, reasons={"moe_route": "no."})
    return real(self, cell)

measure.FamilyBench.measure = faulty
worker.main()
"""


def _worker(**faults: str) -> tuple[str, ...]:
    ways = {c.way: faults[f"{c.phase}_{c.shapes}"] for c in CELLS if f"{c.phase}_{c.shapes}" in faults}
    return (sys.executable, "-c", f"FAULTS = {ways!r}\n{FAULTY}")


class Listener:
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.finished: list[str] = []

    def begin(self, job: int, cell: Cell) -> None:
        self.begun.append(cell.key)

    def finish(self, job: int, result: Result) -> None:
        self.finished.append(result.cell.key)


def test_a_crash_is_the_result_of_its_cell(tmp_path):
    listener = Listener()
    command = _worker(
        inference_static="crash", training_static="real", inference_dynamic="exit", training_dynamic="quick"
    )
    results = run(CELLS, state=State(tmp_path / "s.jsonl", "v"), listener=listener, command=command)
    found = {r.cell.phase + "_" + r.cell.shapes: r for r in results.values()}
    assert found["inference_static"].status == "failed"
    assert "the process ended by signal SIGABRT" in found["inference_static"].reasons[""]
    assert found["inference_dynamic"].reasons[""] == "the process ended with exit code 7, after 'out of luck'."
    assert found["training_dynamic"].status == "left"
    real = found["training_static"]  # measured by the process that came after the crash
    assert real.status == "fused" and real.ops == {"moe_experts": 1, "moe_route": 1} and real.error < 1
    assert sorted(listener.finished) == sorted(c.key for c in CELLS) and set(listener.begun) == set(listener.finished)


def test_a_hang_is_stopped_at_the_limit(tmp_path):
    command = _worker(inference_static="quick", training_static="hang")
    cells = [c for c in CELLS if c.shapes == "static"]
    results = run(cells, state=State(None, ""), listener=Listener(), command=command, limit=2.5)
    assert [r.status for r in results.values()] == ["left", "failed"]
    assert results[cells[1].key].reasons[""] == "it took longer than 2.5 s and was stopped."


def test_a_worker_that_never_starts_fails_its_cells():
    command = (sys.executable, "-c", "raise SystemExit('no such thing')")
    results = run(CELLS[:2], state=State(None, ""), listener=Listener(), command=command)
    assert {r.reasons[""] for r in results.values()} == {"the process ended with exit code 1, after 'no such thing'."}


# -- resuming ---------------------------------------------------------------------------------------------------------
def _result(cell: Cell, status: str = "fused") -> Result:
    return Result(cell, status, 1, {"moe_experts": 1, "moe_route": 1}, {}, 0.1, 0, 2.0)


def test_finished_cells_are_not_measured_again(tmp_path):
    state = State(tmp_path / "deep" / "s.jsonl", "torch=1")
    for cell in CELLS:
        state.add(_result(cell))
    listener = Listener()
    never = (sys.executable, "-c", "raise SystemExit('started')")
    results = run(CELLS, state=state, listener=listener, command=never)
    assert results == {c.key: _result(c) for c in CELLS} and not listener.begun


def test_results_of_other_versions_do_not_count(tmp_path):
    State(tmp_path / "s.jsonl", "torch=1").add(_result(CELLS[0]))
    assert not State(tmp_path / "s.jsonl", "torch=2").read()
    assert set(State(tmp_path / "s.jsonl", "").read()) == {CELLS[0].key}


@pytest.mark.parametrize("cut", [1, 20, 90])
def test_a_line_that_was_cut_off_costs_its_cell_only(tmp_path, cut):
    path = tmp_path / "s.jsonl"
    state = State(path, "v")
    state.add(_result(CELLS[0]))
    state.add(_result(CELLS[1]))
    path.write_bytes(path.read_bytes()[:-cut])
    # Without its last character, the line's end, the second line is still whole.
    whole = {CELLS[0].key, CELLS[1].key} if cut == 1 else {CELLS[0].key}
    assert set(state.read()) == whole
    state.add(_result(CELLS[2]))
    assert set(state.read()) == whole | {CELLS[2].key}


def test_the_newest_result_of_a_cell_counts_and_can_be_forgotten(tmp_path):
    state = State(tmp_path / "s.jsonl", "v")
    state.add(_result(CELLS[0], "left"))
    state.add(_result(CELLS[1]))
    state.add(_result(CELLS[0], "fused"))
    assert state.read()[CELLS[0].key].status == "fused"
    state.clear([CELLS[0].key])
    assert set(state.read()) == {CELLS[1].key}
    assert [json.loads(x)["stamp"] for x in (tmp_path / "s.jsonl").read_text().splitlines()] == ["v"]
    assert [p.name for p in tmp_path.iterdir()] == ["s.jsonl"]


def test_groups_keep_families_together_and_static_cells_first():
    cells = [*CELLS, *cells_of(find("dbrx"), ("grouped_mm",))]
    found = [(g[0].family, g[0].shapes, len(g)) for g in groups(cells)]
    assert found == [("mixtral", "static", 2), ("dbrx", "static", 2), ("mixtral", "dynamic", 2), ("dbrx", "dynamic", 2)]
