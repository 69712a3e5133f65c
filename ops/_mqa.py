"""What the indexer ops share: operand formats, key ranges, masks, and the definition of a score.

    p[b,s,h,t]   = scale * (q[b,s,h,:] . kv[b,t,:])            f32 (f64 for f64 operands)
    score[b,s,t] = sum over h of weights[b,s,h] * relu(p[b,s,h,t])

The ReLU is per head and before the weight; relu(NaN) is NaN. Keys outside [ks, ke), and keys whose boolean mask is
False, are *excluded*; a floating mask is added to the score and excludes the keys where it is -inf.

Operand formats of ``q`` and ``kv``, each on its own:

* f32, bf16, f16 or f64, without scales, and the same dtype for both;
* ``float8_e4m3fn`` [..., D] with or without scales;
* FP4 (E2M1) packed in ``int8`` or ``uint8`` [..., D/2], low nibble = even index, with or without scales.

Scales are f32 of logical shape [..., G]: G divides D, and group g scales the elements [g * D/G, (g + 1) * D/G). G = 1
is the per-vector scale of DeepGEMM on SM90, D/G = 32 the MX scale of SM100 and Ascend; packing is up to the provider.
Scales are neither negative nor infinite: relu(s * p) = s * relu(p) for finite s >= 0 alone, and kernels take them out
of the ReLU. On the CPU such a scale raises; on other devices, where looking would stop the stream, it does with
ASCEND_DEEP_DEBUG=1. A scale may be NaN (as a UE8M0 byte of 255 is): so are the scores of its query or key then.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _check, _sf

__all__ = [
    "FP4_STORAGE",
    "FP8",
    "add_mask",
    "bounds",
    "check_mask",
    "check_operands",
    "check_ranges",
    "check_scale",
    "debug_scales",
    "dequantise",
    "excluded",
    "head_dim",
    "is_quantised",
    "scores",
    "with_batch",
]

FP8 = torch.float8_e4m3fn
FP4_STORAGE = (torch.int8, torch.uint8)


def is_quantised(operand: Tensor) -> bool:
    """True for FP8 and packed FP4 operands."""
    return operand.dtype == FP8 or operand.dtype in FP4_STORAGE


def head_dim(operand: Tensor) -> Any:
    """D: the last size, doubled for packed FP4."""
    return operand.shape[-1] * 2 if operand.dtype in FP4_STORAGE else operand.shape[-1]


def with_batch(tensor: Tensor | None) -> Tensor | None:
    """An optional operand with a batch dimension of 1."""
    return None if tensor is None else tensor.unsqueeze(0)


def check_operands(
    op: str, q: Tensor, q_sf: Tensor | None, kv: Tensor, kv_sf: Tensor | None, weights: Tensor, batched_kv: bool = True
) -> None:
    """Dtypes, ranks and sizes of q [B, S, H, D], kv [B, T, D], weights [B, S, H] and their scales.

    Without ``batched_kv`` q is [Q, next_n, H, D], and the shape of kv is not looked at.
    """
    for name, tensor in (("q", q), ("kv", kv)):
        _check.dtypes(op, name, tensor, (*_check.FLOATING, FP8, *FP4_STORAGE))
    batch, queries = ("B", "S") if batched_kv else ("Q", "next_n")
    _check.rank(op, "q", q, f"[{batch}, {queries}, H, D]", 4)
    _check.rank(op, "weights", weights, f"[{batch}, {queries}, H]", 3)
    if not is_quantised(q) and not is_quantised(kv):
        _check.dtypes(op, "kv", kv, (q.dtype,))
    computed = _check.compute_dtype(q.dtype)
    _check.dtypes(op, "weights", weights, (computed,) if computed == torch.float64 else _check.FLOATING[:3])
    for dim, what in ((0, batch), (1, queries), (2, "H")):
        _check.size(op, f"{what} of weights", weights.shape[dim], q.shape[dim], f"{what} of q")
    if batched_kv:
        _check.rank(op, "kv", kv, "[B, T, D]", 3)
        _check.size(op, "B of kv", kv.shape[0], q.shape[0], "B of q")
        _check.size(op, "D of kv", head_dim(kv), head_dim(q), "D of q")
    for name, sf, operand in (("q_sf", q_sf, q), ("kv_sf", kv_sf, kv)):
        if sf is not None:
            _check_scale(op, name, sf, name[:-3], operand)
    _check.same_device(op, "q", q, kv=kv, weights=weights, q_sf=q_sf, kv_sf=kv_sf)


def _check_scale(op: str, name: str, sf: Tensor, operand_name: str, operand: Tensor) -> None:
    if not is_quantised(operand):
        raise TypeError(f"{op}: {name} is given, but {operand_name} is {operand.dtype}; only fp8 and fp4 have scales.")
    _check.dtypes(op, name, sf, (torch.float32,))
    _check.rank(op, name, sf, f"the shape of {operand_name} with the number of scale groups last", operand.dim())
    for dim in range(operand.dim() - 1):
        _check.size(op, f"size {dim} of {name}", sf.shape[dim], operand.shape[dim], f"that of {operand_name}")
    groups, depth = sf.shape[-1], head_dim(operand)
    torch._check_value(
        groups >= 1 and depth % groups == 0,
        lambda: f"{op}: {name} has {groups} groups; that must divide D of {operand_name}, which is {depth}.",
    )
    # The type is exact: fake and functional tensors have no values.
    if type(sf) is Tensor and sf.device.type == "cpu":
        _check_values(op, name, sf)


def _check_values(op: str, name: str, sf: Tensor) -> None:
    wrong = (sf < 0) | (sf == torch.inf)
    if bool(wrong.any()):
        raise ValueError(
            f"{op}: {name} holds {float(sf[wrong][0]):g}; scales must not be negative or infinite, because kernels "
            "apply them after the ReLU."
        )


def debug_scales(op: str, q_sf: Tensor | None, kv_sf: Tensor | None) -> None:
    """Raise ``ValueError`` for a negative or infinite scale on any device; waits for the device."""
    for name, sf in (("q_sf", q_sf), ("kv_sf", kv_sf)):
        if sf is not None:
            _check_values(op, name, sf)


def check_scale(op: str, scale: float) -> None:
    """The factor of the products is finite. A symbolic one is not looked at, which would add a guard."""
    if isinstance(scale, float) and not math.isfinite(scale):
        raise ValueError(f"{op}: scale is {scale}; it must be finite.")


def check_ranges(op: str, q: Tensor, **ranges: Tensor | None) -> None:
    """Each range bound is [B, S] or [1, S], i32 or i64, or ``None``."""
    for name, bound in ranges.items():
        if bound is None:
            continue
        _check.dtypes(op, name, bound, _check.INDEX)
        _check.rank(op, name, bound, "[B, S] or [1, S]", 2)
        if bound.shape[0] is not q.shape[0] and not _is_one(bound.shape[0]):
            _check.size(op, f"B of {name}", bound.shape[0], q.shape[0], "B of q (or 1)")
        _check.size(op, f"S of {name}", bound.shape[1], q.shape[1], "S of q")
    _check.same_device(op, "q", q, **ranges)


def check_mask(op: str, q: Tensor, kv: Tensor, mask: Tensor | None) -> None:
    """The mask is bool or floating, [B or 1, S or 1, T], or ``None``."""
    if mask is None:
        return
    _check.dtypes(op, "mask", mask, (torch.bool, *_check.FLOATING))
    _check.rank(op, "mask", mask, "[B or 1, S or 1, T]", 3)
    for dim, what in ((0, "B"), (1, "S")):
        if not _is_one(mask.shape[dim]):
            _check.size(op, f"{what} of mask", mask.shape[dim], q.shape[dim], f"{what} of q (or 1)")
    _check.size(op, "T of mask", mask.shape[2], kv.shape[1], "T of kv")
    _check.same_device(op, "q", q, mask=mask)


def _is_one(size: Any) -> bool:
    """A size that broadcasts. Symbolic sizes never do: torch specialises sizes of 1."""
    return type(size) is int and size == 1


def dequantise(operand: Tensor, sf: Tensor | None) -> Tensor:
    """The operand as numbers: f32, f64 for f64; each value is exact before its scale, and rounded once after it."""
    values = _sf.values(operand) if is_quantised(operand) else operand.to(_check.compute_dtype(operand.dtype))
    if sf is None:
        return values
    groups = sf.shape[-1]
    return (values.unflatten(-1, (groups, -1)) * sf.unsqueeze(-1)).flatten(-2)


def scores(q: Tensor, kv: Tensor, weights: Tensor, scale: float) -> Tensor:
    """[B, S, T] scores of dequantised q [B, S, H, D] and kv [B, T, D], one head at a time: O(S * T) memory."""
    dtype = _check.compute_dtype(q.dtype)
    keys = kv.to(dtype).transpose(1, 2)
    total = torch.zeros(q.shape[0], q.shape[1], kv.shape[1], dtype=dtype, device=q.device)
    for h in range(q.shape[2]):
        p = torch.bmm(q[:, :, h].to(dtype), keys) * scale
        total += weights[:, :, h].to(dtype).unsqueeze(-1) * p.relu()
    return total


def bounds(q: Tensor, keys: int, ks: Tensor | None, ke: Tensor | None) -> tuple[Tensor, Tensor]:
    """The bounds as i64 [B, S], clamped to [0, T]; negative ones are 0, ``None`` is the whole row."""
    shape = (q.shape[0], q.shape[1])
    start = torch.zeros(shape, dtype=torch.int64, device=q.device) if ks is None else ks.long().clamp(0, keys)
    end = torch.full(shape, keys, dtype=torch.int64, device=q.device) if ke is None else ke.long().clamp(0, keys)
    return start.expand(shape), end.expand(shape)


def excluded(q: Tensor, keys: int, ks: Tensor | None, ke: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Bool [B, S, T] (or broadcastable to it) of the keys that are excluded; ``None`` if none is."""
    out = None
    if ks is not None or ke is not None:
        start, end = bounds(q, keys, ks, ke)
        at = torch.arange(keys, device=q.device)
        out = (at < start.unsqueeze(-1)) | (at >= end.unsqueeze(-1))
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        out = hidden if out is None else out | hidden
    return out


def add_mask(score: Tensor, mask: Tensor | None) -> Tensor:
    """The score plus a floating mask; a boolean mask changes nothing here (see ``excluded``)."""
    return score if mask is None or mask.dtype == torch.bool else score + mask.to(score.dtype)
