"""``mqa_topk``: the exact set, ties, order, padding, NaN, and that nothing else decides it."""

from __future__ import annotations

import math
from typing import Any

import mqa_naive
import pytest
import torch
from torch import Tensor

from ascend_deep import ops

RUNNERS = {"reference": lambda op: op.reference, "op": lambda op: op.overload}
PLAIN: dict[str, Any] = {
    "topk": 7, "scale": 0.37, "outside": "pad", "sorted": False, "return_scores": True, "index_dtype": None,
}  # fmt: skip


def samples() -> list[Any]:
    return [pytest.param(s, r, id=f"{s.name}-{r}") for s in ops.op("mqa_topk").samples() for r in RUNNERS]


def check_row(
    row: list[float], eligible: list[bool], k: int, idx: list[int], scores: list[float], margin: float
) -> None:
    """``idx`` is a right answer if scores may be wrong by ``margin``: complete, distinct, eligible, well ordered."""
    real = [t for t in idx if t >= 0]
    assert idx == real + [-1] * (k - len(real)), "padding comes last"
    assert len(set(real)) == len(real) == min(k, sum(eligible))
    assert all(eligible[t] for t in real)
    if 0 < len(real) == k < sum(eligible):
        worst = min(row[t] for t in real)
        assert all(row[t] <= worst + margin for t in range(len(row)) if eligible[t] and t not in real)
    for t, score in zip(idx, scores, strict=True):
        wanted = row[t] if t >= 0 else -math.inf
        assert score == wanted or abs(score - wanted) <= margin


@pytest.mark.parametrize(("sample", "runner"), samples())
def test_every_sample(sample: ops.Sample, runner: str) -> None:
    q, kw = sample.args[0], sample.kwargs
    dense, counts = mqa_naive.logits(*sample.args, scale=kw["scale"])
    scores, idx = RUNNERS[runner](ops.op("mqa_topk"))(*sample.args, **kw)
    k = kw["topk"]
    assert idx.shape == (*q.shape[:2], k) and idx.dtype == (kw["index_dtype"] or torch.int64)
    if not kw["return_scores"]:
        assert scores.shape == (0,)
        scores = torch.where(idx < 0, -math.inf, dense.gather(-1, idx.clamp(min=0).long()))
    finite = dense[dense.isfinite()].abs()
    # Finite scores that the mask moved to the end of the range of f32 all compare equal there.
    usual = finite[finite < 1e30]
    margin = 2e-5 * float(usual.max()) if usual.numel() else 0.0
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            row = [float(torch.tensor(x, dtype=torch.float32)) for x in dense[b, s].tolist()]
            eligible = [True] * len(row) if kw["outside"] == "rank_last" else counts[b, s].tolist()
            got = idx[b, s].tolist()
            if sample.name.startswith("ties"):
                assert got == mqa_naive.topk_row(row, eligible, k, kw["sorted"])
            check_row(row, eligible, k, got, scores[b, s].tolist(), margin)
            real = [t for t in got if t >= 0]
            if kw["sorted"]:
                values = scores[b, s, : len(real)].tolist()
                assert values == sorted(values, reverse=True)
            else:
                assert real == sorted(real)


def integers(s: int, h: int, d: int, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """Operands whose scores are small integers: exact, with many ties."""
    return (
        torch.randint(-1, 2, (1, s, h, d)).float(),
        torch.randint(-1, 2, (1, t, d)).float(),
        torch.randint(-2, 3, (1, s, h)).float(),
    )


@pytest.mark.parametrize("sorted_", [False, True])
def test_positives_above_a_plateau_of_zeros(sorted_: bool) -> None:
    """100 keys score above 0 and 8220 exactly 0: all of the 100 come out, then the zeros of lowest index."""
    keys, k = 8320, 2048
    positive = torch.randperm(keys)[:100].sort().values
    kv = -torch.rand(1, keys, 16) - 0.1
    kv[0, positive] = torch.rand(100, 16) + 0.1
    q, weights = torch.rand(1, 3, 4, 16) + 0.1, torch.rand(1, 3, 4) + 0.1
    scores, idx = ops.mqa_topk(q, kv, weights, topk=k, scale=0.37, sorted=sorted_)
    zeros = torch.tensor([t for t in range(keys) if t not in set(positive.tolist())][: k - 100])
    for row, values in zip(idx[0], scores[0], strict=True):
        assert (row >= 0).all()
        assert torch.equal(row.sort().values, torch.cat((positive, zeros)).sort().values)
        assert (values > 0).sum() == 100 and (values == 0).sum() == k - 100
        if sorted_:
            assert torch.equal(row[100:], zeros)


def test_scores_equal_in_half_precision_are_not_ties() -> None:
    """Scores 1 + n 2^-20 cannot be told apart in f16 or bf16."""
    order = torch.randperm(500)
    kv = (1 + order.float() * 2.0**-20).view(1, 500, 1)
    _, idx = ops.mqa_topk(torch.ones(1, 1, 1, 1), kv, torch.ones(1, 1, 1), topk=50, sorted=True)
    assert torch.equal(order[idx[0, 0]], torch.arange(499, 449, -1))


@pytest.mark.parametrize("n", [1, 63, 64, 65, 257])
def test_causal_self_indexing(n: int) -> None:
    """64 heads, dim 128, k = 2048 > n: every visible key, then -1."""
    q, kv, weights = torch.randn(1, n, 64, 128), torch.randn(1, n, 128), torch.randn(1, n, 64)
    ke = torch.arange(1, n + 1).unsqueeze(0)
    scores, idx = ops.mqa_topk(q, kv, weights, None, ke, topk=2048, scale=128**-0.5)
    at = torch.arange(2048)
    assert torch.equal(idx[0], torch.where(at < ke[0].unsqueeze(1), at, -1))
    wanted = mqa_naive.scores(q.double(), kv.double(), weights, 128**-0.5)
    visible = at[:n] < ke.unsqueeze(-1)
    torch.testing.assert_close(scores[..., :n][visible].double(), wanted[visible], rtol=1e-5, atol=2e-4)
    assert (scores[..., n:] == -torch.inf).all()


def test_causal_self_indexing_of_4096() -> None:
    """Rows on both sides of k = 2048 against float64."""
    n, k = 4096, 2048
    q, kv, weights = torch.randn(1, n, 64, 128), torch.randn(1, n, 128), torch.randn(1, n, 64)
    rows = torch.tensor([0, 1, 63, 64, 2047, 2048, 2049, 3000, 4095])
    ke = torch.arange(1, n + 1)[rows].unsqueeze(0)
    scores, idx = ops.mqa_topk(q[:, rows], kv, weights[:, rows], None, ke, topk=k, scale=128**-0.5)
    wanted = mqa_naive.scores(q[:, rows].double(), kv.double(), weights[:, rows], 128**-0.5)[0]
    for row, length, got, values in zip(wanted, ke[0].tolist(), idx[0].tolist(), scores[0].tolist(), strict=True):
        check_row(row.tolist(), [t < length for t in range(n)], k, got, values, margin=5e-4)


@pytest.mark.parametrize("keys", [1, 5, 99, 100, 101])
@pytest.mark.parametrize("outside", ["pad", "rank_last"])
def test_topk_beyond_the_keys(keys: int, outside: str) -> None:
    q, kv, weights = integers(4, 2, 3, keys)
    ke = torch.tensor([[keys, 0, -4, keys // 2]])
    _, idx = ops.mqa_topk(q, kv, weights, None, ke, topk=100, outside=outside)
    for length, row in zip(ke[0].tolist(), idx[0], strict=True):
        real = keys if outside == "rank_last" else max(length, 0)
        assert idx.shape[-1] == 100 and (row >= 0).sum() == min(real, 100)
        assert (row < keys).all() and row[row >= 0].unique().numel() == min(real, 100)


@pytest.mark.parametrize("runner", list(RUNNERS))
@pytest.mark.parametrize("outside", ["pad", "rank_last"])
def test_nan_ranks_below_every_number_and_is_a_valid_index(runner: str, outside: str) -> None:
    q, kv, weights = integers(4, 2, 3, 30)
    kv[0, 4], kv[0, 9], q[0, 2] = torch.nan, torch.inf, torch.nan
    ke = torch.tensor([[30, 12, 6, 3]])
    kwargs = {**PLAIN, "topk": 11, "outside": outside, "sorted": True}
    scores, idx = RUNNERS[runner](ops.op("mqa_topk"))(q, None, kv, None, weights, None, ke, None, **kwargs)
    dense = ops.reference("mqa_logits")(
        q, None, kv, None, weights, None, ke, None, scale=0.37, max_seqlen_k=0, clean=True, out_dtype=None
    )
    assert dense[0, 2, :6].isnan().all() and dense[0, :, 4].isnan().any()
    for s, length in enumerate(ke[0].tolist()):
        eligible = [outside == "rank_last" or t < length for t in range(30)]
        wanted = mqa_naive.topk_row(dense[0, s].tolist(), eligible, 11, True)
        assert idx[0, s].tolist() == wanted
        values = [dense[0, s, t].item() if t >= 0 else -math.inf for t in wanted]
        torch.testing.assert_close(scores[0, s], torch.tensor(values), equal_nan=True, rtol=1e-6, atol=1e-6)


def test_a_row_of_nan_gives_its_first_keys() -> None:
    q, kv, weights = torch.full((1, 1, 2, 8), torch.nan), torch.randn(1, 50, 8), torch.randn(1, 1, 2)
    scores, idx = ops.mqa_topk(q, kv, weights, topk=6)
    assert idx[0, 0].tolist() == list(range(6)) and scores.isnan().all()


def test_equals_masked_topk_of_the_models_up_to_ties() -> None:
    q, kv, weights = torch.randn(2, 9, 4, 16), torch.randn(2, 40, 16), torch.randn(2, 9, 4)
    mask = torch.rand(2, 9, 40) > 0.4
    index = ops.mqa_logits(q, kv, weights, scale=0.25).masked_fill(~mask, -torch.inf)
    wanted = index.topk(8, -1)
    scores, idx = ops.mqa_topk(q, kv, weights, mask=mask, topk=8, scale=0.25, outside="rank_last", sorted=True)
    assert torch.equal(scores, wanted.values) and torch.equal(index.gather(-1, idx), wanted.values)
    tied = (scores[..., :, None] == index[..., None, :]).sum(-1) > 1
    assert torch.equal(idx[~tied], wanted.indices[~tied]) and (~tied).sum() > 100


def test_grad_mode_changes_nothing() -> None:
    q, kv, weights = torch.randn(1, 6, 3, 16), torch.randn(1, 90, 16), torch.randn(1, 6, 3)
    with torch.no_grad():
        scores, idx = ops.mqa_topk(q, kv, weights, topk=20, scale=0.3)
    leaves = [x.clone().requires_grad_() for x in (q, kv, weights)]
    with_grad, idx_grad = ops.mqa_topk(*leaves, topk=20, scale=0.3)
    assert torch.equal(idx, idx_grad) and torch.equal(scores, with_grad)
    assert with_grad.requires_grad and not idx_grad.requires_grad


def test_compiling_changes_nothing_and_one_graph_serves_all_lengths() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def f(q: Tensor, kv: Tensor, weights: Tensor, ke: Tensor) -> tuple[Tensor, Tensor]:
        return ops.mqa_topk(q, kv, weights, None, ke, topk=min(12, kv.shape[1]), scale=0.3)

    compiled = torch.compile(f, backend=counter, fullgraph=True, dynamic=True)
    for s, t in ((6, 40), (5, 64), (7, 33), (3, 200)):
        args = (torch.randn(2, s, 3, 16), torch.randn(2, t, 16), torch.randn(2, s, 3), torch.randint(0, t, (2, s)))
        for a, b in zip(compiled(*args), f(*args), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 1


@pytest.mark.parametrize("outside", ["pad", "rank_last"])
def test_gradient_of_the_scores(outside: str) -> None:
    leaves = [torch.randn(*s, dtype=torch.float64) for s in ((2, 3, 2, 5), (2, 11, 5), (2, 3, 2))]
    for x in leaves:
        x.requires_grad_()
    ke = torch.tensor([[2, 11, 0]])

    def call(q: Tensor, kv: Tensor, weights: Tensor) -> Tensor:
        scores, _ = ops.mqa_topk(q, kv, weights, None, ke, topk=4, scale=0.3, outside=outside)
        return scores.masked_fill(scores == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(call, leaves, eps=1e-7, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"topk": -1}, ValueError, "topk is -1; it must be 0 or positive"),
        ({"outside": "drop"}, ValueError, "outside is 'drop'; it must be one of 'pad', 'rank_last'"),
        ({"index_dtype": torch.int16}, TypeError, "index_dtype is torch.int16; accepted: int64, int32"),
    ],
)
def test_refusals_name_the_argument(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    q, kv, weights = integers(2, 2, 4, 9)
    with pytest.raises(error, match=sentence):
        ops.mqa_topk(q, kv, weights, **{"topk": 3, **changes})
