"""``moe_experts``: failures that people met with fused experts, each a rule here. Reference and kernel both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native.cpu.provider import CPU
from ascend_deep.ops import moe_experts

Experts = Callable[..., Tensor]


def _by_reference(x: Tensor, idx: Tensor, weights: Tensor, w13: Tensor, b13: Any, w2: Tensor, b2: Any, **changes: Any):
    attributes: dict[str, Any] = {
        "act": "silu",
        "alpha": 1.0,
        "limit": None,
        "interleaved": False,
        "weight_layout": "enk",
        "weight_on_input": False,
        "expert_offset": 0,
        "out_dtype": None,
        **changes,
    }
    return ops.reference("moe_experts")(x, idx, weights, w13, b13, w2, b2, None, **attributes)


@pytest.fixture(params=["reference", "op"])
def experts(request: pytest.FixtureRequest) -> Experts:
    return _by_reference if request.param == "reference" else moe_experts


def layer(e: int = 6, h: int = 16, i: int = 12, gated: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    n = 2 * i if gated else i
    w13, b13 = torch.randn(e, n, h) * h**-0.5, torch.randn(e, n)
    w2, b2 = torch.randn(e, h, i) * i**-0.5, torch.randn(e, h)
    return tuple(t.to(dtype) for t in (w13, b13, w2, b2))


def dense(x: Tensor, idx: Tensor, weights: Tensor, w13: Tensor, b13: Any, w2: Tensor, b2: Any, act: Any) -> Tensor:
    """Every expert for every token, in f64."""
    x, weights, w13, w2 = x.double(), weights.double(), w13.double(), w2.double()
    h = torch.einsum("th,enh->ten", x, w13) + (0 if b13 is None else b13.double())
    y = torch.einsum("tei,ehi->teh", act(h), w2) + (0 if b2 is None else b2.double())
    mask = torch.nn.functional.one_hot(idx, w13.shape[0]).double() * weights.unsqueeze(-1)
    return torch.einsum("tke,teh->th", mask, y)


def silu_halves(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = ops.op("moe_experts").tolerance[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance.rtol, atol=tolerance.atol)


@pytest.mark.parametrize("tokens", [*range(0, 131, 7), 1, 2, 64, 65, 127, 128, 129])
def test_any_number_of_tokens(experts: Experts, tokens: int) -> None:
    w13, b13, w2, b2 = layer(e=8)
    x, weights = torch.randn(tokens, 16), torch.rand(tokens, 8)
    idx = torch.rand(tokens, 8).argsort(-1)
    close(experts(x, idx, weights, w13, b13, w2, b2), dense(x, idx, weights, w13, b13, w2, b2, silu_halves))


def test_each_weight_goes_with_its_own_expert(experts: Experts) -> None:
    """Experts that return constants: expert e returns e + 1 everywhere."""
    e, tokens = 7, 9
    w13, w2 = torch.randn(e, 10, 4), torch.zeros(e, 4, 5)
    b2 = torch.arange(1.0, e + 1)[:, None].expand(e, 4).contiguous()
    idx, weights = torch.rand(tokens, e).argsort(-1)[:, :3], torch.rand(tokens, 3)
    out = experts(torch.randn(tokens, 4), idx, weights, w13, None, w2, b2)
    torch.testing.assert_close(out, (weights * (idx + 1)).sum(1, keepdim=True).expand(-1, 4))


def test_ids_of_other_ranks_and_skipped_slots_contribute_exactly_zero(experts: Experts) -> None:
    """Their weights and the rows of tokens that no expert takes hold NaN: 0 x NaN would show."""
    w13, b13, w2, b2 = layer()
    tokens, offset = 12, 6
    x, weights = torch.randn(tokens, 16), torch.rand(tokens, 3)
    idx = torch.randint(offset, offset + 6, (tokens, 3))
    idx[:, 1] = torch.tensor([-1, 0, offset - 1, offset + 6, 10**9, -(10**9)]).repeat(2)
    idx[5] = torch.tensor([-1, offset + 6, 2])
    clean = dense(x, idx.sub(offset).where(idx >= 0, 0).clamp(0, 5), weights, w13, b13, w2, b2, silu_halves)
    inside = (idx >= offset) & (idx < offset + 6)
    wanted = dense(x, (idx - offset).clamp(0, 5), torch.where(inside, weights, 0.0), w13, b13, w2, b2, silu_halves)
    assert (clean - wanted).abs().max() > 0.1
    x = x.clone()
    x[5] = float("nan")
    wanted[5] = 0.0
    for dtype in (torch.int64, torch.int32):
        poisoned = torch.where(inside, weights, float("nan"))
        out = experts(x, idx.to(dtype), poisoned, w13, b13, w2, b2, expert_offset=offset)
        close(out, wanted)
        assert (out[5] == 0).all()


def test_nan_of_one_token_or_expert_stays_there(experts: Experts) -> None:
    w13, b13, w2, b2 = layer()
    x, weights = torch.randn(8, 16), torch.rand(8, 2)
    idx = torch.rand(8, 5).argsort(-1)[:, :2]
    wanted = experts(x, idx, weights, w13, b13, w2, b2)
    w13[5] = float("nan")
    x[3] = float("nan")
    found = experts(x, idx, weights, w13, b13, w2, b2)
    rows = torch.arange(8) != 3
    torch.testing.assert_close(found[rows], wanted[rows])
    assert found[3].isnan().all()


def test_padded_tokens_masked_by_minus_one_are_zero_and_wake_no_expert(experts: Experts) -> None:
    w13, b13, w2, b2 = layer()
    x, weights, idx = torch.randn(8, 16), torch.rand(8, 2), torch.rand(8, 4).argsort(-1)[:, :2]
    real = experts(x[:5], idx[:5], weights[:5], w13, b13, w2, b2)
    padded_idx = torch.where(torch.arange(8)[:, None] < 5, idx, -1)
    x[5:] = float("inf")
    out = experts(x, padded_idx, weights, w13, b13, w2, b2)
    torch.testing.assert_close(out[:5], real)
    assert (out[5:] == 0).all()


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda g: torch.relu(g).square(),
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("act", list(ACTS))
def test_each_activation_is_the_one_named(experts: Experts, act: str) -> None:
    x, weights, idx = torch.randn(9, 16), torch.rand(9, 2), torch.randint(0, 6, (9, 2))
    w13, b13, w2, b2 = layer()
    wanted = dense(x, idx, weights, w13, b13, w2, b2, lambda h: ACTS[act](h[..., :12]) * h[..., 12:])
    close(experts(x, idx, weights, w13, b13, w2, b2, act=act), wanted)
    w13, b13, w2, b2 = layer(gated=False)
    close(experts(x, idx, weights, w13, b13, w2, b2, act=act), dense(x, idx, weights, w13, b13, w2, b2, ACTS[act]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("limit", [None, 0.9])
def test_gpt_oss_activation(experts: Experts, interleaved: bool, limit: float | None) -> None:
    def act(h: Tensor) -> Tensor:
        gate, up = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)

    x, weights, idx = torch.randn(9, 16), torch.rand(9, 2), torch.randint(0, 6, (9, 2))
    w13, b13, w2, b2 = layer()
    wanted = dense(x, idx, weights, w13, b13, w2, b2, act)
    attributes = {"act": "swiglu_oai", "alpha": 1.702, "limit": limit, "interleaved": interleaved}
    close(experts(x, idx, weights, w13, b13, w2, b2, **attributes), wanted)
    stored = (w13.transpose(1, 2).contiguous(), b13, w2.transpose(1, 2).contiguous(), b2)
    close(experts(x, idx, weights, *stored, **attributes, weight_layout="ekn"), wanted)


def test_weight_on_input_is_not_weight_on_output(experts: Experts) -> None:
    x, idx = torch.randn(9, 16), torch.randint(0, 6, (9, 1))
    weights = torch.rand(9, 1) * 0.1 + 0.05
    w13, _, w2, _ = layer()
    on_input = experts(x, idx, weights, w13, None, w2, None, weight_on_input=True)
    close(on_input, dense(x * weights, idx, torch.ones(9, 1), w13, None, w2, None, silu_halves))
    on_output = experts(x, idx, weights, w13, None, w2, None)
    close(on_output, dense(x, idx, weights, w13, None, w2, None, silu_halves))
    assert (on_input - on_output).abs().max() > 1e-2


def test_shared_expert_as_an_extra_slot_keeps_weight_one(experts: Experts) -> None:
    """Routed weights carry the scale 2.5; the shared expert's slot does not."""
    w13, _, w2, _ = layer(e=5)
    x, logits = torch.randn(7, 16), torch.randn(7, 4)
    weights, idx = ops.moe_route(logits, topk=2, scoring="sigmoid", renorm="sum", eps=1e-20, scale=2.5)
    folded_weights, folded_idx = torch.cat((weights, torch.ones(7, 1)), 1), torch.cat((idx, torch.full((7, 1), 4)), 1)
    folded = experts(x, folded_idx, folded_weights, w13, None, w2, None)
    shared = silu_halves(x @ w13[4].t()) @ w2[4].t()
    torch.testing.assert_close(folded, experts(x, idx, weights, w13, None, w2, None) + shared, rtol=1e-4, atol=1e-5)
    alone = experts(x, folded_idx, torch.cat((weights * 0, torch.ones(7, 1)), 1), w13, None, w2, None)
    torch.testing.assert_close(alone, shared, rtol=1e-4, atol=1e-5)


def test_counts_and_starts_for_every_kind_of_first_expert(experts: Experts) -> None:
    w13, b13, w2, b2 = layer()
    x, weights = torch.randn(10, 16), torch.rand(10, 2)
    for low, high in ((0, 1), (0, 6), (2, 6), (5, 6), (3, 5)):
        idx = torch.randint(low, high, (10, 2))
        close(experts(x, idx, weights, w13, b13, w2, b2), dense(x, idx, weights, w13, b13, w2, b2, silu_halves))
    assert (experts(x, torch.full((10, 2), -1), weights, w13, b13, w2, b2) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_dtype(experts: Experts, dtype: torch.dtype) -> None:
    w13, b13, w2, b2 = layer(dtype=dtype)
    x, weights, idx = torch.randn(9, 16).to(dtype), torch.rand(9, 2), torch.randint(0, 6, (9, 2))
    wanted = dense(x, idx, weights, w13, b13, w2, b2, silu_halves)
    for out_dtype in (None, torch.float32, torch.bfloat16):
        out = experts(x, idx, weights, w13, b13, w2, b2, out_dtype=out_dtype)
        assert out.dtype == (out_dtype or dtype)
        close(out.to(torch.bfloat16), wanted)


def test_debug_mode_names_the_bad_id(monkeypatch: pytest.MonkeyPatch) -> None:
    w13, b13, w2, b2 = layer()
    x, weights, idx = torch.randn(4, 16), torch.rand(4, 2), torch.randint(0, 6, (4, 2))
    idx[0, 0] = -1
    monkeypatch.setenv("ASCEND_DEEP_DEBUG", "1")
    moe_experts(x, idx, weights, w13, b13, w2, b2)
    for bad in (6, -2, 10**9):
        idx[2, 1] = bad
        with pytest.raises(RuntimeError, match=rf"idx\[2, 1\], of token 2, is {bad}; ids must be in \[0, 6\), or -1"):
            moe_experts(x, idx, weights, w13, b13, w2, b2)
        with pytest.raises(RuntimeError, match=r"moe_permute: idx\[2, 1\], of token 2"):
            ops.moe_permute(x, idx, num_experts=6)
    moe_experts(x, idx, weights, w13, b13, w2, b2, expert_offset=1)
    monkeypatch.delenv("ASCEND_DEEP_DEBUG")
    assert moe_experts(x, idx, weights, w13, b13, w2, b2).isfinite().all()


def test_wild_ids_do_not_crash_the_process() -> None:
    code = (
        "import torch; from ascend_deep.ops import moe_experts\n"
        "torch.manual_seed(1); i = torch.empty(500, 4, dtype=torch.int64).random_(-2**62, 2**62)\n"
        "w13, w2 = torch.randn(3, 8, 8), torch.randn(3, 8, 4)\n"
        "y = moe_experts(torch.randn(500, 8), i, torch.rand(500, 4), w13, None, w2)\n"
        "assert (y == 0).all(); print('alive')"
    )
    env = {**os.environ, "ASCEND_DEEP_DEBUG": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout.strip() == "alive", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"act": "mish"}, ValueError, "act is 'mish'; it must be one of 'silu', 'gelu', 'gelu_tanh', 'relu', 'relu2'"),
        ({"weight_layout": "nke"}, ValueError, "weight_layout is 'nke'; it must be one of 'enk', 'ekn'"),
        ({"alpha": 1.7}, ValueError, "alpha is 1.7, but act 'silu' does not use it"),
        ({"limit": -1.0}, ValueError, "limit is -1.0; it must be positive"),
        (
            {"x": torch.randn(4, 16).int()},
            TypeError,
            "x has dtype int32; accepted: float32, bfloat16, float16, float64",
        ),
        ({"x": torch.randn(4, 16).bfloat16()}, TypeError, "w13 has dtype float32; accepted: bfloat16"),
        ({"x": torch.randn(4, 15)}, ValueError, "H of w13 in this layout is 16, but H of x is 15"),
        ({"x": torch.randn(4, 2, 8)}, ValueError, r"x has 3 dimensions; it must be \[T, H\]"),
        ({"idx": torch.rand(4, 2)}, TypeError, "idx has dtype float32; accepted: int64, int32"),
        ({"idx": torch.zeros(5, 2).long()}, ValueError, "rows of idx is 5, but the number of tokens of x is 4"),
        ({"weights": torch.rand(4, 3)}, ValueError, "columns of weights is 3, but that of idx is 2"),
        ({"weights": torch.randint(0, 2, (4, 2))}, TypeError, "weights has dtype int64; accepted: float32"),
        ({"w2": torch.randn(5, 16, 12)}, ValueError, "the number of experts of w2 is 5, but that of w13 is 6"),
        ({"w2": torch.randn(6, 16, 11)}, ValueError, "w13 has N = 24 and w2 has I = 11; N must be 2 I"),
        ({"w2": torch.randn(6, 17, 12)}, ValueError, "H of w2 in this layout is 17, but H of x is 16"),
        ({"weight_layout": "ekn"}, ValueError, "H of w13 in this layout is 24, but H of x is 16"),
        ({"b13": torch.randn(6, 23)}, ValueError, "columns of b13 is 23, but the width of its product is 24"),
        ({"b2": torch.randn(5, 16)}, ValueError, "the number of experts of b2 is 5, but that of w13 is 6"),
        ({"w13": torch.randn(6, 24, 16, device="meta")}, TypeError, "x is on cpu, but w13 is on meta"),
        ({"b2": torch.randn(6, 16, device="meta")}, TypeError, "x is on cpu, but b2 is on meta"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype is torch.int32"),
        (
            {"w13": torch.randn(6, 12, 16), "interleaved": True},
            ValueError,
            "interleaved is True, but w13 has no up half",
        ),
        ({"w13": torch.randn(6, 12, 16), "act": "swiglu_oai"}, ValueError, "'swiglu_oai' needs a gate and an up half"),
        ({"w2": None}, TypeError, "w2 is missing"),
        ({"w3": torch.randn(6, 24, 16)}, ValueError, "the gate alone, is 24, but I of w2 is 12"),
        ({"w13": torch.randn(6, 12, 16), "w3": torch.randn(6, 11, 16)}, ValueError, "size 1 of w3 is 11, but that of"),
        ({"w13": torch.randn(6, 12, 16), "w3": torch.randn(6, 12, 16).double()}, TypeError, "w3 has dtype float64"),
        ({"w13": torch.randn(6, 12, 16), "w3": torch.randn(12, 16)}, ValueError, "w3 has 2 dimensions"),
        (
            {"w13": torch.randn(6, 12, 16), "w3": torch.randn(6, 12, 16), "interleaved": True},
            ValueError,
            "interleaved is True, but gate and up are two tensors",
        ),
        (
            {"w13": torch.randn(6, 12, 16), "w3": torch.randn(6, 12, 16), "b13": torch.randn(6, 12)},
            ValueError,
            "columns of b13 is 12, but the width of its product is 24",
        ),
    ],
)
def test_wrong_arguments_get_one_sentence(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    w13, b13, w2, b2 = layer()
    arguments: dict[str, Any] = {
        "x": torch.randn(4, 16),
        "idx": torch.randint(0, 6, (4, 2)),
        "weights": torch.rand(4, 2),
        "w13": w13,
        "b13": None if {"w13", "w3"} & set(changes) else b13,
        "w2": w2,
        "b2": b2,
        **changes,
    }
    moe_experts(torch.randn(4, 16), torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2), *layer())
    with pytest.raises(error, match=text) as caught:
        moe_experts(**arguments)
    assert str(caught.value).startswith("moe_experts: ") and "\n" not in str(caught.value)
    # The kernel can be called before the checks of the op, see ops/_eager.py.
    if CPU.unavailable() is None and not any(isinstance(a, Tensor) and a.is_meta for a in arguments.values()):
        full = {"act": "silu", "alpha": 1.0, "limit": None, "interleaved": False, "weight_layout": "enk"}
        rest = {"weight_on_input": False, "expert_offset": 0, "out_dtype": None}
        with pytest.raises((RuntimeError, TypeError)):
            CPU.direct["moe_experts"]()(**{**full, **rest, **arguments})
