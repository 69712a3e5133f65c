"""``ep_dispatch``: every token's row goes to the ranks that hold its experts.

R ranks call it together, each with its own T tokens (0 is allowed, and they may differ). A token is sent once to every
rank that holds one of its experts. What a rank receives is ordered by source rank, then by token: the same every time.

* ``expand=False``: one row per (token, rank). ``recv_topk_idx`` [N, K] has the experts as this rank counts them,
  0 to E/R - 1, and -1 where a choice is not here; ``recv_topk_weights`` [N, K] is 0 there.
* ``expand=True``: one row per (token, expert), in one block per expert; blocks begin at multiples of
  ``expert_alignment``, gaps are zero. ``recv_topk_weights`` [N]; ``recv_topk_idx`` is empty.
* ``cpu_sync=True``: exact numbers of rows, which the host waits for; graphs hold sizes that only the data know.
* ``cpu_sync=False``: static bounds, R M rows or, expanded, align(R M min(K, E/R) + (a - 1) E/R, a). Rows behind the
  last are zero, their ids -1. (The libraries leave both uninitialised.) Nothing is read on the host.
* Rows and weights are moved, never multiplied; quantised rows travel with their scale factors ``x_sf`` as they are.
* The result holds a handle of six tensors, which ``ep_combine`` and ``ep_dispatch_cached`` take: ``psum_rank`` i32 [R],
  inclusive prefix sum of the rows of each source rank; ``psum_expert`` i32 [E/R], the same of aligned rows of each
  expert, or, expanded, where each expert's rows end; ``src_meta`` i32 [N, K + 2]: source rank * M + token, source rank
  * K + the last choice that goes here, and per choice the local expert, or, expanded, the row; ``dst_slot`` i32 [T, K]:
  rank * M + place at the last choice of each rank, else -1; ``aux`` i32, whatever a library needs besides; ``splits``
  i64 [3, R] on the CPU, rows sent, rows received, and ``max_tokens_per_rank``, ``cpu_sync`` and ``expand`` in one
  number, so that a combine with others is an error.

Checked on all ranks before the first row moves, with the same error everywhere: that sizes agree, and, with
``cpu_sync``, that no rank has more than M tokens. Without it M is checked on the rank alone, before it sends anything.

Contract: DeepEP's dispatch (2.5, and compact 2.1). Provider choice is made at run time, so no provider is an argument.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_deep.native.c10d import normal
from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import EpDispatch
from ascend_deep.ops import _check, _ep
from ascend_deep.ops._ep_samples import dispatch_samples
from ascend_deep.ops._op import OpDef, Tolerance, call

__all__ = ["EP_DISPATCH", "EXACT", "Dispatched", "ep_dispatch"]


class Dispatched(NamedTuple):
    """What ``ep_dispatch`` returns; the last six, ``result[5:]``, are the handle."""

    recv_x: Tensor
    recv_sf: Tensor
    recv_topk_idx: Tensor
    recv_topk_weights: Tensor
    num_recv_per_expert: Tensor
    psum_rank: Tensor
    psum_expert: Tensor
    src_meta: Tensor
    dst_slot: Tensor
    aux: Tensor
    splits: Tensor


def ep_dispatch(
    x: Tensor,
    x_sf: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
    *,
    num_experts: int,
    max_tokens_per_rank: int,
    expert_alignment: int = 1,
    expand: bool = False,
    cpu_sync: bool = True,
    group_size: int = 1,
    group: str = "",
) -> Dispatched:
    """Send every row to the ranks of its experts; see the module.

    Args:
        x: [T, H], f32, bf16, f16, f64, or quantised: FP8 or int8.
        x_sf: scale factors [T, P] of quantised rows, or ``None``.
        topk_idx: [T, K] i64 or i32, global expert ids; others than 0 to E - 1 are skipped.
        topk_weights: [T, K] floating, or ``None``.
        num_experts: E, a multiple of ``group_size``.
        max_tokens_per_rank: M, the same on all ranks; no rank may have more tokens.
        expert_alignment: a; blocks of an expanded dispatch begin at multiples of it.
        expand, cpu_sync: see the module.
        group_size: R. A group of one needs no process group.
        group: name of the process group, ``ProcessGroup.group_name``.

    Returns:
        ``Dispatched``: recv_x, recv_sf (empty without x_sf), recv_topk_idx i64, recv_topk_weights (dtype of
        topk_weights; empty without), num_recv_per_expert i32 [E/R], and the handle. x and topk_weights have gradients.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return Dispatched(
        *call(
            "ep_dispatch",
            x,
            x_sf,
            topk_idx,
            topk_weights,
            num_experts=num_experts,
            max_tokens_per_rank=max_tokens_per_rank,
            expert_alignment=expert_alignment,
            expand=expand,
            cpu_sync=cpu_sync,
            group_size=group_size,
            group=group,
        )
    )


@takes(EpDispatch)
def _check_args(args: EpDispatch) -> None:
    op, alignment, most = "ep_dispatch", args.expert_alignment, args.max_tokens_per_rank
    _ep.check_rows(op, args)
    torch._check_value(alignment >= 1, lambda: f"{op}: expert_alignment is {alignment}; it must be at least 1.")
    if not args.cpu_sync:
        tokens = args.x.shape[0]
        torch._check_value(tokens <= most, lambda: f"{op}: x has {tokens} tokens; max_tokens_per_rank is {most}.")


@takes(EpDispatch)
def _fake(args: EpDispatch) -> tuple[Tensor, ...]:
    x, ranks, topk = args.x, args.group_size, args.topk_idx.shape[1]
    local = args.num_experts // ranks
    most = ranks * args.max_tokens_per_rank
    rows = _ep.new_size(most) if args.cpu_sync else most
    count: Any = rows
    if args.expand:
        bound = normal.expanded_bound(ranks, args.max_tokens_per_rank, topk, local, args.expert_alignment)
        count = _ep.new_size(bound) if args.cpu_sync else bound
    return (
        x.new_empty((count, x.shape[1])),
        _ep.scales_like(x, args.x_sf, count),
        args.topk_idx.new_empty((0 if args.expand else count, topk), dtype=torch.int64),
        _ep.weights_like(x, args.topk_weights, count, topk, args.expand),
        x.new_empty(local, dtype=torch.int32),
        x.new_empty(ranks, dtype=torch.int32),
        x.new_empty(local, dtype=torch.int32),
        x.new_empty((rows, topk + 2), dtype=torch.int32),
        x.new_empty(args.topk_idx.shape, dtype=torch.int32),
        x.new_empty(0, dtype=torch.int32),
        torch.empty((3, ranks), dtype=torch.int64, device="cpu"),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    x, _, topk_idx, topk_weights = inputs
    attributes = {name: value for name, value in keyword_only_inputs.items() if name != "expert_alignment"}
    _ep.remember(ctx, x, topk_weights, attributes, output[0])
    ctx.mark_non_differentiable(output[1], output[2], *output[4:])
    ctx.save_for_backward(topk_idx, *output[5:])


def _backward(ctx: Any, grad: Tensor | None, _sf: Any, _idx: Any, grad_weights: Tensor | None, *_: Any) -> Any:
    if ctx.x_dtype not in _check.FLOATING:
        raise RuntimeError(
            f"ep_dispatch: x has dtype {str(ctx.x_dtype).removeprefix('torch.')}, which has no gradient; dispatch the "
            "rows before they are quantised where one is needed."
        )
    dx, dw = _ep.combined(ctx, grad, grad_weights)
    return dx, None, None, dw


EXACT = Tolerance(0, 0, "rows are moved, bit for bit")

EP_DISPATCH = OpDef(
    name="ep_dispatch",
    schema=(
        "(Tensor x, Tensor? x_sf, Tensor topk_idx, Tensor? topk_weights, *, SymInt num_experts, "
        "SymInt max_tokens_per_rank, SymInt expert_alignment, bool expand, bool cpu_sync, SymInt group_size, "
        "str group) -> (Tensor recv_x, Tensor recv_sf, Tensor recv_topk_idx, Tensor recv_topk_weights, "
        f"Tensor num_recv_per_expert, {_ep.HANDLE})"
    ),
    check=_check_args,
    reference=normal.ep_dispatch,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    tolerance=dict.fromkeys(_ep.MOVED, EXACT),
    samples=dispatch_samples,
    differentiable=("x", "topk_weights"),
)
