"""The kernels that stand between a call and the implementation of an op: autograd and autocast.

Both exist in ``torch.library``, in forms that do not fit here: ``register_autocast`` takes no keyword arguments and
casts every floating tensor, and the kernel of ``register_autograd`` sends every call through the dispatcher a second
time, which costs more than 10 microseconds for an op of 15 arguments even if nothing needs a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from ascend_deep.ops._present import required_tensors

__all__ = ["AUTOCAST_KEYS", "autocast_kernel", "autograd_kernel", "goes_to_backend"]

AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1")
_BACKENDS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA, torch._C.DispatchKey.PrivateUse1)


def goes_to_backend(keyset: torch._C.DispatchKeySet) -> bool:
    """True if nothing stands between autograd and the backend: no mode, subclass, functionalisation or lazy bit."""
    below = (keyset & torch._C._after_autograd_keyset).remove(torch._C.DispatchKey.ADInplaceOrView)
    return below.highestPriorityTypeId() in _BACKENDS


def refuse_tangents(name: str, args: tuple[Any, ...]) -> None:
    """Raise ``NotImplementedError`` for a tensor with a tangent, which would be lost in silence."""
    for a in args:
        if isinstance(a, torch.Tensor) and a.is_floating_point() and forward_ad.unpack_dual(a).tangent is not None:
            raise NotImplementedError(
                f"{name} has no forward-mode derivative; use reverse mode (backward, torch.func.vjp, jacrev)."
            )


def autograd_kernel(
    overload: torch._ops.OpOverload,
    kernel: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
) -> Callable[..., Any]:
    """The kernel for the Autograd key: torch's own if a gradient may be needed, otherwise straight to ``kernel``.

    An op that writes into an argument has no result that could carry a gradient, so torch would drop it in silence:
    here ``backward`` is asked at once, and raises. The version of what was written is counted up, because a kernel that
    writes memory does not do that, and autograd could no longer tell that a tensor which it saved was changed.
    """
    recording = make_autograd_impl(overload, Info(backward, setup_context))
    written = tuple(
        i for i, a in enumerate(overload._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    # The same few key sets come again and again; deciding costs several calls into C++, a dict look-up one.
    direct: dict[int, bool] = {}

    def autograd(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            refuse_tangents(str(overload.name()), args)
        if torch.is_grad_enabled():
            for a in args:
                if isinstance(a, torch.Tensor) and a.requires_grad:
                    return backward(None) if written else recording(keyset, *args, **kwargs)
        bits = keyset.raw_repr()
        if bits not in direct:
            direct[bits] = goes_to_backend(keyset)
        if not direct[bits]:
            return recording(keyset, *args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return kernel(*args, **kwargs)

    def writing(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        result = autograd(keyset, *args, **kwargs)
        for i in written:
            if not args[i].is_inference():
                torch.autograd.graph.increment_version(args[i])
        return result

    return writing if written else autograd


def autocast_kernel(
    overload: torch._ops.OpOverload, rule: Callable[[], Callable[..., Any] | None], key: str
) -> Callable[..., Any]:
    """The op under autocast: the casts of ``rule()``, if any, then the op with autocast off.

    Without a kernel here the matmuls inside a reference body would be cast once more, one by one.
    """
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    required = [i for i, _ in required_tensors(overload._schema)]

    def autocast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            casts = rule()
            if casts is not None and all(args[i] is not None for i in required):  # else the op says what is missing
                args, kwargs = casts(args, kwargs, torch.get_autocast_dtype(args[0].device.type))
            return overload(*args, **kwargs)

    return autocast
