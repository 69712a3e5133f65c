"""The vendor's fused moves and products on NPUs: which calls go to them, and that these compute what the ops promise.

The vendor's ops are stood in for by loops over gathered data, written from the vendor's documents, under the vendor's
names and schemas. Nothing of it has run on an NPU.
"""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_deep import ops
from ascend_deep.native.torch_npu import parallel_gemm, provider, soc
from tests.ep.ranks import Ranks
from tests.ep.test_fused import counts_of, everything, numbers

THERE = (
    "npu_alltoallv_gmm(Tensor gmm_x, Tensor gmm_weight, str hcom, int ep_world_size, int[] send_counts, "
    "int[] recv_counts, *, Tensor? send_counts_tensor=None, Tensor? recv_counts_tensor=None, Tensor? mm_x=None, "
    "Tensor? mm_weight=None, bool trans_gmm_weight=False, bool trans_mm_weight=False, bool permute_out_flag=False, "
    "str? comm_mode=None) -> (Tensor, Tensor, Tensor)"
)
BACK = (
    "npu_gmm_alltoallv(Tensor gmm_x, Tensor gmm_weight, str hcom, int ep_world_size, int[] send_counts, "
    "int[] recv_counts, *, Tensor? send_counts_tensor=None, Tensor? recv_counts_tensor=None, Tensor? mm_x=None, "
    "Tensor? mm_weight=None, bool trans_gmm_weight=False, bool trans_mm_weight=False, str? comm_mode=None) -> "
    "(Tensor, Tensor)"
)


def _everyone(*mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _start(counts: list[int], at: int) -> int:
    return sum(counts[:at])


def _vendor_there(
    x: Tensor, weight: Tensor, hcom: str, ranks: int, sent: list[int], received: list[int], *,
    trans_gmm_weight: bool = False, permute_out_flag: bool = False, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert hcom == "hccl" and x.is_contiguous() and weight.is_contiguous() and permute_out_flag
    every, rank, local = _everyone(x, list(sent)), dist.get_rank(), weight.shape[0]
    rows, products = [x[:0]], [x.new_empty(0, weight.shape[1 if trans_gmm_weight else 2])]
    for i in range(local):
        matrix = weight[i].t() if trans_gmm_weight else weight[i]
        for q, (theirs, counts) in enumerate(every):
            at = rank * local + i
            assert counts[at] == received[q * local + i]
            part = theirs[_start(counts, at) :][: counts[at]]
            rows.append(part)
            products.append((part.float() @ matrix.float()).to(x.dtype))
    return torch.cat(products), x.new_empty(0), torch.cat(rows)


def _vendor_back(
    x: Tensor, weight: Tensor, hcom: str, ranks: int, sent: list[int], received: list[int], *,
    trans_gmm_weight: bool = False, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert hcom == "hccl" and x.is_contiguous() and weight.is_contiguous()
    local, parts, begin = weight.shape[0], {}, 0
    for i in range(local):
        matrix = weight[i].t() if trans_gmm_weight else weight[i]
        for q in range(ranks):
            count = sent[q * local + i]
            parts[q, i] = (x[begin : begin + count].float() @ matrix.float()).to(x.dtype)
            begin += count
    every, rank = _everyone(parts), dist.get_rank()
    back = [every[q][0][rank, i] for q in range(ranks) for i in range(local)]
    assert [len(part) for part in back] == list(received)
    return torch.cat(back), x.new_empty(0)


def _round_trip(rank: int, ranks: int) -> None:
    library = torch.library.Library("npu", "FRAGMENT")
    for schema, kernel in ((THERE, _vendor_there), (BACK, _vendor_back)):
        library.define(schema)
        library.impl(schema.partition("(")[0], kernel, "CPU")
    group = dist.group.WORLD.group_name
    # HCCL's name of the group is the one thing that needs an NPU.
    with mock.patch.object(parallel_gemm, "communicator", lambda group: ("hccl", rank)):
        for layout in ("nn", "nt"):
            table = counts_of(ranks, 3, 61) + 1
            xs, weight = everything(table, torch.bfloat16, 62)
            w = weight[rank * 3 : rank * 3 + 3]
            w = (w if layout == "nn" else w.mT).contiguous()
            how: dict[str, Any] = {"layout": layout, "group_size": ranks, "group": group}
            there = {**numbers(table, rank), "least_rows": 3 * ranks, **how}
            back = {**there, "send_counts": there["recv_counts"], "recv_counts": there["send_counts"]}
            back["layout"] = "nt" if layout == "nn" else "nn"
            with soc.planned("950dt"):
                for name, call in (("alltoallv_gmm", there), ("gmm_alltoallv", back)):
                    columns = xs[rank] if name == "alltoallv_gmm" else xs[rank].new_empty(1, 10)
                    assert ops.provider(name, "npu", (columns, w), call).name == "torch_npu"
            kernels = provider.TORCH_NPU.kernels
            strided = xs[rank].t().contiguous().t()
            y, rows = kernels["alltoallv_gmm"](strided, w, **there)
            want, want_rows = ops.alltoallv_gmm(xs[rank], w, **there)
            assert rows.equal(want_rows)
            torch.testing.assert_close(y, want, rtol=8e-3, atol=2e-4)
            got = kernels["gmm_alltoallv"](y, w, **back)
            torch.testing.assert_close(got, ops.gmm_alltoallv(y, w, **back), rtol=8e-3, atol=2e-4)


def test_the_vendors_ops_compute_what_ours_promise(two: Ranks) -> None:
    two(_round_trip)


def _reason(family: str = "910_93", op: str = "alltoallv_gmm", **changed: Any) -> str:
    how = {"rows": 512, "k": 2048, "n": 2048, "local": 4, "ranks": 8, "dtype": torch.bfloat16, "none": False, **changed}
    weight = torch.empty(how["local"], how["k"], how["n"], dtype=how["dtype"], device="meta")
    counts = [how["rows"], *[0] * (how["local"] * how["ranks"] - 1)]
    x = torch.empty(how["rows"], how["k"], dtype=how["dtype"], device="meta")
    given = {"send_counts": counts, "recv_counts": counts, "least_rows": changed.get("least_rows", how["rows"])}
    attributes = {**given, "layout": "nn", "group_size": how["ranks"], "group": "ep"}
    with soc.planned(family):
        choice = ops.provider(op, "npu", (x, None if how["none"] else weight), attributes)
    if choice.name == "torch_npu":
        return ""
    (reason,) = (r.reason for r in choice.refusals if r.provider == "torch_npu")
    return reason


@pytest.mark.parametrize("op", ["alltoallv_gmm", "gmm_alltoallv"])
@pytest.mark.parametrize(
    ("family", "changed", "sentence"),
    [
        ("910b", {}, "is not made for the Ascend 910b"),
        ("950pr", {}, "is not made for the Ascend 950pr"),
        ("910_93", {"none": True}, "there is no weight; the vendor's op moves rows only along with a product."),
        ("910_93", {"ranks": 1}, "group_size is 1; the vendor's op is for several ranks."),
        ("910_93", {"ranks": 4}, "takes 8, 16, 32 or 64 for ep_world_size, not 4"),
        ("950dt", {"ranks": 3}, "takes 2, 4, 8, 16, 32 or 64 for ep_world_size, not 3"),
        ("910_93", {"least_rows": 0}, "least_rows is 0; the vendor's op needs rows on every rank"),
        ("910_93", {"least_rows": 511}, "takes at least 2097152 for the bytes that send_counts move, not 2093056"),
        ("910_93", {"local": 33}, "takes at most 32 for the experts of a rank, not 33"),
        ("910_93", {"local": 20, "ranks": 16}, "takes at most 256 for the numbers of send_counts, not 320"),
        ("910_93", {"dtype": torch.float32}, "takes float16 or bfloat16 for gmm_x, not float32"),
        ("910_93", {"n": 65536, "local": 1}, "takes at most 65535 for the columns of the result, not 65536"),
    ],
)
def test_neighbours_of_calls_that_the_vendor_takes(
    op: str, family: str, changed: dict[str, Any], sentence: str
) -> None:
    assert _reason(op=op) == _reason("950dt", op=op) == _reason("950dt", op=op, ranks=2, least_rows=1) == ""
    assert re.search(sentence, _reason(family, op, **changed)), _reason(family, op, **changed)


def test_what_moves_is_counted_where_it_moves() -> None:
    """There the rows of x travel, back the rows of the product."""
    assert _reason(k=1024) != "" and _reason(k=1024, op="gmm_alltoallv") == ""
    assert _reason(n=1024) == "" and _reason(n=1024, op="gmm_alltoallv") != ""


@pytest.mark.parametrize("op", ["alltoallv_gmm", "gmm_alltoallv"])
def test_what_a_rank_has_does_not_decide(op: str) -> None:
    """Ranks with other counts, and the same promise, get the same answer: else some of them would wait for ever."""
    for rows in (512, 513, 90000):
        assert _reason(op=op, rows=rows, least_rows=512) == ""
        assert _reason(op=op, rows=rows, least_rows=100) != ""


@pytest.mark.parametrize("op", ["alltoallv_gmm", "gmm_alltoallv"])
def test_a_call_that_the_runtime_turns_down_is_not_run_elsewhere(op: str) -> None:
    """The other ranks may have taken it, and wait in the vendor's op."""
    x, weight = torch.ones(4, 3), torch.ones(1, 3, 3)
    how = {"send_counts": [2, 2], "recv_counts": [2, 2], "least_rows": 4, "layout": "nn", "group_size": 2, "group": "g"}
    refused = RuntimeError("161002: not support")
    with (
        mock.patch.object(parallel_gemm, "communicator", side_effect=refused),
        pytest.raises(RuntimeError, match="161"),
    ):
        provider.TORCH_NPU.kernels[op](x, weight, **how)
    assert not provider.REFUSED_AT_RUN_TIME
