"""``ep_dispatch_cached``: other rows the way of an earlier ``ep_dispatch``. No counts, no waiting.

It needs the handle of that dispatch, its attributes, and ``num_recv``, the number of rows of its ``recv_x``. It is the
derivative of ``ep_combine``, and has ``ep_combine`` as its own.

Contract: DeepEP's cached dispatch (2.5: weights are allowed).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ascend_deep.native.c10d import normal
from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import EpDispatchCached
from ascend_deep.ops import _check, _ep
from ascend_deep.ops._ep_samples import cached_samples
from ascend_deep.ops._op import OpDef, call
from ascend_deep.ops.ep_dispatch import EXACT

__all__ = ["EP_DISPATCH_CACHED", "ep_dispatch_cached"]


def ep_dispatch_cached(
    x: Tensor,
    x_sf: Tensor | None,
    topk_weights: Tensor | None,
    topk_idx: Tensor,
    psum_rank: Tensor,
    psum_expert: Tensor,
    src_meta: Tensor,
    dst_slot: Tensor,
    aux: Tensor,
    splits: Tensor,
    *,
    num_experts: int,
    max_tokens_per_rank: int,
    num_recv: int,
    expand: bool = False,
    cpu_sync: bool = True,
    group_size: int = 1,
    group: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Dispatch ``x`` as ``topk_idx`` was dispatched before.

    Args:
        x: [T, H], dtypes of ``ep_dispatch``; H may be another.
        x_sf: [T, P] or ``None``.
        topk_weights: [T, K] floating, or ``None``.
        topk_idx: the ids of that dispatch.
        psum_rank, psum_expert, src_meta, dst_slot, aux, splits: its handle.
        num_recv: rows of its ``recv_x``.
        num_experts, max_tokens_per_rank, expand, cpu_sync, group_size, group: its attributes.

    Returns:
        recv_x [num_recv, H], recv_sf, recv_topk_weights, as ``ep_dispatch`` has them. Gradients for x and
        topk_weights.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call(
        "ep_dispatch_cached",
        x,
        x_sf,
        topk_weights,
        topk_idx,
        psum_rank,
        psum_expert,
        src_meta,
        dst_slot,
        aux,
        splits,
        num_experts=num_experts,
        max_tokens_per_rank=max_tokens_per_rank,
        num_recv=num_recv,
        expand=expand,
        cpu_sync=cpu_sync,
        group_size=group_size,
        group=group,
    )


@takes(EpDispatchCached)
def _check_args(args: EpDispatchCached) -> None:
    op = "ep_dispatch_cached"
    _ep.check_rows(op, args)
    _ep.check_handle(op, args)
    _check.same_device(op, "x", args.x, src_meta=args.src_meta, dst_slot=args.dst_slot)
    if not args.expand:
        _check.size(op, "num_recv", args.num_recv, args.src_meta.shape[0], "the number of rows of src_meta")


@takes(EpDispatchCached)
def _fake(args: EpDispatchCached) -> tuple[Tensor, Tensor, Tensor]:
    x, rows = args.x, args.num_recv
    return (
        x.new_empty((rows, x.shape[1])),
        _ep.scales_like(x, args.x_sf, rows),
        _ep.weights_like(x, args.topk_weights, rows, args.topk_idx.shape[1], args.expand),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    x, _, topk_weights, *rest = inputs
    attributes = {name: value for name, value in keyword_only_inputs.items() if name != "num_recv"}
    _ep.remember(ctx, x, topk_weights, attributes, output[0])
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*rest)


def _backward(ctx: Any, grad: Tensor | None, _sf: Any, grad_weights: Tensor | None) -> Any:
    if ctx.x_dtype not in _check.FLOATING:
        raise RuntimeError(
            f"ep_dispatch_cached: x has dtype {str(ctx.x_dtype).removeprefix('torch.')}, which has no gradient."
        )
    dx, dw = _ep.combined(ctx, grad, grad_weights)
    return dx, None, dw, *(None,) * 7


EP_DISPATCH_CACHED = OpDef(
    name="ep_dispatch_cached",
    schema=(
        f"(Tensor x, Tensor? x_sf, Tensor? topk_weights, Tensor topk_idx, {_ep.HANDLE}, *, SymInt num_experts, "
        "SymInt max_tokens_per_rank, SymInt num_recv, bool expand, bool cpu_sync, SymInt group_size, str group) -> "
        "(Tensor recv_x, Tensor recv_sf, Tensor recv_topk_weights)"
    ),
    check=_check_args,
    reference=normal.ep_dispatch_cached,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    tolerance=dict.fromkeys(_ep.MOVED, EXACT),
    samples=cached_samples,
    differentiable=("x", "topk_weights"),
)
