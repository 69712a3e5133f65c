"""Report: JSON round trip, counts, merging of graphs, grouping, the text form."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ascend_deep import report as reports
from ascend_deep.passes._types import Match, Miss, Outcome
from ascend_deep.report import GraphInfo, Report, collecting, last_report, publish, record
from ascend_deep.report_layout import match_rows, miss_rows, short_paths, tree


def test_json_round_trip_is_exact(report: Report) -> None:
    again = Report.from_json(report.to_json())
    assert again == report
    assert again.certificates[0].attrs["dtype"] is torch.bfloat16
    assert again.certificates[0].attrs["pair"] == (2, 2.5)
    assert isinstance(again.matches, tuple) and isinstance(again.matches[1].notes, tuple)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_json_is_standard_even_with_infinite_errors(report: Report, value: float) -> None:
    odd = replace(report, matches=(replace(report.matches[0], max_error=value),))
    text = odd.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = Report.from_json(text).matches[0].max_error
    assert again == value or (math.isnan(again) and math.isnan(value))


def test_json_of_another_version_is_refused(report: Report) -> None:
    data = report.to_dict() | {"schema": 99}
    with pytest.raises(ValueError, match=r"version 1.*99"):
        Report.from_dict(data)


def test_a_value_that_json_cannot_hold_is_named(report: Report) -> None:
    bad = replace(report, certificates=(replace(report.certificates[0], attrs={"x": object()}),))
    with pytest.raises(TypeError, match="object"):
        bad.to_json()


def test_counts_and_facts(report: Report) -> None:
    assert report.counts() == {"moe_experts": 3, "moe_route": 3}
    assert report.target == "ascend950" and report.training
    assert report.certificate("aa11bb22cc33dd44") is report.certificates[0]
    assert report.certificate("nothing") is None
    assert any("ascend950" in n and "not executed" in n for n in report.notes)
    assert report.versions["torch"] == torch.__version__


def test_graphs_add_up(report: Report, outcome: Outcome) -> None:
    twice = report.with_graph(outcome, GraphInfo(nodes=10, notes=("second graph.",)))
    assert twice.counts() == {"moe_experts": 6, "moe_route": 6}
    assert twice.timings["capture"] == pytest.approx(0.62)
    assert twice.unclaimed["model.layers.1.attention"] == 48
    assert len(twice.certificates) == 1 and len(twice.graphs) == 2
    assert twice.notes[-1] == "second graph."


def test_untouched_reason_reaches_the_reader() -> None:
    made = Report().with_graph(Outcome(untouched="the graph has no candidate."), GraphInfo())
    assert made.graphs[0].untouched == "the graph has no candidate."
    assert "the graph has no candidate." in str(made)


# -- recording --------------------------------------------------------------------------------------------------------
def test_collecting_gathers_only_its_own_graphs(make_outcome: Callable[..., Outcome]) -> None:
    record(make_outcome(), GraphInfo())
    with collecting("Model", {"mlp": "Mlp"}) as collector:
        assert reports.is_collecting()
        record(make_outcome(module="a"), GraphInfo())
        record(make_outcome(module="b"), GraphInfo())
    assert not reports.is_collecting()
    assert [m.module for m in collector.report.matches] == ["a", "b"]
    assert collector.report.model == "Model"
    assert last_report() == collector.report


def test_records_without_a_compile_are_reports_of_their_own(make_outcome: Callable[..., Outcome]) -> None:
    record(make_outcome(module="a"), GraphInfo())
    second = record(make_outcome(module="b"), GraphInfo())
    assert [m.module for m in second.matches] == ["b"]
    assert last_report() is second


def test_publish_makes_a_stored_report_the_newest(report: Report) -> None:
    publish(report)
    assert last_report() is report


def test_recording_from_threads_loses_nothing(make_outcome: Callable[..., Outcome]) -> None:
    found: dict[int, int] = {}

    def work(i: int) -> None:
        with collecting(f"m{i}") as collector:
            for k in range(20):
                record(make_outcome(module=f"{i}.{k}"), GraphInfo())
        found[i] = len([m for m in collector.report.matches if m.module.startswith(f"{i}.")])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == dict.fromkeys(range(6), 20)


def _recording_backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    n = sum(node.op == "call_function" for node in gm.graph.nodes)
    record(Outcome(), GraphInfo(nodes=n))
    return gm.forward


def test_graphs_of_one_compile_share_a_report_and_a_recompile_starts_a_new_one() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        torch._dynamo.graph_break()
        return y.cos() * 2

    compiled = torch.compile(f, backend=_recording_backend, dynamic=False)
    compiled(torch.randn(5))
    first = last_report()
    assert first is not None and len(first.graphs) == 2
    assert len({g.compile_id for g in first.graphs}) == 2
    compiled(torch.randn(6))
    second = last_report()
    assert second is not None and len(second.graphs) == 2 and second is not first
    other = torch.compile(lambda x: x.tan() - 3, backend=_recording_backend)
    other(torch.randn(4))
    third = last_report()
    assert third is not None and len(third.graphs) == 1


# -- forms ------------------------------------------------------------------------------------------------------------
def test_text_tells_everything(report: Report) -> None:
    text = str(report)
    for part in (
        "6 places fused", "3 places left as written", "2 graph breaks", "target ascend950", "training",
        "300 → 117 ops", "model.layers.{0-2}.mlp.experts", "native.cpu", "9.0e-07", "gate & up are <added>",
        "Hint: Write act(gate) * up.", "loop.py:79", "Hint: Call prepare.", "3.4 s", "72 ops", "aa11bb22cc33dd44",
        "native.cpu: float16 weights are not supported.", "not executed on that hardware",
    ):  # fmt: skip
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 110
    assert "\x1b" not in text


def test_equal_sites_become_one_row(report: Report) -> None:
    rows = {r.op: r for r in match_rows(report.matches)}
    assert rows["moe_experts"].count == 3 and rows["moe_experts"].max_error == pytest.approx(9e-7)
    assert rows["moe_experts"].certificates == ("key0", "key1", "key2")
    other = replace(report.matches[0], provider="reference")
    assert len(match_rows([*report.matches, other])) == 3
    (miss,) = miss_rows(report.misses)
    assert miss.count == 3 and miss.modules == "model.layers.{0-2}.mlp.shared"


def _reads(
    names: list[str], text: str = "the block also reads {}, which is not one of its known inputs."
) -> list[Miss]:
    return [Miss("swiglu", f"ffns.{i}", "", text.format(name)) for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("misses", "rows"),
    [
        # the copies of a loop that was unrolled
        (_reads([f"ffns.{i}.scale" for i in range(6)]), ["the block also reads ffns.{0-5}.scale, which is not one of"]),
        (_reads([f"linear_{i}" for i in (3, 7, 9)]), ["the block also reads linear_3 and 2 more, which"]),
        (_reads(["ffns.0.scale", "ffns.0.scale"]), ["the block also reads ffns.0.scale, which"]),
        # numbers that say something are no names
        (_reads(["1.5", "2.5"], "it scales by {}."), ["it scales by 1.5.", "it scales by 2.5."]),
        (_reads(["4", "5"], "it has {} dimensions."), ["it has 4 dimensions.", "it has 5 dimensions."]),
        (_reads(["ffns.0.scale", "ffns.0.shift"]), ["reads ffns.0.scale", "reads ffns.0.shift"]),
    ],
)
def test_reasons_that_differ_in_the_numbers_of_names_are_one(misses: list[Miss], rows: list[str]) -> None:
    found = miss_rows(misses)
    assert [r.count for r in found] == ([len(misses)] if len(rows) == 1 else [1] * len(misses))
    assert all(text in row.reason for text, row in zip(rows, found, strict=True)), found


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (["a.0.b", "a.1.b", "a.2.b", "a.5.b"], "a.{0-2,5}.b"),
        (["a.0.b"], "a.0.b"),
        (["x.fc1", "x.fc2"], "x.fc1, x.fc2"),
        (["a.0.e.0", "a.1.e.1", "a.1.e.0"], "a.0.e.0 and 2 more"),
        (["layers.0", "layers.0"], "layers.0"),
        (["0.gate", "1.gate"], "{0-1}.gate"),
        ([""], ""),
    ],
)
def test_short_paths(paths: list[str], shown: str) -> None:
    assert short_paths(paths) == shown


def test_tree_folds_equal_layers_and_keeps_different_ones(report: Report) -> None:
    layers = next(c for c in tree(report).children[0].children if c.name == "layers")
    assert [(c.name, c.repeats) for c in layers.children] == [("0–2", 3)]
    inside = {c.name: c for c in layers.children[0].children[1].children}
    assert {n: c.status for n, c in inside.items()} == {"gate": "fused", "experts": "fused", "shared": "missed"}
    assert inside["experts"].children[0].status == "fused"
    without = replace(report, matches=tuple(m for m in report.matches if "layers.1" not in m.module))
    layers = next(c for c in tree(without).children[0].children if c.name == "layers")
    assert [c.name for c in layers.children] == ["0", "1", "2"]


def test_a_refused_block_shows_even_if_a_part_of_it_was_fused(report: Report) -> None:
    part = replace(report.matches[0], module="model.layers.1.mlp.shared", op="swiglu")
    layers = tree(replace(report, matches=(*report.matches, part))).children[0].children[1].children
    shared = next(c for c in layers[1].children[1].children if c.name == "shared")
    assert shared.status == "missed" and "swiglu on native.cpu; swiglu: gate & up" in shared.detail


@pytest.mark.parametrize("ending", [".json", ".html", ".txt"])
def test_save_chooses_the_form_by_the_ending(report: Report, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"r{ending}"
    report.save(path)
    text = path.read_text(encoding="utf-8")
    if ending == ".json":
        assert Report.from_json(text) == report
    else:
        assert text.startswith("<!DOCTYPE html>" if ending == ".html" else "╭")


def test_report_of_nothing_can_be_shown() -> None:
    empty = Report()
    assert "nothing fused" in str(empty) and "no graph was compiled" in str(empty)
    assert Report.from_json(empty.to_json()) == empty
    assert empty.counts() == {} and empty.target == ""


def test_brackets_in_a_reason_are_text_not_markup(report: Report) -> None:
    miss = replace(report.misses[0], reason="shape [red]T, E[/red] is not [T, K].")
    assert "shape [red]T, E[/red] is not [T, K]." in str(replace(report, misses=(miss,)))


def test_match_count_is_summed() -> None:
    match = Match("router", "moe_route", 5, "a", "b", "c", 0.0, "d", "e")
    assert Report(matches=(match, replace(match, count=2))).counts() == {"moe_route": 7}
