"""How an op is declared and registered.

Each op family file holds ``OpDef`` values; ``ops/__init__.py`` lists them in one table and registers them with
``torch.library`` under the namespace ``ascend_deep``. An op consists of

* a schema without default values (an op with a ``Tensor[]`` input and any default breaks ``register_autograd``),
* a reference body in plain torch: the definition of the op,
* a fake (shapes, dtypes and strides only, symbolic sizes allowed),
* a backward, or a sentence that says why there is none: an op without a backward raises, because torch would
  otherwise return zero gradients in silence,
* an autocast rule: what eager PyTorch would have computed under autocast,
* a tolerance per dtype with its reason, and
* a generator of sample inputs that includes the edge cases.

At run time the op asks the provider table for an implementation and falls back to the reference body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ascend_deep.native import table

__all__ = ["NAMESPACE", "OpDef", "Sample", "Tolerance", "register"]

NAMESPACE = "ascend_deep"

# One Library object per process keeps the registrations alive.
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


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
    """Everything there is to know about one op; see the module docstring."""

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    tolerance: Mapping[torch.dtype, Tolerance]
    samples: Callable[[], Iterator[Sample]]
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    no_backward: str = ""
    autocast: Callable[..., Any] | None = None
    differentiable: tuple[str, ...] = ()

    @property
    def overload(self) -> torch._ops.OpOverload:
        """``torch.ops.ascend_deep.<name>.default``."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default


def register(op: OpDef) -> None:
    """Register ``op`` with ``torch.library``: definition, kernel, fake, autograd and autocast."""
    _LIBRARY.define(f"{op.name}{op.schema}")
    qualified = f"{NAMESPACE}::{op.name}"

    def kernel(*args: Any, **kwargs: Any) -> Any:
        device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), "cpu")
        choice = table.choose(op.name, device, args, kwargs)
        if choice.provider is None:
            return op.reference(*args, **kwargs)
        return choice.provider.kernels[op.name](*args, **kwargs)

    _LIBRARY.impl(op.name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, op.fake, lib=_LIBRARY)
    if op.backward is not None:
        torch.library.register_autograd(qualified, op.backward, setup_context=op.setup_context, lib=_LIBRARY)
    else:
        reason = op.no_backward

        def refuse(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError(f"{NAMESPACE}::{op.name} has no backward: {reason}")

        torch.library.register_autograd(qualified, refuse, lib=_LIBRARY)
