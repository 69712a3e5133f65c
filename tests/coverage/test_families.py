"""The registry of families against the installed transformers: none is missing, and every one builds and runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ascend_deep.coverage import build
from ascend_deep.coverage.cells import Cell, Result, cells_of
from ascend_deep.coverage.families import FAMILIES, Family, find
from ascend_deep.coverage.measure import first_tensor

_EXPERTS = re.compile(
    r"use_experts_implementation|^class \w*(Experts|SparseMLP|NaiveMoe|CDMoE|MoE|MoeBlock|MoEBlock)\(", re.M
)


def _folders_with_experts() -> set[str]:
    import transformers

    models = Path(transformers.__file__).parent / "models"
    return {f.parent.name for f in models.glob("*/modeling_*.py") if _EXPERTS.search(f.read_text(encoding="utf-8"))}


def test_families_are_complete():
    assert {f.folder for f in FAMILIES} == _folders_with_experts()


def test_names_are_unique_and_a_third_is_a_third():
    names = [f.name for f in FAMILIES]
    assert len(set(names)) == len(names)
    assert 0.25 < sum(f.third for f in FAMILIES) / len(FAMILIES) < 0.4


def test_an_unknown_family_is_named_with_a_guess():
    with pytest.raises(
        ValueError, match=r"^family is 'mixtrl'; transformers has no experts of that name\. Did you mean mixtral"
    ):
        find("mixtrl")


def test_every_family_builds_and_runs_its_experts():
    for family in FAMILIES:
        built = build.build(family, "eager")
        assert build.moe_layers(family, built.model, built.config) >= 1, family.name
        assert build.blocks_of(family, built.model), family.name
        with torch.no_grad():
            output = first_tensor(built.model(**build.inputs(family, built.config)))
        assert bool(output.isfinite().all()) and float(output.std()) > 1e-3, family.name


def _routed(family: Family) -> tuple[torch.Tensor, torch.nn.Module]:
    """Tokens per expert in the first MoE layer, and the model."""
    built = build.build(family, "eager")
    experts = build.experts_of(family, built.model)[0]
    seen: list[torch.Tensor] = []
    experts.register_forward_hook(lambda module, args, output: seen.append(args[1].flatten()))
    with torch.no_grad():
        built.model(**build.inputs(family, built.config))
    return torch.bincount(seen[0], minlength=8), built.model


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "gpt_oss"])
def test_routing_is_uneven_and_nothing_is_left_at_its_neutral_value(name):
    counts, model = _routed(find(name))
    assert int(counts.max()) > int(counts.min()) + 2
    flat = [n for n, p in model.named_parameters() if p.numel() > 1 and float(p.detach().std()) == 0]
    assert not flat
    bias = [b for n, b in model.named_buffers() if "correction_bias" in n]
    assert all(float(b.detach().std()) > 0.03 for b in bias) and (bias or name != "deepseek_v3")


def test_builds_are_equal_whatever_the_implementation():
    a, b = (build.build(find("glm4_moe"), i).model for i in ("eager", "grouped_mm"))
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert torch.equal(x, y), name


def test_hashed_layers_send_tokens_to_different_experts():
    counts, _ = _routed(find("deepseek_v4-hash"))
    assert int((counts > 0).sum()) > 4


def test_cells_of_a_family():
    assert len(list(cells_of(find("mixtral")))) == 12
    own = list(cells_of(find("dbrx")))
    assert {c.implementation for c in own} == {"own", "prepared"} and len(own) == 8
    assert [c.key for c in cells_of(find("dbrx"), ("prepared",), ("training",), ("static",))] == [
        "dbrx/prepared/training/static"
    ]


def test_results_survive_json():
    cell = Cell("mixtral", "grouped_mm", "training", "dynamic")
    result = Result(cell, "partial", 2, {"moe_route": 2}, {"moe_experts": "it cannot."}, 0.25, 3, 1.5)
    assert Result.from_dict(result.to_dict()) == result
    assert Cell.parse(cell.key) == cell and cell.way == "grouped_mm/training/dynamic"


def test_builds_of_a_family_have_the_same_weights() -> None:
    """transformers leaves the experts of this one uninitialised."""
    family = find("qwen3_omni_moe-talker")
    junk = torch.full((8, 80, 64), 3.0)
    first = dict(build.build(family, "eager").model.named_parameters())
    del junk
    for name, parameter in build.build(family, "eager").model.named_parameters():
        assert torch.equal(parameter, first[name]), name
