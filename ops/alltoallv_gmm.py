"""``alltoallv_gmm`` and ``gmm_alltoallv``: rows to the ranks of their experts and one product there, and the way back.

R ranks hold e experts each. Both ops move rows between two orders:

* where tokens are: by expert, all experts of rank 0 first; so by (rank, expert of that rank);
* where experts are: by expert, and inside an expert by the rank that the rows come from.

``send_counts[q * e + i]`` and ``recv_counts[q * e + i]`` say how many rows go to, and come from, rank q for the i-th
expert of the rank that holds it. They are numbers on the host: a row travels once per expert, and nothing else is told.

    alltoallv_gmm:  rows = what arrives, by expert;    y[rows of i] = rows[rows of i] @ op(W[i])
    gmm_alltoallv:  y[rows of i] = x[rows of i] @ op(W[i]);    the result is y where the tokens are

``layout="nn"``: W [e, K, N]; ``"nt"``: W [e, N, K]. Products are summed in f32 (f64 for f64) and rounded once, to the
dtype of ``x``. Without a weight rows are moved and not multiplied. Experts and ranks may have no rows.

Each op is the other's derivative, so both can be differentiated any number of times; the gradient of W is the sum over
an expert's rows, exactly zero for an expert without rows. All ranks make the same calls, in the backward too.

``least_rows`` is a promise, the same on all ranks: every rank sends and receives at least that many rows. Kernels that
cannot do with a rank without rows ask for it, because a rank on its own cannot choose another kernel than the rest.

A call whose ``recv_counts`` are not what the other ranks send hangs, or gives rows of others. With ASCEND_DEEP_DEBUG=1
the ranks compare them first. Contract: torch_npu's ``npu_alltoallv_gmm`` and ``npu_gmm_alltoallv`` without their second
product, which is a shared expert's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.c10d import fused
from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import AlltoallvGmm
from ascend_deep.ops import _check
from ascend_deep.ops._op import OpDef, Sample, Tolerance, call
from ascend_deep.ops.k_grouped_gemm_bf16 import k_grouped_gemm_bf16

__all__ = ["ALLTOALLV_GMM", "GMM_ALLTOALLV", "alltoallv_gmm", "gmm_alltoallv"]

LAYOUTS = ("nn", "nt")


def alltoallv_gmm(
    x: Tensor,
    weight: Tensor | None,
    *,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    least_rows: int = 0,
    layout: str = "nn",
    group_size: int = 1,
    group: str = "",
) -> tuple[Tensor, Tensor]:
    """Rows to the ranks of their experts, and there times the matrix of the expert; see the module.

    Args:
        x: [S, K] floating, rows by (rank, expert); S is the sum of ``send_counts``.
        weight: [e, K, N] or [e, N, K] in the dtype of ``x``, by ``layout``; ``None``: no product.
        send_counts, recv_counts: R * e numbers each, see the module.
        least_rows: every rank sends and receives at least that many rows; the same on all ranks.
        layout: ``"nn"`` or ``"nt"``.
        group_size: R. A group of one needs no process group.
        group: name of the process group, ``ProcessGroup.group_name``.

    Returns:
        y [A, N] (empty without a weight) and the rows that arrived [A, K], both by expert and source rank; A is the sum
        of ``recv_counts``. Differentiable in x and weight.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: with ASCEND_DEEP_DEBUG=1, counts of two ranks that differ.
    """
    return call(
        "alltoallv_gmm",
        x,
        weight,
        send_counts=send_counts,
        recv_counts=recv_counts,
        least_rows=least_rows,
        layout=layout,
        group_size=group_size,
        group=group,
    )


def gmm_alltoallv(
    x: Tensor,
    weight: Tensor | None,
    *,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    least_rows: int = 0,
    layout: str = "nn",
    group_size: int = 1,
    group: str = "",
) -> Tensor:
    """Rows times the matrix of their expert, and then back to the ranks of their tokens; see the module.

    Args:
        x: [A, K] floating, rows by expert and destination rank; A is the sum of ``send_counts``.
        weight: [e, K, N] or [e, N, K] in the dtype of ``x``, by ``layout``; ``None``: no product.
        send_counts, recv_counts: R * e numbers each: those of ``alltoallv_gmm`` the other way round.
        least_rows, layout, group_size, group: as for ``alltoallv_gmm``.

    Returns:
        [S, N] by (rank, expert); S is the sum of ``recv_counts``. Differentiable in x and weight.

    Raises:
        ValueError, TypeError, RuntimeError: as for ``alltoallv_gmm``.
    """
    return call(
        "gmm_alltoallv",
        x,
        weight,
        send_counts=send_counts,
        recv_counts=recv_counts,
        least_rows=least_rows,
        layout=layout,
        group_size=group_size,
        group=group,
    )


def _check_call(op: str, args: AlltoallvGmm) -> None:
    x, weight, ranks = args.x, args.weight, args.group_size
    torch._check_value(ranks >= 1, lambda: f"{op}: group_size is {ranks}; it must be at least 1.")
    torch._check_value(args.least_rows >= 0, lambda: f"{op}: least_rows is {args.least_rows}; it must be at least 0.")
    _check.choice(op, "layout", args.layout, LAYOUTS)
    _check.dtypes(op, "x", x, _check.FLOATING)
    _check.rank(op, "x", x, "[rows, K]", 2)
    found = len(args.send_counts)
    torch._check_value(
        found >= 1 and found % ranks == 0,
        lambda: f"{op}: send_counts has {found} numbers; it must have one per rank and expert, a multiple of {ranks}.",
    )
    _check.size(op, "the length of recv_counts", len(args.recv_counts), found, "that of send_counts")
    for name, counts in (("send_counts", args.send_counts), ("recv_counts", args.recv_counts)):
        for count in counts:
            torch._check_value(
                count >= 0, lambda name=name, count=count: f"{op}: {name} has {count}; counts are not negative."
            )
    sent, received = sum(args.send_counts), sum(args.recv_counts)
    _check.size(op, "the number of rows of x", x.shape[0], sent, "the sum of send_counts")
    for name, rows in (("send_counts", sent), ("recv_counts", received)):
        torch._check_value(
            rows >= args.least_rows,
            lambda name=name, rows=rows: f"{op}: the sum of {name} is {rows}, but least_rows is {args.least_rows}.",
        )
    if weight is None:
        return
    _check.dtypes(op, "weight", weight, (x.dtype,))
    _check.rank(op, "weight", weight, "[e, K, N]" if args.layout == "nn" else "[e, N, K]", 3)
    _check.size(
        op, "the number of matrices of weight", weight.shape[0], found // ranks, "the number of experts of a rank"
    )
    inner = weight.shape[1 if args.layout == "nn" else 2]
    _check.size(op, f"K of weight in layout {args.layout!r}", inner, x.shape[1], "K of x")
    _check.same_device(op, "x", x, weight=weight)


def _columns(args: AlltoallvGmm) -> Any:
    return args.x.shape[1] if args.weight is None else args.weight.shape[2 if args.layout == "nn" else 1]


@takes(AlltoallvGmm)
def _check_there(args: AlltoallvGmm) -> None:
    _check_call("alltoallv_gmm", args)


@takes(AlltoallvGmm)
def _check_back(args: AlltoallvGmm) -> None:
    _check_call("gmm_alltoallv", args)


@takes(AlltoallvGmm)
def _debug_there(args: AlltoallvGmm) -> None:
    fused.check_counts("alltoallv_gmm", args)


@takes(AlltoallvGmm)
def _debug_back(args: AlltoallvGmm) -> None:
    fused.check_counts("gmm_alltoallv", args)


@takes(AlltoallvGmm)
def _fake_there(args: AlltoallvGmm) -> tuple[Tensor, Tensor]:
    arrived = sum(args.recv_counts)
    y = (0, 0) if args.weight is None else (arrived, _columns(args))
    return args.x.new_empty(y), args.x.new_empty((arrived, args.x.shape[1]))


@takes(AlltoallvGmm)
def _fake_back(args: AlltoallvGmm) -> Tensor:
    return args.x.new_empty((sum(args.recv_counts), _columns(args)))


def _autocast(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What autocast does to a product; rows that are only moved stay as they are."""
    x, weight = args
    if weight is None:
        return args, kwargs

    def cast(t: Tensor) -> Tensor:
        return t if t.dtype == torch.float64 else t.to(dtype)

    return (cast(x), cast(weight)), kwargs


def _remember(ctx: Any, weight: Tensor | None, rows: Tensor, attributes: dict[str, Any]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight, rows)
    ctx.attributes = attributes
    ctx.turned = {
        **attributes,
        "send_counts": attributes["recv_counts"],
        "recv_counts": attributes["send_counts"],
        "layout": "nt" if attributes["layout"] == "nn" else "nn",
    }


def _setup_there(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _remember(ctx, inputs[1], output[1], keyword_only_inputs)


def _setup_back(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _remember(ctx, inputs[1], inputs[0], keyword_only_inputs)


def _backward_there(ctx: Any, grad: Tensor | None, grad_rows: Tensor | None) -> tuple[Tensor | None, ...]:
    weight, rows = ctx.saved_tensors
    d_x = d_weight = None
    if grad is not None and weight is not None:
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            d_x = gmm_alltoallv(grad, weight, **ctx.turned)
        if ctx.needs_input_grad[1]:
            d_weight = _weight_gradient(rows, grad, ctx.attributes["recv_counts"], ctx.attributes)
    if grad_rows is not None and ctx.needs_input_grad[0]:
        moved = gmm_alltoallv(grad_rows.contiguous(), None, **ctx.turned)
        d_x = moved if d_x is None else d_x + moved
    return d_x, d_weight


def _backward_back(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    weight, rows = ctx.saved_tensors
    if grad is None:
        return None, None
    d_x, moved = alltoallv_gmm(grad.contiguous(), weight if ctx.needs_input_grad[0] else None, **ctx.turned)
    if weight is None:
        return moved, None
    d_weight = None
    if ctx.needs_input_grad[1]:
        d_weight = _weight_gradient(rows, moved, ctx.attributes["send_counts"], ctx.attributes)
    return d_x if ctx.needs_input_grad[0] else None, d_weight


def _weight_gradient(rows: Tensor, grad: Tensor, counts: Sequence[Any], attributes: dict[str, Any]) -> Tensor:
    """Per expert the sum over its rows of row times gradient: [e, K, N] (``nn``) or [e, N, K] (``nt``)."""
    sizes = fused.by_expert(counts, attributes["group_size"])
    left, right = (rows, grad) if attributes["layout"] == "nn" else (grad, rows)
    if rows.dtype == torch.bfloat16:
        return k_grouped_gemm_bf16(left, right, fused.ends_of(sizes, rows), alignment=1)
    pieces = zip(left.split(sizes), right.split(sizes), strict=True)
    return torch.stack([a.mT @ b for a, b in pieces])


def _samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(51)
    counts, moved = [3, 0, 4], {"least_rows": 2, "group_size": 1, "group": ""}
    how: dict[str, Any] = {"send_counts": counts, "recv_counts": counts, **moved}
    rows, experts = torch.randn(7, 12, generator=g), torch.randn(3, 12, 10, generator=g) / 3
    yield Sample("nn", (rows, experts), {**how, "layout": "nn"})
    turned = experts.mT.contiguous().bfloat16()
    yield Sample("nt, bf16", (rows.bfloat16(), turned), {**how, "layout": "nt"})
    strided = rows.t().contiguous().t().half()
    yield Sample("f16, transposed", (strided, experts.half()), {**how, "layout": "nn"})
    yield Sample("no product", (rows, None), {**how, "layout": "nn"})
    none = {**how, "send_counts": [0, 0, 0], "recv_counts": [0, 0, 0], "least_rows": 0, "layout": "nn"}
    yield Sample("no rows", (rows[:0], experts), none)


_REASON = "a product of K terms, summed in f32 in any order and rounded once"
_TOLERANCE = {
    torch.float64: Tolerance(1e-12, 1e-12, "sums in f64"),
    torch.float32: Tolerance(1e-5, 1e-5, _REASON),
    torch.bfloat16: Tolerance(8e-3, 2e-4, _REASON),
    torch.float16: Tolerance(2e-3, 2e-4, _REASON),
}
_ARGUMENTS = (
    "(Tensor x, Tensor? weight, *, SymInt[] send_counts, SymInt[] recv_counts, SymInt least_rows, str layout, "
    "SymInt group_size, str group) -> "
)

ALLTOALLV_GMM = OpDef(
    name="alltoallv_gmm",
    schema=f"{_ARGUMENTS}(Tensor y, Tensor rows)",
    check=_check_there,
    reference=fused.alltoallv_gmm_reference,
    fake=_fake_there,
    setup_context=_setup_there,
    backward=_backward_there,
    autocast=_autocast,
    debug=_debug_there,
    tolerance=_TOLERANCE,
    samples=_samples,
    differentiable=("x", "weight"),
)

GMM_ALLTOALLV = OpDef(
    name="gmm_alltoallv",
    schema=f"{_ARGUMENTS}Tensor",
    check=_check_back,
    reference=fused.gmm_alltoallv_reference,
    fake=_fake_back,
    setup_context=_setup_back,
    backward=_backward_back,
    autocast=_autocast,
    debug=_debug_back,
    tolerance=_TOLERANCE,
    samples=_samples,
    differentiable=("x", "weight"),
)
