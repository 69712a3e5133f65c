"""What went wrong in indexers elsewhere, case by case: what the other files of this folder do not hold already."""

from __future__ import annotations

import time

import mqa_naive
import pytest
import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native.cpu.provider import CPU
from ascend_deep.ops import _paged_cache

SCALE = 0.37


def square(n: int, heads: int = 64, depth: int = 128) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, keys, head weights and causal ends of n queries over n keys."""
    ends = torch.arange(1, n + 1).unsqueeze(0)
    return torch.randn(1, n, heads, depth), torch.randn(1, n, depth), torch.randn(1, n, heads), ends


@pytest.mark.skipif(CPU.unavailable() is not None, reason="the C++ kernels are not built")
@pytest.mark.parametrize("n", [1, 63, 64, 65, 257, 4096])
def test_squares_of_full_size_are_right_and_bounded(n: int) -> None:
    """64 heads of 128, k = 2048, causal: every row is well formed, some are recomputed in float64, and the processor
    time is bounded by that of the products (about 0.7 of it, with AVX-512; portable vectors take longer)."""
    q, kv, weights, ke = square(n)
    begin = time.process_time()
    scores, idx = ops.mqa_topk(q, kv, weights, None, ke, topk=2048, scale=SCALE)
    spent = time.process_time() - begin
    a, b = torch.randn(1024, 128), torch.randn(128, 1024)
    begin = time.process_time()
    for _ in range(8):
        a @ b
    products = (time.process_time() - begin) / 8 * (n * n * 64 / 1024**2)
    assert spent < 0.5 + 15 * products
    count = ke[0].clamp(max=2048)
    at = torch.arange(2048)
    inside = at < count.unsqueeze(1)
    assert torch.equal(idx[0] >= 0, inside) and (idx[0] < ke[0].unsqueeze(1)).all()
    ascending = (idx[0, :, 1:] > idx[0, :, :-1]) | ~inside[:, 1:]
    assert ascending.all() and torch.equal(scores[0] == -torch.inf, ~inside)
    rows = sorted({0, n // 3, n // 2, 2047, 2048, 2049, n - 1} & set(range(n)))
    wanted = mqa_naive.scores(q[:, rows].double(), kv.double(), weights[:, rows], SCALE)[0]
    for row, s in zip(wanted, rows, strict=True):
        k = int(count[s])
        got = idx[0, s, :k]
        margin = 1e-5 * float(row.abs().max())
        torch.testing.assert_close(scores[0, s, :k].double(), row[got], rtol=1e-5, atol=margin)
        left = torch.ones(s + 1, dtype=torch.bool)
        left[got] = False
        assert not left.any() or row[: s + 1][left].max() <= row[got].min() + margin


@pytest.mark.parametrize("depth", [16, 32, 64, 96, 128, 192])
@pytest.mark.parametrize("heads", [1, 16, 64])
def test_head_dims_of_the_paged_form(depth: int, heads: int) -> None:
    """Paged kernels elsewhere are wrong for 32 and 64, the same way in every call, so they agree with themselves."""
    keys, block = 45, 16
    q, kv, weights = torch.randn(2, 1, heads, depth), torch.randn(2, keys, depth), torch.randn(2, 1, heads)
    table = torch.tensor([[3, 0, 5], [1, 4, 2]])
    cache = torch.randn(6, block, 1, depth)
    for r in range(2):
        padded = torch.nn.functional.pad(kv[r], (0, 0, 0, 3 * block - keys), value=torch.nan)
        cache[table[r]] = padded.view(3, block, 1, depth)
    lens = torch.full((2, 1), keys)
    got = ops.paged_mqa_logits(q, cache, weights, lens, table, max_context_len=keys, scale=SCALE)
    wanted = mqa_naive.scores(q.double(), kv.double(), weights, SCALE)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    _, idx = ops.paged_mqa_topk(q, cache, weights, lens, table, topk=9, max_context_len=keys, scale=SCALE)
    _, same = ops.mqa_topk(q, kv, weights, topk=9, scale=SCALE)
    assert torch.equal(idx, same)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("fmt", ["plain", "fp8"])
def test_tokens_of_a_speculative_step(next_n: int, fmt: str) -> None:
    """Each token of a step sees one key more than the one before it."""
    queries, heads, depth, block = 3, 4, 32, 8
    q, weights = torch.randn(queries, next_n, heads, depth), torch.randn(queries, next_n, heads)
    keys = torch.randn(9 * block, depth)
    cache = keys.view(9, block, 1, depth)
    if fmt == "fp8":
        data, sf = _paged_cache.quantise(keys, fmt, 4)
        cache = torch.cat((data.view(9, -1), sf.view(9, -1)), 1).view(9, block, 1, depth + 4)
        keys = data.view(torch.float8_e4m3fn).float() * sf.view(torch.float32)
    table = torch.stack([torch.randperm(9)[:3] for _ in range(queries)])
    lens = torch.tensor([[24], [7], [16]]) - torch.arange(next_n).flip(0)
    got = ops.paged_mqa_logits(q, cache, weights, lens, table, max_context_len=24, scale=SCALE, fmt=fmt)
    context = keys.view(9, block, depth)[table].flatten(1, 2)
    wanted = mqa_naive.scores(q.double(), context.double(), weights, SCALE)
    wanted = wanted.masked_fill(torch.arange(24) >= lens.unsqueeze(-1), -torch.inf)
    assert torch.equal(got == -torch.inf, wanted == -torch.inf)
    torch.testing.assert_close(
        got.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted[wanted.isfinite()].abs().max())
    )


def test_lists_that_training_and_inference_share() -> None:
    """One rule of ties with and without gradients, and compiled: scores are small integers, most of them tied."""
    q, kv = torch.randint(-1, 2, (2, 7, 3, 4)).float(), torch.randint(-1, 2, (2, 300, 4)).float()
    weights = torch.randint(-2, 3, (2, 7, 3)).float()

    def choose(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return ops.mqa_topk(*tensors, topk=64, scale=0.5)

    with torch.no_grad():
        scores, idx = choose(q, kv, weights)
    values = mqa_naive.scores(q.double(), kv.double(), weights, 0.5)
    for b in range(2):
        for s in range(7):
            assert idx[b, s].tolist() == mqa_naive.topk_row(values[b, s].tolist(), [True] * 300, 64, False)
    graded = choose(q.clone().requires_grad_(), kv, weights)
    compiled = torch.compile(choose, backend="aot_eager", fullgraph=True)(q, kv, weights)
    for other in (graded, compiled):
        assert torch.equal(other[1], idx) and torch.equal(other[0], scores)


@pytest.mark.parametrize("runner", ["reference", "op"])
def test_ties_are_equal_to_the_last_bit(runner: str) -> None:
    """One unit in the last place of f32 is a difference; -0.0 and 0.0 are none; no rounding comes before the choice."""
    above = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    kv = torch.tensor([1.0, -3.0, above, 1.0, 0.0, above, -2.0]).view(1, 7, 1)
    one = torch.ones(1, 1, 1, 1)
    weights = torch.tensor([[[1.0]], [[-1.0]]])
    op = ops.op("mqa_topk")
    call = op.reference if runner == "reference" else op.overload
    options = {"scale": 1.0, "outside": "pad", "sorted": True, "return_scores": True, "index_dtype": None}
    # Scores 1, 0, above, 1, 0, above, 0, and their negatives, of which the zeros are -0.0.
    wanted = {1.0: [2, 5, 0, 3, 1, 4, 6], -1.0: [1, 4, 6, 0, 3, 2, 5]}
    for w in weights:
        for k in (1, 2, 3, 4, 5, 7):
            scores, idx = call(one, None, kv, None, w.view(1, 1, 1), None, None, None, topk=k, **options)
            assert idx[0, 0].tolist() == wanted[w.item()][:k]
            assert torch.equal(scores[0, 0], w.item() * kv.relu()[0, idx[0, 0], 0])
