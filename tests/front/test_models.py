"""Models for the command line: families, import paths, and one sentence for everything that cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ascend_deep.models import BadInput, load, parse_fields, parse_shape

SOURCE = """
import torch
from torch import nn

class Half(nn.Module):
    def forward(self, x): return x / 2

class Needs(nn.Module):
    def __init__(self, width): super().__init__()

instance = Half()
number = 7

def pair(): return Half(), torch.randn(3, 4)
def triple(): return Half(), (torch.randn(3, 4),), {}
def text(): return "no model"
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "models_under_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "models_under_test", raising=False)
    return "models_under_test"


@pytest.mark.parametrize("attribute", ["Half", "instance", "pair", "triple"])
def test_import_paths(module: str, attribute: str) -> None:
    loaded = load(f"{module}:{attribute}", shape=(3, 4))
    assert loaded.name == "Half" and loaded.args[0].shape == (3, 4)
    torch.testing.assert_close(loaded.model(*loaded.args, **loaded.kwargs), loaded.args[0] / 2)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("nowhere_to_be.found:x", {}, "cannot import 'nowhere_to_be.found'"),
        ("models_under_test:missing", {}, "no attribute 'missing'"),
        ("models_under_test:Needs", {}, "needs the argument 'width'"),
        ("models_under_test:number", {}, "is a int"),
        ("models_under_test:text", {}, "gives a str"),
        ("models_under_test:Half", {"layers": 2}, "--layers applies to Hugging Face families only"),
        ("models_under_test:Half", {"dtype": "int8"}, "dtype is 'int8'"),
        ("qwen3_mo", {}, "Did you mean qwen3_moe"),
        ("mixtral", {"fields": {"num_expert": 4}}, "no field 'num_expert'. Did you mean 'num_experts'?"),
        ("mixtral", {"layers": 0}, "layers is 0"),
        ("mixtral", {"shape": (1, 2, 3)}, "3 sizes"),
        ("mixtral", {"experts_implementation": "bogus"}, "cannot build MixtralConfig"),
    ],
)
def test_bad_input_is_one_sentence(module: str, name: str, options: dict[str, object], sentence: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(BadInput) as caught:
        load(name, **options)  # type: ignore[arg-type]
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["qwen3_moe", "Qwen3MoeConfig"])
def test_families_by_type_and_by_config_class(name: str) -> None:
    pytest.importorskip("transformers")
    loaded = load(
        name, layers=3, fields={"num_experts": 6}, shape=(1, 5), dtype="bfloat16", experts_implementation="batched_mm",
        training=True,
    )  # fmt: skip
    assert loaded.name == "Qwen3MoeForCausalLM" and loaded.model.training
    config = loaded.model.config
    assert (config.num_hidden_layers, config.num_experts, config._experts_implementation) == (3, 6, "batched_mm")
    assert loaded.kwargs["input_ids"].shape == (1, 5)
    assert next(loaded.model.parameters()).dtype is torch.bfloat16
    assert sum(p.numel() for p in loaded.model.parameters()) < 2_000_000


def test_same_seed_same_model() -> None:
    pytest.importorskip("transformers")
    a, b, c = (load("mixtral", layers=1, seed=s).model.lm_head.weight for s in (3, 3, 4))  # type: ignore[union-attr]
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_parse_shape_and_fields() -> None:
    assert parse_shape("2,16") == (2, 16) and parse_shape("7") == (7,) and parse_shape("1x2") == (1, 2)
    for bad in ("", "a,b", "2,-1", "2,,3"):
        with pytest.raises(BadInput, match="sizes separated by commas"):
            parse_shape(bad)
    assert parse_fields(["a=1", "b=gelu", "c=[1, 2]", "d=None", "e=x=y"]) == {
        "a": 1, "b": "gelu", "c": [1, 2], "d": None, "e": "x=y",
    }  # fmt: skip
    for bad in ("a", "=1", "a-b=1"):
        with pytest.raises(BadInput, match="name=value"):
            parse_fields([bad])
