"""``sparse_mqa_attention`` by the vendor's sparse flash attention, which has one form: MLA-absorb.

There the value is the first 512 columns of the key, and the last 64 are the rotary part, passed apart. That v really is
those columns is read off the storage: shapes do not show it. The softmax statistics give lse = max + log(sum).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_deep.native.torch_npu import rows
from ascend_deep.native.torch_npu._call import Spec, known
from ascend_deep.native.torch_npu.checks import refusal
from ascend_deep.native.torch_npu.soc import Target

__all__ = ["limits", "sparse_mqa_attention"]

_LATENT, _ROPE = 512, 64


def sparse_mqa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    *,
    scale: float,
    empty: str,
    fill: float,
) -> tuple[Tensor, Tensor]:
    """As the op says; the schema's arguments."""
    keys = k.shape[2]
    query, key = q.transpose(1, 2), k.transpose(1, 2)
    latent = key[..., :_LATENT].contiguous()
    valid = (idx >= 0) & (idx < keys)
    # Valid indices have to come first in a row.
    far = torch.iinfo(torch.int32).max
    chosen = torch.where(valid, idx, far).to(torch.int32).sort(-1).values
    chosen = torch.where(chosen == far, -1, chosen)
    out, highest, total = torch.ops.npu.npu_sparse_flash_attention(
        query[..., :_LATENT].contiguous(),
        latent,
        latent,
        chosen.unsqueeze(2),
        float(scale),
        query_rope=query[..., _LATENT:].contiguous(),
        key_rope=key[..., _LATENT:].contiguous(),
        sparse_block_size=1,
        layout_query="BSND",
        layout_kv="BSND",
        sparse_mode=0,
        attention_mode=2,
        return_softmax_lse=True,
    )
    # A query without any key gives zero; what the vendor's op gives is not documented.
    some = valid.any(-1).unsqueeze(1)
    lse = torch.where(some, (highest + total.log()).squeeze(1).transpose(1, 2), -torch.inf)
    result = torch.where(some.unsqueeze(-1), out.transpose(1, 2), torch.zeros((), dtype=q.dtype, device=q.device))
    return result.contiguous(), lse.contiguous()


def limits(
    target: Target,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    *,
    scale: float,
    empty: str,
    fill: float,
) -> str | None:
    """Why the vendor's op does not compute this call of ``sparse_mqa_attention``; ``None`` if it does."""
    products = rows.limit("npu_sparse_flash_attention", "products", target)
    if products is not None and target.family not in products.value:
        return f"torch_npu's npu_sparse_flash_attention is not made for the Ascend {target.family}."
    if mask is not None or sink is not None:
        return f"there is a {'mask' if mask is not None else 'sink'}; the vendor's op is used without one."
    if empty != "zero":
        return f"empty is {empty!r}; rows without a key are made zero here."
    if k.shape[1] != 1:
        return f"k has {k.shape[1]} heads; the vendor's op takes one."
    if q.shape[3] != _LATENT + _ROPE or v.shape[3] != _LATENT:
        return (
            f"q and v have the head dimensions {q.shape[3]} and {v.shape[3]}; the vendor's op takes "
            f"{_LATENT + _ROPE} and {_LATENT}, absorbed MLA."
        )
    if not _is_start_of(v, k):
        return "v is not a view of the first columns of k; in the vendor's op the value is a part of the key."
    batch, heads, queries, _ = q.shape
    if any(known(size) and size == 0 for size in (batch, queries, k.shape[2], idx.shape[2])):
        return "an operand is empty; the vendor's documents do not allow empty tensors."
    key = (batch, k.shape[2], 1)
    return refusal(
        "npu_sparse_flash_attention",
        target,
        Spec((batch, queries, heads, _LATENT), q.dtype),
        Spec((*key, _LATENT), k.dtype),
        Spec((*key, _LATENT), v.dtype),
        Spec((batch, queries, 1, idx.shape[2]), torch.int32),
        scale,
        query_rope=Spec((batch, queries, heads, _ROPE), q.dtype),
        key_rope=Spec((*key, _ROPE), k.dtype),
        sparse_block_size=1,
        sparse_mode=0,
        attention_mode=2,
        return_softmax_lse=True,
    )


def _is_start_of(v: Tensor, k: Tensor) -> bool:
    """True if ``v`` is ``k[..., :n]``: one storage, one offset, the same strides."""
    if v.dtype != k.dtype or v.stride() != k.stride() or v.storage_offset() != k.storage_offset():
        return False
    return v.untyped_storage()._cdata == k.untyped_storage()._cdata and v.shape[:3] == k.shape[:3]
