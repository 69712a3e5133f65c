"""``mqa_topk`` by the vendor's lightning indexer, plain and quantised.

    index[b,s,:] = top-k over t of  sum over h of weights[b,s,h] * relu(q[b,s,h,:] . k[b,t,:])

A positive scale does not change the choice, so it is left out; scores are not asked of the vendor, because it returns
them rounded and not in graph mode. The vendor's order within a row is not documented: rows are sorted here. Which of
several keys with equal scores are chosen is the vendor's affair; ``torch.topk`` promises nothing about that either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_deep.native.torch_npu import soc
from ascend_deep.native.torch_npu._call import Spec
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.soc import Target

__all__ = ["limits", "mqa_topk"]

_FP8 = torch.float8_e4m3fn
_WRITTEN_OUT = (torch.float32, torch.bfloat16, torch.float16)


def mqa_topk(
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    topk: int,
    scale: float,
    outside: str,
    sorted: bool,
    return_scores: bool,
    index_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """As the op says; the schema's arguments."""
    keys = kv.shape[1]
    target = soc.current()
    assert target is not None  # the limits refuse where there is none
    attributes: dict[str, Any] = {
        **{"topk": topk, "scale": scale, "outside": outside, "sorted": sorted},
        **{"return_scores": return_scores, "index_dtype": index_dtype},
    }
    if target.graph and _vendor_refusal(target, q, q_sf, kv, kv_sf, weights, ks, ke, mask, **attributes) is not None:
        return _written_out(q, kv, weights, ks, ke, mask, **attributes)
    # One query per sequence: its range is the sequence's number of keys.
    lengths = None if ke is None else ke.expand(q.shape[0], 1)[:, 0].clamp(0, keys).to(torch.int32)
    common: dict[str, Any] = {
        "actual_seq_lengths_key": lengths,
        "layout_query": "BSND",
        "layout_key": "BSND",
        "sparse_count": int(topk),
        "sparse_mode": 0,
    }
    key = kv.unsqueeze(2).contiguous()
    if q_sf is None or kv_sf is None:
        chosen, _ = torch.ops.npu.npu_lightning_indexer(q.contiguous(), key, weights.contiguous(), **common)
    else:
        chosen = torch.ops.npu.npu_quant_lightning_indexer(
            q.contiguous(),
            key,
            weights.contiguous(),
            q_sf[..., 0].to(_scales(weights.dtype)).contiguous(),
            kv_sf.to(_scales(weights.dtype)).contiguous(),
            0,
            0,
            **common,
        )
    idx = chosen[:, :, 0].to(torch.int64)
    # Ascending, padding last.
    last = torch.iinfo(torch.int64).max
    idx = torch.where(idx < 0, last, idx).sort(-1).values
    idx = torch.where(idx == last, -1, idx).to(index_dtype or torch.int64)
    return q.new_empty(0, dtype=torch.float32), idx


def _written_out(
    q: Tensor,
    kv: Tensor,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    topk: int,
    scale: float,
    outside: str,
    sorted: bool,
    return_scores: bool,
    index_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """The op in torch's own ops, all of which torchair converts; its topk, like torch's, breaks ties freely.

    The op's reference body sorts keys of bits, which the graph engine has no converter for. Scores of all keys exist at
    once here, as they do in the models that this op replaces.
    """
    keys = kv.shape[1]
    products = q.to(torch.float32) @ kv.to(torch.float32).transpose(1, 2).unsqueeze(1) * scale
    scores = (products.relu() * weights.to(torch.float32).unsqueeze(-1)).sum(2)
    at = torch.arange(keys, device=q.device)
    hidden = torch.zeros((1, 1, 1), dtype=torch.bool, device=q.device)
    if ks is not None:
        hidden = hidden | (at < ks.unsqueeze(-1))
    if ke is not None:
        hidden = hidden | (at >= ke.unsqueeze(-1))
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        hidden = hidden | (mask == -torch.inf)
        scores = scores + mask.to(torch.float32)
    hidden = hidden.expand(scores.shape)
    scores = torch.where(hidden, -torch.inf, scores)
    columns = min(int(topk), keys)
    values, idx = torch.where(scores == scores, scores, -torch.inf).topk(columns, -1)
    if outside == "pad":
        idx = torch.where(hidden.gather(2, idx), -1, idx)
    if not sorted:
        # Ascending, padding last.
        far = torch.iinfo(torch.int32).max
        idx = torch.where(idx < 0, far, idx).sort(-1).values
        idx = torch.where(idx == far, -1, idx)
        values = torch.where(idx < 0, -torch.inf, scores.gather(2, idx.clamp(min=0)))
    missing = int(topk) - columns
    if missing:
        idx = torch.nn.functional.pad(idx, (0, missing), value=-1)
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    return (
        values.contiguous() if return_scores else q.new_empty(0, dtype=torch.float32),
        idx.to(index_dtype or torch.int64).contiguous(),
    )


def _scales(weights: torch.dtype) -> torch.dtype:
    return torch.float32 if weights == torch.bfloat16 else torch.float16


def limits(
    target: Target,
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    topk: int,
    scale: float,
    outside: str,
    sorted: bool,
    return_scores: bool,
    index_dtype: torch.dtype | None,
) -> str | None:
    """Why this provider does not compute this call of ``mqa_topk``; ``None`` if it does."""
    if target.graph and q.dtype == kv.dtype and q.dtype in _WRITTEN_OUT:
        return None  # what the vendor's op does not compute is written out
    attributes: dict[str, Any] = {
        **{"topk": topk, "scale": scale, "outside": outside, "sorted": sorted},
        **{"return_scores": return_scores, "index_dtype": index_dtype},
    }
    return _vendor_refusal(target, q, q_sf, kv, kv_sf, weights, ks, ke, mask, **attributes)


def _vendor_refusal(
    target: Target,
    q: Tensor,
    q_sf: Tensor | None,
    kv: Tensor,
    kv_sf: Tensor | None,
    weights: Tensor,
    ks: Tensor | None,
    ke: Tensor | None,
    mask: Tensor | None,
    *,
    topk: int,
    scale: float,
    outside: str,
    sorted: bool,
    return_scores: bool,
    index_dtype: torch.dtype | None,
) -> str | None:
    """Why the vendor's ops do not compute the call; ``None`` if one does."""
    if return_scores or sorted:
        what = "the scores are returned" if return_scores else "keys are sorted by score"
        return f"{what}; the vendor's indexer returns indices only in graph mode."
    if not scale > 0:
        return f"scale is {scale}; it is left out because it does not change the choice, so it has to be positive."
    if ks is not None or mask is not None:
        what = "a mask" if mask is not None else "a first key"
        return f"there is {what} per query; the vendor's indexer takes a number of keys per sequence."
    if ke is not None and not (isinstance(q.shape[1], int) and q.shape[1] == 1):
        return f"there is a range for each of {q.shape[1]} queries; the vendor's indexer takes one per sequence."
    if outside == "rank_last" and ke is not None:
        return "keys outside the range rank last; the vendor's indexer never chooses them."
    query = Spec(tuple(q.shape), q.dtype)
    key = Spec((kv.shape[0], kv.shape[1], 1, kv.shape[2]), kv.dtype)
    head_weights = Spec(tuple(weights.shape), weights.dtype)
    if q.dtype != _FP8 and kv.dtype != _FP8:
        return refusal("npu_lightning_indexer", target, query, key, head_weights, sparse_count=int(topk), sparse_mode=0)
    if q_sf is None or kv_sf is None or q_sf.shape[-1] != 1 or kv_sf.shape[-1] != 1:
        return "q and kv do not both have one scale per vector; the vendor's indexer wants one per token and head."
    if _scales(weights.dtype) != torch.float32:
        return f"weights has dtype {weights.dtype}; with it the vendor takes float16 scales, which would round ours."
    return refusal(
        "npu_quant_lightning_indexer",
        target,
        query,
        key,
        head_weights,
        Spec(tuple(q_sf.shape[:-1]), torch.float32),
        Spec(tuple(kv_sf.shape), torch.float32),
        0,
        0,
        sparse_count=int(topk),
        sparse_mode=0,
    )
