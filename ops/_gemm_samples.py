"""Sample inputs of the dense and batched GEMM ops on bfloat16: the edge cases, seeded, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ascend_deep.ops._op import Sample

__all__ = ["EQUATIONS", "acc_samples", "dense_samples", "einsum_samples", "hc_samples", "out_samples"]

EQUATIONS = ("bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr", "bmk,bnk->mn")

_LOW, _FULL = torch.bfloat16, torch.float32


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _operands(m: int, n: int, k: int, layout: str, g: torch.Generator) -> tuple[Tensor, Tensor]:
    shapes = (m, k) if layout[0] == "n" else (k, m), (k, n) if layout[1] == "n" else (n, k)
    a, b = (torch.randn(*shape, generator=g).to(_LOW) for shape in shapes)
    return a, b


def dense_samples() -> Iterator[Sample]:
    g = _generator(31)

    def case(
        name: str,
        m: int,
        n: int,
        k: int,
        layout: str = "nt",
        c: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        alpha: float | None = None,
    ) -> Sample:
        a, b = _operands(m, n, k, layout, g)
        bias = None if c is None else torch.randn(m, n, generator=g).to(c)
        return Sample(name, (a, b, bias), {"layout": layout, "out_dtype": out_dtype, "alpha": alpha})

    yield case("m_5-nt-f32", 5, 7, 9, out_dtype=_FULL)
    yield case("m_0", 0, 7, 9, c=_LOW)
    yield case("m_1-k_0", 1, 6, 0, c=_FULL, alpha=0.7)
    yield case("m_63-nn-c_f32-alpha", 63, 17, 33, "nn", c=_FULL, alpha=-1.3)
    yield case("n_1-tn-alpha", 6, 1, 40, "tn", alpha=0.6)
    yield case("n_0-tt", 3, 0, 5, "tt", out_dtype=_FULL)
    yield case("tt-c_bf16", 9, 11, 13, "tt", c=_LOW, out_dtype=_LOW, alpha=1.9)
    a, b = _operands(6, 10, 8, "tn", g)
    strided = (a.t(), torch.stack((b.t(), b.t()), 2)[:, :, 1], torch.randn(10, 6, generator=g).t())
    yield Sample("transposed-strided", strided, {"layout": "nt", "out_dtype": None, "alpha": 0.8})
    row = torch.randn(1, 9, generator=g).to(_LOW).expand(4, 9)
    yield Sample("expanded", (row, row[:3].t(), None), {"layout": "nn", "out_dtype": None, "alpha": None})


def out_samples() -> Iterator[Sample]:
    g = _generator(32)
    for name, m, n, k, layout, dtype, with_c in (
        ("m_63-nt-f32", 63, 5, 8, "nt", _FULL, True),
        ("m_0-nn", 0, 4, 3, "nn", _LOW, False),
        ("tt-k_0", 3, 4, 0, "tt", _LOW, True),
    ):
        a, b = _operands(m, n, k, layout, g)
        d, c = (torch.randn(m, n, generator=g).to(dtype) for _ in range(2))
        yield Sample(name, (d, a, b, c if with_c else None), {"layout": layout, "alpha": 1.4})
    a, b = _operands(4, 6, 5, "tn", g)
    yield Sample("tn-transposed", (torch.randn(6, 4, generator=g).t(), a, b, None), {"layout": "tn", "alpha": None})


def acc_samples() -> Iterator[Sample]:
    g = _generator(33)
    for name, m, n, k, layout, dtype in (
        ("tn-f32", 5, 8, 63, "tn", _FULL),
        ("nt-bf16", 6, 3, 10, "nt", _LOW),
        ("k_0", 4, 2, 0, "tn", _FULL),
    ):
        a, b = _operands(m, n, k, layout, g)
        yield Sample(name, (torch.randn(m, n, generator=g).to(dtype), a, b), {"layout": layout})


def _shapes(eq: str, b: int, h: int, d: int, r: int) -> tuple[list[int], list[int], list[int]]:
    size = {"b": b, "h": h, "d": d, "r": r, "m": h, "n": d, "k": r}
    left, right, out = eq.replace("->", ",").split(",")
    return [size[i] for i in left], [size[i] for i in right], [size[i] for i in out]


def einsum_samples() -> Iterator[Sample]:
    g = _generator(34)

    def randn(shape: list[int], dtype: torch.dtype = _LOW) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    for i, eq in enumerate(EQUATIONS):
        out_dtype = (None, _FULL)[i % 2]
        left, right, out = _shapes(eq, 5, 3, 6, 9)
        letters = eq.split("-")[0]
        c = randn(out, out_dtype or _LOW) if i > 1 else None
        yield Sample(letters, (randn(left), randn(right), c), {"eq": eq, "out_dtype": out_dtype})
        left, right, out = _shapes(eq, *((0, 3, 4, 5), (1, 2, 3, 0), (0, 2, 3, 4), (2, 63, 0, 3))[i])
        other = (_FULL, None)[i % 2]
        yield Sample(f"{letters}-empty", (randn(left), randn(right), randn(out, _FULL)), {"eq": eq, "out_dtype": _FULL})
        left, right, out = _shapes(eq, 63 if i == 0 else 4, 2, 5, 7)
        swapped = (randn([left[1], left[0], left[2]]).transpose(0, 1), randn(right[::-1]).permute(2, 1, 0), None)
        yield Sample(f"{letters}-strided", swapped, {"eq": eq, "out_dtype": other})


def hc_samples() -> Iterator[Sample]:
    g = _generator(35)
    for name, m, n, k, splits in (
        ("m_13", 13, 24, 40, None),
        ("m_0", 0, 3, 8, None),
        ("m_63-splits", 63, 5, 17, 4),
        ("m_1-more_splits_than_k", 1, 2, 3, 5),
        ("k_0", 2, 3, 0, None),
        ("k_0-splits", 2, 3, 0, 2),
    ):
        a, b = torch.randn(m, k, generator=g).to(_LOW), torch.randn(n, k, generator=g)
        yield Sample(name, (a, b), {"num_splits": splits})
    strided = (torch.randn(8, 10, generator=g).to(_LOW)[:, ::2].t(), torch.randn(8, 6, generator=g).t())
    yield Sample("strided", strided, {"num_splits": None})
