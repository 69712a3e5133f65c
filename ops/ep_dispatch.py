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


def _check_args(
    x: Tensor,
    x_sf: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    *,
    num_experts: int,
    max_tokens_per_rank: int,
    expert_alignment: int,
    expand: bool,
    cpu_sync: bool,
    group_size: int,
    group: str,
) -> None:
    op = "ep_dispatch"
    _ep.check_group(op, num_experts, group_size, max_tokens_per_rank)
    torch._check_value(
        expert_alignment >= 1, lambda: f"{op}: expert_alignment is {expert_alignment}; it must be at least 1."
    )
    _check.dtypes(op, "x", x, _ep.MOVED)
    _ep.check_routing(op, x, topk_idx, topk_weights)
    if x_sf is not None:
        _check.rank(op, "x_sf", x_sf, "[T, P]", 2)
        _check.size(op, "the number of rows of x_sf", x_sf.shape[0], x.shape[0], "the number of tokens of x")
        _check.same_device(op, "x", x, x_sf=x_sf)
    if not cpu_sync:
        torch._check_value(
            x.shape[0] <= max_tokens_per_rank,
            lambda: f"{op}: x has {x.shape[0]} tokens; max_tokens_per_rank is {max_tokens_per_rank}.",
        )


def _fake(
    x: Tensor,
    x_sf: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    *,
    num_experts: int,
    max_tokens_per_rank: int,
    expert_alignment: int,
    expand: bool,
    cpu_sync: bool,
    group_size: int,
    group: str,
) -> tuple[Tensor, ...]:
    topk, local = topk_idx.shape[1], num_experts // group_size
    most = group_size * max_tokens_per_rank
    rows = _ep.new_size(most) if cpu_sync else most
    count: Any = rows
    if expand:
        bound = normal.expanded_bound(group_size, max_tokens_per_rank, topk, local, expert_alignment)
        count = _ep.new_size(bound) if cpu_sync else bound
    return (
        x.new_empty((count, x.shape[1])),
        x.new_empty((0, 0), dtype=torch.float32) if x_sf is None else x_sf.new_empty((count, x_sf.shape[1])),
        topk_idx.new_empty((0 if expand else count, topk), dtype=torch.int64),
        _ep.weights_like(x, topk_weights, count, topk, expand),
        x.new_empty(local, dtype=torch.int32),
        x.new_empty(group_size, dtype=torch.int32),
        x.new_empty(local, dtype=torch.int32),
        x.new_empty((rows, topk + 2), dtype=torch.int32),
        x.new_empty(topk_idx.shape, dtype=torch.int32),
        x.new_empty(0, dtype=torch.int32),
        torch.empty((3, group_size), dtype=torch.int64, device="cpu"),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    x, _, topk_idx, topk_weights = inputs
    attributes = dict(keyword_only_inputs)
    del attributes["expert_alignment"]
    ctx.attributes = attributes
    ctx.rows = output[0].shape
    ctx.x_dtype, ctx.weighted = x.dtype, topk_weights is not None
    ctx.mark_non_differentiable(output[1], output[2], *output[4:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(topk_idx, *output[5:])


def _backward(ctx: Any, grad: Tensor | None, _sf: Any, _idx: Any, grad_weights: Tensor | None, *_: Any) -> Any:
    topk_idx, *handle = ctx.saved_tensors
    if ctx.x_dtype not in _check.FLOATING:
        raise RuntimeError(
            f"ep_dispatch: x has dtype {str(ctx.x_dtype).removeprefix('torch.')}, which has no gradient; dispatch the "
            "rows before they are quantised where one is needed."
        )
    if grad is None and grad_weights is None:
        return None, None, None, None
    if grad is None:
        grad = topk_idx.new_zeros(ctx.rows, dtype=ctx.x_dtype)
    weights = grad_weights.contiguous() if grad_weights is not None and ctx.weighted else None
    dx, dw = torch.ops.ascend_deep.ep_combine.default(
        grad.contiguous(), weights, None, None, topk_idx, *handle, **ctx.attributes
    )
    return dx, None, None, dw if weights is not None else None


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
