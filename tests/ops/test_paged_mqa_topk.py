"""``paged_mqa_topk`` against ``mqa_topk`` on gathered keys, and its refusals."""

from __future__ import annotations

from typing import Any

import mqa_naive
import pytest
import torch

from ascend_deep import ops

RUNNERS = {"reference": lambda op: op.reference, "op": lambda op: op.overload}


@pytest.mark.parametrize("runner", list(RUNNERS))
@pytest.mark.parametrize("sample", [pytest.param(s, id=s.name) for s in ops.op("paged_mqa_topk").samples()])
def test_every_sample(sample: ops.Sample, runner: str) -> None:
    """The choice from the logits of the reference, row by row."""
    kw = sample.kwargs
    logits = ops.reference("paged_mqa_logits")(
        *sample.args,
        max_context_len=kw["max_context_len"],
        scale=kw["scale"],
        clean=True,
        out_dtype=None,
        fmt=kw["fmt"],
    )
    scores, idx = RUNNERS[runner](ops.op("paged_mqa_topk"))(*sample.args, **kw)
    assert idx.dtype == (kw["index_dtype"] or torch.int64)
    assert idx.shape == (*logits.shape[:2], kw["topk"])
    for row, got in zip(logits.flatten(0, 1), idx.flatten(0, 1), strict=True):
        wanted = mqa_naive.topk_row(row.tolist(), (row != -torch.inf).tolist(), kw["topk"], kw["sorted"])
        assert got.tolist() == wanted
    if kw["return_scores"]:
        values = torch.where(idx < 0, -torch.inf, logits.gather(-1, idx.clamp(min=0).long()))
        torch.testing.assert_close(scores, values, rtol=1e-5, atol=1e-4)
    else:
        assert scores.shape == (0,)


def test_equals_mqa_topk_on_a_plain_cache() -> None:
    """Contexts around multiples of the page and of k, with many equal scores."""
    lens = torch.tensor([0, 1, 15, 16, 17, 31, 32, 33, 100, 111, 112, -3]).unsqueeze(1)
    queries = lens.shape[0]
    q, weights = torch.randint(-1, 2, (queries, 1, 2, 3)).float(), torch.randint(-2, 3, (queries, 1, 2)).float()
    cache, table = torch.randint(-1, 2, (9, 16, 1, 3)).float(), torch.randperm(9)[:7]
    kv = cache[table].flatten(0, 1).flatten(1).expand(queries, 112, 3)
    for sorted_ in (False, True):
        paged = ops.paged_mqa_topk(
            q, cache, weights, lens, table.expand(queries, 7), topk=32, max_context_len=112, scale=0.5, sorted=sorted_
        )
        dense = ops.mqa_topk(q, kv, weights, None, lens, topk=32, scale=0.5, sorted=sorted_)
        assert torch.equal(paged[1], dense[1]) and torch.equal(paged[0], dense[0])


def test_a_key_whose_score_is_minus_infinity_is_still_a_key() -> None:
    """Only what does not exist is padding."""
    q, weights = torch.ones(1, 1, 1, 2), -torch.ones(1, 1, 1)
    cache = torch.rand(2, 4, 1, 2) + 0.5
    cache[1, 2, 0] = torch.inf
    args = (q, cache, weights, torch.tensor([[7]]), torch.tensor([[0, 1]]))
    scores, idx = ops.paged_mqa_topk(*args, topk=8, max_context_len=8, scale=0.3)
    assert idx[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, -1]
    assert scores[0, 0, 6] == -torch.inf


Q, CACHE, W = torch.randn(2, 1, 3, 16), torch.randn(4, 8, 1, 16), torch.randn(2, 1, 3)
LENS, TABLE = torch.tensor([[3], [9]]), torch.tensor([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"topk": -1}, ValueError, "topk is -1; it must be 0 or positive"),
        ({"index_dtype": torch.float32}, TypeError, "index_dtype is torch.float32"),
        ({"fmt": "nz"}, ValueError, "paged_mqa_topk: fmt is 'nz'"),
        ({"context_lens": LENS[:1]}, ValueError, "Q of context_lens is 1, but Q of q is 2"),
    ],
)
def test_refusals_name_the_argument(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    arguments = {"q": Q, "kv_cache": CACHE, "weights": W, "context_lens": LENS, "block_table": TABLE}
    with pytest.raises(error, match=sentence):
        ops.paged_mqa_topk(**{**arguments, "topk": 3, "max_context_len": 16, **changes})


def test_no_backward() -> None:
    q = Q.clone().requires_grad_()
    scores, _ = ops.paged_mqa_topk(q, CACHE, W, LENS, TABLE, topk=2, max_context_len=16)
    with pytest.raises(RuntimeError, match="train with mqa_topk on the keys themselves"):
        scores.sum().backward()
