"""The expert-parallel ops on two and four ranks over gloo, against sums that are written out token by token."""

from __future__ import annotations

import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_deep import ops
from tests.ep.cases import TOKENS, case, dense
from tests.ep.ranks import Ranks

E, K, H, M, A = 8, 3, 16, 30, 4
MODES = list(itertools.product((False, True), (True, False)))  # expand, cpu_sync


def _group() -> str:
    return dist.group.WORLD.group_name


def _layer(
    x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, bias: Tensor, ranks: int, expand: bool, sync: bool, group: str
) -> Any:
    """Dispatch, one product per expert, combine."""
    how: dict[str, Any] = {
        "num_experts": E, "max_tokens_per_rank": M, "expand": expand, "cpu_sync": sync, "group_size": ranks,
        "group": group,
    }  # fmt: skip
    out = ops.ep_dispatch(x, None, idx, weights, expert_alignment=A, **how)
    if expand:
        ends = ((out.num_recv_per_expert.long() + A - 1) // A * A).cumsum(0)
        row = torch.arange(out.recv_x.shape[0])
        expert = torch.searchsorted(ends, row, right=True).clamp(max=E // ranks - 1)
        y = torch.einsum("nh,nhi->ni", out.recv_x, w[expert]) * out.recv_topk_weights.unsqueeze(1)
    else:
        y = torch.zeros_like(out.recv_x)
        for k in range(K):
            local = out.recv_topk_idx[:, k]
            part = out.recv_topk_weights[:, k : k + 1] * torch.einsum("nh,nhi->ni", out.recv_x, w[local.clamp(min=0)])
            y = y + torch.where(local.unsqueeze(1) >= 0, part, 0.0)
    return ops.ep_combine(y, None, bias, None, idx, *out[5:], **how)[0], out


def _round_trip(rank: int, ranks: int, tokens: list[int], expand: bool, sync: bool) -> None:
    data = case(tokens, E, K, H, seed=3)
    g = torch.Generator().manual_seed(9)
    w_all = torch.randn(E, H, H, generator=g) / 4
    biases = [torch.randn(t, H, generator=g) for t in tokens]
    grads = [torch.randn(t, H, generator=g) for t in tokens]
    local = slice(rank * E // ranks, (rank + 1) * E // ranks)

    def leaves(*given: Tensor) -> list[Tensor]:
        return [t.clone().requires_grad_() for t in given]

    x, weights, w, bias = leaves(data.x[rank], data.weights[rank], w_all[local], biases[rank])
    got, _ = _layer(x, data.idx[rank], weights, w, bias, ranks, expand, sync, _group())
    got.backward(grads[rank])

    wanted_w = w_all.clone().requires_grad_()
    for q in range(ranks):
        x2, weights2, bias2 = leaves(data.x[q], data.weights[q], biases[q])
        want = dense(x2, data.idx[q], weights2, wanted_w, bias2)
        want.backward(grads[q])
        if q == rank:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            for a, b in ((x, x2), (weights, weights2), (bias, bias2)):
                wanted = torch.zeros_like(b) if b.grad is None else b.grad
                torch.testing.assert_close(a.grad, wanted, rtol=1e-4, atol=1e-4)
    # An expert that got no token has a gradient of zeros, where the sum that was written out has none.
    wanted_grad = torch.zeros_like(w_all) if wanted_w.grad is None else wanted_w.grad
    torch.testing.assert_close(w.grad, wanted_grad[local], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize(("expand", "sync"), MODES)
def test_results_and_gradients_equal_one_device_on_four_ranks(
    four: Ranks, tokens: list[int], expand: bool, sync: bool
) -> None:
    four(_round_trip, tokens, expand, sync)


@pytest.mark.parametrize(("expand", "sync"), MODES)
def test_results_and_gradients_equal_one_device_on_two_ranks(two: Ranks, expand: bool, sync: bool) -> None:
    two(_round_trip, [6, 1], expand, sync)


def _order(rank: int, ranks: int, sync: bool) -> None:
    tokens = [5, 7, 0, 3][:ranks]
    data = case(tokens, E, K, H, seed=5)
    how: dict[str, Any] = {"num_experts": E, "max_tokens_per_rank": M, "group_size": ranks, "group": _group()}
    local = E // ranks
    sf = [torch.rand(t, 2, generator=torch.Generator().manual_seed(t)) for t in tokens]
    eight = [x.to(torch.float8_e4m3fn) for x in data.x]
    out = ops.ep_dispatch(
        eight[rank], sf[rank], data.idx[rank], data.weights[rank], expert_alignment=A, expand=True, cpu_sync=sync, **how
    )
    here = [(q, t) for q in range(ranks) for t in range(tokens[q]) if (data.idx[q][t] // local == rank).any()]
    start = 0
    for e in range(local):
        rows = [(q, t) for q, t in here if (data.idx[q][t] == rank * local + e).any()]
        assert out.num_recv_per_expert[e] == len(rows) and out.psum_expert[e] == start + len(rows)
        for j, (q, t) in enumerate(rows):
            lane = int((data.idx[q][t] == rank * local + e).nonzero())
            assert out.recv_x[start + j].float().equal(eight[q][t].float()), (e, j)
            assert (
                out.recv_sf[start + j].equal(sf[q][t]) and out.recv_topk_weights[start + j] == data.weights[q][t, lane]
            )
            assert out.src_meta[here.index((q, t)), 2 + lane] == start + j
        end = start + -(-len(rows) // A) * A
        for part in (out.recv_x.float(), out.recv_sf, out.recv_topk_weights):
            assert not part[start + len(rows) : end].any()
        start = end
    tail = (out.recv_x.float(), out.recv_sf, out.recv_topk_weights)
    assert start == out.recv_x.shape[0] if sync else not any(part[start:].any() for part in tail)
    for n, (q, t) in enumerate(here):
        lanes = (data.idx[q][t] // local == rank).nonzero()
        assert out.src_meta[n, 0] == q * M + t and out.src_meta[n, 1] == q * K + int(lanes[-1])
    per_rank = torch.tensor([sum(1 for q, _ in here if q == r) for r in range(ranks)])
    assert out.psum_rank.equal(per_rank.cumsum(0).int())
    assert out.src_meta.shape[0] == (len(here) if sync else ranks * M) and (out.src_meta[len(here) :] == -1).all()

    compact = ops.ep_dispatch(data.x[rank], None, data.idx[rank], data.weights[rank], cpu_sync=sync, **how)
    for n, (q, t) in enumerate(here):
        mine = data.idx[q][t] // local == rank
        assert compact.recv_x[n].equal(data.x[q][t])
        assert compact.recv_topk_idx[n].equal(torch.where(mine, data.idx[q][t] - rank * local, -1))
        assert compact.recv_topk_weights[n].equal(torch.where(mine, data.weights[q][t], 0.0))
    assert (compact.recv_topk_idx[len(here) :] == -1).all() and not compact.recv_x[len(here) :].any()
    assert not compact.recv_topk_weights[len(here) :].any()
    sent = ops.ep_layout(data.idx[rank], num_experts=E, group_size=ranks)
    assert not sync or sent[0].equal(compact.splits[0].int())
    assert sent[1].sum() == (data.idx[rank] >= 0).sum() and sent[2].sum(0).equal(sent[0].long())

    # Other rows along the same handle; weights that come back; NaN in rows that belong to nobody.
    attributes = {**how, "expand": True, "cpu_sync": sync}
    double, _, weights = ops.ep_dispatch_cached(
        2.5 * data.x[rank],
        None,
        data.weights[rank],
        data.idx[rank],
        *out[5:],
        num_recv=out.recv_x.shape[0],
        **attributes,
    )
    assert weights.equal(out.recv_topk_weights)
    used = torch.zeros(double.shape[0], dtype=torch.bool)
    used[out.src_meta[: len(here), 2:][out.src_meta[: len(here), 2:] >= 0].long()] = True
    double[~used] = torch.nan
    bias = torch.randn(tokens[rank], H)
    back, returned = ops.ep_combine(double, weights, bias, None, data.idx[rank], *out[5:], **attributes)
    chosen = data.idx[rank] >= 0
    torch.testing.assert_close(back, bias + 2.5 * data.x[rank] * chosen.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)
    assert returned.equal(torch.where(chosen, data.weights[rank], 0.0))


@pytest.mark.parametrize("sync", [True, False])
def test_rows_lie_where_the_handle_says(four: Ranks, sync: bool) -> None:
    four(_order, sync)


def _opcheck(rank: int, ranks: int) -> None:
    data = case([6, 3], E, K, H, seed=6)
    how = {"num_experts": E, "max_tokens_per_rank": M, "cpu_sync": True, "group_size": ranks, "group": _group()}
    # Tracing them is what test_parallelize does.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    overloads = torch.ops.ascend_deep
    for expand in (False, True):
        x, weights = data.x[rank].clone().requires_grad_(), data.weights[rank].clone().requires_grad_()
        args = (x, None, data.idx[rank], weights)
        torch.library.opcheck(
            overloads.ep_dispatch.default,
            args,
            {**how, "expert_alignment": A, "expand": expand},
            test_utils=checks,
        )
        out = ops.ep_dispatch(*args, expand=expand, expert_alignment=A, **how)
        y = out.recv_x.detach().clone().requires_grad_()
        w = out.recv_topk_weights.detach().clone().requires_grad_()
        torch.library.opcheck(
            overloads.ep_combine.default,
            (y, w, x.detach().clone().requires_grad_(), None, data.idx[rank], *out[5:]),
            {**how, "expand": expand},
            test_utils=checks,
        )


def test_opcheck_with_sizes_that_only_the_data_know(two: Ranks) -> None:
    two(_opcheck)


def _refusals(rank: int, ranks: int) -> list[str]:
    data = case([6, 3], E, K, H, seed=7)
    said = []

    def refused(**changed: Any) -> None:
        how = {"num_experts": E, "max_tokens_per_rank": M, "group_size": ranks, "group": _group(), **changed}
        with pytest.raises(ValueError) as caught:
            ops.ep_dispatch(data.x[rank], None, data.idx[rank], data.weights[rank], **how)
        said.append(str(caught.value))

    refused(max_tokens_per_rank=4)
    refused(max_tokens_per_rank=8 + rank)
    refused(num_experts=E if rank else 2 * E)
    refused(num_experts=7)
    refused(group_size=4)
    refused(group="nobody")
    # The group still works: no rank was left inside a collective.
    _round_trip(rank, ranks, [3, 4], True, True)
    return said


def test_a_wrong_call_is_the_same_error_on_every_rank(two: Ranks) -> None:
    first, second = two(_refusals)
    assert first == second
    assert first == [
        "ep_dispatch: max_tokens_per_rank is 4, but rank 0 has 6 tokens.",
        "ep_dispatch: max_tokens_per_rank must be the same on all ranks of the group; it is 8 on rank 0, 9 on rank 1.",
        "ep_dispatch: num_experts must be the same on all ranks of the group; it is 16 on rank 0, 8 on rank 1.",
        "ep_dispatch: num_experts is 7; it must be a multiple of group_size, which is 2.",
        f"ep_dispatch: group_size is 4, but group {'0'!r} has 2 ranks.",
        "ep_dispatch: group is 'nobody'; torch.distributed knows no process group of that name.",
    ]


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"x": torch.randn(4, 6).int()}, TypeError, "x has dtype int32; accepted: float32, "),
        ({"idx": torch.zeros(3, 2).long()}, ValueError, "the number of rows of topk_idx is 3, but .* of x is 4"),
        (
            {"weights": torch.rand(4, 3)},
            ValueError,
            "the number of columns of topk_weights is 3, but that of topk_idx is 2",
        ),
        ({"max_tokens_per_rank": 3, "cpu_sync": False}, ValueError, "x has 4 tokens; max_tokens_per_rank is 3"),
        ({"max_tokens_per_rank": 3}, ValueError, "max_tokens_per_rank is 3, but rank 0 has 4 tokens"),
        ({"max_tokens_per_rank": 2**31}, ValueError, "with 1 ranks it must be below"),
        ({"expert_alignment": 0}, ValueError, "expert_alignment is 0; it must be at least 1"),
        ({"group_size": 2}, ValueError, "torch.distributed is not initialised in this process"),
    ],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], sentence: str) -> None:
    call: dict[str, Any] = {
        "x": torch.randn(4, 6), "idx": torch.tensor([[0, 3], [2, -1], [1, 0], [3, 2]]), "weights": torch.rand(4, 2),
        "num_experts": 4, "max_tokens_per_rank": 5, **changed,
    }  # fmt: skip
    with pytest.raises(error, match=sentence):
        ops.ep_dispatch(call.pop("x"), None, call.pop("idx"), call.pop("weights"), **call)


@pytest.mark.parametrize("expand", [False, True])
def test_a_handle_is_used_with_the_attributes_of_its_dispatch(expand: bool) -> None:
    """Every expert is chosen once, so that both kinds of dispatch have equally many rows."""
    x, idx = torch.randn(4, 6), torch.tensor([[2], [0], [3], [1]])
    how: dict[str, Any] = {"num_experts": 4, "max_tokens_per_rank": 5, "expand": expand, "cpu_sync": True}
    out = ops.ep_dispatch(x, None, idx, **how)
    y = 1.5 * out.recv_x
    assert torch.equal(ops.ep_combine(y, None, None, None, idx, *out[5:], **how)[0], 1.5 * x)
    for name, value in (("expand", not expand), ("cpu_sync", False), ("max_tokens_per_rank", 7)):
        words = f"{name} is {value}, but the handle is of a dispatch where it was {how[name]}."
        with pytest.raises(ValueError, match=f"^ep_combine: {words}"):
            ops.ep_combine(y, None, None, None, idx, *out[5:], **{**how, name: value})
        with pytest.raises(ValueError, match=f"^ep_dispatch_cached: {words}"):
            ops.ep_dispatch_cached(x, None, None, idx, *out[5:], num_recv=4, **{**how, name: value})


def test_a_handle_that_no_dispatch_made_is_one_sentence() -> None:
    x, idx = torch.randn(4, 6), torch.tensor([[2], [0], [3], [1]])
    how: dict[str, Any] = {"num_experts": 4, "max_tokens_per_rank": 5, "expand": False, "cpu_sync": True}
    first = ops.ep_dispatch(x, None, idx, **how)
    other = ops.ep_dispatch(x[:3], None, idx[:3], **how)
    for handle, words in (
        ([torch.zeros_like(t) for t in first[5:]], "splits is not that of a handle, whose third row is never 0;"),
        (
            (*first[5:10], other.splits),
            "splits is of a dispatch that received 3 rows, src_meta of one that received 4;",
        ),
    ):
        with pytest.raises(ValueError, match=f"^ep_combine: {words}"):
            ops.ep_combine(first.recv_x, None, None, None, idx, *handle, **how)
        with pytest.raises(ValueError, match=f"^ep_dispatch_cached: {words}"):
            ops.ep_dispatch_cached(x, None, None, idx, *handle, num_recv=4, **how)


def test_quantised_rows_have_no_gradient() -> None:
    x = torch.randn(4, 6).to(torch.float8_e4m3fn).requires_grad_()
    out = ops.ep_dispatch(x, None, torch.tensor([[0], [1], [0], [1]]), num_experts=2, max_tokens_per_rank=4)
    with pytest.raises(RuntimeError, match="x has dtype float8_e4m3fn, which has no gradient"):
        out.recv_x.to(torch.float32).sum().backward()


def _again(rank: int, ranks: int, store: str) -> None:
    """A compiled program names its group; a new group of that name serves it."""
    data = case([4, 6], E, K, H, seed=12)
    weight = torch.randn(E, H, H)[: E // ranks]

    group = _group()

    def program(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor) -> Tensor:
        return _layer(x, idx, weights, w, x, ranks, False, False, group)[0]

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    args = (data.x[rank], data.idx[rank], data.weights[rank], weight)
    want = compiled(*args)
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"group_size is 2, and torch.distributed is not initialised in this process"):
        compiled(*args)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    assert compiled(*args).equal(want)
    torch._dynamo.reset()


def test_a_compiled_program_outlives_its_process_group(two: Ranks, tmp_path: Path) -> None:
    two(_again, str(tmp_path / "again"))


def _low_latency(rank: int, ranks: int, layout: str) -> None:
    tokens = [6, 0, 8, 3][:ranks]
    data = case(tokens, E, K, 128, seed=8, dtype=torch.bfloat16)
    how: dict[str, Any] = {"max_tokens_per_rank": M, "num_experts": E, "layout": layout, "group_size": ranks}
    how["group"] = _group()
    local = E // ranks
    out, sf, count, source, where, aux = ops.ll_dispatch(data.x[rank], data.idx[rank], **how)
    assert sf.numel() == 0 and aux.numel() == 0
    scale = torch.randn(E, generator=torch.Generator().manual_seed(3))
    y = torch.full_like(out, torch.nan)
    start = 0
    for e in range(local):
        rows = [(q, t) for q in range(ranks) for t in range(tokens[q]) if (data.idx[q][t] == rank * local + e).any()]
        assert count[e] == len(rows)
        block, begin = (out[e], 0) if layout == "padded" else (out, start)
        lines = source[e] if layout == "padded" else source
        for j, (q, t) in enumerate(rows):
            assert block[begin + j].equal(data.x[q][t]) and lines[begin + j] == t
        for q in range(ranks):
            mine = [j for j, (p, _) in enumerate(rows) if p == q]
            assert where[e, q] & 0xFFFFFFFF == len(mine)
            assert not mine or where[e, q] >> 32 == begin + mine[0]
        into = y[e] if layout == "padded" else y
        into[begin : begin + len(rows)] = (
            block[begin : begin + len(rows)].float() * scale[rank * local + e]
        ).bfloat16()
        if layout == "padded":
            assert not block[len(rows) :].any() and (lines[len(rows) :] == -1).all()
        start += len(rows)
    if layout == "flat":
        assert not out[start:].any() and (source[start:] == -1).all()
    weights = torch.where(data.idx[rank] >= 0, data.weights[rank], torch.nan)
    got = ops.ll_combine(y, data.idx[rank], weights, source, where, aux, **how)
    want = torch.zeros(tokens[rank], 128)
    for k in range(K):
        e = data.idx[rank][:, k]
        part = data.weights[rank][:, k : k + 1] * (data.x[rank].float() * scale[e.clamp(min=0)].unsqueeze(1)).bfloat16()
        want += torch.where(e.unsqueeze(1) >= 0, part, 0.0)
    torch.testing.assert_close(got, want.bfloat16())

    eight, sf, *_ = ops.ll_dispatch(data.x[rank], data.idx[rank], quant="fp8", **how)
    assert eight.dtype == torch.float8_e4m3fn and sf.shape == (*out.shape[:-1], 1)
    torch.testing.assert_close(eight.float() * sf, out.float(), rtol=0.07, atol=1e-3)


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_low_latency(four: Ranks, layout: str) -> None:
    four(_low_latency, layout)


def test_low_latency_refusals() -> None:
    x, idx = torch.randn(4, 96), torch.tensor([[0, 1]] * 4)
    how: dict[str, Any] = {"num_experts": 2, "max_tokens_per_rank": 4}
    with pytest.raises(ValueError, match="x has 96 columns; fp8 needs a multiple of 128"):
        ops.ll_dispatch(x, idx, quant="fp8", **how)
    with pytest.raises(ValueError, match="layout is 'dense'; it must be one of 'padded', 'flat'"):
        ops.ll_dispatch(x, idx, layout="dense", **how)
    with pytest.raises(ValueError, match="x has 4 tokens; max_tokens_per_rank is 3"):
        ops.ll_dispatch(x, idx, **{**how, "max_tokens_per_rank": 3})
    out, _, _, *rest = ops.ll_dispatch(x.requires_grad_(), idx, **how)
    with pytest.raises(RuntimeError, match="ll_dispatch has no backward: it is for inference"):
        out.sum().backward()
    with pytest.raises(ValueError, match="the number of rows of an expert of y is 3, but R M is 4"):
        ops.ll_combine(out[:, :3].detach(), idx, torch.rand(4, 2), *rest, **how)
