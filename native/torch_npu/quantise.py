"""``quant_fp8`` and ``swiglu_quant`` by ``npu_dynamic_mx_quant``.

Its second way of making scales is ours to the bit: the least power of two not below ``max(amax, bound) / 448``, and
products with its reciprocal, to nearest even. The bound is what makes the scale of a block of zeros, and the vendor has
it from CANN 9.2.0-beta.1 on; before, the call is refused. ``npu_dynamic_quant``, ``npu_dynamic_block_quant`` and
``npu_swiglu_mx_quant`` have no lower bound at all, and FP4 has it in none, so ``quant_fp4`` and scales that are no
powers of two stay with the reference body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import SwigluQuant
from ascend_deep.native.torch_npu import soc
from ascend_deep.native.torch_npu._call import Spec, known
from ascend_deep.native.torch_npu.activation import PLAIN, activate
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.formats import FP8, packed, scales_of
from ascend_deep.native.torch_npu.gemm import EMPTY
from ascend_deep.native.torch_npu.soc import Target

_NO_BOUND = (
    "ue8m0 is False; the vendor's quantisation with other scales has no lower bound of them, so a block of zeros would "
    "get another scale."
)

__all__ = ["quant_fp8", "quant_limits", "swiglu_quant", "swiglu_quant_limits"]

# The least magnitude that a block is taken to have; the op's definition.
_BOUND = 1e-4


def _how(gran_k: int) -> dict[str, Any]:
    rule = {"scale_alg": 1, "dst_type_max": 0.0, "max_low_bound": _BOUND}
    return {"axis": -1, "round_mode": "rint", "dst_type": FP8, "block_size": int(gran_k), **rule}


def _quantised(x: Tensor, gran_k: int, sf_format: str) -> tuple[Tensor, Tensor]:
    data, pairs = torch.ops.npu.npu_dynamic_mx_quant(x, **_how(gran_k))
    groups = (x.shape[-1] + gran_k - 1) // gran_k
    return data, scales_of(pairs, groups) if sf_format == "fp32" else packed(pairs, groups, sf_format)


def quant_fp8(x: Tensor, *, gran: Sequence[int], ue8m0: bool, sf_format: str) -> tuple[Tensor, Tensor]:
    """As the op says; the schema's arguments."""
    return _quantised(x.contiguous(), gran[1], sf_format)


def quant_limits(target: Target, x: Tensor, *, gran: Sequence[int], ue8m0: bool, sf_format: str) -> str | None:
    """Why the vendor's op does not compute this call of ``quant_fp8``; ``None`` if it does."""
    if not ue8m0:
        return _NO_BOUND
    if int(gran[0]) != 1:
        return f"a scale covers {int(gran[0])} rows; the vendor's MX quantisation has blocks within a row."
    return _limits(target, x, x.dtype, int(gran[1]))


def _limits(target: Target, x: Tensor | Spec, dtype: torch.dtype, gran_k: int) -> str | None:
    if any(known(size) and size == 0 for size in x.shape):
        return f"the input {EMPTY}"
    return refusal("npu_dynamic_mx_quant", target, Spec(tuple(x.shape), dtype), **_how(gran_k))


@takes(SwigluQuant)
def swiglu_quant(args: SwigluQuant) -> tuple[Tensor, Tensor]:
    """As the op says. float32 between the activation and the codes."""
    target = soc.current()
    assert target is not None  # the limits refuse where there is none
    h = args.h.to(torch.float32).contiguous()
    out = activate(h, args.act, args.alpha, args.limit, args.interleaved, True, target)
    if args.row_weight is not None:
        out = out * args.row_weight.to(torch.float32).unsqueeze(-1)
    return _quantised(out, args.gran_k, args.sf_format)


@takes(SwigluQuant)
def swiglu_quant_limits(target: Target, args: SwigluQuant) -> str | None:
    """Why the vendor's ops do not compute this call of ``swiglu_quant``; ``None`` if they do."""
    if args.h.dtype == torch.float64:
        return "h has dtype torch.float64; the vendor's ops have 16 and 32 bits."
    if args.act not in (*PLAIN, "swiglu_oai", "silu_clamp"):
        return f"act is {args.act!r}, which this provider does not compute."
    if not args.ue8m0:
        return _NO_BOUND
    half = (*args.h.shape[:-1], args.h.shape[-1] // 2)
    return _limits(target, Spec(half, torch.float32), torch.float32, int(args.gran_k))
