"""Kernels on codes of FP8, as they are written for Ascend, in Triton's interpreter; see ``test_codes``.

It runs no compiler, so it says what the kernels compute and nothing about Ascend.
"""

from __future__ import annotations

import itertools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.npu.kernels.compiling import host_types

host_types()

from ascend_deep.native.triton.gemm_vector import vector_kernel  # noqa: E402
from ascend_deep.native.triton.mqa_logits import logits_kernel  # noqa: E402
from ascend_deep.native.triton.paged import paged_kernel  # noqa: E402
from ascend_deep.native.triton.portable import exact, float_of_bytes  # noqa: E402

FP8, HEADS, DEPTH = torch.float8_e4m3fn, 5, 32
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@triton.jit
def _decode(codes, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, exact(tl.load(codes + i)).to(tl.float32))


@triton.jit
def _read(raw, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, float_of_bytes(raw + 4 * i, i < n))


def codes() -> None:
    """Every code, and floats by their bytes."""
    every, found = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    _decode[(1,)](every, found, B=256)
    torch.testing.assert_close(found, every.view(FP8).float(), rtol=0, atol=0, equal_nan=True)
    numbers = torch.tensor([1.7, -0.0, float("nan"), float("inf"), -3e-39, 5.0, 9.0, 9.0])
    found = torch.full((8,), 4.0)
    _read[(1,)](numbers.view(torch.uint8), found, 6, B=8)
    assert found[:6].view(torch.int32).equal(numbers[:6].view(torch.int32)) and not found[6:].any()


def _random(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g).to(FP8)


def _scales(g: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=g) + 0.1


def vector() -> None:
    """One row, with scales of 1 x 128 and 128 x 128."""
    g = torch.Generator().manual_seed(1)
    n, k = 40, 256
    x, w, sx, sw = _random(g, 1, k), _random(g, n, k), _scales(g, 1, 2), _scales(g, 1, 2)
    out = torch.zeros(1, n)
    vector_kernel[(n // 8,)](
        x.view(torch.uint8), w.view(torch.uint8), None, out, sx, sw, 1.5, n, k, 1, k, 0, 1, 2, 1,
        BN=8, BK=128, SCALED=True, HAS_C=False, EVEN=False, STAGES=1,
    )  # fmt: skip
    wide = [t.float() * s.repeat_interleave(128, 1) for t, s in ((x, sx), (w, sw))]
    torch.testing.assert_close(out, 1.5 * wide[0] @ wide[1].t(), **CLOSE)


def logits() -> None:
    """Bounds per query, a negative scale, a padded number of heads."""
    g = torch.Generator().manual_seed(2)
    queries, keys = 3, 50
    q, kv = _random(g, 1, queries, HEADS, DEPTH), _random(g, 1, keys, DEPTH)
    q_sf, kv_sf, weights = (
        _scales(g, 1, queries, HEADS),
        _scales(g, 1, keys),
        torch.randn(1, queries, HEADS, generator=g),
    )
    ks, ke = (torch.tensor([t], dtype=torch.int32) for t in ([0, 3, 5], [50, 20, 44]))
    out = torch.zeros(1, queries, keys)
    strides = (*q.stride()[:3], *q_sf.stride(), keys, *weights.stride(), *ks.stride(), *ke.stride(), 0, 0, 0)
    logits_kernel[(2, 1, 1)](
        q.view(torch.uint8), q_sf, kv.view(torch.uint8), kv_sf, weights, ks, ke, None, out, -0.7, queries, keys, keys,
        64, *strides, *out.stride()[:2], H=HEADS, D=DEPTH, QUERIES=2, BLOCK_H=8, BLOCK_D=32, BLOCK_T=16, NEGATIVE=False,
        HAS_QSF=True, HAS_KVSF=True, HAS_KS=True, HAS_KE=True, MASK=0, COMPRESSED=False, CLEAN=True, BITS=False,
        EVEN=False, PRECISION="ieee", STAGES=1,
    )  # fmt: skip
    products = torch.einsum("shd,td->sht", q[0].float() * (-0.7 * q_sf[0].unsqueeze(2)), kv[0].float())
    want = (products.relu() * weights[0].unsqueeze(2)).sum(1) * kv_sf[0]
    t = torch.arange(keys)
    seen = (t >= ks[0].unsqueeze(1)) & (t < ke[0].unsqueeze(1))
    torch.testing.assert_close(out[0], torch.where(seen, want, -torch.inf), **CLOSE)


def paged() -> None:
    """Pages with their scales behind the keys; one page that does not exist."""
    g = torch.Generator().manual_seed(3)
    rows, tokens, page, pages, columns = 2, 2, 16, 5, 48
    keys, scales = _random(g, pages, page, DEPTH), _scales(g, pages, page)
    raw = (keys.view(torch.uint8).reshape(pages, -1), scales.view(torch.uint8).reshape(pages, -1))
    cache = torch.cat(raw, 1).contiguous()
    table, lens = (torch.tensor(t, dtype=torch.int32) for t in ([[1, 3, 0], [4, 2, 9]], [[40, 30], [20, 48]]))
    q, q_sf = _random(g, rows, tokens, HEADS, DEPTH), _scales(g, rows, tokens, HEADS)
    weights, out = torch.randn(rows, tokens, HEADS, generator=g), torch.zeros(rows, tokens, columns)
    paged_kernel[(rows, 1, 1)](
        q.view(torch.uint8), q_sf, cache, None, weights, lens, table, None, out, 0.5, tokens, pages, page, 2, 3,
        columns, 64, *q.stride()[:3], *q_sf.stride(), cache.stride(0), DEPTH, 0, *weights.stride(), *lens.stride(),
        *table.stride(), 0, *out.stride()[:2], H=HEADS, D=DEPTH, TOKENS=2, BLOCK_H=8, BLOCK_D=32, BLOCK_T=16,
        NEGATIVE=False, HAS_QSF=True, HAS_INDICES=False, PLANAR=True, WHOLE=False, CLEAN=True, BITS=False,
        PRECISION="ieee", STAGES=1,
    )  # fmt: skip
    want = torch.full((rows, tokens, columns), -torch.inf)
    for i, n in itertools.product(range(rows), range(tokens)):
        for t in range(int(lens[i, n])):
            name, at = int(table[i, t // page]), t % page
            if name < pages:
                products = (q[i, n].float() * q_sf[i, n].unsqueeze(1) * 0.5) @ keys[name, at].float()
                want[i, n, t] = (products.relu() * weights[i, n]).sum() * scales[name, at]
    torch.testing.assert_close(out, want, **CLOSE)


if __name__ == "__main__":
    {f.__name__: f for f in (codes, vector, logits, paged)}[sys.argv[1]]()
