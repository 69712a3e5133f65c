"""Products of operands upcast from bfloat16 become ``gemm_bf16``; what only looks like it stays, with the reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from gemm_tools import compiled, near, together

import ascend_deep
from ascend_deep.native import table

ONLY = ("upcast_matmul",)
BF16, F32 = torch.bfloat16, torch.float32


def operands(rows=6, k=32, n=24):
    return torch.randn(rows, k).to(BF16), torch.randn(n, k).to(BF16)


# x [T, K], w [N, K], bias [N] in float32.
SPELLINGS = {
    "linear": (lambda x, w, b: F.linear(x.float(), w.float()), "nt"),
    "linear and bias": (lambda x, w, b: F.linear(x.float(), w.float(), b), "nt"),
    "to": (lambda x, w, b: F.linear(x.to(F32), w.to(dtype=F32)), "nt"),
    "type": (lambda x, w, b: F.linear(x.type(F32), w.type(torch.FloatTensor)), "nt"),
    "@ of a transposed": (lambda x, w, b: x.float() @ w.float().t(), "nt"),
    "transposed before": (lambda x, w, b: x.float() @ w.t().float(), "nn"),
    "mm": (lambda x, w, b: torch.mm(x.float(), w.float().transpose(0, 1)), "nt"),
    "matmul": (lambda x, w, b: torch.matmul(x.float(), w.mT.float()), "nn"),
    "einsum": (lambda x, w, b: torch.einsum("tk,nk->tn", x.float(), w.float()), "nt"),
    "addmm": (lambda x, w, b: torch.addmm(b, x.float(), w.float().t()), "nt"),
    "addmm and alpha": (lambda x, w, b: torch.addmm(b, x.float(), w.float().t(), alpha=0.37), "nt"),
    "weight first": (lambda x, w, b: w.float() @ x.float().t(), "nt"),
    "x transposed": (lambda x, w, b: x.float().t() @ (x.float() * 1), None),
    "three dims": (lambda x, w, b: F.linear(x.float().view(2, -1, x.shape[1]), w.float()), "nt"),
    "one batch": (lambda x, w, b: torch.bmm(x.float()[None], w.float().t()[None])[0], "nt"),
    "rounded before": (lambda x, w, b: F.linear((x * 1.7).bfloat16().float(), w.float()), "nt"),
    "rounded after": (lambda x, w, b: F.linear(x.float(), w.float()).bfloat16(), "nt"),
    "bias, rounded after": (lambda x, w, b: F.linear(x.float(), w.float(), b).to(BF16), "nt"),
    "both from one": (lambda x, w, b: x.float() @ x.float().t(), "nt"),
    "columns are rows": (lambda x, w, b: x.float().t() @ x.float(), "tn"),
}
FUSED = [s for s, (_, layout) in SPELLINGS.items() if layout is not None]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_spellings(dynamic):
    (x, w), b = operands(), torch.randn(24)
    functions = {name: SPELLINGS[name][0] for name in FUSED}
    got, run = together(functions, x, w, b, recognisers=ONLY, dynamic=dynamic)
    assert run.reasons == [] and run.ops == ["gemm_bf16"] * len(FUSED)
    for name, f in functions.items():
        want = f(x, w, b)
        near(got[name], want, 1e-6 if want.dtype == F32 else 8e-3)
    layouts = sorted(call.kwargs["layout"] for call in run.calls("gemm_bf16"))
    assert layouts == sorted(SPELLINGS[name][1] for name in FUSED)
    assert all("same products, other summation order." in m.notes for m in run.outcomes[-1].matches)


@pytest.mark.parametrize("name", ["linear", "addmm and alpha", "three dims", "rounded after"])
def test_gradients_are_those_of_eager(name):
    f, _ = SPELLINGS[name]
    (x, w), b = operands(), torch.randn(24)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    eager = [t.clone().requires_grad_() for t in (x, w, b)]
    got, run = compiled(f, *leaves, recognisers=ONLY)
    want = f(*eager)
    assert run.ops == ["gemm_bf16"]
    seed = torch.randn(want.shape).to(want.dtype)
    used = 3 if "bias" in name or "addmm" in name else 2
    for a, e in zip(
        torch.autograd.grad(got, leaves[:used], seed), torch.autograd.grad(want, eager[:used], seed), strict=True
    ):
        # Both are rounded to bfloat16 once; sums in another order may fall on the other side.
        near(a, e, 4e-3 if a.dtype == BF16 else 1e-6, strides=False)


def test_the_attributes_of_the_op():
    (x, w), b = operands(), torch.randn(24)
    _, run = compiled(SPELLINGS["addmm and alpha"][0], x, w, b, recognisers=ONLY)
    assert dict(run.call("gemm_bf16").kwargs) == {"layout": "nt", "out_dtype": F32, "alpha": 0.37}
    _, run = compiled(SPELLINGS["rounded after"][0], x, w, b, recognisers=ONLY)
    assert dict(run.call("gemm_bf16").kwargs) == {"layout": "nt", "out_dtype": BF16, "alpha": None}


def test_batch_and_rows_that_multiply_to_the_columns():
    """[2, 16, 32] flattened is 32 rows of 32: every size of the block is one number."""
    x, w = torch.randn(2, 16, 32).to(BF16), torch.randn(32, 32).to(BF16)

    def f(x, w):
        return F.linear(x.float().view(32, 32), w.float())

    got, run = compiled(f, x, w, recognisers=ONLY)
    assert run.ops == ["gemm_bf16"]
    near(got, f(x, w), 1e-6)


def test_a_dynamic_batch_next_to_a_literal_one():
    x, w = torch.randn(7, 12, 32).to(BF16), torch.randn(24, 32).to(BF16)

    def f(x, w):
        return F.linear(x.float().flatten(0, 1), w.float())

    got, run = compiled(f, x, w, recognisers=ONLY, dynamic=True)
    assert run.ops == ["gemm_bf16"] or "small sizes" in run.reasons[0]
    near(got, f(x, w), 1e-6)


def test_the_unrounded_product_is_also_read():
    x, w = operands()

    def f(x, w):
        y = F.linear(x.float(), w.float())
        return y.bfloat16(), y.sum()

    (got, total), run = compiled(f, x, w, recognisers=ONLY)
    assert run.ops == ["gemm_bf16"] and len(run.calls("gemm_bf16")) == 1
    assert run.call("gemm_bf16").kwargs["out_dtype"] == F32
    near(got, f(x, w)[0], 8e-3)
    torch.testing.assert_close(total, f(x, w)[1], rtol=1e-4, atol=1e-3)


def test_the_converted_operand_is_also_read():
    x, w = operands()

    def f(x, w):
        wide = x.float()
        return F.linear(wide, w.float()), wide.square().mean(-1)

    (got, norm), run = compiled(f, x, w, recognisers=ONLY)
    assert run.ops == ["gemm_bf16"] and run.outcomes[-1].matches[0].outside_users == 1
    near(got, f(x, w)[0], 1e-6)
    assert torch.equal(norm, f(x, w)[1])


NEAR_MISSES = {
    "weight in float32": (lambda x, w, b: F.linear(x.float(), b[:, None] * w.float()), "second operand is float32"),
    "x in float32": (lambda x, w, b: F.linear(x.float() * 1.3, w.float()), "first operand is float32"),
    "float16": (lambda x, w, b: F.linear(x.half().float(), w.half().float()), "float16"),
    "beta": (lambda x, w, b: torch.addmm(b, x.float(), w.float().t(), beta=0.5), "beta=0.5"),
    "beta is zero": (lambda x, w, b: torch.addmm(b, x.float(), w.float().t(), beta=0), "beta=0"),
    "a vector": (lambda x, w, b: x.float() @ w[0].float(), "vector"),
}


def test_near_misses():
    (x, w), b = operands(), torch.randn(24)
    functions = {name: f for name, (f, _) in NEAR_MISSES.items()}
    got, run = together(functions, x, w, b, recognisers=ONLY)
    assert run.ops == [] and len(run.reasons) == len(NEAR_MISSES)
    for (name, (f, words)), reason in zip(NEAR_MISSES.items(), run.reasons, strict=True):
        assert words in reason, (name, reason)
        near(got[name], f(x, w, b), 1e-6)


BATCHES = {
    "bmm": (lambda a, b: torch.bmm(a.float(), b.float()), (6, 5, 32), (6, 32, 24), "nn"),
    "bmm of a transposed": (lambda a, b: torch.bmm(a.float(), b.float().mT), (6, 5, 32), (6, 24, 32), "nt"),
    "matmul": (lambda a, b: a.float() @ b.float().transpose(-1, -2), (2, 3, 5, 32), (2, 3, 24, 32), "nt"),
    "first transposed": (lambda a, b: a.float().mT @ b.float(), (4, 32, 5), (4, 32, 24), "tn"),
    "rounded after": (lambda a, b: torch.bmm(a.float(), b.float()).bfloat16(), (6, 5, 32), (6, 32, 24), "nn"),
}


BATCH_CASES = [("bmm", False), ("bmm", True), ("matmul", False), ("first transposed", False), ("rounded after", True)]


@pytest.mark.parametrize(("name", "dynamic"), [*BATCH_CASES, ("bmm of a transposed", True)])
def test_batches(name, dynamic):
    f, left, right, layout = BATCHES[name]
    leaves, eager = ([torch.randn(s).to(BF16) for s in (left, right)] for _ in range(2))
    for mine, other in zip(leaves, eager, strict=True):
        other.copy_(mine)
        mine.requires_grad_(not dynamic)
        other.requires_grad_(not dynamic)
    if dynamic:
        torch._dynamo.mark_dynamic(leaves[1], 0)
    got, run = compiled(f, *leaves, recognisers=ONLY, dynamic=dynamic)
    assert run.ops == ["einsum_bf16"], run.reasons
    assert run.outcomes[-1].matches[0].spec.startswith(f"einsum_bf16(layout={layout}")
    want = f(*eager)
    near(got.detach(), want.detach(), 1e-6 if want.dtype == F32 else 8e-3)
    if not dynamic:
        seed = torch.randn(want.shape).to(want.dtype)
        pairs = zip(torch.autograd.grad(got, leaves, seed), torch.autograd.grad(want, eager, seed), strict=True)
        for a, e in pairs:
            near(a, e, 4e-3, strides=False)


BATCHES_LEFT = {
    "heads in another place": lambda a, b: a.float().permute(1, 0, 2) @ b.float(),
    "one shared matrix": lambda a, b: torch.matmul(a.float(), b.float()[:1].expand(6, -1, -1)),
    "scaled": lambda a, b: torch.bmm(a.float() * 1.3, b.float()),
}


def test_batches_that_are_something_else():
    a, b = torch.randn(6, 6, 32).to(BF16), torch.randn(6, 32, 24).to(BF16)
    got, run = together(BATCHES_LEFT, a, b, recognisers=ONLY)
    assert run.ops == [] and len(run.reasons) == len(BATCHES_LEFT)
    for name, f in BATCHES_LEFT.items():
        near(got[name], f(a, b), 1e-6)


def test_what_has_nothing_to_do_with_it_is_not_looked_at():
    x, w = operands()
    for f in (lambda x, w: F.linear(x, w), lambda x, w: F.linear(x.float().double(), w.float().double())):
        _, run = compiled(f, x, w, recognisers=ONLY)
        assert run.ops == [] and run.reasons == []


def test_autocast_inside_makes_it_a_product_of_bfloat16():
    """Autocast rounds the operands again, so there is no float32 product; the result is that of eager either way."""
    x, w = operands()

    def f(x, w):
        with torch.autocast("cpu", dtype=BF16):
            return F.linear(x.float(), w.float())

    got, run = compiled(f, x, w, recognisers=ONLY)
    assert run.ops == [] and got.dtype == BF16
    near(got, f(x, w), 8e-3)


def test_autocast_outside_with_a_float32_region_inside():
    x, w = operands()

    def f(x, w):
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), w.float())

    with torch.autocast("cpu", dtype=BF16):
        got, run = compiled(f, x, w, recognisers=ONLY)
    assert run.ops == ["gemm_bf16"] and got.dtype == F32
    near(got, f(x, w), 1e-6)


# One change each that makes the block another function. None may be fused as if it were not there.
MUTANTS = {
    "a rounding inside": lambda x, w: F.linear(x.float(), w.float()).bfloat16().float(),
    "scaled before": lambda x, w: F.linear(x.float() * 1.03, w.float()),
    "scaled after": lambda x, w: F.linear(x.float(), w.float()) * 1.03,
    "clamped": lambda x, w: F.linear(x.float().clamp(max=1.5), w.float()),
    "another x": lambda x, w: F.linear(x.flip(0).float(), w.float()),
    "weight reversed": lambda x, w: F.linear(x.float(), w.float().flip(1)),
    "permuted rows": lambda x, w: F.linear(x.float(), w.float())[[5, 4, 3, 2, 1, 0]],
}


def test_mutants_stay_what_they_are():
    x, w = operands()
    got, _ = together(MUTANTS, x, w, recognisers=ONLY)
    for name, f in MUTANTS.items():
        near(got[name], f(x, w), 1e-6)


def test_a_square_weight_that_is_transposed():
    x, w = torch.randn(6, 32).to(BF16), torch.randn(32, 32).to(BF16)
    both = {"as stored": lambda x, w: F.linear(x.float(), w.float()), "turned": lambda x, w: x.float() @ w.float()}
    got, run = together(both, x, w, recognisers=ONLY)
    assert sorted(c.kwargs["layout"] for c in run.calls("gemm_bf16")) == ["nn", "nt"]
    for name, f in both.items():
        near(got[name], f(x, w), 1e-6)


def test_expert_choices_do_not_change():
    """A router as models write it: the same experts for 4096 random tokens, the product still sums in float32."""
    x, w = torch.randn(4096, 64).to(BF16), torch.randn(32, 64).to(BF16)

    def router(x, w):
        return F.linear(x.float(), w.float()).softmax(-1).topk(4, -1)

    (_, ids), run = compiled(router, x, w, recognisers=("router", "upcast_matmul"))
    assert sorted(run.ops) == ["gemm_bf16", "moe_route"]
    assert run.call("gemm_bf16").kwargs["out_dtype"] == F32
    assert torch.equal(ids.sort(-1).values, router(x, w)[1].sort(-1).values)


def test_policy(monkeypatch):
    """On for CPUs; on for NPUs with the library; elsewhere off with a sentence, and on where the user says so."""
    x, w = operands()

    def f(x, w):
        return F.linear(x.float(), w.float())

    def report(**options):
        torch._dynamo.reset()
        torch.compile(f, backend="ascend_deep", options={"downstream": "eager", **options})(x, w)
        return ascend_deep.last_report()

    assert report().counts() == {"gemm_bf16": 1}
    off = report(target="cuda")
    assert off.counts() == {} and off.misses == ()
    assert off.notes[0].startswith("upcast_matmul is not profitable on this target (cuda), so one product stays as")
    assert report(target="cuda", force=["upcast_matmul"]).counts() == {"gemm_bf16": 1}
    planned = report(target="ascend950")
    assert planned.counts() == {} and "only deep_gemm has a kernel that is faster" in planned.notes[0]
    # Where the library is, NPUs profit.
    there = tuple(dataclasses.replace(p, unavailable=lambda: None) for p in table.PRIORITY["npu"][:1])
    monkeypatch.setitem(table.PRIORITY, "npu", there)
    assert report(target="ascend950").counts() == {"gemm_bf16": 1}
    assert report(target="ascend950", disable=["upcast_matmul"]).counts() == {}
