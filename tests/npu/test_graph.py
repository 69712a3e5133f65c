"""The reader of graph engine graphs on graphs that are wrong in one place, and what it draws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ascend_deep.lowering.torchair_graph import Edge, Node, counts, dot, listing, mermaid, problems

DATA = Node("x", "Data", (), 1, (("index", "0"),), ("[-1, 64]",))
CONST = Node("c", "Const", (), 1, ())
SPLIT = Node("split", "Split", (Edge("x", 0, "x"), Edge("c", 0, "axis"), None), 2, (("num", "2"),))
ADD = Node("add", "Add", (Edge("split", 0, "x1"), Edge("split", 1, "x2"), Edge("x", -1, "control")), 1, ())
OUT = Node("out", "NetOutput", (Edge("add", 0, "input0"),), 0, ())
GOOD = (DATA, CONST, SPLIT, ADD, OUT)


def test_a_whole_graph_has_no_problems() -> None:
    assert problems(GOOD) == []
    assert counts(GOOD) == {"Split": 1, "Add": 1} and counts(GOOD, plumbing=True)["Data"] == 1


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ((DATA, CONST, SPLIT, replace(ADD, inputs=(Edge("gone", 0, "x1"),)), OUT), "add reads gone, which is not in"),
        ((DATA, CONST, SPLIT, replace(ADD, inputs=(Edge("split", 2, "x1"),)), OUT), "output 2 of split, which has 2"),
        ((*GOOD, replace(ADD, inputs=())), "the name 'add' is used 2 times."),
        ((DATA, CONST, SPLIT, ADD), "the graph has no NetOutput."),
        ((DATA, CONST, replace(SPLIT, inputs=(Edge("add", 0, "x"),)), ADD, OUT), "lie on a cycle, add among them."),
    ],
)
def test_problems_are_named(broken: tuple[Node, ...], sentence: str) -> None:
    (found,) = problems(broken)
    assert sentence in found


def test_listing_and_pictures() -> None:
    text = listing(GOOD)
    assert "x: Data [-1, 64]() {index=0}" in text and "add: Add(x1=split:0, x2=split:1)" in text
    assert "2 ops besides inputs and constants:" in text and "c: Const" not in text
    flow = mermaid(GOOD).splitlines()
    assert flow[0] == "flowchart TD" and '    n0[("Data<br/>x")]' in flow and "    n0 -.-> n2" in flow
    picture = dot(GOOD)
    assert picture.startswith("digraph ge {") and '"split" -> "add" [label="x2"];' in picture
    assert '"x" -> "add" [style=dashed];' in picture and "Const" not in picture
