"""The ``deep_gemm`` providers of CUDA and Ascend.

The library computes with fp8 (or, on SM100 and Ascend, fp4) operands only. Quantising bf16 keys changes scores, so this
provider never does it: it takes calls whose operands are quantised already (``passes/fp8.py`` does that where the user
allows it). It differs from the op in one point that no shape shows: the library's ReLU turns NaN into 0. The scales of
keys, and on SM90 those of queries, are applied behind the ReLU, which is why the op takes no negative ones.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ascend_deep.native._provider import Provider
from ascend_deep.native.deep_gemm import gemm_provider, indexer
from ascend_deep.native.deep_gemm.differences import Indexer, platform

__all__ = ["DEEP_GEMM", "DEEP_GEMM_NPU", "limits_of"]

_FP4 = (torch.int8, torch.uint8)


@functools.cache
def _library() -> Any:
    return importlib.import_module("deep_gemm")


@functools.cache
def _unavailable() -> str | None:
    if importlib.util.find_spec("deep_gemm") is None:
        return "the package deep_gemm is not installed."
    try:
        _library()
    except Exception as error:  # a library that does not load raises what it likes
        return f"the package deep_gemm does not load ({str(error).splitlines()[0] if str(error) else error!r})."
    return None


@functools.lru_cache(maxsize=64)
def _platform_of(kind: str, index: int | None) -> Indexer | None:
    return platform(kind, torch.cuda.get_device_capability(index) if kind == "cuda" else None)


def _platform(q: Tensor) -> Indexer | None:
    return _platform_of(q.device.type, q.device.index)


def limits_of(
    row: Indexer | None,
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    out_dtype: torch.dtype | None,
) -> str | None:
    """Why the library does not take a call of ``mqa_logits`` on the platform ``row``; ``None`` if it does."""
    if row is None:
        return "the library has no indexer for this device; it has one for SM90, SM100 and Ascend."
    if q.shape[0] != 1:
        return f"B is {q.shape[0]}; the library takes one sequence."
    if q.shape[1] < row.least_queries or kv.shape[1] < 1:
        return (
            f"it gets {q.shape[1]} queries and {kv.shape[1]} keys; the library is fast from {row.least_queries} "
            "queries on, and takes at least one key."
        )
    if mask is not None:
        return "there is a mask; the library takes ranges only."
    if not scale > 0:
        return f"scale is {scale}; it goes into the weights, behind the ReLU, so it has to be positive."
    fp4 = q.dtype in _FP4
    if kv.dtype != q.dtype or not (q.dtype == torch.float8_e4m3fn or (fp4 and row.mx_scales)):
        accepted = "float8_e4m3fn or packed fp4" if row.mx_scales else "float8_e4m3fn"
        return f"q and kv have the dtypes {q.dtype} and {kv.dtype}; {row.platform} takes {accepted} for both."
    depth = q.shape[3] * (2 if fp4 else 1)
    if q.shape[2] not in row.heads:
        return f"q has {q.shape[2]} heads; {row.platform} takes {', '.join(map(str, row.heads))}."
    if depth not in row.depths or (fp4 and depth == 32):
        return f"D is {depth}; {row.platform} takes {', '.join(map(str, row.depths))}."
    groups = depth // 32 if row.mx_scales else 1
    for name, sf in (("q_sf", q_sf), ("kv_sf", kv_sf)):
        if sf is None and row.mx_scales:
            return f"{name} is missing; {row.platform} wants a scale per 32 elements."
        if sf is not None and sf.shape[-1] != groups:
            return f"{name} has {sf.shape[-1]} groups; {row.platform} takes {groups}."
    if row.logits != torch.float32 and (out_dtype != row.logits or weights.dtype != row.weights):
        return (
            f"{row.platform} computes {row.sums}, which is less than the op promises; it runs where weights and "
            "out_dtype are bfloat16."
        )
    return None


def _logits_limits(
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
    return limits_of(_platform(q), q, q_sf, kv, kv_sf, weights, mask, scale=scale, out_dtype=out_dtype)


def _topk_limits(
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
    return limits_of(_platform(q), q, q_sf, kv, kv_sf, weights, mask, scale=scale, out_dtype=None)


def _mqa_logits(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    **attributes: Any,
) -> Tensor:
    row = _platform(q)
    assert row is not None  # the limits refuse other devices
    with _on_device(q):
        return indexer.logits(_library(), row, q, q_sf, kv, kv_sf, weights, ks, ke, **attributes)


def _on_device(q: Tensor) -> AbstractContextManager[Any]:
    """The library launches on the current device."""
    if q.device.type != "cuda" or q.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device_of(q)


def _mqa_topk(
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
    **attributes: Any,
) -> tuple[Tensor, Tensor]:
    from ascend_deep.native.triton.indexer import Values, cut, topk_of_blocks

    row = _platform(q)
    assert row is not None

    def fill(b: slice, s: slice) -> Values:
        given = indexer.operands(
            row,
            cut(q, b, s),
            cut(q_sf, b, s),
            kv,
            kv_sf,
            cut(weights, b, s),
            cut(ks, b, s),
            cut(ke, b, s),
            scale,
        )
        out = indexer.raw_logits(_library(), row, given, columns=0)
        return Values(out.view(torch.int32).unsqueeze(0), masked=False)

    with _on_device(q):
        return topk_of_blocks(fill, q, kv.shape[1], ks, ke, **attributes)


DEEP_GEMM = Provider(
    name="deep_gemm",
    device="cuda",
    unavailable=_unavailable,
    kernels={"mqa_logits": _mqa_logits, "mqa_topk": _mqa_topk, **gemm_provider.kernels(_library)},
    limits={"mqa_logits": _logits_limits, "mqa_topk": _topk_limits, **gemm_provider.limits()},
    version="2",
)

DEEP_GEMM_NPU = Provider(
    name="deep_gemm",
    device="npu",
    unavailable=_unavailable,
    kernels={"mqa_logits": _mqa_logits, **gemm_provider.kernels(_library)},
    limits={"mqa_logits": _logits_limits, **gemm_provider.limits()},
    version="2",
)
