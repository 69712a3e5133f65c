"""The paged cache: logits against gathered keys, formats bit by bit, the plan, memory safety of page ids."""

from __future__ import annotations

import itertools
from typing import Any

import mqa_naive
import pytest
import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.ops import _paged_cache

RUNNERS = {"reference": lambda op: op.reference, "op": lambda op: op.overload}
FORMATS = ("plain", "fp8", "fp8_ue8m0", "fp4_ue8m0")


def key(cache: Tensor, fmt: str, depth: int, page: int, row: int) -> list[float]:
    """One key, byte by byte, from the definition of the format."""
    if fmt == "plain":
        values: list[float] = cache[page, row, 0].double().tolist()
        return values
    block, width = cache.shape[1], depth // 2 if fmt == "fp4_ue8m0" else depth
    flat = cache[page].reshape(-1)
    data = flat[row * width : (row + 1) * width]
    if fmt == "fp4_ue8m0":
        numbers = [v for b in data.tolist() for v in (mqa_naive.e2m1(b & 15), mqa_naive.e2m1(b >> 4))]
    else:
        numbers = data.clone().view(torch.float8_e4m3fn).double().tolist()
    size = cache.shape[3] - width
    scales = flat[block * width + row * size : block * width + (row + 1) * size].clone()
    if fmt == "fp8":
        return [v * scales.view(torch.float32).item() for v in numbers]
    return [v * 2.0 ** (scales[i // 32].item() - 127) for i, v in enumerate(numbers)]


@pytest.mark.parametrize("runner", list(RUNNERS))
@pytest.mark.parametrize("sample", [pytest.param(s, id=s.name) for s in ops.op("paged_mqa_logits").samples()])
def test_logits_equal_the_formula(sample: ops.Sample, runner: str) -> None:
    q, q_sf, cache, weights, lens, table, _, indices = sample.args
    kw = sample.kwargs
    numbers = mqa_naive.numbers(q, q_sf)
    out = RUNNERS[runner](ops.op("paged_mqa_logits"))(*sample.args, **kw)
    wanted = torch.full(out.shape, -torch.inf, dtype=torch.float64)
    for i in range(q.shape[0]):
        row = i if indices is None else int(indices[i])
        for t in range(kw["max_context_len"] if 0 <= row < table.shape[0] else 0):
            column = t // cache.shape[1]
            page = int(table[row, column]) if column < table.shape[1] else -1
            if not 0 <= page < cache.shape[0]:
                continue
            k = key(cache, kw["fmt"], numbers.shape[-1], page, t % cache.shape[1])
            one = mqa_naive.scores(
                numbers[i : i + 1], torch.tensor([[k]], dtype=torch.float64), weights[i : i + 1], kw["scale"]
            )
            for n in range(q.shape[1]):
                if t < int(lens[i, n]):
                    wanted[i, n, t] = one[0, n, 0]
    assert torch.equal(out == -torch.inf, wanted == -torch.inf)
    rtol = 2**-8 if out.dtype == torch.bfloat16 else 1e-5
    seen = wanted[wanted.isfinite()].abs()
    atol = 1e-5 * float(seen.max()) if seen.numel() else 0.0
    torch.testing.assert_close(out.double(), wanted, rtol=rtol, atol=atol)


def test_a_plain_cache_equals_mqa_logits() -> None:
    """Contexts of 1 .. 130 keys over pages of 64: every remainder of a page."""
    q, weights = torch.randn(130, 1, 4, 32), torch.randn(130, 1, 4)
    cache, table = torch.randn(7, 64, 1, 32), torch.tensor([[4, 0, 6]]).expand(130, 3)
    lens = torch.arange(1, 131).unsqueeze(1)
    out = ops.paged_mqa_logits(q, cache, weights, lens, table, max_context_len=150, scale=0.3)
    kv = cache[table[0]].flatten(0, 1).flatten(1)[:150].expand(130, 150, 32)
    wanted = ops.mqa_logits(q, kv, weights, None, lens, scale=0.3)
    assert torch.equal(out, wanted)


def test_next_n_equals_single_tokens() -> None:
    q, weights = torch.randn(3, 4, 2, 32), torch.randn(3, 4, 2)
    cache, table = torch.randn(9, 16, 1, 32), torch.stack([torch.randperm(9)[:4] for _ in range(3)])
    lens = torch.tensor([[9, 10, 11, 12], [61, 62, 63, 64], [-2, -1, 0, 1]])
    together = ops.paged_mqa_logits(q, cache, weights, lens, table, max_context_len=64, scale=0.3)
    for n in range(4):
        one = ops.paged_mqa_logits(
            q[:, n : n + 1], cache, weights[:, n : n + 1], lens[:, n : n + 1], table, max_context_len=64, scale=0.3
        )
        assert torch.equal(together[:, n : n + 1], one)
    assert (together[2, :3] == -torch.inf).all()


@pytest.mark.parametrize("runner", list(RUNNERS))
def test_pages_behind_the_context_are_not_read(runner: str) -> None:
    cache = torch.randn(4, 8, 1, 16)
    cache[2:] = torch.nan
    table = torch.tensor([[0, 1, 2, 3], [1, 99, -7, 1 << 40]])
    kwargs = {"max_context_len": 32, "scale": 0.3, "clean": True, "out_dtype": None, "fmt": "plain"}
    lens = torch.tensor([[16], [8]])
    q, weights = torch.randn(2, 1, 3, 16), torch.randn(2, 1, 3)
    out = RUNNERS[runner](ops.op("paged_mqa_logits"))(q, None, cache, weights, lens, table, None, None, **kwargs)
    assert out[0, 0, :16].isfinite().all() and (out[0, 0, 16:] == -torch.inf).all()
    assert out[1, 0, :8].isfinite().all() and (out[1, 0, 8:] == -torch.inf).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("runner", list(RUNNERS))
def test_write_then_read(fmt: str, runner: str) -> None:
    """What was written comes back within half a step of the format; everything else is untouched."""
    depth, pages, block = 64, 5, 8
    width = _paged_cache.storage_width(fmt, depth)
    size = {"plain": 0, "fp8": 4, "fp8_ue8m0": 3, "fp4_ue8m0": 2}[fmt]
    before = (
        torch.randn(pages, block, 1, depth)
        if fmt == "plain"
        else torch.randint(0, 120, (pages, block, 1, width + size), dtype=torch.uint8)
    )
    cache, keys = before.clone(), torch.randn(6, depth) * torch.tensor([[1e-3], [1.0], [50.0], [3.0], [0.1], [7.0]])
    slots = torch.tensor([17, -1, 0, 39, 40, 24])
    RUNNERS[runner](ops.op("paged_kv_write_"))(cache, keys, slots, fmt=fmt)
    written = [0, 2, 3, 5]
    for i in written:
        page, row = divmod(int(slots[i]), block)
        got = torch.tensor(key(cache, fmt, depth, page, row), dtype=torch.float64)
        if fmt == "plain":
            assert torch.equal(got, keys[i].double())
            continue
        groups = keys[i].double().view(1 if fmt == "fp8" else -1, depth if fmt == "fp8" else 32)
        largest = groups.abs().amax(1, keepdim=True)
        # A step is 2^-3 of the number (e4m3, normal) or of the grid's spacing at its end (e2m1: 2 of 6).
        error = (got.view(groups.shape) - groups).abs()
        if fmt == "fp4_ue8m0":
            assert (error <= largest / 3 + 1e-12).all()
        else:
            assert (error <= groups.abs() / 16 + largest * 2.0**-9).all()
    changed = {int(slots[i]) for i in written}
    for slot in set(range(pages * block)) - changed:
        page, row = divmod(slot, block)
        assert key(cache, fmt, depth, page, row) == key(before, fmt, depth, page, row)


def test_written_keys_give_the_logits_of_the_keys() -> None:
    kv, q, weights = torch.randn(30, 64), torch.randn(1, 1, 4, 64), torch.randn(1, 1, 4)
    cache = torch.zeros(4, 16, 1, 68, dtype=torch.uint8)
    table = torch.tensor([[2, 1]])
    slots = torch.tensor([int(table[0, t // 16]) * 16 + t % 16 for t in range(30)])
    ops.paged_kv_write_(cache, kv, slots, fmt="fp8")
    out = ops.paged_mqa_logits(q, cache, weights, torch.tensor([[30]]), table, max_context_len=30, scale=0.3, fmt="fp8")
    exact = mqa_naive.scores(q.double(), kv.double().unsqueeze(0), weights, 0.3)
    difference = (out - exact).norm() / exact.norm()
    assert 1e-6 < difference < 0.05


def test_fp4_rounds_to_even_and_saturates() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, -0.3, 0.24, 5.1, -6.0, 1.0, 0.5])
    row = torch.cat((x, torch.zeros(16))).unsqueeze(0)
    data, scales = _paged_cache.quantise(row, "fp4_ue8m0", 1)
    assert scales.tolist() == [[127]]  # 6 / 6 = 1 = 2^0
    numbers = [v for b in data[0].tolist() for v in (mqa_naive.e2m1(b & 15), mqa_naive.e2m1(b >> 4))]
    assert numbers[:16] == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0.0, -4.0, -0.5, 0.0, 6.0, -6.0, 1.0, 0.5]


def test_power_of_two_scales_round_up() -> None:
    row = torch.zeros(4, 32)
    row[:, 0] = torch.tensor([448.0, 449.0, 224.0, 0.0])
    _, scales = _paged_cache.quantise(row, "fp8_ue8m0", 1)
    # 449 / 448 rounds up to 2; amax below 1e-4 counts as 1e-4, whose quotient lies between 2^-23 and 2^-22.
    assert scales.flatten().tolist() == [127, 128, 126, 105]


@pytest.mark.parametrize("sample", [pytest.param(s, id=s.name) for s in ops.op("paged_mqa_logits_metadata").samples()])
def test_the_plan_covers_every_page_once_and_evenly(sample: ops.Sample) -> None:
    lens, _ = sample.args
    block, cores = sample.kwargs["block_kv"], sample.kwargs["num_cores"]
    plan = ops.op("paged_mqa_logits_metadata").overload(*sample.args, **sample.kwargs)
    assert plan.dtype == torch.int32 and plan.shape == (cores + 1, 2)
    units = [
        (i, p) for i in range(lens.shape[0]) for p in range(-(-max(0, *(int(n) for n in lens[i])) // block))
    ] + [(lens.shape[0], 0)]  # fmt: skip
    starts = [units.index((int(q), int(p))) for q, p in plan]
    assert starts[0] == 0 and starts[-1] == len(units) - 1
    work = [b - a for a, b in itertools.pairwise(starts)]
    assert min(work) >= 0 and max(work) - min(work) <= 1


def test_the_plan_does_not_change_the_logits() -> None:
    q, weights, cache = torch.randn(5, 1, 3, 16), torch.randn(5, 1, 3), torch.randn(9, 8, 1, 16)
    lens, table = torch.tensor([[3], [0], [40], [17], [8]]), torch.stack([torch.randperm(9)[:5] for _ in range(5)])
    plan = ops.paged_mqa_logits_metadata(lens, block_kv=8, num_heads=3, num_cores=4)
    args = (q, cache, weights, lens, table)
    with_plan = ops.paged_mqa_logits(*args, plan, max_context_len=40, scale=0.3)
    assert torch.equal(with_plan, ops.paged_mqa_logits(*args, max_context_len=40, scale=0.3))


def test_writing_in_a_compiled_graph_changes_the_cache_and_its_version() -> None:
    def step(cache: Tensor, kv: Tensor, slots: Tensor) -> Tensor:
        ops.paged_kv_write_(cache, kv * 2, slots)
        return cache[0, 0].sum()

    cache, kv = torch.randn(3, 4, 1, 8), torch.randn(2, 8)
    wanted = cache.clone()
    wanted[0, 0, 0], wanted[2, 1, 0] = kv[0] * 2, kv[1] * 2
    slots = torch.tensor([0, 9])
    eager, version = cache.clone(), 0
    version = eager._version
    result = step(eager, kv, slots)
    assert torch.equal(eager, wanted) and eager._version > version
    compiled = cache.clone()
    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(compiled, kv, slots), result)
    assert torch.equal(compiled, wanted)


def test_no_backward() -> None:
    q = torch.randn(1, 1, 2, 16, requires_grad=True)
    cache, weights = torch.randn(2, 8, 1, 16), torch.randn(1, 1, 2)
    out = ops.paged_mqa_logits(q, cache, weights, torch.tensor([[5]]), torch.tensor([[1]]), max_context_len=8)
    with pytest.raises(RuntimeError, match="a paged cache is for inference"):
        out[0, 0, :5].sum().backward()


Q, CACHE, W = torch.randn(2, 1, 3, 64), torch.randn(4, 8, 1, 64), torch.randn(2, 1, 3)
LENS, TABLE = torch.tensor([[3], [9]]), torch.tensor([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"fmt": "fp16"}, ValueError, "fmt is 'fp16'; it must be one of 'plain', 'fp8'"),
        ({"fmt": "fp8"}, TypeError, "kv_cache has dtype float32; accepted: uint8"),
        ({"kv_cache": torch.zeros(4, 8, 1, 64, dtype=torch.uint8), "fmt": "fp8"}, ValueError, "is 64, but D \\+ 4"),
        ({"kv_cache": torch.zeros(4, 8, 1, 65, dtype=torch.uint8), "fmt": "fp8_ue8m0"}, ValueError, "at least 66"),
        ({"kv_cache": torch.zeros(4, 8, 1, 80, dtype=torch.uint8)[..., :68], "fmt": "fp8"}, ValueError, "contiguous"),
        ({"kv_cache": CACHE[..., :32]}, ValueError, "the last size of kv_cache is 32, but D is 64"),
        ({"kv_cache": CACHE.expand(4, 8, 2, 64)}, ValueError, "size 2 of kv_cache is 2"),
        ({"kv_cache": CACHE.bfloat16()}, TypeError, "kv has dtype bfloat16"),
        ({"context_lens": LENS[:, 0]}, ValueError, "context_lens has 1 dimensions"),
        ({"block_table": TABLE[:1]}, ValueError, "R of block_table is 1, but Q of q"),
        ({"indices": torch.tensor([0])}, ValueError, "the size of indices is 1, but Q of q is 2"),
        ({"max_context_len": -2}, ValueError, "max_context_len is -2"),
    ],
)
def test_refusals_name_the_argument(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    arguments = {"q": Q, "kv_cache": CACHE, "weights": W, "context_lens": LENS, "block_table": TABLE}
    with pytest.raises(error, match=sentence):
        ops.paged_mqa_logits(**{**arguments, "max_context_len": 16, **changes})
