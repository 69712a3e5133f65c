"""Hand-written expert loops: the forward that calls the op instead.

``install`` gives a module whose loop was found (``loop_find``) a forward in which that part is one call, everything
else being its own statements; ``remove`` takes it away.
"""

from __future__ import annotations

import ast
import copy
import functools
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ascend_deep.loop_checks import INTERNALS, is_named_so
from ascend_deep.loop_families import Family, alias
from ascend_deep.loop_find import Loop, LoopSpec, line, owners, parents, resolve
from ascend_deep.loop_reads import is_simple
from ascend_deep.loop_runs import quiet
from ascend_deep.loop_state import Experts, Stack, register_guard

__all__ = ["ATTRIBUTE", "Loop", "LoopSpec", "install", "installed", "is_named_so", "owners", "remove", "resolve"]

ATTRIBUTE = "_ascend_deep_loop"
_MARK = "_ascend_deep_forward"
_MISSING = object()
_OURS = ("forward", "_apply", "__deepcopy__", ATTRIBUTE)


def install(model: nn.Module, loop: Loop, verify: bool) -> str | None:
    """Replace the loop. A sentence, and nothing is changed, if the module then computes something else."""
    module = model.get_submodule(loop.path)
    try:
        before = alias(model.get_submodule(loop.entry)) if verify else None
        register_guard()
        setattr(module, ATTRIBUTE, _experts(module, loop))
    except Exception as error:
        remove(module)
        return line(error)
    rewritten = loop.source.replaced(
        [(s.part.block, s.part.start, s.part.end, s.part.first, _statement(loop, i)) for i, s in enumerate(loop.solved)]
    )
    original: Any = type(module).forward
    same = _unchanged(module, loop)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        experts = getattr(self, ATTRIBUTE, None)
        if experts is not None and experts.usable(self.training) and same(self):
            return rewritten(self, *args, **kwargs)
        if experts is not None:
            experts.own_loop()
        return original(self, *args, **kwargs)

    del forward.__wrapped__  # type: ignore[attr-defined]  # unwrapping would find the loop
    setattr(forward, _MARK, True)
    _attach(module, forward)
    module.register_load_state_dict_post_hook(_after_load)
    wrong = _differs(before, model, loop, loop.shape) if before is not None else None
    if wrong is not None:
        remove(module)
    return wrong


def _unchanged(module: nn.Module, loop: Loop) -> Any:
    """A function of the module: whether the numbers that the loop reads outside of its experts are what they were.

    Written out, so that a compiler that traces it guards on each of them.
    """
    scopes: dict[int, tuple[dict[str, Any], list[str]]] = {}
    own: list[str] = []
    for path, name in loop.reads.attributes:
        holder = module.get_submodule(path)
        if "." not in path and not path.isdigit() and is_simple(getattr(holder, name, _MISSING)):
            own.append(".".join(("module", *([path] if path else []), name)))
    scopes[0] = ({}, own)
    for scope, name in loop.reads.outside:
        if not isinstance(scope, dict) or not is_simple(scope.get(name)):
            continue  # a function, or a variable of one; ``Experts`` looks at it
        scopes.setdefault(id(scope), (scope, []))[1].append(name)
    pairs = []
    for scope, names in scopes.values():
        if names:
            function = eval(f"lambda module: ({', '.join(names)},)", scope)
            pairs.append((function, function(module)))

    def same(module: Any) -> bool:
        for function, values in pairs:  # noqa: SIM110 (a compiler traces this)
            if function(module) != values:
                return False
        return True

    return same


def _attach(module: nn.Module, forward: Any) -> None:
    """What ``install`` puts on the instance, besides the experts. ``None``: somebody wrapped our forward."""
    if forward is not None:
        module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
    module._apply = types.MethodType(_apply, module)  # type: ignore[method-assign]
    vars(module)["__deepcopy__"] = _Copy(module)


def _is_ours(module: nn.Module) -> bool:
    """False if somebody wrapped the forward that ``install`` made; theirs stays, and ours calls the loop."""
    return hasattr(getattr(vars(module).get("forward"), "__func__", None), _MARK)


class _Copy:
    """``__deepcopy__`` of a prepared module: the copy is prepared, with parameters of its own.

    If something of the experts was changed since, the copy is an ordinary module with its own loop: what it has now
    is nothing that was compared with the op.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        own = vars(self.module)
        experts = own[ATTRIBUTE]
        prepared = experts.stays or experts.refresh() is None
        ours = {name: own.pop(name) for name in _OURS if name != "forward" or _is_ours(self.module)}
        try:
            twin_ = copy.deepcopy(self.module, memo)
        finally:
            own |= ours
        if not prepared:
            return twin_
        setattr(twin_, ATTRIBUTE, experts.copied(memo))
        _attach(twin_, ours["forward"].__func__ if "forward" in ours else None)
        return twin_

    def __reduce__(self) -> Any:
        # A pickled module comes back with its own forward, and is copied like any other.
        return (_nothing, ())


def _nothing() -> None:
    return None


def remove(module: nn.Module) -> None:
    """Give a module its own forward back, if ``install`` replaced it."""
    experts = vars(module).get(ATTRIBUTE)
    if ATTRIBUTE not in vars(module) or (experts is not None and experts.stays):
        return
    for name in _OURS:
        if name != "forward" or _is_ours(module) or experts is None:
            vars(module).pop(name, None)
    for key in [k for k, h in module._load_state_dict_post_hooks.items() if h is _after_load]:
        del module._load_state_dict_post_hooks[key]
    if experts is not None:
        experts.release()


def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``nn.Module._apply`` (what ``to``, ``half`` and ``cuda`` call), then the data are collected again."""
    result = type(self)._apply(self, *args, **kwargs)
    if getattr(self, ATTRIBUTE, None) is not None:
        getattr(self, ATTRIBUTE).refresh()
    return result


def _after_load(module: Any, keys: Any) -> None:
    if getattr(module, ATTRIBUTE, None) is not None:
        getattr(module, ATTRIBUTE).refresh()


def _statement(loop: Loop, number: int) -> ast.stmt:
    r = loop.solved[number].roles
    names = ", ".join(str(n) for n in (number, r.x, r.idx, r.weights, r.base))
    return ast.parse(f"{r.out} = {loop.source.self_name}.{ATTRIBUTE}({names})").body[0]


def _experts(module: nn.Module, loop: Loop) -> Experts:
    a, m = loop.solved[0].assignment, loop.solved[0].member

    def stack(found: Sequence[Family], transposed: bool = False) -> Stack | None:
        if not found:
            return None
        sites = tuple(tuple(_site(module, n) for n in f.names) for f in found)
        return Stack(sites, found[0].stacked, transposed)

    stacks = (
        stack([w.family for w in a.w13], a.w13[0].transposed), stack(a.b13),
        stack([a.w2.family], a.w2.transposed), stack([a.b2] if a.b2 else []),
    )  # fmt: skip
    watched: dict[int, nn.Module] = {}
    for holder in {n.split(".")[0] for f in a.families for n in f.names if "." in n}:
        for part_ in module.get_submodule(holder).modules():
            watched.setdefault(id(part_), part_)
    links = [
        (module, n)
        for n, c in module._modules.items()
        if id(c) in watched or (c is not None and not any(True for _ in c.parameters()))
    ]
    links += [
        (module, n) for n, v in vars(module).items()
        if n not in INTERNALS and n not in _OURS and (isinstance(v, (float, str)) or callable(v))
        and not isinstance(v, nn.Module)
    ]  # fmt: skip
    inside = [(module.get_submodule(p), n) for p, n in loop.reads.attributes]
    links += [(m, n) for m, n in inside if (m, n) not in links]
    return Experts(
        loop.path or type(module).__name__, stacks, (m.act, m.alpha, m.limit, m.interleaved, a.offset), loop.calls,
        tuple(watched.values()), tuple(links), loop.dtypes, loop.modes, loop.autocast, loop, loop.reads.outside,
    )  # fmt: skip


def _site(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    holder, _, last = name.rpartition(".")
    return module.get_submodule(holder), last


def _differs(before: nn.Module, model: nn.Module, loop: Loop, shape: tuple[int, ...]) -> str | None:
    """A sentence if the prepared module differs from a copy of the original on the model's own weights."""
    from ascend_deep.ops.moe_experts import MOE_EXPERTS

    after = model.get_submodule(loop.entry)
    first = next(after.parameters())
    if any(p.is_meta for p in after.parameters()):
        return None
    tolerance = MOE_EXPERTS.tolerance[loop_dtype(model, loop)]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(47)).to(first)
    buffers = [(b, b.detach().clone()) for b in after.buffers()]
    try:
        for mode in loop.modes:
            results = []
            for entry in (before, after):
                with torch.no_grad(), quiet(entry, mode, seed=48):
                    results.append(tree_flatten(entry(x.clone())))
            (wanted, tree), (got, other) = results
            if tree != other:
                return "after the swap it returned something of another structure."
            for a, b in zip(wanted, got, strict=True):
                if not isinstance(a, Tensor):
                    continue
                if a.shape != b.shape or a.dtype != b.dtype:
                    return f"after the swap it returned {tuple(b.shape)} {b.dtype} and not {tuple(a.shape)} {a.dtype}."
                scale = float(a.double().abs().max()) if a.numel() else 0.0
                error = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
                # The loop rounds after every expert, the op once: allow for both, relative to the largest value.
                if not error <= 4 * tolerance.rtol * scale + tolerance.atol:
                    return f"after the swap it differed by {error:.2g} of {scale:.2g} on its own weights."
    except Exception as error_:
        return f"after the swap it did not run: {type(error_).__name__}: {line(error_)}"
    finally:
        with torch.no_grad():
            for b, old in buffers:
                b.copy_(old)
    return None


def loop_dtype(model: nn.Module, loop: Loop) -> torch.dtype:
    """Dtype of the experts."""
    return model.get_submodule(loop.path).get_parameter(loop.solved[0].assignment.w2.family.names[0]).dtype


def installed(model: nn.Module, path: str) -> Loop | None:
    """The loop that was replaced in this module, or in the one around it for this module's experts."""
    for name in (path, parents(path)[0]):
        experts = vars(model.get_submodule(name)).get(ATTRIBUTE) if name is not None else None
        if experts is not None:
            return replace(experts.loop, path=name)
    return None
