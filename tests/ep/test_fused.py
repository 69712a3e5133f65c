"""Moves with a grouped product, on two and four ranks over gloo, against products that are written out row by row."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_deep import ops
from tests.ep.ranks import Ranks

K, N = 12, 10


def counts_of(ranks: int, local: int, seed: int, most: int = 6) -> Tensor:
    """Rows that rank p sends to expert i of rank q, [p, q, i]; a third of them is 0."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most, (ranks, ranks, local), generator=g)
    return torch.where(torch.rand(counts.shape, generator=g) < 0.3, 0, counts)


def numbers(table: Tensor, rank: int) -> dict[str, list[int]]:
    return {"send_counts": table[rank].reshape(-1).tolist(), "recv_counts": table[:, rank].reshape(-1).tolist()}


def everything(table: Tensor, dtype: torch.dtype, seed: int) -> tuple[list[Tensor], Tensor]:
    """Rows of every rank, and the matrices of all experts [R * e, K, N]; every rank can make all of it."""
    g = torch.Generator().manual_seed(seed)
    ranks, _, local = table.shape
    xs = [torch.randn(int(table[p].sum()), K, generator=g).to(dtype) for p in range(ranks)]
    return xs, (torch.randn(ranks * local, K, N, generator=g) / 3).to(dtype)


def places(table: Tensor) -> list[list[tuple[int, int, int]]]:
    """For each rank what lies where its experts are, in order: (source rank, row there, expert of this rank)."""
    ranks, _, local = table.shape
    flat = table.reshape(ranks, -1)
    starts = flat.cumsum(1) - flat
    out = []
    for q in range(ranks):
        rows = []
        for i in range(local):
            for p in range(ranks):
                begin = int(starts[p, q * local + i])
                rows += [(p, begin + j, i) for j in range(int(table[p, q, i]))]
        out.append(rows)
    return out


def _own(table: Tensor, weight: Tensor, rank: int, layout: str) -> Tensor:
    local = table.shape[2]
    mine = weight[rank * local : (rank + 1) * local]
    return (mine if layout == "nn" else mine.mT).clone(memory_format=torch.contiguous_format)


def _both_ways(rank: int, ranks: int, local: int, layout: str, name: str, seed: int) -> None:
    dtype: torch.dtype = getattr(torch, name)
    table = counts_of(ranks, local, seed)
    xs, weight = everything(table, dtype, seed + 1)
    how: dict[str, Any] = {"layout": layout, "group_size": ranks, "group": dist.group.WORLD.group_name}
    there = numbers(table, rank)
    back = {"send_counts": there["recv_counts"], "recv_counts": there["send_counts"]}
    x = xs[rank].clone().requires_grad_()
    w = _own(table, weight, rank, layout).requires_grad_()
    y, rows = ops.alltoallv_gmm(x, w, **there, **how)

    here = places(table)[rank]
    all_x = [t.clone().requires_grad_() for t in xs]
    all_w = weight.clone().requires_grad_()
    want_rows = torch.stack([all_x[p][t] for p, t, _ in here]) if here else xs[rank].new_zeros(0, K)
    wide = [(all_x[p][t].float() @ all_w[rank * local + i].float()).to(dtype) for p, t, i in here]
    want = torch.stack(wide) if wide else xs[rank].new_zeros(0, N)
    assert rows.detach().equal(want_rows.detach())
    close = {"rtol": 8e-3, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(y, want, **close)

    # Back, with matrices from N to K; then through everything, rows included.
    w2 = (_own(table, weight, rank, "nt" if layout == "nn" else "nn") * 0.7).requires_grad_()
    z = ops.gmm_alltoallv(y, w2, **back, **how)
    assert z.shape == x.shape
    (z.float().square().sum() + 0.3 * rows.float().pow(3).sum()).backward()

    leaves = [t.clone().requires_grad_() for t in xs]
    first = weight.clone().requires_grad_()
    second = (weight.mT * 0.7).requires_grad_()
    loss = torch.zeros(())
    for q, lines in enumerate(places(table)):
        for p, t, i in lines:
            e = q * local + i
            middle = (leaves[p][t].float() @ first[e].float()).to(dtype)
            end = (middle.float() @ second[e].float()).to(dtype)
            loss = loss + end.float().square().sum() + 0.3 * leaves[p][t].float().pow(3).sum()
            if p == rank:
                torch.testing.assert_close(z[t], end, **close)
    wanted = torch.autograd.grad(loss, [*leaves, first, second], allow_unused=True) if loss.requires_grad else None
    grads = {"rtol": 3e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-4}

    def wanted_of(at: int, like: Tensor) -> Tensor:
        found = None if wanted is None else wanted[at]
        return torch.zeros_like(like) if found is None else found

    torch.testing.assert_close(x.grad, wanted_of(rank, xs[rank]), **grads)
    own = slice(rank * local, (rank + 1) * local)
    for found, full in ((w.grad, wanted_of(ranks, weight)), (w2.grad, wanted_of(ranks + 1, weight.mT))):
        assert found is not None
        as_nn = full[own] if layout == "nn" else full[own].mT
        torch.testing.assert_close(found, as_nn, **grads)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_results_and_gradients_equal_one_device_on_four_ranks(four: Ranks, layout: str, name: str) -> None:
    four(_both_ways, 3, layout, name, 21)


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_results_and_gradients_equal_one_device_on_two_ranks(two: Ranks, layout: str) -> None:
    two(_both_ways, 1, layout, "float32", 5)


def _nothing(rank: int, ranks: int) -> None:
    """Rank 0 has all tokens and sends them to rank 1; nobody else has any."""
    table = torch.zeros(ranks, ranks, 2, dtype=torch.int64)
    table[0, 1] = torch.tensor([0, 5])
    xs, weight = everything(table, torch.float32, 8)
    how: dict[str, Any] = {"group_size": ranks, "group": dist.group.WORLD.group_name}
    x, w = xs[rank].requires_grad_(), _own(table, weight, rank, "nn").requires_grad_()
    y, rows = ops.alltoallv_gmm(x, w, **numbers(table, rank), **how)
    assert y.shape == ((5, N) if rank == 1 else (0, N)) and rows.shape[1] == K
    y.sum().backward()
    assert x.grad is not None and w.grad is not None
    assert x.grad.shape == x.shape and not w.grad[0].any() and bool(w.grad[1].any()) == (rank == 1)


def test_ranks_without_rows_take_part(four: Ranks) -> None:
    four(_nothing)


def _twice(rank: int, ranks: int) -> None:
    """Second derivatives, by differences of first ones."""
    table = counts_of(ranks, 2, 31, most=3)
    xs, weight = everything(table, torch.float64, 32)
    how: dict[str, Any] = {"group_size": ranks, "group": dist.group.WORLD.group_name}
    own = _own(table, weight, rank, "nn")
    directions = [torch.randn_like(t) for t in (xs[rank], own)]

    def first(step: float, create: bool) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [(t + step * d).requires_grad_() for t, d in zip((xs[rank], own), directions, strict=True)]
        y, rows = ops.alltoallv_gmm(leaves[0], leaves[1], **numbers(table, rank), **how)
        total = y.pow(3).sum() + rows.pow(3).sum()
        return leaves, list(torch.autograd.grad(total, leaves, create_graph=create))

    leaves, grads = first(0.0, create=True)
    # Hessian times direction: the Hessian is that of the sum over all ranks, and symmetric.
    second = torch.autograd.grad(sum((g * d).sum() for g, d in zip(grads, directions, strict=True)), leaves)
    up, down = first(1e-5, create=False)[1], first(-1e-5, create=False)[1]
    for got, high, low in zip(second, up, down, strict=True):
        torch.testing.assert_close(got, (high - low) / 2e-5, rtol=1e-5, atol=1e-6)


def test_second_derivatives(two: Ranks) -> None:
    two(_twice)


def _compiled(rank: int, ranks: int) -> None:
    torch._dynamo.reset()
    table = counts_of(ranks, 2, 41)
    xs, weight = everything(table, torch.float32, 42)
    there = numbers(table, rank)
    how: dict[str, Any] = {"group_size": ranks, "group": dist.group.WORLD.group_name}
    back = {"send_counts": there["recv_counts"], "recv_counts": there["send_counts"]}

    def layer(x: Tensor, w: Tensor) -> Tensor:
        y, _ = ops.alltoallv_gmm(x, w, **there, **how)
        return ops.gmm_alltoallv(y.sin(), w, **back, layout="nt", **how)

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x, w = xs[rank].clone().requires_grad_(), _own(table, weight, rank, "nn").requires_grad_()
        z = function(x, w)
        z.square().sum().backward()
        results.append((z.detach(), x.grad, w.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-5, atol=1e-6)


def test_compiled_equals_eager(two: Ranks) -> None:
    two(_compiled)


def _swapped(rank: int, ranks: int) -> list[str]:
    """Rank 1 takes its counts in another order: their sums agree, so nothing but the comparison can see it."""
    table = torch.full((ranks, ranks, 2), 2)
    how: dict[str, Any] = {**numbers(table, rank), "group_size": ranks, "group": dist.group.WORLD.group_name}
    if rank == 1:
        how["recv_counts"] = [1, 3, *how["recv_counts"][2:]]
    said = []
    with mock.patch.dict("os.environ", ASCEND_DEEP_DEBUG="1"):
        for op in (ops.alltoallv_gmm, ops.gmm_alltoallv):
            with pytest.raises(RuntimeError) as error:
                op(torch.ones(4 * ranks, K), None, **how)
            said.append(str(error.value))
    return said


def test_counts_that_differ_are_the_same_error_on_every_rank_when_debugging(two: Ranks) -> None:
    sentence = "recv_counts of rank 1 differ from what the other ranks send there by send_counts."
    for said in two(_swapped):
        assert said == [f"alltoallv_gmm: {sentence}", f"gmm_alltoallv: {sentence}"]


X, W = torch.ones(7, K), torch.ones(3, K, N)
GOOD: dict[str, Any] = {"send_counts": [3, 0, 4], "recv_counts": [3, 0, 4]}


@pytest.mark.parametrize("op", ["alltoallv_gmm", "gmm_alltoallv"])
@pytest.mark.parametrize(
    ("x", "weight", "changed", "error", "sentence"),
    [
        (X, W, {"send_counts": [3, 4]}, ValueError, "the length of recv_counts is 3, but that of send_counts is 2"),
        (X, W, {"group_size": 2}, ValueError, "send_counts has 3 numbers; .* a multiple of 2"),
        (X, W, {"group_size": 0}, ValueError, "group_size is 0; it must be at least 1"),
        (X, W, {"send_counts": [3, -1, 5]}, ValueError, "send_counts has -1; counts are not negative"),
        (X, W, {"send_counts": [3, 0, 5]}, ValueError, "the number of rows of x is 7, but the sum of .* is 8"),
        (X, W, {"least_rows": 8}, ValueError, "the sum of send_counts is 7, but least_rows is 8"),
        (X, W, {"recv_counts": [3, 0, 0], "least_rows": 5}, ValueError, "the sum of recv_counts is 3, but least_rows"),
        (X, W, {"least_rows": -1}, ValueError, "least_rows is -1; it must be at least 0"),
        (X, W, {"layout": "tn"}, ValueError, "layout is 'tn'; it must be one of 'nn', 'nt'"),
        (X, W, {"layout": "nt"}, ValueError, "K of weight in layout 'nt' is 10, but K of x is 12"),
        (X, W[:2], {}, ValueError, "the number of matrices of weight is 2, but the number of experts of a rank is 3"),
        (X, W[0], {}, ValueError, r"weight has 2 dimensions; it must be \[e, K, N\]"),
        (X[0], W, {}, ValueError, r"x has 1 dimensions; it must be \[rows, K\]"),
        (X, W.double(), {}, TypeError, "weight has dtype float64; accepted: float32"),
        (X.int(), W, {}, TypeError, "x has dtype int32; accepted: float32, bfloat16, float16, float64"),
        (X, W.to("meta"), {}, TypeError, "x is on cpu, but weight is on meta"),
    ],
)
def test_wrong_calls_are_one_sentence(
    op: str, x: Tensor, weight: Tensor, changed: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=f"^{op}: {sentence}"):
        getattr(ops, op)(x, weight, **{**GOOD, **changed})


def test_a_group_that_is_not_there_is_an_error() -> None:
    for op in (ops.alltoallv_gmm, ops.gmm_alltoallv):
        with pytest.raises(ValueError, match=re.escape("group_size is 3, and torch.distributed is not initialised")):
            op(X, torch.ones(1, K, N), **GOOD, group_size=3, group="ep")


def test_autocast_casts_operands_of_products_only() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y, rows = ops.alltoallv_gmm(X, W, **GOOD)
        _, moved = ops.alltoallv_gmm(X, None, **GOOD)
    assert y.dtype == rows.dtype == torch.bfloat16 and moved.dtype == torch.float32
