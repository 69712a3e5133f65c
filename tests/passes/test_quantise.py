"""Quantisation to FP8 written by hand becomes ``quant_fp8`` if it is that rule, lower bound included."""

from __future__ import annotations

import pytest
import torch
from gemm_tools import Run, compiled, together

ONLY = ("quantise",)
FP8, B = torch.float8_e4m3fn, 128


def rows(x, floor=1e-4, group=B):
    blocks = x.float().view(*x.shape[:-1], -1, group)
    s = blocks.abs().amax(-1, keepdim=True).clamp(min=floor) / 448.0
    return (blocks / s).to(FP8).view(x.shape), s.squeeze(-1)


def reciprocal(x):
    blocks = x.float().unflatten(-1, (-1, B))
    s = torch.clamp_min(blocks.abs().amax(-1), 1e-4) / 448
    return (blocks * (1.0 / s)[..., None]).clamp(-448, 448).to(FP8).flatten(-2), s


def powers(x):
    blocks = x.float().view(x.shape[0], -1, 32)
    s = (blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0).log2().ceil().exp2()
    return (blocks / s).to(FP8).view(x.shape), s[..., 0]


def weight(x):
    n, k = x.shape
    blocks = x.float().view(n // B, B, k // B, B)
    s = blocks.abs().amax((1, 3), keepdim=True).clamp(1e-4) / 448
    return (blocks / s).to(FP8).view(n, k), s.view(n // B, k // B)


def whole_row(x):
    s = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (x / s).clamp(-448.0, 448.0).to(FP8), s


def flattened(x):
    """Blocks and scales of all rows, whatever the leading dims; the data in the shape of ``x``."""
    blocks = x.reshape(-1, x.shape[-1]).view(-1, x.shape[-1] // B, B)
    s = blocks.abs().float().amax(2).clamp(1e-4) / 448
    return (blocks / s.unsqueeze(2)).to(FP8).view(x.shape), s


def blocks_of_rows(x):
    """The data stay in blocks."""
    blocks = x.float().view(-1, x.shape[-1] // B, B)
    s = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (blocks / s).to(FP8), s


SPELLINGS = {
    "rows of groups": (rows, (6, 384), [1, 128], False),
    "groups of 32": (lambda x: rows(x, group=32), (6, 96), [1, 32], False),
    "reciprocal and clamp": (reciprocal, (6, 384), [1, 128], False),
    "powers of two": (powers, (6, 96), [1, 32], True),
    "weight": (weight, (384, 512), [128, 128], False),
    "whole rows": (whole_row, (6, 80), [1, 80], False),
    "three dims": (rows, (2, 3, 256), [1, 128], False),
    "three dims flattened": (flattened, (2, 3, 512), [1, 128], False),
    "three dims in blocks of rows": (blocks_of_rows, (3, 4, 256), [1, 128], False),
}


def same(got, want):
    (q, s), (wq, ws) = got, want
    assert q.dtype == FP8 and q.shape == wq.shape and s.shape == ws.shape and s.stride() == ws.stride()
    torch.testing.assert_close(s, ws, rtol=3e-7, atol=0)
    apart = q.float() != wq.float()
    assert float(apart.float().mean()) <= 1e-2  # ties
    assert bool(((q.float() - wq.float()).abs() <= 0.13 * wq.float().abs() + 2**-9).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spellings(dtype):
    inputs = [(torch.randn(shape) * 3).to(dtype) for _, shape, _, _ in SPELLINGS.values()]
    for x in inputs:
        x[..., 0, :] = 0  # a row of zeros
    each = {n: (lambda *xs, f=f, i=i: f(xs[i])) for i, (n, (f, *_)) in enumerate(SPELLINGS.items())}
    got, run = together(each, *inputs, recognisers=ONLY)
    assert run.ops == ["quant_fp8"] * len(SPELLINGS), run.reasons
    calls = [(list(c.kwargs["gran"]), c.kwargs["ue8m0"]) for c in run.calls("quant_fp8")]
    assert sorted(calls) == sorted((gran, powers_) for _, _, gran, powers_ in SPELLINGS.values())
    for (name, (f, *_)), x in zip(SPELLINGS.items(), inputs, strict=True):
        same(got[name], f(x))


def test_dynamic_rows():
    x = torch.randn(6, 384)
    some = {"rows of groups": rows, "powers of two": powers, "whole rows": whole_row}
    got, run = together(some, x, recognisers=ONLY, dynamic=True)
    assert run.ops == ["quant_fp8"] * 3, run.reasons
    for name, f in some.items():
        same(got[name], f(x))


def test_a_gradient_may_be_asked_for():
    x = torch.randn(6, 256, requires_grad=True)
    got, run = compiled(rows, x, recognisers=ONLY)
    assert run.ops == [] and "a gradient may be asked for" in run.reasons[0]
    same(got, rows(x))
    _, run = compiled(lambda x: rows(x.detach()), x, recognisers=ONLY)
    assert run.ops == ["quant_fp8"]


NEAR_MISSES = {
    "another bound": (lambda x: rows(x, floor=1e-12), "another lower bound"),
    "another largest": (lambda x: (x / (x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 240)).to(FP8), None),
    "signed largest": (lambda x: (x / (x.amax(-1, keepdim=True).clamp(min=1e-4) / 448)).to(FP8), None),
    "rounded scale": (
        lambda x: (x / (x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).bfloat16().float()).to(FP8), None,
    ),
    "doubled": (lambda x: (2 * x / (x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)).to(FP8), None),
}  # fmt: skip


@pytest.mark.parametrize("f", [rows, flattened, blocks_of_rows])
def test_batch_and_tokens_may_be_symbolic(f):
    """A row may be as well, with dynamic=True, and then a block has no number."""
    x = torch.randn(2, 5, 512)
    for d in (0, 1):
        torch._dynamo.mark_dynamic(x, d)
    run = Run(ONLY)
    with torch.no_grad():
        for dynamic, wanted in ((None, ["quant_fp8"]), (True, [])):
            torch._dynamo.reset()
            call = torch.compile(f, backend=run, fullgraph=True, dynamic=dynamic)
            for y in (x, torch.randn(3, 7, 512)):
                for got, want in zip(call(y), f(y), strict=True):
                    assert torch.equal(got.float(), want.float())
            assert run.ops == wanted, run.reasons
    assert "its rows have a symbolic length" in run.reasons[0]


def test_any_number_of_symbolic_dims():
    x = torch.randn(2, 3, 4, 5, 6, 7, 64)
    for d in range(6):
        torch._dynamo.mark_dynamic(x, d)
    torch._dynamo.reset()
    run = Run(ONLY)
    with torch.no_grad():
        got = torch.compile(whole_row, backend=run, fullgraph=True)(x)
    assert run.ops == ["quant_fp8"], run.reasons
    same(got, whole_row(x))


def test_near_misses():
    x = torch.randn(6, 256) * 2
    got, run = together({name: f for name, (f, _) in NEAR_MISSES.items()}, x, recognisers=ONLY)
    assert run.ops == [] and len(run.reasons) == len(NEAR_MISSES)
    for (name, (f, words)), reason in zip(NEAR_MISSES.items(), run.reasons, strict=True):
        assert (words or "not the rule of quant_fp8") in reason, name
        first, other = (r[0] if isinstance(r, tuple) else r for r in (got[name], f(x)))
        assert torch.equal(first.float().nan_to_num(7), other.float().nan_to_num(7))


def test_a_given_scale_is_not_looked_for():
    with torch.no_grad():
        x, s = torch.randn(6, 256), torch.rand(6, 1) + 0.5
        _, run = compiled(lambda x, s: (x / s).to(FP8), x, s, recognisers=ONLY)
    assert run.ops == [] and "not scaled by its own largest numbers" in run.reasons[0]


def test_with_the_product_that_follows():
    """Quantise and multiply: both become ops, and the data go from one to the other."""

    def f(x, w, sw):
        q, s = rows(x)
        wide = (q.float().view(x.shape[0], -1, B) * s[..., None]).flatten(1)
        return wide @ (w.float() * sw.repeat_interleave(B, 0).repeat_interleave(B, 1)).t()

    x, w, sw = torch.randn(6, 384), torch.randn(256, 384).to(FP8), torch.rand(2, 3) + 0.1
    with torch.no_grad():
        got, run = compiled(f, x, w, sw, recognisers=("quantise", "fp8_linear"))
        want = f(x, w, sw)
    assert sorted(run.ops) == ["gemm_scaled", "quant_fp8"], run.reasons
    behind = run.call("gemm_scaled").args[0]
    while behind.op == "call_function" and behind is not run.call("quant_fp8"):
        behind = behind.args[0]
    assert behind is run.call("quant_fp8")
    assert float((got - want).abs().max()) <= 1e-3 * float(want.abs().max())
