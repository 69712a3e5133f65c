"""``sparse_mqa_attention`` against dense attention in float64 with a mask that hides what is not selected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep import ops

RUNNERS = {"reference": lambda op: op.reference, "op": lambda op: op.overload}


def dense(
    q: Tensor, k: Tensor, v: Tensor, idx: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """[B, Hq, S, T] logits in f64; one column more for the sink."""
    b, heads, s, _ = q.shape
    keys, repeat = k.shape[2], heads // k.shape[1]
    k, v = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    hidden = torch.ones(b, s, keys + 1, dtype=torch.bool)
    hidden.scatter_(-1, torch.where((idx < 0) | (idx >= keys), keys, idx.long()), False)
    hidden = hidden[..., :keys].unsqueeze(1).expand(b, heads, s, keys)
    logits = q.double() @ k.transpose(-1, -2) * scale
    if mask is not None:
        hidden = hidden | ~mask if mask.dtype == torch.bool else hidden | (mask == -torch.inf)
        logits = logits if mask.dtype == torch.bool else logits + mask.double()
    logits = logits.masked_fill(hidden, -torch.inf)
    column = torch.full((heads,), -torch.inf, dtype=torch.float64) if sink is None else sink.double()
    logits = torch.cat((logits, column.view(1, -1, 1, 1).expand(b, heads, s, 1)), -1)
    lse = logits.logsumexp(-1)
    p = (logits - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return p[..., :keys] @ v, lse


def close(result: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    tolerance = ops.op("sparse_mqa_attention").tolerance[dtype]
    finite = wanted[wanted.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    torch.testing.assert_close(result.double(), wanted, rtol=tolerance.rtol, atol=tolerance.atol * scale)


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
    wanted = call(q, k, v, idx, mask, None, scale=0.3)
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[:, :, unused], dirty_v[:, :, unused] = torch.nan, torch.inf
    for a, b in zip(call(q, dirty_k, dirty_v, idx, mask, None, scale=0.3), wanted, strict=True):
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


def test_no_backward() -> None:
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    k = torch.randn(1, 1, 9, 8)
    out, _ = ops.sparse_mqa_attention(q, k, k, torch.tensor([[[1, 2], [0, 8], [3, 5]]]), scale=0.3)
    with pytest.raises(RuntimeError, match="to train, use attention with the mask"):
        out.sum().backward()


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
    ],
)
def test_refusals_name_the_argument(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        ops.sparse_mqa_attention(**{"q": Q, "k": K, "v": V, "idx": IDX, "scale": 0.3, **changes})
