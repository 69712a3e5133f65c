"""The GEMM ops of the ``native.triton`` provider. Triton is imported when a kernel runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ascend_deep.native.triton import gemm_limits

__all__ = ["kernels", "limits"]

_MODULES = {
    "gemm": (
        "gemm_bf16",
        "gemm_bf16_out",
        "gemm_bf16_acc_",
        "gemm_scaled",
        "m_grouped_gemm_bf16",
        "m_grouped_gemm_bf16_masked",
        "m_grouped_gemm_scaled",
        "m_grouped_gemm_scaled_masked",
    ),
    "gemm_k_grouped": ("k_grouped_gemm_bf16", "k_grouped_gemm_bf16_acc_"),
}


def _kernel(module: str, op: str) -> Callable[..., Any]:
    loaded: list[Callable[..., Any]] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not loaded:
            loaded.append(getattr(importlib.import_module(f"ascend_deep.native.triton.{module}"), op))
        device = args[0].device
        if device.index == torch.cuda.current_device():
            return loaded[0](*args, **kwargs)
        with torch.cuda.device(device):
            return loaded[0](*args, **kwargs)

    return kernel


def kernels() -> dict[str, Callable[..., Any]]:
    """By op: the function that runs it."""
    return {op: _kernel(module, op) for module, ops in _MODULES.items() for op in ops}


def limits() -> dict[str, Callable[..., str | None]]:
    """By op: why the kernel does not take a call, or ``None``."""
    return {op: getattr(gemm_limits, op) for ops in _MODULES.values() for op in ops}
