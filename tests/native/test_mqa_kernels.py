"""The C++ indexer kernels: every instruction set, thread count and split gives what the reference gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native.cpu import provider

NAMES = ("mqa_logits", "mqa_topk", "paged_mqa_logits", "paged_mqa_topk", "sparse_mqa_attention")

pytestmark = pytest.mark.skipif(
    provider.CPU.unavailable() is not None, reason=str(provider.CPU.unavailable() or "kernels built")
)


def instruction_sets() -> list[str]:
    return [] if provider.CPU.unavailable() else provider.isa().replace("*", "").split()


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = next(name for name in provider.isa().split() if name.endswith("*"))[:-1]
    provider.isa(request.param)
    yield request.param
    provider.isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def taken(name: str, sample: ops.Sample) -> bool:
    return ops.provider(name, "cpu", sample.args, sample.kwargs).provider is not None


@pytest.mark.parametrize("name", NAMES)
def test_samples_on_every_instruction_set(name: str, isa: str) -> None:
    count = 0
    for sample in ops.op(name).samples():
        if not taken(name, sample):
            continue
        count += 1
        wanted = tensors(ops.reference(name)(*sample.args, **sample.kwargs))
        with ops.strict():
            got = tensors(ops.op(name).overload(*sample.args, **sample.kwargs))
        for a, b in zip(got, wanted, strict=True):
            rounding = {torch.bfloat16: 1e-2}.get(b.dtype, 2e-5)
            torch.testing.assert_close(a, b, rtol=rounding, atol=rounding * 5, equal_nan=True, msg=sample.name)
    assert count > 15


def test_what_the_kernels_refuse() -> None:
    refused = {(n, s.name) for n in NAMES for s in ops.op(n).samples() if not taken(n, s)}
    assert refused == {
        ("mqa_logits", "float64"),
        ("mqa_topk", "float64"),
        ("paged_mqa_logits", "f64_out"),
        ("paged_mqa_topk", "f64_out"),
        ("sparse_mqa_attention", "float16"),
        ("sparse_mqa_attention", "float64"),
    }


def random_case(g: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Sizes around the tiles; ranges and masks half of the time; integers, so that results are exact."""

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    b, s, h, d, t = between(1, 4), between(1, 40), between(1, 20), between(1, 40), between(0, 400)
    q = torch.randint(-1, 2, (b, s, h, d), generator=g).float()
    kv = torch.randint(-1, 2, (b, t, d), generator=g).float()
    weights = torch.randint(-2, 3, (b, s, h), generator=g).float()
    ks = torch.randint(-5, t + 5, (b, s), generator=g) if between(0, 2) else None
    ke = torch.randint(-5, t + 5, (b, s), generator=g) if between(0, 2) else None
    mask = torch.rand(b, s, t, generator=g) > 0.3 if between(0, 2) else None
    if mask is not None and between(0, 2):
        mask = torch.where(mask, torch.randint(-3, 3, mask.shape, generator=g).float(), -torch.inf)
    return (q, None, kv, None, weights, ks, ke, mask), {"scale": 0.5}


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_are_exact(seed: int, isa: str) -> None:
    g = torch.Generator().manual_seed(seed)
    args, kwargs = random_case(g)
    columns = int(torch.randint(0, 60, (), generator=g))
    logits = {**kwargs, "max_seqlen_k": columns, "clean": True, "out_dtype": None}
    assert torch.equal(ops.op("mqa_logits").overload(*args, **logits), ops.reference("mqa_logits")(*args, **logits))
    for outside in ("pad", "rank_last"):
        for sorted_ in (False, True):
            k = int(torch.randint(1, 200, (), generator=g))
            topk = {"topk": k, "outside": outside, "sorted": sorted_, "return_scores": True, "index_dtype": None}
            got = ops.op("mqa_topk").overload(*args, **kwargs, **topk)
            wanted = ops.reference("mqa_topk")(*args, **kwargs, **topk)
            assert torch.equal(got[1], wanted[1]) and torch.equal(got[0], wanted[0])


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_thread_counts_give_the_same_bits(rows: int, threads: None) -> None:
    """One thread has one key range per row, many threads have several, with a merge behind them."""
    q, kv, weights = torch.randn(1, rows, 5, 24), torch.randn(1, 5000, 24), torch.randn(1, rows, 5)
    ke = torch.randint(0, 5001, (1, rows))
    heads = torch.randn(1, 24, rows, 24)
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        scores, idx = ops.mqa_topk(q, kv, weights, None, ke, topk=700, scale=0.3, sorted=True)
        out, lse = ops.sparse_mqa_attention(heads, kv[:, None], kv[:, None], idx, scale=0.3)
        results.append((scores, idx, ops.mqa_logits(q, kv, weights, None, ke, scale=0.3), out, lse))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_a_row_does_not_depend_on_its_neighbours(isa: str) -> None:
    """Prefill, a slice of it, and decode score a query alike to the last bit."""
    q, kv, weights = torch.randn(1, 37, 11, 40), torch.randn(1, 333, 40), torch.randn(1, 37, 11)
    whole = ops.mqa_logits(q, kv, weights, scale=0.3)
    for s in (0, 5, 36):
        assert torch.equal(ops.mqa_logits(q[:, s : s + 1], kv, weights[:, s : s + 1], scale=0.3), whole[:, s : s + 1])
    for t in (1, 15, 16, 17, 47, 48, 49, 200):
        assert torch.equal(ops.mqa_logits(q, kv[:, :t], weights, scale=0.3), whole[:, :, :t])


def test_avx2_and_avx512_agree_to_the_bit() -> None:
    """Vectors hold keys, so their length does not change a sum."""
    sets = [s for s in instruction_sets() if s.startswith("avx")]
    if len(sets) < 2:
        pytest.skip("this CPU has one of them only")
    q, kv, weights = torch.randn(2, 7, 9, 50), torch.randn(2, 100, 50), torch.randn(2, 7, 9)
    results = []
    before = next(name for name in provider.isa().split() if name.endswith("*"))[:-1]
    for name in sets:
        provider.isa(name)
        results.append(ops.mqa_logits(q, kv, weights, scale=0.3))
    provider.isa(before)
    assert all(torch.equal(results[0], r) for r in results[1:])


_RANK = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
from ascend_deep import ops
torch.manual_seed(5)
q, kv, w = torch.randn(1, 9, 4, 32), torch.randn(1, 3000, 32), torch.randn(1, 9, 4)
with torch.set_grad_enabled(sys.argv[1] == "1"):
    scores, idx = ops.mqa_topk(q.requires_grad_(sys.argv[1] == "1"), kv, w, topk=500, scale=0.3)
print(hash(tuple(idx.flatten().tolist())), scores.double().sum().item().hex())
"""


def test_processes_choose_the_same_keys() -> None:
    """Replicated indexers of tensor-parallel ranks, one of them with gradients and fewer threads."""
    outputs = {
        subprocess.run([sys.executable, "-c", _RANK, n], capture_output=True, text=True, check=True).stdout
        for n in ("1", "2")
    }
    assert len(outputs) == 1 and outputs.pop().strip()


_MEMORY = """
import sys, torch
from ascend_deep import ops
torch.set_num_threads(1)
s, t, h, d, k = 64, 8192, 64, 128, 2048
q, kv, w = torch.randn(1, s, h, d), torch.randn(1, t, d), torch.randn(1, s, h)
def eager():
    p = torch.relu(torch.matmul(q, kv.transpose(-1, -2).unsqueeze(1)) * d**-0.5)
    return torch.matmul(w.unsqueeze(-2), p).squeeze(-2).topk(k, -1).indices
def ours():
    return ops.mqa_topk(q, kv, w, topk=k, scale=d**-0.5, return_scores=False)
def resident(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024
torch.relu(torch.randn(2, 16, 64) @ torch.randn(2, 64, 64)).topk(3)
ops.mqa_topk(q[:, :1], kv[:, :64], w[:, :1], topk=3)
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
(ours if sys.argv[1] == "ours" else eager)()
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_is_a_twentieth_of_that_of_eager() -> None:
    def peak(which: str) -> int:
        done = subprocess.run([sys.executable, "-c", _MEMORY, which], capture_output=True, text=True)
        if done.returncode and "clear_refs" in done.stderr:
            pytest.skip("the peak of resident memory cannot be reset here")
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    eager, ours = peak("eager"), peak("ours")
    assert eager > 200 << 20, "the plain form holds [S, H, T] at least twice"
    assert ours < eager / 20
