"""Calls of the vendor's indexer and sparse attention: one function per op, with the vendor's own signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ascend_deep.native.torch_npu._call import Call, T, known, listed, named

__all__ = ["CHECKS"]


def _indexer(c: Call, query: T, key: T, weights: T, layouts: tuple[str, str], count: int, mode: int) -> Any:
    c.need(layouts == ("BSND", "BSND"), f"is used with the layout BSND here, not {layouts[0]} and {layouts[1]}")
    c.rank("query", query, 4)
    c.rank("key", key, 4)
    c.rank("weights", weights, 3)
    c.within("dtypes", query.dtype, "query")
    c.dtype("key", key, query.dtype)
    c.within("depth", query.shape[3], "the head dimension of query")
    c.same("the head dimension of key", key.shape[3], "that of query", query.shape[3])
    c.need(key.shape[2] == 1, f"takes one head of key, not {key.shape[2]}")
    for name, tensor, source in (("the batch of key", key, query), ("the batch of weights", weights, query)):
        c.same(name, tensor.shape[0], "that of query", source.shape[0])
    for dim, what in ((1, "queries"), (2, "heads")):
        c.same(f"the {what} of weights", weights.shape[dim], "those of query", query.shape[dim])
    for name, tensor in (("query", query), ("key", key), ("weights", weights)):
        c.need(all(not known(s) or s > 0 for s in tensor.shape), f"takes no empty {name}")
        c.contiguous(name, tensor)
    c.within("sparse_count", count, "sparse_count")
    c.within("sparse_mode", mode, "sparse_mode")
    return query.shape[2]


def _lightning_indexer(
    c: Call,
    query: T,
    key: T,
    weights: T,
    *,
    actual_seq_lengths_query: T | None = None,
    actual_seq_lengths_key: T | None = None,
    block_table: T | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = 9223372036854775807,
    next_tokens: int = 9223372036854775807,
    return_value: bool = False,
) -> None:
    heads = _indexer(c, query, key, weights, (layout_query, layout_key), sparse_count, sparse_mode)
    c.at_most("heads_max", heads, "the number of heads of query")
    ok = weights.dtype in (torch.float32, query.dtype)
    c.need(
        ok, f"takes weights of float32 or of the dtype of query, not {named(weights.dtype)}", "aclnnLightningIndexer"
    )
    if actual_seq_lengths_key is not None:
        c.dtype("actual_seq_lengths_key", actual_seq_lengths_key, torch.int32)
        c.same("actual_seq_lengths_key", actual_seq_lengths_key.shape[0], "the batch", query.shape[0])


def _quant_lightning_indexer(
    c: Call,
    query: T,
    key: T,
    weights: T,
    query_dequant_scale: T,
    key_dequant_scale: T,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: T | None = None,
    actual_seq_lengths_key: T | None = None,
    block_table: T | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = 9223372036854775807,
    next_tokens: int = 9223372036854775807,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
) -> None:
    heads = _indexer(c, query, key, weights, (layout_query, layout_key), sparse_count, sparse_mode)
    c.within("heads", heads, "the number of heads of query")
    row = c.row("scales")
    if row is not None:
        c.need(weights.dtype in row.value, f"takes weights of {listed(tuple(row.value))}, not {named(weights.dtype)}")
        for name, scale in (("query_dequant_scale", query_dequant_scale), ("key_dequant_scale", key_dequant_scale)):
            accepted = row.value[weights.dtype]
            c.rank(name, scale, 3)
            c.need(
                scale.dtype in accepted,
                f"takes {name} of {listed(accepted)} with weights of {named(weights.dtype)}, not {named(scale.dtype)}",
                row.source,
            )
    c.need((query_quant_mode, key_quant_mode) == (0, 0), "takes one scale per token and head, which is quant mode 0")


def _sparse_flash_attention(
    c: Call,
    query: T,
    key: T,
    value: T | None,
    sparse_indices: T,
    scale_value: float,
    *,
    block_table: T | None = None,
    actual_seq_lengths_query: T | None = None,
    actual_seq_lengths_kv: T | None = None,
    query_rope: T | None = None,
    key_rope: T | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = 9223372036854775807,
    next_tokens: int = 9223372036854775807,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: T | None = None,
) -> None:
    c.need((layout_query, layout_kv) == ("BSND", "BSND"), f"is used with the layout BSND here, not {layout_query}")
    c.within("dtypes", query.dtype, "query")
    for name, tensor in (("query", query), ("key", key), ("sparse_indices", sparse_indices)):
        c.rank(name, tensor, 4)
        c.need(all(not known(s) or s > 0 for s in tensor.shape), f"takes no empty {name}")
    c.dtype("key", key, query.dtype)
    c.dtype("sparse_indices", sparse_indices, torch.int32)
    c.within("heads", query.shape[2], "the number of heads of query")
    c.need(key.shape[2] == 1, f"takes one head of key, not {key.shape[2]}")
    c.within("depth", query.shape[3], "the head dimension of query")
    c.same("the head dimension of key", key.shape[3], "that of query", query.shape[3])
    if value is None:
        row = c.row("no_value")
        c.need(row is not None, f"takes no missing value on CANN {c.target.cann or 'of unknown release'}")
    else:
        c.dtype("value", value, query.dtype)
        c.need(tuple(value.shape) == tuple(key.shape), "takes a value of the shape of key")
    if query_rope is None or key_rope is None:
        c.refuse("needs query_rope and key_rope in its only mode, MLA-absorb")
        return
    for name, rope in (("query_rope", query_rope), ("key_rope", key_rope)):
        c.rank(name, rope, 4)
        c.dtype(name, rope, query.dtype)
        c.within("rope_depth", rope.shape[3], f"the head dimension of {name}")
    c.within("sparse_block_size", sparse_block_size, "sparse_block_size")
    c.within("sparse_mode", sparse_mode, "sparse_mode")
    c.within("attention_mode", attention_mode, "attention_mode")
    c.need(sinks is None, "is used without sinks here")


CHECKS: Mapping[str, Callable[..., None]] = {
    "npu_lightning_indexer": _lightning_indexer,
    "npu_quant_lightning_indexer": _quant_lightning_indexer,
    "npu_sparse_flash_attention": _sparse_flash_attention,
}
