"""``mqa_logits`` and its backward against float64, the edge cases of the contract, refusals."""

from __future__ import annotations

from typing import Any

import mqa_naive
import pytest
import torch
from torch import Tensor

from ascend_deep import ops

RUNNERS = {"reference": lambda op: op.reference, "op": lambda op: op.overload}


def close(name: str, result: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance of the op, which is relative to the largest finite magnitude."""
    tolerance = ops.op(name).tolerance[dtype]
    finite = wanted[wanted.isfinite()]
    scale = max(float(finite.abs().max()) if finite.numel() else 0.0, 1e-30)
    torch.testing.assert_close(result.double(), wanted.double(), rtol=tolerance.rtol, atol=tolerance.atol * scale)


def samples(name: str) -> list[Any]:
    return [pytest.param(s, r, id=f"{s.name}-{r}") for s in ops.op(name).samples() for r in RUNNERS]


@pytest.mark.parametrize(("sample", "runner"), samples("mqa_logits"))
def test_logits_equal_the_formula(sample: ops.Sample, runner: str) -> None:
    q, ks = sample.args[0], sample.args[5]
    wanted, counts = mqa_naive.logits(*sample.args, scale=sample.kwargs["scale"])
    columns, out_dtype = sample.kwargs["max_seqlen_k"], sample.kwargs["out_dtype"]
    if columns:
        wanted = mqa_naive.compressed(wanted, counts, ks, columns)
    out = RUNNERS[runner](ops.op("mqa_logits"))(*sample.args, **sample.kwargs)
    assert out.dtype == (out_dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32))
    assert torch.equal(out == -torch.inf, wanted == -torch.inf)
    if out_dtype == torch.bfloat16:
        torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=1e-4)
    else:
        close("mqa_logits", out, wanted, q.dtype)


@pytest.mark.parametrize("heads", [1, 2, 16, 64])
@pytest.mark.parametrize("depth", [16, 32, 64, 96, 128, 192])
def test_head_dims_and_head_counts(heads: int, depth: int) -> None:
    q, kv, weights = torch.randn(1, 3, heads, depth), torch.randn(1, 70, depth), torch.randn(1, 3, heads)
    wanted = mqa_naive.scores(q.double(), kv.double(), weights, 0.3)
    close("mqa_logits", ops.mqa_logits(q, kv, weights, scale=0.3), wanted, torch.float32)


@pytest.mark.parametrize("keys", [2047, 2048, 2049, 4095, 4096, 4097])
def test_contexts_around_block_sizes(keys: int) -> None:
    q, kv, weights = torch.randn(1, 2, 2, 16), torch.randn(1, keys, 16), torch.randn(1, 2, 2)
    wanted = mqa_naive.scores(q.double(), kv.double(), weights, 0.3)
    close("mqa_logits", ops.mqa_logits(q, kv, weights, scale=0.3), wanted, torch.float32)


def test_queries_without_a_batch() -> None:
    q, kv, weights = torch.randn(5, 2, 16), torch.randn(20, 16), torch.randn(5, 2)
    ke = torch.tensor([3, 20, 0, -1, 9])
    single = ops.mqa_logits(q, kv, weights, None, ke, scale=0.3)
    batched = ops.mqa_logits(q[None], kv[None], weights[None], None, ke[None], scale=0.3)
    assert single.shape == (5, 20) and torch.equal(single, batched[0])


@pytest.mark.parametrize("runner", list(RUNNERS))
def test_what_is_excluded_may_hold_anything(runner: str) -> None:
    q, kv, weights = torch.randn(1, 3, 2, 16), torch.randn(1, 20, 16), torch.randn(1, 3, 2)
    ks, ke = torch.tensor([[0, 2, 4]]), torch.tensor([[10, 12, 14]])
    mask = torch.ones(1, 1, 20, dtype=torch.bool)
    mask[..., 7] = False
    call = RUNNERS[runner](ops.op("mqa_logits"))
    kwargs = {"scale": 0.3, "max_seqlen_k": 0, "clean": True, "out_dtype": None}
    wanted = call(q, None, kv, None, weights, ks, ke, mask, **kwargs)
    dirty = kv.clone()
    dirty[0, 14:], dirty[0, 7] = torch.nan, torch.inf
    assert torch.equal(call(q, None, dirty, None, weights, ks, ke, mask, **kwargs), wanted)
    added = torch.zeros(1, 1, 20).masked_fill(~mask, -torch.inf)
    assert torch.equal(call(q, None, dirty, None, weights, ks, ke, added, **kwargs), wanted)


@pytest.mark.parametrize("runner", list(RUNNERS))
def test_nan_and_infinity_follow_ieee(runner: str) -> None:
    q, kv, weights = torch.randn(1, 2, 2, 8).abs(), torch.randn(1, 30, 8).abs(), torch.ones(1, 2, 2) * 0.7
    kv[0, 3, 1], kv[0, 20, 2], kv[0, 9, 4] = torch.nan, torch.inf, -torch.inf
    kwargs = {"scale": 0.3, "max_seqlen_k": 0, "clean": True, "out_dtype": None}
    out = RUNNERS[runner](ops.op("mqa_logits"))(q, None, kv, None, weights, None, None, None, **kwargs)
    assert out[:, :, 3].isnan().all()  # relu(NaN) is NaN
    assert (out[:, :, 20] == torch.inf).all()
    assert (out[:, :, 9] == 0).all()  # relu(-inf) is 0
    assert out.isfinite().sum() == out.numel() - 4


def plain(q: Tensor, kv: Tensor, weights: Tensor, scale: float) -> Tensor:
    """As models write it."""
    p = torch.relu(torch.matmul(q, kv.transpose(-1, -2).unsqueeze(1)) * scale)
    return torch.matmul(weights.unsqueeze(-2), p).squeeze(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_equal_those_of_the_plain_form(dtype: torch.dtype) -> None:
    leaves = [torch.randn(*s).to(dtype) for s in ((2, 5, 3, 16), (2, 21, 16), (2, 5, 3))]
    ours = [x.clone().requires_grad_() for x in leaves]
    theirs = [x.double().requires_grad_() for x in leaves]
    grad = torch.randn(2, 5, 21)
    ke = torch.tensor([[1, 7, 21, 0, 13]])
    visible = torch.arange(21) < ke.unsqueeze(-1)
    ops.mqa_logits(*ours, None, ke, scale=0.3).backward(grad)
    plain(*theirs, 0.3).masked_fill(~visible, 0.0).backward(grad.double())
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None and b.grad is not None and a.grad.dtype == dtype
        close("mqa_logits_backward", a.grad, b.grad, dtype)


@pytest.mark.parametrize("columns", [0, 9])
def test_numerical_gradients(columns: int) -> None:
    leaves = [torch.randn(*s, dtype=torch.float64) for s in ((2, 3, 2, 5), (2, 11, 5), (2, 3, 2), (1, 3, 11))]
    for x in leaves:
        x.requires_grad_()
    ks, ke = torch.tensor([[0, 2, 5]]), torch.tensor([[4, 11, 5]])

    def call(q: Tensor, kv: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = ops.mqa_logits(q, kv, weights, ks, ke, mask, scale=0.3, max_seqlen_k=columns)
        return out.masked_fill(out == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(call, leaves, eps=1e-7, atol=1e-6)


def test_gradient_is_zero_and_finite_where_nothing_is_seen() -> None:
    q, kv, weights = torch.randn(1, 4, 2, 8), torch.randn(1, 12, 8), torch.randn(1, 4, 2)
    kv[0, 10:] = torch.nan
    q[0, 2] = torch.nan
    leaves = [x.requires_grad_() for x in (q, kv, weights)]
    ke = torch.tensor([[10, 3, 0, 7]])
    out = ops.mqa_logits(q, kv, weights, None, ke, scale=0.3)
    grad = torch.full_like(out, torch.nan).masked_fill(torch.arange(12) < ke.unsqueeze(-1), 1.3)
    out.backward(grad)
    for x in leaves:
        assert x.grad is not None and x.grad.isfinite().all()
    assert kv.grad is not None and (kv.grad[0, 10:] == 0).all() and (kv.grad[0, :3] != 0).any()
    assert q.grad is not None and (q.grad[0, 2] == 0).all() and (q.grad[0, 0] != 0).any()


def test_backward_through_fp8_refuses() -> None:
    q, kv = torch.randn(1, 3, 2, 16).to(torch.float8_e4m3fn), torch.randn(1, 9, 16).to(torch.float8_e4m3fn)
    weights = torch.randn(1, 3, 2, requires_grad=True)
    out = ops.mqa_logits(q, kv, weights)
    with pytest.raises(RuntimeError, match="no backward through fp8 or fp4 operands; pass q and kv in bf16 or f32"):
        out.sum().backward()


def test_mask_gradient_needs_a_floating_mask() -> None:
    q, kv, weights = torch.randn(1, 2, 2, 8), torch.randn(1, 5, 8), torch.randn(1, 2, 2)
    with pytest.raises(TypeError, match="the gradient of mask is asked for, but mask is not floating"):
        ops.mqa_logits_backward(torch.randn(1, 2, 5), q, kv, weights, output_mask=(True, True, True, True))


def test_autocast_casts_the_operands() -> None:
    q, kv, weights = torch.randn(1, 3, 2, 16), torch.randn(1, 9, 16), torch.randn(1, 3, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.mqa_logits(q, kv, weights, scale=0.3)
    wanted = ops.mqa_logits(q.bfloat16(), kv.bfloat16(), weights.bfloat16(), scale=0.3)
    assert out.dtype == torch.float32 and torch.equal(out, wanted)
    assert not torch.equal(out, ops.mqa_logits(q, kv, weights, scale=0.3))


Q, KV, W = torch.randn(2, 3, 4, 8), torch.randn(2, 9, 8), torch.randn(2, 3, 4)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"kv": KV[:, :, :6]}, ValueError, "D of kv is 6, but D of q is 8"),
        ({"kv": KV[:1]}, ValueError, "B of kv is 1, but B of q is 2"),
        ({"kv": KV.bfloat16()}, TypeError, "kv has dtype bfloat16; accepted: float32"),
        ({"weights": W[:, :, :2]}, ValueError, "H of weights is 2, but H of q is 4"),
        ({"q": Q.int()}, TypeError, "q has dtype int32"),
        ({"q_sf": torch.ones(2, 3, 4, 1)}, TypeError, "q_sf is given, but q is torch.float32"),
        ({"ke": torch.ones(2, 4).int()}, ValueError, "S of ke is 4, but S of q is 3"),
        ({"ks": torch.ones(2, 3)}, TypeError, "ks has dtype float32"),
        ({"mask": torch.ones(2, 3, 8)}, ValueError, "T of mask is 8, but T of kv is 9"),
        ({"mask": torch.ones(2, 3, 9).int()}, TypeError, "mask has dtype int32"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k is -1"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype is torch.int32"),
    ],
)
def test_refusals_name_the_argument(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        ops.mqa_logits(**{"q": Q, "kv": KV, "weights": W, **changes})


def test_scales_must_divide_the_head_dim() -> None:
    fp8 = KV.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="kv_sf has 3 groups; that must divide D of kv, which is 8"):
        ops.mqa_logits(Q, fp8, W, kv_sf=torch.ones(2, 9, 3))


@pytest.mark.parametrize("which", ["q_sf", "kv_sf"])
@pytest.mark.parametrize("call", [ops.mqa_logits, lambda *a, **kw: ops.mqa_topk(*a, topk=3, **kw)])
def test_negative_scales_are_refused(call: Any, which: str) -> None:
    """relu(s * p) is s * relu(p) for s >= 0 alone, and kernels apply scales after the ReLU. A scale of 0 is fine."""
    fp8 = torch.float8_e4m3fn
    q, kv, weights = torch.randn(2, 3, 4, 16).to(fp8), torch.randn(2, 9, 16).to(fp8), torch.randn(2, 3, 4)
    scales = {"q_sf": torch.rand(2, 3, 4, 1), "kv_sf": torch.rand(2, 9, 1)}
    scales[which][1, 2] = 0.0
    call(q, kv, weights, scale=0.3, **scales)
    scales[which][1, 2] = -0.25
    with pytest.raises(ValueError, match=f"{which} holds -0.25; scales must not be negative"):
        call(q, kv, weights, scale=0.3, **scales)


def test_why_negative_scales_are_refused() -> None:
    """What kernels do with the scale of a key is what the definition says for a positive one, not for others."""
    q, kv, weights = torch.randn(1, 3, 4, 16), torch.randn(1, 9, 16), torch.randn(1, 3, 4)
    for sign in (0.7, -0.7):
        inside = ops.reference("mqa_logits")(
            q, None, kv * sign, None, weights, None, None, None, scale=0.3, max_seqlen_k=0, clean=True, out_dtype=None
        )
        outside = sign * ops.mqa_logits(q, kv, weights, scale=0.3)
        assert torch.allclose(inside, outside, rtol=1e-5, atol=1e-6) == (sign > 0)


@pytest.mark.parametrize("name", ["mqa_logits", "mqa_topk"])
def test_negative_scales_in_debug_mode(name: str) -> None:
    """The check for devices on which looking at values waits for the device."""
    debug = ops.op(name).debug
    assert debug is not None
    debug(None, torch.ones(1, 2, 2, 1), None, None, None)
    with pytest.raises(ValueError, match=f"{name}: kv_sf holds -2"):
        debug(None, None, None, torch.tensor([[[1.0], [-2.0]]]), None)
