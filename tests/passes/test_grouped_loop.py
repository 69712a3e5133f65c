"""Loops over groups of rows, and weight gradients of grouped products, become one grouped product where asked for."""

from __future__ import annotations

import torch
from gemm_tools import compiled, near, together

from ascend_deep.passes.replay import replay

ONLY = ("grouped_loop",)
BF16 = torch.bfloat16
SIZES = (3, 0, 8, 5)
BOUNDS = ((0, 3), (3, 3), (3, 11), (11, 16))


def operands(rows=16, m=32, n=24):
    return torch.randn(rows, m).to(BF16), torch.randn(rows, n).to(BF16), torch.randn(4, m, n).to(BF16)


def written(x, dy, w):
    out = torch.zeros(4, x.shape[1], dy.shape[1], dtype=BF16)
    for g, (s, e) in enumerate(BOUNDS):
        out[g] = x[s:e].t() @ dy[s:e]
    return out


def by_split(x, dy, w):
    return torch.stack([a.T.mm(b) for a, b in zip(x.split(SIZES), dy.split(SIZES), strict=True)])


ALONG = {
    "stack": lambda x, dy, w: torch.stack([x[s:e].t() @ dy[s:e] for s, e in BOUNDS]),
    "the other way": lambda x, dy, w: torch.stack([dy[s:e].mT @ x[s:e] for s, e in BOUNDS]),
    "einsum": lambda x, dy, w: torch.stack([torch.einsum("rm,rn->mn", x[s:e], dy[s:e]) for s, e in BOUNDS]),
    "split": by_split,
    "written": written,
    "float32": lambda x, dy, w: torch.stack([x[s:e].float().t() @ dy[s:e].float() for s, e in BOUNDS]),
    "turned": lambda x, dy, w: torch.stack([(x[s:e].t() @ dy[s:e]).t() for s, e in BOUNDS]),
    "padded": lambda x, dy, w: torch.stack([x[s:e].t() @ dy[s:e] for s, e in ((0, 3), (8, 13))]),
}
ROWS = {
    "forward": lambda x, dy, w: torch.cat([x[s:e] @ w[g] for g, (s, e) in enumerate(BOUNDS)]),
    "input gradient": lambda x, dy, w: torch.cat([dy[s:e] @ w[g].t() for g, (s, e) in enumerate(BOUNDS)]),
}


def test_weight_gradients():
    args = operands()
    got, run = together(ALONG, *args, recognisers=ONLY)
    assert run.ops == ["k_grouped_gemm_bf16"] * len(ALONG), run.reasons
    for name, f in ALONG.items():
        near(got[name], f(*args), 8e-3 if name != "float32" else 1e-6, strides=name != "turned")
    calls = dict(zip(ALONG, run.calls("k_grouped_gemm_bf16"), strict=True))
    assert calls["stack"].kwargs["ks"] == list(SIZES) and calls["stack"].kwargs["alignment"] == 1
    assert calls["padded"].kwargs["alignment"] == 8 and calls["float32"].kwargs["out_dtype"] == torch.float32


def test_rows_of_groups():
    args = operands()
    got, run = together(ROWS, *args, recognisers=ONLY)
    assert run.ops == ["m_grouped_gemm_bf16"] * len(ROWS), run.reasons
    for name, f in ROWS.items():
        near(got[name], f(*args), 8e-3)
    assert all(replay(c.key).ok for c in run.outcomes[-1].certificates)
    assert {c.kwargs["layout"] for c in run.calls("m_grouped_gemm_bf16")} == {"nn", "nt"}


def test_sizes_that_coincide():
    """As many columns as rows, or as a bound."""
    args = operands(16, 16, 11)
    got, run = together({"stack": ALONG["stack"], "forward": ROWS["forward"]}, *args, recognisers=ONLY)
    assert sorted(run.ops) == ["k_grouped_gemm_bf16", "m_grouped_gemm_bf16"], run.reasons
    near(got["stack"], ALONG["stack"](*args), 8e-3)
    near(got["forward"], ROWS["forward"](*args), 8e-3)


def test_a_step_of_training_by_hand():
    """Forward, both gradients of grouped products and of a linear layer, written out: all of them are found."""

    def step(x, w, v, ends):
        h = torch._grouped_mm(x, w, offs=ends)
        y = h @ v.t()
        d_v = y.t() @ h
        d_h = y @ v
        d_x = torch._grouped_mm(d_h, w.transpose(1, 2), offs=ends)
        d_w = torch._grouped_mm(x.t(), d_h, offs=ends)
        return d_x, d_w, d_v

    x, w, v = torch.randn(16, 32).to(BF16), torch.randn(4, 32, 24).to(BF16) / 5, torch.randn(40, 24).to(BF16) / 5
    ends = torch.tensor([3, 3, 11, 16], dtype=torch.int32)
    with torch.no_grad():
        got, run = compiled(step, x, w, v, ends, recognisers=("grouped_mm", "linear"), dynamic=True)
        want = step(x, w, v, ends)
    assert sorted(run.ops) == ["gemm_bf16"] * 3 + ["k_grouped_gemm_bf16"] + ["m_grouped_gemm_bf16"] * 2, run.reasons
    for a, b in zip(got, want, strict=True):
        near(a, b, 2e-2)
    assert all(replay(c.key).ok for c in run.outcomes[-1].certificates)


def test_gradients_of_a_loop():
    leaves, eager = ([t.clone().requires_grad_() for t in operands()] for _ in range(2))
    for leaf, other in zip(leaves, eager, strict=True):
        other.data.copy_(leaf.data)
    got, run = compiled(ALONG["stack"], *leaves, recognisers=ONLY)
    assert run.ops == ["k_grouped_gemm_bf16"]
    want = ALONG["stack"](*eager)
    seed = torch.randn(want.shape).to(BF16)
    pairs = zip(torch.autograd.grad(got, leaves[:2], seed), torch.autograd.grad(want, eager[:2], seed), strict=True)
    for a, b in pairs:
        near(a, b, 8e-3, strides=False)


def read_elsewhere(x, dy, w):
    parts = [x[s:e].t() @ dy[s:e] for s, e in BOUNDS]
    return torch.stack(parts), parts[2].sum()


NEAR_MISSES = {
    "other order": (
        lambda x, dy, w: torch.stack([x[s:e].t() @ dy[s:e] for s, e in BOUNDS[::-1]]), "not runs of rows that follow",
    ),
    "gaps": (lambda x, dy, w: torch.stack([x[s:e].t() @ dy[s:e] for s, e in ((1, 4), (6, 9))]), "without gaps"),
    "overlap": (lambda x, dy, w: torch.stack([x[s:e].t() @ dy[s:e] for s, e in ((0, 4), (3, 9))]), "without gaps"),
    "shifted": (
        lambda x, dy, w: torch.stack([x[s:e].t() @ dy[s + 1 : e + 1] for s, e in ((0, 4), (4, 9))]), "not the sums",
    ),
    "scaled": (lambda x, dy, w: torch.stack([2 * (x[s:e].t() @ dy[s:e]) for s, e in BOUNDS]), None),
    "read elsewhere": (read_elsewhere, "is read elsewhere"),
    "other matrices": (
        lambda x, dy, w: torch.cat([x[s:e] @ w[3 - g] for g, (s, e) in enumerate(BOUNDS)]), "without gaps",
    ),
    "two tensors": (lambda x, dy, w: torch.stack([x[:4].t() @ dy[:4], dy[:4].t() @ x[:4]][:1] * 1 + [
        x[4:8].t() @ x[4:8, :24]]), "not of parts of two tensors"),
    "rounded in between": (
        lambda x, dy, w: torch.stack([(x[s:e].t() @ dy[s:e]).float() for s, e in BOUNDS]), "not the sums",
    ),
}  # fmt: skip


def test_near_misses():
    args = operands()
    got, run = together({n: f for n, (f, _) in NEAR_MISSES.items()}, *args, recognisers=ONLY)
    assert run.ops == []
    wanted = [(n, w) for n, (_, w) in NEAR_MISSES.items() if w]
    assert len(run.reasons) == len(wanted), run.reasons
    for (name, words), reason in zip(wanted, run.reasons, strict=True):
        assert words in reason, (name, reason)
    for name, (f, _) in NEAR_MISSES.items():
        first, other = (r[0] if isinstance(r, tuple) else r for r in (got[name], f(*args)))
        assert torch.equal(first, other), name


def test_other_dtypes_and_symbolic_rows():
    x, dy, w = operands()
    with torch.no_grad():
        _, run = compiled(ALONG["stack"], x.float(), dy.float(), w, recognisers=ONLY)
        assert run.ops == [] and all("float32, not bfloat16" in r for r in run.reasons)
