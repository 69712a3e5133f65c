"""The C++ matrix products: every instruction set, format and layout gives what the reference gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native.cpu import gemm_provider, gemm_quant_provider
from ascend_deep.native.cpu.provider import CPU

NAMES = tuple(sorted({*gemm_provider.SAME, *gemm_provider.KERNELS, *gemm_quant_provider.KERNELS}))
FP8 = torch.float8_e4m3fn


def taken(name: str, sample: ops.Sample) -> bool:
    choice = ops.provider(name, "cpu", sample.args, sample.kwargs)
    return choice.provider is CPU


def results(name: str, function: Any, sample: ops.Sample) -> tuple[Tensor, ...]:
    """What a call returns, or writes into a copy of its first argument (which may also be an addend)."""
    args = sample.args
    if name.endswith(("_out", "_acc_")):
        d = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype).copy_(args[0])
        args = tuple(d if a is args[0] else a for a in args)
        assert function(*args, **sample.kwargs) is None
        return (d,)
    out = function(*args, **sample.kwargs)
    return (out,) if isinstance(out, Tensor) else tuple(out)


def as_numbers(t: Tensor) -> Tensor:
    return t.to(torch.float64) if t.is_floating_point() else t


def close(a: Tensor, b: Tensor, *, rtol: float, atol: float, name: str) -> None:
    def message(found: str) -> str:
        return f"{name}: {found}"

    torch.testing.assert_close(as_numbers(a), as_numbers(b), rtol=rtol, atol=atol, equal_nan=True, msg=message)


@pytest.mark.parametrize("name", NAMES)
def test_samples_on_every_instruction_set(name: str, each_isa: str) -> None:
    exact = name in ("quant_fp8", "quant_fp4", "dequant")
    count = 0
    for sample in ops.op(name).samples():
        if not taken(name, sample):
            continue
        count += 1
        wanted = results(name, ops.reference(name), sample)
        got = results(name, CPU.kernels[name], sample)
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride(), sample.name
            if exact or not b.is_floating_point():
                close(a, b, rtol=0, atol=0, name=sample.name)
                continue
            # E4M3: a neighbour, where the f32 sum before it lay next to a tie.
            rtol = {torch.bfloat16: 8e-3, FP8: 0.13}.get(b.dtype, 2e-5)
            size = float(as_numbers(b).nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0
            close(a, b, rtol=rtol, atol=3e-6 * size, name=sample.name)
    assert count >= 2


# ---- dense products over sizes, formats, layouts and strides ---------------------------------------------------------

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
RECIPES = ((1, 128), (128, 128), (1, 32), (64, 64), (3, 48), (1, 256))


class Operand:
    """A random operand whose numbers are multiples of 1/2 up to 6 times small powers of two, so that sums are exact."""

    def __init__(self, g: torch.Generator, rows: int, k: int, fmt: str, transposed: bool) -> None:
        codes = torch.randint(16, (rows, k), generator=g)
        grid = torch.tensor([*E2M1, *(-v for v in E2M1)])
        self.recipe = RECIPES[int(torch.randint(len(RECIPES), (), generator=g))]
        shape = tuple(-(-size // gran) for size, gran in zip((rows, k), self.recipe, strict=True))
        self.sf = torch.exp2(torch.randint(-2, 3, shape, generator=g).float())
        if int(torch.randint(2, (), generator=g)):
            self.sf = self.sf.t().contiguous().t()
        stored = codes.t().contiguous() if transposed else codes
        if fmt == "fp4":
            pairs = stored.to(torch.uint8)
            self.data = pairs[:, 0::2] | (pairs[:, 1::2] << 4)
        else:
            # In a wider buffer, so that rows are not next to each other.
            wide = torch.randn(stored.shape[0], stored.shape[1] + 5, generator=g).to(FP8)
            wide[:, 2:-3] = grid[stored].to(FP8)
            self.data = wide[:, 2:-3]
        scales = self.sf.repeat_interleave(self.recipe[0], 0)[:rows].repeat_interleave(self.recipe[1], 1)[:, :k]
        self.numbers = grid[codes].double() * scales.double()


SIZES = (
    (1, 1, 2), (1, 33, 200), (1, 70, 640), (2, 9, 130), (3, 70, 258), (4, 12, 1030), (7, 20, 514), (16, 24, 256),
    (17, 40, 64), (27, 257, 128), (50, 4, 96), (90, 1, 300), (100, 130, 160), (530, 18, 66),
    (0, 3, 4), (3, 0, 4), (3, 4, 0),
)  # fmt: skip


@pytest.mark.parametrize("formats", [("fp8", "fp8"), ("fp8", "fp4"), ("fp4", "fp4"), ("fp4", "fp8")], ids="x".join)
def test_scaled_products_are_exact(formats: tuple[str, str], each_isa: str) -> None:
    g = torch.Generator().manual_seed(len(formats[0] + each_isa))
    for m, n, k in SIZES:
        for layout in ("nt", "nn", "tn", "tt"):
            if (formats[0] == "fp4" and layout[0] == "t" and m % 2) or (
                formats[1] == "fp4" and layout[1] == "n" and n % 2
            ):
                continue
            a = Operand(g, m, k, formats[0], layout[0] == "t")
            b = Operand(g, n, k, formats[1], layout[1] == "n")
            c = torch.randint(-8, 9, (n, m), generator=g).float().t()
            with ops.strict():
                got = ops.gemm_scaled(
                    a.data, a.sf, b.data, b.sf, c, recipe_a=a.recipe, recipe_b=b.recipe, layout=layout, alpha=-0.5
                )
            wanted = c.double() - 0.5 * (a.numbers @ b.numbers.t())
            assert torch.equal(got.double(), wanted), (m, n, k, layout, a.recipe, b.recipe)


def test_bf16_products_are_exact(each_isa: str) -> None:
    g = torch.Generator().manual_seed(5)
    for m, n, k in (*SIZES, (5, 3, 7), (20, 31, 33), (45, 65, 129)):
        for layout in ("nt", "nn", "tn", "tt"):
            a, b = (torch.randint(-4, 5, (rows, k), generator=g).bfloat16() for rows in (m, n))
            left, right = (
                x if letter == keep else x.t().contiguous()
                for x, letter, keep in zip((a, b), layout, "nt", strict=True)
            )
            d = torch.full((n, m + 2), 3.0)[:, 1:-1].t() if m else torch.empty(0, n)
            ops.gemm_bf16_out(d, left, right, d, layout=layout, alpha=2.0)
            assert torch.equal(d.double(), 3 + 2 * (a.double() @ b.double().t())), (m, n, k, layout)
            assert torch.equal(
                ops.gemm_bf16(left, right, layout=layout, out_dtype=torch.float32), a.float() @ b.float().t()
            )


def test_operands_without_any_unit_stride(each_isa: str) -> None:
    g = torch.Generator().manual_seed(6)
    a = torch.randint(-4, 5, (9, 2, 40, 3), generator=g).bfloat16()[:, 1, :, 2]
    b = torch.randint(-4, 5, (1, 40), generator=g).bfloat16().expand(21, 40)
    assert torch.equal(ops.gemm_bf16(a, b, out_dtype=torch.float32), a.float() @ b.float().t())
    assert torch.equal(ops.gemm_bf16(b, a, out_dtype=torch.float32), b.float() @ a.float().t())
    coded = a.to(FP8)
    sf = torch.ones(1, 1).expand(9, 1)
    got = ops.gemm_scaled(coded, sf, coded, sf, recipe_a=(1, 64), recipe_b=(1, 64), out_dtype=torch.float32)
    assert torch.equal(got, a.float() @ a.float().t())


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 20])
def test_every_code_at_every_place(tokens: int, each_isa: str) -> None:
    """Weight row c has code c at one place and zeros elsewhere; the NaN makes its own row NaN and no other."""
    k, places = 300, (0, 1, 31, 32, 63, 64, 127, 128, 255, 256, 299)
    x = torch.ones(tokens, k).to(FP8)
    one = torch.ones(tokens, 2)
    all_codes = torch.arange(256, dtype=torch.uint8)
    for transposed in (False, True):
        layout = "nn" if transposed else "nt"
        for place in places:
            w = torch.zeros(256, k, dtype=torch.uint8)
            w[:, place] = all_codes
            stored = w.t().contiguous() if transposed else w
            sf = torch.full((256, 2), 0.25)
            got = ops.gemm_scaled(
                x,
                one,
                stored.view(FP8),
                sf,
                recipe_a=(1, 256),
                recipe_b=(1, 256),
                layout=layout,
                out_dtype=torch.float32,
            )
            wanted = (all_codes.view(FP8).float() * 0.25).expand(tokens, 256)
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        for place in places:
            w = torch.zeros(16, k, dtype=torch.uint8)
            w[:, place] = all_codes[:16]
            stored = w.t().contiguous() if transposed else w
            pairs = (stored[:, 0::2] | (stored[:, 1::2] << 4)).view(torch.int8)
            sf = torch.full((16, 10), 8.0)
            got = ops.gemm_scaled(
                x, one, pairs, sf, recipe_a=(1, 256), recipe_b=(1, 32), layout=layout, out_dtype=torch.float32
            )
            wanted = 8 * torch.tensor([*E2M1, *(-v for v in E2M1)]).expand(tokens, 16)
            assert torch.equal(got, wanted), place


@pytest.mark.parametrize("sf_format", ["fp32", "ue8m0x4", "ue8m0x2"])
@pytest.mark.parametrize("tokens", [1, 6, 20])
def test_scales_of_any_form_give_the_same_bits(sf_format: str, tokens: int, each_isa: str) -> None:
    g = torch.Generator().manual_seed(9)
    x, w = torch.randn(tokens, 416, generator=g), torch.randn(37, 416, generator=g)
    w[5, 64:96] = 0  # the least scale
    plain = [*ops.quant_fp8(x, gran=(1, 32), ue8m0=True), *ops.quant_fp4(w)]
    packed = [*ops.quant_fp8(x, gran=(1, 32), ue8m0=True, sf_format=sf_format), *ops.quant_fp4(w, sf_format=sf_format)]
    results = [ops.gemm_scaled(*operands, recipe_a=(1, 32), recipe_b=(1, 32)) for operands in (plain, packed)]
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("weights", ["fp8", "fp4"])
@pytest.mark.parametrize("lost", [float("inf"), float("nan")], ids=str)
def test_a_token_scale_that_is_not_finite(lost: float, weights: str, each_isa: str) -> None:
    """It turns codes to infinity or NaN before they are summed up, so opposite ones do not cancel."""
    g = torch.Generator().manual_seed(12)
    k = 320
    x = torch.randn(3, k, generator=g).to(FP8)
    x_sf = torch.full((3, 10), 0.5)
    x_sf[1, 3] = lost
    w = torch.zeros(5, k)
    w[1, 96:128] = 1.0  # infinities of either sign
    w[2, 96:98] = torch.tensor([1.0, 1.0]) * x[1, 96:98].float().sign()
    w[3, 200] = 3.0
    # The others sum to zero without the scale.
    x[1, 96:128] = torch.tensor([1.0, -1.0] * 16).to(FP8)
    quant = ops.quant_fp8(w, gran=(1, 32), ue8m0=True) if weights == "fp8" else ops.quant_fp4(w)
    blocks: dict[str, Any] = {"recipe_a": (1, 32), "recipe_b": (1, 32), "out_dtype": torch.float32}
    got = ops.gemm_scaled(x, x_sf, *quant, **blocks)
    numbers = x.float() * x_sf.repeat_interleave(32, 1)
    wanted = numbers @ ops.dequant(*quant, gran=(1, 32)).t()
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=1e-5, equal_nan=True)
    assert wanted[1].isnan().all() and wanted[::2].isfinite().all()


def test_thread_counts_give_the_same_bits(threads: None) -> None:
    g = torch.Generator().manual_seed(10)
    cases = [
        (torch.randn(m, 700, generator=g), torch.randn(n, 700, generator=g))
        for m, n in ((1, 3000), (40, 2000), (900, 24))
    ]
    found: list[list[Tensor]] = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        results = []
        for x, w in cases:
            results.append(ops.gemm_bf16(x.bfloat16(), w.bfloat16()))
            x8, w8 = ops.quant_fp8(x, gran=(1, 128)), ops.quant_fp8(w, gran=(128, 128))
            results.append(ops.gemm_scaled(*x8, *w8, recipe_a=(1, 128), recipe_b=(128, 128)))
        found.append(results)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_row_of_a_group_does_not_depend_on_the_others(each_isa: str) -> None:
    """Labels in any order: the same rows, sorted or not; rows without a group are zero whatever they hold."""
    g = torch.Generator().manual_seed(11)
    a, b = torch.randn(60, 72, generator=g).bfloat16(), torch.randn(4, 19, 72, generator=g).bfloat16()
    labels = torch.randint(-1, 4, (60,), generator=g).int()
    a[labels < 0] = torch.nan
    got = ops.m_grouped_gemm_bf16(a, b, labels, grouping="labels", alignment=1)
    order = labels.argsort(stable=True)
    again = ops.m_grouped_gemm_bf16(a[order], b, labels[order], grouping="labels", alignment=1)
    assert torch.equal(got[order], again)
    assert not got[labels < 0].any() and got[labels >= 0].isfinite().all()


# ---- what the kernels refuse -----------------------------------------------------------------------------------------


def _refused_bf16() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    a, b, kw = (
        torch.randn(3, 8).bfloat16(),
        torch.randn(5, 8).bfloat16(),
        {"layout": "nt", "out_dtype": None, "alpha": None},
    )
    return {
        "f32": ((a.float(), b, None), kw),
        "f16": ((a, b.half(), None), kw),
        "rank": ((a[0], b, None), kw),
        "k": ((a, b[:, :7], None), kw),
        "layout": ((a, b, None), {**kw, "layout": "tt"}),
        "no layout": ((a, b, None), {**kw, "layout": "NT"}),
        "out": ((a, b, None), {**kw, "out_dtype": torch.float16}),
        "c shape": ((a, b, torch.randn(5, 3).bfloat16()), kw),
        "c broadcasts": ((a, b, torch.randn(1, 5).bfloat16()), kw),
        "c dtype": ((a, b, torch.randn(3, 5)), {**kw, "out_dtype": torch.bfloat16}),
        "c f16": ((a, b, torch.randn(3, 5).half()), kw),
    }


def _refused_scaled() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    a, b = torch.randn(3, 96).to(FP8), torch.randn(6, 96).to(FP8)
    sfa, sfb = torch.rand(3, 1), torch.rand(1, 1)
    kw = {"recipe_a": [1, 128], "recipe_b": [128, 128], "layout": "nt", "out_dtype": None, "alpha": None}
    words = torch.zeros(6, 1, dtype=torch.int32)
    return {
        "bf16": ((a.bfloat16(), sfa, b, sfb, None), kw),
        "e5m2": ((a, sfa, b.to(torch.float8_e5m2), sfb, None), kw),
        "fp4 of half the depth": ((a, sfa, b.view(torch.int8)[:, :40], sfb, None), kw),
        "scales of the other": ((a, sfb, b, sfa, None), kw),
        "scale shape": ((a, sfa, b, torch.rand(2, 1), None), kw),
        "scale rank": ((a, sfa[:, 0], b, sfb, None), kw),
        "f64 scales": ((a, sfa.double(), b, sfb, None), kw),
        "block 0": ((a, sfa, b, sfb, None), {**kw, "recipe_a": [1, 0]}),
        "packed, 128 rows": ((a, sfa, b, words[:1], None), kw),
        "packed, too many": ((a, sfa, b, torch.zeros(6, 2, dtype=torch.int32), None), {**kw, "recipe_b": [1, 32]}),
        "c": ((a, sfa, b, sfb, torch.zeros(3, 5)), kw),
    }


@pytest.mark.parametrize("name", ["gemm_bf16", "gemm_scaled"])
def test_the_kernel_refuses_what_the_op_refuses(name: str) -> None:
    """It is called without the checks of the op in between."""
    for case, (args, kwargs) in (_refused_bf16() if name == "gemm_bf16" else _refused_scaled()).items():
        with pytest.raises((ValueError, TypeError), match=name):
            ops.op(name).overload(*args, **kwargs)
        with pytest.raises(RuntimeError, match="ascend_deep: "):
            CPU.direct[name]()(*args, **kwargs)
            pytest.fail(f"the kernel takes {case}")


def test_float64_is_left_to_the_reference() -> None:
    x = torch.randn(4, 64, dtype=torch.float64)
    choice = ops.provider("quant_fp8", "cpu", (x,), {"gran": (1, 32), "ue8m0": False, "sf_format": "fp32"})
    assert choice.provider is None and "float64" in choice.refusals[0].reason
    data, sf = ops.quant_fp8(x.float(), gran=(1, 32))
    kwargs = {"gran": (1, 32), "sf_format": "fp32", "out_dtype": torch.float16}
    choice = ops.provider("dequant", "cpu", (data, sf), kwargs)
    assert choice.provider is None and "float16" in choice.refusals[0].reason


@pytest.mark.parametrize("name", [n for n in NAMES if not n.endswith(("_out", "_acc_"))])
def test_defaults_of_torch_change_nothing(name: str) -> None:
    """Another default dtype and device than float32 and the CPU."""
    sample = next(s for s in ops.op(name).samples() if taken(name, s))
    wanted = results(name, CPU.kernels[name], sample)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = CPU.kernels[name](*sample.args, **sample.kwargs)
    finally:
        torch.set_default_dtype(before)
    for a, b in zip((got,) if isinstance(got, Tensor) else got, wanted, strict=True):
        assert a.dtype == b.dtype and a.device == b.device
        close(a, b, rtol=0, atol=0, name=sample.name)
