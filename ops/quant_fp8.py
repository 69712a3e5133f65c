"""``quant_fp8``: blocks of a matrix as E4M3 and one scale per block.

``ops/_quant.py`` has the rule, ``ops/_sf.py`` the forms of the scales. ``gran`` = (1, 128) is one scale per token and
128 columns, (128, 128) that of weights, (128, 1) that of operands reduced over their rows, (1, 32) MX. Contract: B.1
and F of the DeepGEMM operator list.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ascend_deep.ops import _check, _quant, _sf
from ascend_deep.ops._op import OpDef, Tolerance, call
from ascend_deep.ops._quant_samples import quant_fp8_samples

__all__ = ["QUANT_FP8", "quant_fp8"]


def quant_fp8(x: Tensor, *, gran: Sequence[int], ue8m0: bool = False, sf_format: str = "fp32") -> tuple[Tensor, Tensor]:
    """Quantise ``x`` block by block; see the module.

    Args:
        x: [..., M, K], floating, any strides. Computed in f32.
        gran: rows and columns of a block; blocks at the end may be smaller.
        ue8m0: scales are rounded up to powers of two, which all libraries take; others only DeepGEMM on SM90.
        sf_format: ``"fp32"``, or packed ``"ue8m0x4"`` and ``"ue8m0x2"``, which need ``ue8m0`` and ``gran[0]`` = 1.

    Returns:
        data [..., M, K] float8_e4m3fn, contiguous, and scales, f32 [..., ceil(M / gran[0]), ceil(K / gran[1])] or
        packed. Not differentiable; ``fp8_linear`` is.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call("quant_fp8", x, gran=gran, ue8m0=ue8m0, sf_format=sf_format)


def _check_args(x: Tensor, *, gran: Sequence[int], ue8m0: bool, sf_format: str) -> None:
    op = "quant_fp8"
    _check.dtypes(op, "x", x, _check.FLOATING)
    _quant.check_matrix(op, "x", x)
    _sf.check_format(op, sf_format, _sf.check_gran(op, "gran", gran), ue8m0)


def _reference(x: Tensor, *, gran: Sequence[int], ue8m0: bool, sf_format: str) -> tuple[Tensor, Tensor]:
    data, scale = _quant.fp8(x, gran, ue8m0)
    return data, _quant.write_scales(scale, sf_format)


def _fake(x: Tensor, *, gran: Sequence[int], ue8m0: bool, sf_format: str) -> tuple[Tensor, Tensor]:
    sizes = _sf.check_gran("quant_fp8", "gran", gran)
    *lead, rows, columns = x.shape
    return (
        x.new_empty(x.shape, dtype=_sf.FP8),
        _quant.empty_scales(x, lead, rows, columns, sizes, sf_format),
    )


QUANT_FP8 = OpDef(
    name="quant_fp8",
    schema="(Tensor x, *, SymInt[2] gran, bool ue8m0, str sf_format) -> (Tensor, Tensor)",
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward="rounding to FP8 has no useful derivative; quantise detached tensors, or train with fp8_linear.",
    tolerance={
        dtype: Tolerance(0.0, 0.0, "one rule to the last bit: every operation of it is exact or rounded to nearest")
        for dtype in _check.FLOATING
    },
    samples=quant_fp8_samples,
)
