"""Gated activations by the vendor's ops, and in plain torch where there is none.

    npu_swiglu          silu(gate) * up of two halves
    npu_clipped_swiglu  g * sigmoid(alpha * g) * (clamp(up, -L, L) + bias), g = min(gate, L), halves or interleaved

``silu`` with a limit is the second with alpha 1 and bias 0, ``swiglu_oai`` with a limit is it with bias 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ascend_deep.native.torch_npu._call import T
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.soc import Target

__all__ = ["PLAIN", "activate", "swiglu", "swiglu_limits", "vendor_op"]

PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
"""Inner functions of the activations that are computed without a vendor op; see ``ops/activations.py``."""


def vendor_op(act: str, limit: float | None, interleaved: bool, gated: bool) -> str | None:
    """The vendor op that computes this activation; ``None`` if there is none."""
    if gated and act == "silu" and limit is None and not interleaved:
        return "npu_swiglu"
    if gated and act in ("silu", "swiglu_oai") and limit is not None:
        return "npu_clipped_swiglu"
    return None


def activate(
    h: Tensor, act: str, alpha: float, limit: float | None, interleaved: bool, gated: bool, target: Target
) -> Tensor:
    """The activation of ``h`` [M, N] in the dtype of ``h``: [M, N / 2], or [M, N] without a gate."""
    op = vendor_op(act, limit, interleaved, gated)
    if op is not None and _refusal(target, op, h, alpha, limit, interleaved) is None:
        return _call(op, h, act, alpha, limit, interleaved)
    # Plain torch: in f32, rounded once, as the op defines it.
    x = h.to(torch.float32)
    if not gated:
        return PLAIN[act](x if limit is None else x.clamp(max=limit)).to(h.dtype)
    if interleaved:
        gate, up = x[..., ::2], x[..., 1::2]
    else:
        gate, up = x.chunk(2, -1)
    if limit is not None:
        up = up.clamp(-limit, limit)
        gate = gate if act == "silu_clamp" else gate.clamp(max=limit)
    if act == "swiglu_oai":
        return (gate * torch.sigmoid(alpha * gate) * (up + 1.0)).to(h.dtype)
    if act == "silu_clamp":
        value = F.silu(gate)
        return ((value if limit is None else value.clamp(max=limit)) * up).to(h.dtype)
    return (PLAIN[act](gate) * up).to(h.dtype)


def _call(op: str, h: Tensor, act: str, alpha: float, limit: float | None, interleaved: bool) -> Tensor:
    if op == "npu_swiglu":
        out: Tensor = torch.ops.npu.npu_swiglu(h, -1)
        return out
    oai = act == "swiglu_oai"
    out = torch.ops.npu.npu_clipped_swiglu(
        h, dim=-1, alpha=alpha if oai else 1.0, limit=limit, bias=1.0 if oai else 0.0, interleaved=interleaved
    )
    return out


def _refusal(target: Target, op: str, h: T, alpha: float, limit: float | None, interleaved: bool) -> str | None:
    if op == "npu_swiglu":
        return refusal(op, target, h, -1)
    return refusal(op, target, h, dim=-1, alpha=alpha, limit=limit, interleaved=interleaved)


def swiglu(
    h: Tensor, row_weight: Tensor | None, *, act: str, alpha: float, limit: float | None, interleaved: bool
) -> Tensor:
    """As the op says; the schema's arguments."""
    op = vendor_op(act, limit, interleaved, gated=True)
    assert op is not None  # the limits refuse all others
    out = _call(op, h.contiguous(), act, alpha, limit, interleaved)
    return out if row_weight is None else out * row_weight.unsqueeze(-1)


def swiglu_limits(
    target: Target,
    h: Tensor,
    row_weight: Tensor | None,
    *,
    act: str,
    alpha: float,
    limit: float | None,
    interleaved: bool,
) -> str | None:
    """Why the vendor's ops do not compute this call of ``swiglu``; ``None`` if they do."""
    op = vendor_op(act, limit, interleaved, gated=True)
    if op is None:
        layout = "interleaved" if interleaved else "halves"
        return f"act is {act!r} with limit {limit} and {layout}; torch_npu has no op for that combination."
    if row_weight is not None and h.dtype != torch.float32:
        return f"there is a row_weight and h has dtype {h.dtype}; the vendor's op rounds before the weight is applied."
    if any(isinstance(size, int) and size == 0 for size in h.shape):
        return "h is empty; the vendor's documents do not allow empty tensors."
    from ascend_deep.native.torch_npu._call import Spec

    return _refusal(target, op, Spec(tuple(h.shape), h.dtype), alpha, limit, interleaved)
