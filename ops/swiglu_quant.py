"""``swiglu_quant``: the gated activation of an MLP, quantised to FP8 for the product that follows.

    out = act(gate, up) * row_weight        as in ``ops/swiglu.py``, but kept in f32
    data, scales = quant_fp8(out)           blocks of one row and ``gran_k`` columns, ``ops/_quant.py``

The activation is not rounded in between, so this is more precise than the two ops one after the other. Contract: B.6,
B.7 and F of the DeepGEMM operator list, with the attributes of ``swiglu``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import SwigluQuant
from ascend_deep.ops import _check, _quant, _sf
from ascend_deep.ops._op import OpDef, Tolerance, call
from ascend_deep.ops._quant_samples import swiglu_quant_samples
from ascend_deep.ops.activations import ACTIVATIONS
from ascend_deep.ops.swiglu import check_gated, halves

__all__ = ["SWIGLU_QUANT", "swiglu_quant"]


def swiglu_quant(
    h: Tensor,
    row_weight: Tensor | None = None,
    *,
    act: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    interleaved: bool = False,
    gran_k: int = 32,
    ue8m0: bool = True,
    sf_format: str = "fp32",
) -> tuple[Tensor, Tensor]:
    """Gated activation of the halves of ``h``, quantised; see the module.

    Args:
        h: [..., M, 2 I], f32, bf16, f16 or f64 (computed in f32), any strides.
        row_weight: [..., M], f32 or the dtype of ``h``; ``None``: no scaling.
        act, alpha, limit, interleaved: as in ``swiglu``.
        gran_k: columns of the result per scale; the last group of a row may be smaller.
        ue8m0: scales are rounded up to powers of two.
        sf_format: ``"fp32"``, or packed ``"ue8m0x4"`` and ``"ue8m0x2"``, which need ``ue8m0``.

    Returns:
        data [..., M, I] float8_e4m3fn, contiguous, and scales, f32 [..., M, ceil(I / gran_k)] or packed. Not
        differentiable.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    attributes = {"act": act, "alpha": alpha, "limit": limit, "interleaved": interleaved}
    return call("swiglu_quant", h, row_weight, **attributes, gran_k=gran_k, ue8m0=ue8m0, sf_format=sf_format)


@takes(SwigluQuant)
def _check_args(args: SwigluQuant) -> None:
    op, h = "swiglu_quant", args.h
    check_gated(op, h, args.row_weight, args.act, args.alpha, args.limit)
    if h.dim() < 2:
        raise ValueError(f"{op}: h has {h.dim()} dimensions; it must be [..., M, 2 I].")
    _sf.check_format(op, args.sf_format, _quant.check_gran_k(op, args.gran_k), args.ue8m0)


@takes(SwigluQuant)
def _reference(args: SwigluQuant) -> tuple[Tensor, Tensor]:
    gate, up = halves(args.h.to(torch.float32), args.interleaved)
    out = ACTIVATIONS[args.act].forward(gate, up, args.alpha, args.limit)
    if args.row_weight is not None:
        out = out * args.row_weight.to(torch.float32).unsqueeze(-1)
    data, scale = _quant.fp8(out, (1, args.gran_k), args.ue8m0)
    return data, _quant.write_scales(scale, args.sf_format)


@takes(SwigluQuant)
def _fake(args: SwigluQuant) -> tuple[Tensor, Tensor]:
    *lead, rows, columns = args.h.shape
    return (
        args.h.new_empty((*lead, rows, columns // 2), dtype=_sf.FP8),
        _quant.empty_scales(args.h, lead, rows, columns // 2, (1, int(args.gran_k)), args.sf_format),
    )


# A result next to a tie may fall on either side: the tests count what differs by one code.
_REASON = (
    "implementations differ in exp and tanh by a few ulp of f32; a value next to a tie then rounds to the other E4M3 "
    "neighbour, 2^-3 away"
)

SWIGLU_QUANT = OpDef(
    name="swiglu_quant",
    schema=(
        "(Tensor h, Tensor? row_weight, *, str act, float alpha, float? limit, bool interleaved, SymInt gran_k, "
        "bool ue8m0, str sf_format) -> (Tensor, Tensor)"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward="rounding to FP8 has no useful derivative; in training use swiglu and fp8_linear.",
    tolerance={dtype: Tolerance(0.125, 1e-6, _REASON) for dtype in _check.FLOATING},
    samples=swiglu_quant_samples,
)
