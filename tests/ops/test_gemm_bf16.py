"""``gemm_bf16``, its in-place forms, ``einsum_bf16`` and ``hc_prenorm_gemm`` against float64, with gradients."""

from __future__ import annotations

from typing import Any

import gemm_naive
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from ascend_deep import ops
from ascend_deep.ops import _gemm

RUNNERS = {"reference": lambda op: op.reference, "op": lambda op: op.overload}
LOW, FULL = torch.bfloat16, torch.float32


def samples(name: str) -> list[Any]:
    return [pytest.param(s, r, id=f"{s.name}-{r}") for s in ops.op(name).samples() for r in RUNNERS]


def close(out: Tensor, wanted: Tensor) -> None:
    """float32 results up to the order of the sum, bfloat16 ones up to one rounding of that."""
    rtol, atol = (1e-5, 1e-5) if out.dtype == FULL else (2**-8, 1e-5)
    torch.testing.assert_close(out.double(), wanted, rtol=rtol, atol=atol)


def clones(sample: ops.Sample) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in sample.args)


def gradients(result: Any, leaves: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    """With zeros for what a result does not depend on."""
    result = [result] if isinstance(result, Tensor) else list(result)
    pairs = [(r, w) for r, w in zip(result, cotangents, strict=True) if r.requires_grad]
    found = torch.autograd.grad([r for r, _ in pairs], leaves, [w.to(r.dtype) for r, w in pairs], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def check_gradients(name: str, sample: ops.Sample, naive: Any) -> None:
    """The op's gradients against autograd of ``naive(*args)`` in float64, through the same operands."""
    wanted_names = ops.op(name).differentiable
    names = [a.name for a in ops.op(name).overload._schema.arguments if not a.kwarg_only]
    args = [
        a.detach().clone().requires_grad_() if n in wanted_names and isinstance(a, Tensor) else a
        for n, a in zip(names, sample.args, strict=True)
    ]
    doubles = [a.detach().double().requires_grad_() if n in wanted_names and isinstance(a, Tensor) else a
               for n, a in zip(names, args, strict=True)]  # fmt: skip
    leaves, exact = ([a for a in t if isinstance(a, Tensor) and a.requires_grad] for t in (args, doubles))
    out = ops.op(name).overload(*args, **sample.kwargs)
    cotangents = [torch.randn_like(o) for o in ([out] if isinstance(out, Tensor) else out)]
    found, wanted = gradients(out, leaves, cotangents), gradients(naive(*doubles), exact, cotangents)
    for leaf, f, w in zip(leaves, found, wanted, strict=True):
        assert f.dtype == leaf.dtype and f.shape == leaf.shape
        close(f, w)


# -- gemm_bf16 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sample", "runner"), samples("gemm_bf16"))
def test_gemm_bf16(sample: ops.Sample, runner: str) -> None:
    out = RUNNERS[runner](ops.op("gemm_bf16"))(*sample.args, **sample.kwargs)
    a, b, c = sample.args
    assert out.dtype == (sample.kwargs["out_dtype"] or (LOW if c is None else c.dtype))
    close(out, gemm_naive.dense(a, b, c, sample.kwargs["layout"], sample.kwargs["alpha"]))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("sample", [pytest.param(s, id=s.name) for s in ops.op("gemm_bf16").samples()])
def test_gemm_bf16_gradients(sample: ops.Sample) -> None:
    layout, alpha = sample.kwargs["layout"], sample.kwargs["alpha"]
    check_gradients("gemm_bf16", sample, lambda a, b, c: gemm_naive.dense(a, b, c, layout, alpha))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_gemm_bf16_second_derivatives(layout: str) -> None:
    shapes = ((3, 4) if layout[0] == "n" else (4, 3), (5, 4) if layout[1] == "t" else (4, 5))
    args = [torch.randn(*s).to(LOW).requires_grad_() for s in shapes]
    exact = [a.detach().double().requires_grad_() for a in args]
    found, wanted = (
        torch.autograd.grad(f(*x), x, create_graph=True)
        for f, x in (
            (lambda a, b: ops.gemm_bf16(a, b, layout=layout, alpha=1.7, out_dtype=FULL).square().sum(), args),
            (lambda a, b: gemm_naive.dense(a, b, None, layout, 1.7).square().sum(), exact),
        )
    )
    directions = [torch.randn_like(a) for a in args]
    second = torch.autograd.grad(found, args, directions)
    for f, w in zip(second, torch.autograd.grad(wanted, exact, [d.double() for d in directions]), strict=True):
        torch.testing.assert_close(f.double(), w, rtol=2e-2, atol=2e-2 * float(w.abs().max()))


@pytest.fixture(params=["float32", "parts"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a float32 gradient is multiplied: as on a CPU, and as on everything else."""
    if request.param == "parts":
        monkeypatch.setattr(_gemm, "as_float32", lambda grad: False)


@pytest.mark.usefixtures("way")
def test_float32_gradients_are_not_rounded_before_use() -> None:
    """A common part that cancels leaves the low bits of the gradient; rounded to bfloat16 they would be gone."""
    a, b = torch.randn(6, 9).to(LOW).requires_grad_(), torch.randn(8, 9).to(LOW)
    b = torch.cat((b, -b)).requires_grad_()
    grad = torch.randn(6, 8)
    grad = torch.cat((256 + grad * 2**-6, 256 - grad * 2**-7), 1)
    exact = [t.detach().double().requires_grad_() for t in (a, b)]
    found = torch.autograd.grad(ops.gemm_bf16(a, b, out_dtype=FULL), (a, b), grad)
    wanted = torch.autograd.grad(gemm_naive.dense(*exact, None, "nt", None), exact, grad.double())
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-2, atol=2e-4)
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=2**-8, atol=1e-4)
    rounded = ops.gemm_bf16(grad.to(LOW), b, layout="nn").double()
    assert (rounded - wanted[0]).abs().max() > 100 * (found[0] - wanted[0]).abs().max()


@pytest.mark.usefixtures("way")
def test_infinite_and_nan_gradients_stay_what_they_are() -> None:
    grad = torch.tensor([[torch.inf, 1.0], [torch.nan, 2.0], [0.3, -torch.inf], [0.1, 0.2]])
    a, b = torch.randn(4, 3).to(LOW).requires_grad_(), torch.rand(2, 3).add(0.5).to(LOW)
    (d_a,) = torch.autograd.grad(ops.gemm_bf16(a, b, out_dtype=FULL), a, grad)
    assert (d_a[0] == torch.inf).all() and d_a[1].isnan().all() and (d_a[2] == -torch.inf).all()
    assert d_a[3].isfinite().all()


def test_thresholds_of_deep_gemm() -> None:
    a, b, c = torch.randn(70, 512).to(LOW), torch.randn(90, 512).to(LOW), torch.randn(70, 90)
    exact = a.double() @ b.double().t()
    assert gemm_naive.calc_diff(ops.gemm_bf16(a, b), exact) < 1e-5
    assert gemm_naive.calc_diff(ops.gemm_bf16(a, b, c, alpha=0.3), 0.3 * exact + c) < 1e-10
    x, w = torch.randn(9, 4, 512).to(LOW), torch.randn(4, 16, 512).to(LOW)
    heads = torch.einsum("bhr,hdr->bhd", x.double(), w.double())
    assert gemm_naive.calc_diff(ops.einsum_bf16("bhr,hdr->bhd", x, w), heads) < 1e-5
    assert gemm_naive.calc_diff(ops.einsum_bf16("bhr,hdr->bhd", x, w, out_dtype=FULL), heads) < 1e-10
    mix = torch.randn(24, 512)
    for splits in (None, 5):
        d, s = (t if splits is None else t.sum(0) for t in ops.hc_prenorm_gemm(a, mix, num_splits=splits))
        assert gemm_naive.calc_diff(d, a.double() @ mix.double().t()) < 1e-8
        assert gemm_naive.calc_diff(s, (a.double() ** 2).sum(1)) < 1e-8


# -- in place ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sample", "runner"), [*samples("gemm_bf16_out"), *samples("gemm_bf16_acc_")])
def test_in_place_forms(sample: ops.Sample, runner: str) -> None:
    name = "gemm_bf16_out" if "alpha" in sample.kwargs else "gemm_bf16_acc_"
    d, a, b, *rest = clones(sample)
    c = (rest[0] if rest else d).clone() if rest != [None] else None
    wanted = gemm_naive.dense(a, b, c, sample.kwargs["layout"], sample.kwargs.get("alpha"))
    assert RUNNERS[runner](ops.op(name))(d, a, b, *rest, **sample.kwargs) is None
    close(d, wanted)


@pytest.mark.parametrize("dtype", [LOW, FULL])
def test_in_place_forms_write_their_window_only_and_count_versions(dtype: torch.dtype) -> None:
    a, b = torch.randn(7, 5).to(LOW), torch.randn(7, 6).to(LOW)
    buffer = torch.randn(9, 20).to(dtype)
    before, window = buffer.clone(), buffer[2:7, 3:15:2]
    version = buffer._version
    ops.gemm_bf16_acc_(window, a, b)
    close(window, gemm_naive.dense(a, b, before[2:7, 3:15:2], "tn", None))
    assert buffer._version > version
    middle = window.clone()
    ops.gemm_bf16_out(window, a, b, window, layout="tn", alpha=-0.4)
    close(window, gemm_naive.dense(a, b, middle, "tn", -0.4))
    window.copy_(before[2:7, 3:15:2])
    assert buffer.equal(before)


def test_in_place_forms_refuse_gradients_and_do_not_hide_a_change() -> None:
    a, b, d = torch.randn(7, 5).to(LOW), torch.randn(7, 6).to(LOW), torch.randn(5, 6)
    for args in ((d, a.clone().requires_grad_(), b), (d.clone().requires_grad_(), a, b)):
        with pytest.raises(RuntimeError, match=r"gemm_bf16_acc_ has no backward: it writes into d; call gemm_bf16"):
            ops.gemm_bf16_acc_(*args)
        with torch.no_grad():
            ops.gemm_bf16_acc_(*args)
    x = torch.randn(5, 6, requires_grad=True)
    y = (x * d).sum()
    ops.gemm_bf16_out(d, a, b, layout="tn")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_in_place_forms_compiled() -> None:
    def step(d: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ops.gemm_bf16_acc_(d, a, b)
        ops.gemm_bf16_out(d, a, b, d, layout="tn", alpha=0.5)
        return d * 2

    a, b, d = torch.randn(7, 5).to(LOW), torch.randn(7, 6).to(LOW), torch.randn(5, 6)
    e = d.clone()
    wanted, found = step(d, a, b), torch.compile(step, backend="aot_eager", fullgraph=True)(e, a, b)
    assert torch.equal(wanted, found) and torch.equal(d, e)


# -- einsum_bf16 and hc_prenorm_gemm ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("sample", "runner"), samples("einsum_bf16"))
def test_einsum_bf16(sample: ops.Sample, runner: str) -> None:
    out = RUNNERS[runner](ops.op("einsum_bf16"))(*sample.args, **sample.kwargs)
    assert out.dtype == (sample.kwargs["out_dtype"] or LOW)
    close(out, gemm_naive.einsum(sample.kwargs["eq"], *sample.args))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("sample", [pytest.param(s, id=s.name) for s in ops.op("einsum_bf16").samples()])
def test_einsum_bf16_gradients(sample: ops.Sample) -> None:
    check_gradients("einsum_bf16", sample, lambda *args: gemm_naive.einsum(sample.kwargs["eq"], *args))


@pytest.mark.parametrize(("sample", "runner"), samples("hc_prenorm_gemm"))
def test_hc_prenorm_gemm(sample: ops.Sample, runner: str) -> None:
    found = RUNNERS[runner](ops.op("hc_prenorm_gemm"))(*sample.args, **sample.kwargs)
    splits = sample.kwargs["num_splits"]
    for f, w in zip(found, gemm_naive.hc(*sample.args), strict=True):
        assert splits is None or f.shape[0] == splits
        close(f if splits is None else f.sum(0), w)


@pytest.mark.parametrize("sample", [pytest.param(s, id=s.name) for s in ops.op("hc_prenorm_gemm").samples()])
def test_hc_prenorm_gemm_gradients(sample: ops.Sample) -> None:
    splits = sample.kwargs["num_splits"]

    def naive(a: Tensor, b: Tensor) -> list[Tensor]:
        """Part i of S is the product over its own columns, as the module defines it."""
        if splits is None:
            return list(gemm_naive.hc(a, b))
        width = -(-a.shape[1] // splits)
        parts = [
            gemm_naive.hc(a[:, i * width : (i + 1) * width], b[:, i * width : (i + 1) * width]) for i in range(splits)
        ]
        return [torch.stack(t) for t in zip(*parts, strict=True)]

    check_gradients("hc_prenorm_gemm", sample, naive)


# -- everything around ------------------------------------------------------------------------------------------------
def test_no_guard_on_sizes() -> None:
    """One graph for all numbers of rows, in all three dense ops at once, with gradients."""

    def call(x: Tensor, w: Tensor, mix: Tensor) -> tuple[Tensor, ...]:
        y = ops.gemm_bf16(x, w, layout="nt", alpha=1.2)
        heads = ops.einsum_bf16("bhr,hdr->bhd", y.view(-1, 2, 4), w.view(2, 4, 6)[:, :, :4], out_dtype=FULL)
        return y, heads, *ops.hc_prenorm_gemm(x, mix)

    counter = CompileCounter()
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    w, mix = torch.randn(8, 6).to(LOW), torch.randn(3, 6)
    for rows in (2, 5, 64):
        x = torch.randn(rows, 6).to(LOW)
        torch._dynamo.mark_dynamic(x, 0)
        for f, e in zip(compiled(x, w, mix), call(x, w, mix), strict=True):
            assert torch.equal(f, e)
    assert counter.frame_count == 1


def test_compiled_gradients_equal_eager_ones() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = ops.gemm_bf16(x, w, layout="nt", alpha=1.2, out_dtype=FULL)
        return ops.einsum_bf16("bmk,bnk->mn", y.to(LOW).view(1, -1, 8), w.view(1, 6, 8)).sum() + y.square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (5, 9):
        args = [torch.randn(rows, 6).to(LOW).requires_grad_(), torch.randn(8, 6).to(LOW).requires_grad_()]
        for f, e in zip(*(torch.autograd.grad(f(*args), args) for f in (compiled, loss)), strict=True):
            torch.testing.assert_close(f, e, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_as_it_does_for_a_linear(compiled: bool) -> None:
    def call(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", LOW):
            return ops.gemm_bf16(x, w), torch.nn.functional.linear(x, w)

    x, w = torch.randn(5, 6, requires_grad=True), torch.randn(7, 6, requires_grad=True)
    ours, linear = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(x, w)
    assert ours.dtype == linear.dtype == LOW
    torch.testing.assert_close(ours, linear, rtol=2**-7, atol=1e-3)
    pair = [torch.autograd.grad(y.float().square().sum(), (x, w), retain_graph=True) for y in (ours, linear)]
    for f, e in zip(*pair, strict=True):
        assert f.dtype == e.dtype == FULL
        torch.testing.assert_close(f, e, rtol=2e-2, atol=2e-2 * float(e.abs().max()))
    with torch.autocast("cpu", torch.float16), pytest.raises(TypeError, match="gemm_bf16: a has dtype float32"):
        ops.gemm_bf16(x, w)
