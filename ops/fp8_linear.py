"""``fp8_linear``: a linear layer whose products run in FP8, with gradients that do too.

    forward   y  = q(x; 1 x 128) q(W; 128 x 128)^T + bias
    x         dx = q(g; 1 x 128) q(W; 128 x 128)
    weight    dW = q(g; 128 x 1)^T q(x; 128 x 1)          both quantised along the tokens, f32 sums
    bias      db = sum of g

q is ``quant_fp8``, products are ``gemm_scaled``; every result is rounded once. The rounding of an operand to FP8 counts
as the identity in the derivative, so x and W get the gradients of the exact product, computed in FP8. Blocks of 128 x
128 are the same for W and its transpose: forward and backward see the same weight. A weight that is FP8 already has no
gradient. The gradient has none: the layer can be differentiated once. Contract: F.2 of the DeepGEMM operator list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check, _sf
from ascend_deep.ops._gemm_scaled_samples import fp8_linear_samples
from ascend_deep.ops._op import OpDef, Tolerance, call
from ascend_deep.ops.gemm_scaled import gemm_scaled
from ascend_deep.ops.quant_fp8 import quant_fp8

__all__ = ["BLOCK", "FP8_LINEAR", "fp8_linear"]

BLOCK = 128
_TOKEN = (1, BLOCK)
_WEIGHT = (BLOCK, BLOCK)
_ALONG_TOKENS = (BLOCK, 1)
_OPERANDS = (torch.bfloat16, torch.float32, torch.float16)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_sf: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    ue8m0: bool = False,
) -> Tensor:
    """``torch.nn.functional.linear`` with FP8 products; see the module.

    Args:
        x: [..., K] bf16, f32 or f16.
        weight: [N, K] in the dtype of ``x``, quantised on every call, or float8_e4m3fn.
        weight_sf: f32 [ceil(N / 128), ceil(K / 128)], scales of an FP8 weight; ``None`` for others.
        bias: [N] floating, rounded to the dtype of the result; ``None``: none.
        ue8m0: scales of what is quantised here are powers of two, which SM100 and Ascend need.

    Returns:
        [..., N] in the dtype of ``x``, contiguous. Differentiable, once, in x, bias and a weight that is not FP8.

    Raises:
        ValueError, TypeError: one sentence that names the argument.
    """
    return call("fp8_linear", x, weight, weight_sf, bias, ue8m0=ue8m0)


def _check_args(x: Tensor, weight: Tensor, weight_sf: Tensor | None, bias: Tensor | None, *, ue8m0: bool) -> None:
    op = "fp8_linear"
    _check.dtypes(op, "x", x, _OPERANDS)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has 0 dimensions; it must be [..., K].")
    _check.dtypes(op, "weight", weight, (x.dtype, _sf.FP8))
    _check.rank(op, "weight", weight, "[N, K]", 2)
    _check.size(op, "K of weight", weight.shape[1], x.shape[-1], "K of x")
    quantised = weight.dtype == _sf.FP8
    if quantised != (weight_sf is not None):
        given = "is given" if weight_sf is not None else "is missing"
        raise ValueError(f"{op}: weight has dtype {str(weight.dtype).removeprefix('torch.')}, but weight_sf {given}.")
    if weight_sf is not None:
        _check.dtypes(op, "weight_sf", weight_sf, (torch.float32,))
        _sf.check_sf(op, "weight_sf", weight_sf, (), weight.shape[0], weight.shape[1], _WEIGHT, "the block")
    if bias is not None:
        _check.dtypes(op, "bias", bias, _OPERANDS)
        _check.rank(op, "bias", bias, "[N]", 1)
        _check.size(op, "the size of bias", bias.shape[0], weight.shape[0], "N of weight")
    _check.same_device(op, "x", x, weight=weight, weight_sf=weight_sf, bias=bias)


def _matrix(x: Tensor) -> Tensor:
    """All leading dimensions as one; a vector is one row."""
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return x.reshape(rows, x.shape[-1])


def _quantised_weight(weight: Tensor, weight_sf: Tensor | None, ue8m0: bool) -> tuple[Tensor, Tensor]:
    return quant_fp8(weight, gran=_WEIGHT, ue8m0=ue8m0) if weight_sf is None else (weight, weight_sf)


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The products have no f16 result."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _reference(x: Tensor, weight: Tensor, weight_sf: Tensor | None, bias: Tensor | None, *, ue8m0: bool) -> Tensor:
    data, sf = quant_fp8(_matrix(x), gran=_TOKEN, ue8m0=ue8m0)
    w8, sfw = _quantised_weight(weight, weight_sf, ue8m0)
    dtype = _product_dtype(x.dtype)
    c = None if bias is None else bias.to(x.dtype).to(dtype).expand(data.shape[0], -1)
    y = gemm_scaled(data, sf, w8, sfw, c, recipe_a=_TOKEN, recipe_b=_WEIGHT, out_dtype=dtype)
    return _sf.owned(y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0]))


def _fake(x: Tensor, weight: Tensor, weight_sf: Tensor | None, bias: Tensor | None, *, ue8m0: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    x, weight, weight_sf, bias = inputs
    ctx.save_for_backward(x, weight, weight_sf)
    ctx.ue8m0 = keyword_only_inputs["ue8m0"]
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, weight_sf = ctx.saved_tensors
    g = _matrix(grad)
    dtype = _product_dtype(x.dtype)
    d_x = d_weight = d_bias = None
    if ctx.needs_input_grad[0]:
        data, sf = quant_fp8(g, gran=_TOKEN, ue8m0=ctx.ue8m0)
        w8, sfw = _quantised_weight(weight, weight_sf, ctx.ue8m0)
        d_x = gemm_scaled(data, sf, w8, sfw.t(), recipe_a=_TOKEN, recipe_b=_WEIGHT, layout="nn", out_dtype=dtype)
        d_x = d_x.to(x.dtype).reshape(x.shape)
    if ctx.needs_input_grad[1]:
        a, sfa = quant_fp8(g, gran=_ALONG_TOKENS, ue8m0=ctx.ue8m0)
        b, sfb = quant_fp8(_matrix(x), gran=_ALONG_TOKENS, ue8m0=ctx.ue8m0)
        d_weight = gemm_scaled(
            a, sfa.t(), b, sfb.t(), recipe_a=_TOKEN, recipe_b=_TOKEN, layout="tn", out_dtype=torch.float32
        )
        d_weight = d_weight.to(weight.dtype)
    if ctx.needs_input_grad[3]:
        d_bias = g.to(torch.float32).sum(0).to(ctx.bias_dtype)
    return d_x, d_weight, None, d_bias


def _autocast(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast x, weight and bias as autocast casts the inputs of a linear; what is FP8 stays."""
    x, weight, weight_sf, bias = args
    cast = [t.to(dtype) if t is not None and t.dtype in _OPERANDS else t for t in (x, weight, bias)]
    return (cast[0], cast[1], weight_sf, cast[2]), kwargs


_REASON = "f32 sums of FP8 products in another order, one rounding to the dtype of x, a bf16 ulp is up to 2^-7"
FP8_LINEAR = OpDef(
    name="fp8_linear",
    schema="(Tensor x, Tensor weight, Tensor? weight_sf, Tensor? bias, *, bool ue8m0) -> Tensor",
    check=_check_args,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_autocast,
    tolerance={
        torch.bfloat16: Tolerance(8e-3, 1e-4, _REASON),
        torch.float16: Tolerance(1e-3, 1e-4, _REASON),
        torch.float32: Tolerance(1e-5, 1e-4, _REASON),
    },
    samples=fp8_linear_samples,
    differentiable=("x", "weight", "bias"),
    composed=True,
)
