"""Products of scaled FP8 operands become ``gemm_scaled`` however scales are spread; near misses say why they stay."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gemm_tools import compiled, near, together

import ascend_deep

ONLY = ("fp8_linear",)
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
T, K, N, B = 6, 384, 256, 128


def scales(*shape):
    return (torch.randn(shape) * 0.5).exp() * 0.02


def operands(k=K, n=N, block=B):
    x = torch.randn(T, k)
    sx = scales(T, -(-k // block))
    sw = scales(-(-n // block), -(-k // block))
    return x.to(FP8), sx, (torch.randn(n, k) * 2).to(FP8), sw


def spread(s, rows, columns):
    return s.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def by_block(x, s):
    """[T, K] data and [T, G] scales as floats."""
    return (x.float().view(x.shape[0], -1, B) * s[..., None]).view(x.shape[0], -1)


def weight(w, s):
    return w.float() * spread(s, B, B)


def weight_view(w, s):
    n, k = w.shape
    return (w.float().view(n // B, B, k // B, B) * s[:, None, :, None]).view(n, k)


SPELLINGS = {
    "linear": lambda x, sx, w, sw, b: F.linear(by_block(x, sx), weight(w, sw)),
    "weight by view": lambda x, sx, w, sw, b: F.linear(by_block(x, sx), weight_view(w, sw)),
    "@": lambda x, sx, w, sw, b: by_block(x, sx) @ weight(w, sw).t(),
    "scale first": lambda x, sx, w, sw, b: F.linear(by_block(x, sx), spread(sw, B, B) * w.to(torch.float32)),
    "bias": lambda x, sx, w, sw, b: F.linear(by_block(x, sx), weight(w, sw), b),
    "rounded after": lambda x, sx, w, sw, b: F.linear(by_block(x, sx), weight(w, sw)).bfloat16(),
    "bias, rounded": lambda x, sx, w, sw, b: F.linear(by_block(x, sx), weight(w, sw), b).to(BF16),
    "x by repeat": lambda x, sx, w, sw, b: F.linear(x.float() * sx.repeat_interleave(B, 1), weight(w, sw)),
    "weight stored [K, N]": lambda x, sx, w, sw, b: by_block(x, sx) @ weight(w.t().contiguous(), sw.t().contiguous()),
    "one scale per row": lambda x, sx, w, sw, b: (x.float() * sx[:, :1]) @ (w.float() * b.exp()[:, None]).t(),
    "per row, after": lambda x, sx, w, sw, b: (x.float() @ w.float().t()) * sx[:, :1] * b.exp(),
    "per row, after, rounded": lambda x, sx, w, sw, b: ((x.float() @ w.float().t()) * sx[:, :1] * b.exp()).to(BF16),
    "three dims": lambda x, sx, w, sw, b: F.linear(
        (x.view(2, -1, K).float().unflatten(-1, (-1, B)) * sx.view(2, -1, K // B, 1)).flatten(-2), weight(w, sw)
    ),
}


def test_spellings():
    args = (*operands(), torch.randn(N))
    got, run = together(SPELLINGS, *args, recognisers=ONLY)
    assert run.reasons == [] and run.ops == ["gemm_scaled"] * len(SPELLINGS)
    for name, f in SPELLINGS.items():
        want = f(*args)
        near(got[name], want, 1e-5 if want.dtype == torch.float32 else 8e-3)


def test_dynamic_rows():
    some = {name: SPELLINGS[name] for name in ("linear", "weight by view", "per row, after")}
    args = (*operands(), torch.randn(N))
    torch._dynamo.mark_dynamic(args[1], 0)
    got, run = together(some, *args, recognisers=ONLY, dynamic=True)
    assert run.ops == ["gemm_scaled"] * 3, run.reasons
    for name, f in some.items():
        near(got[name], f(*args), 1e-5)


def test_the_recipes_and_sizes_of_a_real_layer():
    """7168 x 2048 of DeepSeek-V3: solved at small sizes, blocks as large as in the model."""
    k, n = 7168, 2048
    x, sx, w, sw = operands(k, n)
    with torch.no_grad():
        got, run = compiled(lambda *a: F.linear(by_block(*a[:2]), weight(*a[2:])), x, sx, w, sw, recognisers=ONLY)
        assert run.ops == ["gemm_scaled"]
        call = run.call("gemm_scaled")
        assert list(call.kwargs["recipe_a"]) == [1, 128] and list(call.kwargs["recipe_b"]) == [128, 128]
        assert call.kwargs["layout"] == "nt" and call.kwargs["out_dtype"] == torch.float32
        near(got, F.linear(by_block(x, sx), weight(w, sw)), 1e-5)


def test_blocks_of_32():
    x, w = torch.randn(T, 256).to(FP8), torch.randn(96, 256).to(FP8)
    sx, sw = scales(T, 8), scales(96, 8)

    def f(x, sx, w, sw):
        return F.linear(x.float() * sx.repeat_interleave(32, -1), w.float() * sw.repeat_interleave(32, -1))

    with torch.no_grad():
        got, run = compiled(f, x, sx, w, sw, recognisers=ONLY)
        assert run.ops == ["gemm_scaled"]
        assert list(run.call("gemm_scaled").kwargs["recipe_b"]) == [1, 32]
        near(got, f(x, sx, w, sw), 1e-5)


def quantised(x):
    """[T, K] by hand, as references write it: its own lower bound, kept as it is."""
    blocks = x.float().view(x.shape[0], -1, B)
    s = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448.0
    return (blocks / s).to(FP8).view(x.shape), s.squeeze(-1)


def test_with_the_quantisation_of_the_activations_in_the_graph():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            _, _, w, sw = operands()
            self.w, self.s = torch.nn.Parameter(w, requires_grad=False), torch.nn.Parameter(sw, requires_grad=False)
            self.bias = torch.nn.Parameter(torch.randn(N), requires_grad=False)

        def forward(self, x):
            xq, sx = quantised(x)
            return F.linear(by_block(xq, sx), weight(self.w, self.s), self.bias).to(x.dtype)

    layer, x = Layer(), torch.randn(T, K).to(BF16)
    torch._dynamo.reset()
    run = torch.compile(layer, backend="ascend_deep", fullgraph=True, options={"downstream": "aot_eager"})
    got = run(x)  # with gradients on: nothing here asks for one
    report = ascend_deep.last_report()
    assert report.counts()["gemm_scaled"] == 1, str(report)
    near(got, layer(x), 8e-3)
    asks = torch.randn(T, K, dtype=BF16, requires_grad=True)
    torch._dynamo.reset()
    got = torch.compile(layer, backend="ascend_deep", fullgraph=True, options={"downstream": "aot_eager"})(asks)
    report = ascend_deep.last_report()
    assert "gemm_scaled" not in report.counts()
    assert any("a gradient may be asked for" in m.reason for m in report.misses)
    near(got, layer(asks), 1e-6)


NEAR_MISSES = {
    "weight alone": (lambda x, sx, w, sw, b: F.linear(x.float().sin(), weight(w, sw)), "only one factor is FP8"),
    "scaled operand in bfloat16": (
        lambda x, sx, w, sw, b: F.linear(by_block(x, sx).bfloat16().float(), weight(w, sw)), None,
    ),
    "two scales": (lambda x, sx, w, sw, b: F.linear(by_block(x, sx), weight(w, sw) * b.exp()[:, None]), "2 scales"),
    "no scale": (lambda x, sx, w, sw, b: F.linear(x.float(), weight(w, sw)), "no scales"),
    "shifted scales": (lambda x, sx, w, sw, b: F.linear(by_block(x, sx.roll(1, 1)), weight(w, sw.flip(0))), None),
    "scale squared": (lambda x, sx, w, sw, b: F.linear(by_block(x, sx * sx), weight(w, sw)), None),
    "an offset": (lambda x, sx, w, sw, b: F.linear(by_block(x, sx) + 0.5, weight(w, sw)), None),
    "doubled": (lambda x, sx, w, sw, b: F.linear(by_block(x, sx), weight(w, sw)) * 2.5, None),
    "columns mixed": (lambda x, sx, w, sw, b: F.linear(by_block(x, sx).flip(1), weight(w, sw)), None),
}  # fmt: skip


def test_near_misses_and_mutants():
    """Left with the words, or (words ``None``) fused in a way that is still what is written, or left."""
    args = (*operands(), torch.randn(N))
    functions = {name: f for name, (f, _) in NEAR_MISSES.items()}
    got, run = together(functions, *args, recognisers=ONLY)
    for name, (f, words) in NEAR_MISSES.items():
        assert words is None or any(words in reason for reason in run.reasons), (name, run.reasons)
        near(got[name], f(*args), 1e-5)
    assert len(run.ops) <= sum(words is None for _, words in NEAR_MISSES.values())


def test_bfloat16_operands_are_another_function():
    def f(x, sx, w, sw):
        return F.linear(by_block(x, sx).bfloat16(), weight(w, sw).bfloat16())

    args = operands()
    with torch.no_grad():
        got, run = compiled(f, *args, recognisers=ONLY)
    assert run.ops == []
    near(got, f(*args), 1e-6)


def test_the_scaled_weight_is_also_read():
    def f(x, sx, w, sw):
        wide = weight(w, sw)
        return F.linear(by_block(x, sx), wide), wide.abs().amax()

    args = operands()
    with torch.no_grad():
        (got, top), run = compiled(f, *args, recognisers=ONLY)
        assert run.ops == ["gemm_scaled"] and run.outcomes[-1].matches[0].outside_users == 1
        near(got, f(*args)[0], 1e-5)
        assert torch.equal(top, f(*args)[1])


def test_scaled_mm():
    x, w = torch.randn(16, 256).to(FP8), torch.randn(128, 256).to(FP8)
    sx, sw = scales(16, 1), scales(128, 1)

    def f(x, w, sx, sw):
        return torch._scaled_mm(x, w.t(), scale_a=sx, scale_b=sw.t(), out_dtype=BF16)

    with torch.no_grad():
        got, run = compiled(f, x, w, sx, sw, recognisers=("scaled_mm",))
        assert run.ops == ["gemm_scaled"], run.reasons
        near(got, f(x, w, sx, sw), 8e-3)
        torch._dynamo.reset()
        torch.compile(f, backend="ascend_deep", options={"downstream": "eager"})(x, w, sx, sw)
    report = ascend_deep.last_report()
    assert report.counts() == {} and "scaled_mm is not profitable on this target (cpu)" in report.notes[0]


def test_scaled_mm_with_one_number_each():
    x, _, w, _ = operands()

    def f(x, w, sx, sw):
        return torch._scaled_mm(x, w.t(), scale_a=sx, scale_b=sw, out_dtype=BF16)

    args = (x, w, torch.tensor(0.3), torch.tensor(2.0))
    with torch.no_grad():
        got, run = compiled(f, *args, recognisers=("scaled_mm",))
        assert run.ops == ["gemm_scaled"], run.reasons
        near(got, f(*args), 8e-3)


def test_rows_that_the_block_splits_before_a_residual():
    """The data are a matrix, and the factors or the product get the dims of the residual."""

    def before(x, sx, w, sw, residual):
        return F.linear(by_block(x, sx).view(2, 3, -1), weight(w, sw)).to(BF16) + residual

    def after(x, sx, w, sw, residual):
        return (by_block(x, sx) @ weight(w, sw).t()).view(2, 3, -1) + residual

    def two(x, sx, w, sw, residual):
        return residual + F.linear(by_block(x, sx).view(1, 2, 3, -1), weight(w, sw)).to(BF16)

    args = (*operands(), torch.randn(2, 3, N).to(BF16))
    with torch.no_grad():
        for f in (before, after, two):
            got, run = compiled(f, *args, recognisers=ONLY)
            assert run.ops == ["gemm_scaled"], run.reasons
            near(got, f(*args), 1e-2)
