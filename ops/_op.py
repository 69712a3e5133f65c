"""How an op is declared and registered.

Each op family file holds ``OpDef`` values; ``ops/__init__.py`` lists them in one table and registers them with
``torch.library`` under the namespace ``ascend_deep``. An op consists of

* a schema without default values (an op with a ``Tensor[]`` input and any default breaks ``register_autograd``),
* a check of its arguments that names what is wrong in one sentence; sizes go through ``torch._check_value``, so
  symbolic sizes are asserted and never branched on,
* a reference body in plain torch: the definition of the op,
* a fake (shapes, dtypes and strides only, symbolic sizes allowed),
* a backward, or a sentence that says why there is none: an op without a backward raises, because torch would
  otherwise return zero gradients in silence,
* an autocast rule: what eager PyTorch would have computed under autocast,
* a tolerance per dtype with its reason, and
* a generator of sample inputs that includes the edge cases.

At run time the op asks the provider table for an implementation and falls back to the reference body.
``strict()`` turns that fall into an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from ascend_deep.native import table
from ascend_deep.native._provider import Choice
from ascend_deep.ops._dispatch import AUTOCAST_KEYS, autocast_kernel, autograd_kernel
from ascend_deep.ops._eager import nothing_between, signature
from ascend_deep.ops._present import refuse_shared_memory, required_tensors, written_tensors
from ascend_deep.ops._wrong_types import wrong_type

__all__ = ["NAMESPACE", "OpDef", "Sample", "Tolerance", "call", "provider", "register", "strict"]

NAMESPACE = "ascend_deep"

# importlib.reload runs this file again in the same globals. The library and the table must survive that: dropping
# a Library object removes its kernels, and defining an op twice is an error.
_LIBRARY: torch.library.Library = globals().get("_LIBRARY") or torch.library.Library(NAMESPACE, "FRAGMENT")
_REGISTERED: dict[str, OpDef] = globals().get("_REGISTERED", {})
# Ops that the last call found a kernel for that checks its arguments itself, and the table that named it.
_SHORT: dict[str, tuple[object, Callable[..., Any]]] = globals().get("_SHORT", {})
# CUDA calls that were checked and taken, by op and signature: the table that was asked and the kernel that took it.
_TAKEN: dict[str, dict[tuple[Any, ...], tuple[object, Callable[..., Any]]]] = globals().get("_TAKEN", {})
# Positions and names of the tensors that an op cannot do without.
_REQUIRED: dict[str, tuple[tuple[int, str], ...]] = globals().get("_REQUIRED", {})
_TAKEN_AT_MOST = 1024  # of an op; contexts that grow make new ones
_STRICT: ContextVar[bool] = globals().get("_STRICT") or ContextVar("ascend_deep_strict", default=False)


@dataclass(frozen=True)
class Tolerance:
    """How far an implementation may be from the reference. ``reason`` says what the figures are made of."""

    rtol: float
    atol: float
    reason: str


@dataclass(frozen=True)
class Sample:
    """One call of an op: ``args`` and ``kwargs`` as the schema wants them, ``name`` for test ids."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpDef:
    """Everything there is to know about one op; see the module docstring.

    Attributes:
        name: without namespace.
        schema: from the opening parenthesis on.
        check: raises ``ValueError`` (sizes, names) or ``TypeError`` (dtypes, devices) with one clear sentence;
            takes the op's arguments and must work on fake tensors.
        reference: the definition, on real tensors that passed ``check``.
        fake: same arguments, on fake tensors that passed ``check``.
        tolerance: by dtype of the leading input, for every device without an entry in ``tolerance_on``.
        tolerance_on: by device type and dtype, where a device computes with less than the definition does.
        samples: the input generator, CPU tensors, seeded.
        setup_context, backward: as ``torch.library.register_autograd`` takes them.
        no_backward: the reason, if there is no ``backward``.
        autocast: ``(args, kwargs, dtype) -> (args, kwargs)``, the casts that eager PyTorch makes under autocast;
            ``None`` means that none are made. Either way autocast is off inside the op.
        debug: checks of values, run before the kernel if the environment has ASCEND_DEEP_DEBUG=1.
        differentiable: names of the arguments that get gradients.
        composed: the reference body calls other ops, which choose providers of their own. Such an op needs no kernel:
            ``strict()`` looks at the ops it is made of.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    tolerance: Mapping[torch.dtype, Tolerance]
    samples: Callable[[], Iterator[Sample]]
    check: Callable[..., None]
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    no_backward: str = ""
    autocast: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    debug: Callable[..., None] | None = None
    differentiable: tuple[str, ...] = ()
    composed: bool = False
    tolerance_on: Mapping[str, Mapping[torch.dtype, Tolerance]] = field(default_factory=dict)

    def tolerance_for(self, dtype: torch.dtype, device: str) -> Tolerance:
        """How far an implementation on ``device`` (a device type) may be from the reference on the CPU."""
        return self.tolerance_on.get(device, {}).get(dtype, self.tolerance[dtype])

    @property
    def overload(self) -> torch._ops.OpOverload:
        """``torch.ops.ascend_deep.<name>.default``."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default


@contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Within this context a call that no provider takes raises ``RuntimeError`` and names every refusal.

    It applies to the current thread or task, to eager calls and to compiled graphs when they run (not when they are
    compiled). A backward that the autograd engine runs on a device thread of its own (CUDA, NPU) does not see it.
    """
    token = _STRICT.set(enabled)
    try:
        yield
    finally:
        _STRICT.reset(token)


def provider(name: str, device: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Choice:
    """Who would run op ``name`` on ``device`` with these arguments (real or fake tensors), and who refuses, and why.

    Raises:
        KeyError: no op of that name.
    """
    if name not in _REGISTERED:
        raise KeyError(f"ascend_deep has no op {name!r}; the ops are {', '.join(sorted(_REGISTERED))}.")
    return table.choose(name, device, args, kwargs)


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """``torch.ops.ascend_deep.<name>.default(*args, **kwargs)``, past the dispatcher where it has nothing to do.

    After a first call the kernel is tried before everything else, see ``ops/_eager.py``.

    Args:
        args: the tensors of the op (``None`` for one that is absent), none of them in a list.
        kwargs: all keyword-only arguments of the schema.
    """
    if not torch.compiler.is_compiling():
        short = _SHORT.get(name)
        if short is not None and short[0] is table.PRIORITY and nothing_between(args) and not _debugging():
            try:
                return short[1](*args, **kwargs)
            except (RuntimeError, TypeError):
                pass
        elif (
            short is None and getattr(args[0], "is_cuda", False) and nothing_between(args, "cuda") and not _debugging()
        ):
            kernel = _taken(name, signature(args, kwargs))
            if kernel is not None:
                return kernel(*args, **kwargs)
        _refuse_missing(name, args)
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        try:
            return overload(*args, **kwargs)
        except RuntimeError:
            wrong = wrong_type(name, overload._schema, args, kwargs)
            if wrong is None:
                raise
        raise wrong
    return getattr(getattr(torch.ops, NAMESPACE), name).default(*args, **kwargs)


def _refuse_missing(name: str, args: tuple[Any, ...]) -> None:
    """Raise ``TypeError`` for a required tensor that is none; torch lets ``None`` through to the kernels."""
    for i, argument in _REQUIRED[name]:
        if not isinstance(args[i], torch.Tensor):
            found = "None" if args[i] is None else f"a {type(args[i]).__name__}"
            raise TypeError(f"{name}: {argument} is {found}; it must be a tensor.")


def _taken(name: str, key: tuple[Any, ...] | None) -> Callable[..., Any] | None:
    """The kernel that took a call of op ``name`` with this signature, from the table as it is now."""
    found = _TAKEN[name].get(key) if key is not None and name in _TAKEN else None
    return found[1] if found is not None and found[0] is table.PRIORITY else None


def _debugging() -> bool:
    # os.environ decodes in Python, which costs a call whose code is not in the caches more than the checks do. Where
    # it keeps its bytes in a dict, that is read.
    raw = getattr(os.environ, "_data", None)
    if type(raw) is dict and os.name == "posix":
        return raw.get(b"ASCEND_DEEP_DEBUG") == b"1"
    return os.environ.get("ASCEND_DEEP_DEBUG") == "1"


def _refuse_reference(name: str, device: str, choice: Choice) -> RuntimeError:
    why = "; ".join(str(refusal) for refusal in choice.refusals) or f"no provider is listed for device {device!r}."
    return RuntimeError(f"strict: no provider takes this call of {NAMESPACE}::{name} on {device}: {why}")


def register(op: OpDef) -> None:
    """Register ``op`` with ``torch.library``: definition, kernel, fake, autograd and autocast. Once per process.

    Registering the same name again (after ``importlib.reload``) replaces what the op does but not its schema.
    """
    known = op.name in _REGISTERED or hasattr(getattr(torch.ops, NAMESPACE), op.name)
    _REGISTERED[op.name] = op
    _SHORT.pop(op.name, None)
    _TAKEN.pop(op.name, None)
    if known:
        return
    name = op.name
    qualified = f"{NAMESPACE}::{name}"
    _LIBRARY.define(f"{name}{op.schema}", tags=(torch.Tag.pt2_compliant_tag,))

    # Both names are held by the closures that the dispatcher keeps for ever, and so is the library.
    table_of_ops, library, short, taken = _REGISTERED, _LIBRARY, _SHORT, _TAKEN
    written = written_tensors(op.overload._schema)
    _REQUIRED[name] = required_tensors(op.overload._schema)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        definition = table_of_ops[name]
        _refuse_missing(name, args)
        if written:
            refuse_shared_memory(name, written, args)
        key = signature(args, kwargs) if args[0].is_cuda and not _debugging() else None
        known = _taken(name, key)
        if known is not None:
            return known(*args, **kwargs)
        definition.check(*args, **kwargs)
        if definition.debug is not None and _debugging():
            definition.debug(*args, **kwargs)
        device = args[0].device.type
        choice = table.choose(name, device, args, kwargs)
        if choice.provider is not None:
            if name in choice.provider.direct:
                short[name] = (table.PRIORITY, choice.provider.direct[name]())
            if key is not None:
                calls = taken.setdefault(name, {})
                if len(calls) >= _TAKEN_AT_MOST:
                    calls.clear()
                calls[key] = (table.PRIORITY, choice.provider.kernels[name])
            return choice.provider.kernels[name](*args, **kwargs)
        if _STRICT.get() and not definition.composed:
            raise _refuse_reference(name, device, choice)
        return definition.reference(*args, **kwargs)

    def fake(*args: Any, **kwargs: Any) -> Any:
        definition = table_of_ops[name]
        _refuse_missing(name, args)
        definition.check(*args, **kwargs)
        return definition.fake(*args, **kwargs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
        setup = table_of_ops[name].setup_context
        if setup is not None:
            setup(ctx, inputs, keyword_only_inputs, output)

    def positional_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup_context(ctx, inputs, {}, output)

    def backward(ctx: Any, *grads: Any) -> Any:
        definition = table_of_ops[name]
        if definition.backward is None:
            raise RuntimeError(f"{qualified} has no backward: {definition.no_backward}")
        return definition.backward(ctx, *grads)

    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=library)
    has_keywords = any(argument.kwarg_only for argument in op.overload._schema.arguments)
    setup = setup_context if has_keywords else positional_setup_context
    library.impl(name, autograd_kernel(op.overload, kernel, backward, setup), "Autograd", with_keyset=True)
    for key in AUTOCAST_KEYS:
        library.impl(name, autocast_kernel(op.overload, lambda: table_of_ops[name].autocast, key), key)
