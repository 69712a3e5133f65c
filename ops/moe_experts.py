"""``moe_experts``: the expert MLPs of a mixture-of-experts layer, and their weighted sum.

    y[t] = sum over k of  weights[t,k] * (act(x[t] @ W13[e]^T + b13[e]) @ W2[e]^T + b2[e])
    e = idx[t,k] - expert_offset

or, with ``weight_on_input`` (Llama-4), ``weights[t,k] * x[t]`` enters the first product and the result is not weighted.

* Layouts: ``"enk"`` w13 [E, N, H] and w2 [E, H, I], as ``nn.Linear`` stores them; ``"ekn"`` w13 [E, H, N] and
  w2 [E, I, H]. Any strides. N = 2 I: experts with a gate, ``interleaved`` says how the halves lie; N = I: without.
* Gate and up in two tensors: ``w13`` (N = I) is the gate and ``w3``, of the same shape, is up. ``b13`` [E, 2 I] holds
  the biases of both, those of the gate first.
* An id outside [expert_offset, expert_offset + E) contributes exactly zero and nothing is read for it, so what other
  ranks left there, NaN included, does not matter. Repeated ids in a row count as often as they appear.
* Products and sums in f32 (f64 for f64 inputs), rounded once at the end. The hidden activation stays in f32 here; a
  kernel may round it to the dtype of the weights.
* Under autocast x, the expert weights and the biases are cast, the routing weights are not, and the result has the
  dtype of the uncast x: what the Hugging Face experts compute in eager mode.

Contract: section F of the DeepGEMM operator list (``moe_ffn``), extended by the attributes that models vary.
The backward is an op of its own, ``moe_experts_backward`` (``ops/moe_experts_backward.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import MoeExperts, MoeExpertsBackward
from ascend_deep.ops import _check
from ascend_deep.ops._moe_experts_samples import samples
from ascend_deep.ops._op import OpDef, Tolerance, call
from ascend_deep.ops.activations import ACTIVATIONS, check_activation

__all__ = [
    "MOE_EXPERTS",
    "WEIGHT_LAYOUTS",
    "active_experts",
    "check_experts",
    "first_weight",
    "inner_first",
    "moe_experts",
    "split_gate_up",
]

WEIGHT_LAYOUTS = ("enk", "ekn")


def moe_experts(
    x: Tensor,
    idx: Tensor,
    weights: Tensor,
    w13: Tensor,
    b13: Tensor | None = None,
    w2: Tensor | None = None,
    b2: Tensor | None = None,
    w3: Tensor | None = None,
    *,
    act: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    interleaved: bool = False,
    weight_layout: str = "enk",
    weight_on_input: bool = False,
    expert_offset: int = 0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The expert MLPs of every token, weighted and summed; see the module for the mathematics.

    Args:
        x: [T, H], f32, bf16, f16 or f64.
        idx: [T, K] i64 or i32, global expert ids; ids outside the local range are skipped, -1 always.
        weights: [T, K], f32, bf16, f16 or f64, whatever the dtype of ``x``; never rounded.
        w13, w2: expert weights in the dtype of ``x``, shapes by ``weight_layout``. ``w2`` is required.
        b13, b2: [E, N] and [E, H] in the dtype of ``x``, or ``None``; with ``w3`` b13 is [E, 2 I].
        w3: the up half, if ``w13`` is the gate alone; shape, dtype and layout of ``w13``.
        act, alpha, limit, interleaved: see ``ops/activations.py``; ``interleaved`` needs experts with a gate.
        weight_layout: ``"enk"`` or ``"ekn"``.
        weight_on_input: the routing weight multiplies the input instead of the output.
        expert_offset: global id of the first expert in ``w13``.
        out_dtype: floating dtype of the result; ``None``: that of ``x``.

    Returns:
        [T, H], contiguous. Differentiable once in x, weights, w13, b13, w2, b2 and w3; the gradient of an expert
        without tokens is exactly zero; gradients have the dtypes of their inputs.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
        RuntimeError: with ASCEND_DEEP_DEBUG=1 and ``expert_offset`` 0, an id that is neither -1 nor an expert.
    """
    if w2 is None:
        raise TypeError("moe_experts: w2 is missing; pass the weights of the second GEMM.")
    return call(
        "moe_experts",
        x,
        idx,
        weights,
        w13,
        b13,
        w2,
        b2,
        w3,
        act=act,
        alpha=alpha,
        limit=limit,
        interleaved=interleaved,
        weight_layout=weight_layout,
        weight_on_input=weight_on_input,
        expert_offset=expert_offset,
        out_dtype=out_dtype,
    )


def check_experts(op: str, args: MoeExperts | MoeExpertsBackward) -> None:
    """The argument checks that forward and backward share. They run on every call: tests first, sentences after."""
    x, idx, weights, w13, w2, w3 = args.x, args.idx, args.weights, args.w13, args.w2, args.w3
    weight_layout, interleaved = args.weight_layout, args.interleaved
    if weight_layout not in WEIGHT_LAYOUTS:
        _check.choice(op, "weight_layout", weight_layout, WEIGHT_LAYOUTS)
    dtype = x.dtype
    if dtype not in _check.FLOATING:
        _check.dtypes(op, "x", x, _check.FLOATING)
    if idx.dtype not in _check.INDEX:
        _check.dtypes(op, "idx", idx, _check.INDEX)
    if weights.dtype not in _check.FLOATING:
        _check.dtypes(op, "weights", weights, _check.FLOATING)
    enk = weight_layout == "enk"
    x_shape, idx_shape, weights_shape, w13_shape, w2_shape = x.shape, idx.shape, weights.shape, w13.shape, w2.shape
    if not (len(x_shape) == len(idx_shape) == len(weights_shape) == 2 and len(w13_shape) == len(w2_shape) == 3):
        _check.rank(op, "x", x, "[T, H]", 2)
        _check.rank(op, "idx", idx, "[T, K]", 2)
        _check.rank(op, "weights", weights, "[T, K]", 2)
        _check.rank(op, "w13", w13, "[E, N, H]" if enk else "[E, H, N]", 3)
        _check.rank(op, "w2", w2, "[E, H, I]" if enk else "[E, I, H]", 3)
    tokens, hidden = x_shape
    experts = w13_shape[0]
    n_dim, h_dim = (1, 2) if enk else (2, 1)
    n, i = w13_shape[n_dim], w2_shape[h_dim]
    for what, found, wanted, source in (
        ("the number of rows of idx", idx_shape[0], tokens, "the number of tokens of x"),
        ("the number of rows of weights", weights_shape[0], tokens, "the number of tokens of x"),
        ("the number of columns of weights", weights_shape[1], idx_shape[1], "that of idx"),
        ("the number of experts of w2", w2_shape[0], experts, "that of w13"),
        ("H of w13 in this layout", w13_shape[h_dim], hidden, "H of x"),
        ("H of w2 in this layout", w2_shape[n_dim], hidden, "H of x"),
    ):
        if found is not wanted:
            _check.size(op, what, found, wanted, source)
    gated = w3 is not None or n != i
    if w3 is not None:
        _check_up(op, x, w13, w3, n, i, interleaved)
    elif gated and n != 2 * i:
        raise ValueError(
            f"{op}: w13 has N = {n} and w2 has I = {i}; N must be 2 I (gate and up) or I (no gate), "
            f"in layout {weight_layout!r}."
        )
    check_activation(op, args.act, args.alpha, args.limit, gated)
    if interleaved and not gated:
        raise ValueError(f"{op}: interleaved is True, but w13 has no up half (N = I = {i}).")
    if w13.dtype != dtype or w2.dtype != dtype:
        _check.dtypes(op, "w13", w13, (dtype,))
        _check.dtypes(op, "w2", w2, (dtype,))
    device = x.device
    if not (device == idx.device == weights.device == w13.device == w2.device):
        _check.same_device(op, "x", x, idx=idx, weights=weights, w13=w13, w2=w2)
    if args.b13 is not None:
        _check_bias(op, x, "b13", args.b13, "[E, N]", experts, n if w3 is None else 2 * n)
    if args.b2 is not None:
        _check_bias(op, x, "b2", args.b2, "[E, H]", experts, hidden)


def _check_up(op: str, x: Tensor, w13: Tensor, w3: Tensor, n: Any, i: Any, interleaved: bool) -> None:
    _check.dtypes(op, "w3", w3, (x.dtype,))
    _check.rank(op, "w3", w3, "the shape of w13", 3)
    for dim in range(3):
        _check.size(op, f"size {dim} of w3", w3.shape[dim], w13.shape[dim], "that of w13")
    _check.size(op, "N of w13, which with w3 is the gate alone,", n, i, "I of w2")
    _check.same_device(op, "x", x, w3=w3)
    if interleaved:
        raise ValueError(f"{op}: interleaved is True, but gate and up are two tensors, w13 and w3.")


def _check_bias(op: str, x: Tensor, name: str, bias: Tensor, shape: str, experts: int, width: int) -> None:
    _check.dtypes(op, name, bias, (x.dtype,))
    _check.rank(op, name, bias, shape, 2)
    _check.size(op, f"the number of experts of {name}", bias.shape[0], experts, "that of w13")
    _check.size(op, f"the number of columns of {name}", bias.shape[1], width, "the width of its product")
    _check.same_device(op, "x", x, **{name: bias})


@takes(MoeExperts)
def _check_args(args: MoeExperts) -> None:
    check_experts("moe_experts", args)
    if args.out_dtype is not None and args.out_dtype not in _check.FLOATING:
        raise TypeError(
            f"moe_experts: out_dtype is {args.out_dtype}; it must be a floating dtype of 16, 32 or 64 bits."
        )


def active_experts(idx: Tensor, experts: int, expert_offset: int) -> list[tuple[int, Tensor]]:
    """Local experts that have slots, ascending, each with the flat positions (t * K + k) of its slots, ascending.

    Reads the counts on the host, so a device synchronises here once.
    """
    local = idx.reshape(-1).to(torch.int64) - expert_offset
    local = torch.where((local >= 0) & (local < experts), local, experts)
    order = local.argsort(stable=True)
    counts = torch.bincount(local, minlength=experts + 1)[:experts].tolist()
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, order[start : start + count]))
            start += count
    return found


def inner_first(args: MoeExperts | MoeExpertsBackward) -> tuple[Tensor, Tensor, Tensor | None]:
    """w13, w2 and w3 as [E, what is summed, what results] views, whatever the layout."""
    if args.weight_layout == "ekn":
        return args.w13, args.w2, args.w3
    return args.w13.transpose(1, 2), args.w2.transpose(1, 2), None if args.w3 is None else args.w3.transpose(1, 2)


def first_weight(w13: Tensor, w3: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor:
    """The first weight [H, N] of one expert, from w13 and w3 as [E, H, ..]; gate before up if they are two tensors."""
    first = w13[expert].to(dtype)
    return first if w3 is None else torch.cat((first, w3[expert].to(dtype)), 1)


def split_gate_up(h: Tensor, gated: bool, interleaved: bool) -> tuple[Tensor, Tensor | None]:
    """Gate and up as views of the first product; up is ``None`` without a gate."""
    if not gated:
        return h, None
    if interleaved:
        return h[:, ::2], h[:, 1::2]
    half = h.shape[1] // 2
    return h[:, :half], h[:, half:]


@takes(MoeExperts)
def _reference(args: MoeExperts) -> Tensor:
    x, b13, b2, on_input = args.x, args.b13, args.b2, args.weight_on_input
    dtype = _check.compute_dtype(x.dtype)
    activation = ACTIVATIONS[args.act]
    w13, w2, w3 = inner_first(args)
    gated = w3 is not None or w13.shape[2] != w2.shape[1]
    slots = args.idx.shape[1]
    flat_weights = args.weights.reshape(-1)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for e, positions in active_experts(args.idx, w13.shape[0], args.expert_offset):
        tokens = positions // slots
        weight = flat_weights[positions].to(dtype).unsqueeze(1)
        rows = x[tokens].to(dtype)
        if on_input:
            rows = rows * weight
        h = rows @ first_weight(w13, w3, e, dtype)
        if b13 is not None:
            h += b13[e]
        gate, up = split_gate_up(h, gated, args.interleaved)
        y = activation.forward(gate, up, args.alpha, args.limit) @ w2[e].to(dtype)
        if b2 is not None:
            y += b2[e]
        out.index_add_(0, tokens, y if on_input else y * weight)
    return out.to(args.out_dtype or x.dtype)


@takes(MoeExperts)
def _fake(args: MoeExperts) -> Tensor:
    return args.x.new_empty(args.x.shape, dtype=args.out_dtype or args.x.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.attributes = {k: v for k, v in keyword_only_inputs.items() if k != "out_dtype"}


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    # Order of the inputs: x, idx, weights, w13, b13, w2, b2, w3; idx has no gradient.
    mask = [needs[0], *needs[2:8]]
    grads = torch.ops.ascend_deep.moe_experts_backward.default(
        grad.contiguous(), *ctx.saved_tensors, **ctx.attributes, output_mask=mask
    )
    dx, *others = (g if wanted else None for g, wanted in zip(grads, mask, strict=True))
    return dx, None, *others


def _autocast(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast x, expert weights and biases as autocast casts the inputs of a linear; f64 stays, as it does there."""
    x, idx, weights, *rest = args

    def cast(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype)

    if kwargs["out_dtype"] is None:
        kwargs = {**kwargs, "out_dtype": x.dtype}
    return (cast(x), idx, weights, *(cast(t) for t in rest)), kwargs


@takes(MoeExperts)
def _debug(args: MoeExperts) -> None:
    if args.expert_offset == 0:
        check_ids("moe_experts", args.idx, args.w13.shape[0])


def check_ids(op: str, idx: Tensor, experts: int) -> None:
    """Debug mode: every id must be -1 or in [0, experts). Reads the ids on the host."""
    bad = (idx < -1) | (idx >= experts)
    if bad.any():
        token, slot = bad.nonzero()[0].tolist()
        raise RuntimeError(
            f"{op}: idx[{token}, {slot}], of token {token}, is {idx[token, slot].item()}; ids must be in "
            f"[0, {experts}), or -1 to skip the slot."
        )


_F32 = "f32 products summed in any order over H and I, values of order 1; error grows as sqrt(H) * 2^-24"
_BF16 = "a kernel may round the hidden activation to bf16 (2^-9 relative per term) and rounds the result once"
_F16 = "a kernel may round the hidden activation to f16 (2^-12 relative per term) and rounds the result once"

TOLERANCE = {
    torch.float64: Tolerance(1e-10, 1e-12, "f64 products summed in any order"),
    torch.float32: Tolerance(1e-4, 2e-5, _F32),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2, _BF16),
    torch.float16: Tolerance(2e-3, 2e-3, _F16),
}

MOE_EXPERTS = OpDef(
    name="moe_experts",
    schema=(
        "(Tensor x, Tensor idx, Tensor weights, Tensor w13, Tensor? b13, Tensor w2, Tensor? b2, Tensor? w3, *, "
        "str act, float alpha, float? limit, bool interleaved, str weight_layout, bool weight_on_input, "
        "SymInt expert_offset, ScalarType? out_dtype) -> Tensor"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_autocast,
    debug=_debug,
    tolerance=TOLERANCE,
    samples=samples,
    differentiable=("x", "weights", "w13", "b13", "w2", "b2", "w3"),
)
