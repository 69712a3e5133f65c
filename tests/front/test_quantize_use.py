"""Quantised layers in use: inputs of another size, biases that learn alone, another default dtype, wrong files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ascend_deep


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 300), nn.SiLU(), nn.Linear(300, 136))


@pytest.fixture(params=(torch.bfloat16, torch.float64))
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("kind", ("fp8", "fp4"))
@pytest.mark.parametrize("shape", ((5, 100), (5, 400), (2, 2, 50)))
def test_another_number_of_columns_is_named(model: nn.Sequential, kind: str, shape: tuple[int, ...]) -> None:
    ascend_deep.prepare(model, quantize=kind)
    with torch.no_grad(), pytest.raises(ValueError, match=rf"x has {shape[-1]} columns; it must have 200\."):
        model(torch.randn(shape))


@pytest.mark.parametrize("compiled", (False, True))
def test_biases_learn_where_the_input_has_no_gradient(model: nn.Sequential, compiled: bool) -> None:
    x, bias = torch.randn(6, 200), model[0].bias
    model(x).square().sum().backward()
    wanted = bias.grad.clone()
    ascend_deep.prepare(model, quantize="fp8")
    assert model[0].bias is bias
    bias.grad = None
    run = torch.compile(model, backend="ascend_deep", options={"downstream": "aot_eager"}) if compiled else model
    run(x).square().sum().backward()
    assert ((bias.grad - wanted).norm() / wanted.norm()).item() < 0.1


@pytest.mark.parametrize("kind", ("fp8", "fp4"))
def test_the_default_dtype_changes_nothing(model: nn.Sequential, kind: str, default_dtype: torch.dtype) -> None:
    x = torch.randn(5, 200)
    other = nn.Sequential(nn.Linear(200, 300), nn.SiLU(), nn.Linear(300, 136))
    other.load_state_dict(model.state_dict())
    ascend_deep.prepare(model, quantize=kind)
    with torch.no_grad():
        wanted = model(x)
        torch.set_default_dtype(default_dtype)
        ascend_deep.prepare(other, quantize=kind)
        assert torch.equal(other(x), wanted)


class Stored(nn.Module):
    """A table, a layer and a buffer that no file holds."""

    def __init__(self, rows: int = 50, out: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 64)
        self.layer = nn.Linear(64, out)
        self.register_buffer("ramp", torch.arange(64.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids) * self.ramp)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    pytest.importorskip("safetensors")
    path = tmp_path / "model.safetensors"
    ascend_deep.prepare(Stored(), quantize="fp8").save(path)
    return path


@pytest.mark.parametrize(
    ("model", "text"),
    (
        (lambda: Stored(rows=51), r"table.weight is \[50, 64\], and \[51, 64\] in the model"),
        (lambda: Stored(out=128), "layer has out_features 64, and 128 in the model"),
    ),
)
def test_files_of_other_sizes_leave_the_model_alone(file: Path, model: Callable[[], nn.Module], text: str) -> None:
    other = model()
    with pytest.raises(ValueError, match=text):
        ascend_deep.load_quantized(other, file)
    assert type(other.layer) is nn.Linear


def test_a_buffer_without_data_is_named(file: Path) -> None:
    with torch.device("meta"):
        model = Stored()
    with pytest.raises(ValueError, match="the buffer ramp of the model is on the meta device"):
        ascend_deep.load_quantized(model, file)


@pytest.mark.parametrize("kept", (7, 0.5))
def test_damaged_files_are_said_to_be(file: Path, kept: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(kept if kept > 1 else kept * len(data))])
    with pytest.raises(ValueError, match="is no safetensors file, or damaged"):
        ascend_deep.load_quantized(Stored(), file)
