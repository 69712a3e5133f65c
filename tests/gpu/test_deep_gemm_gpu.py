"""The ``deep_gemm`` provider against the library called directly, on a Hopper device that has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep.native import table
from ascend_deep.native.deep_gemm.provider import DEEP_GEMM
from ascend_deep.native.logits_rows import pitch
from ascend_deep.ops import mqa_logits, mqa_topk
from ascend_deep.ops._op import strict

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _library() -> None:
    missing = DEEP_GEMM.unavailable()
    if missing is not None:
        pytest.skip(f"not run: {missing}")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not run: the device is not SM90")


def make(s: int, h: int, d: int, t: int) -> dict[str, Any]:
    return {
        "q": torch.randn(1, s, h, d, device="cuda").to(FP8),
        "kv": torch.randn(1, t, d, device="cuda").to(FP8),
        "weights": torch.randn(1, s, h, device="cuda"),
        "kv_sf": torch.rand(1, t, 1, device="cuda") + 0.5,
    }


def direct(a: dict[str, Any], ks: Tensor | None = None, ke: Tensor | None = None) -> Tensor:
    import deep_gemm

    s, t = a["q"].shape[1], a["kv"].shape[1]
    start = torch.zeros(s, dtype=torch.int32, device="cuda") if ks is None else ks[0].clamp(0, t).int()
    end = torch.full((s,), t, dtype=torch.int32, device="cuda") if ke is None else ke[0].clamp(0, t).int()
    out = deep_gemm.fp8_mqa_logits(a["q"][0], (a["kv"][0], a["kv_sf"][0, :, 0]), a["weights"][0], start, end)
    at = torch.arange(t, device="cuda")
    hidden = (at < start.unsqueeze(1)) | (at >= end.unsqueeze(1))
    return out.masked_fill(hidden, -torch.inf).unsqueeze(0)


def chosen(a: dict[str, Any]) -> str:
    args = (a["q"], a.get("q_sf"), a["kv"], a.get("kv_sf"), a["weights"], None, None, None)
    options = {"scale": a.get("scale", 1.0), "max_seqlen_k": 0, "clean": True, "out_dtype": None}
    return table.choose("mqa_logits", "cuda", args, options).name


@pytest.mark.parametrize("heads,depth", [(64, 128), (32, 64), (64, 32), (32, 128)])
@pytest.mark.parametrize("keys", [256, 1000, 4096])
def test_equal_to_the_direct_call(heads: int, depth: int, keys: int) -> None:
    a = make(300, heads, depth, keys)
    assert chosen(a) == "deep_gemm"
    with strict():
        assert torch.equal(mqa_logits(**a), direct(a))


def test_ranges_scales_and_compressed() -> None:
    a = make(301, 64, 128, 1000)
    ks = torch.randint(-9, 600, (1, 301), device="cuda")
    ke = ks + torch.randint(-5, 500, (1, 301), device="cuda")
    want = direct(a, ks, ke)
    assert torch.equal(mqa_logits(**a, ks=ks, ke=ke), want)
    assert torch.equal(mqa_logits(**a, ke=ke), direct(a, None, ke))
    short = mqa_logits(**a, ks=ks, ke=ke, max_seqlen_k=700)
    padded = torch.nn.functional.pad(want, (0, 1), value=-torch.inf)
    at = ks.clamp(0, 1000).unsqueeze(-1) + torch.arange(700, device="cuda")
    assert torch.equal(short, padded.gather(2, at.clamp(max=1000)))
    q_sf = torch.rand(1, 301, 64, 1, device="cuda") + 0.5
    scaled = mqa_logits(**a, q_sf=q_sf, scale=0.25)
    b = a | {"weights": a["weights"] * 0.25 * q_sf[..., 0]}
    torch.testing.assert_close(scaled, direct(b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keys", [3840, 4097])
def test_ranges_of_many_keys(keys: int) -> None:
    a = make(301, 64, 128, keys)
    ks = torch.randint(-9, keys, (1, 301), device="cuda")
    ke = ks + torch.randint(-5, keys, (1, 301), device="cuda")
    for bounds in ({}, {"ke": ke}, {"ks": ks}, {"ks": ks, "ke": ke}):
        with strict():
            got = mqa_logits(**a, **bounds)
        assert got.stride(1) == pitch(keys) and got.stride(2) == 1
        assert torch.equal(got, direct(a, bounds.get("ks"), bounds.get("ke")))


@pytest.mark.parametrize("keys", [1, 255, 256, 257, 1000, 1023, 8192])
def test_rows_are_those_of_the_library(keys: int) -> None:
    """Nothing is copied: the storage that comes back is the one the library has filled."""
    a = make(256, 32, 64, keys)
    assert direct_stride(a) == pitch(keys) == mqa_logits(**a).stride(1)


def direct_stride(a: dict[str, Any]) -> int:
    import deep_gemm

    s, t = a["q"].shape[1], a["kv"].shape[1]
    start = torch.zeros(s, dtype=torch.int32, device="cuda")
    out = deep_gemm.fp8_mqa_logits(a["q"][0], (a["kv"][0], a["kv_sf"][0, :, 0]), a["weights"][0], start, start + t)
    return int(out.stride(0))


@pytest.mark.parametrize("which", ["q_sf", "kv_sf"])
def test_negative_scales_are_not_lost(which: str) -> None:
    """The library applies scales behind the ReLU: a negative one would be a wrong number, so it is NaN."""
    a = make(200, 32, 64, 900)
    a["q_sf"] = torch.rand(1, 200, 32, 1, device="cuda") + 0.5
    want = mqa_logits(**a)
    b = {n: t.clone() for n, t in a.items()}
    b[which][0, 7] *= -1
    hit = torch.zeros_like(want, dtype=torch.bool)
    hit[(0, 7) if which == "q_sf" else (0, slice(None), 7)] = True
    got = mqa_logits(**b)
    assert got[hit].isnan().all() and torch.equal(got[~hit], want[~hit])
    _, idx = mqa_topk(**b, topk=900)
    assert (idx[0, :, -1] == 899).all()  # still an index, ranked below every number
    _, idx = mqa_topk(**b, topk=899)
    assert which == "q_sf" or not (idx == 7).any()


def test_bounds_of_keys_without_scales() -> None:
    """The number of keys, to which bounds are clamped, is then seen in no tensor of the launch that prepares them."""
    for keys in (700, 1100, 300):
        a = make(200, 32, 64, keys)
        a["kv_sf"] = torch.ones_like(a["kv_sf"])
        ke = torch.full((1, 200), 1000, device="cuda")
        got = mqa_logits(**{n: t for n, t in a.items() if n != "kv_sf"}, ke=ke)
        assert torch.equal(got, direct(a, None, ke))


def test_topk_is_that_of_the_librarys_scores() -> None:
    for keys in (3000, 40000):
        a = make(257, 64, 128, keys)
        ke = torch.randint(0, keys + 1, (1, 257), device="cuda")
        with strict():
            scores, idx = mqa_topk(**a, ke=ke, topk=1024, sorted=True)
        values, order = direct(a, None, ke).sort(dim=-1, descending=True, stable=True)
        want = torch.where(torch.arange(1024, device="cuda") < ke.unsqueeze(-1), order[..., :1024], -1)
        assert torch.equal(idx, want)
        assert torch.equal(scores, values[..., :1024])


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"s": 191}, "from 192 queries"),
        ({"h": 48}, "48 heads"),
        ({"d": 96}, "D is 96"),
        ({"scale": -0.5}, "scale is -0.5"),
        ({"dtype": torch.bfloat16}, "bfloat16"),
    ],
    ids=str,
)
def test_both_sides_of_each_limit(change: dict[str, Any], reason: str) -> None:
    shape = {"s": 192, "h": 64, "d": 128, "t": 300}
    inside = make(**shape)
    assert chosen(inside) == "deep_gemm"
    a = make(**(shape | {k: v for k, v in change.items() if k in shape}))
    if "dtype" in change:
        a = {"q": a["q"].to(change["dtype"]), "kv": a["kv"].to(change["dtype"]), "weights": a["weights"]}
    if "scale" in change:
        a["scale"] = change["scale"]
    args = (a["q"], None, a["kv"], a.get("kv_sf"), a["weights"], None, None, None)
    options = {"scale": a.get("scale", 1.0), "max_seqlen_k": 0, "clean": True, "out_dtype": None}
    choice = table.choose("mqa_logits", "cuda", args, options)
    assert choice.name != "deep_gemm"
    assert any(reason in r.reason for r in choice.refusals if r.provider == "deep_gemm")


def test_nothing_is_cached_from_a_graph_capture() -> None:
    a = make(200, 32, 64, 777)
    want = direct(a)
    mqa_logits(**a)  # compiles
    graph = torch.cuda.CUDAGraph()
    b = make(208, 32, 64, 779)
    with torch.cuda.graph(graph):
        out = mqa_logits(**b)
    assert torch.equal(mqa_logits(**a), want)
    assert torch.equal(mqa_logits(**b), direct(b))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, direct(b))
