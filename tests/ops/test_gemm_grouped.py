"""The grouped GEMM ops, on bfloat16 and on quantised operands, against float64, with gradients.

The samples hold NaN in all padding rows, so every comparison here also says that padding is not read.
"""

from __future__ import annotations

from typing import Any

import gemm_naive
import pytest
import torch
from test_gemm_bf16 import FULL, LOW, RUNNERS, check_gradients, clones, close, samples
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from ascend_deep import ops
from ascend_deep.ops._grouped_samples import labels_of, padded_rows, psum_of

PLAIN = ("m_grouped_gemm_bf16", "m_grouped_gemm_bf16_masked", "k_grouped_gemm_bf16")
SCALED = ("m_grouped_gemm_scaled", "m_grouped_gemm_scaled_masked", "k_grouped_gemm_scaled")


def naive(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a call has to give, in float64."""
    if "scaled" in name:
        a, sfa, b, sfb, index, *rest = args
        if name.startswith("k_"):
            gran = (1, kwargs["gran_k"])
            a, b = (gemm_naive.numbers(x, sf, gran, True).t() for x, sf in ((a, sfa), (b, sfb)))
        else:
            nn = kwargs.get("layout") == "nn"
            a = gemm_naive.numbers(a, sfa, kwargs["recipe_a"])
            b = gemm_naive.numbers(b, sfb, kwargs["recipe_b"], nn)
            kwargs = {**kwargs, "layout": "nt"}
    else:
        a, b, index, *rest = args
    if name.endswith("masked"):
        return gemm_naive.masked(a, b, index)
    if name.startswith("m_"):
        return gemm_naive.m_grouped(a, b, index, kwargs["layout"], kwargs["grouping"], kwargs["alignment"])
    return gemm_naive.k_grouped(a, b, index, rest[0], kwargs["grouping"], kwargs["alignment"])


@pytest.mark.parametrize(
    ("name", "sample", "runner"),
    [pytest.param(n, *p.values, id=f"{n}-{p.id}") for n in (*PLAIN, *SCALED) for p in samples(n)],
)
def test_results(name: str, sample: ops.Sample, runner: str) -> None:
    out = RUNNERS[runner](ops.op(name))(*sample.args, **sample.kwargs)
    c = sample.args[-1] if name.startswith("k_") else None
    assert out.dtype == (sample.kwargs.get("out_dtype") or (LOW if c is None else c.dtype))
    wanted = naive(name, sample.args, dict(sample.kwargs))
    close(out, wanted)
    assert (out[wanted == 0] == 0).all()


@pytest.mark.parametrize(
    ("name", "sample"), [pytest.param(n, s, id=f"{n}-{s.name}") for n in PLAIN for s in ops.op(n).samples()]
)
def test_gradients(name: str, sample: ops.Sample) -> None:
    check_gradients(name, sample, lambda *args: naive(name, args, dict(sample.kwargs)))


@pytest.mark.parametrize(
    ("name", "sample", "runner"),
    [
        pytest.param(n, *p.values, id=f"{n}-{p.id}")
        for n in ("k_grouped_gemm_bf16_acc_", "k_grouped_gemm_scaled_acc_")
        for p in samples(n)
    ],
)
def test_accumulating_forms(name: str, sample: ops.Sample, runner: str) -> None:
    d, *operands = clones(sample)
    wanted = naive(name.removesuffix("_acc_"), (*operands, d.clone()), dict(sample.kwargs))
    assert RUNNERS[runner](ops.op(name))(d, *operands, **sample.kwargs) is None
    close(d, wanted)


def routed(tokens: int, experts: int, alignment: int) -> tuple[Tensor, ...]:
    x, idx = torch.randn(tokens, 8).to(LOW), torch.stack([torch.randperm(experts - 1)[:2] for _ in range(tokens)])
    rows, _, _, psum, row_map = ops.moe_permute(x, idx, num_experts=experts, alignment=alignment)
    return x, idx, rows, psum, row_map


@pytest.mark.parametrize("alignment", [1, 128, 256])
def test_experts_of_permuted_tokens(alignment: int) -> None:
    """What ``moe_permute`` returns is what the grouped ops take; the last expert has no token."""
    x, idx, rows, psum, row_map = routed(9, 4, alignment)
    w = torch.randn(4, 6, 8).to(LOW).requires_grad_()
    y = ops.m_grouped_gemm_bf16(rows, w, psum, alignment=alignment, expected_m=5, out_dtype=FULL)
    close(
        y[row_map],
        torch.einsum("tk,tkn->tkn", torch.ones(9, 2), (w.double()[idx] @ x.double()[:, None, :, None])[..., 0]),
    )
    padding = torch.ones(len(rows), dtype=torch.bool)
    padding[row_map.flatten().long()] = False
    assert (y[padding] == 0).all()
    (d_w,) = torch.autograd.grad(y.square().sum(), w)
    assert (d_w[3] == 0).all() and (d_w[:3].abs().amax((1, 2)) > 0).all()


def test_labels_and_psum_are_one_thing() -> None:
    _, _, rows, psum, _ = routed(30, 5, 16)
    labels = torch.full((len(rows),), -1, dtype=torch.int32)
    start = 0
    for g, end in enumerate(psum.tolist()):
        labels[start:end] = g
        start = -(-end // 16) * 16
    results = []
    for grouping, index in (("psum", psum), ("labels", labels), ("labels", torch.where(labels < 0, 99, labels))):
        a, b = rows.clone().requires_grad_(), torch.linspace(-1, 1, 5 * 8 * 6).view(5, 8, 6).to(LOW).requires_grad_()
        y = ops.m_grouped_gemm_bf16(a, b, index, layout="nn", grouping=grouping, alignment=16)
        weights = torch.linspace(0.5, 2, y.numel()).view_as(y)
        results.append((y, *torch.autograd.grad((y.float() * weights).sum(), (a, b))))
    for other in results[1:]:
        for f, e in zip(other, results[0], strict=True):
            assert torch.equal(f, e)


def test_second_derivatives() -> None:
    """Of a loss through all three ops; the groups are uneven and one is empty."""
    a, b = torch.randn(12, 4).to(LOW).requires_grad_(), torch.randn(3, 5, 4).to(LOW).requires_grad_()
    ends = torch.tensor([3, 4, 9], dtype=torch.int32)

    def ours(a: Tensor, b: Tensor) -> Tensor:
        y = ops.m_grouped_gemm_bf16(a, b, ends, alignment=4, out_dtype=FULL)
        z = ops.k_grouped_gemm_bf16(a, a, ends, alignment=4, out_dtype=FULL)
        m = ops.m_grouped_gemm_bf16_masked(a.view(3, 4, 4), b, ends - 2, 2)
        return y.square().sum() + z.square().sum() + m.float().square().sum()

    def exact(a: Tensor, b: Tensor) -> Tensor:
        y = gemm_naive.m_grouped(a, b, ends, "nt", "psum", 4)
        z = gemm_naive.k_grouped(a, a, ends, None, "psum", 4)
        return y.square().sum() + z.square().sum() + gemm_naive.masked(a.view(3, 4, 4), b, ends - 2).square().sum()

    args, doubles = [a, b], [t.detach().double().requires_grad_() for t in (a, b)]
    directions = [torch.randn_like(t) for t in args]
    found = torch.autograd.grad(torch.autograd.grad(ours(*args), args, create_graph=True), args, directions)
    first = torch.autograd.grad(exact(*doubles), doubles, create_graph=True)
    for f, w in zip(found, torch.autograd.grad(first, doubles, [d.double() for d in directions]), strict=True):
        torch.testing.assert_close(f.double(), w, rtol=3e-2, atol=3e-2 * float(w.abs().max()))


def test_any_gradient_strides() -> None:
    a, b, ends = torch.randn(8, 4).to(LOW), torch.randn(2, 5, 4).to(LOW), torch.tensor([3, 7])
    calls = {
        "m_grouped": (lambda a, b: ops.m_grouped_gemm_bf16(a, b, ends, alignment=4), a, b),
        "masked": (lambda a, b: ops.m_grouped_gemm_bf16_masked(a.view(2, 4, 4), b, ends - 3, 1), a, b),
        "k_grouped": (
            lambda a, b: ops.k_grouped_gemm_bf16(a, b, ends, alignment=4, out_dtype=FULL),
            a,
            b.view(10, 4)[:8],
        ),
    }
    for call, *operands in calls.values():
        args = [t.detach().clone().requires_grad_() for t in operands]
        y = call(*args)
        losses = (y.sum(), y.float().mean(), y[..., 0].sum(), (y.mT @ torch.ones_like(y)).sum())
        for loss, weight in zip(losses, (lambda y: torch.ones_like(y), lambda y: torch.full_like(y, 1 / y.numel()),
                                         lambda y: torch.zeros_like(y).index_fill(-1, torch.tensor(0), 1.0),
                                         lambda y: torch.full_like(y, y.shape[-1])), strict=True):  # fmt: skip
            for f, e in zip(
                torch.autograd.grad(loss, args, retain_graph=True),
                torch.autograd.grad(y, args, weight(y), retain_graph=True),
                strict=True,
            ):
                assert torch.equal(f, e)


def test_rows_behind_the_last_group_are_zero_whatever_the_allocator_holds() -> None:
    """torch's own grouped product leaves them, and those of its input gradient, as the memory was."""
    a, b = torch.randn(8, 64).to(LOW).requires_grad_(), torch.randn(4, 32, 64).to(LOW).requires_grad_()
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    for _ in range(3):
        poison = [
            torch.full((8, n), torch.nan, dtype=dtype) for n in (32, 64) for dtype in (LOW, FULL) for _ in range(20)
        ]
        del poison
        y = ops.m_grouped_gemm_bf16(a, b, ends, alignment=1)
        d_a, d_b = torch.autograd.grad(y.float().square().sum(), (a, b))
        close_sum(y, gemm_naive.m_grouped(a, b, ends, "nt", "psum", 1), 64)
        assert (y[6:] == 0).all() and (d_a[6:] == 0).all() and (d_a[:6] != 0).any(1).all()
        assert (d_b[1] == 0).all() and d_b.isfinite().all()


def test_layouts_that_leave_the_buffer_are_clamped() -> None:
    a, b = torch.randn(10, 4).to(LOW), torch.randn(3, 5, 4).to(LOW)
    y = ops.m_grouped_gemm_bf16(a, b, torch.tensor([3, 400, 10**6]), alignment=4)
    close(y, gemm_naive.m_grouped(a, b, torch.tensor([3, 10, 10]), "nt", "psum", 4))
    masked = ops.m_grouped_gemm_bf16_masked(a[:9].view(3, 3, 4), b, torch.tensor([-2, 99, 1]), 1)
    close(masked, gemm_naive.masked(a[:9].view(3, 3, 4), b, torch.tensor([0, 3, 1])))
    z = ops.k_grouped_gemm_bf16(a, a, torch.tensor([-3, 8, 77]), grouping="sizes", alignment=4, out_dtype=FULL)
    close(z, gemm_naive.k_grouped(a, a, torch.tensor([0, 8, 2]), None, "sizes", 4))


@pytest.mark.parametrize("seed", range(16))
def test_random_layouts_and_sizes(seed: int) -> None:
    """Sizes that no kernel is made for, groups of any size, odd strides; NaN in padding as everywhere."""
    g = torch.Generator().manual_seed(seed)

    def pick(*values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=g))]

    groups, alignment, n, k = pick(1, 3, 7), pick(1, 8, 16, 128), pick(1, 17, 64, 129), pick(3, 32, 65, 200)
    counts = [pick(0, 0, 1, 5, 33, 64) for _ in range(groups)]
    rows = sum(-(-c // alignment) * alignment for c in counts) + pick(0, 0, 3)
    ends = psum_of(counts, alignment)
    a = padded_rows(counts, alignment, rows, k, g)
    wide = padded_rows(counts, alignment, rows, 2 * n + 1, g)[:, 1::2]  # nothing is aligned to 16 bytes
    b = torch.randn(groups, n, k, generator=g).to(LOW)
    order = torch.randperm(groups, generator=g).tolist()
    labels = labels_of(counts, alignment, rows, order)
    shuffled = torch.randn(rows, k, generator=g).to(LOW).masked_fill((labels < 0)[:, None], torch.nan)
    for layout, weights in (("nt", b), ("nn", b.mT)):
        attributes: dict[str, Any] = {"layout": layout, "alignment": alignment, "out_dtype": pick_dtype(seed)}
        close_sum(
            ops.m_grouped_gemm_bf16(a, weights, ends, **attributes),
            gemm_naive.m_grouped(a, weights, ends, layout, "psum", alignment), k,
        )  # fmt: skip
        close_sum(
            ops.m_grouped_gemm_bf16(shuffled, weights, labels, grouping="labels", **attributes),
            gemm_naive.m_grouped(shuffled, weights, labels, layout, "labels", alignment), k,
        )  # fmt: skip
    d = torch.randn(groups, k, n, generator=g)
    wanted = gemm_naive.k_grouped(a, wide, ends, d, "psum", alignment)
    ops.k_grouped_gemm_bf16_acc_(d, a, wide, ends, alignment=alignment)
    close_sum(d, wanted, 64)


def pick_dtype(seed: int) -> torch.dtype:
    return (LOW, FULL)[seed % 2]


def close_sum(out: Tensor, wanted: Tensor, k: int) -> None:
    """As ``close``, for sums of ``k`` products of order 1."""
    rtol = 1e-5 if out.dtype == FULL else 2**-8
    torch.testing.assert_close(out.double(), wanted, rtol=rtol, atol=k * 2**-22)


def test_zero_padding_off_changes_no_row_of_a_group() -> None:
    _, _, rows, psum, row_map = routed(11, 4, 8)
    b = torch.randn(4, 6, 8).to(LOW)
    on, off = (ops.m_grouped_gemm_bf16(rows, b, psum, alignment=8, zero_padding=z) for z in (True, False))
    assert torch.equal(on[row_map], off[row_map])


@pytest.mark.parametrize("name", PLAIN)
def test_no_guard_on_the_number_of_rows(name: str) -> None:
    def call(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
        if name == "m_grouped_gemm_bf16":
            return ops.m_grouped_gemm_bf16(a, b, index, alignment=4)
        if name == "k_grouped_gemm_bf16":
            return ops.k_grouped_gemm_bf16(a, a, index, ks=[2, 2], alignment=2, grouping="sizes")
        return ops.m_grouped_gemm_bf16_masked(a.unsqueeze(0).expand(2, -1, -1), b, index, 3)

    counter = CompileCounter()
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    b = torch.randn(2, 5, 4).to(LOW)
    for rows in (6, 7, 64):
        a = torch.randn(rows, 4).to(LOW)
        torch._dynamo.mark_dynamic(a, 0)
        args = (a, b, torch.tensor([2, 2], dtype=torch.int32))
        assert torch.equal(compiled(*args), call(*args))
    assert counter.frame_count == 1


def test_compiled_training_of_experts() -> None:
    def loss(x: Tensor, w13: Tensor, w2: Tensor, idx: Tensor) -> Tensor:
        rows, _, _, psum, row_map = ops.moe_permute(x, idx, num_experts=3, alignment=8)
        h = ops.m_grouped_gemm_bf16(rows, w13, psum, alignment=8, out_dtype=FULL)
        y = ops.m_grouped_gemm_bf16(ops.swiglu(h).to(LOW), w2, psum, layout="nn", alignment=8)
        return ops.moe_combine(y, row_map).float().square().sum()

    args = [(torch.randn(*s) * 0.5).to(LOW).requires_grad_() for s in ((7, 6), (3, 8, 6), (3, 4, 5))]
    idx = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1], [1, 0], [2, -1], [1, 2]])
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for f, e in zip(*(torch.autograd.grad(f(*args, idx), args) for f in (compiled, loss)), strict=True):
        torch.testing.assert_close(f, e, rtol=2**-6, atol=2**-6 * float(e.abs().max()))
        assert e.abs().sum() > 0


def test_autocast() -> None:
    a, b, ends = torch.randn(8, 4), torch.randn(2, 5, 4).to(LOW), torch.tensor([3, 7])
    with torch.autocast("cpu", LOW):
        found = ops.m_grouped_gemm_bf16(a, b, ends, alignment=4)
        masked = ops.m_grouped_gemm_bf16_masked(a.view(2, 4, 4).half(), b.float(), ends - 3, 1)
        wide = ops.k_grouped_gemm_bf16(a, a, ends, alignment=4, out_dtype=FULL)
    assert torch.equal(found, ops.m_grouped_gemm_bf16(a.to(LOW), b, ends, alignment=4))
    assert torch.equal(masked, ops.m_grouped_gemm_bf16_masked(a.view(2, 4, 4).half().to(LOW), b, ends - 3, 1))
    assert torch.equal(wide, ops.k_grouped_gemm_bf16(a.to(LOW), a.to(LOW), ends, alignment=4, out_dtype=FULL))


@pytest.mark.parametrize(("fa", "fb", "threshold"), [("fp8", "fp8", 1e-3), ("fp8", "fp4", 1e-2), ("fp4", "fp4", 2e-2)])
def test_thresholds_of_deep_gemm_for_quantised_operands(fa: str, fb: str, threshold: float) -> None:
    """Against the product of what was quantised, in DeepGEMM's measure."""

    def quantised(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
        if fmt == "fp4":
            return ops.quant_fp4(x, gran_k=32)
        return ops.quant_fp8(x, gran=(1, 32), ue8m0=True)

    a, b, ends = torch.randn(96, 384), torch.randn(2, 40, 384), torch.tensor([20, 81])
    exact = gemm_naive.m_grouped(a, b, ends, "nt", "psum", 32)
    recipes: dict[str, Any] = {"recipe_a": (1, 32), "recipe_b": (1, 32)}
    (qa, sfa), (qb, sfb) = quantised(a, fa), quantised(b, fb)
    found = ops.m_grouped_gemm_scaled(qa, sfa, qb, sfb, ends, alignment=32, **recipes)
    assert 0 < gemm_naive.calc_diff(found, exact) < threshold
    masked = ops.m_grouped_gemm_scaled_masked(
        qa.view(2, 48, -1), sfa.view(2, 48, -1), qb, sfb, torch.tensor([48, 7]), 9, **recipes
    )
    exact = gemm_naive.masked(a.view(2, 48, 384), b, torch.tensor([48, 7]))
    assert 0 < gemm_naive.calc_diff(masked, exact) < threshold


def test_scaled_forms_have_no_gradient_and_say_so() -> None:
    sample = next(iter(ops.op("m_grouped_gemm_scaled").samples()))
    a, sfa, *rest = sample.args
    out = ops.op("m_grouped_gemm_scaled").overload(a, sfa.clone().requires_grad_(), *rest, **sample.kwargs)
    with pytest.raises(RuntimeError, match="m_grouped_gemm_scaled has no backward: its operands are quantised"):
        out.sum().backward()
    d, *operands = clones(next(iter(ops.op("k_grouped_gemm_scaled_acc_").samples())))
    with pytest.raises(RuntimeError, match="k_grouped_gemm_scaled_acc_ has no backward"):
        ops.k_grouped_gemm_scaled_acc_(d.requires_grad_(), *operands, gran_k=32, alignment=32)
