"""The ``native.triton`` provider of CUDA: which calls its kernels take.

Limits read shapes, dtypes, strides and scalars only, so they also hold on fake tensors; ``plan`` has the numbers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native._provider import Provider
from ascend_deep.native.triton import gemm_provider
from ascend_deep.native.triton.plan import MAX_DEPTH, MAX_HEADS

__all__ = ["TRITON", "logits_limits", "paged_limits", "topk_limits"]

_CAPABILITY = (9, 0)
_OPERANDS = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
_OUTPUTS = (None, torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed."
    if not torch.cuda.is_available():
        return "torch sees no CUDA device."
    found = torch.cuda.get_device_capability()
    if torch.version.hip is not None or found < _CAPABILITY:
        return f"the device has compute capability {found[0]}.{found[1]}; the kernels take 9.0 (Hopper) and newer."
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _common_limits(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    scale: float,
) -> str | None:
    """Limits of the kernel behind both ops; ``None`` if it takes the call."""
    if q.dtype not in _OPERANDS or kv.dtype != q.dtype:
        return (
            f"q and kv have the dtypes {_name(q.dtype)} and {_name(kv.dtype)}; the kernel takes bfloat16, float16, "
            "float32 or float8_e4m3fn for both."
        )
    heads, depth = MAX_HEADS[q.element_size()], MAX_DEPTH[q.element_size()]
    if not 1 <= q.shape[2] <= heads:
        return f"q has {q.shape[2]} heads; the kernel takes 1 to {heads} in {_name(q.dtype)}."
    if not 1 <= q.shape[3] <= depth:
        return f"q and kv have D = {q.shape[3]}; the kernel takes 1 to {depth} in {_name(q.dtype)}."
    for name, sf in (("q_sf", q_sf), ("kv_sf", kv_sf)):
        if sf is not None and sf.shape[-1] != 1:
            return f"{name} has {sf.shape[-1]} groups; the kernel takes one scale per vector."
    if weights.dtype not in _OUTPUTS:
        return f"weights has dtype {_name(weights.dtype)}; the kernel takes float32, bfloat16 and float16."
    if scale == 0 or not math.isfinite(scale):
        return f"scale is {scale}; the kernel takes finite scales other than 0."
    if kv.shape[0] * kv.shape[1] >= 2**31:
        return f"kv has {kv.shape[0] * kv.shape[1]} rows; the kernel counts them in 32 bits."
    if q.shape[0] > 65535:
        return f"the batch has {q.shape[0]} rows; a launch takes 65535."
    return None


def logits_limits(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    scale: float,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> str | None:
    """Why the kernel does not take a call of ``mqa_logits``; ``None`` if it does."""
    if out_dtype not in _OUTPUTS:
        return f"out_dtype is {out_dtype}; the kernel writes float32, bfloat16 and float16."
    if mask is not None and mask.dtype == torch.float64:
        return "mask has dtype float64; the kernel takes bool, float32, bfloat16 and float16."
    return _common_limits(q, q_sf, kv, kv_sf, weights, scale)


def topk_limits(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    scale: float,
    **_: Any,
) -> str | None:
    """Why the kernels do not take a call of ``mqa_topk``; ``None`` if they do."""
    if mask is not None and mask.dtype == torch.float64:
        return "mask has dtype float64; the kernel takes bool, float32, bfloat16 and float16."
    return _common_limits(q, q_sf, kv, kv_sf, weights, scale)


def paged_limits(
    q: Tensor,
    q_sf: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    indices: Tensor | None,
    *,
    max_context_len: int,
    scale: float,
    fmt: str,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> str | None:
    """Why the kernels do not take a call of ``paged_mqa_logits`` or ``paged_mqa_topk``; ``None`` if they do."""
    if fmt not in ("plain", "fp8"):
        return f"fmt is {fmt}; the kernel takes plain and fp8."
    if out_dtype not in _OUTPUTS:
        return f"out_dtype is {out_dtype}; the kernel writes float32, bfloat16 and float16."
    if fmt == "plain" and kv_cache.stride(3) != 1:
        return f"keys of kv_cache have elements {kv_cache.stride(3)} apart; the kernel takes contiguous keys."
    if fmt == "fp8" and (kv_cache.shape[1] * q.shape[3] % 4 or kv_cache.storage_offset() % 4):
        return (
            f"the scales of a page of kv_cache, behind {kv_cache.shape[1]} keys of {q.shape[3]} bytes, do not lie on 4 "
            "bytes, as the kernel wants them."
        )
    if max_context_len >= 2**31:
        return f"max_context_len is {max_context_len}; the kernel counts keys in 32 bits."
    if q.shape[1] > 65535:
        return f"next_n is {q.shape[1]}; a launch takes 65535."
    return _common_limits(q, q_sf, q if fmt == "fp8" else kv_cache, None, weights, scale)


@functools.cache
def _paged_launches() -> Any:
    """The module of the launches over a paged cache, which imports Triton."""
    return importlib.import_module("ascend_deep.native.triton.paged_indexer")


def _paged_mqa_logits(*args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = _paged_launches().paged_mqa_logits(*args, **kwargs)
    return out


def _paged_mqa_topk(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _paged_launches().paged_mqa_topk(*args, **kwargs)
    return out


@functools.cache
def _launches() -> Any:
    """The module of the launches, which imports Triton."""
    return importlib.import_module("ascend_deep.native.triton.indexer")


def _mqa_logits(*args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = _launches().mqa_logits(*args, **kwargs)
    return out


def _mqa_topk(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _launches().mqa_topk(*args, **kwargs)
    return out


TRITON = Provider(
    name="native.triton",
    device="cuda",
    unavailable=_unavailable,
    kernels={
        "mqa_logits": _mqa_logits,
        "mqa_topk": _mqa_topk,
        "paged_mqa_logits": _paged_mqa_logits,
        "paged_mqa_topk": _paged_mqa_topk,
        **gemm_provider.kernels(),
    },
    limits={
        "mqa_logits": logits_limits,
        "mqa_topk": topk_limits,
        "paged_mqa_logits": paged_limits,
        "paged_mqa_topk": paged_limits,
        **gemm_provider.limits(),
    },
    version="3",
)
