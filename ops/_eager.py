"""The short way of an eager call: straight to a kernel that checks its arguments itself.

Between ``torch.ops`` and a kernel stand the dispatcher, twice, the autograd kernel, the argument checks and the choice
of a provider. All of that is Python that a large product before the call has pushed out of the caches, which a decode
step's experts feel. A kernel that accepts nothing that the op refuses (``tests/ops`` make
sure of that) can be tried first; what it refuses takes the long way, which knows the reason or another provider. The
dispatcher is left out only if nobody there would do anything: no gradient, no mode, no transform, no autocast, no
tensor subclass. Lazy bits are resolved by the dispatcher when the kernel, an op itself, is called.

Kernels on CUDA are Python functions that check nothing. There the short way goes by ``signature``: a call whose tensors
and numbers look like those of a call that was checked, and taken by a provider, goes to that provider's kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["nothing_between", "signature"]

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_SCALARS = frozenset((bool, int, float, str, torch.dtype, type(None)))


def signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """All that checks of arguments and limits of providers may read off a call; ``None`` if it has other arguments."""
    key: list[Any] = []
    add = key.append
    for a in args:
        if a is None:
            add(None)
            continue
        if type(a) not in _PLAIN:
            return None
        add(a.dtype)
        add(a.shape)
        add(a.stride())
        add(a.get_device())
    for name, value in kwargs.items():
        kind = type(value)
        if kind is tuple or kind is list:  # block sizes
            for v in value:
                if type(v) is not int:
                    return None
            value = tuple(value)
        elif kind not in _SCALARS:
            return None
        add(name)
        add(value)
    return tuple(key)


def nothing_between(args: tuple[Any, ...], device: str = "cpu") -> bool:
    """Whether the dispatcher would hand these tensors (or ``None``) to a kernel of ``device`` and do nothing else.

    Args:
        args: the tensors of a call.
        device: ``"cpu"``, where the kernel is an op, which resolves lazy bits, or ``"cuda"``, where it reads memory.
    """
    gradients = torch.is_grad_enabled()
    cuda = device == "cuda"
    for a in args:
        if a is not None and (
            type(a) not in _PLAIN
            or (not a.is_cuda or a.is_neg() if cuda else not a.is_cpu)
            or (gradients and a.requires_grad)
        ):
            return False
    return not (
        forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.is_autocast_enabled(device)
    )
