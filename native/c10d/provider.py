"""The ``c10d`` provider: expert parallelism by torch.distributed, on any device whose process group moves rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ascend_deep.native._provider import Provider
from ascend_deep.native.c10d import fused, low_latency, normal
from ascend_deep.native.c10d.transport import group_problem

__all__ = ["C10D"]


def _unavailable() -> str | None:
    return None if dist.is_available() else "this torch was built without torch.distributed."


def _limits(first: Tensor, *_: Any, group_size: int, group: str, layout: str = "", **__: Any) -> str | None:
    return low_latency.flat_problem(first, layout) or group_problem(group, int(group_size))


_KERNELS: dict[str, Callable[..., Any]] = {
    "ep_layout": normal.ep_layout,
    "ep_dispatch": normal.ep_dispatch,
    "ep_dispatch_cached": normal.ep_dispatch_cached,
    "ep_combine": normal.ep_combine,
    "ll_dispatch": low_latency.ll_dispatch,
    "ll_combine": low_latency.ll_combine,
    "alltoallv_gmm": fused.alltoallv_gmm,
    "gmm_alltoallv": fused.gmm_alltoallv,
}

C10D = Provider(
    name="c10d",
    device="any",
    unavailable=_unavailable,
    kernels=_KERNELS,
    limits={op: _limits for op in _KERNELS if op != "ep_layout"},
    version="2",
)
