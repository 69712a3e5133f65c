"""The activation table that ``swiglu`` and ``moe_experts`` share.

An activation takes ``gate`` and ``up`` (``None`` in experts without a gate) of one shape and returns one tensor of
that shape. With an inner function f, a limit L (``None``: no limit) and a factor alpha:

========================  =========================================================  ============================
name                      value                                                      models
========================  =========================================================  ============================
silu, gelu, gelu_tanh,    f(g) * u, with g = min(gate, L), u = clamp(up, -L, L);     silu: most; with limit:
relu, relu2, sigmoid      without up: f(g)                                           DeepSeek-V4; relu2: Nemotron-H
silu_clamp                min(silu(gate), L) * clamp(up, -L, L)                      Step-3
swiglu_oai                (u + 1) * g * sigmoid(alpha * g), g and u limited as in    GPT-OSS, MiniMax-M3
                          the first row
silu_softcap              c(g, alpha) * sigmoid(g) * c(u, L), nothing limited, with  Inkling-2
                          c(v, cap) = cap * tanh(v / cap) and c(u, None) = u
========================  =========================================================  ============================

``gelu`` is the exact one (erf), ``gelu_tanh`` the tanh approximation, ``relu2`` is relu(x)^2. ``alpha`` must be 1 for
every activation that does not use it: a factor that would be ignored is an error. Derivatives at the kinks follow
torch: ``clamp`` passes the gradient where the value equals the limit, ``relu`` passes none at 0.

Every function here works in the dtype it is given (callers give f32 or f64) and is written in differentiable torch
operations, so the backward of ``swiglu`` can be differentiated again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_deep.ops import _check

__all__ = ["ACTIVATIONS", "Activation", "check_activation"]


@dataclass(frozen=True)
class Activation:
    """One row of the table: value and derivative of the inner function, and how gate and up go through it."""

    name: str
    inner: Callable[[Tensor, float], Tensor]
    derivative: Callable[[Tensor, float], Tensor]
    uses_alpha: bool = False
    up_offset: float = 0.0
    clamp_after: bool = False
    gated_only: bool = False
    softcap: bool = False  # the limit bends up instead of cutting it off, and leaves the gate alone

    def forward(self, gate: Tensor, up: Tensor | None, alpha: float, limit: float | None) -> Tensor:
        """The activation, same shape and dtype as ``gate``. Never returns ``gate`` itself."""
        value, _ = self._gate(gate, alpha, limit, derivative=False)
        return value if up is None else value * self._up(up, limit)

    def backward(
        self, grad: Tensor, gate: Tensor, up: Tensor | None, alpha: float, limit: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients for ``gate`` and ``up``, given ``grad`` of the value."""
        value, slope = self._gate(gate, alpha, limit, derivative=True)
        assert slope is not None
        if up is None:
            return grad * slope, None
        d_up = grad * value
        if limit is not None and self.softcap:
            d_up = d_up * (1 - torch.tanh(up / limit).square())
        elif limit is not None:
            d_up = torch.where(up.abs() <= limit, d_up, 0.0)
        return grad * self._up(up, limit) * slope, d_up

    def _gate(self, gate: Tensor, alpha: float, limit: float | None, derivative: bool) -> tuple[Tensor, Tensor | None]:
        limit = None if self.softcap else limit
        clamped = gate if limit is None or self.clamp_after else gate.clamp(max=limit)
        value = self.inner(clamped, alpha)
        slope = self.derivative(clamped, alpha) if derivative else None
        if limit is not None:
            if slope is not None:
                slope = torch.where((value if self.clamp_after else gate) <= limit, slope, 0.0)
            if self.clamp_after:
                value = value.clamp(max=limit)
        return value, slope

    def _up(self, up: Tensor, limit: float | None) -> Tensor:
        if self.softcap:
            return up.clone() if limit is None else limit * torch.tanh(up / limit)
        clamped = up if limit is None else up.clamp(-limit, limit)
        return clamped + self.up_offset if self.up_offset else clamped


def _silu(x: Tensor, alpha: float) -> Tensor:
    return torch.nn.functional.silu(x)


def _d_silu(x: Tensor, alpha: float) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _gelu(x: Tensor, alpha: float) -> Tensor:
    return torch.nn.functional.gelu(x)


def _d_gelu(x: Tensor, alpha: float) -> Tensor:
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * density


def _gelu_tanh(x: Tensor, alpha: float) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _d_gelu_tanh(x: Tensor, alpha: float) -> Tensor:
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)


def _relu(x: Tensor, alpha: float) -> Tensor:
    return torch.relu(x)


def _d_relu(x: Tensor, alpha: float) -> Tensor:
    return (x > 0).to(x.dtype)


def _relu2(x: Tensor, alpha: float) -> Tensor:
    return torch.relu(x).square()


def _d_relu2(x: Tensor, alpha: float) -> Tensor:
    return 2 * torch.relu(x)


def _sigmoid(x: Tensor, alpha: float) -> Tensor:
    return torch.sigmoid(x)


def _d_sigmoid(x: Tensor, alpha: float) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


def _silu_alpha(x: Tensor, alpha: float) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def _d_silu_alpha(x: Tensor, alpha: float) -> Tensor:
    s = torch.sigmoid(alpha * x)
    return s * (1 + alpha * x * (1 - s))


def _silu_softcap(x: Tensor, alpha: float) -> Tensor:
    return alpha * torch.tanh(x / alpha) * torch.sigmoid(x)


def _d_silu_softcap(x: Tensor, alpha: float) -> Tensor:
    t, s = torch.tanh(x / alpha), torch.sigmoid(x)
    return s * (1 - t * t) + alpha * t * s * (1 - s)


ACTIVATIONS: Mapping[str, Activation] = {
    a.name: a
    for a in (
        Activation("silu", _silu, _d_silu),
        Activation("gelu", _gelu, _d_gelu),
        Activation("gelu_tanh", _gelu_tanh, _d_gelu_tanh),
        Activation("relu", _relu, _d_relu),
        Activation("relu2", _relu2, _d_relu2),
        Activation("sigmoid", _sigmoid, _d_sigmoid),
        Activation("silu_clamp", _silu, _d_silu, clamp_after=True),
        Activation("swiglu_oai", _silu_alpha, _d_silu_alpha, uses_alpha=True, up_offset=1.0, gated_only=True),
        Activation("silu_softcap", _silu_softcap, _d_silu_softcap, uses_alpha=True, gated_only=True, softcap=True),
    )
}


def check_activation(op: str, act: str, alpha: float, limit: float | None, gated: bool = True) -> None:
    """``ValueError`` with one sentence unless the activation is in the table and its scalars are all used."""
    activation = ACTIVATIONS.get(act)
    if activation is None:
        _check.choice(op, "act", act, ACTIVATIONS)
        return
    if alpha != 1.0 and not activation.uses_alpha:
        raise ValueError(f"{op}: alpha is {alpha}, but act {act!r} does not use it; it must be 1.0 there.")
    if activation.softcap and not alpha > 0:
        raise ValueError(f"{op}: alpha is {alpha}; act {act!r} caps the gate at it, so it must be positive.")
    if limit is not None and not limit > 0:
        raise ValueError(f"{op}: limit is {limit}; it must be positive, or None for no limit.")
    if activation.gated_only and not gated:
        raise ValueError(f"{op}: act {act!r} needs a gate and an up half, but w13 has as many rows as w2 has columns.")
