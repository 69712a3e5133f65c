"""``allow_fp8``: operands of indexers in fp8, what that changes, and where they stay as they are."""

from __future__ import annotations

import pytest
import torch

import ascend_deep
from ascend_deep import Options, ops
from ascend_deep.passes import fp8
from ascend_deep.passes.pipeline import Pipeline
from tests.passes.mqa_spellings import INF, SCALE, K, matmul_matmul, operands

FP8 = torch.float8_e4m3fn


def choose(q, k, w, m):
    return matmul_matmul(q, k, w).masked_fill(~m, -INF).topk(K, dim=-1).indices


def score(q, k, w, m):
    return matmul_matmul(q, k, w).masked_fill(~m, -INF).softmax(-1)


def rewritten(f, tensors, **options):
    """The result of ``f`` and the match, with the recogniser alone and the graph run as it is."""
    torch._dynamo.reset()
    found = []

    def backend(gm, _):
        found.append((Pipeline(("mqa_indexer",), **options).run(gm), gm))
        return gm.forward

    out = torch.compile(f, backend=backend, fullgraph=True, dynamic=False)(*tensors)
    (outcome, gm) = found[0]
    (match,) = outcome.matches
    call = next(n for n in gm.graph.nodes if f"ascend_deep.{match.op}" in str(n.target))
    return out, match, call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operands_are_quantised(dtype) -> None:
    q, k, w, m = operands(2, 7, 21, dtype)
    with torch.no_grad():
        got, match, call = rewritten(choose, (q, k, w, m), allow_fp8=True)
    assert [call.args[i].meta["val"].dtype for i in (0, 1, 2, 3)] == [FP8, torch.float32, FP8, torch.float32]
    (q8, q_sf), (k8, k_sf) = fp8.quantised(q, q.shape[-1]), fp8.quantised(k, k.shape[-1])
    _, wanted = ops.mqa_topk(
        q8, k8, w.float(), mask=m, topk=K, q_sf=q_sf, kv_sf=k_sf, scale=SCALE, outside="rank_last", sorted=True
    )
    assert torch.equal(got, wanted)
    note = match.notes[-1]
    assert "quantised to fp8" in note and "of the chosen keys stay" in note and note.endswith(".")
    error, kept = fp8.effect(q.shape[2], q.shape[3], K, q.shape[3])
    assert f"{error:.1e}" in note and f"{kept:.1f} %" in note


def test_not_without_the_option() -> None:
    with torch.no_grad():
        _, match, call = rewritten(choose, operands(2, 7, 21, torch.bfloat16))
    assert call.args[0].meta["val"].dtype == torch.bfloat16 and call.args[1] is None
    assert not any("fp8" in note for note in match.notes)


def test_float32_stays() -> None:
    with torch.no_grad():
        got, match, call = rewritten(choose, operands(2, 7, 21), allow_fp8=True)
    assert call.args[1] is None and torch.equal(got, choose(*operands(2, 7, 21)))
    assert "only half precision is quantised" in match.notes[-1]


def test_scores_that_pass_gradients_stay() -> None:
    """Also where nothing needs a gradient yet: the graph does not say."""
    tensors = operands(2, 7, 21, torch.bfloat16)
    _, match, call = rewritten(score, tensors, allow_fp8=True)
    assert match.op == "mqa_logits" and call.args[1] is None and "gradients may flow" in match.notes[-1]
    with torch.no_grad():
        _, match, call = rewritten(score, tensors, allow_fp8=True)
    assert call.args[0].meta["val"].dtype == FP8 and "quantised to fp8" in match.notes[-1]


def test_shadow_stays() -> None:
    with torch.no_grad():
        _, match, call = rewritten(choose, operands(2, 7, 21, torch.bfloat16), allow_fp8=True, verify="shadow")
    assert call.args[1] is None and "verify='shadow'" in match.notes[-1]


@pytest.mark.parametrize("group", [32, 96])
def test_quantised_values(group) -> None:
    x = (torch.randn(3, 5, 96) * torch.logspace(-3, 3, 5)[:, None]).bfloat16()
    x[0, 0] = 0.0
    data, sf = fp8.quantised(x, group)
    assert data.dtype == FP8 and sf.shape == (3, 5, 96 // group) and bool((sf > 0).all())
    back = (data.float().unflatten(-1, (-1, group)) * sf.unsqueeze(-1)).flatten(-2)
    largest = x.float().unflatten(-1, (-1, group)).abs().amax(-1, keepdim=True).expand(3, 5, 96 // group, group)
    # Half a step of three bits of mantissa, or of the smallest step of the format at this scale.
    bound = torch.maximum(x.float().abs() / 16, sf.repeat_interleave(group, -1) * 2**-10)
    assert bool(((back - x.float()).abs() <= bound * 1.001).all())
    if group == 32:
        assert torch.equal(sf.log2(), sf.log2().round())
        assert bool((largest.flatten(-2) / sf.repeat_interleave(group, -1) <= 448).all())


def test_effect_is_what_three_bits_of_mantissa_do() -> None:
    """A product of two rounded numbers is off by up to 2 / 16; over 128 of them and 64 heads that averages out."""
    error, kept = fp8.effect(64, 128, 512, 128)
    assert 1e-3 < error < 0.1 and 80 < kept < 100
    assert fp8.effect(64, 128, 512, 128) == (error, kept)


def test_option() -> None:
    assert Options.parse({"allow_fp8": True}).key() != Options().key() and not Options().allow_fp8
    with pytest.raises(ValueError, match="allow_fp8"):
        Options.parse({"allow_fp8": "yes"})


def test_backend() -> None:
    tensors = operands(2, 7, 21, torch.bfloat16)
    run = torch.compile(choose, backend="ascend_deep", options={"allow_fp8": True, "downstream": "aot_eager"})
    with torch.no_grad():
        got, want = run(*tensors), choose(*tensors)
    match = next(m for m in ascend_deep.last_report().matches if m.op == "mqa_topk")
    assert any("quantised to fp8" in note for note in match.notes)
    same = sum(
        len(set(a) & set(b)) for a, b in zip(got.flatten(0, 1).tolist(), want.flatten(0, 1).tolist(), strict=True)
    )
    assert same > 0.8 * got.numel()
