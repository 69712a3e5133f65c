"""Attention under a mask of chosen keys: every spelling becomes ``sparse_mqa_attention`` and computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ascend_deep.passes import certificates, replay
from tests.passes.mqa_spellings import INF, Backend

K = 4
H, G, D, E = 4, 2, 12, 8
SCALE = 0.31
LOWEST = torch.finfo(torch.float32).min


def compiled(f, dynamic=False):
    torch._dynamo.reset()
    backend = Backend(("sparse_attention",))
    run = torch.compile(f, backend=backend, fullgraph=True, dynamic=None if dynamic else False)

    def call(q, k, v, s, m):
        if dynamic:  # tokens are, heads and depths are not, as in models
            for t, dims in ((q, (2,)), (k, (2,)), (v, (2,)), (s, (1, 2)), (m, (1, 2))):
                torch._dynamo.mark_dynamic(t, dims)
        return run(q, k, v, s, m)

    return call, backend


def operands(b, s, t, dtype=torch.float32, g=G, seed=0):
    """q [B,H,S,D], k [B,G,T,D], v [B,G,T,E], indexer scores [B,S,T], mask [B,S,T]: one row sees nothing, one all."""
    gen = torch.Generator().manual_seed(seed + s)
    q, k, v = (torch.randn(b, *x, generator=gen).to(dtype) for x in ((H, s, D), (g, t, D), (g, t, E)))
    mask = torch.rand(b, s, t, generator=gen) > 0.4
    mask[0, 0], mask[-1, -1] = False, True
    return q, k, v, torch.randn(b, s, t, generator=gen), mask


def chosen(s):
    return s.topk(K, dim=-1).indices


def hidden(s):
    """Bool [B, 1, S, T]: not chosen."""
    return torch.ones_like(s, dtype=torch.bool).scatter(-1, chosen(s), False).unsqueeze(1)


def repeated(x, n=H // G):
    b, g, t, d = x.shape
    return x[:, :, None].expand(b, g, n, t, d).reshape(b, g * n, t, d)


def sdpa_bool(q, k, v, s, m):
    return F.scaled_dot_product_attention(
        q, repeated(k), repeated(v), attn_mask=m.unsqueeze(1) & ~hidden(s), scale=SCALE
    )


def sdpa_default_scale(q, k, v, s, m):
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=~(hidden(s) | ~m.unsqueeze(1)))


def sdpa_grouped(q, k, v, s, m):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m[:, None] & ~hidden(s), enable_gqa=True)


def sdpa_added(q, k, v, s, m):
    bias = torch.full(s.shape, -INF).scatter(-1, chosen(s), 0.0)
    bias = bias + torch.zeros(m.shape).masked_fill(~m, -INF)
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=bias[:, None])


def sdpa_no_mask(q, k, v, s, m):
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=~hidden(s), scale=-SCALE)


def attended(q, k, v, bias, scale=SCALE):
    scores = q @ repeated(k).transpose(2, 3) * scale + bias
    return F.dropout(scores.softmax(-1, dtype=torch.float32).to(q.dtype), 0.0, False) @ repeated(v)


def lowest(q, k, v, s, m):
    """As transformers writes it: a float mask with finfo.min, filled once more where keys are not chosen."""
    low = torch.finfo(q.dtype).min
    bias = torch.where(m, 0.0, low).to(q.dtype)[:, None].masked_fill(hidden(s), low)
    return attended(q, k, v, bias)


def added_twice(q, k, v, s, m):
    bias = torch.zeros(m.shape).masked_fill(~m, -INF).unsqueeze(1)
    index = torch.full(s.shape, -INF).scatter_(-1, chosen(s), 0).unsqueeze(1)
    return attended(q, k, v, bias + index)


def padding_and_causal(q, k, v, s, m):
    """Two masks of other shapes: keys of padding [B, 1, 1, T] and a causal one [S, T]."""
    causal = torch.ones(s.shape[1], s.shape[2], dtype=torch.bool).tril(s.shape[2] - s.shape[1])
    keep = m[:, -1][:, None, None] & causal & ~hidden(s)
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=keep)


def padding_alone(q, k, v, s, m):
    """One mask of a single row for all queries: it may hide every chosen key of some and none of others."""
    low = torch.finfo(q.dtype).min
    bias = torch.where(m[0, 1], 0.0, low).masked_fill(hidden(s), low)
    return attended(q, k, v, bias)


def filled(q, k, v, s, m):
    scores = torch.matmul(q, repeated(k).mT) / 2.5
    scores = scores.masked_fill(~m[:, None], -INF).masked_fill(hidden(s), -INF)
    return scores.softmax(-1) @ repeated(v)


def where(q, k, v, s, m):
    keep = torch.zeros(s.shape).scatter(-1, chosen(s), 1.0).bool()
    scores = torch.where((keep & m).unsqueeze(1), torch.einsum("bhsd,bhtd->bhst", q, repeated(k)) * SCALE, -INF)
    return torch.einsum("bhst,bhtd->bhsd", scores.softmax(-1), repeated(v))


def one_key_head(q, k, v, s, m):
    """The absorbed form of MLA: one key head, tokens before heads."""
    scores = torch.einsum("bshd,btd->bsht", q.transpose(1, 2), k[:, 0]) * SCALE
    bias = torch.zeros_like(s).masked_fill(~m, -INF).masked_fill(hidden(s)[:, 0], -INF)
    return torch.einsum("bsht,btd->bshd", (scores + bias.unsqueeze(2)).softmax(-1), v[:, 0])


def biased(q, k, v, s, m):
    """A mask that also adds numbers."""
    bias = (torch.linspace(-2, 2, s.shape[-1]) + 0 * s).masked_fill(~m, -INF)[:, None]
    return attended(q, k, v, bias.masked_fill(hidden(s), LOWEST))


def sinks(q, k, v, s, m):
    """A logit per head without a value, and the largest score taken off before the softmax."""
    low = torch.finfo(q.dtype).min
    scores = q @ repeated(k).mT * SCALE + torch.where(m, 0.0, low)[:, None].masked_fill(hidden(s), low)
    sink = torch.linspace(-1, 2, H).reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    scores = torch.cat([scores, sink], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return scores.softmax(-1)[..., :-1] @ repeated(v)


SPELLINGS = [
    (sdpa_bool, "zero"), (sdpa_default_scale, "zero"), (sdpa_grouped, "zero"), (sdpa_added, "zero"),
    (sdpa_no_mask, "zero"), (lowest, "mean"), (added_twice, "nan"), (padding_and_causal, "zero"), (filled, "nan"),
    (where, "nan"), (one_key_head, "nan"), (biased, "mean"),
    (sinks, "zero"), (padding_alone, "mean"),
]  # fmt: skip
CASES = [(f, e, torch.float32, i % 2 == 0) for i, (f, e) in enumerate(SPELLINGS)]
CASES += [(lowest, "mean", torch.float32, SPELLINGS.index((lowest, "mean")) % 2 == 1)]
CASES += [(f, e, torch.bfloat16, False) for f, e in SPELLINGS if f in (sdpa_bool, lowest)]


@pytest.mark.parametrize(
    ("f", "empty", "dtype", "dynamic"),
    [pytest.param(*c, id=f"{c[0].__name__}-{str(c[2])[6:]}-{'dynamic' if c[3] else 'static'}") for c in CASES],
)
def test_spelling(f, empty, dtype, dynamic) -> None:
    run, backend = compiled(f, dynamic)
    for b, s, t in ((2, 7, 21), (2, 5, 33)) if dynamic else ((2, 7, 21),):
        tensors = operands(b, s, t, dtype)
        with torch.no_grad():
            got, want = run(*tensors), f(*tensors)
        assert got.shape == want.shape and got.dtype == want.dtype and got.stride() == want.stride()
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert backend.found == ["sparse_mqa_attention"], backend.reasons
    assert f"empty={empty}" in backend.outcomes[-1].matches[0].spec
    assert not {"aten.scaled_dot_product_attention", "aten.softmax", "aten.scatter", "aten.matmul"} & set(backend.ops)
    rounds = "half precision" in " ".join(backend.outcomes[-1].matches[0].notes)
    assert rounds == (dtype == torch.bfloat16 and f is lowest)
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("f", [sdpa_bool, lowest], ids=lambda f: f.__name__)
def test_gradients(f) -> None:
    run, backend = compiled(f)
    grads = []
    for g in (f, run):
        q, k, v, s, m = operands(2, 7, 21)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = g(*leaves, s, m)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert backend.found == ["sparse_mqa_attention"], backend.reasons
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_keys_heads_are_not_repeated() -> None:
    """The op reads the two key heads as they are; the copy for four query heads is gone."""
    run, backend = compiled(sdpa_bool)
    run(*operands(2, 7, 21))
    call = next(n for n in backend.graphs[-1].graph.nodes if "sparse_mqa_attention" in str(n.target))
    assert call.args[1].meta["val"].shape[1] == G and "aten.expand" not in backend.ops


def test_a_scale_that_follows_a_symbolic_depth_is_refused() -> None:
    torch._dynamo.reset()
    backend = Backend(("sparse_attention",))
    run = torch.compile(sdpa_default_scale, backend=backend, fullgraph=True, dynamic=True)
    tensors = operands(3, 7, 21)
    assert torch.equal(run(*tensors), sdpa_default_scale(*tensors))
    assert backend.found == [] and "which is symbolic" in backend.reasons[0]


@pytest.mark.parametrize(("b", "s", "t"), [(1, 12, 24), (4, 4, 24), (12, 8, 17), (2, 1, 20)])
def test_coinciding_sizes(b, s, t) -> None:
    for f in (sdpa_default_scale, added_twice)[:: 2 if b == 1 else 1]:
        run, backend = compiled(f)
        tensors = operands(b, s, t)
        torch.testing.assert_close(run(*tensors), f(*tensors), rtol=1e-5, atol=1e-5, equal_nan=True)
        assert backend.found == ["sparse_mqa_attention"], backend.reasons


@pytest.mark.parametrize("f", [sdpa_grouped, lowest], ids=lambda f: f.__name__)
def test_replay(f, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ASCEND_DEEP_CERTIFICATES", str(tmp_path))
    run, backend = compiled(f)
    run(*operands(2, 7, 21))
    again = replay.replay(str(certificates.save(backend.outcomes[-1].certificates[0])))
    assert again.ok, again.text
