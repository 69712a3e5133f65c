"""``quant_fp4``: rows of a matrix as E2M1 pairs and one power of two per ``gran_k`` columns.

``ops/_quant.py`` has the rule, ``ops/_sf.py`` the forms of the scales. The scales are powers of two, since FP4 exists
only in libraries that take no others. Contract: B.1 and F of the DeepGEMM operator list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_deep.ops import _check, _quant, _sf
from ascend_deep.ops._op import OpDef, Tolerance, call
from ascend_deep.ops._quant_samples import quant_fp4_samples

__all__ = ["QUANT_FP4", "quant_fp4"]


def quant_fp4(x: Tensor, *, gran_k: int = 32, sf_format: str = "fp32") -> tuple[Tensor, Tensor]:
    """Quantise ``x`` group by group; see the module.

    Args:
        x: [..., M, K], floating, K even, any strides. Computed in f32.
        gran_k: columns per scale; the last group of a row may be smaller.
        sf_format: ``"fp32"``, ``"ue8m0x4"`` or ``"ue8m0x2"``.

    Returns:
        data [..., M, K / 2] int8, contiguous, low nibble first, and scales, f32 [..., M, ceil(K / gran_k)] or packed.
        Not differentiable.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call("quant_fp4", x, gran_k=gran_k, sf_format=sf_format)


def _check_args(x: Tensor, *, gran_k: int, sf_format: str) -> None:
    op = "quant_fp4"
    _check.dtypes(op, "x", x, _check.FLOATING)
    _quant.check_matrix(op, "x", x)
    columns = x.shape[-1]
    torch._check_value(
        columns % 2 == 0, lambda: f"{op}: the last size of x is {columns}; it must be even, as a byte holds two codes."
    )
    _sf.check_format(op, sf_format, _quant.check_gran_k(op, gran_k))


def _reference(x: Tensor, *, gran_k: int, sf_format: str) -> tuple[Tensor, Tensor]:
    data, scale = _quant.fp4(x, (1, gran_k))
    return data, _quant.write_scales(scale, sf_format)


def _fake(x: Tensor, *, gran_k: int, sf_format: str) -> tuple[Tensor, Tensor]:
    *lead, rows, columns = x.shape
    return (
        x.new_empty((*lead, rows, columns // 2), dtype=torch.int8),
        _quant.empty_scales(x, lead, rows, columns, (1, int(gran_k)), sf_format),
    )


QUANT_FP4 = OpDef(
    name="quant_fp4",
    schema="(Tensor x, *, SymInt gran_k, str sf_format) -> (Tensor, Tensor)",
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward="rounding to FP4 has no useful derivative; quantise detached tensors.",
    tolerance={
        dtype: Tolerance(0.0, 0.0, "one rule to the last bit: every operation of it is exact or rounded to nearest")
        for dtype in _check.FLOATING
    },
    samples=quant_fp4_samples,
)
