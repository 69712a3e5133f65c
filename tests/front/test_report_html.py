"""The HTML form: well-formed, self-contained, and it shows what the report holds."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from ascend_deep.report import Report

SVG = "{http://www.w3.org/2000/svg}"


def _parse(page: str) -> ET.Element:
    declaration, body = page.split("\n", 1)
    assert declaration == "<!DOCTYPE html>"
    return ET.fromstring(body)


def _text(page: str) -> str:
    return "".join(_parse(page).itertext())


def test_page_is_well_formed_and_shows_everything(report: Report) -> None:
    text = _text(report.to_html())
    for part in (
        "TinyMoeForCausalLM", "model.layers.{0-2}.mlp.experts", "moe_route(topk=3, renorm=sum)", "r.py:7", "native.cpu",
        "1.5e-07", "aa11bb22cc33dd44", "gate & up are <added>, not multiplied.", "Write act(gate) * up.", "loop.py:79",
        "Call prepare.", "3.4 s", "model.layers.{0-2}.attention", "not executed on that hardware", "ascend950",
    ):  # fmt: skip
        assert part in text, part


def test_page_loads_nothing(report: Report) -> None:
    root = _parse(report.to_html())
    for element in root.iter():
        assert element.tag not in ("script", "link", "img", "iframe", "object"), element.tag
        for name, value in element.attrib.items():
            assert name not in ("src", "href") and "url(" not in value
    style = root.find("head/style")
    assert style is not None and style.text is not None
    assert "@import" not in style.text and "url(" not in style.text
    assert "prefers-color-scheme:dark" in style.text


def test_picture_colours_modules_by_status_and_stays_inside_its_frame(report: Report) -> None:
    root = _parse(report.to_html())
    svg = root.find(f".//{SVG}svg")
    assert svg is not None
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    status = {}
    for group in svg.iter(f"{SVG}g"):
        rect, label = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert rect is not None and label is not None and label.text
        status[label.text] = group.attrib["class"]
        assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
        assert float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height
    assert status["gate"] == status["experts"] == status["act_fn"] == "fused"
    assert status["shared"] == "missed" and status["attention"] == "unclaimed" and status["mlp"] == "quiet"
    assert "0–2 ×3" in status


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a & b", "\"quoted\" 'name'"])
def test_names_cannot_break_the_page(report: Report, name: str) -> None:
    odd = replace(report, model=name, matches=(replace(report.matches[0], module=name, spec=name, provider=name),))
    assert name in _text(odd.to_html())


def test_empty_report_and_file(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    page = Report().to_html(path)
    assert "nothing fused" in _text(page)
    assert path.read_text(encoding="utf-8") == page


def test_report_without_module_names_still_has_a_picture(report: Report) -> None:
    page = replace(report, modules={}, model="").to_html()
    assert "experts" in _text(page)
    assert _parse(page).find(f".//{SVG}svg") is not None
