"""``alltoallv_gmm`` and ``gmm_alltoallv`` by the vendor's ``npu_alltoallv_gmm`` and ``npu_gmm_alltoallv``.

The vendor's ops communicate, so all ranks have to take them or none. A limit here reads only what is the same on all
ranks: sizes of the weight, the group, and ``least_rows``, which stands for the rows of every rank. For the same reason
a call that the vendor's runtime turns down is an error and not run elsewhere.

The vendor's documents do not spell out the order of the counts; the example in the wheel has it by rank, then expert,
for both lists. Nor do they say in which order an expert's rows lie; by source rank is what its own callers rely on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import AlltoallvGmm
from ascend_deep.native.torch_npu._call import Spec, known
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.parallel import communicator
from ascend_deep.native.torch_npu.soc import Target

__all__ = ["alltoallv_gmm", "gmm_alltoallv", "limits_back", "limits_there"]

THERE, BACK = "npu_alltoallv_gmm", "npu_gmm_alltoallv"
_ROWS_MAX = 52428799  # aclnnAlltoAllvGroupedMatMulV2, constraints


def _arguments(op: str, args: AlltoallvGmm) -> tuple[Any, ...]:
    sent, received = list(args.send_counts), list(args.recv_counts)
    for name, rows in (("send_counts", sum(sent)), ("recv_counts", sum(received))):
        if known(rows) and rows > _ROWS_MAX:
            raise ValueError(f"{op}: the sum of {name} is {rows}; the vendor's op takes at most {_ROWS_MAX} rows.")
    assert args.weight is not None
    name, _ = communicator(args.group)
    return args.x.contiguous(), args.weight.contiguous(), name, int(args.group_size), sent, received


@takes(AlltoallvGmm)
def alltoallv_gmm(args: AlltoallvGmm) -> tuple[Tensor, Tensor]:
    """As the op says."""
    given, transposed = _arguments("alltoallv_gmm", args), args.layout == "nt"
    y, _, rows = torch.ops.npu.npu_alltoallv_gmm(*given, trans_gmm_weight=transposed, permute_out_flag=True)
    return y, rows


@takes(AlltoallvGmm)
def gmm_alltoallv(args: AlltoallvGmm) -> Tensor:
    """As the op says."""
    given, transposed = _arguments("gmm_alltoallv", args), args.layout == "nt"
    y: Tensor = torch.ops.npu.npu_gmm_alltoallv(*given, trans_gmm_weight=transposed)[0]
    return y


def _limits(op: str, target: Target, args: AlltoallvGmm) -> str | None:
    if args.weight is None:
        return "there is no weight; the vendor's op moves rows only along with a product."
    if args.group_size == 1:
        return "group_size is 1; the vendor's op is for several ranks."
    if target.graph and not all(map(known, (*args.send_counts, *args.recv_counts))):
        return "counts are not known when the graph is made; the graph engine takes them as numbers."
    if known(args.least_rows) and args.least_rows < 1:
        return "least_rows is 0; the vendor's op needs rows on every rank, which only a promise can tell all of them."
    # Every rank with the fewest rows that one may have, all of them of one expert.
    counts = [args.least_rows, *[0] * (len(args.send_counts) - 1)]
    x, weight = (
        Spec((args.least_rows, args.x.shape[1]), args.x.dtype),
        Spec(tuple(args.weight.shape), args.weight.dtype),
    )
    return refusal(
        op, target, x, weight, "name", int(args.group_size), counts, counts, trans_gmm_weight=args.layout == "nt"
    )


@takes(AlltoallvGmm)
def limits_there(target: Target, args: AlltoallvGmm) -> str | None:
    """Why the vendor's op does not compute this call of ``alltoallv_gmm``; ``None`` if it does."""
    return _limits(THERE, target, args)


@takes(AlltoallvGmm)
def limits_back(target: Target, args: AlltoallvGmm) -> str | None:
    """Why the vendor's op does not compute this call of ``gmm_alltoallv``; ``None`` if it does."""
    return _limits(BACK, target, args)
