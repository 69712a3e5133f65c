"""Indexers in company: other users, sizes that coincide, many chosen keys, ties, training, mutations, replay."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from ascend_deep.passes import certificates, replay, rewrite
from ascend_deep.passes.capture import capture
from ascend_deep.passes.gates import Proof, prove
from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.mqa_indexer import RECOGNISER
from ascend_deep.passes.probe import isolated
from tests.passes.mqa_spellings import (
    ALL,
    INF,
    SCALE,
    K,
    Spelling,
    compiled,
    fill_topk,
    matmul_matmul,
    matmul_sum,
    operands,
    products_of,
)
from tests.passes.mutants import mutants

aten = torch.ops.aten


def test_scores_used_before_the_mask() -> None:
    def f(q, k, w, m):
        s = matmul_sum(q, k, w)
        return s.logsumexp(-1), s.masked_fill(~m, -INF).topk(K)[1]

    run, backend = compiled(f)
    tensors = operands(2, 7, 13)
    got, want = run(*tensors), f(*tensors)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[1], want[1])
    assert backend.found == ["mqa_logits"] and "aten.topk" in backend.ops and "aten.relu" not in backend.ops


def test_products_used_outside() -> None:
    def f(q, k, w, m):
        p = products_of(q, k).relu()
        return p.amax(-1), (p * w[..., None]).sum(2).masked_fill(~m, -INF).topk(K)[1]

    run, backend = compiled(f)
    tensors = operands(2, 7, 13)
    for g, want in zip(run(*tensors), f(*tensors), strict=True):
        assert torch.equal(g, want)
    assert backend.found == [] and "used outside" in backend.reasons[0]


def test_only_the_shape_of_the_scores_used() -> None:
    def f(q, k, w, m):
        s = matmul_sum(q, k, w).masked_fill(~m, -INF)
        return torch.ones_like(s, dtype=torch.bool).scatter(-1, s.topk(K)[1], False)

    run, backend = compiled(f)
    tensors = operands(2, 7, 13)
    assert torch.equal(run(*tensors), f(*tensors))
    assert backend.found == ["mqa_topk"]


@pytest.mark.parametrize(
    ("b", "s", "t", "h", "d"), [(1, 1, 9, 5, 8), (2, 1, 6, 6, 6), (6, 6, 6, 6, 6), (1, 8, 8, 1, 8), (3, 4, 12, 12, 4)]
)
@pytest.mark.parametrize("scores", [matmul_matmul, matmul_sum], ids=["matmul", "sum"])
def test_coinciding_sizes(b, s, t, h, d, scores) -> None:
    f = Spelling("", scores, fill_topk)
    run, backend = compiled(f)
    tensors = operands(b, s, t, h=h, d=d)
    assert torch.equal(run(*tensors), f(*tensors))
    assert backend.found == ["mqa_topk"], backend.reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_many_chosen_keys(dtype, dynamic) -> None:
    """More than random scores can be told apart for; also with fewer keys than that."""

    def f(q, k, w, m):
        return matmul_matmul(q, k, w).topk(min(300, k.shape[1]), dim=-1).indices

    run, backend = compiled(f, dynamic)
    for s, t in ((3, 320), (4, 17)) if dynamic else ((320, 320),):
        q, k, w, m = operands(2, s, t, dtype)
        got, want = run(q, k, w, m), f(q, k, w, m)
        scores = matmul_matmul(q, k, w)
        # Neighbours closer than rounding may change places.
        torch.testing.assert_close(scores.gather(-1, got), scores.gather(-1, want), rtol=1e-5, atol=1e-5)
        assert backend.found == ["mqa_topk"], backend.reasons
    assert not dynamic or len(backend.graphs) == 1


def test_ties_go_to_the_lowest_index() -> None:
    """100 positive scores and exact zeros: all positive ones, then the first zeros."""
    q, w = torch.rand(1, 2, 3, 8) + 0.1, torch.rand(1, 2, 3) + 0.1
    k = -torch.rand(1, 900, 8)
    best = torch.randperm(900)[:100]
    k[:, best] *= -1

    def f(q, k, w):
        return matmul_sum(q, k, w).topk(200, sorted=False)[1]

    run, backend = compiled(f)
    got = run(q, k, w)
    assert backend.found == ["mqa_topk"]
    rest = [i for i in range(900) if i not in set(best.tolist())][:100]
    wanted = torch.tensor(sorted([*best.tolist(), *rest])).expand(1, 2, 200)
    assert torch.equal(got.sort(-1).values, wanted)


def test_gradients_of_the_scores() -> None:
    def f(q, k, w, m):
        return matmul_matmul(q, k, w).masked_fill(~m, -INF).log_softmax(-1).masked_fill(~m, 0.0)

    run, backend = compiled(f)
    grads = []
    for g in (f, run):
        leaves = [t.clone().requires_grad_() for t in operands(2, 7, 13)[:3]]
        out = g(*leaves, operands(2, 7, 13)[3])
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert backend.found == ["mqa_logits"]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


def test_detached_scores_are_refused() -> None:
    def f(q, k, w, m):
        s = (products_of(q, k) * SCALE).relu().detach()
        return (s * w[..., None]).sum(2).softmax(-1)

    run, backend = compiled(f)
    tensors = operands(2, 7, 13)
    leaf = tensors[2].clone().requires_grad_()
    torch.testing.assert_close(run(*tensors[:2], leaf, tensors[3]), f(*tensors), rtol=1e-5, atol=1e-5)
    assert backend.found == []


def test_replay(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ASCEND_DEEP_CERTIFICATES", str(tmp_path))
    f = Spelling("", matmul_matmul, fill_topk)
    run, backend = compiled(f, dynamic=True)
    run(*operands(2, 7, 13))
    certificate = backend.outcomes[-1].certificates[0]
    again = replay.replay(str(certificates.save(certificate)))
    assert again.ok, again.text


# -- mutations ------------------------------------------------------------------------------------------------------
SWAPS = {
    aten.relu.default: [aten.abs.default, aten.sigmoid.default, aten.square.default, aten.neg.default],
    aten.mul.Tensor: [aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor],
    aten.sum.dim_IntList: [aten.mean.dim, aten.amax.default],
    aten.bitwise_not.default: [aten.clone.default],
    aten.masked_fill.Scalar: [],
}
BASES = [s for s in ALL if s.name in ("matmul_sum", "clamp_min_heads_first", "flat_bmm", "added", "where")]


@pytest.mark.parametrize("base", BASES, ids=[s.name for s in BASES])
def test_mutations(base: Spelling) -> None:
    """Change one thing in the graph: whatever is then accepted must still compute what the changed graph computes."""
    graphs: list[fx.GraphModule] = []

    def backend(gm, _):
        graphs.append(capture(gm))
        return gm.forward

    torch._dynamo.reset()
    tensors = operands(2, 7, 13, seed=3)
    # As many hidden keys as visible ones: a mask turned round hides no more than the choice leaves.
    tensors = (*tensors[:3], torch.rand(2, 7, 13).argsort(-1).argsort(-1) < 6)
    torch.compile(base, backend=backend, fullgraph=True, dynamic=False)(*tensors)
    accepted = tried = 0
    for mutant in mutants(graphs[0], SWAPS):
        inputs = [operands_by_shape(n, tensors) for n in mutant.graph.nodes if n.op == "placeholder"]
        want = mutant(*inputs)
        view = GraphView(mutant.graph)
        tried += 1
        for anchor in RECOGNISER.find(view):
            regions = RECOGNISER.cut(view, anchor)
            for region in regions if isinstance(regions, list) else []:
                with isolated():
                    solution = RECOGNISER.solve(region)
                    proof = prove(RECOGNISER, region, solution) if hasattr(solution, "attrs") else None
                if isinstance(proof, Proof):
                    replaced = rewrite.apply(RECOGNISER, region, solution, {}, None)
                    accepted += isinstance(replaced, fx.Node)
                    break
        rewrite.tidy(mutant)
        for g, w in zip(mutant(*inputs), want, strict=True):
            assert g.dtype == w.dtype and torch.equal(g, w), mutant.code
    assert tried > 8 and accepted < tried


def operands_by_shape(node, tensors):
    shape = tuple(node.meta["val"].shape)
    return next(t for t in tensors if tuple(t.shape) == shape)
