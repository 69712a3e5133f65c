"""``ll_dispatch``: dispatch for decoding, of few tokens, with static sizes and no look at the host.

Every (token, expert) pair becomes a row on the rank of the expert. Rows of an expert are ordered by source rank, then
by token. Two layouts:

* ``"padded"``: recv_x [E/R, R M, H], each expert's rows from the front of its block (masked grouped products);
* ``"flat"``: recv_x [R M min(K, E/R), H], one expert after the other without gaps, as torch_npu's ops have it.

Rows behind the last are zero. ``recv_count`` i32 [E/R] rows of each expert; ``src_info`` i32 token of each row at its
source, -1 for none; ``layout_range`` i64 [E/R, R]: first row << 32 | number of rows of each source rank. On NPUs the
flat layout is the vendor's alone: ``src_info`` and ``layout_range`` say nothing there, ``aux`` i32 has what the
vendor's combine wants (elsewhere it is empty), and a call that the vendor does not take is an error.

``quant="fp8"``: rows are quantised before they travel, e4m3 with one f32 scale per 128 columns, max(amax, 1e-4) / 448;
recv_sf has shape recv_x.shape[:-1] + [H / 128].

An expert may be chosen once per token; more than M tokens on a rank are refused before anything is sent, on
that rank alone (sizes are not compared: nothing is read on the host).

Contract: DeepEP's ``low_latency_dispatch``, whose order of rows is left open there and fixed here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.c10d import low_latency
from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import LlDispatch
from ascend_deep.native.torch_npu.parallel import aux_size
from ascend_deep.ops import _check, _ep
from ascend_deep.ops._ep_samples import ll_dispatch_samples
from ascend_deep.ops._op import OpDef, Tolerance, call

__all__ = ["LAYOUTS", "LL_DISPATCH", "NO_BACKWARD", "ll_dispatch"]

LAYOUTS = ("padded", "flat")
QUANTS = ("none", "fp8")


def ll_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    *,
    max_tokens_per_rank: int,
    num_experts: int,
    quant: str = "none",
    layout: str = "padded",
    group_size: int = 1,
    group: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Send every row to its experts, with static sizes; see the module.

    Args:
        x: [T, H], f32, bf16 or f16.
        topk_idx: [T, K] i64 or i32, distinct in a row; others than 0 to E - 1 are skipped.
        max_tokens_per_rank: M, the same on all ranks.
        num_experts: E, a multiple of ``group_size``.
        quant: ``"none"`` or ``"fp8"``, which needs H to be a multiple of 128.
        layout: ``"padded"`` or ``"flat"``.
        group_size, group: as in ``ep_dispatch``.

    Returns:
        recv_x, recv_sf (empty for ``"none"``), recv_count, src_info, layout_range, aux. For inference: no gradients.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call(
        "ll_dispatch",
        x,
        topk_idx,
        max_tokens_per_rank=max_tokens_per_rank,
        num_experts=num_experts,
        quant=quant,
        layout=layout,
        group_size=group_size,
        group=group,
    )


@takes(LlDispatch)
def _check_args(args: LlDispatch) -> None:
    op, most = "ll_dispatch", args.max_tokens_per_rank
    _check.choice(op, "quant", args.quant, QUANTS)
    _check.choice(op, "layout", args.layout, LAYOUTS)
    _ep.check_group(op, args.num_experts, args.group_size, most)
    _check.dtypes(op, "x", args.x, (torch.float32, torch.bfloat16, torch.float16))
    _ep.check_routing(op, args.x, args.topk_idx, None)
    tokens, hidden = args.x.shape
    torch._check_value(tokens <= most, lambda: f"{op}: x has {tokens} tokens; max_tokens_per_rank is {most}.")
    if args.quant == "fp8":
        torch._check_value(hidden % 128 == 0, lambda: f"{op}: x has {hidden} columns; fp8 needs a multiple of 128.")


@takes(LlDispatch)
def _fake(args: LlDispatch) -> tuple[Tensor, ...]:
    x, plain, flat = args.x, args.quant == "none", args.layout == "flat"
    local, hidden = args.num_experts // args.group_size, x.shape[1]
    if flat:
        rows = low_latency.ll_rows(args.group_size, args.max_tokens_per_rank, args.topk_idx.shape[1], local)
        shape: tuple[Any, ...] = (rows,)
    else:
        shape = (local, args.group_size * args.max_tokens_per_rank)
    empty = x.new_empty((0,) * (len(shape) + 1), dtype=torch.float32)
    aux = aux_size(shape[0], args.num_experts) if x.device.type == "npu" and flat else 0
    return (
        x.new_empty((*shape, hidden), dtype=x.dtype if plain else torch.float8_e4m3fn),
        empty if plain else x.new_empty((*shape, hidden // 128), dtype=torch.float32),
        x.new_empty(local, dtype=torch.int32),
        x.new_empty(shape, dtype=torch.int32),
        x.new_empty((local, args.group_size), dtype=torch.int64),
        x.new_empty(aux, dtype=torch.int32),
    )


NO_BACKWARD = "it is for inference; use ep_dispatch and ep_combine for training."
_REASON = "rows are moved; quantised ones are rounded the same way everywhere"

LL_DISPATCH = OpDef(
    name="ll_dispatch",
    schema=(
        "(Tensor x, Tensor topk_idx, *, SymInt max_tokens_per_rank, SymInt num_experts, str quant, str layout, "
        "SymInt group_size, str group) -> (Tensor recv_x, Tensor recv_sf, Tensor recv_count, Tensor src_info, "
        "Tensor layout_range, Tensor aux)"
    ),
    check=_check_args,
    reference=low_latency.ll_dispatch,
    fake=_fake,
    no_backward=NO_BACKWARD,
    tolerance={d: Tolerance(0, 0, _REASON) for d in (torch.float32, torch.bfloat16, torch.float16)},
    samples=ll_dispatch_samples,
)
