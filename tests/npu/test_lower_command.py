"""``ascend-deep lower`` and the option ``emit`` where the wheel is not, and with wrong arguments."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ascend_deep.cli import app
from ascend_deep.options import Options, OptionsError

runner = CliRunner()
no_wheel = pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here")


def _said(result: Any) -> str:
    return " ".join(result.stderr.split())


@no_wheel
def test_without_the_wheel_one_sentence_says_so(tmp_path: Path) -> None:
    result = runner.invoke(app, ["lower", "qwen3_moe", "-o", str(tmp_path / "out")])
    assert result.exit_code == 1 and not (tmp_path / "out").exists()
    assert _said(result) == (
        "ascend-deep: torch_npu cannot be used here: the package torch_npu is not installed in this environment."
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--emit", "onnx"], "--emit is 'onnx'; it takes ge."),
        (["--target", "ascend310"], "--target is 'ascend310'; lower takes ascend950, ascend950dt"),
        (["--target", "cuda"], "--target is 'cuda'; lower takes ascend950, ascend950dt"),
    ],
)
def test_wrong_arguments_end_with_two(arguments: list[str], sentence: str) -> None:
    result = runner.invoke(app, ["lower", "qwen3_moe", *arguments])
    assert result.exit_code == 2 and sentence in _said(result)


def test_the_option_needs_an_ascend_target() -> None:
    with pytest.raises(OptionsError, match="option 'emit' is 'ge' for target 'auto'; it takes one of ascend950"):
        Options.parse({"emit": "ge"})
    with pytest.raises(OptionsError, match="option 'emit' names the value 'hivm'"):
        Options.parse({"emit": "hivm", "target": "ascend950"})
    assert Options.parse({"emit": "ge", "target": "ascend910_93"}).emit_to == "ascend_deep_ge"


@no_wheel
def test_emitting_without_the_wheel_fails_in_one_sentence(tmp_path: Path) -> None:
    options = {"emit": "ge", "emit_to": str(tmp_path), "target": "ascend950", "downstream": "eager"}
    compiled = torch.compile(lambda x: x.softmax(-1).topk(3, -1), backend="ascend_deep", options=options)
    with pytest.raises(Exception, match="torch_npu cannot be used here: the package torch_npu is not installed"):
        compiled(torch.randn(5, 8))


def test_a_plan_for_ascend_names_the_provider_and_its_refusals() -> None:
    import ascend_deep

    def router(x: torch.Tensor) -> Any:
        weights, idx = x.softmax(-1).topk(3, -1)
        return weights / weights.sum(-1, keepdim=True), idx

    plan = {"target": "ascend950", "downstream": "eager", "enable": ["router"]}
    report = ascend_deep.explain(router, torch.randn(5, 16), options=plan)
    assert [m.provider for m in report.matches] == ["torch_npu"]
    # Two experts: fewer than the vendor's op takes in a group.
    report = ascend_deep.explain(lambda x: x.softmax(-1).topk(1, -1), torch.randn(5, 2), options=plan)
    assert [m.provider for m in report.matches] == ["reference"]
    refusals = str([m.provider_refusals for m in report.matches])
    assert "torch_npu's npu_moe_gating_top_k takes at least 3 for the number of experts in a group, not 2" in refusals


def test_what_cannot_be_lowered_is_named_with_the_limit() -> None:
    from ascend_deep.lowering.torchair import NoGraphEngineOp, expand
    from ascend_deep.native.torch_npu import soc

    x, w13, w2 = torch.randn(5, 8), torch.randn(3, 24, 8), torch.randn(3, 8, 12)
    args = (x, torch.randint(0, 3, (5, 2)), torch.rand(5, 2), w13, None, w2, None, None)
    attributes = {
        **{"act": "silu", "alpha": 1.0, "limit": None, "interleaved": False, "weight_layout": "enk"},
        **{"weight_on_input": False, "expert_offset": 0, "out_dtype": torch.float64},
    }
    with (
        soc.planned("910b"),
        pytest.raises(
            NoGraphEngineOp, match=r"moe_experts cannot be lowered to the graph engine: .*float64 is asked for"
        ),
    ):
        expand("moe_experts", *args, **attributes)


def test_a_reference_body_that_is_traced_changes_nothing_in_place() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from ascend_deep import ops
    from ascend_deep.lowering.torchair import expand
    from ascend_deep.native.torch_npu import soc

    x, idx = torch.randn(5, 8), torch.randint(0, 4, (5, 2))
    args, attributes = (x, None, idx, None), {"num_experts": 3, "expert_offset": 0, "alignment": 4}
    with soc.planned("910b"):
        graph = make_fx(lambda x, idx: expand("moe_permute", x, None, idx, None, **attributes))(x, idx)
    changed = [
        n for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
    ]
    assert [n for n in changed if n.target is not torch.ops.aten.copy_.default] == []
    for got, want in zip(graph(x, idx), ops.reference("moe_permute")(*args, **attributes), strict=True):
        assert torch.equal(got, want)
