"""The page, the baseline file, and the comparison with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ascend_deep.coverage.cells import Cell, Result, cells_of
from ascend_deep.coverage.check import compare
from ascend_deep.coverage.families import find
from ascend_deep.coverage.table import Baseline, sign, to_markdown

VERSIONS = {"torch": "2.13.0", "transformers": "5.24.0"}
WHOLE = {"moe_experts": 2, "moe_route": 2}


def _results(family: str, **options) -> list[Result]:
    return [Result(c, "fused", 2, WHOLE, **options) for c in cells_of(find(family))]


def _rows(page: str) -> dict[str, list[str]]:
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")]
    return {r[0]: r[1:] for r in rows if len(r) == 7}


@pytest.mark.parametrize(
    ("status", "ops", "expected"),
    [
        ("fused", {"moe_route": 2, "moe_experts": 2}, "✓"),
        ("fused", {"moe_route": 3, "moe_experts": 2, "swiglu": 1}, "✓"),
        ("partial", {"moe_route": 2}, "R"),
        ("partial", {"moe_experts": 2}, "E"),
        ("partial", {"moe_route": 2, "moe_experts": 1}, "◐"),
        ("partial", {"moe_route": 1}, "◐"),
        ("left", {"swiglu": 2}, "·"),
        ("wrong", WHOLE, "✗"),
        ("failed", {}, "!"),
    ],
)
def test_signs(status, ops, expected):
    assert sign(Result(Cell("mixtral", "grouped_mm", "inference", "static"), status, 2, ops)) == expected


def test_a_family_is_one_row_and_reasons_are_numbered_once():
    reason = {"moe_route": "The choice is by hash."}
    results = _results("mixtral")
    hashed = [replace(r, cell=replace(r.cell, family="olmoe"), status="partial", ops={"moe_experts": 2}, reasons=reason)
              for r in results]  # fmt: skip
    hashed[1] = replace(hashed[1], status="fused", ops=WHOLE, reasons={})
    page = to_markdown(Baseline.of(VERSIONS, [*hashed, *results]))
    rows = _rows(page)
    assert rows["mixtral"] == ["2", "✓", "✓", "✓", "", ""]
    assert rows["olmoe"] == ["2", "E ✓ E E", "E", "E", "", "1"]
    assert page.count("The choice is by hash.") == 1 and "1. `moe_route`: The choice is by hash." in page
    assert list(rows).index("mixtral") < list(rows).index("olmoe")
    assert "1 of 2 families" in page and "13 of 24 cells are fused whole, 11 in part" in page
    assert "torch\n2.13.0 and transformers 5.24.0" in page


def test_own_experts_have_one_implementation_and_failures_show_their_cell():
    cells = list(cells_of(find("dbrx")))
    results = [Result(c, "left", 2, {"swiglu": 4}, {"moe_experts": "A loop."}) for c in cells]
    results[0] = Result.failed(cells[0], "the process ended by signal SIGSEGV.")
    page = to_markdown(Baseline.of(VERSIONS, results))
    assert _rows(page)["dbrx"][:5] == ["2", "! · · ·", "–", "·", "swiglu"]
    assert "the process ended by signal SIGSEGV. (own, inference, static)" in page
    assert "1. `moe_experts`: A loop." in page or "2. `moe_experts`: A loop." in page
    assert page.count("A loop.") == 1 and "Nothing is fused in dbrx." in page


# -- the baseline file ------------------------------------------------------------------------------------------------
def test_the_baseline_survives_json_one_cell_a_line():
    results = _results("mixtral", error=0.2, seconds=3.0)
    results[0] = replace(results[0], status="partial", ops={"moe_route": 2}, reasons={"moe_experts": "No."}, breaks=4)
    baseline = Baseline.of(VERSIONS, results)
    text = baseline.to_json()
    assert Baseline.from_json(text) == baseline
    assert all(text.count(f'"{r.cell.key}"') == 1 for r in results)
    assert '"seconds"' not in text and '"error"' not in text
    assert Baseline.of(VERSIONS, reversed(results)).to_json() == text


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99}', '{"schema": 1, "versions": {}, "cells": {"a": 1}}'])
def test_another_file_is_refused(text):
    with pytest.raises(ValueError, match="not a coverage baseline of version 1"):
        Baseline.from_json(text)


def test_new_cells_replace_old_ones_of_the_same_versions():
    old = Baseline.of(VERSIONS, _results("mixtral"))
    newer = Baseline.of(VERSIONS, [replace(_results("mixtral")[0], status="left", ops={})])
    both = old.updated(newer)
    assert len(both.cells) == 12 and both.cells[newer_key(newer)].status == "left"
    other = Baseline.of({**VERSIONS, "torch": "2.14.0"}, newer.cells.values())
    assert set(old.updated(other).cells) == set(newer.cells)


def newer_key(baseline: Baseline) -> str:
    return next(iter(baseline.cells))


# -- the check --------------------------------------------------------------------------------------------------------
def test_equal_results_pass():
    results = _results("mixtral")
    assert compare(Baseline.of(VERSIONS, results), results).ok


def test_a_fusion_that_disappeared_is_named_with_the_reason():
    results = _results("mixtral")
    lost = [replace(r, status="partial", ops={"moe_experts": 2}, reasons={"moe_route": "Softmax is over tokens."})
            if r.cell.way == "batched_mm/training/dynamic" else r for r in results]  # fmt: skip
    found = compare(Baseline.of(VERSIONS, results), lost)
    assert found.lost == (
        "mixtral, batched_mm, training, dynamic: moe_route was fused 2 times and is fused 0 times: "
        "Softmax is over tokens.",
    )


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_a_cell_that_went_bad_is_lost_even_if_the_baseline_had_nothing(status):
    cell = Cell("mixtral", "grouped_mm", "inference", "static")
    bad = Result(cell, status, 2, WHOLE, {"": "It differs."})
    left = Baseline.of(VERSIONS, [Result(cell, "left", 2)])
    assert compare(left, [bad]).lost == (f"mixtral, grouped_mm, inference, static: {status}: It differs.",)
    assert compare(Baseline(VERSIONS, {}), [bad]).lost


def test_more_fusions_and_unknown_cells_pass_and_are_told():
    few = [replace(r, ops={"moe_route": 2}, status="partial") for r in _results("mixtral")]
    found = compare(Baseline.of(VERSIONS, few[1:]), _results("mixtral"))
    assert found.ok and len(found.gained) == 11 and len(found.unknown) == 1
    assert "moe_experts was fused 0 times and is fused 2 times" in found.gained[0]
