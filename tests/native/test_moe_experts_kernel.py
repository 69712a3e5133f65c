"""The C++ expert kernel against float64, on every instruction set of this CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from ascend_deep.native.cpu.provider import CPU

from .experts_cases import Call, assert_right, make, truth

TOKENS = (0, 1, 2, 3, 7, 16, 63, 64, 65, 130)
ATTRIBUTES = (
    {"act": "silu"},
    {"act": "silu", "limit": 0.7, "interleaved": True},
    {"act": "swiglu_oai", "alpha": 1.702, "limit": 0.9, "interleaved": True, "bias": True},
    {"act": "silu_clamp", "limit": 0.4, "bias": True},
    {"act": "gelu", "weight_on_input": True},
    {"act": "gelu_tanh", "interleaved": True, "weight_on_input": True, "bias": True},
    {"act": "relu2", "gated": False},
    {"act": "sigmoid", "gated": False, "bias": True, "limit": 0.5},
    {"act": "relu", "gated": False, "weight_on_input": True},
)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("layout", ["enk", "ekn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attributes(each_isa: str, dtype: torch.dtype, layout: str, tokens: int) -> None:
    g = torch.Generator().manual_seed(tokens)
    for attributes in ATTRIBUTES:
        out = torch.float32 if attributes.get("bias") else None
        assert_right(make(g, tokens=tokens, dtype=dtype, layout=layout, out_dtype=out, **attributes))


@pytest.mark.parametrize("hidden,inter", [(64, 176), (176, 64), (7, 1), (1, 5), (130, 33), (32, 544)])
def test_sizes(each_isa: str, hidden: int, inter: int) -> None:
    g = torch.Generator().manual_seed(hidden)
    for dtype, layout, interleaved in itertools.product((torch.float32, torch.bfloat16), ("enk", "ekn"), (False, True)):
        for tokens in (3, 41):
            assert_right(
                make(
                    g, tokens=tokens, hidden=hidden, inter=inter, experts=3, dtype=dtype, layout=layout,
                    interleaved=interleaved, bias=True, out_dtype=torch.float32,
                )
            )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["enk", "ekn"])
def test_more_rows_than_are_packed_at_a_time(each_isa: str, layout: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(5)
    call = make(g, tokens=613, hidden=48, inter=24, experts=3, topk=1, layout=layout, dtype=dtype)
    call.idx.fill_(1)
    assert_right(call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", range(1, 70))
def test_every_number_of_rows_of_an_expert(each_isa: str, rows: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(rows)
    call = make(g, tokens=rows + 2, hidden=60, inter=72, experts=2, topk=1, dtype=dtype)
    call.idx.fill_(0)
    call.idx[-2:] = 1
    assert_right(call)


@pytest.mark.parametrize("rows", [9, 33])
def test_bfloat16_weights_and_tokens_at_any_address(each_isa: str, rows: int) -> None:
    """Pairs that lie across the words of memory, and rows of an odd distance."""
    g = torch.Generator().manual_seed(rows)
    call = make(g, tokens=rows, hidden=50, inter=70, experts=2, topk=2, dtype=torch.bfloat16)
    for name in ("x", "w13", "w2"):
        tensor = getattr(call, name)
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan, dtype=torch.bfloat16)
        wide[..., 1:-2] = tensor
        setattr(call, name, wide[..., 1:-2])
    assert call.w13.stride(1) == 53 and call.w13.storage_offset() == 1
    assert_right(call)


@pytest.mark.parametrize("rows", [5, 6, 11, 14, 20, 24, 28], ids="rows{}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vector_and_a_half_of_rows(each_isa: str, dtype: torch.dtype, rows: int) -> None:
    """Panels of pairs, with every epilogue; sizes that are odd have none and take another way."""
    g = torch.Generator().manual_seed(rows)
    for (hidden, inter), attributes in itertools.product([(50, 70), (49, 70), (50, 71)], ATTRIBUTES):
        if inter % 2 and attributes.get("bias"):
            continue
        call = make(g, tokens=rows, hidden=hidden, inter=inter, experts=2, topk=1, dtype=dtype, **attributes)
        call.idx.fill_(1)
        assert_right(call)


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("layout", ["enk", "ekn"])
def test_ids_outside_the_range_read_nothing(each_isa: str, layout: str, index_dtype: torch.dtype) -> None:
    call = make(torch.Generator().manual_seed(11), tokens=37, experts=6, topk=3, layout=layout, bias=True)
    big = torch.iinfo(index_dtype)
    ids = torch.tensor([-1, 12, 13, 15, 3, big.max, big.min, 10, 18])
    call.idx = ids[torch.randint(len(ids), (37, 3), generator=torch.Generator().manual_seed(3))].to(index_dtype)
    call.idx[5], call.idx[20] = -1, big.min
    call.expert_offset = 12
    want = truth(call)
    # Experts 12, 13 and 15 are in use; what lies in the others, in the dropped tokens and in their weights is garbage.
    for w in (call.w13, call.w2, call.b13, call.b2):
        assert w is not None
        w[[2, 4, 5]] = torch.nan
    dropped = ((call.idx < 12) | (call.idx > 15)).all(1)
    assert dropped.sum() >= 2
    call.x[dropped] = torch.nan
    call.weights[(call.idx < 12) | (call.idx > 15)] = torch.nan
    got = call.run()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4e-6 * float(want.abs().max()))
    assert (got[dropped] == 0).all()


@pytest.mark.parametrize("tokens", [1, 3, 17, 64, 130])
@pytest.mark.parametrize("layout", ["enk", "ekn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_up_in_two_tensors(each_isa: str, dtype: torch.dtype, layout: str, tokens: int) -> None:
    """Same bits as with one tensor: the kernel reads the two where they lie."""
    for attributes in ({"act": "silu", "inter": 77}, {"act": "gelu_tanh", "limit": 0.7, "bias": True, "inter": 33}):
        call = make(torch.Generator().manual_seed(tokens), tokens=tokens, dtype=dtype, layout=layout, **attributes)
        gate, up = call.w13.chunk(2, 1 if layout == "enk" else 2)
        roomy = torch.stack((up, torch.full_like(up, torch.nan)), 1)[:, 0]  # another stride between experts
        apart = call.but(w13=gate.contiguous(), w3=roomy)
        assert_right(apart)
        assert torch.equal(apart.run(), call.run())


def test_halves_of_other_strides_are_refused(each_isa: str) -> None:
    call = make(torch.Generator().manual_seed(1), tokens=3)
    gate, up = (half.contiguous() for half in call.w13.chunk(2, 1))
    turned = up.transpose(1, 2).contiguous().transpose(1, 2)
    args = (call.x, call.idx, call.weights, gate, None, call.w2, None, turned)
    reason = CPU.limits["moe_experts"](*args, act="silu", out_dtype=None)
    assert reason is not None and "w3 has strides" in reason and "to be the same" in reason
    for change, words in (
        ({"w3": turned}, "w3 has strides"),
        ({"w3": up[:, 1:]}, "w3 is \\[5, 16, 33\\], it has to be \\[5, 17, 33\\]"),
        ({"w3": up.bfloat16()}, "w3 has dtype bfloat16 and w13 float32"),
        ({"w3": up, "interleaved": True}, "interleaved is True, but gate and up are two tensors"),
        ({"w3": call.w13, "w13": call.w13}, "w13 is the gate alone"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call.but(**{"w13": gate, **change}).run()


def test_no_id_is_local(each_isa: str) -> None:
    call = make(torch.Generator().manual_seed(2), tokens=9, dtype=torch.bfloat16)
    call.expert_offset = 1000
    assert torch.equal(call.run(), torch.zeros(9, 33, dtype=torch.bfloat16))


def test_no_slots(each_isa: str) -> None:
    call = make(torch.Generator().manual_seed(2), tokens=9, topk=0)
    assert torch.equal(call.run(), torch.zeros(9, 33))


def test_a_repeated_id_counts_as_often_as_it_appears(each_isa: str) -> None:
    call = make(torch.Generator().manual_seed(8), tokens=21, topk=4)
    call.idx[:] = call.idx[:, :1]
    assert_right(call)


def strided(call: Call, how: str) -> Call:
    """The same values behind other strides."""

    def apply(t: torch.Tensor) -> torch.Tensor:
        if how == "transposed":  # stride 1 in the middle dimension
            return t.transpose(-1, -2).contiguous().transpose(-1, -2)
        pad = torch.full([s + 3 for s in t.shape], torch.nan, dtype=t.dtype)
        view = pad[tuple(slice(2, 2 + s) for s in t.shape)]
        view.copy_(t)
        return view

    assert call.b13 is not None and call.b2 is not None
    int_pad = torch.full((call.idx.shape[0], 2 * call.idx.shape[1]), 999)
    int_pad[:, ::2] = call.idx
    return call.but(
        x=apply(call.x),
        w13=apply(call.w13),
        w2=apply(call.w2),
        b13=apply(call.b13),
        b2=apply(call.b2),
        idx=int_pad[:, ::2],
        weights=call.weights.t().contiguous().t(),
    )


@pytest.mark.parametrize("how", ["transposed", "sliced"])
@pytest.mark.parametrize("layout", ["enk", "ekn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides(each_isa: str, dtype: torch.dtype, layout: str, how: str) -> None:
    for tokens in (2, 50):
        call = make(torch.Generator().manual_seed(tokens), tokens=tokens, dtype=dtype, layout=layout, bias=True)
        other = strided(call, how)
        assert other.w13.stride() != call.w13.stride()
        assert_right(other.but(out_dtype=torch.float32))


def test_weights_are_not_copied(each_isa: str) -> None:
    """A stride in both inner dimensions is refused with a sentence instead of being copied."""
    call = make(torch.Generator().manual_seed(1), tokens=2)
    wide = torch.zeros(*call.w13.shape[:2], 2 * call.w13.shape[2])
    wide[..., ::2] = call.w13
    args = (call.x, call.idx, call.weights, wide[..., ::2], None, call.w2, None)
    reason = CPU.limits["moe_experts"](*args, act="silu", out_dtype=None)
    assert reason is not None and "w13 has strides" in reason
    with pytest.raises(RuntimeError, match="w13 has strides"):
        call.but(w13=wide[..., ::2]).run()


@pytest.mark.parametrize("tokens", [1, 5, 64, 200])
@pytest.mark.parametrize("layout", ["enk", "ekn"])
def test_the_number_of_threads_does_not_change_a_bit(each_isa: str, threads: None, layout: str, tokens: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        g = torch.Generator().manual_seed(tokens)
        call = make(g, tokens=tokens, hidden=200, inter=150, experts=7, dtype=dtype, layout=layout, bias=True)
        results = []
        for n in (1, 2, 3, 8):
            torch.set_num_threads(n)
            results.append(call.run())
        assert all(torch.equal(results[0], r) for r in results[1:])


def test_large_values_saturate_as_in_eager(each_isa: str) -> None:
    call = make(torch.Generator().manual_seed(4), tokens=40, gated=True)
    call.x *= 300
    want = truth(call)
    got = call.run()
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=4e-6 * float(want.abs().max()))


@pytest.mark.parametrize(
    "change,sentence",
    [
        ({"idx": torch.zeros(4, 3, dtype=torch.int64)}, "idx is \\[4, 3\\] and weights is \\[4, 2\\]"),
        ({"idx": torch.zeros(4, 2)}, "idx has dtype float32"),
        ({"x": torch.zeros(4, 34)}, "x has 34 columns"),
        ({"x": torch.zeros(4, 33, dtype=torch.float64)}, "x has dtype float64"),
        ({"w2": torch.zeros(4, 33, 17)}, "w13 has 5 experts and w2 has 4"),
        ({"w2": torch.zeros(5, 33, 16)}, "w13 gives 34 values per token, w2 takes 16"),
        ({"w2": torch.zeros(5, 33, 17, dtype=torch.bfloat16)}, "they have to be the same"),
        ({"b13": torch.zeros(5, 33)}, "b13 has shape \\[5, 33\\]"),
        ({"b2": torch.zeros(33)}, "b2 has shape \\[33\\]"),
        ({"act": "swish"}, "act is 'swish'"),
        ({"weight_layout": "nek"}, "weight_layout is 'nek'"),
        ({"out_dtype": torch.float64}, "out_dtype is float64"),
        ({"x": torch.zeros(33)}, "x has shape \\[33\\]"),
    ],
)
def test_bad_arguments_get_one_sentence(change: dict[str, object], sentence: str) -> None:
    call = make(torch.Generator().manual_seed(1), tokens=4)
    with pytest.raises(RuntimeError, match=sentence):
        call.but(**change).run()
