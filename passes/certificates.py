"""Certificates on disk: one JSON file per accepted rewrite, next to the compiled artefacts; and their replay."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ascend_deep.lowering import _torch_compat
from ascend_deep.passes._types import Certificate, Solution

__all__ = ["find", "from_dict", "key_of", "load", "save", "store", "to_dict", "write_text"]


def store() -> Path:
    """The folder of certificates and reports: ``ascend_deep`` inside Inductor's cache folder."""
    return Path(_torch_compat.cache_dir()) / "ascend_deep"


def key_of(fingerprint: str, solution: Solution, versions: Mapping[str, str]) -> str:
    """Content hash of a region, its replacement and the versions that were tested."""
    text = json.dumps([fingerprint, solution.op, sorted(map(repr, solution.attrs.items())), sorted(versions.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_dict(certificate: Certificate) -> dict[str, Any]:
    """JSON form."""
    data = dataclasses.asdict(certificate)
    data["attrs"] = {k: _attr_to_json(v) for k, v in certificate.attrs.items()}
    return data


def from_dict(data: Mapping[str, Any]) -> Certificate:
    """Inverse of ``to_dict``."""
    fields = dict(data)
    fields["attrs"] = {k: _attr_from_json(v) for k, v in data["attrs"].items()}
    fields["seeds"], fields["cases"] = tuple(data["seeds"]), tuple(data["cases"])
    return Certificate(**fields)


def save(certificate: Certificate) -> Path:
    """Write ``certificate`` to the store; returns its path."""
    path = store() / "certificates" / f"{certificate.key}.json"
    write_text(path, json.dumps(to_dict(certificate), indent=1))
    return path


def find(name: str) -> Path:
    """The file of a certificate given as a path or as a key (or its beginning).

    Raises:
        FileNotFoundError: there is none, or more than one key begins like that.
    """
    if Path(name).is_file():
        return Path(name)
    if Path(name).name != name:  # a key has no folders in it
        raise FileNotFoundError(f"there is no file {name!r}; a certificate is named by its file or by its key.")
    folder = store() / "certificates"
    found = sorted(p for p in folder.glob("*.json") if p.name.startswith(name))
    if len(found) != 1:
        what = f"{len(found)} certificates" if found else "no certificate"
        begin = "begin" if found else "begins"
        raise FileNotFoundError(f"{what} in {folder} {begin} with {name!r}; give a path or a longer key.")
    return found[0]


def load(name: str) -> Certificate:
    """Read a certificate by path or key."""
    path = find(name)
    try:
        return from_dict(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is not a certificate of this version: {what}.") from error


def write_text(path: Path, text: str) -> None:
    """Write atomically: other processes see the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _attr_to_json(value: Any) -> Any:
    return {"dtype": str(value)} if isinstance(value, torch.dtype) else value


def _attr_from_json(value: Any) -> Any:
    return getattr(torch, value["dtype"].removeprefix("torch.")) if isinstance(value, dict) else value
