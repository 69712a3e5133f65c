"""The pages of the documentation: links lead somewhere, commands exist, examples that are whole run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [p.relative_to(ROOT).as_posix() for p in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_no_source_file_is_longer_than_contributing_says() -> None:
    limit = int(re.search(r"none has more than (\d+)", (ROOT / "CONTRIBUTING.md").read_text()).group(1))  # type: ignore[union-attr]
    folders = ("ascend_deep", "passes", "ops", "native", "lowering", "examples", "benchmarks", "docs")
    files = [f for d in folders for p in ("*.py", "*.cpp", "*.h") for f in (ROOT / d).rglob(p)]
    lines = {f.relative_to(ROOT).as_posix(): len(f.read_text().splitlines()) for f in files}
    assert len(lines) > 100 and {n: c for n, c in lines.items() if c > limit} == {}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in PAGES:
        if page.name != "README.md":
            assert f"{page.name})" in index, page.name


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^\$ make ((?:[a-z]+ ?)+)", page.read_text(), re.MULTILINE)
    for target in " ".join(targets).split():
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    out = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    for target in set(phony.split()) - {"help", "install"}:
        assert f"make {target} " in out, target


WHOLE = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
    if block.startswith("import ") and page.name != "CONTRIBUTING.md"
]


@pytest.mark.parametrize("block", WHOLE)
def test_examples_that_begin_with_an_import_run(block: str) -> None:
    exec(compile(block, "page", "exec"), {})


def test_there_are_such_examples() -> None:
    assert WHOLE
