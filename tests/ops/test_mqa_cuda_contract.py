"""What holds of indexer ops on CUDA and can be seen without a device: strides of fakes, signatures, tolerances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ascend_deep import ops
from ascend_deep.native import logits_rows
from ascend_deep.native.triton.provider import paged_limits
from ascend_deep.ops._eager import nothing_between, signature
from ascend_deep.passes import fp8

FP8 = torch.float8_e4m3fn
OPTIONS = {"scale": 0.3, "max_seqlen_k": 0, "clean": True, "out_dtype": None}


def fakes(device: str, dtype: torch.dtype, b: int = 2, s: int = 5, t: int = 300) -> tuple[Any, ...]:
    """Positional arguments of ``mqa_logits``; call inside a fake mode."""
    new = {"device": device}
    sf = dtype == FP8
    return (
        torch.empty(b, s, 4, 32, dtype=dtype, **new), torch.empty(b, s, 4, 1, **new) if sf else None,
        torch.empty(b, t, 32, dtype=dtype, **new), torch.empty(b, t, 1, **new) if sf else None,
        torch.empty(b, s, 4, **new), None, None, None,
    )  # fmt: skip


@pytest.mark.parametrize("keys", [1, 255, 256, 257, 1000])
def test_rows_of_fp8_scores_on_cuda_are_a_tile_longer(keys: int) -> None:
    with FakeTensorMode():
        out = torch.ops.ascend_deep.mqa_logits.default(*fakes("cuda", FP8, t=keys), **OPTIONS)
    apart = logits_rows.pitch(keys)
    assert out.shape == (2, 5, keys) and out.dtype == torch.float32
    assert out.stride() == (5 * apart, apart, 1)
    assert apart % logits_rows.UNIT == 0 and 256 <= apart - keys < 512


@pytest.mark.parametrize(
    ("device", "dtype", "changes"),
    [
        ("cpu", FP8, {}),
        ("cuda", torch.bfloat16, {}),
        ("cuda", FP8, {"out_dtype": torch.bfloat16}),
        ("cuda", FP8, {"max_seqlen_k": 40}),
    ],
    ids=["cpu", "bf16", "rounded", "compressed"],
)
def test_all_other_scores_are_contiguous(device: str, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    with FakeTensorMode():
        out = torch.ops.ascend_deep.mqa_logits.default(*fakes(device, dtype), **{**OPTIONS, **changes})
    assert out.is_contiguous()


def test_padded_rows_over_a_symbolic_number_of_keys() -> None:
    """The pitch is an expression of the number of keys and adds no guard."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        keys = env.create_unbacked_symint()
        q, kv = torch.empty(1, 7, 4, 32, dtype=FP8, device="cuda"), torch.empty(1, keys, 32, dtype=FP8, device="cuda")
        out = logits_rows.empty_scores(q, kv, 0, None)
    assert not env.guards
    assert str(out.stride(1)) == str(logits_rows.pitch(keys))


def test_the_reference_keeps_the_promise_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on CUDA where no kernel takes a call; here with the rule of CUDA on the CPU."""
    rule = logits_rows.padded
    monkeypatch.setattr(logits_rows, "padded", lambda device, *rest: rule("cuda", *rest))
    q, kv, weights = torch.randn(2, 3, 4, 32).to(FP8), torch.randn(2, 70, 32).to(FP8), torch.randn(2, 3, 4)
    args = (q, None, kv, None, weights, None, torch.tensor([[70, 3, 0]]), None)
    got = ops.reference("mqa_logits")(*args, **OPTIONS)
    assert got.stride() == (3 * logits_rows.pitch(70), logits_rows.pitch(70), 1)
    monkeypatch.undo()
    want = ops.reference("mqa_logits")(*args, **OPTIONS)
    assert want.is_contiguous() and torch.equal(got, want)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_graphs_see_contiguous_scores_after_quantising(device: str) -> None:
    """Whoever reads them was traced for what the block made, a ``view`` for one."""
    mode = FakeTensorMode()
    graph = fx.Graph()
    with mode:
        values = fakes(device, FP8)
    names = ("q", "q_sf", "kv", "kv_sf", "weights")
    nodes = [graph.placeholder(n) for n in names]
    for node, value in zip(nodes, values, strict=False):
        node.meta["val"] = value
    call = graph.call_function(
        torch.ops.ascend_deep.mqa_logits.default, (*nodes, None, None, None), {**OPTIONS, "out_dtype": torch.float32}
    )
    flat = graph.call_function(torch.ops.aten.view.default, (call, [2, -1]))
    graph.output((flat, call))
    read = fp8.make_contiguous(call, mode)
    graph.lint()
    assert (read is call) == (device == "cpu")
    assert flat.args[0] is read and read.meta["val"].is_contiguous()
    with mode:
        out, _ = fx.GraphModule({}, graph)(*values[:5])
    assert out.shape == (2, 1500)


def test_the_signature_is_what_checks_can_see() -> None:
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    plain = signature((a, None), {"scale": 0.5, "fmt": "fp8"})
    assert plain is not None and plain == signature((b, None), {"scale": 0.5, "fmt": "fp8"})
    others = [
        signature((a.t().contiguous().t(), None), {"scale": 0.5, "fmt": "fp8"}),
        signature((a.double(), None), {"scale": 0.5, "fmt": "fp8"}),
        signature((a[:, :2], None), {"scale": 0.5, "fmt": "fp8"}),
        signature((a, b), {"scale": 0.5, "fmt": "fp8"}),
        signature((a, None), {"scale": 0.6, "fmt": "fp8"}),
        signature((a, None), {"scale": 0.5, "fmt": "plain"}),
    ]
    assert None not in others and plain not in others and len(set(others)) == len(others)


def test_calls_without_a_signature() -> None:
    class Tagged(torch.Tensor):
        pass

    a = torch.randn(2, 3)
    assert signature((a.as_subclass(Tagged),), {}) is None
    assert signature((a,), {"other": a}) is None
    assert signature(([a],), {}) is None
    with FakeTensorMode():
        assert signature((torch.empty(2, 3),), {}) is None


def test_tensors_of_another_device_go_through_the_dispatcher() -> None:
    def both(*args: Tensor | None) -> tuple[bool, bool]:
        return nothing_between(args), nothing_between(args, "cuda")

    assert both(torch.randn(2), None) == (True, False)
    assert both(torch.empty(2, device="meta")) == (False, False)


@pytest.mark.parametrize("name", ["mqa_logits", "mqa_topk"])
def test_fp8_sums_on_cuda_have_a_tolerance_of_their_own(name: str) -> None:
    """14 bits in the tensor cores of SM90; everywhere else the sums are those of f32."""
    op = ops.op(name)
    assert op.tolerance_for(FP8, "cpu") == op.tolerance[FP8] == op.tolerance_for(FP8, "npu")
    coarse = op.tolerance_for(FP8, "cuda")
    assert coarse.rtol == coarse.atol == 3e-3 and "14 bits" in coarse.reason
    assert op.tolerance_for(torch.bfloat16, "cuda") == op.tolerance[torch.bfloat16]


@pytest.mark.parametrize(
    ("page", "depth", "fmt", "q_dtype", "changes", "reason"),
    [
        (64, 128, "fp8", FP8, {}, None),
        (64, 128, "fp8", torch.bfloat16, {}, None),
        (3, 6, "fp8", torch.bfloat16, {}, "do not lie on 4 bytes"),
        (2, 6, "fp8", torch.bfloat16, {}, None),
        (64, 128, "fp8_ue8m0", FP8, {}, "fmt is fp8_ue8m0"),
        (64, 256, "plain", torch.bfloat16, {}, None),
        (64, 257, "plain", torch.bfloat16, {}, "D = 257"),
        (64, 128, "plain", torch.float64, {}, "float64"),
        (64, 128, "plain", torch.bfloat16, {"out_dtype": torch.float64}, "out_dtype is torch.float64"),
        (64, 128, "plain", torch.bfloat16, {"scale": 0.0}, "scale is 0.0"),
        (64, 128, "plain", torch.bfloat16, {"max_context_len": 2**31}, "counts keys in 32 bits"),
    ],
)  # fmt: skip
def test_limits_of_the_paged_kernel(
    page: int, depth: int, fmt: str, q_dtype: torch.dtype, changes: dict[str, Any], reason: str | None
) -> None:
    width = depth if fmt == "plain" else depth + 4
    cache = torch.empty(9, page, 1, width, dtype=q_dtype if fmt == "plain" else torch.uint8)
    q_sf = torch.ones(3, 2, 4, 1) if q_dtype == FP8 else None
    args = (torch.empty(3, 2, 4, depth, dtype=q_dtype), q_sf, cache, torch.ones(3, 2, 4))
    rest = (torch.ones(3, 2, dtype=torch.int32), torch.zeros(3, 5, dtype=torch.int32), None, None)
    options = {"max_context_len": 40, "scale": 0.3, "fmt": fmt, "clean": True, "out_dtype": None}
    found = paged_limits(*args, *rest, **{**options, **changes})
    assert found is None if reason is None else found is not None and reason in found and found.endswith(".")


def test_keys_of_a_paged_cache_are_contiguous() -> None:
    cache = torch.empty(9, 8, 1, 128)[..., ::2]
    args = (torch.empty(3, 1, 4, 64), None, cache, torch.ones(3, 1, 4), torch.ones(3, 1), torch.zeros(3, 5), None, None)
    found = paged_limits(*args, max_context_len=40, scale=0.3, fmt="plain")
    assert found is not None and "2 apart" in found
