"""Limits of the vendor's ops: each from both sides, per processor; the invalid calls that the vendor's fakes take."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest
import torch
from packaging.version import Version

from ascend_deep.native.torch_npu import rows, soc
from ascend_deep.native.torch_npu.checks import CHECKS, Spec, refusal
from ascend_deep.native.torch_npu.soc import Target
from tests.npu.broken import KINDS, broken
from tests.npu.calls import EIGHT, SIDES, VARIANTS, quantised, valid

LIMITS = [r for r in rows.ROWS if r.what not in ("products", "no_value", "eager_only", "low_bound")]
PER_FAMILY = [(r, f) for r in LIMITS for f in r.socs]


def _ask(op: str, family: str, changed: dict[str, Any], release: str | None = None) -> str | None:
    return refusal(op, Target(family, soc.cann(release)), **{**valid(op, family), **changed})


def _made_for(op: str, family: str) -> bool:
    return any(family in r.value for r in rows.ROWS if (r.op, r.what) == (op, "products"))


@pytest.mark.parametrize(("row", "family"), PER_FAMILY, ids=[f"{r.op}-{r.what}-{f}" for r, f in PER_FAMILY])
def test_a_limit_holds_on_one_side_and_not_on_the_other(row: rows.Row, family: str) -> None:
    if not _made_for(row.op, family):
        assert "not made for" in str(_ask(row.op, family, {}))
        return
    inside, outside = SIDES[row.op, row.what](family)
    assert _ask(row.op, family, inside) is None
    sentence = _ask(row.op, family, outside)
    assert sentence is not None and sentence.startswith(f"torch_npu's {row.op} ") and sentence.endswith(".")


def test_every_limit_has_both_sides_and_a_source() -> None:
    assert {(r.op, r.what) for r in LIMITS} == set(SIDES)
    assert all(r.source and set(r.socs) <= set(soc.FAMILIES) for r in rows.ROWS)
    assert {r.op for r in rows.ROWS} == set(CHECKS)


@pytest.mark.parametrize("family", soc.FAMILIES)
@pytest.mark.parametrize("op", CHECKS)
def test_the_valid_calls_are_valid_where_the_op_exists(op: str, family: str) -> None:
    sentence = _ask(op, family, {})
    assert (sentence is None) == _made_for(op, family), sentence


@pytest.mark.parametrize(("what", "op", "changed"), EIGHT, ids=[f"{op}-{what}" for what, op, _ in EIGHT])
def test_what_the_vendors_fakes_accept_is_refused(what: str, op: str, changed: dict[str, Any]) -> None:
    assert what in str(_ask(op, "910b", changed))


@pytest.mark.parametrize("family", ["910_93", "950pr"])
@pytest.mark.parametrize(("op", "blocks", "four"), VARIANTS)
def test_quantised_products_are_for_the_950_only(op: str, blocks: str, four: bool, family: str) -> None:
    sentence = refusal(op, Target(family), **quantised(op, blocks, four))
    assert (sentence is None) == (family == "950pr"), sentence
    assert sentence is None or re.search(r"takes (no FP|int8 for x1)", sentence), sentence


def test_generated_invalid_calls_are_refused_with_a_sentence() -> None:
    rng = random.Random(20260)
    accepted, kinds, ops_ = set(), Counter[str](), set()
    for _ in range(400):
        op, family, call, what = broken(rng)
        sentence = refusal(op, Target(family), **call)
        if sentence is None:
            accepted.add((op, family, what))
        else:
            assert re.fullmatch(r"torch_npu's npu_\w+ .+\.", sentence, re.DOTALL), sentence
        kinds[what.split(" ")[0]] += 1
        ops_.add(op)
    assert not accepted, sorted(accepted)
    assert set(kinds) == set(KINDS) and min(kinds.values()) >= 30 and ops_ == set(CHECKS), kinds


@pytest.mark.parametrize(
    ("release", "taken"),
    [(None, False), ("9.1.0", False), ("9.2.0.alpha1", False), ("9.2.0.beta1", True), ("9.2.0", True)],
)
def test_a_release_decides_about_the_bound_of_scales(release: str | None, taken: bool) -> None:
    sentence = _ask("npu_dynamic_mx_quant", "950dt", {"max_low_bound": 1e-4}, release)
    assert (sentence is None) == taken
    assert (
        taken
        or f"ignores max_low_bound before CANN 9.2.0-beta.1, and this CANN is {release or 'of unknown'}"
        in str(sentence).replace("9.2.0a1", "9.2.0.alpha1")
    )


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"dst_type": 296}, "is used for float8_e4m3fn (292) here, not 296"),
        ({"scale_alg": 2}, "takes scale_alg 0 or 1 for FP8, not 2"),
        ({"axis": 2}, "takes an axis of input, not 2"),
        ({"scale_alg": 0, "max_low_bound": 0.01}, "takes max_low_bound with scale_alg 1 only, not 0"),
        ({"max_low_bound": -0.01}, "takes a max_low_bound from 0 on, not -0.01"),
        ({"dst_type_max": 6.0}, "takes dst_type_max 0 for FP8, not 6.0"),
    ],
)
def test_scalars_of_quantisation(changed: dict[str, Any], sentence: str) -> None:
    assert sentence in str(_ask("npu_dynamic_mx_quant", "950pr", changed, "9.2.0"))


@pytest.mark.parametrize(
    ("op", "blocks", "four", "changed", "sentence"),
    [
        (
            "npu_quant_matmul",
            "MX",
            True,
            {"x2": Spec((96, 160), torch.uint8)},
            "FP4 with x1 as it is and x2 transposed",
        ),
        (
            "npu_quant_matmul",
            "MX",
            True,
            {"x1": Spec((6, 16), torch.uint8), "x2": Spec((16, 160), torch.uint8, True)},
            "an even number of blocks of 32 columns of FP4, not 32 columns",
        ),
        ("npu_quant_matmul", "MX", True, {"x2_dtype": None}, "takes int8 or float8_e4m3fn for x2, not uint8"),
        (
            "npu_quant_matmul",
            "MX",
            False,
            {"scale_dtype": None},
            "takes E8M0 for both pertoken_scale and scale, or for none",
        ),
        (
            "npu_quant_matmul",
            "MX",
            False,
            {"group_sizes": [1, 128, 128]},
            "E8M0 scales with blocks of 32, and float32 with",
        ),
        (
            "npu_quant_matmul",
            "G-B",
            False,
            {"scale": Spec((2, 2), torch.float32)},
            "both transposed in memory or neither",
        ),
        ("npu_quant_matmul", "K-C", False, {"pertoken_scale": None}, "is used with a scale per row of FP8 here"),
        ("npu_grouped_matmul", "MX", True, {"x_dtype": 290}, "is used with 296 (FP4 pairs) for x_dtype here, not 290"),
        ("npu_grouped_matmul", "MX", True, {"weight_dtype": None}, "takes float8_e4m3fn for weight, not uint8"),
        (
            "npu_grouped_matmul",
            "G-B",
            False,
            {"per_token_scale": None},
            "scales of both operands here, and one is missing",
        ),
        ("npu_grouped_matmul", "G-B", False, {"output_dtype": None}, "needs an output_dtype for quantised operands"),
        ("npu_grouped_matmul", "G-B", False, {"group_type": 2}, "is used with scales for group_type 0 here, not 2"),
        ("npu_grouped_matmul", "G-B", False, {"bias": [Spec((3, 160), torch.float32)]}, "takes no bias with scales"),
    ],
)
def test_near_misses_of_quantised_products(
    op: str, blocks: str, four: bool, changed: dict[str, Any], sentence: str
) -> None:
    assert sentence in str(refusal(op, Target("950pr"), **{**quantised(op, blocks, four), **changed}))


def test_a_release_decides_about_a_missing_value() -> None:
    sfa = "npu_sparse_flash_attention"
    assert "of unknown release" in str(_ask(sfa, "910b", {"value": None}))
    assert "9.1.0" in str(_ask(sfa, "910b", {"value": None}, "9.1.0"))
    assert _ask(sfa, "910b", {"value": None}, "9.2.0") is None
    assert _ask(sfa, "910b", {"value": None}, "9.10.RC1") is None


@pytest.mark.parametrize(
    ("older", "newer"),
    [("8.0.RC3", "8.0.0"), ("8.9.0", "8.10.0"), ("8.2.RC1", "8.2.RC2"), ("8.3.0.alpha1", "8.3.0"), ("8.5", "8.5.1")],
)
def test_releases_compare_as_versions(older: str, newer: str) -> None:
    a, b = soc.cann(older), soc.cann(newer)
    assert isinstance(a, Version) and isinstance(b, Version) and a < b


def test_texts_without_a_release() -> None:
    assert soc.cann("not known") is None and soc.cann(None) is None and soc.cann("") is None


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Ascend910B1", "910b"),
        ("Ascend910B4-1", "910b"),
        ("Ascend910_9382", "910_93"),
        ("Ascend950PR_9599", "950pr"),
        ("Ascend950DT_9582", "950dt"),
        ("Ascend910_9589", "950pr"),
        ("Ascend310P3", None),
        ("Ascend910A", None),
    ],
)
def test_processor_names(name: str, family: str | None) -> None:
    assert soc.family(name) == family


def test_an_op_without_a_converter_is_refused_in_graphs_only() -> None:
    call = valid("npu_moe_gating_top_k_softmax_v2", "910b")
    assert refusal("npu_moe_gating_top_k_softmax_v2", Target("910b"), **call) is None
    sentence = str(refusal("npu_moe_gating_top_k_softmax_v2", Target("910b", graph=True), **call))
    assert "no working converter" in sentence
    with soc.planned("910b"), soc.in_graph():
        assert soc.current() == Target("910b", None, graph=True)


def test_symbolic_sizes_are_not_compared() -> None:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    rows_ = env.create_symintnode(
        env.create_symbol(21, source=ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC), hint=21
    )
    wrong_inner = {"x": [Spec((rows_, 47), torch.bfloat16)]}
    assert "inner size" in str(_ask("npu_grouped_matmul", "910b", wrong_inner))
    assert _ask("npu_grouped_matmul", "910b", {"x": [Spec((rows_, 48), torch.bfloat16)]}) is None
    assert not env.guards


def test_planning_for_another_processor_does_not_leak() -> None:
    assert soc.current() is None
    with soc.planned("950pr", "9.1.0") as target:
        assert soc.current() == target and soc.is_planned()
    assert soc.current() is None
    with pytest.raises(ValueError, match="'910a'; accepted are 910b, 910_93"), soc.planned("910a"):
        pass
