"""Dense products of bfloat16 become ``gemm_bf16`` where asked for; on CPUs they stay, and the report says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gemm_tools import compiled, near, together
from torch import nn

import ascend_deep

ONLY = ("linear",)
BF16 = torch.bfloat16


def operands():
    return torch.randn(6, 32).to(BF16), torch.randn(24, 32).to(BF16), torch.randn(24).to(BF16)


SPELLINGS = {
    "linear": (lambda x, w, b: F.linear(x, w), "nt"),
    "linear and bias": (lambda x, w, b: F.linear(x, w, b), "nt"),
    "@": (lambda x, w, b: x @ w.t(), "nn"),
    "mm": (lambda x, w, b: torch.mm(x, w.transpose(0, 1)), "nn"),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w.t()), "nn"),
    "einsum": (lambda x, w, b: torch.einsum("tk,nk->tn", x, w), "nt"),
    "three dims": (lambda x, w, b: F.linear(x.view(2, -1, x.shape[1]), w, b), "nt"),
    "first transposed": (lambda x, w, b: x.t() @ x, "nn"),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_spellings(dynamic):
    args = operands()
    functions = {name: f for name, (f, _) in SPELLINGS.items()}
    got, run = together(functions, *args, recognisers=ONLY, dynamic=dynamic)
    assert run.ops == ["gemm_bf16"] * len(SPELLINGS), run.reasons
    layouts = [call.kwargs["layout"] for call in run.calls("gemm_bf16")]
    assert sorted(layouts) == sorted(layout for _, layout in SPELLINGS.values())
    for name, f in functions.items():
        near(got[name], f(*args), 8e-3)


@pytest.mark.parametrize("name", ["linear and bias", "three dims"])
def test_training(name):
    f, _ = SPELLINGS[name]
    values = operands()
    leaves, eager = ([t.clone().requires_grad_() for t in values] for _ in range(2))
    got, run = compiled(f, *leaves, recognisers=ONLY)
    assert run.ops == ["gemm_bf16"], run.reasons
    want = f(*eager)
    near(got.detach(), want.detach(), 8e-3)
    seed = torch.randn(want.shape).to(BF16)
    pairs = zip(torch.autograd.grad(got, leaves, seed), torch.autograd.grad(want, eager, seed), strict=True)
    for a, e in pairs:
        near(a, e, 8e-3, strides=False)


def test_under_autocast_a_float32_layer_is_one_of_bfloat16():
    layer, x = nn.Linear(32, 24), torch.randn(6, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        got, run = compiled(layer, x, recognisers=ONLY)
        assert run.ops == ["gemm_bf16"], run.reasons
        near(got, layer(x), 8e-3)


NEAR_MISSES = {
    "batches": (lambda x, w, b: torch.bmm(x.view(2, 3, -1), w.view(2, 32, -1)), "batches"),
    "beta": (lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.5), "beta=0.5"),
    "a vector": (lambda x, w, b: x @ w[0], "vector"),
}


def test_near_misses():
    args = operands()
    functions = {name: f for name, (f, _) in NEAR_MISSES.items()}
    got, run = together(functions, *args, recognisers=ONLY)
    assert run.ops == [] and len(run.reasons) == len(NEAR_MISSES)
    for (name, (f, words)), reason in zip(NEAR_MISSES.items(), run.reasons, strict=True):
        assert words in reason
        near(got[name], f(*args), 8e-3)


def test_a_result_added_in_float32_keeps_its_rounding():
    """(x @ w).to(bfloat16) + float32: the rounding between product and sum stays."""
    x, w, _ = operands()
    extra = torch.randn(24)

    def f(x, w, extra):
        return (x @ w.t()) + extra

    got, run = compiled(f, x, w, extra, recognisers=ONLY)
    assert run.ops == ["gemm_bf16"] and run.call("gemm_bf16").kwargs["out_dtype"] == BF16
    assert got.dtype == torch.float32
    near(got, f(x, w, extra), 8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_not_looked_at(dtype):
    x, w = torch.randn(6, 32, dtype=dtype), torch.randn(24, 32, dtype=dtype)
    _, run = compiled(lambda x, w: x @ w.t(), x, w, recognisers=ONLY)
    assert run.ops == [] and run.reasons == []


def test_policy():
    layer, x = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8)).to(BF16), torch.randn(6, 32).to(BF16)

    def report(**options):
        torch._dynamo.reset()
        torch.compile(layer, backend="ascend_deep", options={"downstream": "eager", **options})(x)
        return ascend_deep.last_report()

    off = report()
    assert off.counts() == {} and off.misses == ()
    assert off.notes[0].startswith("linear is not profitable on this target (cpu), so 2 products stay as written")
    assert report(force=["linear"]).counts() == {"gemm_bf16": 2}
    planned = report(target="ascend910b")
    assert planned.counts() == {} and "(npu)" in planned.notes[0]
