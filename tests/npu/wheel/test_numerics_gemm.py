"""The quantised GEMM ops through the provider's kernels, on CPU kernels under the vendor's ops, against references.

As in ``test_numerics``: what is emitted is asked of our limits with the tensors it really gets.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_deep import ops
from ascend_deep.native.torch_npu import soc
from ascend_deep.native.torch_npu.gemm_grouped import psum_layout
from ascend_deep.native.torch_npu.provider import TORCH_NPU
from ascend_deep.ops import _sf
from ascend_deep.ops._gemm_scaled_samples import operand
from ascend_deep.ops._grouped import bounds
from tests.npu.wheel.test_numerics import _run, _same

CANN = "9.2.0"
# Recipes, formats, how scales are given, layouts that the vendor's dense product takes.
FORMS: dict[str, tuple[tuple[int, int], tuple[int, int], str, str, tuple[str, ...]]] = {
    "G-B": ((1, 128), (128, 128), "fp8", "fp32", ("nt", "nn", "tn", "tt")),
    "B-B": ((128, 128), (128, 128), "fp8", "fp32", ("nt", "tn")),
    "K-C": ((1, 512), (1, 300), "fp8", "fp32", ("nt", "nn", "tt")),
    "MX FP8 int32": ((1, 32), (1, 32), "fp8", "ue8m0x4", ("nt", "nn", "tn")),
    "MX FP8 int16": ((1, 32), (1, 32), "fp8", "ue8m0x2", ("tt",)),
    "MX FP4 int32": ((1, 32), (1, 32), "fp4", "ue8m0x4", ("nt",)),
}
CASES = [(name, layout) for name, form in FORMS.items() for layout in form[4]]


def _operand(g: torch.Generator, form: str, side: int, rows: int, k: int, other_way: bool) -> tuple[Any, Any]:
    gran, fmt, sf_format = FORMS[form][side], FORMS[form][2], FORMS[form][3]
    data, sf = operand(g, rows, k, gran, fmt, other_way)
    if sf_format != "fp32":
        return data, _sf.pack(_sf.encode_ue8m0(sf), sf_format)
    return data, sf * torch.empty(sf.shape).uniform_(0.6, 1.7, generator=g)  # not powers of two


@pytest.mark.parametrize(("form", "layout"), CASES)
def test_scaled_products(form: str, layout: str) -> None:
    g = torch.Generator().manual_seed(7)
    m, n, k = 37, 150, 250 if form != "MX FP4 int32" else 384
    a, sfa = _operand(g, form, 0, m, k, layout[0] == "t")
    b, sfb = _operand(g, form, 1, n, k, layout[1] == "n")
    c = torch.randn(m, n, generator=g)
    attributes = {"recipe_a": FORMS[form][0], "recipe_b": FORMS[form][1], "layout": layout}
    for add, dtype, alpha in (
        (None, None, None),
        (c, None, -1.7),
        (c.bfloat16(), None, None),
        (None, torch.float32, 0.3),
    ):
        args, kwargs = (a, sfa, b, sfb, add), {**attributes, "out_dtype": dtype, "alpha": alpha}
        with soc.planned("950pr") as target:
            result = _run("gemm_scaled", args, kwargs, target)
        assert not isinstance(result, str), result
        assert result[1] == {"npu_quant_matmul"}
        _same("gemm_scaled", result[0], ops.reference("gemm_scaled")(*args, **kwargs), a.dtype)


PSUM = [3, 4, 12, 17]  # with alignment 4: rows 0-2, 4 is no row, 4-11, 12-16


@pytest.mark.parametrize("grouping", ["psum", "labels"])
@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("form", [f for f in FORMS if f != "B-B"])
def test_grouped_scaled_products(form: str, layout: str, grouping: str) -> None:
    g = torch.Generator().manual_seed(11)
    rows, n, k = 23, 150, 250 if form != "MX FP4 int32" else 384
    a, sfa = _operand(g, form, 0, rows, k, False)
    parts = [_operand(g, form, 1, n, k, layout == "nn") for _ in PSUM]
    b = torch.stack([d.view(torch.uint8) for d, _ in parts]).view(parts[0][0].dtype)
    sfb = torch.stack([s for _, s in parts])
    index = torch.tensor(PSUM, dtype=torch.int32)
    if grouping == "labels":
        index = torch.tensor(
            [2, 2, -1, 2, 0, 0, 0, -1, 9, -1, 3, 3, 3, 3, 3, 3, 0, 0, 2, -1, 3, 3, 0], dtype=torch.int32
        )
    used = torch.zeros(rows, dtype=torch.bool)
    if grouping == "psum":
        for first, last in bounds(index, rows, 4):
            used[first:last] = True
    else:
        used = (index >= 0) & (index < 4)
    if a.dtype == torch.float8_e4m3fn:
        a.view(torch.uint8)[~used] = 0x7F  # NaN
    if sfa.dtype == torch.float32:
        sfa[~used] = torch.nan
    attributes = {
        **{"recipe_a": FORMS[form][0], "recipe_b": FORMS[form][1], "layout": layout, "grouping": grouping},
        **{
            "alignment": 4 if grouping == "psum" else 1,
            "expected_m": 5,
            "zero_padding": True,
            "out_dtype": torch.float32,
        },
    }
    args = (a, sfa, b, sfb, index)
    with soc.planned("950dt") as target:
        result = _run("m_grouped_gemm_scaled", args, attributes, target)
    assert not isinstance(result, str), result
    assert result[1] == {"npu_grouped_matmul", *(["npu_moe_init_routing_v2"] if grouping == "labels" else [])}
    _same("m_grouped_gemm_scaled", result[0], ops.reference("m_grouped_gemm_scaled")(*args, **attributes), a.dtype)


@pytest.mark.parametrize("form", ["G-B", "MX FP8 int32", "MX FP4 int32", "K-C"])
def test_masked_scaled_products(form: str) -> None:
    g = torch.Generator().manual_seed(13)
    counts, rows, n, k = [5, 0, 11, 2], 9, 130, 250 if form != "MX FP4 int32" else 384
    sides = [[_operand(g, form, side, size, k, False) for _ in counts] for side, size in ((0, rows), (1, n))]
    (a, sfa), (b, sfb) = (
        (torch.stack([d.view(torch.uint8) for d, _ in s]).view(s[0][0].dtype), torch.stack([x for _, x in s]))
        for s in sides
    )
    args = (a, sfa, b, sfb, torch.tensor(counts, dtype=torch.int32))
    attributes = {"expected_m": 4, "recipe_a": FORMS[form][0], "recipe_b": FORMS[form][1]}
    with soc.planned("950pr") as target:
        result = _run("m_grouped_gemm_scaled_masked", args, attributes, target)
    assert not isinstance(result, str), result
    want = ops.reference("m_grouped_gemm_scaled_masked")(*args, **attributes)
    _same("m_grouped_gemm_scaled_masked", result[0], want, a.dtype)


@pytest.mark.parametrize("family", ["910b", "950pr"])
@pytest.mark.parametrize(("name", "least"), [("m_grouped_gemm_bf16", 4), ("m_grouped_gemm_bf16_masked", 2)])
def test_samples_of_grouped_bfloat16_products(name: str, least: int, family: str) -> None:
    """Their padding rows hold NaN; all of that has to be replaced."""
    definition, seen, refused = ops.op(name), [], set()
    for sample in definition.samples():
        kwargs = {**sample.kwargs, **({"out_dtype": None} if "out_dtype" in sample.kwargs else {})}
        with soc.planned(family) as target:
            result = _run(name, sample.args, kwargs, target)
        if isinstance(result, str):
            refused.add(result)
            continue
        seen.append(result[1])
        got, want = result[0], definition.reference(*sample.args, **kwargs)
        if kwargs.get("zero_padding", True):
            _same(name, got, want, torch.bfloat16)
    assert len(seen) >= least and set().union(*seen) == {"npu_grouped_matmul", "npu_moe_init_routing_v2"}, refused
    expected = ("is empty", "takes at least 2", "contiguous or transposed")
    assert all(any(e in r for e in expected) for r in refused), refused


@pytest.mark.parametrize("family", ["910b", "950dt"])
def test_products_grouped_along_the_inner_dimension(family: str) -> None:
    definition, computed = ops.op("k_grouped_gemm_bf16"), 0
    for sample in definition.samples():
        args, kwargs = (*sample.args[:3], None), {**sample.kwargs, "out_dtype": None}
        with soc.planned(family) as target:
            result = _run("k_grouped_gemm_bf16", args, kwargs, target)
        if isinstance(result, str):
            assert "is empty" in result, result
            continue
        computed += 1
        assert result[1] == {"npu_grouped_matmul"}
        _same("k_grouped_gemm_bf16", result[0], definition.reference(*args, **kwargs), torch.bfloat16)
    assert computed >= 5
    a, b = torch.randn(8, 6).bfloat16(), torch.randn(8, 10).bfloat16()
    ends, kwargs = torch.tensor([3, 8]), {"ks": None, "grouping": "psum", "alignment": 1, "out_dtype": None}
    with soc.planned(family):
        for c, changed, sentence in (
            (torch.randn(2, 6, 10).bfloat16(), {}, "there is a c to add"),
            (None, {"out_dtype": torch.float32}, "out_dtype is float32"),
        ):
            reason = TORCH_NPU.refusal("k_grouped_gemm_bf16", (a, b, ends, c), {**kwargs, **changed})
            assert reason is not None and sentence in reason.reason


def test_ends_of_groups_as_the_vendor_counts_them() -> None:
    g = torch.Generator().manual_seed(17)
    for _ in range(60):
        alignment, groups, rows = (int(torch.randint(1, high, (), generator=g)) for high in (9, 7, 40))
        counts = torch.randint(0, 9, (groups,), generator=g)
        starts, ends, at = [], [], 0
        for count in counts.tolist():
            starts.append(at)
            ends.append(at + count)
            at = -(-ends[-1] // alignment) * alignment
        psum = torch.tensor(ends, dtype=torch.int32)
        found, used = psum_layout(psum, rows, alignment)
        want = torch.zeros(rows, dtype=torch.bool)
        start = 0
        for (first, last), count in zip(bounds(psum, rows, alignment), found.tolist(), strict=True):
            want[first:last] = True
            assert count >= 0 and (last == first or (start <= first and last <= start + count))
            start += count
        assert torch.equal(used, want) and start <= rows
    broken, _ = psum_layout(torch.tensor([9, -4, 70, 2]), 20, 4)
    assert broken.tolist() == [12, 0, 8, 0]  # a promise is broken, but the vendor's kernel stays in the buffer


@pytest.mark.parametrize("gran_k", [32, 96, 128])
@pytest.mark.parametrize("sf_format", ["fp32", "ue8m0x4", "ue8m0x2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantisation_is_ours_to_the_bit(dtype: torch.dtype, sf_format: str, gran_k: int) -> None:
    g = torch.Generator().manual_seed(19)
    x = torch.randn(3, 7, 330, generator=g) * torch.exp2(torch.randint(-9, 8, (3, 7, 330), generator=g).float())
    x[:, 2, 32:140] = 0.0  # a block of zeros, and one below the bound
    x[1, :, :128] *= 1e-6
    x[2, 0, :3] = torch.tensor([448.0, -448.0, 449.0])
    x = x.to(dtype)
    attributes = {"gran": (1, gran_k), "ue8m0": True, "sf_format": sf_format}
    with soc.planned("950pr", CANN) as target:
        result = _run("quant_fp8", (x,), attributes, target)
    assert not isinstance(result, str), result
    _identical(result[0], ops.reference("quant_fp8")(x, **attributes))


def _identical(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", ["quant_fp8", "swiglu_quant"])
def test_samples_of_quantisation(name: str) -> None:
    definition, computed, refused = ops.op(name), 0, set()
    for sample in definition.samples():
        x = sample.args[0]
        if not x.float().isfinite().all():
            continue  # the vendor's documents promise nothing
        kwargs = {**sample.kwargs, "ue8m0": True}
        with soc.planned("950dt", CANN) as target:
            result = _run(name, sample.args, kwargs, target)
        if isinstance(result, str):
            refused.add(result.split(";")[0])
            continue
        computed += 1
        got, want = result[0], definition.reference(*sample.args, **kwargs)
        assert torch.equal(got[1], want[1]) and got[1].stride() == want[1].stride(), sample.name
        _same(name, [got[0].float()], [want[0].float()], x.dtype)
    assert computed >= 2 and refused, (computed, refused)


@pytest.mark.parametrize("act", ["silu", "swiglu_oai", "gelu_tanh"])
@pytest.mark.parametrize("limit", [None, 0.8])
def test_activation_and_quantisation(act: str, limit: float | None) -> None:
    g = torch.Generator().manual_seed(23)
    h, weight = torch.randn(19, 2 * 72, generator=g).bfloat16(), torch.rand(19, generator=g) + 0.1
    h[3] = 0.0
    attributes = {
        **{"act": act, "alpha": 1.702 if act == "swiglu_oai" else 1.0, "limit": limit, "interleaved": act != "silu"},
        **{"gran_k": 32, "ue8m0": True, "sf_format": "ue8m0x2"},
    }
    with soc.planned("950pr", CANN) as target:
        result = _run("swiglu_quant", (h, weight), attributes, target)
    assert not isinstance(result, str), result
    want = ops.reference("swiglu_quant")(h, weight, **attributes)
    assert torch.equal(result[0][1], want[1])
    torch.testing.assert_close(result[0][0].float(), want[0].float(), rtol=0.125, atol=1e-6)
    assert (result[0][0].float() != want[0].float()).sum() <= 3
    assert ("npu_swiglu" in result[1]) == (act == "silu" and limit is None)


FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.ones(4, 1)
REFUSALS: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "gemm_scaled",
        "MX",
        {"sf": "fp32", "k": 96},
        "float32 scales, of which the vendor's MX product takes powers of two only",
    ),
    ("gemm_scaled", "MX", {"formats": ("fp8", "fp4")}, "one operand is FP8 and the other FP4"),
    ("gemm_scaled", "MX", {"formats": ("fp4", "fp4"), "layout": "nn", "k": 128}, "FP4 in layout 'nn'"),
    (
        "gemm_scaled",
        "MX",
        {"formats": ("fp4", "fp4"), "k": 96},
        "an even number of blocks of 32 columns of FP4, not 96",
    ),
    ("gemm_scaled", "MX", {"m": 0}, "a is empty"),
    ("gemm_scaled", "odd", {}, "the blocks are 4 x 16 and 1 x 16; the vendor's quantised products have"),
    ("gemm_scaled", "packed", {}, "scales are packed for blocks of 128 and 128"),
    ("gemm_scaled", "MX", {"family": "910_93"}, "takes int8 for x1, not float8_e4m3fn"),
]
RECIPES = {"MX": ((1, 32), (1, 32)), "odd": ((4, 16), (1, 16)), "packed": ((1, 128), (1, 128))}


@pytest.mark.parametrize(("op", "recipes", "how", "sentence"), REFUSALS)
def test_refusals_of_scaled_products(op: str, recipes: str, how: dict[str, Any], sentence: str) -> None:
    g = torch.Generator().manual_seed(29)
    k, layout, formats = how.get("k", 256), how.get("layout", "nt"), how.get("formats", ("fp8", "fp8"))
    sides = []
    for rows, gran, fmt, other in ((how.get("m", 6), 0, 0, False), (10, 1, 1, layout == "nn")):
        data, sf = operand(g, rows, k, RECIPES[recipes][gran], formats[fmt], other)
        sides += [
            data,
            _sf.pack(_sf.encode_ue8m0(sf), "ue8m0x4") if how.get("sf") != "fp32" and recipes != "odd" else sf,
        ]
    kwargs = {"recipe_a": RECIPES[recipes][0], "recipe_b": RECIPES[recipes][1], "layout": layout}
    with soc.planned(how.get("family", "950pr")):
        reason = TORCH_NPU.refusal(op, (*sides, None), {**kwargs, "out_dtype": None, "alpha": None})
    assert reason is not None and sentence in reason.reason and reason.reason.endswith("."), reason


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"c": torch.randn(6, 10).bfloat16()}, "there is a c to add; whether aten's addmm rounds"),
        ({"alpha": 0.7}, "there is a factor of 0.7"),
        ({"out_dtype": torch.float32}, "out_dtype is float32; aten's product of bfloat16 is bfloat16."),
        ({"a": torch.randn(0, 16).bfloat16()}, "a is empty"),
    ],
)
def test_refusals_of_bfloat16_products(changed: dict[str, Any], sentence: str) -> None:
    call = {"a": torch.randn(6, 16).bfloat16(), "b": torch.randn(10, 16).bfloat16(), "c": None, **changed}
    kwargs = {"layout": "nt", "out_dtype": changed.get("out_dtype"), "alpha": changed.get("alpha")}
    with soc.planned("910b"):
        reason = TORCH_NPU.refusal("gemm_bf16", (call["a"], call["b"], call["c"]), kwargs)
        assert (
            TORCH_NPU.refusal(
                "gemm_bf16", (torch.randn(6, 16), call["b"], None), {**kwargs, "out_dtype": None, "alpha": None}
            )
            is None
        )
    assert reason is not None and sentence in reason.reason


@pytest.mark.parametrize(
    ("changed", "release", "sentence"),
    [
        ({"ue8m0": False}, CANN, "no lower bound of them, so a block of zeros would get another scale."),
        ({"gran": (128, 32)}, CANN, "a scale covers 128 rows; the vendor's MX quantisation has blocks within a row."),
        ({"gran": (1, 48)}, CANN, "for block_size, not 48"),
        ({}, "9.1.0", "ignores max_low_bound before CANN 9.2.0-beta.1, and this CANN is 9.1.0"),
        ({}, None, "of unknown release"),
    ],
)
def test_refusals_of_quantisation(changed: dict[str, Any], release: str | None, sentence: str) -> None:
    attributes = {"gran": (1, 32), "ue8m0": True, "sf_format": "fp32", **changed}
    with soc.planned("950pr", release):
        reason = TORCH_NPU.refusal("quant_fp8", (torch.randn(5, 96).bfloat16(),), attributes)
    assert reason is not None and sentence in reason.reason
    with soc.planned("910b", CANN):
        reason = TORCH_NPU.refusal(
            "quant_fp8", (torch.randn(5, 96).bfloat16(),), {**attributes, "gran": (1, 32), "ue8m0": True}
        )
    assert reason is not None and "is not made for the Ascend 910b" in reason.reason
