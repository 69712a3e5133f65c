"""What the GEMM ops refuse: one sentence each, and what they look at in debug mode only."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from test_gemm_bf16 import LOW, clones
from test_gemm_grouped import PLAIN, SCALED

from ascend_deep import ops

A2, B2, C2 = torch.randn(4, 6).to(LOW), torch.randn(5, 6).to(LOW), torch.randn(4, 5)
HEADS_A, HEADS_B = torch.randn(4, 2, 6).to(LOW), torch.randn(2, 5, 6).to(LOW)
PROJECT = "bhr,hdr->bhd"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ops.gemm_bf16(A2.float(), B2), TypeError, "gemm_bf16: a has dtype float32; accepted: bfloat16."),
        (lambda: ops.gemm_bf16(A2, B2.half()), TypeError, "gemm_bf16: b has dtype float16; accepted: bfloat16."),
        (lambda: ops.gemm_bf16(A2[0], B2), ValueError, r"gemm_bf16: a has 1 dimensions; it must be \[M, K\]."),
        (lambda: ops.gemm_bf16(A2, HEADS_B, layout="nn"), ValueError, r"b has 3 dimensions; it must be \[K, N\]."),
        (lambda: ops.gemm_bf16(A2, B2, layout="nn"), ValueError, "K of b in layout 'nn' is 5, but K of a is 6."),
        (lambda: ops.gemm_bf16(A2, B2, layout="NT"), ValueError, "layout is 'NT'; it must be one of 'nt', 'nn'"),
        (lambda: ops.gemm_bf16(A2, B2, C2.t()), ValueError, "size 0 of c is 5, but that of the result is 4."),
        (lambda: ops.gemm_bf16(A2, B2, C2, out_dtype=LOW), TypeError, "c has dtype float32; accepted: bfloat16."),
        (lambda: ops.gemm_bf16(A2, B2, C2[0]), ValueError, r"c has 1 dimensions; it must be \[M, N\]."),
        (lambda: ops.gemm_bf16(A2, B2, out_dtype=torch.float16), TypeError, "out_dtype is float16; accepted: bfloat16"),
        (lambda: ops.gemm_bf16(A2, B2.to("meta")), TypeError, "a is on cpu, but b is on meta"),
        (lambda: ops.gemm_bf16_out(C2.half(), A2, B2), TypeError, "gemm_bf16_out: d has dtype float16; accepted"),
        (lambda: ops.gemm_bf16_out(C2[:3], A2, B2), ValueError, "size 0 of d is 3, but that of the result is 4."),
        (lambda: ops.gemm_bf16_out(C2, A2, B2, C2.to(LOW)), TypeError, "c has dtype bfloat16; accepted: float32."),
        (
            lambda: ops.gemm_bf16_acc_(C2, A2, B2),
            ValueError,
            "gemm_bf16_acc_: K of b in layout 'tn' is 5, but K of a is 4",
        ),
        (
            lambda: ops.einsum_bf16("bhr,hdr->hbd", HEADS_A, HEADS_B),
            ValueError,
            "eq is 'bhr,hdr->hbd'; it must be one of 'bhr,",
        ),
        (
            lambda: ops.einsum_bf16(PROJECT, HEADS_A, A2),
            ValueError,
            r"einsum_bf16: b has 2 dimensions; it must be \[h, d, r\].",
        ),
        (lambda: ops.einsum_bf16(PROJECT, HEADS_A, HEADS_B[:, :, :5]), ValueError, "r of b is 5, but r of a is 6."),
        (
            lambda: ops.einsum_bf16(PROJECT, HEADS_A, HEADS_B, HEADS_A),
            ValueError,
            "size 2 of c is 6, but that of the result is 5.",
        ),
        (
            lambda: ops.einsum_bf16(PROJECT, HEADS_A, HEADS_B.float()),
            TypeError,
            "b has dtype float32; accepted: bfloat16.",
        ),
        (lambda: ops.hc_prenorm_gemm(A2, B2), TypeError, "hc_prenorm_gemm: b has dtype bfloat16; accepted: float32."),
        (lambda: ops.hc_prenorm_gemm(A2, C2), ValueError, "hc_prenorm_gemm: K of b is 5, but K of a is 6."),
        (
            lambda: ops.hc_prenorm_gemm(A2, B2.float(), num_splits=0),
            ValueError,
            "num_splits is 0; it must be at least 1.",
        ),
    ],
)
def test_wrong_arguments_of_dense_ops_get_one_sentence(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


A, B, ENDS, LABELS = torch.randn(8, 6).to(LOW), torch.randn(2, 5, 6).to(LOW), torch.tensor([3, 7]), torch.zeros(8).int()
Q, SF = torch.randn(8, 64).to(torch.float8_e4m3fn), torch.ones(8, 2)
QB, SFB = torch.randn(2, 5, 64).to(torch.float8_e4m3fn), torch.ones(2, 5, 2)
MX: dict[str, Any] = {"recipe_a": (1, 32), "recipe_b": (1, 32)}
M_GROUPED, MASKED, K_GROUPED = ops.m_grouped_gemm_bf16, ops.m_grouped_gemm_bf16_masked, ops.k_grouped_gemm_bf16
SCALED_M, SCALED_MASKED = ops.m_grouped_gemm_scaled, ops.m_grouped_gemm_scaled_masked
SCALED_K = ops.k_grouped_gemm_scaled


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: M_GROUPED(A, B, ENDS[:1]), ValueError, "the size of grouped_layout is 1, but the number of g"),
        (lambda: M_GROUPED(A, B, ENDS.float()), TypeError, "grouped_layout has dtype float32; accepted: int"),
        (lambda: M_GROUPED(A, B, ENDS, grouping="labels"), ValueError, "grouped_layout is 2, but the number of rows"),
        (lambda: M_GROUPED(A, B, ENDS, grouping="sizes"), ValueError, "grouping is 'sizes'; it must be one of"),
        (lambda: M_GROUPED(A, B, ENDS, layout="tn"), ValueError, "layout is 'tn'; it must be one of 'nt', 'nn'"),
        (lambda: M_GROUPED(A, B, ENDS, layout="nn"), ValueError, "K of b in layout 'nn' is 5, but K of a is 6"),
        (lambda: M_GROUPED(A, B, ENDS, alignment=0), ValueError, "alignment is 0; it must be at least 1"),
        (lambda: M_GROUPED(A, B, ENDS, expected_m=0), ValueError, "expected_m is 0; it is a number of rows"),
        (lambda: M_GROUPED(A, B[0], ENDS), ValueError, r"b has 2 dimensions; it must be \[G, N, K\]"),
        (lambda: M_GROUPED(A.float(), B, ENDS), TypeError, "m_grouped_gemm_bf16: a has dtype float32"),
        (lambda: M_GROUPED(A, B, ENDS, out_dtype=torch.float64), TypeError, "out_dtype is float64; accepted"),
        (lambda: M_GROUPED(A, B, ENDS.to("meta")), TypeError, "a is on cpu, but grouped_layout is on meta"),
        (lambda: MASKED(A, B, ENDS, 1), ValueError, r"a has 2 dimensions; it must be \[G, Mmax, K\]"),
        (lambda: MASKED(B, B, ENDS, 0), ValueError, "expected_m is 0"),
        (lambda: MASKED(B, B[:1], ENDS, 1), ValueError, "the number of groups of b is 1, but that of a"),
        (lambda: K_GROUPED(A, A[:7], ENDS), ValueError, "the number of rows of b is 7, but that of a is 8"),
        (lambda: K_GROUPED(A, A, ENDS, ks=[3]), ValueError, "the length of ks is 1, but the number of groups is 2"),
        (lambda: K_GROUPED(A, A, ENDS, B), ValueError, "size 1 of c is 5, but that of the result is 6"),
        (
            lambda: K_GROUPED(A, A, LABELS, grouping="labels"),
            ValueError,
            "grouping is 'labels'; it must be one of 'psum', 'si",
        ),
        (
            lambda: ops.k_grouped_gemm_bf16_acc_(B, A, A, ENDS),
            ValueError,
            "size 1 of d is 5, but that of the result is 6",
        ),
        (lambda: SCALED_M(A, SF, QB, SFB, ENDS, **MX), TypeError, "m_grouped_gemm_scaled: a has dtype bfloat16"),
        (lambda: SCALED_M(Q, SF, QB, SFB[:, :, :1], ENDS, **MX), ValueError, "size 2 of sfb is 1"),
        (lambda: SCALED_M(Q, SF[:7], QB, SFB, ENDS, **MX), ValueError, "size 0 of sfa is 7"),
        (lambda: SCALED_M(Q, SF, QB[:, :, :60], SFB, ENDS, **MX), ValueError, "K of b in layout 'nt' is 60"),
        (
            lambda: SCALED_MASKED(QB, SFB[:1], QB, SFB, ENDS, 1, **MX),
            ValueError,
            "m_grouped_gemm_scaled_masked: size 0 of sfa is 1",
        ),
        (lambda: SCALED_K(Q, SF, Q, SF, ENDS, gran_k=8), ValueError, "size 0 of sfa is 8"),
        (lambda: SCALED_K(Q, SF, Q, SF, ENDS, gran_k=0), ValueError, "gran_k is 0; it is a number of rows"),
    ],
)
def test_wrong_arguments_of_grouped_ops_get_one_sentence(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: M_GROUPED(A, B, torch.tensor([5, 4]), alignment=4),
            r"m_grouped_gemm_bf16: grouped_layout\[1\] is 4; the end of a group must be in \[5, 8\]",
        ),
        (lambda: M_GROUPED(A, B, torch.tensor([5, 9]), alignment=4), r"grouped_layout\[1\] is 9"),
        (
            lambda: M_GROUPED(A, B, torch.full((8,), 2).int(), grouping="labels"),
            r"grouped_layout\[0\] is 2; a label must be in \[0, 2\), or -1 for padding",
        ),
        (
            lambda: M_GROUPED(A, B, torch.tensor([0, 0, 0, 1] * 2), grouping="labels", alignment=4),
            "rows 0 to 3 hold rows of groups 0 and 1; with alignment 4 a block",
        ),
        (lambda: MASKED(B, B, torch.tensor([2, 6]), 1), r"masked_m\[1\] is 6; it must be in \[0, 5\]"),
        (
            lambda: K_GROUPED(A, A, torch.tensor([4, 8]), grouping="sizes", alignment=4),
            r"ends\(grouped_layout\)\[1\] is 12",
        ),
        (
            lambda: K_GROUPED(A, A, torch.tensor([4, -1]), grouping="sizes", alignment=4),
            r"grouped_layout is \[4, -1\]; sizes must be multiples of the alignment, 4, and not negative",
        ),
        (
            lambda: K_GROUPED(A, A, ENDS, ks=[3, 4], alignment=4),
            r"ks is \[3, 4\], but by grouped_layout the groups have \[3, 3\] rows",
        ),
        (
            lambda: ops.k_grouped_gemm_bf16_acc_(torch.zeros(2, 6, 6), A, A, torch.tensor([5, 4]), alignment=4),
            r"k_grouped_gemm_bf16_acc_: grouped_layout\[1\] is 4",
        ),
        (
            lambda: SCALED_M(Q, SF, QB, SFB, torch.tensor([5, 4]), **MX),
            r"m_grouped_gemm_scaled: grouped_layout\[1\] is 4",
        ),
        (
            lambda: SCALED_MASKED(QB, SFB, QB, SFB, torch.tensor([-1, 4]), 1, **MX),
            r"m_grouped_gemm_scaled_masked: masked_m\[0\] is -1",
        ),
        (
            lambda: SCALED_K(Q, SF.new_ones(64, 1), Q, SF.new_ones(64, 1), torch.tensor([9, 9]), gran_k=32),
            r"k_grouped_gemm_scaled: grouped_layout\[0\] is 9",
        ),
    ],
)
def test_debug_mode_checks_what_depends_on_values(call: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call()
    monkeypatch.setenv("ASCEND_DEEP_DEBUG", "1")
    with pytest.raises(RuntimeError, match=text):
        call()


def test_debug_mode_accepts_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_DEEP_DEBUG", "1")
    for name in (*PLAIN, *SCALED, "k_grouped_gemm_bf16_acc_", "k_grouped_gemm_scaled_acc_"):
        for sample in ops.op(name).samples():
            ops.op(name).overload(*clones(sample), **sample.kwargs)


# -- tensors that are missing, and memory that is written --------------------------------------------------------------
def _overlapping() -> torch.Tensor:
    return torch.randn(16).as_strided((4, 5), (3, 1))


ROOM = torch.randn(4, 20).to(LOW)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ops.gemm_bf16(None, B2), TypeError, "gemm_bf16: a is None; it must be a tensor."),
        (lambda: ops.gemm_bf16(A2, None), TypeError, "gemm_bf16: b is None; it must be a tensor."),
        (lambda: ops.gemm_bf16([1.0], B2), TypeError, "gemm_bf16: a is a list; it must be a tensor."),
        (lambda: ops.gemm_bf16_out(None, A2, B2), TypeError, "gemm_bf16_out: d is None"),
        (lambda: ops.einsum_bf16(PROJECT, None, HEADS_B), TypeError, "einsum_bf16: a is None"),
        (lambda: ops.swiglu(None), TypeError, "swiglu: h is None"),
        (lambda: ops.moe_route(None, None, topk=2), TypeError, "moe_route: logits is None"),
        (
            lambda: ops.gemm_bf16_out(torch.randn(1, 5).expand(4, 5), A2, B2),
            ValueError,
            r"gemm_bf16_out: d has sizes \[4, 5\] and strides \[0, 1\], with which elements share a place in memory",
        ),
        (lambda: ops.gemm_bf16_out(_overlapping(), A2, B2), ValueError, r"strides \[3, 1\], with which elements share"),
        (lambda: ops.gemm_bf16_acc_(_overlapping(), A2, B2, layout="nt"), ValueError, "gemm_bf16_acc_: d has sizes"),
        (
            lambda: ops.gemm_bf16_out(ROOM[:, :5], ROOM[:, 4:10], B2),
            ValueError,
            "gemm_bf16_out: d lies in the memory of a, which is read while d is written",
        ),
        (
            lambda: ops.gemm_bf16_out(ROOM[:, :5], A2, B2, ROOM[:, 1:6]),
            ValueError,
            "must share no memory with c unless it is the same tensor",
        ),
        (lambda: ops.gemm_bf16_acc_(ROOM[:, :4], A2, ROOM[:, 2:8], layout="nt"), ValueError, "the memory of b"),
    ],
)
def test_missing_tensors_and_shared_memory(call: Any, error: type[Exception], text: str) -> None:
    ops.gemm_bf16(A2, B2)  # a call before, after which eager calls take a shorter way
    for context in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", LOW)):
        with context(), pytest.raises(error, match=text):
            call()


def test_places_of_one_buffer_that_do_not_meet_are_written() -> None:
    want = A2.float() @ B2.float().t()
    room = torch.zeros(8, 24)
    room[:, 12:18] = A2.float().repeat(2, 1)
    low = room.to(LOW)
    for d, a in ((low[:4, :5], low[:4, 12:18]), (low[4:, 7:12], low[:4, 12:18]), (low[:4, 18:23], low[4:, 12:18])):
        ops.gemm_bf16_out(d, a, B2)
        torch.testing.assert_close(d.float(), want, rtol=8e-3, atol=1e-2)
    ops.gemm_bf16_out(low[:4, :5], low[:4, 12:18], B2, low[:4, :5])  # c is d
    torch.testing.assert_close(low[:4, :5].float(), 2 * want, rtol=2e-2, atol=5e-2)
    for d in (torch.zeros(5, 4).t(), torch.zeros(8, 10)[::2, ::2], torch.zeros(2, 4, 5)[0]):
        ops.gemm_bf16_out(d, A2, B2)
        torch.testing.assert_close(d, want, rtol=1e-5, atol=1e-5)


def test_the_equation_comes_first_in_every_einsum() -> None:
    names = ("einsum_bf16", "einsum_scaled", "einsum_scaled_fp8out")
    assert {next(iter(inspect.signature(getattr(ops, n)).parameters)) for n in names} == {"eq"}
    a, sfa = ops.quant_fp8(HEADS_A.float().flatten(0, 1), gran=(1, 32))
    b, sfb = ops.quant_fp8(HEADS_B.float().flatten(0, 1), gran=(1, 32))
    scaled = {"recipe_a": (1, 32), "recipe_b": (1, 32)}
    operands = [t.unflatten(0, s.shape[:2]) for t, s in ((a, HEADS_A), (sfa, HEADS_A), (b, HEADS_B), (sfb, HEADS_B))]
    named = dict(zip(("a", "sfa", "b", "sfb"), operands, strict=True))
    assert torch.equal(
        ops.einsum_scaled(PROJECT, *operands, **scaled), ops.einsum_scaled(eq=PROJECT, **named, **scaled)
    )
    assert torch.equal(ops.einsum_bf16(PROJECT, HEADS_A, HEADS_B), ops.einsum_bf16(eq=PROJECT, a=HEADS_A, b=HEADS_B))
