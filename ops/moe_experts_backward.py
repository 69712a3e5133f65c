"""``moe_experts_backward``: the gradients of ``moe_experts``, recomputing the hidden activation.

With G the gradient of the output row of token t, for a slot of expert e with routing weight p:

    h = p' x W13 + b13      p' = p with weight_on_input, else 1;   q = 1 with weight_on_input, else p
    a = act(h)
    d_a = q G W2^T          d_h = d_a through the activation
    d_w2 = a^T (q G)        d_b2 = q G        d_w13 = (p' x)^T d_h        d_b13 = d_h
    d_p = sum(a * (G W2^T)) + G . b2     (on the input:  x . (d_h W13^T))
    d_x = p' d_h W13^T

Slots of one expert are summed in ascending token order. Experts without tokens get exactly zero, and so do tokens and
slots whose ids are outside the local range. Arithmetic in f32 (f64), one rounding to the dtype of each input.
It is not differentiable again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ascend_deep.native.calls import takes
from ascend_deep.native.calls_moe import MoeExpertsBackward
from ascend_deep.ops import _check
from ascend_deep.ops._moe_experts_samples import samples as forward_samples
from ascend_deep.ops._op import OpDef, Sample, Tolerance
from ascend_deep.ops.activations import ACTIVATIONS
from ascend_deep.ops.moe_experts import active_experts, check_experts, first_weight, inner_first, split_gate_up

__all__ = ["MOE_EXPERTS_BACKWARD", "moe_experts_backward"]

_OP = "moe_experts_backward"


def moe_experts_backward(
    grad: Tensor,
    x: Tensor,
    idx: Tensor,
    weights: Tensor,
    w13: Tensor,
    b13: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor | None = None,
    *,
    act: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    interleaved: bool = False,
    weight_layout: str = "enk",
    weight_on_input: bool = False,
    expert_offset: int = 0,
    output_mask: tuple[bool, ...] = (True,) * 7,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``moe_experts`` for (x, weights, w13, b13, w2, b2, w3), in the dtypes of those.

    Args:
        grad: [T, H], any floating dtype, any strides.
        output_mask: which of the seven gradients to compute; the others come back as empty [0] tensors, and so do
            those of absent inputs.
        others: as for ``moe_experts``.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return torch.ops.ascend_deep.moe_experts_backward.default(
        grad,
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
        output_mask=list(output_mask),
    )


@takes(MoeExpertsBackward)
def _check_args(args: MoeExpertsBackward) -> None:
    grad, x, mask = args.grad, args.x, args.output_mask
    check_experts(_OP, args)
    _check.dtypes(_OP, "grad", grad, _check.FLOATING)
    _check.rank(_OP, "grad", grad, "[T, H]", 2)
    _check.size(_OP, "the number of rows of grad", grad.shape[0], x.shape[0], "the number of tokens of x")
    _check.size(_OP, "the number of columns of grad", grad.shape[1], x.shape[1], "H of x")
    _check.same_device(_OP, "x", x, grad=grad)
    if len(mask) != 7:
        raise ValueError(f"{_OP}: output_mask has {len(mask)} entries; it must have 7, one per gradient.")


@takes(MoeExpertsBackward)
def _reference(args: MoeExpertsBackward) -> tuple[Tensor, ...]:
    x, weights, b13, b2 = args.x, args.weights, args.b13, args.b2
    alpha, limit, weight_on_input = args.alpha, args.limit, args.weight_on_input
    dtype = _check.compute_dtype(x.dtype)
    activation = ACTIVATIONS[args.act]
    outputs = _empty_outputs(args, zeros=True)
    _, _, d_w13, d_b13, d_w2, d_b2, d_w3 = outputs
    need_x, need_weights, need_w13, need_b13, need_w2, need_b2, need_w3 = _wanted(args)
    # Sums over the slots of a token run across experts: kept in the compute dtype until the end.
    d_x = torch.zeros(x.shape if need_x else (0,), dtype=dtype, device=x.device)
    d_weights = torch.zeros(weights.shape if need_weights else (0,), dtype=dtype, device=x.device)
    flat_d_weights = d_weights.view(-1)
    w13, w2, w3 = inner_first(args)
    if args.weight_layout == "enk":
        d_w13, d_w2, d_w3 = (t.transpose(1, 2) if t.dim() == 3 else t for t in (d_w13, d_w2, d_w3))
    gated = w3 is not None or w13.shape[2] != w2.shape[1]
    slots = args.idx.shape[1]
    flat_weights = weights.reshape(-1)
    for e, positions in active_experts(args.idx, w13.shape[0], args.expert_offset):
        tokens = positions // slots
        weight = flat_weights[positions].to(dtype).unsqueeze(1)
        g = args.grad[tokens].to(dtype)
        tokens_x = x[tokens].to(dtype)
        rows = tokens_x * weight if weight_on_input else tokens_x
        weighted = g if weight_on_input else g * weight
        first, second = first_weight(w13, w3, e, dtype), w2[e].to(dtype)
        if need_b2:
            d_b2[e] = weighted.sum(0)
        h = rows @ first
        if b13 is not None:
            h += b13[e]
        gate, up = split_gate_up(h, gated, args.interleaved)
        d_a = g @ second.t()
        if need_w2 or (need_weights and not weight_on_input):
            a = activation.forward(gate, up, alpha, limit)
            if need_w2:
                d_w2[e] = a.t() @ weighted
            if need_weights and not weight_on_input:
                d_p = (a * d_a).sum(1)
                flat_d_weights[positions] = d_p if b2 is None else d_p + g @ b2[e].to(dtype)
        if not (need_x or need_w13 or need_b13 or need_w3 or (need_weights and weight_on_input)):
            continue
        d_gate, d_up = activation.backward(d_a if weight_on_input else d_a * weight, gate, up, alpha, limit)
        if d_up is None:
            d_h = d_gate
        elif args.interleaved:
            d_h = torch.stack((d_gate, d_up), 2).flatten(1)
        else:
            d_h = torch.cat((d_gate, d_up), 1)
        if need_b13:
            d_b13[e] = d_h.sum(0)
        if need_w13:
            d_w13[e] = rows.t() @ (d_h if w3 is None else d_gate)
        if need_w3:
            assert d_up is not None  # w3 is the up half of a gated activation
            d_w3[e] = rows.t() @ d_up
        if need_x or (need_weights and weight_on_input):
            d_rows = d_h @ first.t()
            if need_weights and weight_on_input:
                flat_d_weights[positions] = (d_rows * tokens_x).sum(1)
            if need_x:
                d_x.index_add_(0, tokens, d_rows * weight if weight_on_input else d_rows)
    return d_x.to(x.dtype), d_weights.to(weights.dtype), *outputs[2:]


def _wanted(args: MoeExpertsBackward) -> tuple[bool, ...]:
    """Which of the seven gradients are asked for and have an input."""
    inputs = (args.x, args.weights, args.w13, args.b13, args.w2, args.b2, args.w3)
    return tuple(asked and t is not None for asked, t in zip(args.output_mask, inputs, strict=True))


def _empty_outputs(args: MoeExpertsBackward, zeros: bool = False) -> tuple[Tensor, ...]:
    """Contiguous outputs, [0] for those that are not wanted."""

    def one(like: Tensor | None, wanted: bool) -> Tensor:
        source = args.x if like is None else like
        shape = source.shape if wanted else (0,)
        return source.new_zeros(shape) if zeros else source.new_empty(shape)

    inputs = (args.x, args.weights, args.w13, args.b13, args.w2, args.b2, args.w3)
    return tuple(one(t, wanted) for t, wanted in zip(inputs, _wanted(args), strict=True))


@takes(MoeExpertsBackward)
def _fake(args: MoeExpertsBackward) -> tuple[Tensor, ...]:
    return _empty_outputs(args)


def _samples() -> Iterator[Sample]:
    g = torch.Generator().manual_seed(4)
    for n, sample in enumerate(forward_samples()):
        x = sample.args[0]
        attributes = {k: v for k, v in sample.kwargs.items() if k != "out_dtype"}
        grad = torch.randn(x.shape, generator=g).to(sample.kwargs["out_dtype"] or x.dtype)
        # Every third call asks for some of the gradients only.
        mask = [True] * 7 if n % 3 else [bool((n >> bit) & 1) for bit in range(6)] + [n % 2 == 0]
        yield Sample(sample.name, (grad, *sample.args), {**attributes, "output_mask": mask})


_REASON = "as the forward; sums over the tokens of an expert, in any order"

MOE_EXPERTS_BACKWARD = OpDef(
    name=_OP,
    schema=(
        "(Tensor grad, Tensor x, Tensor idx, Tensor weights, Tensor w13, Tensor? b13, Tensor w2, Tensor? b2, "
        "Tensor? w3, *, str act, float alpha, float? limit, bool interleaved, str weight_layout, bool weight_on_input, "
        "SymInt expert_offset, bool[7] output_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    check=_check_args,
    reference=_reference,
    fake=_fake,
    no_backward="moe_experts can be differentiated once; second derivatives need the unfused experts.",
    tolerance={
        torch.float64: Tolerance(1e-10, 1e-12, _REASON),
        torch.float32: Tolerance(2e-4, 5e-5, _REASON),
        torch.bfloat16: Tolerance(2e-2, 3e-2, _REASON + "; a kernel may round hidden activation and gradient to bf16"),
        torch.float16: Tolerance(3e-3, 5e-3, _REASON + "; a kernel may round hidden activation and gradient to f16"),
    },
    samples=_samples,
)
