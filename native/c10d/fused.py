"""Rows to their experts and one grouped product, or a grouped product and its rows back; ``ops/alltoallv_gmm.py``.

Counts are known on the host, so what is moved is known too: nothing is read from the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.c10d.transport import exchange, require_group
from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import AlltoallvGmm

__all__ = [
    "alltoallv_gmm",
    "alltoallv_gmm_reference",
    "by_expert",
    "check_counts",
    "ends_of",
    "gmm_alltoallv",
    "gmm_alltoallv_reference",
]

Product = Callable[[Tensor, Tensor, Sequence[Any], str], Tensor]


def by_rank(counts: Sequence[Any], ranks: int) -> list[list[Any]]:
    """``counts`` [R * e] as one list of e numbers per rank."""
    local = len(counts) // ranks
    return [list(counts[q * local : (q + 1) * local]) for q in range(ranks)]


def by_expert(counts: Sequence[Any], ranks: int) -> list[Any]:
    """Rows of each of the e experts of this rank, all ranks together."""
    return [sum(column) for column in zip(*by_rank(counts, ranks), strict=True)]


def ends_of(sizes: Sequence[Any], like: Tensor) -> Tensor:
    """Where the groups of ``sizes`` rows end, i32 on the device of ``like``: a grouped layout ``psum``, alignment 1."""
    ends = list(itertools.accumulate(sizes))
    if isinstance(like, torch.nn.Parameter) or type(like) is Tensor:
        return torch.tensor(ends, dtype=torch.int32, device=like.device)
    # While a graph is made: a constant would be a tensor of the host in it, and a size that is not known none at all.
    return torch.stack([torch.full((), end, dtype=torch.int32, device=like.device) for end in ends])


def _exact(rows: Tensor, weight: Tensor, sizes: Sequence[Any], layout: str) -> Tensor:
    """The definition: one product per expert in f32 (f64 for f64), rounded once."""
    compute = torch.float64 if rows.dtype == torch.float64 else torch.float32
    wide = weight.to(compute)
    pieces = rows.split(list(sizes))
    return torch.cat(
        [(p.to(compute) @ (w.mT if layout == "nt" else w)).to(rows.dtype) for p, w in zip(pieces, wide, strict=True)]
    )


def _fast(rows: Tensor, weight: Tensor, sizes: Sequence[Any], layout: str) -> Tensor:
    """The same; rows of bfloat16 by ``m_grouped_gemm_bf16``, which has kernels on every device."""
    if rows.dtype != torch.bfloat16:
        return _exact(rows, weight, sizes, layout)
    ends = ends_of(sizes, rows)
    return torch.ops.ascend_deep.m_grouped_gemm_bf16.default(
        rows, weight, ends, layout=layout, grouping="psum", alignment=1, expected_m=None, zero_padding=True,
        out_dtype=None,
    )  # fmt: skip


def _there(args: AlltoallvGmm, product: Product) -> tuple[Tensor, Tensor]:
    ranks = args.group_size
    require_group("alltoallv_gmm", args.group, int(ranks))
    sent, received = by_rank(args.send_counts, ranks), by_rank(args.recv_counts, ranks)
    arrived = exchange(args.x, [sum(r) for r in received], [sum(s) for s in sent], args.group, int(ranks))
    local = len(args.send_counts) // ranks
    pieces = arrived.split(list(args.recv_counts))
    rows = torch.cat([pieces[q * local + i] for i in range(local) for q in range(ranks)])
    if args.weight is None:
        return rows.new_empty((0, 0)), rows
    return product(rows, args.weight, by_expert(args.recv_counts, ranks), args.layout), rows


def _back(args: AlltoallvGmm, product: Product) -> Tensor:
    ranks = args.group_size
    require_group("gmm_alltoallv", args.group, int(ranks))
    sent, received = by_rank(args.send_counts, ranks), by_rank(args.recv_counts, ranks)
    y = args.x
    if args.weight is not None:
        y = product(y, args.weight, by_expert(args.send_counts, ranks), args.layout)
    local = len(args.send_counts) // ranks
    pieces = y.split([sent[q][i] for i in range(local) for q in range(ranks)])
    buffer = torch.cat([pieces[i * ranks + q] for q in range(ranks) for i in range(local)])
    return exchange(buffer, [sum(r) for r in received], [sum(s) for s in sent], args.group, int(ranks))


@takes(AlltoallvGmm)
def alltoallv_gmm_reference(args: AlltoallvGmm) -> tuple[Tensor, Tensor]:
    """As the op says."""
    return _there(args, _exact)


@takes(AlltoallvGmm)
def gmm_alltoallv_reference(args: AlltoallvGmm) -> Tensor:
    """As the op says."""
    return _back(args, _exact)


@takes(AlltoallvGmm)
def alltoallv_gmm(args: AlltoallvGmm) -> tuple[Tensor, Tensor]:
    """As the op says."""
    return _there(args, _fast)


@takes(AlltoallvGmm)
def gmm_alltoallv(args: AlltoallvGmm) -> Tensor:
    """As the op says."""
    return _back(args, _fast)


def check_counts(op: str, args: AlltoallvGmm) -> None:
    """Raise ``RuntimeError`` on every rank if one expects another number of rows than is sent to it.

    All ranks have to call it: it exchanges the counts.
    """
    ranks = int(args.group_size)
    require_group(op, args.group, ranks)
    each = [1] * ranks
    sent = torch.tensor(by_rank(args.send_counts, ranks), dtype=torch.int64, device=args.x.device)
    told = exchange(sent, each, each, args.group, ranks)
    expected = torch.tensor(by_rank(args.recv_counts, ranks), dtype=torch.int64, device=args.x.device)
    wrong = (told != expected).any().to(torch.int64)
    flags = exchange(wrong.repeat(ranks, 1), each, each, args.group, ranks).reshape(-1).tolist()
    if any(flags):
        where = " and ".join(f"rank {q}" for q, flag in enumerate(flags) if flag)
        raise RuntimeError(f"{op}: recv_counts of {where} differ from what the other ranks send there by send_counts.")
