"""``dequant``: FP8 or FP4 data and their scales back to numbers.

x[i, k] * sf[i // gran[0], k // gran[1]], one product in f32, rounded once more if ``out_dtype`` is not f32. NaN codes
and NaN scales stay NaN. ``ops/_sf.py`` has the formats. Contract: B.1 and F of the DeepGEMM operator list.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_deep.ops import _check, _quant, _sf
from ascend_deep.ops._op import OpDef, Tolerance, call
from ascend_deep.ops._quant_samples import dequant_samples

__all__ = ["DEQUANT", "dequant"]


def dequant(
    x: Tensor,
    sf: Tensor,
    *,
    gran: Sequence[int],
    sf_format: str = "fp32",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The numbers that ``x`` and ``sf`` stand for; see the module.

    Args:
        x: [..., M, K] float8_e4m3fn, or FP4 pairs [..., M, K / 2] in int8, uint8 or float4_e2m1fn_x2; any strides.
        sf: scales in the form ``sf_format``, any strides.
        gran: rows and columns of a block; packed scales need ``gran[0]`` = 1.
        sf_format: ``"fp32"``, ``"ue8m0x4"`` (int32) or ``"ue8m0x2"`` (int16).
        out_dtype: floating; ``None``: f32.

    Returns:
        [..., M, K], contiguous. Not differentiable.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call("dequant", x, sf, gran=gran, sf_format=sf_format, out_dtype=out_dtype)


def _check_args(x: Tensor, sf: Tensor, *, gran: Sequence[int], sf_format: str, out_dtype: torch.dtype | None) -> None:
    op = "dequant"
    _check.dtypes(op, "x", x, _sf.QUANTISED)
    _quant.check_matrix(op, "x", x)
    _check.choice(op, "sf_format", sf_format, _sf.FORMATS)
    _check.dtypes(op, "sf", sf, (_sf.FORMATS[sf_format],))
    *lead, rows, _ = x.shape
    _sf.check_sf(op, "sf", sf, lead, rows, _sf.last_size(x), gran, "gran")
    if out_dtype is not None and out_dtype not in _check.FLOATING:
        found = str(out_dtype).removeprefix("torch.")
        raise TypeError(f"{op}: out_dtype is {found}; accepted: float32, bfloat16, float16, float64.")
    _check.same_device(op, "x", x, sf=sf)


def _reference(x: Tensor, sf: Tensor, *, gran: Sequence[int], sf_format: str, out_dtype: torch.dtype | None) -> Tensor:
    return _sf.dequantise(x, sf, gran).to(out_dtype or torch.float32).contiguous()


def _fake(x: Tensor, sf: Tensor, *, gran: Sequence[int], sf_format: str, out_dtype: torch.dtype | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], _sf.last_size(x)), dtype=out_dtype or torch.float32)


DEQUANT = OpDef(
    name="dequant",
    schema="(Tensor x, Tensor sf, *, SymInt[2] gran, str sf_format, ScalarType? out_dtype) -> Tensor",
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward="its inputs are quantised; gradients go through fp8_linear.",
    tolerance={
        dtype: Tolerance(0.0, 0.0, "one product in f32 and one rounding to the dtype of the result")
        for dtype in _sf.QUANTISED
    },
    samples=dequant_samples,
)
