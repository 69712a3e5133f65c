"""``ll_combine``: the way back of ``ll_dispatch``.

    out[t] = sum over k of topk_weights[t, k] * y[row of (t, topk_idx[t, k])]

Unlike ``ep_combine`` **it multiplies by the routing weights**: experts between ``ll_dispatch`` and ``ll_combine`` must
not. Products and sums in f32, in the order of k, rounded once. Choices without an expert, and their weights, NaN
included, are skipped; rows behind the last are not looked at.

Contract: DeepEP's ``low_latency_combine``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.c10d import low_latency
from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import LlCombine
from ascend_deep.ops import _check, _ep
from ascend_deep.ops._ep_samples import ll_combine_samples
from ascend_deep.ops._op import OpDef, Tolerance, call
from ascend_deep.ops.ll_dispatch import LAYOUTS, NO_BACKWARD

__all__ = ["LL_COMBINE", "ll_combine"]


def ll_combine(
    y: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    src_info: Tensor,
    layout_range: Tensor,
    aux: Tensor,
    *,
    max_tokens_per_rank: int,
    num_experts: int,
    layout: str = "padded",
    group_size: int = 1,
    group: str = "",
) -> Tensor:
    """Bring the experts' rows back, weigh them and sum them; see the module.

    Args:
        y: as recv_x of ``ll_dispatch``: [E/R, R M, H] or [R M min(K, E/R), H]; f32, bf16 or f16.
        topk_idx: the ids of the dispatch.
        topk_weights: [T, K] floating.
        src_info, layout_range, aux: what the dispatch returned.
        max_tokens_per_rank, num_experts, layout, group_size, group: its attributes.

    Returns:
        [T, H] in the dtype of ``y``. For inference: no gradients.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call(
        "ll_combine",
        y,
        topk_idx,
        topk_weights,
        src_info,
        layout_range,
        aux,
        max_tokens_per_rank=max_tokens_per_rank,
        num_experts=num_experts,
        layout=layout,
        group_size=group_size,
        group=group,
    )


@takes(LlCombine)
def _check_args(args: LlCombine) -> None:
    op, flat, ranks = "ll_combine", args.layout == "flat", args.group_size
    y, topk_idx, topk_weights, layout_range = args.y, args.topk_idx, args.topk_weights, args.layout_range
    _check.choice(op, "layout", args.layout, LAYOUTS)
    _ep.check_group(op, args.num_experts, ranks, args.max_tokens_per_rank)
    _check.dtypes(op, "y", y, (torch.float32, torch.bfloat16, torch.float16))
    _check.rank(op, "y", y, "[R M min(K, E/R), H]" if flat else "[E/R, R M, H]", 2 if flat else 3)
    _check.dtypes(op, "topk_idx", topk_idx, _check.INDEX)
    _check.rank(op, "topk_idx", topk_idx, "[T, K]", 2)
    _check.dtypes(op, "topk_weights", topk_weights, _check.FLOATING)
    _check.rank(op, "topk_weights", topk_weights, "[T, K]", 2)
    _check.dtypes(op, "src_info", args.src_info, (torch.int32,))
    _check.dtypes(op, "layout_range", layout_range, (torch.int64,))
    _check.rank(op, "layout_range", layout_range, "[E/R, R]", 2)
    _check.dtypes(op, "aux", args.aux, (torch.int32,))
    local = args.num_experts // ranks
    sizes = [
        ("the number of rows of topk_weights", topk_weights.shape[0], topk_idx.shape[0], "that of topk_idx"),
        ("the number of columns of topk_weights", topk_weights.shape[1], topk_idx.shape[1], "that of topk_idx"),
        ("the number of rows of layout_range", layout_range.shape[0], local, "the number of experts of a rank"),
        ("the number of columns of layout_range", layout_range.shape[1], ranks, "group_size"),
    ]
    if flat:
        rows = low_latency.ll_rows(ranks, args.max_tokens_per_rank, topk_idx.shape[1], local)
        sizes.append(("the number of rows of y", y.shape[0], rows, "R M min(K, E/R)"))
    else:
        sizes.append(("the number of experts of y", y.shape[0], local, "that of a rank"))
        sizes.append(("the number of rows of an expert of y", y.shape[1], ranks * args.max_tokens_per_rank, "R M"))
    for what, found, wanted, source in sizes:
        _check.size(op, what, found, wanted, source)
    _check.same_device(op, "y", y, topk_idx=topk_idx, topk_weights=topk_weights, layout_range=layout_range)


def _fake(y: Tensor, topk_idx: Tensor, *_: Any, **__: Any) -> Tensor:
    return y.new_empty((topk_idx.shape[0], y.shape[-1]))


_REASON = "K products summed in f32 and rounded once"

LL_COMBINE = OpDef(
    name="ll_combine",
    schema=(
        "(Tensor y, Tensor topk_idx, Tensor topk_weights, Tensor src_info, Tensor layout_range, Tensor aux, *, "
        "SymInt max_tokens_per_rank, SymInt num_experts, str layout, SymInt group_size, str group) -> Tensor"
    ),
    check=_check_args,
    reference=low_latency.ll_combine,
    fake=_fake,
    no_backward=NO_BACKWARD,
    tolerance={
        torch.float32: Tolerance(1e-5, 1e-6, _REASON),
        torch.bfloat16: Tolerance(8e-3, 1e-3, _REASON),
        torch.float16: Tolerance(1e-3, 1e-4, _REASON),
    },
    samples=ll_combine_samples,
)
