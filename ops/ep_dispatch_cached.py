"""``ep_dispatch_cached``: other rows the way of an earlier ``ep_dispatch``. No counts, no waiting.

It needs the handle of that dispatch, its attributes, and ``num_recv``, the number of rows of its ``recv_x``. It is the
derivative of ``ep_combine``, and has ``ep_combine`` as its own.

Contract: DeepEP's cached dispatch (2.5: weights are allowed).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.c10d import normal
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


def _check_args(
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
    expand: bool,
    cpu_sync: bool,
    group_size: int,
    group: str,
) -> None:
    op = "ep_dispatch_cached"
    _ep.check_group(op, num_experts, group_size, max_tokens_per_rank)
    _check.dtypes(op, "x", x, _ep.MOVED)
    _ep.check_routing(op, x, topk_idx, topk_weights)
    _ep.check_handle(
        op, topk_idx, psum_rank, psum_expert, src_meta, dst_slot, aux, splits, num_experts, group_size
    )  # fmt: skip
    if x_sf is not None:
        _check.rank(op, "x_sf", x_sf, "[T, P]", 2)
        _check.size(op, "the number of rows of x_sf", x_sf.shape[0], x.shape[0], "the number of tokens of x")
    _check.same_device(op, "x", x, x_sf=x_sf, src_meta=src_meta, dst_slot=dst_slot)
    if not expand:
        _check.size(op, "num_recv", num_recv, src_meta.shape[0], "the number of rows of src_meta")


def _fake(
    x: Tensor,
    x_sf: Tensor | None,
    topk_weights: Tensor | None,
    topk_idx: Tensor,
    *_: Any,
    num_recv: int,
    expand: bool,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty((num_recv, x.shape[1])),
        x.new_empty((0, 0), dtype=torch.float32) if x_sf is None else x_sf.new_empty((num_recv, x_sf.shape[1])),
        _ep.weights_like(x, topk_weights, num_recv, topk_idx.shape[1], expand),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    x, _, topk_weights, *rest = inputs
    attributes = dict(keyword_only_inputs)
    del attributes["num_recv"]
    ctx.attributes = attributes
    ctx.rows, ctx.x_dtype, ctx.weighted = output[0].shape, x.dtype, topk_weights is not None
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*rest)


def _backward(ctx: Any, grad: Tensor | None, _sf: Any, grad_weights: Tensor | None) -> Any:
    if ctx.x_dtype not in _check.FLOATING:
        raise RuntimeError(
            f"ep_dispatch_cached: x has dtype {str(ctx.x_dtype).removeprefix('torch.')}, which has no gradient."
        )
    none = (None,) * 7
    if grad is None and grad_weights is None:
        return None, None, None, *none
    saved = ctx.saved_tensors
    if grad is None:
        grad = saved[0].new_zeros(ctx.rows, dtype=ctx.x_dtype)
    weights = grad_weights.contiguous() if grad_weights is not None and ctx.weighted else None
    dx, dw = torch.ops.ascend_deep.ep_combine.default(grad.contiguous(), weights, None, None, *saved, **ctx.attributes)
    return dx, None, dw if weights is not None else None, *none


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
