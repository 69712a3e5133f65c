"""Choice of the implementation: providers, strict mode, the direct way of the dispatcher; wrong arguments."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_deep import ops
from ascend_deep.native import table
from ascend_deep.native._provider import Provider
from ascend_deep.ops import _op


class Recorder:
    """A provider that takes calls of up to ten rows and remembers them."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.provider = Provider(
            name="recorder",
            device="cpu",
            unavailable=lambda: None,
            kernels={"swiglu": self._swiglu},
            limits={"swiglu": lambda h, row_weight, **_: None if h.shape[0] <= 10 else f"h has {h.shape[0]} rows."},
        )

    def _swiglu(self, h: Tensor, row_weight: Tensor | None, **attributes: Any) -> Tensor:
        self.calls.append(attributes)
        return torch.full((h.shape[0], h.shape[1] // 2), 42.0)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    found = Recorder()
    missing = Provider(
        name="absent", device="cpu", unavailable=lambda: "libabsent is not installed.", kernels={"swiglu": id}
    )
    monkeypatch.setattr(table, "PRIORITY", {"cpu": (missing, found.provider)})
    yield found


def test_first_provider_that_fits_runs_with_every_attribute(recorder: Recorder) -> None:
    out = ops.swiglu(torch.randn(4, 6), act="swiglu_oai", alpha=1.3, limit=2.5, interleaved=True)
    assert (out == 42).all()
    assert recorder.calls == [{"act": "swiglu_oai", "alpha": 1.3, "limit": 2.5, "interleaved": True}]


def test_reference_runs_where_every_provider_refuses(recorder: Recorder) -> None:
    h = torch.randn(11, 6)
    torch.testing.assert_close(ops.swiglu(h), torch.nn.functional.silu(h[:, :3]) * h[:, 3:])
    assert not recorder.calls


def test_provider_reports_choice_and_refusals(recorder: Recorder) -> None:
    attributes = {"act": "silu", "alpha": 1.0, "limit": None, "interleaved": False}
    taken = ops.provider("swiglu", "cpu", (torch.randn(4, 6), None), attributes)
    assert taken.name == "recorder"
    assert [str(r) for r in taken.refusals] == ["absent: libabsent is not installed."]
    refused = ops.provider("swiglu", "cpu", (torch.randn(12, 6), None), attributes)
    assert refused.name == "reference"
    assert [r.reason for r in refused.refusals] == ["libabsent is not installed.", "h has 12 rows."]
    assert ops.provider("swiglu", "npu", (torch.randn(4, 6), None), attributes).name == "reference"


def test_strict_names_every_refusal(recorder: Recorder) -> None:
    small, large = torch.randn(4, 6), torch.randn(11, 6)
    with ops.strict():
        assert (ops.swiglu(small) == 42).all()
        with pytest.raises(RuntimeError) as caught:
            ops.swiglu(large)
        with ops.strict(False):
            ops.swiglu(large)
        with pytest.raises(RuntimeError):
            ops.swiglu(large)
    ops.swiglu(large)
    assert str(caught.value) == (
        "strict: no provider takes this call of ascend_deep::swiglu on cpu: "
        "absent: libabsent is not installed.; recorder: h has 11 rows."
    )


def test_strict_without_any_provider_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "PRIORITY", {})
    with ops.strict(), pytest.raises(RuntimeError, match="no provider is listed for device 'cpu'"):
        ops.swiglu(torch.randn(4, 6))


def test_strict_covers_compiled_graphs_when_they_run(recorder: Recorder) -> None:
    compiled = torch.compile(ops.swiglu, backend="aot_eager", fullgraph=True, dynamic=True)
    compiled(torch.randn(11, 6))
    with ops.strict(), pytest.raises(RuntimeError, match="strict: no provider takes"):
        compiled(torch.randn(12, 6))
    with ops.strict():
        assert (compiled(torch.randn(5, 6)) == 42).all()


def test_strict_stays_in_its_thread(recorder: Recorder) -> None:
    results: list[Any] = []
    with ops.strict():
        thread = threading.Thread(target=lambda: results.append(ops.swiglu(torch.randn(11, 6)).shape))
        thread.start()
        thread.join()
    assert results == [(11, 3)]


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_modes_see_the_op_whether_or_not_a_gradient_is_needed(grad: bool) -> None:
    """The short way around the dispatcher must not be taken where a mode, a subclass or a lazy bit wants to look."""
    h = torch.randn(4, 6, requires_grad=grad)
    with _Seen() as seen:
        ops.swiglu(h)
    assert "ascend_deep::swiglu" in seen.names


def test_lazily_negated_inputs_are_resolved() -> None:
    h = torch.randn(4, 6, dtype=torch.complex64).conj().imag
    assert h.is_neg()
    torch.testing.assert_close(ops.swiglu(h), ops.swiglu(h.resolve_neg().clone()))


def test_one_kernel_call_per_op_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    definition = ops.op("swiglu")

    def check(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        definition.check(*args, **kwargs)

    import dataclasses

    monkeypatch.setitem(_op._REGISTERED, "swiglu", dataclasses.replace(definition, check=check))
    for grad in (False, True):
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            calls.clear()
            with mode():
                ops.swiglu(torch.randn(3, 4, requires_grad=grad))
            assert len(calls) == 1


def test_functional_transforms_refuse_instead_of_giving_zeros() -> None:
    """torch has no functorch rule for autograd of a library op; passing it by would return zero gradients."""
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda t: ops.swiglu(t).square().sum())(torch.randn(5, 6))


H, IDX, MAP = torch.randn(4, 6), torch.randint(0, 3, (4, 2)), torch.randint(0, 4, (5, 2))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ops.swiglu(torch.randn(4, 5)), ValueError, "swiglu: the last size of h is 5; it must be even"),
        (lambda: ops.swiglu(torch.randn(())), ValueError, "swiglu: h has 0 dimensions"),
        (lambda: ops.swiglu(H.int()), TypeError, "swiglu: h has dtype int32"),
        (lambda: ops.swiglu(H, H), ValueError, "swiglu: row_weight has 2 dimensions"),
        (lambda: ops.swiglu(H, H[:3, 0]), ValueError, "swiglu: size 0 of row_weight is 3, but the same size of h is 4"),
        (lambda: ops.swiglu(H, act="swish"), ValueError, "swiglu: act is 'swish'; it must be one of 'silu'"),
        (lambda: ops.swiglu(H, alpha=2.0), ValueError, "swiglu: alpha is 2.0, but act 'silu' does not use it"),
        (lambda: ops.moe_permute(H, IDX[:3], num_experts=3), ValueError, "moe_permute: the number of rows of idx is 3"),
        (lambda: ops.moe_permute(H, IDX, num_experts=0), ValueError, "moe_permute: num_experts is 0"),
        (lambda: ops.moe_permute(H, IDX, num_experts=3, alignment=0), ValueError, "moe_permute: alignment is 0"),
        (lambda: ops.moe_permute(H, IDX.float(), num_experts=3), TypeError, "moe_permute: idx has dtype float32"),
        (
            lambda: ops.moe_permute(H, IDX, H[:, :3], num_experts=3),
            ValueError,
            "columns of weights is 3, but that of idx",
        ),
        (lambda: ops.moe_permute(H, IDX, x_sf=H[:2], num_experts=3), ValueError, "rows of x_sf is 2"),
        (lambda: ops.moe_permute(H.cfloat(), IDX, num_experts=3), TypeError, "x has dtype complex64"),
        (lambda: ops.moe_combine(H, MAP, order="last"), ValueError, "order is 'last'; it must be one of 'topk_first'"),
        (lambda: ops.moe_combine(H, MAP, H), ValueError, "moe_combine: the number of rows of bias is 4"),
        (lambda: ops.moe_combine(H, MAP.float()), TypeError, "moe_combine: row_map has dtype float32"),
        (lambda: ops.moe_combine(H, MAP, H.to("meta")), ValueError, "moe_combine: the number of rows of bias is 4"),
        (
            lambda: torch.ops.ascend_deep.moe_combine_backward(H, MAP, 9),
            ValueError,
            "moe_combine_backward: the number of rows of grad is 4",
        ),
        (
            lambda: torch.ops.ascend_deep.swiglu(H, None, act="gleu", alpha=1.0, limit=None, interleaved=False),
            ValueError,
            "swiglu: act is 'gleu'",
        ),
    ],
)
def test_wrong_arguments_get_one_sentence(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_wrong_arguments_are_found_while_compiling() -> None:
    with pytest.raises(Exception, match="the number of rows of idx is 5, but the number of tokens of x is 4"):
        torch.compile(lambda x, i: ops.moe_permute(x, i, num_experts=3), backend="eager", fullgraph=True)(H, MAP)
