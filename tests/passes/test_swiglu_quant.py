"""A gated activation that is quantised at once becomes ``swiglu_quant`` if it is that function, bounds included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gemm_tools import Run, compiled, together

from ascend_deep import ops
from ascend_deep.passes.replay import replay

ONLY = ("swiglu_quant",)
FP8 = torch.float8_e4m3fn


def quantised(y, group=128, floor=1e-4, powers=False, largest=448.0):
    blocks = y.float().view(*y.shape[:-1], -1, group)
    s = blocks.abs().amax(-1, keepdim=True).clamp(min=floor) / largest
    s = s.log2().ceil().exp2() if powers else s
    return (blocks / s).clamp(-448, 448).to(FP8).view(y.shape), s.squeeze(-1)


def silu(h, **kwargs):
    gate, up = h.chunk(2, -1)
    return quantised(F.silu(gate) * up, **kwargs)


def in_f32(h):
    gate, up = h[..., : h.shape[-1] // 2].float(), h[..., h.shape[-1] // 2 :].float()
    return quantised(gate * torch.sigmoid(gate) * up)


def oss(h):
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    return quantised((up + 1) * (gate * torch.sigmoid(1.702 * gate)), group=32, powers=True)


def reciprocal(h):
    gate, up = h.split(h.shape[-1] // 2, dim=-1)
    y = (F.silu(gate) * up).float().unflatten(-1, (-1, 128))
    s = torch.clamp_min(y.abs().amax(-1), 1e-4) / 448
    return (y * (1.0 / s)[..., None]).clamp(-448, 448).to(FP8).flatten(-2), s


SPELLINGS = {
    "plain": (silu, {"gran_k": 128, "ue8m0": False, "act": "silu"}),
    "powers of two": (lambda h: silu(h, group=32, powers=True), {"gran_k": 32, "ue8m0": True, "act": "silu"}),
    "in float32": (in_f32, {"gran_k": 128, "ue8m0": False, "act": "silu"}),
    "gpt-oss": (oss, {"gran_k": 32, "ue8m0": True, "act": "swiglu_oai", "limit": 7.0, "interleaved": True}),
    "whole rows": (lambda h: silu(h, group=h.shape[-1] // 2), {"gran_k": 256, "ue8m0": False}),
    "reciprocal": (reciprocal, {"gran_k": 128, "ue8m0": False}),
}


def same(got, want, dtype):
    """Data and scales stand for the same numbers, up to a neighbouring code."""
    (q, s), (wq, ws) = got, want
    assert q.dtype == FP8 and q.shape == wq.shape and s.shape == ws.shape and s.stride() == ws.stride()
    a, b = ((x.float().reshape(y.numel(), -1) * y.reshape(-1, 1)) for x, y in (got, want))
    assert bool(((a - b).abs() <= 0.14 * b.abs() + ws.reshape(-1, 1) * 2**-8).all())
    assert float((q.float() != wq.float()).float().mean()) <= (0.02 if dtype == torch.float32 else 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spellings(dtype):
    x = (torch.randn(6, 512) * 2).to(dtype)
    x[2] = 0
    got, run = together({n: f for n, (f, _) in SPELLINGS.items()}, x, recognisers=ONLY)
    assert run.ops == ["swiglu_quant"] * len(SPELLINGS), run.reasons
    calls = run.calls("swiglu_quant")
    for (name, (f, attrs)), call in zip(SPELLINGS.items(), calls, strict=True):
        assert attrs.items() <= dict(call.kwargs).items(), name
        same(got[name], f(x), dtype)


def test_a_weight_per_row_three_dims_and_dynamic_rows():
    x = torch.randn(2, 3, 256).bfloat16()
    got, run = compiled(silu, x, recognisers=ONLY)
    assert run.ops == ["swiglu_quant"], run.reasons
    same(got, silu(x), x.dtype)

    def f(h, w):
        gate, up = h.chunk(2, -1)
        return quantised(F.gelu(gate) * up * w[:, None], group=64)

    h, w = torch.randn(6, 256), torch.rand(6) + 0.2
    torch._dynamo.mark_dynamic(w, 0)
    with torch.no_grad():
        got, run = compiled(f, h, w, recognisers=ONLY, dynamic=True)
    assert run.ops == ["swiglu_quant"], run.reasons
    assert run.call("swiglu_quant").args[1] is not None
    assert all(replay(c.key).ok for c in run.outcomes[-1].certificates)
    same(got, f(h, w), h.dtype)


def test_any_number_of_symbolic_dims():
    h = torch.randn(2, 3, 4, 5, 6, 7, 64)
    for d in range(6):
        torch._dynamo.mark_dynamic(h, d)
    torch._dynamo.reset()
    run = Run(ONLY)

    def whole_rows(h):
        return silu(h, group=32)

    with torch.no_grad():
        got = torch.compile(whole_rows, backend=run, fullgraph=True)(h)
    assert run.ops == ["swiglu_quant"], run.reasons
    same(got, whole_rows(h), h.dtype)


def test_rows_and_columns_of_one_size():
    """As many rows as columns: no size says which it is; halves with strides."""
    x = torch.randn(64, 256).bfloat16()[:, ::2]
    with torch.no_grad():
        got, run = compiled(lambda h: silu(h, group=32), x, recognisers=ONLY)
    assert run.ops == ["swiglu_quant"], run.reasons
    same(got, silu(x, group=32), x.dtype)


def test_a_gradient_may_be_asked_for():
    x = torch.randn(6, 256, requires_grad=True)
    _, run = compiled(silu, x, recognisers=ONLY)
    assert run.ops == [] and "a gradient may be asked for" in run.reasons[0]


def _second(h):
    gate, up = h.chunk(2, -1)
    return quantised(gate * F.silu(up))


def _both(h):
    gate, up = h.chunk(2, -1)
    y = F.silu(gate) * up
    return (*quantised(y), y)


def _rounded(h):
    gate, up = h.chunk(2, -1)
    y = (F.silu(gate) * up).float().view(h.shape[0], -1, 128)
    s = ((y.abs().amax(-1, keepdim=True).clamp(min=1e-4)) / 448).bfloat16().float()
    return (y / s).clamp(-448, 448).to(FP8), s


def _own(h):
    gate, up = h.chunk(2, -1)
    return quantised(gate.sin() * up)


def _clamped(h):
    gate, up = h.chunk(2, -1)
    return quantised((F.silu(gate) * up).clamp(max=50.0))


NEAR_MISSES = {
    "another bound": (lambda h: silu(h, floor=1e-12), "another lower bound"),
    "another largest": (lambda h: silu(h, largest=240.0), "not the rule of quant_fp8"),
    "second half": (_second, "applied to the second half"),
    "read elsewhere": (_both, "the activation is read elsewhere too"),
    "rounded scale": (_rounded, "not the rule of quant_fp8"),
    "another activation": (_own, "also computed from another tensor"),
    "a clamp far out": (_clamped, "no activation of the table"),
    "only the data": (lambda h: silu(h)[0], "its scales are not read by anything"),
}


def test_near_misses():
    x = torch.randn(6, 512) * 2
    got, run = together({name: f for name, (f, _) in NEAR_MISSES.items()}, x, recognisers=ONLY)
    assert run.ops == [] and len(run.reasons) == len(NEAR_MISSES)
    for (name, (f, words)), reason in zip(NEAR_MISSES.items(), run.reasons, strict=True):
        assert words in reason, (name, reason)
        first, other = (r[0] if isinstance(r, tuple) else r for r in (got[name], f(x)))
        assert torch.equal(first.float(), other.float())


def test_what_is_left_apart_is_still_two_ops():
    with torch.no_grad():
        x = torch.randn(6, 512)
        got, run = compiled(_both, x, recognisers=("swiglu_quant", "swiglu", "quantise"))
    assert sorted(run.ops) == ["quant_fp8", "swiglu"]
    same(got[:2], _both(x)[:2], x.dtype)


def test_an_fp8_mlp_is_three_ops():
    """Quantise, multiply, activate and quantise, multiply: as FP8 experts do for each of their groups."""
    w13, w2 = (ops.quant_fp8(torch.randn(n, k) * 0.1, gran=(128, 128)) for n, k in ((512, 384), (384, 256)))

    def product(q, s, w, ws):
        wide = (q.float().view(q.shape[0], -1, 128) * s[..., None]).flatten(1)
        return wide @ (w.float() * ws.repeat_interleave(128, 0).repeat_interleave(128, 1)).t()

    def f(x, w, ws, v, vs):
        return product(*silu(product(*quantised(x), w, ws)), v, vs)

    x = torch.randn(6, 384)
    with torch.no_grad():
        got, run = compiled(f, x, *w13, *w2, recognisers=("swiglu_quant", "swiglu", "quantise", "fp8_linear"))
        want = f(x, *w13, *w2)
    assert sorted(run.ops) == ["gemm_scaled", "gemm_scaled", "quant_fp8", "swiglu_quant"], run.reasons
    assert float((got - want).abs().max()) <= 1e-2 * float(want.abs().max())
