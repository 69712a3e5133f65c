"""Sample inputs of the scaled GEMM ops: odd sizes, all layouts and pairs of formats, empty operands, zero blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _quant, _sf
from ascend_deep.ops._op import Sample

__all__ = [
    "einsum_fp8out_samples",
    "einsum_scaled_samples",
    "fp8_linear_samples",
    "gemm_fp8out_samples",
    "gemm_scaled_acc_samples",
    "gemm_scaled_out_samples",
    "gemm_scaled_samples",
    "operand",
]


def operand(
    g: torch.Generator, rows: int, k: int, gran: tuple[int, int], fmt: str, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """A random operand [rows, k] as data of ``fmt`` ("fp8" or "fp4") and logical scales that are powers of two.

    Stored as [k, rows] if ``transposed``; FP4 pairs lie along the last dimension then too.
    """
    x = torch.randn(rows, k, generator=g) * torch.exp2(torch.randint(-2, 3, (rows, 1), generator=g).float())
    if not transposed:
        return _quant.fp8(x, gran, True) if fmt == "fp8" else _quant.fp4(x, gran)
    data, scale = (_quant.fp8 if fmt == "fp8" else _fp4)(x.t(), (gran[1], gran[0]), True)
    return data, scale.t()


def _fp4(x: Tensor, gran: tuple[int, int], ue8m0: bool) -> tuple[Tensor, Tensor]:
    return _quant.fp4(x, gran)


def _call(
    g: torch.Generator,
    m: int,
    n: int,
    k: int,
    *,
    layout: str = "nt",
    formats: tuple[str, str] = ("fp8", "fp8"),
    recipe_a: tuple[int, int] = (1, 128),
    recipe_b: tuple[int, int] = (128, 128),
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    a, sfa = operand(g, m, k, recipe_a, formats[0], layout[0] == "t")
    b, sfb = operand(g, n, k, recipe_b, formats[1], layout[1] == "n")
    return (a, sfa, b, sfb), {"recipe_a": recipe_a, "recipe_b": recipe_b, "layout": layout}


def gemm_scaled_samples() -> Iterator[Sample]:
    """See the module."""
    g = torch.Generator().manual_seed(23)
    plain: dict[str, Any] = {"out_dtype": None, "alpha": None}
    mx: dict[str, Any] = {"recipe_a": (1, 32), "recipe_b": (1, 32)}
    for layout in ("nt", "nn", "tn", "tt"):
        args, kwargs = _call(g, 6, 14, 150, layout=layout)
        yield Sample(f"fp8-{layout}", (*args, None), {**kwargs, **plain})
        args, kwargs = _call(g, 6, 14, 76, layout=layout, formats=("fp8", "fp4"), **mx)
        yield Sample(f"fp8xfp4-{layout}", (*args, torch.randn(6, 14, generator=g)), {**kwargs, **plain, "alpha": -0.7})
    args, kwargs = _call(g, 3, 10, 66, formats=("fp4", "fp4"), **mx)
    yield Sample("fp4xfp4", (*args, None), {**kwargs, "out_dtype": torch.float32, "alpha": 1.3})
    as_bytes = (args[0].view(torch.uint8), args[1], args[2].view(torch.uint8), args[3])
    yield Sample("fp4xfp4-uint8", (*as_bytes, None), {**kwargs, **plain})
    args, kwargs = _call(g, 2, 5, 64, formats=("fp4", "fp8"), **mx)
    yield Sample("fp4xfp8", (*args, None), {**kwargs, **plain})
    for name, m, n, k in (("no_rows", 0, 5, 40), ("one_row", 1, 129, 129), ("no_columns", 3, 0, 40), ("no_k", 3, 4, 0)):
        args, kwargs = _call(g, m, n, k)
        yield Sample(name, (*args, None), {**kwargs, **plain})
    args, kwargs = _call(g, 4, 6, 0)
    yield Sample("no_k-c", (*args, torch.randn(4, 6, generator=g).bfloat16()), {**kwargs, **plain, "alpha": 2.5})
    args, kwargs = _call(g, 63, 33, 257, recipe_b=(1, 128))
    yield Sample("f32_scales-63", (args[0], args[1] * 1.37, args[2], args[3] * 0.61, None), {**kwargs, **plain})
    args, kwargs = _call(g, 7, 9, 200, **mx)
    zero = args[0].view(torch.uint8).clone()
    zero[:, 32:64] = 0
    words = [_sf.pack(_sf.encode_ue8m0(sf), fmt) for sf, fmt in ((args[1], "ue8m0x4"), (args[3], "ue8m0x2"))]
    yield Sample("packed-zero_block", (zero.view(_sf.FP8), words[0], args[2], words[1], None), {**kwargs, **plain})
    padded, sfa = operand(g, 9, 96, (1, 32), "fp8")
    args, kwargs = _call(g, 5, 4, 64, **mx)
    yield Sample("sliced", (padded[::2, 32:], sfa[::2, 1:], *args[2:], None), {**kwargs, **plain})


def gemm_scaled_out_samples() -> Iterator[Sample]:
    """An f32 and a bf16 result, with and without ``c``, and ``d`` that is not contiguous."""
    g = torch.Generator().manual_seed(29)
    args, kwargs = _call(g, 5, 12, 130)
    yield Sample("bf16", (torch.randn(5, 12, generator=g).bfloat16(), *args, None), {**kwargs, "alpha": None})
    args, kwargs = _call(g, 5, 12, 40, layout="tn", recipe_b=(1, 128))
    c = torch.randn(5, 12, generator=g)
    yield Sample("f32-c-transposed", (torch.randn(12, 5, generator=g).t(), *args, c), {**kwargs, "alpha": 1.9})
    args, kwargs = _call(g, 0, 12, 40)
    yield Sample("no_rows", (torch.randn(0, 12, generator=g), *args, None), {**kwargs, "alpha": None})


def gemm_scaled_acc_samples() -> Iterator[Sample]:
    """Weight gradients: both operands stored [K, MN], and an odd one."""
    g = torch.Generator().manual_seed(31)
    args, kwargs = _call(g, 6, 11, 140, layout="tn", recipe_b=(1, 128))
    yield Sample("tn-f32", (torch.randn(6, 11, generator=g), *args), kwargs)
    args, kwargs = _call(g, 6, 11, 140)
    yield Sample("nt-bf16", (torch.randn(6, 11, generator=g).bfloat16(), *args), kwargs)
    args, kwargs = _call(g, 6, 11, 0, layout="tn")
    yield Sample("no_k", (torch.randn(6, 11, generator=g), *args), kwargs)


def gemm_fp8out_samples() -> Iterator[Sample]:
    """Clamped and not, every format of the result, ends that are not whole groups."""
    g = torch.Generator().manual_seed(41)
    args, kwargs = _call(g, 5, 70, 130)
    yield Sample("fp8-clamp", args, {**kwargs, "clamp": 2.25, "sf_format": "ue8m0x4"})
    args, kwargs = _call(g, 6, 33, 64, formats=("fp8", "fp4"), recipe_a=(1, 32), recipe_b=(1, 32))
    yield Sample("fp8xfp4", args, {**kwargs, "clamp": None, "sf_format": "ue8m0x2"})
    args, kwargs = _call(g, 9, 64, 40, layout="tn", recipe_b=(1, 128))
    yield Sample("fp32-tn", args, {**kwargs, "clamp": None, "sf_format": "fp32"})
    args, kwargs = _call(g, 0, 40, 40)
    yield Sample("no_rows", args, {**kwargs, "clamp": None, "sf_format": "ue8m0x4"})


def _einsum_operand(
    g: torch.Generator, shape: tuple[int, ...], order: tuple[int, ...], gran: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Data, f32 scales that follow it, and the same scales as matrices [batch, MN, K]."""
    x = torch.randn(*shape, generator=g)
    data, scale = _quant.fp8(x.permute(order), gran, True)
    back = tuple(order.index(dim) for dim in range(3))
    return data.permute(back).contiguous(), scale.permute(back).contiguous(), scale


def einsum_scaled_samples() -> Iterator[Sample]:
    """The four equations with blocks and with packed scales, ``c``, nothing in the batch and nothing to sum."""
    g = torch.Generator().manual_seed(43)
    orders = {
        "bhr,hdr->bhd": ((1, 0, 2), (0, 1, 2)),
        "bhd,hdr->bhr": ((1, 0, 2), (0, 2, 1)),
        "bhd,bhr->hdr": ((1, 2, 0), (1, 2, 0)),
        "bmk,bnk->mn": ((0, 1, 2), (0, 1, 2)),
    }
    size = {"b": 5, "h": 3, "r": 36, "d": 10, "m": 4, "n": 7, "k": 40}
    for eq, (order_a, order_b) in orders.items():
        operands, result = eq.split("->")
        left, right = operands.split(",")
        out = torch.randn(*(size[letter] for letter in result), generator=g)
        kwargs: dict[str, Any] = {"eq": eq, "recipe_a": (1, 16), "recipe_b": (8, 16), "out_dtype": None}
        a, sfa, _ = _einsum_operand(g, tuple(size[n] for n in left), order_a, (1, 16))
        b, sfb, _ = _einsum_operand(g, tuple(size[n] for n in right), order_b, (8, 16))
        yield Sample(f"{eq}-c", (a, sfa, b, sfb, out), kwargs)
        a, _, sfa = _einsum_operand(g, tuple(size[n] for n in left), order_a, (1, 8))
        b, _, sfb = _einsum_operand(g, tuple(size[n] for n in right), order_b, (1, 8))
        words = [_sf.pack(_sf.encode_ue8m0(sf), "ue8m0x4") for sf in (sfa, sfb)]
        kwargs = {**kwargs, "recipe_a": (1, 8), "recipe_b": (1, 8), "out_dtype": torch.float32}
        yield Sample(f"{eq}-packed", (a, words[0], b, words[1], None), kwargs)
    for name, rows, depth in (("no_rows", 0, 32), ("no_k", 2, 0)):
        a, sfa, _ = _einsum_operand(g, (rows, 2, depth), (1, 0, 2), (1, 32))
        b, sfb, _ = _einsum_operand(g, (2, 6, depth), (0, 1, 2), (1, 32))
        kwargs = {"eq": "bhr,hdr->bhd", "recipe_a": (1, 32), "recipe_b": (1, 32), "out_dtype": None}
        yield Sample(name, (a, sfa, b, sfb, None), kwargs)


def einsum_fp8out_samples() -> Iterator[Sample]:
    """Both packed forms and f32 scales, clamped and not."""
    g = torch.Generator().manual_seed(47)
    for rows, fmt, clamp in ((3, "ue8m0x4", 1.75), (1, "ue8m0x2", None), (0, "fp32", None), (2, "fp32", 0.5)):
        a, sfa, _ = _einsum_operand(g, (rows, 2, 40), (1, 0, 2), (1, 128))
        b, sfb, _ = _einsum_operand(g, (2, 96, 40), (0, 1, 2), (128, 128))
        kwargs = {"eq": "bhr,hdr->bhd", "recipe_a": (1, 128), "recipe_b": (128, 128), "clamp": clamp, "sf_format": fmt}
        yield Sample(f"{rows}-{fmt}", (a, sfa, b, sfb), kwargs)


def fp8_linear_samples() -> Iterator[Sample]:
    """Weights to be quantised and quantised ones, bias, batches, no rows, ends that are not whole blocks."""
    g = torch.Generator().manual_seed(53)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    weight, bias = randn(140, 150) / 12, randn(140)
    w8, sfw = _quant.fp8(weight, (128, 128), False)
    yield Sample("bf16-bias", (randn(7, 150).bfloat16(), weight.bfloat16(), None, bias.bfloat16()), {"ue8m0": False})
    yield Sample("f32-batch", (randn(2, 3, 150), weight, None, None), {"ue8m0": True})
    yield Sample("quantised", (randn(5, 150).bfloat16(), w8, sfw, bias), {"ue8m0": False})
    yield Sample("f16", (randn(3, 150).half(), weight.half(), None, bias.half()), {"ue8m0": True})
    yield Sample("no_rows", (randn(0, 150), weight, None, bias), {"ue8m0": True})
    yield Sample("vector", (randn(33), randn(5, 33), None, None), {"ue8m0": False})
    yield Sample("transposed", (randn(33, 130).t(), randn(33, 5).t(), None, None), {"ue8m0": False})
