"""The module door: replace what Dynamo cannot capture, before the model is compiled.

``prepare(model)`` swaps expert loops for ``torch.ops.ascend_deep.moe_experts``: those of Hugging Face classes that
dispatch through transformers' experts interface (``hf_experts`` says how it decides), and those that are written by
hand, with experts in a ``ModuleList`` or in stacked weights (``loop_experts``). Parameters, buffers and ``state_dict``
keep their names and shapes, eager runs get the op too, and ``restore()`` puts everything back.

``prepare(model, quantize="fp8")`` also quantises linear layers and experts (``quantize``). Modules that transformers
has quantised to FP8 or MXFP4 run our ops either way (``quantize_adopt``, ``quantize_mxfp4``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ascend_deep import (
    hf_experts,
    hf_loops,
    loop_experts,
    quantize_adopt,
    quantize_loops,
    quantize_routers,
    quantized_files,
)
from ascend_deep import quantize as quantization
from ascend_deep.hf_experts import NAME, PREVIOUS, SPEC, Spec
from ascend_deep.hf_loops import WrittenSpec
from ascend_deep.loop_experts import LoopSpec
from ascend_deep.quantize import EXCLUDED, Quantized
from ascend_deep.quantize_recipes import recipe_for
from ascend_deep.quantized_modules import QuantizedExperts, QuantizedModule

__all__ = ["Left", "Prepared", "Quantized", "Swapped", "load_quantized", "prepare"]

ROOT = "the model itself"
"""Its path, ``""``, in texts."""
_OTHER_INTERFACE = "its class dispatches through another interface of transformers (quantised experts have their own)."
_SHARED_OUT = "its experts are shared out over ranks (parallelize), and run moe_experts on each of them already."
_NOT_DECORATED = (
    "its class does not dispatch through transformers' experts interface, so nothing can be swapped in; "
    "torch.compile sees its own code."
)


@dataclass(frozen=True)
class Swapped:
    """One module that now runs ``moe_experts``; ``spec`` says with what activation, and whether it was a loop."""

    module: str
    kind: str
    spec: Spec | LoopSpec | WrittenSpec

    def __str__(self) -> str:
        return f"{self.module or ROOT} ({self.kind}): {self.spec.describe()}"


@dataclass(frozen=True)
class Left:
    """One module that was left as it is, and why (a full sentence)."""

    module: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.module or ROOT} ({self.kind}): {self.reason}"


@dataclass
class Prepared:
    """What ``prepare`` did. Also a context manager that restores the model on exit.

    Attributes:
        model: the model, changed in place.
        swapped: experts that run the op now.
        left: experts (and linear layers, if asked to quantise) that do not, each with the reason.
        quantized: layers that are quantised now, each with how far off it is.
    """

    model: nn.Module
    swapped: tuple[Swapped, ...]
    left: tuple[Left, ...]
    quantized: tuple[Quantized, ...] = ()

    def restore(self) -> None:
        """Give every module the implementation that it had before the first ``prepare``. May be repeated.

        Raises:
            RuntimeError: layers are quantised and their originals were not kept. All others are restored.
        """
        gone = [*quantize_loops.release(self.model), *quantization.release(self.model)]
        _release(self.model)
        if gone:
            raise RuntimeError(
                f"restore: the original weights of {len(gone)} quantised layers, {gone[0]} among them, were not kept; "
                "prepare(model, quantize=..., keep_master=True) keeps them."
            )

    def save(self, path: str | Path) -> None:
        """Write the model with its quantised layers to a safetensors file, which ``load_quantized`` reads.

        Raises:
            ValueError: there is no quantised layer.
            ImportError: safetensors is not installed.
        """
        quantized_files.save(self.model, path, self.quantized)

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
                groups.setdefault((item.kind, what(item)), []).append(item.module or ROOT)
            for (name, text), paths in groups.items():
                lines.append(f"  {mark}  {len(paths)}× {name}  {short_paths(paths)}")
                lines.append(f"      {text}")
        if self.quantized:
            lines += _quantised_lines(self.quantized)
        return "\n".join(lines)


def _quantised_lines(entries: Sequence[Quantized]) -> list[str]:
    from ascend_deep.report_layout import plural, short_paths

    before, after = sum(e.bytes_before for e in entries), sum(e.bytes_after for e in entries)
    lines = [
        f"quantised: {plural(len(entries), 'layer')}, {before / 2**20:.1f} MiB of weights in {after / 2**20:.1f} MiB"
    ]
    groups: dict[tuple[str, str], list[Quantized]] = {}
    for entry in entries:
        groups.setdefault((entry.kind, entry.recipe.describe()), []).append(entry)
    for (kind, text), same in groups.items():
        worst = max(same, key=lambda e: e.output_error)
        lines.append(f"  {len(same)}× {kind}  {short_paths([e.module for e in same])}")
        lines.append(
            f"      {text}; calc_diff of weights up to {max(e.weight_error for e in same):.1e}, of results up to "
            f"{worst.output_error:.1e} ({worst.module})"
        )
    return lines


def load_quantized(model: nn.Module, path: str | Path) -> Prepared:
    """Make ``model`` the quantised model that ``Prepared.save`` wrote, in place.

    Args:
        model: a model of the same class and sizes. Its own weights are not read; it may be on the meta device, and then
            buffers that are no part of ``state_dict`` have no data afterwards either.
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is none of ours, or of another model.
        ImportError: safetensors is not installed.
    """
    return Prepared(model, (), (), quantized_files.load(model, path))


def prepare(
    model: nn.Module,
    *,
    verify: bool = True,
    quantize: str | None = None,
    target: str = "auto",
    exclude: Sequence[str] = EXCLUDED,
    keep_master: bool = False,
) -> Prepared:
    """Swap the expert loops of a model for ``torch.ops.ascend_deep.moe_experts``, in place.

    Needed for models whose experts are a Python loop, which breaks the graph: those of Hugging Face
    (``experts_implementation="eager"``) and those written by hand. Works in eager mode, under ``torch.compile`` and in
    training. A module is swapped only if the op computes what the module computes. That is found by running it, or a
    copy of it with random weights; no spelling is assumed.

    After the swap of a hand-written loop over modules, the data of their parameters are slices of one tensor. Names,
    shapes, values and gradients stay; an expert without tokens has a gradient of zeros, where a loop that skips it
    leaves ``None``.

    Args:
        model: any module. Models without expert loops come back unchanged.
        verify: also compare module and op on a few random tokens with the model's own weights. ``False`` skips that
            comparison, not the tests on random weights.
        quantize: ``"fp8"`` or ``"fp4"``: store the weights of linear layers and of Hugging Face experts in that format,
            with activations quantised to FP8 on every call. For inference: a quantised weight has no gradient. The
            rounding changes results; every layer says by how much.
        target: hardware to choose blocks and scales for, ``"auto"``: the device the model is on. Others are ``"cpu"``,
            ``"sm90"``, ``"sm100"``, ``"ascend950"``.
        exclude: layers that are not quantised: patterns for paths or their last names. By default output layers and
            routers; "router" also stands for every linear layer that chooses between experts which are one op now.
        keep_master: keep the original layers, so that ``restore()`` can put them back.

    Returns:
        What was swapped, what was left and why, what was quantised, ``restore()`` and ``save()``. Preparing a model
        twice changes nothing more; a ``copy.deepcopy`` of a prepared model is prepared, a pickled one has its own loops
        again (and stays quantised).

    Raises:
        TypeError: ``model`` is not a module, or ``exclude`` no list of patterns.
        ValueError: ``quantize`` or ``target`` is unknown, or the target has no such products.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare: model is a {type(model).__name__}; it takes a torch.nn.Module.")
    if isinstance(exclude, str):
        raise TypeError(f"prepare: exclude is {exclude!r}; it takes a list of patterns.")
    # A compiled model shares its modules with the original, under other names.
    model = getattr(model, "_orig_mod", model)
    cache: dict[Any, Any] = {}
    recipe = recipe_for(quantize, target, model) if quantize is not None else None
    adopted, strange = quantize_adopt.adopt(model, cache, target, quantize, keep_master)
    if recipe is None:
        swapped, left = _swap_experts(model, verify, cache)
        return Prepared(model, swapped, _joined(strange, left), tuple(adopted))
    # Experts first, because they would be another module once swapped; then linear layers, of those that are not
    # part of a swapped loop.
    done, refused = quantization.experts(model, recipe, exclude, keep_master, cache)
    swapped, left = _swap_experts(model, verify, cache)
    loops = [s.module for s in swapped if isinstance(s.spec, LoopSpec)]
    inside, unfit = quantize_loops.quantise(model, loops, recipe, exclude, keep_master)
    done, refused = [*done, *inside], [*refused, *unfit]
    swapped = tuple(s for s in swapped if s.module not in {q.module for q in inside})
    routers = quantize_routers.routers(model) if "router" in exclude else {}
    more, stay = quantization.linears(model, recipe, exclude, keep_master, [s.module for s in swapped], routers)
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    entries = sorted((*adopted, *done, *more), key=lambda q: order[q.module])
    return Prepared(model, swapped, _joined([*strange, *refused, *stay], left), tuple(entries))


def _joined(reasons: Sequence[tuple[str, str, str]], left: Sequence[Left]) -> tuple[Left, ...]:
    """Modules that were left, each once per reason; what is known of a quantised module is said instead of a guess."""
    known = {path for path, _, _ in reasons}
    guesses = [item for item in left if item.module not in known or item.reason != _OTHER_INTERFACE]
    return (*guesses, *(Left(*r) for r in reasons))


def _swap_experts(
    model: nn.Module, verify: bool, cache: dict[Any, Any]
) -> tuple[tuple[Swapped, ...], tuple[Left, ...]]:
    """Every experts module that ``moe_experts`` computes runs it; what was swapped and what was left."""
    swapped: list[Swapped] = []
    left: list[Left] = []
    decorated: list[tuple[str, Any, Spec | None]] = []
    candidates: dict[str, str] = {}
    known: set[str] = set()
    for path, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, QuantizedModule):
            continue
        if getattr(module, "shared_out", False):
            left.append(Left(path, kind, _SHARED_OUT))
            known.add(path)
            continue
        if hf_loops.is_known(module):
            written = hf_loops.installed(module) or hf_loops.install(module, verify, cache)
            if isinstance(written, str):
                left.append(Left(path, kind, written))
            else:
                swapped.append(Swapped(path, kind, written))
            known.add(path)
            continue
        if not hf_experts.is_decorated(module):
            if hf_experts.looks_like_experts(path, module):
                candidates[path] = kind
            continue
        import ascend_deep.ops  # noqa: F401  (registers the op)

        found = hf_experts.resolve(module, verify, cache)
        if isinstance(found, str):
            left.append(Left(path, kind, found))
            decorated.append((path, module, None))
        else:
            swapped.append(Swapped(path, kind, found))
            decorated.append((path, module, found))
    if any(spec is not None for _, _, spec in decorated):
        _swap(decorated)
    about: dict[str, str] = {}
    loops, refused = _loops(model, verify, {*known, *(path for path, _, _ in decorated)}, cache, about)
    swapped += loops
    done = [*known, *(s.module for s in loops), *(r.module for r in refused)]
    left += refused
    left += [
        Left(path, kind, _reason_not_decorated(model.get_submodule(path), about.get(path)))
        for path, kind in candidates.items()
        if not any(path == other or path.startswith(f"{other}." if other else "") for other in done)
        and not any(other.startswith(f"{path}.") for other in done)
    ]
    return tuple(swapped), tuple(left)


def _loops(
    model: nn.Module, verify: bool, decorated: set[str], cache: dict[Any, Any], about: dict[str, str]
) -> tuple[list[Swapped], list[Left]]:
    """Find and replace the loops that are written by hand; ``about`` gets what was found out about other experts."""
    swapped: list[Swapped] = []
    left: list[Left] = []
    modules = dict(model.named_modules())
    for path in loop_experts.owners(model):
        if any(path == p or p.startswith(f"{path}." if path else "") for p in decorated):
            continue
        if any(isinstance(m, QuantizedExperts) or getattr(m, "shared_out", False) for m in modules[path].modules()):
            continue  # quantised already, or not to be run on one rank alone
        if any(path == s.module or path.startswith(f"{s.module}." if s.module else "") for s in swapped):
            continue
        kind = type(modules[path]).__name__
        known = loop_experts.installed(model, path)
        if known is not None:
            swapped.append(Swapped(known.path, type(modules[known.path]).__name__, known.spec))
            continue
        found = loop_experts.resolve(model, path, cache)
        if isinstance(found, loop_experts.Loop):
            wrong = loop_experts.install(model, found, verify)
            if wrong is None:
                swapped.append(Swapped(found.path, type(modules[found.path]).__name__, found.spec))
                continue
            found = (9, wrong)
        if found is not None and found[0] < 3 and _of_transformers(modules[path]):
            if found[0] == 2:
                about[path] = found[1]
            continue  # its experts are listed, with what transformers has for such classes
        if found is not None and (found[0] >= 3 or loop_experts.is_named_so(path, modules[path])):
            left.append(Left(path, kind, found[1]))
    return swapped, left


def _of_transformers(module: nn.Module) -> bool:
    """True for classes that are part of transformers."""
    return type(module).__module__.startswith("transformers.")


def _reason_not_decorated(module: nn.Module, about: str | None) -> str:
    if hasattr(module, "has_gate") and hasattr(module, "_apply_gate"):
        return _OTHER_INTERFACE
    if about is not None:
        return f"its class does not dispatch through transformers' experts interface, and {about}"
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
        loop_experts.remove(module)
        hf_loops.remove(module)
        if hasattr(module, PREVIOUS):
            config: Any = module.config
            if config._experts_implementation == NAME:
                config._experts_implementation = {"": getattr(module, PREVIOUS)}
            delattr(module, PREVIOUS)
        if hasattr(module, SPEC):
            delattr(module, SPEC)
