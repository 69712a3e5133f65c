"""The ``torch_npu`` provider: our ops on Ascend, composed of the vendor's, with its limits per processor and release.

It has never run on an NPU. What the vendor refuses at run time although its documents allow it runs the next provider
and is remembered, so that it is tried once per shape; any other error is the user's to see.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from ascend_deep.native._provider import Provider
from ascend_deep.native.torch_npu import (
    activation,
    attention,
    experts,
    experts_backward,
    gemm,
    gemm_grouped,
    gemm_k_grouped,
    indexer,
    parallel,
    parallel_gemm,
    permute,
    quantise,
    routing,
    soc,
)

__all__ = ["REFUSED_AT_RUN_TIME", "TORCH_NPU"]

log = logging.getLogger("ascend_deep")

# What the vendor's runtime says when an argument is not supported, in its own words and codes. Nothing else is caught.
_UNSUPPORTED = ("161002", "561002", "not support", "only support", "but only", "is not implemented")

REFUSED_AT_RUN_TIME: dict[tuple[Any, ...], str] = {}
"""(op, what the call looks like) to the vendor's message; such calls go to the next provider."""


def _unavailable() -> str | None:
    if soc.is_planned():
        return None
    if "torch_npu" not in sys.modules:
        return "torch_npu is not imported in this process."
    if soc.current() is None:
        return "torch_npu finds no NPU whose limits are known (Ascend 910B, 910_93 and 950)."
    return None


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a refusal depends on: shapes, dtypes and scalars."""

    def one(value: Any) -> Any:
        return (tuple(map(str, value.shape)), value.dtype) if isinstance(value, torch.Tensor) else value

    return (*map(one, args), *((k, str(one(v))) for k, v in sorted(kwargs.items())))


def _guarded(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, or the reference body where the vendor's runtime turns the call down."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except RuntimeError as error:
            message = str(error).strip()
            if not any(sign in message for sign in _UNSUPPORTED):
                raise
            REFUSED_AT_RUN_TIME[(op, *_signature(args, kwargs))] = message.splitlines()[0]
            log.warning("torch_npu refused %s at run time (%s); it runs elsewhere from now on.", op, message[:200])
            # The op asks the table again, which now passes this provider over.
            return getattr(torch.ops.ascend_deep, op).default(*args, **kwargs)

    return run


def _limited(op: str, limit: Callable[..., str | None]) -> Callable[..., str | None]:
    """``limit`` for the current target, preceded by what the vendor refused earlier in this process."""

    @functools.wraps(limit)
    def check(*args: Any, **kwargs: Any) -> str | None:
        if REFUSED_AT_RUN_TIME:
            earlier = REFUSED_AT_RUN_TIME.get((op, *_signature(args, kwargs)))
            if earlier is not None:
                return f"the vendor's op refused such a call earlier in this process: {earlier}."
        target = soc.current()
        if target is None:
            return "the processor is not known, so its limits are not either."
        return limit(target, *args, **kwargs)

    return check


_FAMILIES: dict[str, tuple[Callable[..., Any], Callable[..., str | None]]] = {
    "moe_route": (routing.moe_route, routing.limits),
    "moe_permute": (permute.moe_permute, permute.permute_limits),
    "moe_combine": (permute.moe_combine, permute.combine_limits),
    "moe_experts": (experts.moe_experts, experts.limits),
    "moe_experts_backward": (experts_backward.moe_experts_backward, experts_backward.limits),
    "swiglu": (activation.swiglu, activation.swiglu_limits),
    "gemm_bf16": (gemm.gemm_bf16, gemm.bf16_limits),
    "gemm_scaled": (gemm.gemm_scaled, gemm.scaled_limits),
    "m_grouped_gemm_bf16": (gemm_grouped.bf16, gemm_grouped.bf16_limits),
    "m_grouped_gemm_bf16_masked": (gemm_grouped.bf16_masked, gemm_grouped.bf16_masked_limits),
    "m_grouped_gemm_scaled": (gemm_grouped.scaled, gemm_grouped.scaled_limits),
    "m_grouped_gemm_scaled_masked": (gemm_grouped.scaled_masked, gemm_grouped.scaled_masked_limits),
    "k_grouped_gemm_bf16": (gemm_k_grouped.k_grouped, gemm_k_grouped.limits),
    "quant_fp8": (quantise.quant_fp8, quantise.quant_limits),
    "swiglu_quant": (quantise.swiglu_quant, quantise.swiglu_quant_limits),
    "mqa_topk": (indexer.mqa_topk, indexer.limits),
    "ll_dispatch": (parallel.ll_dispatch, parallel.dispatch_limits),
    "ll_combine": (parallel.ll_combine, parallel.combine_limits),
    "alltoallv_gmm": (parallel_gemm.alltoallv_gmm, parallel_gemm.limits_there),
    "gmm_alltoallv": (parallel_gemm.gmm_alltoallv, parallel_gemm.limits_back),
    "sparse_mqa_attention": (attention.sparse_mqa_attention, attention.limits),
}

# Their ranks differ in what they send. One that ran such a call elsewhere would leave the others waiting.
_ALL_OR_NONE = frozenset({"alltoallv_gmm", "gmm_alltoallv"})

TORCH_NPU = Provider(
    name="torch_npu",
    device="npu",
    unavailable=_unavailable,
    kernels={op: kernel if op in _ALL_OR_NONE else _guarded(op, kernel) for op, (kernel, _) in _FAMILIES.items()},
    limits={op: _limited(op, limit) for op, (_, limit) in _FAMILIES.items()},
    version="4",
)
