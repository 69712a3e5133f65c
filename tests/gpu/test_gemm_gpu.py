"""The CUDA providers of the GEMM ops against their references, and against the libraries called directly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep.native import table
from ascend_deep.native.deep_gemm.gemm_provider import OPS as LIBRARY_OPS
from ascend_deep.native.deep_gemm.provider import DEEP_GEMM
from ascend_deep.native.torch_cuda.provider import TORCH_CUDA
from ascend_deep.native.triton.provider import TRITON
from ascend_deep.ops import (
    einsum_bf16,
    gemm_bf16,
    gemm_bf16_out,
    gemm_scaled,
    hc_prenorm_gemm,
    k_grouped_gemm_bf16,
    m_grouped_gemm_bf16,
    m_grouped_gemm_bf16_masked,
    m_grouped_gemm_scaled,
    op,
    quant_fp8,
)
from ascend_deep.ops._op import Sample, strict

BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
TRITON_OPS = sorted(set(TRITON.kernels) & set(LIBRARY_OPS) - {"hc_prenorm_gemm", "einsum_bf16"})
THRESHOLD = {"bf16": 1e-5, "fp8": 1e-3}


def library() -> Any:
    missing = DEEP_GEMM.unavailable()
    if missing is not None:
        pytest.skip(f"not run: {missing}")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not run: the device is not SM90")
    import deep_gemm

    return deep_gemm


def calc_diff(x: Tensor, y: Tensor) -> float:
    """The library's own measure of difference."""
    x, y = x.double().cpu(), y.double().cpu()
    norm = (x * x + y * y).sum()
    return 0.0 if norm == 0 else (1 - 2 * (x * y).sum() / norm).item()


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(BF16)


def to_cuda(x: Any) -> Any:
    """A copy with the same strides and offset in its storage."""
    if not isinstance(x, Tensor):
        return x
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).cuda()
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


SAMPLES = [(name, sample) for name in TRITON_OPS for sample in op(name).samples()]


def compare(name: str, sample: Sample, provider: Any) -> None:
    """The provider's kernel on a sample against the reference on the CPU, NaN and infinities in the same places."""
    definition = op(name)
    args = [to_cuda(a) for a in sample.args]
    refusal = provider.refusal(name, tuple(args), sample.kwargs)
    if refusal is not None:
        assert str(refusal).endswith(".")
        pytest.skip(f"refused: {refusal}")
    given = [a.clone() if isinstance(a, Tensor) else a for a in sample.args]
    want = definition.reference(*given, **sample.kwargs)
    got = provider.kernels[name](*args, **sample.kwargs)
    if want is None:
        got, want = args[0], given[0]
    assert got.dtype == want.dtype and got.shape == want.shape
    got = got.cpu()
    assert torch.equal(got.isfinite(), want.isfinite())
    assert torch.equal(got.isnan(), want.isnan())
    got, want = (t.nan_to_num(0.0, 0.0, 0.0).double() for t in (got, want))
    scaled = "scaled" in name
    largest = want.abs().max().clamp(min=1e-30) if want.numel() else torch.tensor(1.0)
    # fp8 products are summed with about 14 bits in the tensor cores of this generation.
    assert ((got - want).abs() / largest).max().item() < (8e-3 if scaled else 5e-3) if want.numel() else True


@pytest.mark.parametrize("name,sample", SAMPLES, ids=lambda x: x.name if isinstance(x, Sample) else x)
def test_samples_in_triton(name: str, sample: Sample) -> None:
    compare(name, sample, TRITON)


@pytest.mark.parametrize("sample", list(op("einsum_bf16").samples()), ids=lambda x: x.name)
def test_samples_in_torch(sample: Sample) -> None:
    """Of the other ops torch takes larger products only, which have tests of their own below."""
    compare("einsum_bf16", sample, TORCH_CUDA)


def chosen(name: str, *args: Any, **kwargs: Any) -> str:
    return table.choose(name, "cuda", args, kwargs).name


DENSE: dict[str, Any] = {"layout": "nt", "out_dtype": None, "alpha": None}


@pytest.mark.parametrize("m", [1, 3, 16, 33, 64, 65, 500])
@pytest.mark.parametrize("n,k", [(576, 1024), (2112, 7168), (520, 136)])
def test_dense_rows(m: int, n: int, k: int) -> None:
    a, b = bf16(m, k), bf16(n, k)
    exact = a.double() @ b.double().t()
    with strict():
        assert calc_diff(gemm_bf16(a, b), exact) < THRESHOLD["bf16"]
    for provider in (TRITON, TORCH_CUDA, DEEP_GEMM):
        if provider.refusal("gemm_bf16", (a, b, None), DENSE) is None:
            for dtype in (BF16, F32) if m != 65 else (BF16,):
                got = provider.kernels["gemm_bf16"](a, b, None, **(DENSE | {"out_dtype": dtype}))
                assert calc_diff(got, exact) < (1e-5 if dtype == BF16 else 1e-9)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("m", [8, 200])
def test_layouts_and_c(layout: str, m: int) -> None:
    n, k = 264, 328
    a = bf16(m, k) if layout[0] == "n" else bf16(k, m)
    b = bf16(n, k) if layout[1] == "t" else bf16(k, n)
    exact = (a if layout[0] == "n" else a.t()).double() @ (b.t() if layout[1] == "t" else b).double()
    for provider in (TRITON, TORCH_CUDA, DEEP_GEMM):
        for c in (None, torch.randn(m, n, device="cuda"), bf16(m, n)):
            for alpha in (None, -0.37):
                given = {"layout": layout, "out_dtype": None, "alpha": alpha}
                if provider.refusal("gemm_bf16", (a, b, c), given) is None:
                    want = exact * (1 if alpha is None else alpha) + (0 if c is None else c.double())
                    assert calc_diff(provider.kernels["gemm_bf16"](a, b, c, **given), want) < THRESHOLD["bf16"]


def quantised(m: int, n: int, k: int, gran_n: int = 128) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, sfa = quant_fp8(torch.randn(m, k, device="cuda"), gran=(1, 128))
    b, sfb = quant_fp8(torch.randn(n, k, device="cuda"), gran=(gran_n, 128))
    return a, sfa, b, sfb


@pytest.mark.parametrize("m", [1, 16, 17, 64, 333])
@pytest.mark.parametrize("n,k", [(256, 512), (2112, 7168), (640, 400)])
@pytest.mark.parametrize("gran_n", [128, 1])
def test_scaled_rows(m: int, n: int, k: int, gran_n: int) -> None:
    a, sfa, b, sfb = quantised(m, n, k, gran_n)
    left = a.double() * sfa.double().repeat_interleave(128, 1)[:, :k]
    scales = sfb.double().repeat_interleave(gran_n, 0)[:n].repeat_interleave(128, 1)[:, :k]
    exact = left @ (b.double() * scales).t()
    given = {"recipe_a": (1, 128), "recipe_b": (gran_n, 128)}
    with strict():
        got = gemm_scaled(a, sfa, b, sfb, **given)
    assert calc_diff(got, exact) < THRESHOLD["fp8"]
    took = 0
    for provider in (TRITON, TORCH_CUDA, DEEP_GEMM):
        for c in (None, torch.randn(m, n, device="cuda")):
            options = DENSE | given | {"out_dtype": F32 if gran_n == 1 else None}
            if provider.refusal("gemm_scaled", (a, sfa, b, sfb, c), options) is None:
                out = provider.kernels["gemm_scaled"](a, sfa, b, sfb, c, **options)
                assert calc_diff(out, exact + (0 if c is None else c.double())) < THRESHOLD["fp8"]
                took += 1
    assert took


def test_equal_to_the_direct_call() -> None:
    dg = library()
    a, b = bf16(300, 1024), bf16(520, 1024)
    d = torch.empty(300, 520, device="cuda", dtype=BF16)
    dg.bf16_gemm_nt(a, b, d)
    assert chosen("gemm_bf16", a, b, None, **DENSE) == "deep_gemm"
    assert torch.equal(gemm_bf16(a, b), d)
    out = torch.empty_like(d)
    gemm_bf16_out(out, a, b)
    assert torch.equal(out, d)
    qa, sfa, qb, sfb = quantised(300, 640, 1024)
    d = torch.empty(300, 640, device="cuda", dtype=BF16)
    dg.fp8_gemm_nt((qa, sfa), (qb, sfb), d)
    given = {"recipe_a": (1, 128), "recipe_b": (128, 128)}
    assert chosen("gemm_scaled", qa, sfa, qb, sfb, None, **DENSE, **given) == "deep_gemm"
    assert torch.equal(gemm_scaled(qa, sfa, qb, sfb, **given), d)
    # K not contiguous: a copy is made.
    assert torch.equal(gemm_scaled(qa, sfa, qb.t().contiguous(), sfb, layout="nn", **given), d)


def grouped(
    sizes: list[int], align: int, k: int, n: int, tail: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A with NaN in padding rows, B, ends (those of empty groups before their starts), labels, and the exact result."""
    ends, start = [], 0
    for size in sizes:
        ends.append(start + size if size else (ends[-1] if ends else 0))
        start = -(-ends[-1] // align) * align
    rows = start + tail
    a, b = torch.full((rows, k), float("nan"), device="cuda", dtype=BF16), bf16(len(sizes), n, k)
    labels = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    exact = torch.zeros(rows, n, device="cuda", dtype=torch.float64)
    first = 0
    for g, end in enumerate(ends):
        if end > first:
            a[first:end] = bf16(end - first, k)
            labels[first:end] = g
            exact[first:end] = a[first:end].double() @ b[g].double().t()
        first = -(-end // align) * align
    return a, b, torch.tensor(ends, dtype=torch.int32, device="cuda"), labels, exact


GROUPED: dict[str, Any] = {"layout": "nt", "expected_m": None, "zero_padding": True, "out_dtype": None}


@pytest.mark.parametrize(
    "sizes,align,tail",
    [
        ([130, 0, 1, 255, 128, 0], 128, 0),
        ([130, 0, 1, 255, 128, 0], 128, 77),
        ([700, 650, 800], 128, 128),
        ([600, 0, 1, 700, 0], 128, 77),
        ([5, 0, 33, 16, 1], 16, 3),
        ([5, 0, 33, 17, 1], 1, 3),
        ([0, 0], 128, 256),
    ],
    ids=str,
)
def test_m_grouped(sizes: list[int], align: int, tail: int) -> None:
    a, b, ends, labels, exact = grouped(sizes, align, 192, 264, tail)
    for grouping, layout in (("psum", ends), ("psum", ends.long()), ("labels", labels)):
        for name, weight in (("nt", b), ("nn", b.mT.contiguous())):
            given = GROUPED | {"grouping": grouping, "alignment": align, "layout": name}
            took = []
            for provider in (DEEP_GEMM, TORCH_CUDA, TRITON):
                if provider.refusal("m_grouped_gemm_bf16", (a, weight, layout), given) is None:
                    out = provider.kernels["m_grouped_gemm_bf16"](a, weight, layout, **given)
                    assert out.isfinite().all()
                    assert torch.equal((out == 0).all(1), (exact == 0).all(1))
                    assert calc_diff(out, exact) < THRESHOLD["bf16"]
                    took.append(provider.name)
            assert took if align % 16 == 0 or grouping == "psum" else not took
    qa, sfa = quant_fp8(a.float().nan_to_num(0.0), gran=(1, 128))
    qb, sfb = quant_fp8(b.float(), gran=(128, 128))
    given = GROUPED | {"grouping": "psum", "alignment": align, "recipe_a": (1, 128), "recipe_b": (128, 128)}
    with strict():
        results = [m_grouped_gemm_scaled(qa, sfa, qb, sfb, ends, **given)]
    for provider in (DEEP_GEMM, TRITON):
        if provider.refusal("m_grouped_gemm_scaled", (qa, sfa, qb, sfb, ends), given) is None:
            results.append(provider.kernels["m_grouped_gemm_scaled"](qa, sfa, qb, sfb, ends, **given))
    for got in results:
        assert torch.equal((got == 0).all(1), (exact == 0).all(1))
        assert calc_diff(got, exact) < 2e-3  # both operands are quantised
        assert calc_diff(got, results[-1]) < 1e-5


@pytest.mark.parametrize("rows", [20, 128, 300])
def test_masked(rows: int) -> None:
    a, b = bf16(5, rows, 192), bf16(5, 136, 192)
    counts = torch.tensor([7, 0, rows, 1, rows + 9], device="cuda", dtype=torch.int32)
    a[0, 7:] = float("nan")
    exact = torch.where(
        torch.arange(rows, device="cuda").view(1, -1, 1) < counts.view(-1, 1, 1), a.double() @ b.double().mT, 0.0
    )
    with strict():
        got = m_grouped_gemm_bf16_masked(a, b, counts, 9)
    assert torch.equal(got == 0, exact == 0) and calc_diff(got, exact) < THRESHOLD["bf16"]
    for provider in (DEEP_GEMM, TRITON):
        if provider.refusal("m_grouped_gemm_bf16_masked", (a, b, counts), {"expected_m": 9}) is None:
            out = provider.kernels["m_grouped_gemm_bf16_masked"](a, b, counts, expected_m=9)
            assert torch.equal(out == 0, exact == 0) and calc_diff(out, exact) < THRESHOLD["bf16"]


@pytest.mark.parametrize("grouping", ["psum", "sizes"])
@pytest.mark.parametrize("sizes", [[256, 0, 128], [130, 0, 77, 1]], ids=str)
def test_k_grouped(grouping: str, sizes: list[int]) -> None:
    m, n = 264, 392
    a, _, ends, labels, _ = grouped(sizes, 128, m, 8, 40)
    b = torch.where((labels >= 0).unsqueeze(1), bf16(a.shape[0], n), float("nan"))
    exact = torch.stack([a[labels == g].double().t() @ b[labels == g].double() for g in range(len(sizes))])
    layout = ends if grouping == "psum" else torch.tensor(sizes, dtype=torch.int32, device="cuda")
    c = torch.randn(len(sizes), m, n, device="cuda")
    for start in (None, c):
        want = exact if start is None else exact + c.double()
        with strict():
            got = k_grouped_gemm_bf16(a, b, layout, start, ks=sizes, grouping=grouping, out_dtype=F32)
        assert got.isfinite().all() and calc_diff(got, want) < 1e-9
        given = {"ks": sizes, "grouping": grouping, "alignment": 128, "out_dtype": F32}
        for provider in (DEEP_GEMM, TRITON):
            if provider.refusal("k_grouped_gemm_bf16", (a, b, layout, start), given) is None:
                out = provider.kernels["k_grouped_gemm_bf16"](a, b, layout, start, **given)
                assert calc_diff(out, want) < 1e-9
    if start is not None:
        assert torch.equal(got[1], c[1])  # an empty group


@pytest.mark.parametrize("eq", ["bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr", "bmk,bnk->mn"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_einsum(eq: str, dtype: torch.dtype) -> None:
    b, h, r, d = 200, 8, 512, 128
    shapes = {
        "bhr,hdr->bhd": ((b, h, r), (h, d, r)),
        "bhd,hdr->bhr": ((b, h, d), (h, d, r)),
        "bhd,bhr->hdr": ((b, h, d), (b, h, r)),
        "bmk,bnk->mn": ((9, 128, 64), (9, 192, 64)),
    }
    left, right = (bf16(*s) for s in shapes[eq])
    exact = torch.einsum(eq, left.double(), right.double())
    with strict():
        got = einsum_bf16(eq, left, right, out_dtype=dtype)
    assert got.is_contiguous() and got.dtype == dtype and calc_diff(got, exact) < 1e-5


def test_hc_prenorm() -> None:
    library()
    a, b = bf16(137, 7168), torch.randn(24, 7168, device="cuda")
    for splits in (None, 4):
        with strict():
            d, squares = hc_prenorm_gemm(a, b, num_splits=splits)
        d, squares = (d, squares) if splits is None else (d.sum(0), squares.sum(0))
        assert calc_diff(d, a.double() @ b.double().t()) < 1e-6  # TF32
        assert calc_diff(squares, a.double().square().sum(1)) < 1e-8


@pytest.mark.parametrize("m", [1, 16, 300])
def test_in_a_graph(m: int) -> None:
    """Captured once, replayed on other values; nothing outside the graph is kept."""
    a, b = bf16(m, 1024), bf16(640, 1024)
    qa, sfa, qb, sfb = quantised(m, 640, 1024)
    given = {"recipe_a": (1, 128), "recipe_b": (128, 128)}
    for _ in range(2):
        gemm_bf16(a, b), gemm_scaled(qa, sfa, qb, sfb, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, scaled = gemm_bf16(a, b), gemm_scaled(qa, sfa, qb, sfb, **given)
    a.copy_(bf16(m, 1024))
    sfa *= 2
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, gemm_bf16(a, b))
    assert torch.equal(scaled, gemm_scaled(qa, sfa, qb, sfb, **given))


@pytest.mark.parametrize("rows,name", [(64, "native.triton"), (65, "deep_gemm")])
def test_who_takes_a_dense_product(rows: int, name: str) -> None:
    library()
    assert chosen("gemm_bf16", bf16(rows, 256), bf16(128, 256), None, **DENSE) == name
    assert chosen("gemm_bf16", bf16(rows, 250), bf16(128, 250), None, **DENSE) != "deep_gemm"


def test_gradients_of_grouped_products() -> None:
    a, b, ends, labels, _ = grouped([130, 0, 77], 128, 64, 48)
    a = a.nan_to_num(0.0).requires_grad_()
    b.requires_grad_()
    grad = bf16(a.shape[0], 48)
    got = torch.autograd.grad(m_grouped_gemm_bf16(a, b, ends), (a, b), grad)
    left, right = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    chosen_b = right[labels.clamp(min=0)]
    out = torch.where((labels >= 0).unsqueeze(1), torch.einsum("mk,mnk->mn", left, chosen_b), 0.0)
    want = torch.autograd.grad(out, (left, right), grad.double())
    for g, w in zip(got, want, strict=True):
        assert calc_diff(g, w) < THRESHOLD["bf16"]
