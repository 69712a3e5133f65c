"""prepare(quantize=...): experts of hand-written loops are quantised as a whole; everything around them stays."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ascend_deep
from ascend_deep import quantize_loops
from ascend_deep.ops.activations import ACTIVATIONS
from ascend_deep.quantize import Quantized, Refused, calc_diff, linears
from ascend_deep.quantize_recipes import recipe_for
from ascend_deep.quantize_routers import routers
from tests.front import loop_blocks as blocks

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def swapped() -> nn.Module:
    """A block whose loop is one call already: finding it takes seconds, so all tests copy this one."""
    model = nn.Sequential(blocks.Interleaved(), nn.Linear(blocks.HIDDEN, 40)).eval()
    assert len(ascend_deep.prepare(model).swapped) == 1
    return model


def quantised(swapped: nn.Module, kind: str, **options: Any) -> tuple[nn.Module, list[Quantized], list[Refused]]:
    """A copy with quantised experts, what was done, and what was left."""
    model = copy.deepcopy(swapped)
    fields = {"exclude": (), "keep_master": False, **options}
    return model, *quantize_loops.quantise(model, ["0"], recipe_for(kind, "cpu", model), **fields)


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def tokens() -> Tensor:
    return torch.randn(2, 9, blocks.HIDDEN)


def test_what_the_experts_compute(swapped: nn.Module) -> None:
    """The quantised weights in a formula of their own, with the router's choice as it was; compiled as well."""
    model, (entry,), left = quantised(swapped, "fp4")
    assert left == [] and entry.module == "0" and 0 < entry.output_error < 4e-2 and 0 < entry.weight_error < 2e-2
    block, x = model[0], tokens()
    experts = block.quantized_experts
    w13, w2 = (
        experts.recipe.dequantise(getattr(experts, f"{n}_q"), getattr(experts, f"{n}_scale_inv"))
        for n in ("gate_up_proj", "down_proj")
    )
    want = torch.zeros(18, blocks.HIDDEN)
    with torch.no_grad():
        _, weights, idx = block.router(x.flatten(0, 1))
        for t, token in enumerate(x.flatten(0, 1)):
            for e, weight in zip(idx[t], weights[t], strict=True):
                h = w13[e] @ token + experts.gate_up_proj_bias[e]
                inner = ACTIVATIONS["swiglu_oai"].forward(h[::2], h[1::2], 1.375, 2.25)
                want[t] += weight * (w2[e] @ inner + experts.down_proj_bias[e])
    got = run(block, x)
    assert calc_diff(got.flatten(0, 1), 0.5 * want) < 2e-3  # of rounding activations
    held = dict(block.named_parameters())
    assert not any(n.startswith("experts.") for n in held) and "quantized_experts.down_proj_q" in held
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="ascend_deep", fullgraph=True, options={"downstream": "eager"})
    torch.testing.assert_close(run(compiled, x), got, rtol=1e-3, atol=1e-3)
    assert ascend_deep.last_report().counts()["m_grouped_gemm_scaled"] == 2


def test_copies_conversions_and_files(swapped: nn.Module, tmp_path: Any) -> None:
    model, entries, _ = quantised(swapped, "fp8")
    x = tokens()
    want = run(model, x)
    assert not torch.equal(want, run(swapped, x)) and calc_diff(want, run(swapped, x)) < 1e-2
    half = copy.deepcopy(model).to(BF16)
    assert half[0].quantized_experts.gate_up_proj_q.dtype == torch.float8_e4m3fn
    assert calc_diff(run(half, x.to(BF16)).float(), want) < 1e-2
    assert torch.equal(run(copy.deepcopy(model), x), want)
    prepared = ascend_deep.Prepared(model, (), (), tuple(entries))
    prepared.save(tmp_path / "m.safetensors")
    other = copy.deepcopy(swapped)
    for parameter in other.parameters():
        parameter.data.normal_()
    loaded = ascend_deep.load_quantized(other, tmp_path / "m.safetensors")
    assert torch.equal(run(other, x), want) and loaded.quantized == prepared.quantized
    with pytest.raises(ValueError, match="is of another model: 0: it has no loop over experts"):
        ascend_deep.load_quantized(nn.Sequential(nn.Tanh(), nn.Linear(16, 40)), tmp_path / "m.safetensors")


def test_restore_with_and_without_the_originals(swapped: nn.Module) -> None:
    x = tokens()
    model, entries, _ = quantised(swapped, "fp8", keep_master=True)
    keys, want = list(swapped.state_dict()), run(swapped, x)
    assert list(model.state_dict()) != keys and not torch.equal(run(model, x), want)
    ascend_deep.Prepared(model, (), (), tuple(entries)).restore()
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(run(model, x), want)  # its own loop
    model, entries, _ = quantised(swapped, "fp8")
    quant = run(model, x)
    with pytest.raises(RuntimeError, match="original weights of 1 quantised layers, 0 among them, were not kept"):
        ascend_deep.Prepared(model, (), (), tuple(entries)).restore()
    assert torch.equal(run(model, x), quant)


def test_prepare_takes_loops_and_the_layers_around_them(swapped: nn.Module) -> None:
    model = copy.deepcopy(swapped)
    prepared = ascend_deep.prepare(model, quantize="fp8", exclude=["proj"])
    assert [(q.module, q.kind) for q in prepared.quantized] == [("0", "Interleaved"), ("1", "Linear")]
    assert prepared.swapped == () and [r.module for r in prepared.left] == ["0.router.proj"]
    again = ascend_deep.prepare(model, quantize="fp8", exclude=["proj"])
    assert again.quantized == again.swapped == ()
    assert linears(model, recipe_for("fp8", "cpu", model), ["proj"], False)[0] == []


def _not_finite(model: nn.Module) -> None:
    next(model[0].experts.parameters()).data[1, 1] = float("nan")


def _shared(model: nn.Module) -> None:
    model[1].weight = next(model[0].experts.parameters())


def _reads(model: nn.Module) -> None:
    kind = next(model[0].experts[2].parameters())
    name = next(n for n, p in model[0].experts[2].named_parameters() if p is kind)
    model[0].router.register_forward_pre_hook(lambda m, a: model[0].experts[2].get_parameter(name).dtype and None)


LEFT = {
    "excluded": (lambda model: None, {"exclude": ["0"]}, "it is excluded by '0' in exclude."),
    "not finite": (_not_finite, {}, "of its experts has values that are not finite."),
    "shared": (_shared, {}, "a parameter of its experts is shared with 1, which reads it too."),
    "read by others": (_reads, {}, "it does not run without its experts' parameters: "),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_stays_in_full_precision(swapped: nn.Module, case: str) -> None:
    change, options, words = LEFT[case]
    model = copy.deepcopy(swapped)
    change(model)
    keys = list(model.state_dict())
    fields = {"exclude": (), "keep_master": False, **options}
    done, ((path, kind, reason),) = quantize_loops.quantise(model, ["0"], recipe_for("fp8", "cpu", model), **fields)
    assert done == [] and (path, kind) == ("0", "Interleaved") and words in reason
    assert list(model.state_dict()) == keys
    if case != "not finite":
        torch.testing.assert_close(run(model[0], x := tokens()), run(swapped[0], x))


def test_a_call_that_was_not_tested_raises(swapped: nn.Module) -> None:
    model, _, _ = quantised(swapped, "fp8")
    model[0]._ascend_deep_loop.modes = (False,)
    with pytest.raises(RuntimeError, match="0: its experts are quantised, and its loop was not tested for this call"):
        run(model.train(), tokens())
    with pytest.raises(RuntimeError, match="have no gradient"):
        model.eval()(tokens().requires_grad_())


def _hook(model: nn.Module) -> None:
    model[0].experts[1].register_forward_hook(lambda m, a, y: 5 * y)


def _another(model: nn.Module) -> None:
    model[0].experts[1] = nn.Linear(blocks.HIDDEN, blocks.HIDDEN)


def _parameter(model: nn.Module) -> None:
    holder, name = vars(model[0])["_ascend_deep_loop"].holders[-1]
    setattr(holder, name, nn.Parameter(torch.randn(3)))


@pytest.mark.parametrize(("change", "words"), [
    (_hook, "a hook was attached"), (_another, "was replaced after prepare"), (_parameter, "was given to one"),
])  # fmt: skip
@pytest.mark.parametrize("keep_master", [False, True])
def test_a_change_of_an_expert_raises(swapped: nn.Module, change: Any, words: str, keep_master: bool) -> None:
    """In eager mode, in a graph that was compiled before, and in copies that were made before and after."""
    model, _, _ = quantised(swapped, "fp8", keep_master=keep_master)
    x = tokens()
    want, early = run(model, x), copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="ascend_deep", fullgraph=True, options={"downstream": "eager"})
    torch.testing.assert_close(run(compiled, x), want, rtol=1e-3, atol=1e-3)
    change(model)
    for changed in (model, compiled, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=words):
            run(changed, x)
    assert torch.equal(run(early, x), want)
    if change is not _parameter:
        change(early)
        with pytest.raises(RuntimeError, match=words):
            run(early, x)


class _Shared(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        second.experts = first.experts

    def forward(self, x: Tensor) -> Tensor:
        return self.second(0.05 * self.first(x))


def test_blocks_with_the_same_experts_stay(swapped: nn.Module) -> None:
    model = _Shared(copy.deepcopy(swapped[0]), blocks.Interleaved().eval())
    x, paths = tokens(), ["first"]
    keys, want = list(model.state_dict()), run(model, x)
    done, left = quantize_loops.quantise(model, paths, recipe_for("fp8", "cpu", model), (), False)
    assert done == [] and [p for p, _, _ in left] == paths
    assert left[0][2] == "not quantised: its experts are also those of second, which runs them too."
    assert list(model.state_dict()) == keys and torch.equal(run(model, x), want)


def test_routers_are_left_whatever_their_names_are(swapped: nn.Module) -> None:
    model = copy.deepcopy(swapped)
    proj = model[0].router.proj
    model[0].router.proj = nn.Sequential(nn.Linear(blocks.HIDDEN, 10), nn.Tanh(), nn.Linear(10, proj.out_features))
    found = routers(model)
    assert set(found) == {"0.router.proj.0", "0.router.proj.2"}
    assert "reaches the weights of the experts" in found["0.router.proj.0"]
    assert f"an output for each of the {proj.out_features} experts" in found["0.router.proj.2"]
    x = tokens()
    want = run(model, x)
    prepared = ascend_deep.prepare(model, quantize="fp8")
    assert [q.module for q in prepared.quantized] == ["0", "1"] and routers(model) == found
    assert calc_diff(run(model, x), want) < 1e-2
    again = ascend_deep.prepare(model, quantize="fp8")
    assert again.quantized == () and {r.module for r in again.left} >= set(found)
    every = ascend_deep.prepare(model, quantize="fp8", exclude=())  # who asks for it gets it
    assert {q.module for q in every.quantized} == set(found)


def test_a_folder_that_is_not_there(swapped: nn.Module, tmp_path: Any) -> None:
    prepared = ascend_deep.Prepared(swapped, (), ())
    with pytest.raises(FileNotFoundError, match=r"^save: path is .*and there is no folder .*none\.$"):
        prepared.save(tmp_path / "none" / "m.safetensors")
    with pytest.raises(IsADirectoryError, match=r"^save: path is .*which is a folder"):
        prepared.save(tmp_path)


def test_pickling_says_what_to_do_instead(swapped: nn.Module) -> None:
    model, _, _ = quantised(swapped, "fp8")
    for write in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(pickle.PicklingError, match=r"quantised, .* write it with Prepared\.save"):
            write(model)
