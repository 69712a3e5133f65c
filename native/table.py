"""Which provider runs which op on which device: the priority lists, and the choice.

The order per device is the design's provider table. The reference body of the op is always last and is not in
the lists. Loading a provider module must stay cheap: libraries are looked for only when a call asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_deep.native._provider import Choice, Provider, Refusal
from ascend_deep.native.c10d.provider import C10D
from ascend_deep.native.cpu.provider import CPU
from ascend_deep.native.deep_gemm.provider import DEEP_GEMM, DEEP_GEMM_NPU
from ascend_deep.native.torch_cuda.provider import TORCH_CUDA
from ascend_deep.native.torch_npu.provider import TORCH_NPU
from ascend_deep.native.triton.provider import TRITON

__all__ = ["ENGINES", "PRIORITY", "choose", "fingerprint"]

PRIORITY: Mapping[str, tuple[Provider, ...]] = {
    "cpu": (CPU,),
    "cuda": (DEEP_GEMM, TORCH_CUDA, TRITON),
    "npu": (DEEP_GEMM_NPU, TORCH_NPU),
}

ENGINES: Mapping[str, tuple[Provider, ...]] = dict.fromkeys(C10D.kernels, (C10D,))
"""Ops that communicate, and who runs them on every device after those of the device."""


def choose(op: str, device: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Choice:
    """The first provider of ``device`` that takes the call; ``Choice(None, …)`` means the reference body.

    Args:
        op: op name without namespace.
        device: torch device type.
        args, kwargs: the call's arguments, real or fake tensors.
    """
    refusals: list[Refusal] = []
    for provider in (*PRIORITY.get(device, ()), *ENGINES.get(op, ())):
        refusal = provider.refusal(op, args, kwargs)
        if refusal is None:
            return Choice(provider, tuple(refusals))
        refusals.append(refusal)
    return Choice(None, tuple(refusals))


def fingerprint() -> str:
    """A string that changes when the provider table changes; part of the cache key of compiled graphs."""
    rows = []
    for device, providers in PRIORITY.items():
        for p in providers:
            rows.append(f"{device}:{p.name}:{p.version}:{p.unavailable() is None}:{','.join(sorted(p.kernels))}")
    rows.append(f"any:{C10D.name}:{C10D.version}:{C10D.unavailable() is None}:{','.join(sorted(C10D.kernels))}")
    return ";".join(rows)
