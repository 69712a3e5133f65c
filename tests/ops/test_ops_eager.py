"""The short way of eager calls: taken where nothing stands between call and kernel, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_deep import ops
from ascend_deep.native.cpu.provider import CPU
from ascend_deep.ops import _op

pytestmark = pytest.mark.skipif(CPU.unavailable() is not None, reason="the C++ kernels are not built")


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def arguments(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "x": torch.randn(5, 16, dtype=dtype),
        "idx": torch.randint(0, 6, (5, 2)),
        "weights": torch.rand(5, 2),
        "w13": torch.randn(6, 24, 16, dtype=dtype) / 4,
        "b13": torch.randn(6, 24, dtype=dtype),
        "w2": torch.randn(6, 16, 12, dtype=dtype) / 4,
        "b2": torch.randn(6, 16, dtype=dtype),
    }


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that took the short way, from a first call on."""
    monkeypatch.delenv("ASCEND_DEEP_DEBUG", raising=False)
    with torch.no_grad():
        ops.moe_experts(**arguments())
    table, kernel = _op._SHORT["moe_experts"]
    taken: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        taken.append("moe_experts")
        return kernel(*args, **kwargs)

    monkeypatch.setitem(_op._SHORT, "moe_experts", (table, counted))
    return taken


def test_plain_calls_take_it_and_compute_the_same(calls: list[str]) -> None:
    a = arguments()
    expected = ops.reference("moe_experts")(
        *a.values(), None, act="silu", alpha=1.0, limit=None, interleaved=False, weight_layout="enk",
        weight_on_input=False, expert_offset=0, out_dtype=None,
    )  # fmt: skip
    torch.testing.assert_close(ops.moe_experts(**a), expected, rtol=1e-4, atol=2e-5)
    a["w2"] = torch.nn.Parameter(a["w2"])
    with torch.no_grad():
        torch.testing.assert_close(ops.moe_experts(**a), expected, rtol=1e-4, atol=2e-5)
    assert len(calls) == 2


def test_gradients_go_through_autograd(calls: list[str]) -> None:
    a = arguments()
    a["w13"].requires_grad_()
    ops.moe_experts(**a).sum().backward()
    assert a["w13"].grad is not None and not calls


def test_modes_subclasses_autocast_and_transforms_see_the_op(calls: list[str]) -> None:
    a = arguments()
    with _Seen() as seen:
        ops.moe_experts(**a)
    assert seen.names == ["ascend_deep::moe_experts"]
    with torch.autocast("cpu", torch.bfloat16):
        half = ops.moe_experts(**a)
    # Eager PyTorch casts weights and tokens; the exact result would be much closer.
    assert 1e-4 < (half - ops.moe_experts(**a)).abs().max() < 0.2
    calls.clear()

    class Tagged(torch.Tensor):
        pass

    assert isinstance(ops.moe_experts(**{**a, "x": a["x"].as_subclass(Tagged)}), Tagged)
    with torch.overrides.BaseTorchFunctionMode():
        ops.moe_experts(**a)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda t: ops.moe_experts(**{**a, "x": t}).sum())(a["x"])
    assert not calls


def test_lazily_negated_tokens_are_resolved(calls: list[str]) -> None:
    a = arguments()
    x = torch.randn(5, 16, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(ops.moe_experts(**{**a, "x": x}), ops.moe_experts(**{**a, "x": x.resolve_neg().clone()}))


def test_what_the_kernel_refuses_takes_the_long_way(calls: list[str]) -> None:
    a = arguments(torch.float64)
    assert ops.moe_experts(**a).dtype == torch.float64
    with ops.strict(), pytest.raises(RuntimeError, match="strict: no provider takes this call"):
        ops.moe_experts(**a)


def test_debug_mode_checks_ids_of_later_calls(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    a = arguments()
    a["idx"][3, 1] = 6
    ops.moe_experts(**a)
    monkeypatch.setenv("ASCEND_DEEP_DEBUG", "1")
    with pytest.raises(RuntimeError, match=r"idx\[3, 1\], of token 3, is 6"):
        ops.moe_experts(**a)


def test_another_provider_table_ends_it(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op.table, "PRIORITY", {})
    with ops.strict(), pytest.raises(RuntimeError, match="no provider is listed for device 'cpu'"):
        ops.moe_experts(**arguments())
    assert not calls
