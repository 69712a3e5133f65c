"""Target tables: every figure has a source, options and tables agree, and the roofline is the arithmetic it claims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sympy

from ascend_deep.backend import _DEVICE_OF_TARGET, _FAMILY_OF_TARGET
from ascend_deep.lowering.targets import TARGETS, Cost, cost, predict, table
from ascend_deep.lowering.torchair_offline import DEVICES
from ascend_deep.native.torch_npu import soc
from ascend_deep.options import TARGETS as NAMES


def test_options_tables_and_families_name_the_same_processors() -> None:
    ascend = {n for n in NAMES if n.startswith("ascend")}
    assert ascend == set(TARGETS) == set(_FAMILY_OF_TARGET)
    assert {_DEVICE_OF_TARGET[n] for n in ascend} == {"npu"}
    assert set(_FAMILY_OF_TARGET.values()) == set(soc.FAMILIES) == set(DEVICES)
    for name, target in TARGETS.items():
        assert soc.family(target.device) == _FAMILY_OF_TARGET[name] == soc.family(DEVICES[_FAMILY_OF_TARGET[name]])


@pytest.mark.parametrize("name", TARGETS)
def test_every_group_of_figures_has_a_source(name: str) -> None:
    named = " ".join(TARGETS[name].sources)
    for group in ("cores", "clock", "rates", "buffers", "memory", "bandwidth"):
        assert group in named, group


def test_peaks() -> None:
    a5, a2 = TARGETS["ascend950"], TARGETS["ascend910b"]
    assert a5.peak("bf16") == pytest.approx(432.5e12, rel=1e-3)
    assert a5.peak("fp8") == pytest.approx(865e12, rel=1e-3) and a5.peak("fp4") == 2 * a5.peak("fp8")
    assert a2.peak("bf16") == pytest.approx(353.9e12, rel=1e-3)
    with pytest.raises(KeyError):
        a2.peak("fp8")


def test_decoding_is_bound_by_memory_and_prefill_by_compute() -> None:
    sizes = {"K": 8, "E": 256, "H": 7168, "I": 2048, "W": 2}
    one = predict(cost("moe_experts", T=1, **sizes), TARGETS["ascend910b"])
    many = predict(cost("moe_experts", T=65536, **sizes), TARGETS["ascend910b"])
    assert one.bound == "memory" and many.bound == "compute"
    # One token reads the weights of its eight experts, and hardly anything else.
    assert float(one.seconds) == pytest.approx(8 * 3 * 7168 * 2048 * 2 / TARGETS["ascend910b"].bandwidth, rel=1e-2)
    assert "predicted" in str(one) and "not measured" in str(one)


def test_the_number_of_tokens_may_stay_symbolic() -> None:
    tokens = sympy.Symbol("T", positive=True)
    what = cost("moe_experts", K=8, E=4, H=16, I=32, W=2)
    assert what.flops == 6 * tokens * 8 * 16 * 32 and tokens in what.bytes.free_symbols
    prediction = predict(what, TARGETS["ascend950"])
    assert prediction.seconds.free_symbols == {tokens} and "compute" in prediction.bound
    numbers = predict(what.at({"T": 9}), TARGETS["ascend950"])
    assert float(prediction.seconds.subs(tokens, 9)) == pytest.approx(float(numbers.seconds))


def test_an_op_without_a_formula_is_named() -> None:
    with pytest.raises(KeyError, match=r"no cost formula for 'moe_sort'; there are formulas for moe_experts"):
        cost("moe_sort")


def test_links_count_only_where_both_sides_are_known() -> None:
    link = Cost(sympy.Integer(1), sympy.Integer(1), sympy.Integer(10**12))
    found = predict(link, TARGETS["ascend950"])
    assert found.bound == "link" and float(found.seconds) == pytest.approx(0.5)
    assert TARGETS["ascend910b"].link is None
    assert predict(link, TARGETS["ascend910b"]).bound in ("compute", "memory")


TEXT = (Path(table.__file__).parent / "ascend950.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("cores = 32", "", "mine.toml has no 'cores'."),
        ("cores = 32", "cores = 0", "cores of mine.toml is 0; it takes a number above 0."),
        ("clock = 1.65e9", 'clock = "fast"', "clock of mine.toml is 'fast'; it takes a number above 0."),
        ("fp8 = 16384", "fp8 = -1", "fp8 of mine.toml is -1; it takes a number above 0."),
        ("l0c =", "l9 =", "mine.toml has 'l9', which is no field of a target; there are name, device, "),
        ('link = "2 TB', 'other = "2 TB', "mine.toml has 'link' and no source of 'link'."),
        ("link = 2.0e12", "", None),
    ],
)
def test_a_file_with_a_mistake_is_named_with_it(old: str, new: str, sentence: str | None) -> None:
    assert old in TEXT
    changed = TEXT.replace(old, new, 1)
    if sentence is None:
        assert table.parse(changed, "mine.toml").link is None
        return
    with pytest.raises(ValueError, match=re.escape(sentence)):
        table.parse(changed, "mine.toml")
