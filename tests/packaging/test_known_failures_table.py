"""docs/known_failures.md names tests; they exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_on_the_page_exists() -> None:
    text = (ROOT / "docs/known_failures.md").read_text(encoding="utf-8")
    names = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(names) > 60
    missing = []
    for file, function in names:
        path = ROOT / file
        source = path.read_text(encoding="utf-8") if path.exists() else ""
        if not source or (function and f"def {function}(" not in source):
            missing.append(f"{file}::{function}")
    assert not missing
    assert all(row.count("`") >= 2 for row in text.splitlines() if row.startswith("| ") and "failure | test" not in row)
