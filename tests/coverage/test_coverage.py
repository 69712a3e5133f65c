"""A representative part of the table, measured and compared with the stored baseline; and the command itself."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ascend_deep.cli import app
from ascend_deep.coverage import build, measure
from ascend_deep.coverage.cells import IMPLEMENTATIONS, PHASES, SHAPES, Cell, cells_of
from ascend_deep.coverage.check import compare
from ascend_deep.coverage.families import FAMILIES
from ascend_deep.coverage.measure import FamilyBench
from ascend_deep.coverage.table import Baseline, missing, to_markdown

DOCS = Path(__file__).resolve().parents[2] / "docs"
BASELINE = Baseline.from_json((DOCS / "coverage.json").read_text(encoding="utf-8"))
# The third of the families that stands for all routers and experts, one cell each. The twelve ways go round, so each is
# there at least twice. All cells of these families are `make coverage-third`, those of all families `make coverage`.
THIRD = [f for f in FAMILIES if f.third]
WAYS = list(itertools.product(IMPLEMENTATIONS, PHASES, SHAPES))
SAMPLED = [next(cells_of(f, *([w] for w in WAYS[i % len(WAYS)]))) for i, f in enumerate(THIRD)]


def test_the_sample_is_a_third_in_every_way():
    assert len(SAMPLED) >= len(FAMILIES) / 3
    counted = Counter(w for c in SAMPLED for w in (c.implementation, c.phase, c.shapes))
    assert all(counted[w] >= 5 for w in (*IMPLEMENTATIONS, *PHASES, *SHAPES)), counted


@pytest.mark.parametrize("cell", SAMPLED, ids=lambda c: c.key)
def test_no_fusion_disappeared(cell):
    found = compare(BASELINE, [FamilyBench(cell.family).measure(cell)])
    assert found.ok, "\n".join(found.lost)
    assert not found.unknown


def test_the_stored_table_is_whole():
    everything = [c for f in FAMILIES for c in cells_of(f)]
    assert not missing(BASELINE, everything)
    assert len(BASELINE.cells) == len(everything)
    bad = [r.cell.key for r in BASELINE.cells.values() if r.status not in ("fused", "partial", "left")]
    assert not bad
    without = [r.cell.key for r in BASELINE.cells.values() if r.status != "fused" and not r.reasons]
    assert not without


def test_the_page_is_made_from_the_baseline():
    assert (DOCS / "coverage.md").read_text(encoding="utf-8") == to_markdown(BASELINE)


def test_a_result_that_differs_from_eager_is_wrong():
    """The comparison sees one column of the experts that changes by a tenth between eager and compiled."""
    bench = FamilyBench("mixtral")
    cell = Cell("mixtral", "grouped_mm", "inference", "static")
    with torch.no_grad():
        for implementation in ("eager", "grouped_mm"):
            model = bench._built(implementation).model
            (experts,) = build.experts_of(bench.family, model)
            experts.down_proj[:, :, 0] *= 1.1
    result = bench.measure(cell)
    assert result.status == "wrong" and "the output differs from eager by" in result.reasons[""]


def test_an_error_of_the_model_is_a_result():
    bench = FamilyBench("mixtral")
    bench.family = replace(bench.family, inputs="embeddings", fields={"hidden_size": -3})
    result = bench.measure(Cell("mixtral", "grouped_mm", "training", "static"))
    assert result.status == "failed" and result.reasons[""]


def test_gradients_are_compared_with_their_own_size():
    one, two = torch.randn(3, 4), torch.randn(5)
    wanted = [("output", one), ("weight", two)]
    assert measure.compare([("output", one), ("weight", two)], wanted)[0] == 0
    worst, where = measure.compare([("output", one), ("weight", two * 1.01)], wanted)
    assert where == "weight" and worst == pytest.approx(5, rel=0.01)
    assert measure.compare([("output", one * float("nan")), ("weight", two)], wanted)[0] == float("inf")


# -- the command ------------------------------------------------------------------------------------------------------
ONE = [
    "coverage",
    "--family",
    "mixtral",
    "--implementation",
    "grouped_mm",
    "--phase",
    "inference",
    "--shapes",
    "static",
]


def test_the_command_writes_updates_and_checks(tmp_path):
    invoke = CliRunner().invoke
    state = ["--state", str(tmp_path / "state.jsonl"), "--stale"]
    done = invoke(app, [*ONE, *state, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "| mixtral | 1 | ✓       | – | – |" in (tmp_path / "coverage.md").read_text()
    file = tmp_path / "coverage.json"
    baseline = Baseline.from_json(file.read_text())
    assert invoke(app, [*ONE, *state, "--check", str(file)]).exit_code == 0
    more = {k: replace(r, ops={**r.ops, "moe_route": 2}) for k, r in baseline.cells.items()}
    file.write_text(replace(baseline, cells=more).to_json())
    failed = invoke(app, [*ONE, *state, "--check", str(file)])
    assert failed.exit_code == 1
    assert "mixtral, grouped_mm, inference, static: moe_route was fused 2 times and is fused 1 times" in failed.output
    assert "1 fusion lost" in failed.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--family", "mixtrl"], "transformers has no experts of that name"),
        (["--phase", "sleeping"], "--phase is 'sleeping'; it takes inference, training."),
        (["--check", "nowhere.json"], "--check is 'nowhere.json', which cannot be read: there is no such file."),
        (["--check", "/"], "--check is '/', which cannot be read: it is a folder."),
        (["--state", "/"], "--state is '/', which is a folder; it takes the name of a file."),
        (["--state", "/dev/null/x"], "the folder of --state is '/dev/null', which is to be a folder, but"),
        (["--state", "s.jsonl", "--output", "/dev/null/x"], "--output is '/dev/null/x', which is to be a folder, but"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["coverage", *arguments])
    assert done.exit_code == 2 and sentence in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xdc\x00", "is not a text file."), (b"{}", "is not a coverage baseline of version 1: it has no 'schema'.")],
)
def test_a_file_of_another_kind_is_told_before_the_run(content, words, tmp_path):
    (tmp_path / "coverage.json").write_bytes(content)
    for arguments in (["--check", str(tmp_path / "coverage.json")], ["--output", str(tmp_path)]):
        done = CliRunner().invoke(app, ["coverage", "--state", str(tmp_path / "s.jsonl"), *arguments])
        assert done.exit_code == 2 and words in done.output.replace("\n", " "), done.output
    assert (tmp_path / "coverage.json").read_bytes() == content
