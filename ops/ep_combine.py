"""``ep_combine``: the experts' results go back to the ranks that sent the tokens, and are summed.

    out[t] = bias0[t] + bias1[t] + sum over the ranks q that token t went to of z_q[t]

``y`` has the rows of ``recv_x`` of the dispatch whose handle is given. Expanded, the rows of a token on one rank are
summed there first, in the order of its choices, and rounded to the dtype of ``y`` before they travel. All sums are in
f32 (f64 for f64 rows), in the order of the choices (``dst_slot``), and rounded once at the end.

**Nothing is multiplied by routing weights here**: the experts do that. Weights that are given travel back as data:
``combined_topk_weights[t, k]`` is what the rank of expert ``topk_idx[t, k]`` has at that choice, 0 for ids without an
expert. Rows that belong to no token (gaps, the tail) are not looked at, so NaN in them does no harm.

Contract: DeepEP's combine; its ``allow_multiple_reduction``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.c10d import normal
from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import EpCombine
from ascend_deep.ops import _check, _ep
from ascend_deep.ops._ep_samples import combine_samples
from ascend_deep.ops._op import OpDef, Tolerance, call

__all__ = ["EP_COMBINE", "ep_combine"]


def ep_combine(
    y: Tensor,
    topk_weights: Tensor | None,
    bias0: Tensor | None,
    bias1: Tensor | None,
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
    expand: bool = False,
    cpu_sync: bool = True,
    group_size: int = 1,
    group: str = "",
) -> tuple[Tensor, Tensor]:
    """Bring rows back and sum them; see the module.

    Args:
        y: [N, H] floating, one row per row of the dispatch.
        topk_weights: weights to bring back, shaped as ``recv_topk_weights``, or ``None``.
        bias0, bias1: [T, H] floating, added to the sum: a shared expert, a residual; or ``None``.
        topk_idx: the ids of the dispatch.
        psum_rank, psum_expert, src_meta, dst_slot, aux, splits: its handle.
        num_experts, max_tokens_per_rank, expand, cpu_sync, group_size, group: its attributes.

    Returns:
        combined [T, H] in the dtype of ``y``, combined_topk_weights [T, K] (empty without). All floating inputs have
        gradients.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call(
        "ep_combine",
        y,
        topk_weights,
        bias0,
        bias1,
        topk_idx,
        psum_rank,
        psum_expert,
        src_meta,
        dst_slot,
        aux,
        splits,
        num_experts=num_experts,
        max_tokens_per_rank=max_tokens_per_rank,
        expand=expand,
        cpu_sync=cpu_sync,
        group_size=group_size,
        group=group,
    )


@takes(EpCombine)
def _check_args(args: EpCombine) -> None:
    op, y, topk_weights, topk_idx = "ep_combine", args.y, args.topk_weights, args.topk_idx
    _ep.check_group(op, args.num_experts, args.group_size, args.max_tokens_per_rank)
    _ep.check_handle(op, args)
    _check.dtypes(op, "y", y, _check.FLOATING)
    _check.rank(op, "y", y, "[N, H]", 2)
    if not args.expand:
        _check.size(op, "the number of rows of y", y.shape[0], args.src_meta.shape[0], "that of src_meta")
    if topk_weights is not None:
        _check.dtypes(op, "topk_weights", topk_weights, _check.FLOATING)
        _check.rank(op, "topk_weights", topk_weights, "[N]" if args.expand else "[N, K]", 1 if args.expand else 2)
        _check.size(op, "the number of rows of topk_weights", topk_weights.shape[0], y.shape[0], "that of y")
        if not args.expand:
            columns = topk_weights.shape[1]
            _check.size(op, "the number of columns of topk_weights", columns, topk_idx.shape[1], "K")
    for name, bias in (("bias0", args.bias0), ("bias1", args.bias1)):
        if bias is not None:
            _check.dtypes(op, name, bias, _check.FLOATING)
            _check.rank(op, name, bias, "[T, H]", 2)
            _check.size(op, f"the number of rows of {name}", bias.shape[0], topk_idx.shape[0], "that of topk_idx")
            _check.size(op, f"the number of columns of {name}", bias.shape[1], y.shape[1], "that of y")
    _check.same_device(
        op, "y", y, topk_weights=topk_weights, bias0=args.bias0, bias1=args.bias1, topk_idx=topk_idx,
        src_meta=args.src_meta, dst_slot=args.dst_slot,
    )  # fmt: skip


@takes(EpCombine)
def _fake(args: EpCombine) -> tuple[Tensor, Tensor]:
    tokens, topk = args.topk_idx.shape
    out = args.y.new_empty((tokens, args.y.shape[1]))
    if args.topk_weights is None:
        return out, args.y.new_empty((0, topk), dtype=torch.float32)
    return out, args.topk_weights.new_empty((tokens, topk))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    y, topk_weights, bias0, bias1, *rest = inputs
    ctx.attributes, ctx.rows = dict(keyword_only_inputs), y.shape[0]
    ctx.y_dtype, ctx.hidden, ctx.weighted = y.dtype, y.shape[1], topk_weights is not None
    ctx.biases = tuple(None if b is None else b.dtype for b in (bias0, bias1))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*rest)


def _backward(ctx: Any, grad: Tensor | None, grad_weights: Tensor | None) -> Any:
    topk_idx, *handle = ctx.saved_tensors
    none = (None,) * 7
    if grad is None and grad_weights is None:
        return None, None, None, None, *none
    if grad is None:
        grad = topk_idx.new_zeros((topk_idx.shape[0], ctx.hidden), dtype=ctx.y_dtype)
    weights = grad_weights.contiguous() if grad_weights is not None and ctx.weighted else None
    dy, _, dw = torch.ops.ascend_deep.ep_dispatch_cached.default(
        grad.contiguous(), None, weights, topk_idx, *handle, num_recv=ctx.rows, **ctx.attributes
    )
    biases = [None if dtype is None else grad.to(dtype) for dtype in ctx.biases]
    return dy, dw if weights is not None else None, *biases, *none


_REASON = "up to K + 2 rows are summed in f32 and rounded once, expanded rows once more before they travel"

EP_COMBINE = OpDef(
    name="ep_combine",
    schema=(
        "(Tensor y, Tensor? topk_weights, Tensor? bias0, Tensor? bias1, Tensor topk_idx, "
        f"{_ep.HANDLE}, *, SymInt num_experts, SymInt max_tokens_per_rank, bool expand, bool cpu_sync, "
        "SymInt group_size, str group) -> (Tensor combined_x, Tensor combined_topk_weights)"
    ),
    check=_check_args,
    reference=normal.ep_combine,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    tolerance={
        torch.float64: Tolerance(1e-12, 1e-12, "sums in f64"),
        torch.float32: Tolerance(1e-5, 1e-6, _REASON),
        torch.bfloat16: Tolerance(1.6e-2, 1e-2, _REASON),
        torch.float16: Tolerance(2e-3, 2e-3, _REASON),
    },
    samples=combine_samples,
    differentiable=("y", "topk_weights", "bias0", "bias1"),
)
