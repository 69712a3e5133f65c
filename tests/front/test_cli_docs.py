"""docs/cli.md and ``--help`` name the same commands and options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from ascend_deep.cli import app

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "cli.md").read_text()
PROGRAM = typer.main.get_command(app)
COMMANDS: dict[str, set[str]] = {
    name: {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")} - {"--help"}
    for name, command in PROGRAM.commands.items()  # type: ignore[attr-defined]
}
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def _section(title: str) -> str:
    """The text under ``## title``, without the rest of the page."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/cli.md has no section {title!r}"
    return found.group(1)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c in ("explain", "doctor", "replay", "bench")])
def test_every_option_of_a_command_is_on_the_page(command: str) -> None:
    text = _section(command)
    takes_model = any(p.name == "model" for p in PROGRAM.commands[command].params)  # type: ignore[attr-defined]
    text += _section("MODEL") if takes_model else ""
    assert sorted(COMMANDS[command] - set(OPTION.findall(text))) == []


def test_the_page_names_no_option_that_does_not_exist() -> None:
    own = {o for p in PROGRAM.params for o in p.opts} | {"--help"}
    assert sorted(set(OPTION.findall(PAGE)) - own.union(*COMMANDS.values())) == []
    for command in re.findall(r"^\$ ascend-deep (.*)$", PAGE, re.MULTILINE):
        name, *_ = command.split()
        assert set(OPTION.findall(command)) <= COMMANDS[name], command


def test_every_command_and_every_other_option_is_in_the_documentation() -> None:
    text = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    for command, options in COMMANDS.items():
        assert f"`{command}" in text or f"ascend-deep {command}" in text, command
        assert sorted(options - set(OPTION.findall(text))) == [], command
    assert {o for p in PROGRAM.params for o in p.opts if o.startswith("--")} <= set(OPTION.findall(PAGE))
