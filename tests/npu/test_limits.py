"""Limits of the vendor's ops: each from both sides, per processor; the invalid calls that the vendor's fakes take."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from packaging.version import Version

from ascend_deep.native.torch_npu import rows, soc
from ascend_deep.native.torch_npu.checks import CHECKS, Spec, refusal
from ascend_deep.native.torch_npu.soc import Target
from tests.npu.calls import EIGHT, SIDES, valid

LIMITS = [r for r in rows.ROWS if r.what not in ("products", "no_value", "eager_only")]
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


def _broken(rng: random.Random) -> tuple[str, str, dict[str, Any], str]:
    """A valid call with one tensor made wrong: another rank, an odd or different size, another dtype."""
    op = rng.choice(sorted(CHECKS))
    family = rng.choice([f for f in soc.FAMILIES if _made_for(op, f)])
    call = valid(op, family)
    tensors = [n for n, v in call.items() if isinstance(v, (Spec, list))]
    name = rng.choice([n for n in tensors if n not in ("active_expert_range",)])
    value = call[name][0] if isinstance(call[name], list) else call[name]
    kind = rng.choice(("rank", "dtype"))
    if kind == "rank":
        extra = 7 if op == "npu_swiglu" else 4 if op == "npu_quant_matmul" and name.startswith("x") else 2
        changed = Spec((*value.shape, *[3] * (extra + 1)), value.dtype)
        if op == "npu_clipped_swiglu":  # any rank from 2 on is right there
            changed = Spec((64,), value.dtype)
    else:
        wrong = torch.complex64 if value.dtype.is_floating_point else torch.float16
        changed = Spec(value.shape, wrong)
    return op, family, {name: [changed] if isinstance(call[name], list) else changed}, f"{kind} of {name}"


def test_generated_invalid_calls_are_refused_with_a_sentence() -> None:
    rng = random.Random(20260)
    accepted = []
    for _ in range(300):
        op, family, changed, what = _broken(rng)
        sentence = _ask(op, family, changed)
        if sentence is None:
            accepted.append((op, what))
        else:
            assert re.fullmatch(r"torch_npu's npu_\w+ .+\.", sentence, re.DOTALL), sentence
    assert not accepted, sorted(set(accepted))


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
