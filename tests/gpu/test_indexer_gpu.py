"""The CUDA providers of the indexer ops against their references, on the device."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native import table
from ascend_deep.native.triton.provider import TRITON
from ascend_deep.ops import _mqa, _op, mqa_logits, mqa_topk
from ascend_deep.ops._mqa_samples import logits_samples, topk_samples
from ascend_deep.ops._op import Sample, strict

_topk_module = importlib.import_module("ascend_deep.ops.mqa_topk")
_logits_module = importlib.import_module("ascend_deep.ops.mqa_logits")

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOLERANCE = {
    BF16: 2e-5,
    torch.float16: 2e-5,
    torch.float32: 2e-5,
    FP8: ops.op("mqa_logits").tolerance_for(FP8, "cuda").rtol,
}


def make(b: int, s: int, h: int, d: int, t: int, dtype: torch.dtype = BF16, seed: int = 0) -> dict[str, Any]:
    g = torch.Generator(device="cuda").manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    made: dict[str, Any] = {
        "q": randn(b, s, h, d).to(dtype),
        "kv": randn(b, t, d).to(dtype),
        "weights": randn(b, s, h),
        "scale": 0.37,
    }
    if dtype == FP8:
        made["q_sf"], made["kv_sf"] = randn(b, s, h, 1).abs() + 0.1, randn(b, t, 1).abs() + 0.1
    return made


def exact(a: dict[str, Any], ks: Tensor | None = None, ke: Tensor | None = None) -> Tensor:
    """Scores [B, S, T] in float64, -inf outside the ranges."""
    q, kv = (_mqa.dequantise(a[n], a.get(n + "_sf")).double() for n in ("q", "kv"))
    out = _mqa.scores(q, kv, a["weights"].double(), a["scale"])
    hidden = _mqa.excluded(q, kv.shape[1], ks, ke, None)
    return out if hidden is None else out.masked_fill(hidden, -torch.inf)


def near(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    assert torch.equal(got.isneginf(), want.isneginf())
    finite = want.isfinite()
    if finite.any():
        error = (got.double() - want)[finite].abs().max() / want[finite].abs().max()
        assert error.item() < tolerance


def selected(values: Tensor, topk: int, eligible: Tensor | None = None, sorted: bool = False) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _topk_module.select(values, eligible, topk, sorted)
    return out


def to_cuda(x: Any) -> Any:
    return x.cuda() if isinstance(x, Tensor) else x


@pytest.mark.parametrize("sample", list(logits_samples()), ids=lambda s: s.name)
def test_samples_of_mqa_logits(sample: Sample) -> None:
    args, kwargs = [to_cuda(a) for a in sample.args], dict(sample.kwargs)
    reason = TRITON.refusal("mqa_logits", tuple(args), kwargs)
    if reason is not None:
        assert str(reason).endswith(".")
        pytest.skip(f"refused: {reason}")
    want = _logits_module._reference(*args, **kwargs)
    got = TRITON.kernels["mqa_logits"](*args, **kwargs)
    assert got.dtype == want.dtype and got.shape == want.shape and got.stride() == want.stride()
    if not kwargs["clean"]:
        # What is excluded may hold anything.
        want = _logits_module._reference(*args, **{**kwargs, "clean": True})
        got = torch.where(want.isneginf(), want, got)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    at = want.isfinite()
    if at.any():
        rounding = {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(want.dtype, TOLERANCE[args[0].dtype])
        assert ((got - want)[at].abs().max() / want[at].abs().max().clamp(min=1e-30)).item() < rounding


@pytest.mark.parametrize("sample", list(topk_samples()), ids=lambda s: s.name)
def test_samples_of_mqa_topk(sample: Sample) -> None:
    """Against the op's own rule, applied to the scores of the same kernel."""
    args, kwargs = [to_cuda(a) for a in sample.args], dict(sample.kwargs)
    reason = TRITON.refusal("mqa_topk", tuple(args), kwargs)
    if reason is not None:
        pytest.skip(f"refused: {reason}")
    q, _, kv, _, _, ks, ke, mask = args
    values = TRITON.kernels["mqa_logits"](
        *args, scale=kwargs["scale"], max_seqlen_k=0, clean=True, out_dtype=torch.float32
    )
    hidden = _mqa.excluded(q, kv.shape[1], ks, ke, mask)
    eligible = ~hidden.expand(values.shape) if hidden is not None and kwargs["outside"] == "pad" else None
    want_scores, want = selected(values, kwargs["topk"], eligible, kwargs["sorted"])
    scores, idx = TRITON.kernels["mqa_topk"](*args, **kwargs)
    assert idx.dtype == (kwargs["index_dtype"] or torch.int64)
    assert torch.equal(idx.long(), want)
    if kwargs["return_scores"]:
        assert torch.equal(scores.nan_to_num(nan=1e30), want_scores.nan_to_num(nan=1e30))
    else:
        assert scores.numel() == 0


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, FP8], ids=str)
@pytest.mark.parametrize("depth", [16, 32, 64, 96, 128])
@pytest.mark.parametrize("heads", [1, 2, 16, 48, 64])
def test_heads_and_depths(heads: int, depth: int, dtype: torch.dtype) -> None:
    a = make(2, 5, heads, depth, 333, dtype, seed=heads * depth)
    with strict():
        near(mqa_logits(**a), exact(a), TOLERANCE[dtype])


@pytest.mark.parametrize("size", [1, 63, 64, 65, 257, 2047, 2049, 4096])
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_causal_squares(size: int, dtype: torch.dtype) -> None:
    """64 heads of 128, k = 2048: values against float64, selection against the op's rule, twice the same."""
    a = make(1, size, 64, 128, size, dtype, seed=size)
    ke = torch.arange(1, size + 1, device="cuda").unsqueeze(0)
    with strict():
        values = mqa_logits(**a, ke=ke)
        near(values, exact(a, None, ke), TOLERANCE[dtype])
        scores, idx = mqa_topk(**a, ke=ke, topk=2048)
        again = mqa_topk(**a, ke=ke, topk=2048)
    assert torch.equal(again[1], idx) and torch.equal(again[0], scores)
    if dtype == BF16:
        eligible = torch.arange(size, device="cuda") < ke.unsqueeze(-1)
        want_scores, want = selected(values, 2048, eligible)
        assert torch.equal(idx, want) and torch.equal(scores, want_scores)


@pytest.mark.parametrize("queries,keys", [(3, 65536), (600, 20000), (2, 200001)])
@pytest.mark.parametrize("topk", [100, 2048])
def test_long_rows(queries: int, keys: int, topk: int) -> None:
    """Rows that are selected in several rounds."""
    a = make(1, queries, 8, 64, keys, BF16, seed=keys)
    with strict():
        values = mqa_logits(**a)
        scores, idx = mqa_topk(**a, topk=topk)
    want_scores, want = selected(values, topk)
    assert torch.equal(idx, want) and torch.equal(scores, want_scores)


@pytest.mark.parametrize("keys", [8320, 40000])
def test_plateau_of_zeros(keys: int) -> None:
    """100 positive scores, exact zeros else, k = 2048: all positives, then the zeros of lowest index."""
    a = make(1, 7, 64, 128, keys, BF16, seed=3)
    a["weights"] = a["weights"].abs() + 0.1
    winners = torch.randperm(keys, device="cuda")[:100].sort().values
    zero = torch.ones(keys, dtype=torch.bool, device="cuda")
    zero[winners] = False
    a["kv"] = a["kv"].masked_fill(zero.view(1, -1, 1), 0)
    with strict():
        scores, idx = mqa_topk(**a, topk=2048)
    zeros = torch.arange(keys, device="cuda")[zero][: 2048 - 100]
    want = torch.cat((winners, zeros)).sort().values
    assert torch.equal(idx, want.expand_as(idx))
    assert ((scores > 0).sum(-1) == 100).all()


@pytest.mark.parametrize("outside", ["pad", "rank_last"])
@pytest.mark.parametrize("masked", [False, True])
def test_long_rows_with_ranges(outside: str, masked: bool) -> None:
    """Ranges of every length, two of them empty, and a mask that leaves fewer keys than topk in some rows."""
    a = make(2, 6, 8, 64, 30000, BF16, seed=12)
    ks = torch.tensor([[0, 100, 29000, 0, 12345, 7]], device="cuda")
    ke = torch.tensor([[1500, 29999, 30000, 0, 30000, -3], [30000, 2500, 29001, 30000, 12346, 20000]], device="cuda")
    mask = torch.rand(2, 1, 30000, device="cuda") < 0.08 if masked else None
    with strict():
        values = mqa_logits(**a, ks=ks, ke=ke, mask=mask)
        scores, idx = mqa_topk(**a, ks=ks, ke=ke, mask=mask, topk=2048, outside=outside)
    hidden = _mqa.excluded(a["q"], 30000, ks, ke, mask)
    assert hidden is not None
    want_scores, want = selected(values, 2048, None if outside == "rank_last" else ~hidden)
    assert torch.equal(idx, want) and torch.equal(scores, want_scores)


def test_clustered_values() -> None:
    """Scores that half precision cannot tell apart."""
    a = make(1, 4, 1, 64, 9000, torch.float32, seed=5)
    a["weights"] = a["weights"].abs() + 0.5
    a["kv"] = (1 + torch.arange(9000, device="cuda").view(1, -1, 1) * 2e-6).expand(1, 9000, 64).contiguous()
    a["kv"] = a["kv"][:, torch.randperm(9000, device="cuda")]
    a["q"] = a["q"].abs()
    with strict():
        values = mqa_logits(**a)
        scores, idx = mqa_topk(**a, topk=2048, sorted=True)
    want_scores, want = selected(values, 2048, None, True)
    assert torch.equal(idx, want) and torch.equal(scores, want_scores)


def test_negative_and_empty_ranges() -> None:
    a = make(2, 4, 16, 64, 300, BF16, seed=6)
    ks = torch.tensor([[-7, 0, 290, 400], [5, 5, 0, 17]], device="cuda")
    ke = torch.tensor([[-4, 0, 999, 500], [5, 4, 300, 18]], device="cuda", dtype=torch.int32)
    with strict():
        near(mqa_logits(**a, ks=ks, ke=ke), exact(a, ks, ke), TOLERANCE[BF16])
        short = mqa_logits(**a, ks=ks, ke=ke, max_seqlen_k=40)
        _, idx = mqa_topk(**a, ks=ks, ke=ke, topk=9)
    want = _logits_module.compress(a["q"], exact(a, ks, ke), ks, 40)
    near(short, want, TOLERANCE[BF16])
    assert (idx[0, 0] == -1).all() and (idx[0, 3] == -1).all() and (idx[1, 1] == -1).all()
    assert idx[1, 3].tolist() == [17] + [-1] * 8


def test_nan_and_infinity() -> None:
    a = make(1, 3, 16, 64, 200, BF16, seed=7)
    a["kv"][0, 50, 3] = torch.nan
    a["kv"][0, 60, 3] = torch.inf
    with strict():
        got = mqa_logits(**a)
        _, idx = mqa_topk(**a, topk=198)
    want = _logits_module._reference(
        a["q"], None, a["kv"], None, a["weights"], None, None, None,
        scale=a["scale"], max_seqlen_k=0, clean=True, out_dtype=None,
    )  # fmt: skip
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert not (idx == 50).any()


def test_strided_operands() -> None:
    a = make(2, 6, 8, 64, 100, BF16, seed=8)
    want = exact(a)
    b = dict(a)
    b["q"] = a["q"].transpose(1, 2).contiguous().transpose(1, 2)
    b["kv"] = torch.nn.functional.pad(a["kv"], (3, 2))[..., 3:-2]
    b["weights"] = a["weights"].transpose(1, 2).contiguous().transpose(1, 2)
    with strict():
        near(mqa_logits(**b), want, TOLERANCE[BF16])


def test_memory_does_not_grow_with_the_scores() -> None:
    a = make(1, 8192, 4, 32, 32768, BF16, seed=9)
    mqa_topk(**a, topk=64)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mqa_topk(**a, topk=64)
    assert torch.cuda.max_memory_allocated() - before < 450 << 20  # the scores are 1 GiB


# dtype, (heads, depth) inside, (heads, depth) outside, what the refusal says.
LIMITS = [
    (BF16, (256, 32), (257, 32), "257 heads"),
    (BF16, (8, 256), (8, 257), "D = 257"),
    (FP8, (256, 64), (257, 64), "257 heads"),
    (torch.float32, (64, 128), (65, 128), "65 heads"),
    (torch.float32, (4, 128), (4, 129), "D = 129"),
]


@pytest.mark.parametrize("dtype,inside,outside,reason", LIMITS, ids=str)
def test_both_sides_of_each_limit(
    dtype: torch.dtype, inside: tuple[int, int], outside: tuple[int, int], reason: str
) -> None:
    for (heads, depth), refused in ((inside, False), (outside, True)):
        a = make(1, 2, heads, depth, 90, dtype, seed=heads)
        args = (a["q"], a.get("q_sf"), a["kv"], a.get("kv_sf"), a["weights"], None, None, None)
        kwargs = {"scale": a["scale"], "max_seqlen_k": 0, "clean": True, "out_dtype": None}
        choice = table.choose("mqa_logits", "cuda", args, kwargs)
        assert (choice.name == "reference") == refused
        if refused:
            assert any(reason in r.reason for r in choice.refusals)
        near(mqa_logits(**a), exact(a), TOLERANCE[dtype])


@pytest.mark.parametrize("topk", [8192, 12000, 20000])
def test_many_of_long_rows(topk: int) -> None:
    """More than the lists of the filter are made for: the selection that counts in memory."""
    a = make(1, 3, 4, 32, 40000, BF16, seed=11)
    with strict():
        _, idx = mqa_topk(**a, topk=topk)
        assert torch.equal(idx, selected(mqa_logits(**a), topk)[1])


@pytest.mark.parametrize("columns", [0, 70])
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
@pytest.mark.parametrize("out_dtype", [None, BF16], ids=str)
def test_fake_results_have_the_strides_of_real_ones(
    dtype: torch.dtype, out_dtype: torch.dtype | None, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every provider, the reference too: graphs are compiled before it is known who runs."""
    a = make(2, 5, 16, 64, 300, dtype)
    args = (a["q"], a.get("q_sf"), a["kv"], a.get("kv_sf"), a["weights"], None, None, None)
    kwargs = {"scale": 0.37, "max_seqlen_k": columns, "clean": True, "out_dtype": out_dtype}
    op = torch.ops.ascend_deep.mqa_logits.default
    torch.library.opcheck(op, args, kwargs, test_utils="test_faketensor")
    want = _logits_module._reference(*args, **kwargs).stride()
    assert op(*args, **kwargs).stride() == TRITON.kernels["mqa_logits"](*args, **kwargs).stride() == want
    assert (want[1] > 300) == (dtype == FP8 and not columns and out_dtype is None)
    # Its own processes would outnumber the cores where tests run side by side.
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    compiled = torch.compile(lambda *t: mqa_logits(*t[:3], q_sf=t[3], kv_sf=t[4], scale=0.37).clamp(min=0.5) * 2)
    tensors = (a["q"], a["kv"], a["weights"], a.get("q_sf"), a.get("kv_sf"))
    want = op(*args, **{**kwargs, "max_seqlen_k": 0, "out_dtype": None}).clamp(min=0.5) * 2
    assert torch.equal(compiled(*tensors), want)


def test_negative_scales() -> None:
    """Right for queries, whose sign goes into q; NaN for keys."""
    a = make(2, 9, 16, 64, 300, FP8)
    a["q_sf"][1, 4] *= -1
    with strict():
        near(mqa_logits(**a), exact(a), TOLERANCE[FP8])
    want = mqa_logits(**a)
    a["kv_sf"][0, 77] *= -1
    got = mqa_logits(**a)
    assert got[0, :, 77].isnan().all()
    got[0, :, 77] = want[0, :, 77]
    assert torch.equal(got, want)


def test_repeated_calls_take_the_short_way_and_checks_still_hold() -> None:
    a = make(1, 4, 8, 64, 300)
    first = mqa_logits(**a)
    taken = _op._TAKEN["mqa_logits"]
    assert any(key[0] == BF16 and key[1] == a["q"].shape for key in taken)
    assert torch.equal(mqa_logits(**a), first)
    b = {**a, "q": -a["q"]}
    assert torch.equal(mqa_logits(**b), mqa_logits(**{**a, "kv": -a["kv"]}))
    lazily = {**a, "q": torch.complex(a["q"].float(), a["q"].float()).conj().imag.to(BF16)}
    assert torch.equal(mqa_logits(**lazily), mqa_logits(**b))
    negated = torch.view_as_complex(a["q"].float().unflatten(-1, (-1, 2)).contiguous()).conj().imag
    assert negated.is_neg()
    half = {**a, "q": negated, "kv": a["kv"][..., :32].float()}
    assert torch.equal(mqa_logits(**half), mqa_logits(**{**half, "q": negated.resolve_neg().clone()}))
    with pytest.raises(ValueError, match="D of kv is 32, but D of q is 64"):
        mqa_logits(**{**a, "kv": a["kv"][..., :32]})
    a["weights"].requires_grad_()
    mqa_logits(**a).sum().backward()
    assert a["weights"].grad is not None


def test_lengths_that_grow() -> None:
    """Numbers are part of a launch, not of the variant of the kernel that it finds again."""
    a = make(1, 3, 8, 64, 16500, seed=21)
    for keys in (255, 256, 257, 258, 272, 16384, 16385, 16386, 16400):
        b = {**a, "kv": a["kv"][:, :keys]}
        with strict():
            values = mqa_logits(**b)
            _, idx = mqa_topk(**b, topk=100)
        near(values, exact(b), TOLERANCE[BF16])
        assert torch.equal(idx, selected(values, 100)[1])
