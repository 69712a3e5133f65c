"""Sample inputs of the quantisation ops: zeros, one row, no rows, ends that are no whole blocks, extremes, formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _quant, _sf
from ascend_deep.ops._op import Sample

__all__ = ["dequant_samples", "pack_sf_samples", "quant_fp4_samples", "quant_fp8_samples", "swiglu_quant_samples"]


def _matrices() -> Iterator[tuple[str, Tensor]]:
    g = torch.Generator().manual_seed(17)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g) * torch.exp2(torch.randint(-6, 7, shape, generator=g).float())

    yield "ordinary", randn(5, 70)
    yield "no_rows", randn(0, 70)
    yield "no_columns", randn(3, 0)
    yield "one_element_more", randn(1, 66).bfloat16()
    yield "zeros", torch.zeros(3, 64)
    holes = randn(4, 128)
    holes[:, 32:64] = 0.0
    yield "zero_blocks", holes.half()
    yield "batch", randn(2, 3, 40)
    yield "transposed", randn(68, 9).t()
    yield "sliced", randn(9, 150)[::2, 3:133]
    extreme = randn(6, 64)
    for row, value in enumerate((448.0, -464.0, 465.0, 1e38, -1e-30)):
        extreme[row, 7 * row] = value
    extreme[4] *= 1e-38
    yield "extremes", extreme
    nonfinite = randn(5, 64)
    for row, value in enumerate((torch.inf, -torch.inf, torch.nan)):
        nonfinite[row, 7 * row] = value
    yield "nonfinite", nonfinite
    yield "f64", randn(2, 34).double()


def quant_fp8_samples() -> Iterator[Sample]:
    """Every matrix with a pair of block sizes, then the formats."""
    grans = ((1, 32), (1, 128), (128, 128), (4, 16), (128, 1), (1, 7))
    for n, (name, x) in enumerate(_matrices()):
        gran = grans[n % len(grans)]
        yield Sample(f"{name}-{gran[0]}x{gran[1]}", (x,), {"gran": gran, "ue8m0": n % 2 == 1, "sf_format": "fp32"})
    for n, (name, x) in enumerate(_matrices()):
        if name in ("ordinary", "no_rows", "batch", "extremes"):
            fmt = ("ue8m0x4", "ue8m0x2")[n % 2]
            yield Sample(f"{name}-{fmt}", (x,), {"gran": (1, 16), "ue8m0": True, "sf_format": fmt})


def quant_fp4_samples() -> Iterator[Sample]:
    """Every matrix, with groups that change."""
    for n, (name, x) in enumerate(_matrices()):
        fmt = tuple(_sf.FORMATS)[n % 3]
        yield Sample(f"{name}-{fmt}", (x,), {"gran_k": (32, 16, 7)[n % 3], "sf_format": fmt})


def dequant_samples() -> Iterator[Sample]:
    """Data and scales of the quantisers, in every format and out_dtype."""
    dtypes = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)
    for n, (name, x) in enumerate(_matrices()):
        if name == "f64":
            continue
        fmt = tuple(_sf.FORMATS)[n % 3]
        gran = (1, 32) if fmt != "fp32" else ((128, 128), (3, 16), (1, 7))[n % 2]
        kwargs: dict[str, Any] = {"gran": gran, "sf_format": fmt, "out_dtype": dtypes[n % 5]}
        data, scale = _quant.fp8(x, gran, True)
        if n % 2 and x.shape[-1] % 2 == 0:
            data, scale = _quant.fp4(x, gran)
            data = data.view(torch.uint8) if n % 4 == 1 else data
        yield Sample(f"{name}-{fmt}", (data, _quant.write_scales(scale, fmt)), kwargs)
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(_sf.FP8).reshape(8, 32)
    scale = torch.tensor([[0.3], [1.7]]).expand(2, 1)
    yield Sample(
        "nonfinite-all_codes", (data.t(), scale.t()), {"gran": (32, 4), "sf_format": "fp32", "out_dtype": None}
    )


def _scales(g: torch.Generator, *shape: int) -> Tensor:
    return torch.exp2(torch.randint(-9, 10, shape, generator=g).float())


# Which cases for which target and gran_k: all of them where words are packed, the others where they differ.
_PACKED = {
    ("sm90", 128): ("odd", "blocks", "psum", "k_psum"),
    ("sm100", 32): ("odd", "batch", "no_rows", "one", "blocks", "psum", "k_psum", "k_sizes"),
    ("sm100", 128): ("odd", "k_sizes"),
    ("ascend", 32): ("odd", "batch", "no_rows", "one", "blocks", "psum", "k_psum"),
    ("ascend", 128): ("odd", "blocks", "k_psum"),
}


def pack_sf_samples() -> Iterator[Sample]:
    """Ends that are not whole words, batches, no rows, blocks of rows, gaps with garbage, empty groups."""
    g = torch.Generator().manual_seed(19)
    plain = {"odd": ((), 7, 700), "batch": ((3,), 4, 257), "no_rows": ((), 0, 33), "one": ((), 1, 1)}
    for (target, gran_k), cases in _PACKED.items():
        for case in cases:
            kwargs: dict[str, Any] = {"target": target, "gran": (1, gran_k), "grouping": "none", "alignment": 128}
            layout = None
            if case in plain:
                lead, mn, k = plain[case]
                sf = _scales(g, *lead, mn, _sf.ceil_div(k, gran_k))
            elif case == "blocks":
                mn, k = 130, 300
                sf = _scales(g, _sf.ceil_div(k, gran_k), 2).t()
                kwargs["gran"] = (128, gran_k)
            elif case == "psum":
                mn, k = 24, 300
                sf = _scales(g, mn, _sf.ceil_div(k, gran_k))
                sf[5:8], sf[13:] = torch.nan, -0.3
                kwargs.update(grouping="psum", alignment=8)
                layout = torch.tensor([5, 8, 13], dtype=torch.int32)
            else:
                mn, k = 6, 1024
                sf = _scales(g, mn, k // gran_k)
                kwargs.update(grouping=case, alignment=384 if case == "k_psum" else 128)
                layout = torch.tensor([200, 384, 1000] if case == "k_psum" else [256, 0, 640], dtype=torch.int32)
                if case == "k_psum":
                    sf[:, 256 // gran_k : 384 // gran_k] = -3.0
            yield Sample(f"{target}-{gran_k}-{case}", (sf, layout), {"mn": mn, "k": k, **kwargs})


def swiglu_quant_samples() -> Iterator[Sample]:
    """Activations, layouts, formats, row weights, no rows."""
    g = torch.Generator().manual_seed(37)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g) * 2.5

    silu: dict[str, Any] = {"act": "silu", "alpha": 1.0, "limit": None, "interleaved": False}
    oai: dict[str, Any] = {"act": "swiglu_oai", "alpha": 1.702, "limit": 0.9, "interleaved": True}
    mx: dict[str, Any] = {"gran_k": 32, "ue8m0": True, "sf_format": "fp32"}
    yield Sample("silu", (randn(5, 140).bfloat16(), None), {**silu, **mx})
    yield Sample("limit-row_weight", (randn(5, 128).bfloat16(), randn(5)), {**silu, **mx, "limit": 1.3})
    yield Sample("oai-batch", (randn(2, 3, 68), randn(2, 3)), {**oai, **mx, "gran_k": 16, "ue8m0": False})
    for fmt in ("ue8m0x4", "ue8m0x2"):
        yield Sample(f"{fmt}", (randn(7, 260).half(), randn(7).half()), {**oai, **mx, "sf_format": fmt})
    yield Sample("no_rows", (randn(0, 64), randn(0)), {**silu, **mx, "gran_k": 128, "ue8m0": False})
    h = randn(3, 128).bfloat16()
    h[1] = 0.0
    yield Sample("zero_row", (h, None), {**silu, **mx})
    yield Sample("transposed", (randn(64, 9).t(), None), {**oai, **mx})
