"""Attention that looks like one over chosen keys and is not, or whose mask is needed anyway: left alone, and why."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from ascend_deep import ops
from ascend_deep.native import table
from ascend_deep.native._provider import Provider
from ascend_deep.passes import rewrite
from ascend_deep.passes.capture import capture
from ascend_deep.passes.gates import Proof, prove
from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.probe import isolated
from ascend_deep.passes.sparse_attention import RECOGNISER
from tests.passes.mqa_spellings import INF
from tests.passes.mutants import mutants
from tests.passes.test_sparse_attention import (
    SCALE,
    H,
    added_twice,
    attended,
    chosen,
    compiled,
    hidden,
    lowest,
    operands,
    repeated,
    sdpa_bool,
)

aten = torch.ops.aten


def keep(s, m):
    return m[:, None] & ~hidden(s)


def with_dropout(q, k, v, s, m):
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=keep(s, m), dropout_p=0.5)


def weights_dropped(q, k, v, s, m):
    p = (q @ repeated(k).mT).masked_fill(~keep(s, m), -INF).softmax(-1)
    return F.dropout(p, 0.5, True) @ repeated(v)


def weights_returned(q, k, v, s, m):
    p = (q @ repeated(k).mT).masked_fill(~keep(s, m), -INF).softmax(-1)
    return p @ repeated(v), p


def scores_used(q, k, v, s, m):
    x = q @ repeated(k).mT * SCALE
    return x.masked_fill(~keep(s, m), -INF).softmax(-1) @ repeated(v), x.amax(-1)


def mask_returned(q, k, v, s, m):
    mask = keep(s, m)
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask), mask


def mask_counted(q, k, v, s, m):
    mask = hidden(s)
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=~mask), mask.sum(-1)


def two_attentions(q, k, v, s, m):
    mask = keep(s, m)
    first = F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)
    return first + F.scaled_dot_product_attention(q * 2, repeated(k), repeated(v), attn_mask=mask)


def any_keys(q, k, v, s, m):
    """Indices that nobody ranked: a key may be listed twice."""
    listed = (s.abs() * 7).long()[..., :4] % s.shape[-1]
    mask = torch.zeros_like(m).scatter(-1, listed, True).unsqueeze(1)
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask) + s.topk(2)[0].sum()


def every_head_chooses(q, k, v, s, m):
    """The union of what two heads choose: both may choose the same key."""
    listed = torch.stack((s, s.flip(1)), 2).topk(3)[1].flatten(2)
    mask = torch.zeros_like(m).scatter(-1, listed, True).unsqueeze(1)
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)


def listed_again(q, k, v, s, m):
    """The best key four times."""
    mask = torch.zeros_like(m).scatter(-1, s.topk(1)[1].expand(-1, -1, 4), True).unsqueeze(1)
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)


def best_queries(q, k, v, s, m):
    """Ranked along the queries: a row of the index is no row of the choice."""
    listed = s.transpose(1, 2)[:, : s.shape[1]].topk(4, dim=1)[1].transpose(1, 2)[:, : s.shape[1]]
    mask = torch.zeros_like(m).scatter(-1, listed, True).unsqueeze(1)
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)


def the_others(q, k, v, s, m):
    """Attends to the keys that were not chosen."""
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=hidden(s), scale=SCALE)


def soft(q, k, v, s, m):
    """Keys that are not chosen count less, but count."""
    return attended(q, k, v, torch.zeros(s.shape)[:, None].masked_fill(hidden(s), -3.0))


def capped(q, k, v, s, m):
    x = 5.0 * torch.tanh(q @ repeated(k).mT * SCALE / 5.0)
    return x.masked_fill(~keep(s, m), -INF).softmax(-1) @ repeated(v)


def renormalised(q, k, v, s, m):
    p = (q @ repeated(k).mT * SCALE).softmax(-1) * keep(s, m)
    return (p / (p.sum(-1, keepdim=True) + 1e-6)) @ repeated(v)


def over_heads(q, k, v, s, m):
    return (q @ repeated(k).mT).masked_fill(~keep(s, m), -INF).softmax(1) @ repeated(v)


def overwritten(q, k, v, s, m):
    """A finite fill of the scores themselves: other gradients where a row sees nothing."""
    low = torch.finfo(q.dtype).min
    return (q @ repeated(k).mT * SCALE).masked_fill(~keep(s, m), low).softmax(-1) @ repeated(v)


def mild_fill(q, k, v, s, m):
    """Scores far below -1e9 would beat hidden keys, and rows without a visible key keep two digits of their scores."""
    bias = torch.where(keep(s, m), 0.0, -1e4)
    return attended(q, k, v, bias)


def hidden_mildly(q, k, v, s, m):
    """Each row sees its chosen keys, and large scores of the others would beat them."""
    bias = torch.full_like(s, -1e9).scatter(-1, chosen(s), 0.0).unsqueeze(1)
    return attended(q, k, v, bias)


def joined(q, k, v, s, m):
    """Chosen keys behind a window that is always attended to."""
    window = torch.ones(*s.shape[:2], 3, dtype=torch.bool)
    mask = torch.cat((window.unsqueeze(1), keep(s, m)), -1)
    more = torch.cat((repeated(k)[:, :, :3], repeated(k)), 2)
    return F.scaled_dot_product_attention(q, more, torch.cat((repeated(v)[:, :, :3], repeated(v)), 2), attn_mask=mask)


def few_keys(q, k, v, s, m):
    mask = torch.zeros_like(m).scatter(-1, s.topk(11)[1], True).unsqueeze(1)
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask, scale=SCALE)


def few_keys_each(q, k, v, s, m):
    mask = torch.zeros_like(m).scatter(-1, s.topk(11)[1], True).unsqueeze(1)
    keys, values = torch.cat((k, k * 2), 1)[:, :H], torch.cat((v, v + 1), 1)[:, :H]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=SCALE)


def all_keys(q, k, v, s, m):
    mask = torch.zeros_like(m).scatter(-1, s.topk(21)[1], True).unsqueeze(1)
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask, scale=SCALE)


def unknown_scale(q, k, v, s, m):
    return attended(q * s.amax(), k, v, torch.zeros(()).masked_fill(hidden(s), -INF), scale=s.amax())


CASES = [
    (with_dropout, "go through dropout"),
    (weights_dropped, "go through dropout"),
    (weights_returned, "weights are used elsewhere"),
    (scores_used, "scores or weights are used outside"),
    (mask_returned, "also used by the result"),
    (mask_counted, "also used by sum"),
    (two_attentions, "more than one attention"),
    (any_keys, "one may be listed twice"),
    (every_head_chooses, "joined or repeated"),
    (listed_again, "joined or repeated"),
    (best_queries, "one may be listed twice"),
    (the_others, "hides other keys"),
    (soft, "scale of the products|another function"),
    (over_heads, "not over the keys"),
    (overwritten, "overwritten by a finite number"),
    (mild_fill, "neither 0, nor NaN, nor an equal softmax"),
    (hidden_mildly, "where scores are very large"),
    (joined, "joined with that of other keys"),
    (all_keys, "all 21 keys are chosen"),
]
SILENT = [capped, renormalised, unknown_scale]


def same(f, run, tensors) -> None:
    torch.manual_seed(4)
    got = run(*tensors)
    torch.manual_seed(4)
    want = f(*tensors)
    for g, w in zip(
        got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True
    ):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("f", "reason"), CASES, ids=[f.__name__ for f, _ in CASES])
def test_near_miss(f, reason) -> None:
    run, backend = compiled(f)
    same(f, run, operands(2, 7, 21))
    assert backend.found == []
    assert len(backend.reasons) == 1, backend.reasons
    assert re.search(reason, backend.reasons[0]), backend.reasons
    assert backend.reasons[0].endswith(".")


@pytest.mark.parametrize("f", SILENT, ids=lambda f: f.__name__)
def test_not_fused(f) -> None:
    """Far enough from attention over chosen keys that no sentence is due."""
    run, backend = compiled(f)
    same(f, run, operands(2, 7, 21))
    assert backend.found == []


def test_few_keys_for_each_chosen_one() -> None:
    """With one key head per query head a gather of 11 of 21 keys is slower than the dense product; with two it pays."""
    run, backend = compiled(few_keys)
    same(few_keys, run, operands(2, 7, 21))
    assert backend.found == ["sparse_mqa_attention"], backend.reasons
    run, backend = compiled(few_keys_each)
    same(few_keys_each, run, operands(2, 7, 21))
    assert backend.found == [] and "with fewer than 4 keys for each chosen one" in backend.reasons[0]


def test_device_without_a_kernel(monkeypatch) -> None:
    monkeypatch.setattr(table, "PRIORITY", {"cpu": ()})
    run, backend = compiled(sdpa_bool)
    same(sdpa_bool, run, operands(2, 7, 21))
    assert backend.found == [] and "there is no kernel of sparse_mqa_attention for cpu" in backend.reasons[0]


def test_device_whose_kernel_does_not_take_the_call(monkeypatch) -> None:
    """The sentence of the provider that refuses is part of ours; one that accepts is enough."""
    graphs: list[fx.GraphModule] = []

    def backend(gm, _):
        graphs.append(capture(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(sdpa_bool, backend=backend, fullgraph=True)(*(t.to("meta") for t in operands(2, 7, 21)))
    view = GraphView(graphs[0].graph)
    (anchor,) = RECOGNISER.find(view)
    kernels = {"sparse_mqa_attention": ops.reference("sparse_mqa_attention")}
    for limits in ({}, {"sparse_mqa_attention": lambda q, k, *_, **__: f"k has {k.shape[1]} heads; it takes one."}):
        other = Provider("other", "meta", lambda: None, kernels=kernels, limits=limits)
        monkeypatch.setattr(table, "PRIORITY", {"meta": (other,)})
        found = RECOGNISER.cut(view, anchor)
        if not limits:
            assert isinstance(found, list)
        else:
            assert "takes this call on meta" in found.reason and "other: k has 2 heads; it takes one)." in found.reason


# -- mutations ------------------------------------------------------------------------------------------------------
SWAPS = {
    aten.bitwise_not.default: [aten.clone.default],
    aten.__and__.Tensor: [aten.__or__.Tensor, aten.bitwise_xor.Tensor],
    aten.mul.Tensor: [aten.add.Tensor, aten.div.Tensor],
    aten.add.Tensor: [aten.sub.Tensor, aten.mul.Tensor],
    aten.softmax.int: [aten.log_softmax.int],
    aten.topk.default: [],
}


@pytest.mark.parametrize("base", [sdpa_bool, lowest, added_twice], ids=lambda f: f.__name__)
def test_mutations(base) -> None:
    """Change one thing in the graph: whatever is then accepted must still compute what the changed graph computes."""
    graphs: list[fx.GraphModule] = []

    def backend(gm, _):
        graphs.append(capture(gm))
        return gm.forward

    torch._dynamo.reset()
    tensors = operands(2, 7, 21, seed=3)
    torch.compile(base, backend=backend, fullgraph=True, dynamic=False)(*tensors)
    accepted = tried = 0
    for mutant in mutants(graphs[0], SWAPS):
        inputs = [by_value(n, tensors) for n in mutant.graph.nodes if n.op == "placeholder"]
        want = mutant(*inputs)
        view = GraphView(mutant.graph)
        tried += 1
        for anchor in RECOGNISER.find(view):
            regions = RECOGNISER.cut(view, anchor)
            for region in (regions if isinstance(regions, list) else [])[:4]:
                with isolated():
                    solution = RECOGNISER.solve(region)
                    proof = prove(RECOGNISER, region, solution) if hasattr(solution, "attrs") else None
                if isinstance(proof, Proof):
                    accepted += isinstance(rewrite.apply(RECOGNISER, region, solution, {}, None), fx.Node)
                    break
        rewrite.tidy(mutant)
        for g, w in zip(mutant(*inputs), want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5, equal_nan=True, msg=mutant.code)
    assert tried > 2 and accepted < tried


def by_value(node, tensors):
    value = node.meta["val"]
    return next(t for t in tensors if t.shape == value.shape and t.dtype == value.dtype)


def test_chosen_keys_are_ranked() -> None:
    """The choice that all these tests share is a top-k of random scores: distinct keys."""
    idx = chosen(operands(2, 7, 21)[3])
    assert all(len(set(row.tolist())) == 4 for row in idx.flatten(0, 1))
