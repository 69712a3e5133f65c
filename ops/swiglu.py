"""``swiglu``: the gated activation of an MLP, on the two halves of one tensor.

    out = act(gate, up) * row_weight        gate, up = the two halves of h, or its even and odd columns

The activations are the table in ``ops/activations.py``. Products are taken in f32 (f64 for f64 inputs) and rounded
once, to the dtype of ``h``. Contract: B.6 and F of the DeepGEMM operator list (its ``clamp`` is our ``limit``), with
the activation, alpha and the layout as attributes because models vary them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check
from ascend_deep.ops._op import OpDef, Sample, Tolerance
from ascend_deep.ops.activations import ACTIVATIONS, check_activation

__all__ = ["SWIGLU", "check_gated", "halves", "swiglu"]


def swiglu(
    h: Tensor,
    row_weight: Tensor | None = None,
    *,
    act: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Gated activation of the halves of ``h``, optionally scaled per row. Differentiable any number of times.

    Args:
        h: [..., 2 I], f32, bf16, f16 or f64, any strides.
        row_weight: [...] (the leading shape of ``h``), f32 or the dtype of ``h``; ``None``: no scaling.
        act: a name of the activation table.
        alpha: factor of ``swiglu_oai``, cap of ``silu_softcap``; 1.0 for the others.
        limit: clamp limit of gate and up; ``None``: none.
        interleaved: gate and up are the even and odd columns instead of the first and second half.

    Returns:
        [..., I] in the dtype of ``h``, contiguous.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return torch.ops.ascend_deep.swiglu.default(
        h, row_weight, act=act, alpha=alpha, limit=limit, interleaved=interleaved
    )


def check_gated(op: str, h: Tensor, row_weight: Tensor | None, act: str, alpha: float, limit: float | None) -> None:
    """The arguments of a gated activation of one tensor."""
    _check.dtypes(op, "h", h, _check.FLOATING)
    if h.dim() == 0:
        raise ValueError(f"{op}: h has 0 dimensions; it must be [..., 2 I].")
    width = h.shape[-1]
    torch._check_value(width % 2 == 0, lambda: f"{op}: the last size of h is {width}; it must be even, gate and up.")
    check_activation(op, act, alpha, limit)
    if row_weight is not None:
        _check.dtypes(op, "row_weight", row_weight, (torch.float32, h.dtype))
        _check.rank(op, "row_weight", row_weight, "the leading shape of h", h.dim() - 1)
        for dim in range(h.dim() - 1):
            _check.size(op, f"size {dim} of row_weight", row_weight.shape[dim], h.shape[dim], "the same size of h")
        _check.same_device(op, "h", h, row_weight=row_weight)


def _check_args(
    h: Tensor, row_weight: Tensor | None, *, act: str, alpha: float, limit: float | None, interleaved: bool
) -> None:
    check_gated("swiglu", h, row_weight, act, alpha, limit)


def halves(h: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up as views of ``h``."""
    if interleaved:
        return h[..., ::2], h[..., 1::2]
    half = h.shape[-1] // 2
    return h.narrow(-1, 0, half), h.narrow(-1, half, half)


def _join(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    """The inverse of ``halves``, a new tensor."""
    return torch.stack((gate, up), -1).flatten(-2) if interleaved else torch.cat((gate, up), -1)


def _reference(
    h: Tensor, row_weight: Tensor | None, *, act: str, alpha: float, limit: float | None, interleaved: bool
) -> Tensor:
    gate, up = halves(h.to(_check.compute_dtype(h.dtype)), interleaved)
    out = ACTIVATIONS[act].forward(gate, up, alpha, limit)
    if row_weight is not None:
        out = out * row_weight.to(out.dtype).unsqueeze(-1)
    return out.to(h.dtype).contiguous()


def _fake(
    h: Tensor, row_weight: Tensor | None, *, act: str, alpha: float, limit: float | None, interleaved: bool
) -> Tensor:
    return h.new_empty((*h.shape[:-1], h.shape[-1] // 2))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.attributes = keyword_only_inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Plain torch, so that the compiler fuses it with its surroundings and autograd can differentiate it again."""
    h, row_weight = ctx.saved_tensors
    a = ctx.attributes
    activation = ACTIVATIONS[a["act"]]
    dtype = _check.compute_dtype(h.dtype)
    gate, up = halves(h.to(dtype), a["interleaved"])
    grad = grad.contiguous().to(dtype)
    d_h = d_weight = None
    if row_weight is not None:
        if ctx.needs_input_grad[1]:
            value = activation.forward(gate, up, a["alpha"], a["limit"])
            d_weight = (grad * value).sum(-1).to(row_weight.dtype)
        grad = grad * row_weight.to(dtype).unsqueeze(-1)
    if ctx.needs_input_grad[0]:
        d_gate, d_up = activation.backward(grad, gate, up, a["alpha"], a["limit"])
        assert d_up is not None
        d_h = _join(d_gate, d_up, a["interleaved"]).to(h.dtype)
    return d_h, d_weight


_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "silu": {"act": "silu", "alpha": 1.0, "limit": None},
    "silu_limit": {"act": "silu", "alpha": 1.0, "limit": 0.7},
    "gelu": {"act": "gelu", "alpha": 1.0, "limit": None},
    "gelu_tanh": {"act": "gelu_tanh", "alpha": 1.0, "limit": None},
    "relu": {"act": "relu", "alpha": 1.0, "limit": None},
    "relu2": {"act": "relu2", "alpha": 1.0, "limit": 1.3},
    "sigmoid": {"act": "sigmoid", "alpha": 1.0, "limit": None},
    "silu_clamp": {"act": "silu_clamp", "alpha": 1.0, "limit": 0.4},
    "swiglu_oai": {"act": "swiglu_oai", "alpha": 1.702, "limit": 0.9},
    "silu_softcap": {"act": "silu_softcap", "alpha": 1.2, "limit": 0.8},
}


def _samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g) * 1.5

    for interleaved in (False, True):
        layout = "interleaved" if interleaved else "halves"
        for name, attributes in _ATTRIBUTES.items():
            yield Sample(f"{name}-{layout}", (randn(5, 14), None), {**attributes, "interleaved": interleaved})
        silu = {**_ATTRIBUTES["silu"], "interleaved": interleaved}
        oai = {**_ATTRIBUTES["swiglu_oai"], "interleaved": interleaved}
        yield Sample(f"row_weight-{layout}", (randn(2, 3, 10), randn(2, 3)), silu)
        yield Sample(f"no_rows-{layout}", (randn(0, 6), randn(0)), silu)
        yield Sample(f"one_row-{layout}", (randn(1, 6), None), silu)
        yield Sample(f"vector-{layout}", (randn(8), None), oai)
        yield Sample(f"transposed-{layout}", (randn(12, 4).t(), randn(4)), oai)
        yield Sample(f"sliced-{layout}", (randn(9, 20)[::2, 3:17], randn(9)[::2]), oai)
        yield Sample(f"bf16-{layout}", (randn(7, 18).bfloat16(), randn(7)), oai)
        yield Sample(f"f16-{layout}", (randn(7, 18).half(), randn(7).half()), silu)


_REASON = "elementwise in f32; implementations differ in exp and tanh by a few ulp and in the one rounding at the end"

SWIGLU = OpDef(
    name="swiglu",
    schema="(Tensor h, Tensor? row_weight, *, str act, float alpha, float? limit, bool interleaved) -> Tensor",
    check=_check_args,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    tolerance={
        torch.float64: Tolerance(1e-12, 1e-14, _REASON),
        torch.float32: Tolerance(2e-6, 1e-6, _REASON),
        torch.bfloat16: Tolerance(8e-3, 1e-5, _REASON + ", half a bf16 ulp is 2^-9"),
        torch.float16: Tolerance(1e-3, 1e-5, _REASON + ", half an f16 ulp is 2^-12"),
    },
    samples=_samples,
    differentiable=("h", "row_weight"),
)
