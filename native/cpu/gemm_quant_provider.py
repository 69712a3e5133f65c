"""Quantisation on the CPU: allocation of what the C++ functions write into, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import SwigluQuant

__all__ = ["ACTS", "KERNELS", "LIMITS", "element_count", "empty_scales", "quantised"]

ACTS = frozenset({"silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "swiglu_oai", "silu_clamp"})
_OUT = (None, torch.float32, torch.bfloat16)
_FP4 = (torch.int8, torch.uint8, getattr(torch, "float4_e2m1fn_x2", None))


def element_count(x: Tensor, dim: int) -> int:
    """Elements along a dimension; FP4 has two per byte along the last one."""
    return x.shape[dim] * (2 if x.dtype in _FP4 and dim in (-1, x.dim() - 1) else 1)


def empty_scales(lead: Sequence[int], rows: int, groups: int, gran_row: int, sf_format: str) -> Tensor:
    """Where scales are written to. Packed words: 127 behind the last group, and rows next to each other in memory with
    zeros up to the next column."""
    if sf_format == "fp32":
        return torch.empty((*lead, -(-rows // gran_row), groups), dtype=torch.float32, device="cpu")
    per, dtype = (4, torch.int32) if sf_format == "ue8m0x4" else (2, torch.int16)
    words = -(-groups // per)
    pitch = -(-rows // 4) * 4 if per == 4 else rows
    strides, step = [1, pitch], pitch * words
    for size in reversed(lead):
        strides.insert(0, step)
        step *= size
    out = torch.empty_strided((*lead, rows, words), strides, dtype=dtype, device="cpu")
    if out.numel():
        torch.as_strided(out, (out.untyped_storage().nbytes() // out.element_size(),), (1,)).zero_()
        out[..., words - 1] = 0x7F7F7F7F if per == 4 else 0x7F7F
    return out


def _matrices(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def quantised(x: Tensor, gran: Sequence[int], fp4: bool, ue8m0: bool, sf_format: str) -> tuple[Tensor, Tensor]:
    *lead, rows, columns = x.shape
    scales = empty_scales(lead, rows, -(-columns // gran[1]), gran[0], sf_format)
    kind = torch.int8 if fp4 else torch.float8_e4m3fn
    data = torch.empty((*lead, rows, columns // 2 if fp4 else columns), dtype=kind, device="cpu")
    run = torch.ops.ascend_deep_cpu.quantise
    if not lead:
        run(data, scales, x, gran, fp4, ue8m0)
    elif scales.numel() or data.numel():
        views = (_matrices(data), scales.view(-1, *scales.shape[-2:]), _matrices(x))
        for d, s, source in zip(*views, strict=True):
            run(d, s, source, gran, fp4, ue8m0)
    return data, scales


def _quant_fp8(x: Tensor, *, gran: Sequence[int], ue8m0: bool, sf_format: str) -> tuple[Tensor, Tensor]:
    return quantised(x, gran, False, ue8m0, sf_format)


def _quant_fp4(x: Tensor, *, gran_k: int, sf_format: str) -> tuple[Tensor, Tensor]:
    return quantised(x, (1, gran_k), True, True, sf_format)


@takes(SwigluQuant)
def _swiglu_quant(args: SwigluQuant) -> tuple[Tensor, Tensor]:
    h, row_weight = args.h, args.row_weight
    *lead, rows, columns = h.shape
    width = columns // 2
    scales = empty_scales(lead, rows, -(-width // args.gran_k), 1, args.sf_format)
    data = torch.empty((*lead, rows, width), dtype=torch.float8_e4m3fn, device="cpu")
    if scales.numel() or data.numel():
        weights = None if row_weight is None else row_weight.to(torch.float32).reshape(-1, rows).contiguous()
        source = _matrices(h if h.stride(-1) == 1 else h.contiguous())
        for i in range(source.shape[0]):
            torch.ops.ascend_deep_cpu.swiglu_quantise(
                _matrices(data)[i],
                scales.view(-1, *scales.shape[-2:])[i],
                source[i],
                None if weights is None else weights[i],
                args.act,
                args.alpha,
                args.limit,
                args.interleaved,
                args.gran_k,
                args.ue8m0,
            )
    return data, scales


def _dequant(x: Tensor, sf: Tensor, *, gran: Sequence[int], sf_format: str, out_dtype: torch.dtype | None) -> Tensor:
    out = torch.empty((*x.shape[:-1], element_count(x, -1)), dtype=out_dtype or torch.float32, device="cpu")
    run = torch.ops.ascend_deep_cpu.dequantise
    if x.dim() == 2:
        run(out, x, sf, gran)
    elif out.numel():
        for matrix, data, scales in zip(_matrices(out), _matrices(x), _matrices(sf), strict=True):
            run(matrix, data, scales, gran)
    return out


def _source_limits(x: Tensor, *_: Any, act: str = "silu", **__: Any) -> str | None:
    if x.dtype == torch.float64:
        return "the input is float64; the kernel takes float32, bfloat16 and float16."
    if act not in ACTS:
        return f"act is {act!r}, the kernel has {', '.join(sorted(ACTS))}."
    return None


def _swiglu_limits(h: Tensor, row_weight: Tensor | None, *, act: str, **_: Any) -> str | None:
    if h.dtype not in (torch.float32, torch.bfloat16):
        return f"h has dtype {h.dtype}; the kernel takes float32 and bfloat16."
    return _source_limits(h, act=act)


def _dequant_limits(x: Tensor, sf: Tensor, *, out_dtype: torch.dtype | None, **_: Any) -> str | None:
    if out_dtype not in _OUT:
        return f"out_dtype is {out_dtype}; the kernel writes float32 and bfloat16."
    return None


KERNELS: Mapping[str, Callable[..., Any]] = {
    "quant_fp8": _quant_fp8,
    "quant_fp4": _quant_fp4,
    "swiglu_quant": _swiglu_quant,
    "dequant": _dequant,
}

LIMITS: Mapping[str, Callable[..., str | None]] = {
    "quant_fp8": _source_limits,
    "quant_fp4": _source_limits,
    "swiglu_quant": _swiglu_limits,
    "dequant": _dequant_limits,
}
