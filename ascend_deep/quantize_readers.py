"""Who reads the weight of a layer besides the layer itself: before a weight is quantised, nobody else may.

Storages that several parameters or buffers share, methods in whose source the weight of a layer of that name is read
(``self.out_proj.weight``), and the output layers that a model names.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from functools import lru_cache

from torch import nn

__all__ = ["output_layers", "read_by_others", "shared_storage"]


def shared_storage(model: nn.Module) -> dict[int, list[str]]:
    """Storage to the names of all parameters and buffers in it."""
    found: dict[int, list[str]] = defaultdict(list)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first = {id(module): path for path, module in model.named_modules()}
    for name, tensor in named:
        path = name.rpartition(".")[0]
        # A module under two paths is replaced at both, so its second name is no other reader.
        if tensor.numel() and first[id(model.get_submodule(path))] == path:
            found[tensor.untyped_storage().data_ptr()].append(name)
    return found


_READ = re.compile(r"(\w+)\s*(?:\[[^\]]*\])?\s*\.\s*(?:weight|bias)\b")
_NOT_READERS = re.compile(r"_?(?:init|reset|tie|load|save|resize|get_)\w*|__init__|_load_from_state_dict")
_FRAMEWORK = ("torch.nn.modules.linear", "transformers.modeling_utils", "transformers.generation", "transformers.utils")


def read_by_others(model: nn.Module) -> dict[str, str]:
    """Names of layers whose weight or bias some method of a class in the model reads, and that method."""
    found: dict[str, str] = {}
    for kind in {type(m) for m in model.modules()}:
        for base in kind.__mro__:
            if base is nn.Module or base is object or base.__module__.startswith(_FRAMEWORK):
                continue
            for name, reader in _names_read(base):
                found.setdefault(name, reader)
    return found


@lru_cache(maxsize=4096)
def _names_read(kind: type) -> tuple[tuple[str, str], ...]:
    found = []
    for name, function in vars(kind).items():
        if not inspect.isfunction(function) or _NOT_READERS.fullmatch(name):
            continue
        try:
            source = inspect.getsource(inspect.unwrap(function))
        except (OSError, TypeError):
            continue
        found += [(read, f"{kind.__name__}.{name}") for read in _READ.findall(source) if read != "self"]
    return tuple(found)


def output_layers(model: nn.Module) -> set[nn.Module]:
    """What ``get_output_embeddings`` of any module in the model returns."""
    found = set()
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        try:
            layer = get() if callable(get) else None
        except Exception:  # models without such a layer may raise
            layer = None
        if isinstance(layer, nn.Module):
            found.add(layer)
    return found
