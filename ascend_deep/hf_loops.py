"""Expert loops of transformers that have another shape than the experts interface: DBRX, LongCat-Flash, JetMoE.

These classes loop over experts in Python, and neither dispatch through transformers' experts interface nor are a plain
weighted sum over ids: DBRX keeps its experts in matrices [E * I, H], LongCat-Flash has experts that return the token
itself, JetMoE splits sorted tokens by a Python list of sizes. Each has a forward here that is made of
``torch.ops.ascend_deep.moe_experts`` and reads the module's parameters where they are.

Knowing a class by its name is only the reason to try. A module is swapped if a small module of its class, with random
weights and the module's own activation, computes the same with both forwards (values, and gradients of everything, in
f64), and if the module itself does on a few tokens. A hook on one of its parts, another class in their place or another
activation sends the call to the module's own code, as it comes.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep import hf_experts
from ascend_deep.hf_loop_classes import KNOWN, MARK, Known

__all__ = ["WrittenSpec", "install", "installed", "is_known", "remove"]

ATTRIBUTE = "_ascend_deep_written"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CLOSE = 5e-6  # in f64, of the largest value: activations may round to f32 inside
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WIDTH = 12


@dataclass(frozen=True)
class WrittenSpec:
    """What was found in such a loop, for people."""

    act: str
    alpha: float
    limit: float | None
    experts: int
    note: str

    def describe(self) -> str:
        """Short form."""
        parts = [self.act]
        parts += [f"alpha={self.alpha:g}"] if self.alpha != 1.0 else []
        parts += [f"limit={self.limit:g}"] if self.limit is not None else []
        return ", ".join([*parts, f"loop over {self.experts} experts", self.note])


# -- which modules ----------------------------------------------------------------------------------------------------
def is_known(module: nn.Module) -> bool:
    """True for an instance of one of these classes itself (a subclass may compute something else)."""
    known = KNOWN.get(type(module).__name__)
    return known is not None and type(module).__module__ == f"transformers.{known.file}"


def installed(module: nn.Module) -> WrittenSpec | None:
    """What ``install`` found, if the module has our forward (one that was pickled has its own again)."""
    return vars(module).get(ATTRIBUTE) if hasattr(_function(module), MARK) else None


def install(module: Any, verify: bool, cache: dict[Any, Any]) -> WrittenSpec | str:
    """Swap the forward. A sentence, and nothing is changed, if the op does not compute what the module does.

    Args:
        module: one that ``is_known``.
        verify: also compare on a few tokens with the module's own weights, if these have data.
        cache: what was found for modules of this class, to be shared by the layers of one model.
    """
    import ascend_deep.ops  # noqa: F401  (registers the op)

    known = KNOWN[type(module).__name__]
    wrong = _problem(module, known)
    if wrong is not None:
        return wrong
    how = hf_experts.activation_of(_Gate(_at(module, known.activation)), True, cache)
    if isinstance(how, str):
        return how
    key = (type(module), how)
    if key not in cache:
        cache[key] = _small_differs(type(module), known, _at(module, known.activation), how)
    wrong = cache[key]
    if wrong is None and verify and not _at(module, known.weights[0]).is_meta:
        wrong = _module_differs(module, known, how)
    if wrong is not None:
        return wrong
    _attach(module, known, how)
    spec = WrittenSpec(*how, known.experts(module), known.note)
    setattr(module, ATTRIBUTE, spec)
    return spec


def remove(module: nn.Module) -> None:
    """Give a module its own forward back, if ``install`` replaced it."""
    vars(module).pop(ATTRIBUTE, None)
    if getattr(_function(module), MARK, None) == __name__:
        del module.forward


class _Gate:
    """An activation as an experts module of transformers shows it: gate first, then up."""

    def __init__(self, act: Any) -> None:
        self.act_fn, self.config, self.is_concatenated = act, None, True

    def _apply_gate(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return self.act_fn(gate) * up  # type: ignore[no-any-return]

    def modules(self) -> Iterator[Any]:
        yield from self.act_fn.modules() if isinstance(self.act_fn, nn.Module) else ()


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _function(module: nn.Module) -> Any:
    """The function of a forward that was put on the instance."""
    return getattr(vars(module).get("forward"), "__func__", None)


def _problem(module: Any, known: Known) -> str | None:
    if "forward" in vars(module) and _function(module) is not type(module).forward:
        return "its forward was replaced on the instance."
    if hooked(module, known.parts):
        return "a hook is attached to one of its parts, which moe_experts would not call."
    weights = [_at(module, path) for path in known.weights]
    for path, weight in zip(known.weights, weights, strict=True):
        if type(weight) not in (Tensor, nn.Parameter):
            return f"{path} is a {type(weight).__name__}; moe_experts takes plain tensors."
        if weight.dtype not in _DTYPES or weight.dtype != weights[0].dtype:
            return (
                f"{path} is {str(weight.dtype).removeprefix('torch.')}; moe_experts takes one floating dtype for all."
            )
    if any(type(part) is not kind for part, kind in zip(_parts(module, known), _kinds(module, known), strict=True)):
        return "one of its parts is of another class than transformers makes, and may compute something else."
    return None


def _parts(module: Any, known: Known) -> list[Any]:
    return [_at(module, path) for path in known.parts]


def _kinds(module: Any, known: Known) -> list[type]:
    return [type(part) for part in _parts(known.small(type(module)), known)]


def hooked(module: Any, paths: tuple[str, ...]) -> bool:
    """True if somebody listens to one of the parts. A compiler that traces this guards on it."""
    for path in paths:
        part = module
        for name in path.split("."):
            part = getattr(part, name)
        if path == "router" or path == "router.layer":
            continue  # both are called
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return True
    return False


# -- the forward ------------------------------------------------------------------------------------------------------
def _attach(module: Any, known: Known, how: tuple[str, float, float | None]) -> None:
    original: Any = type(module).forward
    kinds = tuple(_kinds(module, known))
    activation = _at(module, known.activation)
    act_kind = type(activation) if isinstance(activation, nn.Module) else None

    def usable(self: Any) -> bool:
        for path, kind in zip(known.parts, kinds):  # noqa: B905 (a compiler traces this)
            if type(_at(self, path)) is not kind:
                return False
        act = _at(self, known.activation)
        same = act is activation if act_kind is None else type(act) is act_kind
        return same and not hooked(self, known.parts)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if usable(self):
            return known.forward(self, how, *args, **kwargs)
        if not torch.compiler.is_compiling():
            text = "one of its parts was replaced, or has a hook. Its own loop runs instead of moe_experts."
            warnings.warn(f"{type(self).__name__}: {text}", stacklevel=2)
        if isinstance(getattr(self, "router", None), nn.Module):
            return _with_own_router(self, original, args, kwargs)
        return original(self, *args, **kwargs)

    del forward.__wrapped__  # type: ignore[attr-defined]  # unwrapping would find the loop
    setattr(forward, MARK, __name__)
    module.forward = types.MethodType(forward, module)
    if known.router is not None:
        module.router.forward = types.MethodType(known.router, module.router)


def _with_own_router(module: Any, original: Any, args: Any, kwargs: Any) -> Any:
    router = module.router
    ours = vars(router).pop("forward", None)
    try:
        return original(module, *args, **kwargs)
    finally:
        if ours is not None:
            router.forward = ours


# -- tests ------------------------------------------------------------------------------------------------------------
def _small_differs(kind: type, known: Known, activation: Any, how: tuple[str, float, float | None]) -> str | None:
    """Values and gradients in f64 of a small module of the class, or why the op is something else."""
    text = "a small module of its class computes something else than moe_experts"
    activation = copy.deepcopy(activation)  # its mode is switched below
    generator = torch.Generator().manual_seed(61)
    try:
        with torch.enable_grad():
            own = known.small(kind).double()
            owner, _, name = known.activation.rpartition(".")
            setattr(_at(own, owner) if owner else own, name, activation)
            for parameter in own.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator).double() * 0.6
            ours = known.small(kind).double()
            ours.load_state_dict(own.state_dict())
            setattr(_at(ours, owner) if owner else ours, name, activation)
            _attach(ours, known, how)
            for training in (False, True):
                for tokens in (1, 7, 64):
                    args = known.arguments(own, tokens, generator, torch.float64)
                    results = []
                    for module in (own, ours):
                        leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
                        out = module.train(training)(*leaves)
                        towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(62)).double()
                        inputs = [*(a for a in leaves if a.requires_grad), *module.parameters()]
                        results.append([out, *torch.autograd.grad(out, inputs, towards, allow_unused=True)])
                    if not all(_close(a, b) for a, b in zip(*results, strict=True)):
                        return f"{text}: results or gradients differ for {tokens} tokens."
    except Exception as error:
        return f"{text}, or does not run: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None and b is None:
        return True
    a = torch.zeros_like(b) if a is None and b is not None else a  # an expert that a loop skips has no gradient
    b = torch.zeros_like(a) if b is None and a is not None else b
    assert a is not None and b is not None
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    scale = float(a.detach().abs().max()) if a.numel() else 0.0
    error = float((a.detach().double() - b.detach().double()).abs().max()) if a.numel() else 0.0
    return error <= _CLOSE * max(scale, 1e-6)


def _module_differs(module: Any, known: Known, how: tuple[str, float, float | None]) -> str | None:
    """A sentence if module and op disagree on five random tokens."""
    from ascend_deep.ops.moe_experts import MOE_EXPERTS

    weight: Tensor = _at(module, known.weights[0])
    args = known.arguments(module, 5, torch.Generator().manual_seed(63), weight.dtype)
    args = tuple(a.to(weight.device) for a in args)
    try:
        with torch.no_grad():
            wanted = type(module).forward(module, *args)
            _attach(module, known, how)
            got = module.forward(*args)
    except Exception as error:
        return f"it does not run on random tokens: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        for part in (module, getattr(module, "router", None)):
            if isinstance(part, nn.Module):
                remove(part)
    tolerance = MOE_EXPERTS.tolerance[weight.dtype]
    scale = float(wanted.abs().max())
    off = float((wanted.double() - got.double()).abs().max())
    if wanted.dtype != got.dtype or not off <= 3 * tolerance.rtol * scale + tolerance.atol:
        return f"it computes something else than moe_experts on random tokens: it differs by {off:.2g} of {scale:.2g}."
    return None
