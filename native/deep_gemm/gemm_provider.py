"""The GEMM ops of the ``deep_gemm`` providers: kernels and limits bound to the row of the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.deep_gemm import gemm, gemm_grouped, gemm_limits
from ascend_deep.native.deep_gemm.gemm_differences import Gemm, row_of

__all__ = ["OPS", "kernels", "limits"]

OPS: dict[str, tuple[Callable[..., Any], Callable[..., str | None]]] = {
    "gemm_bf16": (gemm.gemm_bf16, gemm_limits.gemm_bf16),
    "gemm_bf16_out": (gemm.gemm_bf16_out, gemm_limits.gemm_bf16_out),
    "gemm_bf16_acc_": (gemm.gemm_bf16_acc_, gemm_limits.gemm_bf16_acc_),
    "gemm_scaled": (gemm.gemm_scaled, gemm_limits.gemm_scaled),
    "m_grouped_gemm_bf16": (gemm_grouped.m_grouped_gemm_bf16, gemm_limits.m_grouped_gemm_bf16),
    "m_grouped_gemm_scaled": (gemm_grouped.m_grouped_gemm_scaled, gemm_limits.m_grouped_gemm_scaled),
    "m_grouped_gemm_bf16_masked": (gemm_grouped.m_grouped_gemm_bf16_masked, gemm_limits.m_grouped_gemm_bf16_masked),
    "m_grouped_gemm_scaled_masked": (
        gemm_grouped.m_grouped_gemm_scaled_masked,
        gemm_limits.m_grouped_gemm_scaled_masked,
    ),
    "k_grouped_gemm_bf16": (gemm_grouped.k_grouped_gemm_bf16, gemm_limits.k_grouped_gemm_bf16),
    "k_grouped_gemm_bf16_acc_": (gemm_grouped.k_grouped_gemm_bf16_acc_, gemm_limits.k_grouped_gemm_bf16_acc_),
    "einsum_bf16": (gemm_grouped.einsum_bf16, gemm_limits.einsum_bf16),
    "hc_prenorm_gemm": (gemm_grouped.hc_prenorm_gemm, gemm_limits.hc_prenorm_gemm),
}


@functools.lru_cache(maxsize=64)
def _row_of(kind: str, index: int | None) -> Gemm | None:
    return row_of(kind, torch.cuda.get_device_capability(index) if kind == "cuda" else None)


@functools.cache
def _one_device() -> bool:
    return torch.cuda.device_count() == 1


def _row(x: Tensor) -> Gemm | None:
    device = x.device
    return _row_of(device.type, device.index)


def _kernel(function: Callable[..., Any], library: Callable[[], Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device
        row = _row_of(device.type, device.index)
        if device.type != "cuda" or _one_device() or device.index == torch.cuda.current_device():
            return function(library(), row, *args, **kwargs)
        with torch.cuda.device(device):  # the library launches on the current device
            return function(library(), row, *args, **kwargs)

    return kernel


def _limit(function: Callable[..., str | None]) -> Callable[..., str | None]:
    def limit(*args: Any, **kwargs: Any) -> str | None:
        row = _row(args[0])
        if row is None:
            return "the library has no matrix products for this device; it has them for SM90, SM100 and Ascend."
        return function(row, *args, **kwargs)

    return limit


def kernels(library: Callable[[], Any]) -> dict[str, Callable[..., Any]]:
    """By op: the function that runs it; ``library`` returns the ``deep_gemm`` module."""
    return {op: _kernel(function, library) for op, (function, _) in OPS.items()}


def limits() -> dict[str, Callable[..., str | None]]:
    """By op: why the library does not take a call on its device, or ``None``."""
    return {op: _limit(limit) for op, (_, limit) in OPS.items()}
