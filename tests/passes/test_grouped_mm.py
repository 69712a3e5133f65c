"""Grouped products outside of experts become ``m_grouped_gemm_bf16`` where asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gemm_tools import compiled, near, together

import ascend_deep

ONLY = ("grouped_mm",)
BF16 = torch.bfloat16
ENDS = (3, 3, 11, 16)


def operands(rows=16, k=32, n=24):
    ends = torch.tensor(ENDS, dtype=torch.int32)
    return torch.randn(rows, k).to(BF16), torch.randn(4, n, k).to(BF16), ends


def turned(a, b, ends):
    return torch._grouped_mm(a, b.transpose(1, 2), offs=ends)


SPELLINGS = {
    "transposed": turned,
    "as stored": lambda a, b, ends: torch._grouped_mm(a, b.transpose(1, 2).contiguous(), offs=ends),
    "functional": lambda a, b, ends: F.grouped_mm(a, b.mT, offs=ends),
    "out_dtype": lambda a, b, ends: torch._grouped_mm(a, b.transpose(1, 2), offs=ends, out_dtype=BF16),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_spellings(dynamic):
    args = operands()
    got, run = together(SPELLINGS, *args, recognisers=ONLY, dynamic=dynamic)
    assert run.ops == ["m_grouped_gemm_bf16"] * len(SPELLINGS), run.reasons
    for name, f in SPELLINGS.items():
        near(got[name], f(*args), 8e-3)
    assert all(c.kwargs["alignment"] == 1 and c.kwargs["layout"] == "nn" for c in run.calls("m_grouped_gemm_bf16"))


def test_training():
    values = operands()
    leaves, eager = ([values[0].clone().requires_grad_(), values[1].clone().requires_grad_()] for _ in range(2))
    got, run = compiled(turned, *leaves, values[2], recognisers=ONLY)
    assert run.ops == ["m_grouped_gemm_bf16"]
    want = turned(*eager, values[2])
    seed = torch.randn(want.shape).to(BF16)
    pairs = zip(torch.autograd.grad(got, leaves, seed), torch.autograd.grad(want, eager, seed), strict=True)
    for a, e in pairs:
        near(a, e, 8e-3, strides=False)


def test_sizes_that_coincide():
    args = operands(16, 16, 16)
    with torch.no_grad():
        got, run = compiled(turned, *args, recognisers=ONLY)
        assert run.ops == ["m_grouped_gemm_bf16"]
        near(got, turned(*args), 8e-3)


def test_rows_behind_the_last_group_are_zero():
    a, b, ends = operands()
    ends = ends - 5
    ends.clamp_(min=0)
    with torch.no_grad():
        got, run = compiled(turned, a, b, ends, recognisers=ONLY)
    assert run.ops == ["m_grouped_gemm_bf16"] and not got[11:].any()
    near(got[:11], turned(a, b, ends)[:11], 8e-3)
    assert any("rows behind the last group are zero" in n for n in run.outcomes[-1].matches[0].notes)


NEAR_MISSES = {
    "along columns": (lambda a, b, ends: torch._grouped_mm(b, a.t(), offs=ends), "not the rows of a matrix"),
    "no groups": (lambda a, b, ends: torch._grouped_mm(a.view(4, 4, -1), b.transpose(1, 2)), "no ends of groups"),
}  # fmt: skip


def test_near_misses():
    args = operands()
    functions = {name: f for name, (f, _) in NEAR_MISSES.items()}
    got, run = together(functions, *args, recognisers=ONLY)
    assert run.ops == [] and len(run.reasons) == len(NEAR_MISSES)
    for (name, (f, words)), reason in zip(NEAR_MISSES.items(), run.reasons, strict=True):
        assert words in reason
        near(got[name], f(*args), 8e-3)


MUTANTS = {
    "matrices rolled": lambda a, b, ends: turned(a, b.roll(1, 0), ends),
    "rows turned": lambda a, b, ends: turned(a.flip(0), b, ends),
    "other ends": lambda a, b, ends: turned(a, b, (ends + 2).clamp(max=16)),
    "scaled": lambda a, b, ends: turned(a, b, ends) * 1.25,
}


def test_mutants_stay_what_they_are():
    args = operands()
    got, run = together(MUTANTS, *args, recognisers=ONLY)
    assert run.ops == ["m_grouped_gemm_bf16"] * len(MUTANTS)
    for name, f in MUTANTS.items():
        near(got[name], f(*args), 8e-3)


def test_policy_and_experts():
    """Off on CPUs with a sentence; a product that is part of experts is not counted, for it is fused with them."""
    from experts_blocks import hf_experts, routing

    torch._dynamo.reset()
    args = operands()
    torch.compile(turned, backend="ascend_deep", options={"downstream": "eager"})(*args)
    report = ascend_deep.last_report()
    assert report.counts() == {} and "grouped_mm is not profitable on this target (cpu)" in report.notes[0]
    pytest.importorskip("transformers")
    experts = hf_experts("mixtral", "MixtralExperts", "grouped_mm", BF16)
    idx, weights = routing(8, dtype=BF16)
    torch._dynamo.reset()
    options = {"downstream": "eager", "force": ["grouped_mm"]}
    with torch.no_grad():
        torch.compile(experts, backend="ascend_deep", options=options)(torch.randn(8, 32).to(BF16), idx, weights)
    assert ascend_deep.last_report().counts() == {"moe_experts": 1}
