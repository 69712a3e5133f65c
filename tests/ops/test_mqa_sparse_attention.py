"""``sparse_mqa_attention`` against dense attention in float64 with a mask that hides what is not selected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep import ops

RUNNERS = {"reference": lambda op: op.reference, "op": lambda op: op.overload}


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float,
    empty: str = "zero",
    fill: float = -3e38,
) -> tuple[Tensor, Tensor]:
    """A softmax over all T keys in f64, hidden keys at -inf or, for "mean", at ``fill``; one column for the sink."""
    b, heads, s, _ = q.shape
    keys, repeat = k.shape[2], heads // k.shape[1]
    k, v = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    hidden = torch.ones(b, s, keys + 1, dtype=torch.bool)
    hidden.scatter_(-1, torch.where((idx < 0) | (idx >= keys), keys, idx.long()), False)
    hidden = hidden[..., :keys].unsqueeze(1).expand(b, heads, s, keys)
    low = fill if empty == "mean" else -torch.inf
    if mask is not None and mask.dtype == torch.bool:
        added = torch.zeros(b, heads, s, keys, dtype=torch.float64).masked_fill(hidden | ~mask, low)
    else:
        added = torch.zeros((), dtype=torch.float64) if mask is None else mask.double()
        added = added.expand(b, heads, s, keys).masked_fill(hidden, low)
    logits = q.double() @ k.transpose(-1, -2) * scale + added
    column = torch.full((heads,), -torch.inf, dtype=torch.float64) if sink is None else sink.double()
    logits = torch.cat((logits, column.view(1, -1, 1, 1).expand(b, heads, s, 1)), -1)
    nothing = (logits == -torch.inf).all(-1, keepdim=True)
    # The safe softmax of SDPA; masked before and after, so that its gradient is 0 and not NaN.
    p = logits.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0 if empty == "zero" else torch.nan)
    lse = logits.masked_fill(nothing, 0.0).logsumexp(-1)
    lse = lse.masked_fill(nothing[..., 0], -torch.inf if empty == "zero" else torch.nan)
    return p[..., :keys] @ v, lse


def close(result: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    tolerance = ops.op("sparse_mqa_attention").tolerance[dtype]
    finite = wanted[wanted.isfinite()].abs()
    # The log of a row of hidden keys alone is the fill itself; it does not count as the size of the others.
    finite = finite[finite < 1e29]
    scale = float(finite.max()) if finite.numel() else 1.0
    torch.testing.assert_close(
        result.double(), wanted, rtol=tolerance.rtol, atol=tolerance.atol * scale, equal_nan=True
    )


@pytest.mark.parametrize("runner", list(RUNNERS))
@pytest.mark.parametrize("sample", [pytest.param(s, id=s.name) for s in ops.op("sparse_mqa_attention").samples()])
def test_equals_dense_attention_with_a_mask(sample: ops.Sample, runner: str) -> None:
    q = sample.args[0]
    out, lse = RUNNERS[runner](ops.op("sparse_mqa_attention"))(*sample.args, **sample.kwargs)
    wanted, wanted_lse = dense(*sample.args, **sample.kwargs)
    assert out.dtype == q.dtype and out.is_contiguous() and lse.is_contiguous()
    close(out, wanted, q.dtype)
    close(lse, wanted_lse, torch.float64 if q.dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "key_heads", "depth", "value_depth", "topk"),
    [(128, 1, 576, 512, 100), (13, 1, 40, 72, 64), (8, 8, 192, 128, 49), (6, 2, 33, 17, 48), (9, 3, 64, 5, 200)],
)
def test_sizes_of_models(
    heads: int, key_heads: int, depth: int, value_depth: int, topk: int, dtype: torch.dtype
) -> None:
    q, k = torch.randn(1, heads, 3, depth).to(dtype), torch.randn(1, key_heads, 150, depth).to(dtype)
    v = k[..., :value_depth] if value_depth < depth else torch.randn(1, key_heads, 150, value_depth).to(dtype)
    idx = torch.rand(1, 3, max(150, topk)).argsort(-1)[..., :topk]
    out, lse = ops.sparse_mqa_attention(q, k, v, idx, scale=depth**-0.5)
    wanted, wanted_lse = dense(q, k, v, idx, None, None, depth**-0.5)
    close(out, wanted, dtype)
    close(lse, wanted_lse, torch.float32)


@pytest.mark.parametrize("runner", list(RUNNERS))
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_not_selected_may_hold_anything(runner: str, masked: bool) -> None:
    q, k, v = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 8)
    idx = torch.tensor([[[3, 9, -1, 29], [0, 5, 31, 4]]])
    mask = torch.ones(1, 1, 1, 30, dtype=torch.bool)
    if masked:
        mask[..., 9] = False
        mask[..., 4] = False
    used = [0, 3, 5, 29] if masked else [0, 3, 4, 5, 9, 29]
    unused = torch.tensor([t for t in range(30) if t not in used])
    call = RUNNERS[runner](ops.op("sparse_mqa_attention"))
    attributes = {"scale": 0.3, "empty": "zero", "fill": -3e38}
    wanted = call(q, k, v, idx, mask, None, **attributes)
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[:, :, unused], dirty_v[:, :, unused] = torch.nan, torch.inf
    for a, b in zip(call(q, dirty_k, dirty_v, idx, mask, None, **attributes), wanted, strict=True):
        assert torch.equal(a, b)


def test_follows_the_indexer() -> None:
    """Indexer and attention together equal what models compute through a mask."""
    s = t = 20
    q, k, v = torch.randn(2, 4, s, 16), torch.randn(2, 4, t, 16), torch.randn(2, 4, t, 8)
    iq, ik, weights = torch.randn(2, s, 3, 16), torch.randn(2, t, 16), torch.randn(2, s, 3)
    causal = torch.ones(s, t, dtype=torch.bool).tril()
    _, idx = ops.mqa_topk(iq, ik, weights, mask=causal[None], topk=6, scale=0.25, outside="rank_last")
    selected = torch.zeros(2, s, t, dtype=torch.bool).scatter(-1, idx, True) & causal
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, selected.unsqueeze(1), scale=0.3)
    out, _ = ops.sparse_mqa_attention(q, k, v, idx, causal[None, None], scale=0.3)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


GRADED = [s for s in ops.op("sparse_mqa_attention").samples() if s.name != "out_of_range"]


@pytest.mark.parametrize("sample", [pytest.param(s, id=s.name) for s in GRADED])
def test_gradients_equal_those_of_dense_attention(sample: ops.Sample) -> None:
    """Against autograd of the dense form in float64, lse included."""
    grads = []
    for call in (dense, lambda *a, **kw: ops.op("sparse_mqa_attention").overload(*a, **kw)):
        args = [a.detach().clone() if isinstance(a, Tensor) else a for a in sample.args]
        args = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        leaves = [a.requires_grad_() for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        out, lse = call(*args, **sample.kwargs)
        g = torch.Generator().manual_seed(5)
        loss = (out * torch.randn(out.shape, generator=g, dtype=torch.float64)).sum()
        seen = lse.detach().isfinite() & (lse.detach().abs() < 1e29)
        loss = loss + torch.where(seen, lse, 0.0).mul(torch.randn(lse.shape, generator=g)).sum()
        grads.append(list(torch.autograd.grad(loss, leaves, allow_unused=True)))
    for wanted, found in zip(*grads, strict=True):
        if wanted is None:
            assert found is None or not bool(found.any())
            continue
        if sample.kwargs["empty"] == "nan":
            continue  # see below
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("runner", list(RUNNERS))
def test_rows_that_see_nothing(runner: str) -> None:
    """What each value of ``empty`` gives, for rows hidden by the mask and rows whose list is all -1."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
    idx = torch.rand(2, 5, 9).argsort(-1)[..., :3]
    idx[1, 2] = -1
    keep = torch.ones(2, 1, 5, 9, dtype=torch.bool)
    keep[0, 0, 4] = False
    call = RUNNERS[runner](ops.op("sparse_mqa_attention"))
    for empty in ("zero", "nan", "mean"):
        attributes = {"scale": 0.3, "empty": empty, "fill": -3e38}
        out, lse = call(q, k, v, idx, keep, None, **attributes)
        wanted, wanted_lse = dense(q, k, v, idx, keep, None, **attributes)
        close(out, wanted, torch.float32)
        rest = torch.ones(2, 4, 5, dtype=torch.bool)
        rest[0, :, 4] = rest[1, :, 2] = False
        close(lse[rest], wanted_lse[rest], torch.float32)
        value = {"zero": -torch.inf, "nan": torch.nan, "mean": -3e38}[empty]
        assert torch.equal(lse[~rest], torch.full((8,), value)) or (empty == "nan" and bool(lse[~rest].isnan().all()))


def test_gradients_of_nan_rows_are_nan() -> None:
    q, k, v = (torch.randn(1, 2, 4, 6, requires_grad=True) for _ in range(3))
    keep = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    keep[..., 2, :] = False
    idx = torch.rand(1, 4, 4).argsort(-1)[..., :2]
    out, _ = ops.sparse_mqa_attention(q, k, v, idx, keep, scale=0.3, empty="nan")
    assert out[:, :, 2].isnan().all() and not out[:, :, [0, 1, 3]].isnan().any()
    dq, dk, _ = torch.autograd.grad(out.sum(), (q, k, v))
    assert dq[:, :, 2].isnan().all() and not dq[:, :, 1].isnan().any() and dk.isnan().all()


def test_gradients_in_half_precision() -> None:
    q, k, v = (torch.randn(2, 4, 7, 16).bfloat16().requires_grad_() for _ in range(3))
    idx = torch.rand(2, 7, 7).argsort(-1)[..., :3]
    out, _ = ops.sparse_mqa_attention(q, k, v, idx, scale=0.4)
    weights = torch.randn(out.shape)
    found = torch.autograd.grad((out * weights).sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad((dense(*wide, idx, None, None, 0.4)[0] * weights).sum(), wide)
    tolerance = ops.op("sparse_mqa_attention_backward").tolerance[torch.bfloat16]
    for f, w in zip(found, wanted, strict=True):
        assert f.dtype == torch.bfloat16
        atol = tolerance.atol * float(w.abs().max())
        torch.testing.assert_close(f.double(), w, rtol=tolerance.rtol, atol=atol)


def test_no_second_backward() -> None:
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    k = torch.randn(1, 1, 9, 8)
    out, _ = ops.sparse_mqa_attention(q, k, k, torch.tensor([[[1, 2], [0, 8], [3, 5]]]), scale=0.3)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        dq.sum().backward()


Q, K, V = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 5)
IDX = torch.randint(0, 9, (2, 3, 4))


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"k": K[..., :6]}, ValueError, "D of k is 6, but D of q is 8"),
        ({"k": K.expand(2, 2, 9, 8)[:, [0, 1, 0]], "v": V[:, [0, 1, 0]]}, ValueError, "k has 3 heads"),
        ({"v": V[:, :, :8]}, ValueError, "T of v is 8, but T of k is 9"),
        ({"v": V.bfloat16()}, TypeError, "v has dtype bfloat16; accepted: float32"),
        ({"idx": IDX.float()}, TypeError, "idx has dtype float32"),
        ({"idx": IDX[:, :2]}, ValueError, "S of idx is 2, but S of q is 3"),
        ({"mask": torch.ones(2, 3, 3, 9)}, ValueError, "Hq of mask is 3, but Hq of q"),
        ({"sink": torch.ones(2)}, ValueError, "the size of sink is 2, but Hq of q is 4"),
        ({"empty": "ones"}, ValueError, "empty is 'ones'; accepted: zero, nan, mean"),
        ({"empty": "nan", "sink": torch.ones(4)}, ValueError, "there is a sink"),
        ({"empty": "mean", "fill": -65504.0}, ValueError, "fill is -65504.0; it must be finite and at most -1e30"),
    ],
)
def test_refusals_name_the_argument(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        ops.sparse_mqa_attention(**{"q": Q, "k": K, "v": V, "idx": IDX, "scale": 0.3, **changes})
