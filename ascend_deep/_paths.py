"""Where the commands read and write, looked at before minutes of work go into what is to be written there."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["file_problem", "folder_problem", "read"]


def file_problem(option: str, path: Path) -> str | None:
    """One sentence if no file can be written at ``path``, which ``option`` names; else ``None``."""
    if path.is_dir():
        return f"{option} is {str(path)!r}, which is a folder; it takes the name of a file."
    if not path.parent.is_dir():
        return f"{option} is {str(path)!r}, and there is no folder {path.parent}."
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{option} is {str(path)!r}, which cannot be written: permission denied."
    return None


def folder_problem(option: str, path: Path) -> str | None:
    """The same for a folder, which need not be there, nor those above it."""
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not there.is_dir():
        return f"{option} is {str(path)!r}, which is to be a folder, but {there} is a file."
    if not os.access(there, os.W_OK):
        return f"{option} is {str(path)!r}, where nothing can be written: permission denied."
    return None


def read(option: str, path: Path) -> str:
    """The text of the file at ``path``.

    Raises:
        ValueError: it cannot be read; one sentence.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{option} is {str(path)!r}, which is not a text file.") from None
    except OSError as error:
        why = {FileNotFoundError: "there is no such file", IsADirectoryError: "it is a folder"}.get(type(error))
        raise ValueError(f"{option} is {str(path)!r}, which cannot be read: {why or error.strerror}.") from None
