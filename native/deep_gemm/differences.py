"""What DeepGEMM's indexer functions want on each platform, as data.

One row per platform. The CUDA rows are from DeepGEMM's host checks; SM90 is what runs in our tests, SM100 and Ascend
have never been run by us. ``provider`` reads the row of the device it is on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ASCEND", "SM90", "SM100", "Indexer", "platform"]


@dataclass(frozen=True)
class Indexer:
    """Limits and layouts of ``fp8_mqa_logits`` / ``fp8_fp4_mqa_logits``.

    Attributes:
        platform: for messages.
        executed: False for a platform that has never run this adapter.
        function: name in the ``deep_gemm`` module.
        heads: number of heads that the kernel has been built for.
        depths: head dims.
        least_queries: a program takes two queries and all their keys, so fewer than these leave processors idle and
            another provider is faster; 1 where we have not measured.
        mx_scales: q and kv carry UE8M0 scales per 32 elements, packed in ``scale_dtype``; otherwise q has none and
            kv one f32 per key.
        scale_dtype: of the scale tensors in the library's layout.
        weights: dtype of the head weights.
        logits: dtype of the result.
        sums: arithmetic of the sum over heads; what differs from f32 is part of the accuracy report.
        row_bytes: the row pitch of the result is a multiple of this.
        clean: the library can write -inf outside the ranges (dense results only).
        compressed_only: the result is always compressed.
    """

    platform: str
    executed: bool
    function: str
    heads: tuple[int, ...]
    depths: tuple[int, ...]
    least_queries: int
    mx_scales: bool
    scale_dtype: torch.dtype
    weights: torch.dtype
    logits: torch.dtype
    sums: str
    row_bytes: int
    clean: bool
    compressed_only: bool


SM90 = Indexer(
    platform="CUDA SM90",
    executed=True,
    function="fp8_mqa_logits",
    heads=(32, 64),
    depths=(32, 64, 128),
    least_queries=192,
    mx_scales=False,
    scale_dtype=torch.float32,
    weights=torch.float32,
    logits=torch.float32,
    sums="f32",
    row_bytes=1024,
    clean=True,
    compressed_only=False,
)

SM100 = Indexer(
    platform="CUDA SM100",
    executed=False,
    function="fp8_fp4_mqa_logits",
    heads=tuple(range(4, 129, 4)),
    depths=(32, 64, 128),
    least_queries=1,
    mx_scales=True,
    scale_dtype=torch.int32,
    weights=torch.bfloat16,
    logits=torch.bfloat16,
    sums="f32 products, bf16 ReLU, weights and sum over heads",
    row_bytes=1024,
    clean=True,
    compressed_only=False,
)

ASCEND = Indexer(
    platform="Ascend",
    executed=False,
    function="fp8_fp4_mqa_logits",
    heads=tuple(range(4, 65, 4)),
    depths=(64, 128),
    least_queries=1,
    mx_scales=True,
    scale_dtype=torch.int16,
    weights=torch.bfloat16,
    logits=torch.bfloat16,
    sums="f32 products, bf16 ReLU, weights and sum over heads",
    row_bytes=512,
    clean=False,
    compressed_only=True,
)


def platform(device_type: str, capability: tuple[int, int] | None) -> Indexer | None:
    """The row of a device: ``device_type`` as torch names it, ``capability`` of CUDA devices; ``None``: no row."""
    if device_type == "npu":
        return ASCEND
    if device_type == "cuda" and capability is not None:
        return {9: SM90, 10: SM100}.get(capability[0])
    return None
