"""The vendor's dispatch and combine on NPUs: which calls go to them, and that these compute what the ops promise.

The vendor's ops are stood in for by loops over gathered data, written from the vendor's documents, under the vendor's
names and schemas. What those leave undefined is NaN or arbitrary here. Nothing of it has run on an NPU.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native.c10d import low_latency
from ascend_deep.native.torch_npu import parallel, soc
from tests.ep.cases import case
from tests.ep.ranks import Ranks

E, K, H, M = 8, 3, 1024, 8
DISPATCH = (
    "npu_moe_distribute_dispatch_v2(Tensor x, Tensor expert_ids, str group_ep, int ep_world_size, int ep_rank_id, "
    "int moe_expert_num, *, Tensor? scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None, "
    "Tensor? elastic_info=None, Tensor? performance_info=None, str group_tp='', int tp_world_size=0, int tp_rank_id=0, "
    "int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int quant_mode=0, "
    "int global_bs=0, int expert_token_nums_type=1, str comm_alg='', int zero_expert_num=0, int copy_expert_num=0, "
    "int const_expert_num=0, int? y_dtype=None, int? x_dtype=None, int? scales_dtype=None) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
COMBINE = (
    "npu_moe_distribute_combine_v2(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, "
    "Tensor ep_send_counts, Tensor expert_scales, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, "
    "*, Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None, "
    "Tensor? shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None, Tensor? const_expert_alpha_1=None, "
    "Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, Tensor? performance_info=None, str group_tp='', "
    "int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1, "
    "int shared_expert_rank_num=0, int global_bs=0, int comm_quant_mode=0, str comm_alg='', int zero_expert_num=0, "
    "int copy_expert_num=0, int const_expert_num=0) -> Tensor"
)


def _everyone(*mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _legal(ids: Tensor, mask: Tensor, experts: int) -> None:
    assert ids.dtype == torch.int32 and ((ids >= 0) & (ids < experts)).all()
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert mask.dtype == torch.bool and mask.shape == ids.shape


def _vendor_dispatch(
    x: Tensor, ids: Tensor, group: str, ranks: int, rank: int, experts: int, *, x_active_mask: Tensor, global_bs: int,
    **given: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    _legal(ids, x_active_mask, experts)
    every = _everyone(x, ids, x_active_mask)
    assert len({e[0].shape for e in every}) == 1 and global_bs == ranks * x.shape[0], "a mask needs equal batches"
    assert group == "hccl" and given.get("expert_token_nums_type", 1) == 1
    local = experts // ranks
    a = global_bs * min(local, ids.shape[1])
    rows, info = x.new_full((a, x.shape[1]), torch.nan), torch.full((a, 128), -7, dtype=torch.int32)
    counts = torch.zeros(local, dtype=torch.int64)
    prefix, n = [], 0
    for e in range(local):
        for q, (theirs, chosen, active) in enumerate(every):
            for t in range(theirs.shape[0]):
                for k in range(ids.shape[1]):
                    if active[t, k] and chosen[t, k] == rank * local + e:
                        rows[n] = theirs[t]
                        info[n, :3] = torch.tensor([q, t, k])
                        counts[e] += 1
                        n += 1
            prefix.append(n)
    empty = x.new_empty(0, dtype=torch.float32)
    return rows, empty, info.view(-1), counts, torch.tensor(prefix, dtype=torch.int32), ids.new_empty(0), empty.clone()


def _vendor_combine(
    y: Tensor, ids: Tensor, info: Tensor, received: Tensor, scales: Tensor, group: str, ranks: int, rank: int,
    experts: int, *, x_active_mask: Tensor, global_bs: int, **_: Any,
) -> Tensor:  # fmt: skip
    _legal(ids, x_active_mask, experts)
    assert scales.dtype == torch.float32 and received.shape == (experts,) and group == "hccl"
    out = torch.zeros(ids.shape[0], y.shape[1])
    for theirs, about, ends in _everyone(y, info.view(-1, 128), received):
        for n in range(int(ends[-1])):
            q, t, k = about[n, :3].tolist()
            if q == rank:
                out[t] += scales[t, k] * theirs[n].float()
    return out.to(y.dtype)


def _round_trip(rank: int, ranks: int) -> None:
    library = torch.library.Library("npu", "FRAGMENT")
    for schema, kernel in ((DISPATCH, _vendor_dispatch), (COMBINE, _vendor_combine)):
        library.define(schema)
        library.impl(schema.partition("(")[0], kernel, "CPU")
    # HCCL's name of the group is the one thing that needs an NPU.
    with mock.patch.object(parallel, "communicator", lambda group: ("hccl", rank)):
        _both(rank, ranks)


def _both(rank: int, ranks: int) -> None:
    for tokens in ([6, 3], [0, 8]):
        data = case(tokens, E, K, H, seed=11, dtype=torch.bfloat16)
        how: dict[str, Any] = {"max_tokens_per_rank": M, "num_experts": E, "group_size": ranks, "layout": "flat"}
        how["group"] = dist.group.WORLD.group_name
        x, idx = data.x[rank], data.idx[rank]
        with soc.planned("910_93"):
            assert ops.provider("ll_dispatch", "npu", (x, idx), {**how, "quant": "none"}).name == "torch_npu"
        got, _, counts, source, where, aux = parallel.ll_dispatch(x, idx, quant="none", **how)
        want, _, wanted_counts, *handle = ops.ll_dispatch(x, idx, **how)
        assert got.equal(want) and counts.equal(wanted_counts)
        assert (source == -1).all() and not where.any() and aux.shape == (parallel.aux_size(got.shape[0], E),)
        y = (got.float() * (1.5 + rank)).bfloat16()
        y[int(counts.sum()) :] = torch.nan
        weights = torch.where(idx >= 0, data.weights[rank], torch.nan)
        back = parallel.ll_combine(y, idx, weights, source, where, aux, **how)
        torch.testing.assert_close(back, ops.ll_combine(y, idx, weights, *handle, **how), rtol=8e-3, atol=1e-3)


def test_the_vendors_ops_compute_what_ours_promise(two: Ranks) -> None:
    two(_round_trip)


def _refusal(
    family: str = "910_93", op: str = "ll_dispatch", dtype: torch.dtype = torch.bfloat16, **changed: Any
) -> str:
    how: dict[str, Any] = {
        "max_tokens_per_rank": 16, "num_experts": 32, "layout": "flat", "group_size": 8, "group": "ep", "hidden": 2048,
        "topk": 4, "quant": "none", **changed,
    }  # fmt: skip
    hidden, topk = how.pop("hidden"), how.pop("topk")
    idx = torch.zeros(5, topk, dtype=torch.int64)
    args: tuple[Tensor, ...] = (torch.empty(5, hidden, dtype=dtype), idx)
    if op == "ll_combine":
        del how["quant"]
        rows = how["group_size"] * how["max_tokens_per_rank"] * min(topk, how["num_experts"] // how["group_size"])
        y = torch.empty(rows, hidden, dtype=dtype, device="meta")
        args = (y, idx, torch.rand(5, topk), idx.int(), idx, idx.int())
    with soc.planned(family):
        choice = ops.provider(op, "npu", args, how)
    if choice.name == "torch_npu":
        return ""
    (reason,) = (r.reason for r in choice.refusals if r.provider == "torch_npu")
    return reason


@pytest.mark.parametrize("op", ["ll_dispatch", "ll_combine"])
def test_calls_that_the_vendor_takes_and_their_neighbours(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch and combine are taken or refused together: no engine reads another's handle."""
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    assert _refusal(op=op) == _refusal("950dt", op=op) == ""
    for family, changed, sentence in (
        ("950pr", {}, "npu_moe_distribute_dispatch_v2 is not made for the Ascend 950pr"),
        ("910b", {"num_experts": 32, "group_size": 16}, "takes 1 for the dimensions of x_active_mask, not 2"),
        ("910_93", {"layout": "padded"}, "layout is 'padded'; the vendor's ops have the flat one"),
        ("910_93", {"hidden": 1008}, "takes at least 1024 for the columns of the rows, not 1008"),
        ("910_93", {"max_tokens_per_rank": 513}, "takes at most 512 for the tokens of a rank, not 513"),
        ("910_93", {"topk": 17}, "takes at most 16 for the choices of a token, not 17"),
        ("910_93", {"dtype": torch.float32}, "takes float16 or bfloat16 for the rows, not float32"),
        ("910_93", {"group_size": 1}, "takes 2 to 768 for ep_world_size, not 1"),
        ("910_93", {"max_tokens_per_rank": 512, "hidden": 7168}, "HCCL_BUFFSIZE is 200 MB, and .* needs [0-9]+ MB"),
    ):
        assert re.search(sentence, _refusal(family, op=op, **changed)), (sentence, changed)
    monkeypatch.setenv("HCCL_BUFFSIZE", "1200")
    assert _refusal(op=op, max_tokens_per_rank=512, hidden=7168) == ""


def test_quantised_rows_are_not_the_vendors() -> None:
    assert _refusal(quant="fp8") == "quant is 'fp8'; the vendor's op has no FP8 with one scale per 128 columns."


def test_the_flat_layout_on_npus_is_never_served_by_another_engine() -> None:
    npu: Any = SimpleNamespace(device=SimpleNamespace(type="npu"))
    assert "on NPUs the vendor's ops serve" in str(low_latency.flat_problem(npu, "flat"))
    assert low_latency.flat_problem(npu, "padded") is None
    assert low_latency.flat_problem(torch.empty(5, 8), "flat") is None
    with pytest.raises(ValueError, match="ll_dispatch: layout is 'flat', which on NPUs"):
        low_latency.refuse_flat("ll_dispatch", npu, "flat")
