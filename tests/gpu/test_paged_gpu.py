"""The indexer over a paged key cache on CUDA, against its reference and against the dense ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native import table
from ascend_deep.native.triton.provider import TRITON
from ascend_deep.ops import _paged_cache, mqa_logits, mqa_topk, paged_mqa_logits, paged_mqa_topk
from ascend_deep.ops._mqa_samples import paged_samples
from ascend_deep.ops._op import Sample, strict
from ascend_deep.ops.mqa_topk import select

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
FP8_SUMS = ops.op("mqa_logits").tolerance_for(FP8, "cuda").rtol


def to_cuda(x: Any) -> Any:
    """A copy with the same strides."""
    if not isinstance(x, Tensor):
        return x
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).cuda()
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("sample", list(paged_samples()), ids=lambda s: s.name)
def test_samples(sample: Sample) -> None:
    args = tuple(to_cuda(a) for a in sample.args)
    reason = TRITON.refusal("paged_mqa_logits", args, sample.kwargs)
    if reason is not None:
        assert str(reason).endswith(".")
        pytest.skip(f"refused: {reason}")
    want = ops.reference("paged_mqa_logits")(*sample.args, **sample.kwargs)
    got = TRITON.kernels["paged_mqa_logits"](*args, **sample.kwargs)
    assert got.dtype == want.dtype and got.shape == want.shape and got.stride() == want.stride()
    got = got.cpu()
    assert torch.equal(got.isneginf(), want.isneginf()) and torch.equal(got.isnan(), want.isnan())
    finite = want.isfinite()
    if finite.any():
        largest = want[finite].abs().max()
        limit = 8e-3 if got.dtype == BF16 else FP8_SUMS if sample.args[0].dtype == FP8 else 2e-5
        assert ((got - want)[finite].abs().max() / largest).item() < limit
    options = {k: v for k, v in sample.kwargs.items() if k in ("scale", "max_context_len", "fmt")}
    columns = options["max_context_len"]
    for topk in (3, columns + 2):
        rest = {"topk": topk, "sorted": True, "return_scores": True, "index_dtype": None}
        exact = TRITON.kernels["paged_mqa_logits"](*args, **{**sample.kwargs, "out_dtype": torch.float32})
        scores, idx = TRITON.kernels["paged_mqa_topk"](*args, **options, **rest)
        want_scores, want_idx = select(exact, present(args, options), topk, True)
        assert torch.equal(idx, want_idx) and torch.equal(scores, want_scores)


def present(args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """bool [Q, next_n, columns] of the keys that exist: where scores of ones are not -inf."""
    q, _, cache, weights, lens, pages, _, indices = args
    ones = torch.ones(cache.shape[0], cache.shape[1], 1, q.shape[3], device="cuda")
    out = ops.reference("paged_mqa_logits")(
        torch.ones(q.shape, device="cuda"), None, ones, torch.ones_like(weights), lens, pages, None, indices,
        **{**options, "fmt": "plain", "scale": 1.0}, clean=True, out_dtype=None,
    )  # fmt: skip
    return ~out.isneginf()


class Paged:
    """Random keys in pages, out of order, and the same keys in rows."""

    def __init__(self, queries: int, next_n: int, keys: int, fmt: str, page: int = 64, heads: int = 64) -> None:
        columns = -(-keys // page)
        pages = queries * columns + 3
        self.q = torch.randn(queries, next_n, heads, 128, device="cuda").to(BF16)
        self.weights = torch.randn(queries, next_n, heads, device="cuda")
        self.lens = torch.randint(0, keys + 1, (queries, next_n), device="cuda", dtype=torch.int32)
        self.lens[0], self.lens[-1, 0] = keys, 1
        self.table = torch.randperm(pages, device="cuda")[: queries * columns].view(queries, columns).int()
        flat = torch.randn(pages * page, 128, device="cuda")
        rows = (self.table.long().unsqueeze(-1) * page + torch.arange(page, device="cuda")).flatten(1)[:, :keys]
        self.q_sf = self.kv_sf = None
        if fmt == "plain":
            flat = flat.to(BF16)
            self.cache, self.kv = flat.view(pages, page, 1, 128), flat[rows]
        else:
            data, scales = _paged_cache.quantise(flat, fmt, 4)
            self.cache = torch.cat((data.view(pages, -1), scales.view(pages, -1)), 1).view(pages, page, 1, 132)
            self.kv, self.kv_sf = data.view(FP8)[rows], scales.view(torch.float32)[rows]
            self.q, self.q_sf = self.q.to(FP8), torch.rand(queries, next_n, heads, 1, device="cuda") + 0.5
        self.options = {"max_context_len": keys, "scale": 0.37, "fmt": fmt, "q_sf": self.q_sf}

    def both(self) -> tuple[Any, ...]:
        return self.q, self.cache, self.weights, self.lens, self.table


@pytest.mark.parametrize("next_n", [1, 2, 3, 5])
@pytest.mark.parametrize("keys,page", [(1000, 64), (20001, 64), (300, 16), (777, 33)])
@pytest.mark.parametrize("fmt", ["plain", "fp8"])
def test_equal_to_the_dense_ops(fmt: str, keys: int, page: int, next_n: int) -> None:
    a = Paged(4, next_n, keys, fmt, page)
    dense = {"q_sf": a.q_sf, "kv_sf": a.kv_sf, "ke": a.lens, "scale": 0.37}
    if fmt == "fp8":
        assert TRITON.refusal("paged_mqa_logits", (a.q, a.q_sf, *a.both()[1:], None, None), {
            "max_context_len": keys, "scale": 0.37, "fmt": fmt, "clean": True, "out_dtype": None}) is None  # fmt: skip
    with strict():
        got = paged_mqa_logits(*a.both(), **a.options)
        want = mqa_logits(a.q, a.kv, a.weights, **dense)
        assert torch.equal(got.isneginf(), want.isneginf())
        largest = want[want.isfinite()].abs().max()
        error = (got - want).nan_to_num(0.0).abs().max() / largest
        assert error.item() < (FP8_SUMS if fmt == "fp8" else 2e-5)
        scores, idx = paged_mqa_topk(*a.both(), topk=256, sorted=True, **a.options)
        other_scores, other = mqa_topk(a.q, a.kv, a.weights, topk=256, sorted=True, **dense)
    assert torch.equal(idx < 0, other < 0)
    torch.testing.assert_close(scores, other_scores, rtol=0, atol=largest.item() * 3e-3)
    eligible = torch.arange(keys, device="cuda") < a.lens.unsqueeze(-1)
    want_scores, want_idx = select(got, eligible, 256, True)
    assert torch.equal(idx, want_idx) and torch.equal(scores, want_scores)


def test_pages_behind_a_context_are_not_read() -> None:
    a = Paged(3, 2, 640, "fp8")
    a.lens[:] = torch.tensor([[640, 1], [64, 65], [0, 127]], device="cuda")
    want = paged_mqa_logits(*a.both(), **a.options)
    used = torch.zeros(a.cache.shape[0], dtype=torch.bool, device="cuda")
    for row, pages in enumerate((10, 2, 2)):
        used[a.table[row, :pages].long()] = True
        a.table[row, pages:] = 1 << 30
    a.cache[~used] = 255  # NaN in data and scales
    assert torch.equal(paged_mqa_logits(*a.both(), **a.options), want)


@pytest.mark.parametrize("page", [64, 16])
@pytest.mark.parametrize("fmt", ["plain", "fp8"])
def test_pages_that_do_not_exist(fmt: str, page: int) -> None:
    """Their keys are absent, also where page 0, which stands in for an address, holds NaN."""
    a = Paged(3, 2, 320, fmt, page)
    a.lens.fill_(320)
    want = paged_mqa_logits(*a.both(), **a.options)
    gone = [(0, 1, -1), (1, 0, a.cache.shape[0]), (2, 3, 1 << 30)]
    free = (~torch.isin(torch.arange(a.cache.shape[0], device="cuda"), a.table)).nonzero()[0, 0]
    a.table[a.table == 0] = free.int()
    a.cache[free] = a.cache[0]
    a.cache[0] = torch.nan if fmt == "plain" else 255
    for row, column, name in gone:
        a.table[row, column] = name
        want[row, :, column * page : (column + 1) * page] = -torch.inf
    got = paged_mqa_logits(*a.both(), **a.options)
    assert torch.equal(got, want)
    _, idx = paged_mqa_topk(*a.both(), topk=320, **a.options)
    assert (idx.ge(0).sum(-1) == 320 - page).all()


def test_negative_scales_of_keys_are_nan_and_of_queries_right() -> None:
    a = Paged(2, 1, 200, "fp8")
    a.lens[:] = 200
    assert a.q_sf is not None
    a.q_sf[1, 0, 5] *= -1
    want = mqa_logits(a.q, a.kv, a.weights, q_sf=a.q_sf, kv_sf=a.kv_sf, scale=0.37)
    got = paged_mqa_logits(*a.both(), **a.options)
    assert ((got - want).abs().max() / want.abs().max()).item() < FP8_SUMS
    page = a.table[0, 1].long()
    scales = a.cache[page].flatten()[64 * 128 :].view(torch.float32)
    scales[3] *= -1
    hit = torch.zeros_like(got, dtype=torch.bool)
    hit[0, :, 64 + 3] = True
    after = paged_mqa_logits(*a.both(), **a.options)
    assert after[hit].isnan().all() and torch.equal(after[~hit], got[~hit])


def test_captured_with_contexts_that_grow() -> None:
    """One graph for all lengths up to the largest: nothing on the host depends on them."""
    a = Paged(4, 1, 2000, "fp8")
    run = lambda: paged_mqa_topk(*a.both(), topk=64, return_scores=False, **a.options)[1]  # noqa: E731
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lens in (7, 64, 65, 2000):
        a.lens.fill_(lens)
        graph.replay()
        assert torch.equal(out, run())


@pytest.mark.parametrize(
    "change,reason",
    [({"fmt": "fp8_ue8m0"}, "fmt is fp8_ue8m0"), ({"out_dtype": torch.float64}, "out_dtype is torch.float64")],
    ids=["fmt", "out_dtype"],
)
def test_both_sides_of_limits(change: dict[str, Any], reason: str) -> None:
    a = Paged(2, 1, 100, "fp8")
    args = (a.q, a.q_sf, *a.both()[1:], None, None)
    options = {"max_context_len": 100, "scale": 0.37, "fmt": "fp8", "clean": True, "out_dtype": None}
    assert table.choose("paged_mqa_logits", "cuda", args, options).name == "native.triton"
    choice = table.choose("paged_mqa_logits", "cuda", args, options | change)
    assert choice.name == "reference"
    assert any(reason in r.reason for r in choice.refusals if r.provider == "native.triton")
