"""The module door: replace what Dynamo cannot capture, before the model is compiled.

``prepare(model)`` swaps the expert loops of Hugging Face models for ``torch.ops.ascend_deep.moe_experts``; see
``hf_experts`` for how it decides. Parameters, buffers and ``state_dict`` stay as they are, eager runs get the op too,
and ``restore()`` puts everything back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ascend_deep import hf_experts
from ascend_deep.hf_experts import NAME, PREVIOUS, SPEC, Spec

__all__ = ["Left", "Prepared", "Swapped", "prepare"]

_NOT_DECORATED = (
    "its class does not dispatch through transformers' experts interface, so nothing can be swapped in; "
    "torch.compile sees its own code."
)


@dataclass(frozen=True)
class Swapped:
    """One experts module that now runs ``moe_experts``."""

    module: str
    kind: str
    spec: Spec

    def __str__(self) -> str:
        return f"{self.module} ({self.kind}): {self.spec.describe()}"


@dataclass(frozen=True)
class Left:
    """One experts module that was left as it is, and why (a full sentence)."""

    module: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.module} ({self.kind}): {self.reason}"


@dataclass
class Prepared:
    """What ``prepare`` did. Also a context manager that restores the model on exit.

    Attributes:
        model: the model, changed in place.
        swapped: experts that run the op now.
        left: experts that do not, each with the reason.
    """

    model: nn.Module
    swapped: tuple[Swapped, ...]
    left: tuple[Left, ...]

    def restore(self) -> None:
        """Give every experts module the implementation that it had before the first ``prepare``. May be repeated."""
        _release(self.model)

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()

    def __str__(self) -> str:
        from ascend_deep.report_layout import plural, short_paths

        lines = [f"prepare: {plural(len(self.swapped), 'experts module')} swapped, {len(self.left)} left as they are"]
        for kind, what, mark in (
            (self.swapped, lambda s: s.spec.describe(), "moe_experts"),
            (self.left, lambda s: s.reason, "left"),
        ):
            groups: dict[tuple[str, str], list[str]] = {}
            for item in kind:
                groups.setdefault((item.kind, what(item)), []).append(item.module)
            for (name, text), paths in groups.items():
                lines.append(f"  {mark}  {len(paths)}× {name}  {short_paths(paths)}")
                lines.append(f"      {text}")
        return "\n".join(lines)


def prepare(model: nn.Module, *, verify: bool = True) -> Prepared:
    """Swap the expert modules of a Hugging Face model for ``torch.ops.ascend_deep.moe_experts``, in place.

    Needed for models whose experts are a Python loop (``experts_implementation="eager"``), which breaks the graph;
    works for every experts implementation, in eager mode, under ``torch.compile`` and in training. A module is swapped
    only if the op computes what the module computes: the activation must be one member of the op's family, and, with
    ``verify``, module and op are compared on a few random tokens.

    Args:
        model: any module that contains expert modules of transformers. Models without any come back unchanged.
        verify: compare module and op before the swap. ``False`` skips the comparison, not the activation check.

    Returns:
        What was swapped, what was left and why, and ``restore()``. Preparing a model twice changes nothing more;
        a ``copy.deepcopy`` of a prepared model is prepared.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare: model is a {type(model).__name__}; it takes a torch.nn.Module.")
    # A compiled model shares its modules with the original, under other names.
    model = getattr(model, "_orig_mod", model)
    swapped: list[Swapped] = []
    left: list[Left] = []
    decorated: list[tuple[str, Any, Spec | None]] = []
    cache: dict[Any, Any] = {}
    for path, module in model.named_modules():
        kind = type(module).__name__
        if not hf_experts.is_decorated(module):
            if hf_experts.looks_like_experts(path, module):
                left.append(Left(path, kind, _reason_not_decorated(module)))
            continue
        import ascend_deep.ops  # noqa: F401  (registers the op)

        found = hf_experts.resolve(module, verify, cache)
        if isinstance(found, str):
            left.append(Left(path, kind, found))
            decorated.append((path, module, None))
        else:
            swapped.append(Swapped(path, kind, found))
            decorated.append((path, module, found))
    if swapped:
        _swap(decorated)
    return Prepared(model, tuple(swapped), tuple(left))


def _reason_not_decorated(module: nn.Module) -> str:
    if hasattr(module, "has_gate") and hasattr(module, "_apply_gate"):
        return "its class dispatches through another interface of transformers (quantised experts have their own)."
    return _NOT_DECORATED


def _swap(decorated: list[tuple[str, Any, Spec | None]]) -> None:
    interface = hf_experts.interface()
    if interface.get(NAME) is not hf_experts.experts_forward:
        interface.register(NAME, hf_experts.experts_forward)
    for _, module, spec in decorated:
        current = module.config._experts_implementation
        if current != NAME:
            setattr(module, PREVIOUS, current)
        elif not hasattr(module, PREVIOUS):
            setattr(module, PREVIOUS, None)
        if spec is not None:
            setattr(module, SPEC, spec.constants())
        elif hasattr(module, SPEC):
            delattr(module, SPEC)
    for config in _configs(decorated):
        # A dictionary with the key "" addresses this config only, not its sub-configs.
        config._experts_implementation = {"": NAME}


def _configs(decorated: list[tuple[str, Any, Spec | None]]) -> list[Any]:
    """The distinct config objects of the modules that were swapped."""
    return list({id(m.config): m.config for _, m, spec in decorated if spec is not None}.values())


def _release(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, PREVIOUS):
            config: Any = module.config
            if config._experts_implementation == NAME:
                config._experts_implementation = {"": getattr(module, PREVIOUS)}
            delattr(module, PREVIOUS)
        if hasattr(module, SPEC):
            delattr(module, SPEC)
