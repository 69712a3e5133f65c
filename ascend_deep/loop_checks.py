"""Looks at modules that run nothing: what makes two of them equal, and what is unusual about an expert."""

from __future__ import annotations

import types
from typing import Any

from torch import nn

__all__ = ["INTERNALS", "below", "fingerprint", "is_named_so", "unusual"]


INTERNALS = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def fingerprint(model: nn.Module, target: str, entry: str, owner: str) -> Any:
    """Equal for modules of which nothing that is looked at differs: classes, sizes, numbers, configs."""
    module = model.get_submodule(entry)
    parts: list[Any] = [below(target, entry), below(owner, entry)]
    used = {
        name
        for kind in {base for m in module.modules() for base in type(m).__mro__ if base not in (nn.Module, object)}
        for function in vars(kind).values()
        if isinstance(function, (types.FunctionType, property)) and getattr(function, "__name__", "") != "__init__"
        for name in _names(function)
    }
    for name, held in module.named_modules():
        parts.append((name, type(held), tuple(bool(h) for h in (held._forward_hooks, held._forward_pre_hooks))))
        for key, value in vars(held).items():
            if key in INTERNALS or ("layer" in key and isinstance(value, int) and key not in used):
                continue  # the number of a layer differs, and matters only if code reads it
            parts.append((key, value if isinstance(value, (bool, int, float, str, type(None))) else id(value)))
    parts += [(n, tuple(p.shape), p.dtype) for n, p in module.named_parameters()]
    parts += [(n, None if b is None else tuple(b.shape)) for n, b in module.named_buffers()]
    return tuple(parts)


def _names(function: Any) -> set[str]:
    """Every name that a function or a property uses, in functions inside it and in strings too."""
    function = function.fget if isinstance(function, property) else function
    function = getattr(function, "__wrapped__", function)  # torch.no_grad()
    todo, found = [getattr(function, "__code__", None)], set()
    while todo:
        code = todo.pop()
        if code is not None:
            found |= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
            todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return found


def unusual(module: nn.Module, name: str) -> str | None:
    """A sentence if a parameter of an expert is not plain, or its module is hooked or parametrised."""
    parameter = module.get_parameter(name)
    if type(parameter) is not nn.Parameter:
        return f"{name} is a {type(parameter).__name__}; moe_experts takes plain parameters."
    if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
        return (
            f"{name} is {str(parameter.dtype).removeprefix('torch.')}; moe_experts takes float32, bfloat16 or float16."
        )
    holder, parts = module, name.split(".")[:-1]
    for step, part_ in enumerate(parts):
        holder = getattr(holder, part_)
        if holder._forward_hooks or holder._forward_pre_hooks or holder._backward_hooks or holder._backward_pre_hooks:
            return f"a hook is attached to {'.'.join(parts[: step + 1])}, and the op would not call it."
        if "forward" in vars(holder):
            return f"the forward of {'.'.join(parts[: step + 1])} was replaced on the instance."
        if "parametrizations" in holder._modules:
            return f"{'.'.join(parts[: step + 1])} is parametrised."
    return None


def is_named_so(path: str, module: nn.Module) -> bool:
    """Whether names say that a module has experts: then it is listed with a reason if it is left."""
    names = [path.rpartition(".")[2], type(module).__name__, *(n for n, _ in module.named_children())]
    return any("expert" in n.lower() or "moe" in n.lower() for n in names)


def below(path: str, root: str) -> str:
    """The rest of a path."""
    return path[len(root) :].lstrip(".")
