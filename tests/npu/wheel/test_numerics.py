"""Our ops through the provider's kernels, on CPU kernels under the vendor's ops, against their references.

Every vendor call on the way is also asked of our limits with the tensors it really gets: what is emitted is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ascend_deep import ops
from ascend_deep.native.torch_npu import provider, soc
from ascend_deep.native.torch_npu.provider import REFUSED_AT_RUN_TIME, TORCH_NPU
from tests.npu.rig.emitted_calls import Emitted

# The least number of sample calls that have to be computed, and the vendor ops that have to take part.
EXPECTED = {
    "moe_route": (10, {"npu_moe_gating_top_k", "npu_moe_gating_top_k_softmax_v2"}),
    "moe_permute": (1, {"npu_moe_init_routing_v2"}),
    "moe_combine": (3, {"npu_moe_finalize_routing"}),
    "moe_experts": (15, {"npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_swiglu", "npu_moe_finalize_routing"}),
    "swiglu": (3, {"npu_swiglu"}),
    "gemm_bf16": (1, set()),
}


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _run(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: soc.Target) -> tuple[Any, set[str]] | str:
    """The kernel's result and the vendor ops it called, or why it is refused."""
    reason = TORCH_NPU.refusal(name, args, kwargs)
    if reason is not None:
        assert reason.reason.endswith(".")
        return reason.reason
    with Emitted(target) as emitted:
        out = TORCH_NPU.kernels[name](*args, **kwargs)
    return out, emitted.seen


def _same(name: str, got: Any, want: Any, dtype: torch.dtype) -> None:
    tolerance = ops.op(name).tolerance[dtype]
    for a, b in zip(_tuple(got), _tuple(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous() == b.is_contiguous()
        torch.testing.assert_close(a, b, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)


@pytest.mark.parametrize("family", ["910b", "950pr"])
@pytest.mark.parametrize("name", EXPECTED)
def test_samples_equal_the_reference(name: str, family: str) -> None:
    definition = ops.op(name)
    computed, seen = 0, set()
    with soc.planned(family) as target:
        for sample in definition.samples():
            if any(isinstance(a, torch.Tensor) and a.numel() and not _finite(a) for a in sample.args):
                continue  # NaN and infinities: the vendor's documents promise nothing
            result = _run(name, sample.args, dict(sample.kwargs), target)
            if isinstance(result, str):
                continue
            computed += 1
            seen |= result[1]
            _same(name, result[0], definition.reference(*sample.args, **sample.kwargs), sample.args[0].dtype)
    least, wanted = EXPECTED[name]
    assert computed >= least, computed
    assert wanted <= seen, seen


def _finite(t: torch.Tensor) -> bool:
    return not t.is_floating_point() or bool(t.to(torch.float32).isfinite().all())


@pytest.mark.parametrize("family", ["910b", "950pr"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renorm", ["none", "sum", "clamp"])
def test_routing_with_bias_and_groups(family: str, scoring: str, renorm: str) -> None:
    logits, bias = torch.randn(23, 32) * 2, torch.randn(32) * 0.3
    attributes = {
        **{"topk": 5, "scoring": scoring, "select": "scores", "renorm": renorm, "eps": 1e-3, "scale": 2.5},
        **{"n_group": 8, "topk_group": 3, "group_score": "top2", "group_fill": "neg_inf"},
    }
    with soc.planned(family) as target:
        result = _run("moe_route", (logits, bias), attributes, target)
    assert not isinstance(result, str), result
    _same("moe_route", result[0], ops.reference("moe_route")(logits, bias, **attributes), torch.float32)


@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
@pytest.mark.parametrize("select", ["logits", "scores"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_routing_in_graphs_without_a_vendor_op(scoring: str, select: str, fill: str) -> None:
    """Choices that the vendor's op does not make are written out; the bias is so low that a masked zero can win."""
    logits, bias = torch.randn(29, 24) * 2, torch.randn(24) - 1.5
    attributes = {
        **{"topk": 5, "scoring": scoring, "select": select, "renorm": "sum", "eps": 1e-3, "scale": 2.5},
        **{"n_group": 4, "topk_group": 2, "group_score": "top2", "group_fill": fill},
    }
    with soc.planned("950pr"), soc.in_graph():
        target = soc.current()
        assert target is not None
        result = _run("moe_route", (logits, bias), attributes, target)
    assert not isinstance(result, str), result
    vendor = select == "scores" and fill == "neg_inf"
    assert ("npu_moe_gating_top_k" in result[1]) == vendor
    (weights, ids), (_, want) = result[0], ops.reference("moe_route")(logits, bias, **attributes)
    # Masked experts tie at zero, and topk chooses among ties as it likes: the scores of the choice have to be the same.
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = (logits if select == "logits" else scores) + bias
    kept = torch.zeros(29, 4).scatter(1, choice.view(29, 4, 6).topk(2).values.sum(-1).topk(2).indices, 1.0)
    mask = kept.repeat_interleave(6, 1) > 0
    choice = torch.where(mask, choice, 0.0 if fill == "zero" else -torch.inf)
    torch.testing.assert_close(choice.gather(1, ids), choice.gather(1, want))
    if fill == "zero":
        assert not mask.gather(1, ids).all()
    chosen = (logits if select == "logits" else scores).gather(1, ids)
    if select == "logits":
        chosen = chosen.softmax(-1) if scoring == "softmax" else chosen.sigmoid()
    torch.testing.assert_close(weights, 2.5 * chosen / (chosen.sum(-1, keepdim=True) + 1e-3))


def test_a_nan_is_chosen_last_where_the_choice_is_written_out() -> None:
    logits = torch.randn(5, 8)
    logits[2, :3] = torch.nan
    attributes = {
        **{"topk": 5, "scoring": "sigmoid", "select": "logits", "renorm": "none", "eps": 0.0, "scale": 0.7},
        **{"n_group": 1, "topk_group": 1, "group_score": "max", "group_fill": "neg_inf"},
    }
    with soc.planned("910_93"), soc.in_graph():
        target = soc.current()
        assert target is not None
        result = _run("moe_route", (logits, None), attributes, target)
    assert not isinstance(result, str), result
    _same("moe_route", result[0], ops.reference("moe_route")(logits, None, **attributes), torch.float32)


@pytest.mark.parametrize("family", ["910b", "950pr"])
@pytest.mark.parametrize("act", ["silu", "swiglu_oai", "silu_clamp", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_where_most_slots_are_elsewhere(family: str, act: str, dtype: torch.dtype) -> None:
    """Ids of other ranks, an expert without tokens, biases, a limit; what the vendor leaves undefined is NaN."""
    t, k, e, h, i = 19, 3, 4, 24, 16
    idx = torch.randint(-1, 11, (t, k))
    idx[idx == 5] = 6
    x = torch.randn(t, h).to(dtype)
    w13, w2 = (torch.randn(e, 2 * i, h) * 0.2).to(dtype), (torch.randn(e, h, i) * 0.2).to(dtype)
    b13, b2 = torch.randn(e, 2 * i).to(dtype), torch.randn(e, h).to(dtype)
    args = (x, idx, torch.rand(t, k) + 0.1, w13, b13, w2, b2, None)
    attributes = {
        **{
            "act": act,
            "alpha": 1.702 if act == "swiglu_oai" else 1.0,
            "limit": 0.9,
            "interleaved": act == "swiglu_oai",
        },
        **{"weight_layout": "enk", "weight_on_input": False, "expert_offset": 4, "out_dtype": torch.float32},
    }
    with soc.planned(family) as target:
        result = _run("moe_experts", args, attributes, target)
    assert not isinstance(result, str), result
    _same("moe_experts", result[0], ops.reference("moe_experts")(*args, **attributes), dtype)
    clipped = "npu_clipped_swiglu" in result[1]
    assert clipped == (act in ("silu", "swiglu_oai") and family == "910b")


@pytest.mark.parametrize("layout", ["enk", "ekn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_experts(layout: str, dtype: torch.dtype) -> None:
    t, k, e, h, i = 19, 3, 5, 32, 16
    idx = torch.randint(0, 6, (t, k))  # 5 is no expert here
    idx[idx == 2] = 1  # and 2 has no tokens
    w13, w2 = torch.randn(e, 2 * i, h) * 0.2, torch.randn(e, h, i) * 0.2
    if layout == "ekn":
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    args = (torch.randn(t, h), torch.randn(t, h), idx, torch.rand(t, k) + 0.1, w13, None, w2, None, None)
    args = tuple(a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    attributes = {
        **{"act": "silu", "alpha": 1.0, "limit": None, "interleaved": False, "weight_layout": layout},
        **{"weight_on_input": False, "expert_offset": 0, "output_mask": [True] * 7},
    }
    with soc.planned("910b") as target:
        result = _run("moe_experts_backward", args, attributes, target)
    assert not isinstance(result, str), result
    got, want = result[0], ops.reference("moe_experts_backward")(*args, **attributes)
    _same("moe_experts_backward", [g.contiguous() for g in got], want, dtype)
    assert not got[2][2].any() and not got[4][2].any()


@pytest.mark.parametrize("quantised", [False, True])
def test_indexer_prefill_and_decode(quantised: bool) -> None:
    family = "950pr" if quantised else "910_93"
    q, kv = torch.randn(3, 1, 32, 128), torch.randn(3, 90, 128)
    weights = torch.randn(3, 1, 32).to(torch.bfloat16)
    q_sf = kv_sf = None
    if quantised:
        q_sf, kv_sf = torch.rand(3, 1, 32, 1) + 0.5, torch.rand(3, 90, 1) + 0.5
        q, kv = q.to(torch.float8_e4m3fn), kv.to(torch.float8_e4m3fn)
    else:
        q, kv = q.to(torch.bfloat16), kv.to(torch.bfloat16)
    attributes = {
        **{"topk": 40, "scale": 0.37, "outside": "pad", "sorted": False, "return_scores": False},
        "index_dtype": torch.int32,
    }
    for ke in (None, torch.tensor([[90], [17], [1]])):
        args = (q, q_sf, kv, kv_sf, weights, None, ke, None)
        with soc.planned(family) as target:
            result = _run("mqa_topk", args, attributes, target)
        assert not isinstance(result, str), result
        _, want = ops.reference("mqa_topk")(*args, **attributes)
        assert torch.equal(result[0][1], want)


def test_indexer_in_graphs_without_a_vendor_op() -> None:
    """Every sample that is not quantised: scores, masks, ranges per query, padding, order."""
    definition, computed = ops.op("mqa_topk"), 0
    for sample in definition.samples():
        q, kv = sample.args[0], sample.args[2]
        floating = q.dtype in (torch.float32, torch.bfloat16, torch.float16) and kv.dtype == q.dtype
        if not floating or not q.numel() or not all(_finite_or_mask(a) for a in sample.args):
            continue
        with soc.planned("950pr"), soc.in_graph():
            target = soc.current()
            assert target is not None
            result = _run("mqa_topk", sample.args, {**sample.kwargs, "return_scores": True}, target)
        assert not isinstance(result, str), (sample.name, result)
        (scores, idx), want = result[0], definition.reference(*sample.args, **{**sample.kwargs, "return_scores": True})
        assert idx.dtype == want[1].dtype and idx.shape == want[1].shape, sample.name
        tolerance = definition.tolerance[q.dtype]
        order = [t.sort(-1, descending=True).values for t in (scores, want[0])]
        torch.testing.assert_close(*order, rtol=10 * tolerance.rtol, atol=10 * tolerance.atol)
        assert torch.equal(idx < 0, want[1] < 0), sample.name
        if not sample.kwargs["sorted"]:
            assert torch.equal(idx.long() + (idx < 0) * 10**6, (idx.long() + (idx < 0) * 10**6).sort(-1).values)
        computed += 1
    assert computed >= 8


def _finite_or_mask(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or not bool(torch.isnan(value.float()).any())


def test_sparse_attention_of_absorbed_mla() -> None:
    k = torch.randn(2, 1, 33, 576)
    q, v = torch.randn(2, 4, 5, 576), k[..., :512]
    q, k = q.to(torch.bfloat16), k.to(torch.bfloat16)
    v = k[..., :512]
    idx = torch.stack([torch.randperm(33)[:9] for _ in range(10)]).view(2, 5, 9)
    idx[0, 1, 2:5] = -1
    idx[1, 3] = 77
    attributes = {"scale": 0.043, "empty": "zero", "fill": -1e38}
    with soc.planned("950pr") as target:
        result = _run("sparse_mqa_attention", (q, k, v, idx, None, None), attributes, target)
        assert not isinstance(result, str), result
        want = ops.reference("sparse_mqa_attention")(q, k, v, idx, None, None, **attributes)
        _same("sparse_mqa_attention", result[0], want, torch.bfloat16)
        copied = _run("sparse_mqa_attention", (q, k, v.clone(), idx, None, None), attributes, target)
    assert isinstance(copied, str) and "not a view of the first columns of k" in copied


@pytest.fixture()
def _forgotten() -> Iterator[None]:
    REFUSED_AT_RUN_TIME.clear()
    yield
    REFUSED_AT_RUN_TIME.clear()


@pytest.mark.usefixtures("_forgotten")
def test_a_refusal_at_run_time_is_remembered_and_other_errors_are_not_caught() -> None:
    tried = []

    def kernel(h: torch.Tensor, row_weight: None, **_: Any) -> torch.Tensor:
        tried.append(h.shape)
        raise RuntimeError("EZ9999: expert count is 128, but only 256 is supported, error code 561002")

    h = torch.randn(6, 10)
    attributes = {"act": "silu", "alpha": 1.0, "limit": None, "interleaved": False}
    guarded = provider._guarded("swiglu", kernel)
    with soc.planned("910b"):
        assert TORCH_NPU.refusal("swiglu", (h, None), attributes) is None
        torch.testing.assert_close(guarded(h, None, **attributes), ops.swiglu(h))
        again = TORCH_NPU.refusal("swiglu", (h, None), attributes)
        assert again is not None and "refused such a call earlier" in again.reason and len(tried) == 1
        assert TORCH_NPU.refusal("swiglu", (torch.randn(7, 10), None), attributes) is None

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ACL stream synchronize failed, error code 507035")

    with pytest.raises(RuntimeError, match="507035"):
        provider._guarded("swiglu", broken)(h, None, **attributes)
    assert len(REFUSED_AT_RUN_TIME) == 1
