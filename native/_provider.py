"""What a provider is: one implementation of some ops on one device, with its limits as data.

A provider answers two questions before it is asked to run: is the library there (``supported``), and can it
take these arguments (``supports``). Both answers carry a sentence when they are "no"; the sentence ends up in
the report, so that a user can see why a slower implementation ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

__all__ = ["Choice", "Provider", "Refusal"]


@dataclass(frozen=True)
class Refusal:
    """Why a provider does not run a call. ``reason`` is one full sentence."""

    provider: str
    reason: str

    def __str__(self) -> str:
        return f"{self.provider}: {self.reason}"


@dataclass(frozen=True)
class Provider:
    """One implementation of some ops on one kind of device.

    Attributes:
        name: as reports print it, e.g. ``"native.cpu"``.
        device: torch device type the provider runs on, e.g. ``"cpu"``.
        unavailable: returns ``None`` if the library behind the provider can be used in this process, else one
            sentence that says what is missing. Must not raise and should be cheap after the first call.
        kernels: op name (without namespace) to the callable that runs it. It takes exactly the arguments of the
            op's schema, positionally for positional arguments and by keyword for keyword-only ones.
        limits: op name to a function of the same arguments that returns ``None`` if the kernel takes them, else
            one sentence. Ops without an entry have no limits beyond those of the op itself. Limits read only
            shapes, dtypes, strides and scalars, never values, so they also work on fake tensors.
        direct: op name to a function that returns the kernel as a torch op of its own, with the schema of the op, a
            fake implementation, and checks that accept nothing the op refuses. Eager calls go to it first, and
            compiled graphs contain it. Not asked before the provider has accepted a call.
        finish: rewrites a compiled graph after its ops became those of ``direct``, in place, so that calling them costs
            less. Results stay the same, bit by bit.
        version: part of the cache key of compiled graphs.
    """

    name: str
    device: str
    unavailable: Callable[[], str | None]
    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    limits: Mapping[str, Callable[..., str | None]] = field(default_factory=dict)
    direct: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    finish: Callable[[fx.Graph], None] | None = None
    version: str = "1"

    def refusal(self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Refusal | None:
        """``None`` if this provider can run ``op`` with these arguments, else why not."""
        if op not in self.kernels:
            return Refusal(self.name, f"it has no kernel for {op}.")
        missing = self.unavailable()
        if missing is not None:
            return Refusal(self.name, missing)
        limit = self.limits.get(op)
        reason = limit(*args, **kwargs) if limit is not None else None
        return Refusal(self.name, reason) if reason is not None else None


@dataclass(frozen=True)
class Choice:
    """The provider that runs a call (``None``: the reference body), and who refused before it."""

    provider: Provider | None
    refusals: tuple[Refusal, ...] = ()

    @property
    def name(self) -> str:
        return self.provider.name if self.provider is not None else "reference"
