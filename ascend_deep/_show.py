"""What the commands show: progress, errors in a line, text without markup. Imports neither torch nor transformers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["finite", "plain", "short_error", "status"]


def short_error(error: Exception) -> str:
    """Class and first line; of an error that Dynamo met while it traced a call, what the call said."""
    text = str(error)
    inner = re.search(r"failed to run FX node with fake tensors: (.*?): got (\w+)\((['\"])(.*?)\3\)", text, re.DOTALL)
    if inner is not None:
        call = re.search(r"(?:method|function|call_method) (\w+)", inner[1])
        return f"{inner[2]}: {inner[4]}{f', in {call[1]}' if call else ''}"
    lines = [line for line in text.splitlines() if line.strip()] or [type(error).__name__]
    more = next((line for line in lines[1:] if "Error" in line), "")
    return f"{type(error).__name__}: {lines[0]} {more}".strip()


@contextlib.contextmanager
def status(text: str) -> Iterator[Any]:
    """A spinner on a terminal, nothing elsewhere. Yields a function that changes the text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda more: None
        return
    with console.status(f"{text} …") as spinner:
        yield lambda more: spinner.update(f"{text}: {more}")


def plain(text: str) -> Text:
    """``text`` as it is: brackets are no markup."""
    return Text(text)


def finite(value: Any) -> Any:
    """``value``; a float that is not finite, which JSON does not have, as a string."""
    return (
        str(value) if (isinstance(value, float) and value != value) or value in (float("inf"), -float("inf")) else value
    )
