"""Sample inputs of the indexer ops: the edge cases, in small sizes, seeded, on the CPU.

Scales are far from 1 and head weights of both signs. Samples named ``ties…`` hold small integers, so that every score
is exact in any order of summation and equal scores are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_deep.ops import _mqa, _paged_cache
from ascend_deep.ops._op import Sample

__all__ = ["attention_samples", "logits_samples", "paged_metadata_samples", "paged_samples", "paged_write_samples",
           "topk_samples"]  # fmt: skip

_SCALE = 0.37


class _Maker:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def operands(self, b: int, s: int, h: int, d: int, t: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        """(q, q_sf, kv, kv_sf, weights), quantised for fp8 and fp4 storage dtypes."""
        weights = self.randn(b, s, h)
        if dtype == _mqa.FP8:
            q, kv = self.randn(b, s, h, d).to(dtype), self.randn(b, t, d).to(dtype)
            return q, self.randn(b, s, h, 1).abs() + 0.1, kv, self.randn(b, t, 1).abs() + 0.1, weights
        if dtype in _mqa.FP4_STORAGE:
            low, high = (-128, 128) if dtype == torch.int8 else (0, 256)
            q, kv = self.ints(low, high, b, s, h, d // 2, dtype=dtype), self.ints(low, high, b, t, d // 2, dtype=dtype)
            groups = d // 32
            q_sf, kv_sf = (2.0 ** self.ints(-3, 3, *x.shape[:-1], groups) for x in (q, kv))
            return q, q_sf.float(), kv, kv_sf.float(), weights
        return (
            self.randn(b, s, h, d).to(dtype),
            None,
            self.randn(b, t, d).to(dtype),
            None,
            weights.to(dtype if dtype == torch.float64 else torch.float32),
        )

    def integers(self, b: int, s: int, h: int, d: int, t: int) -> tuple[Any, ...]:
        q, kv = (self.ints(-1, 2, *shape).float() for shape in ((b, s, h, d), (b, t, d)))
        return q, None, kv, None, self.ints(-2, 3, b, s, h).float()


def _causal(s: int, t: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """[1, S] ends of a causal window: the last query sees all T keys."""
    return torch.arange(t - s + 1, t + 1, dtype=dtype).unsqueeze(0)


def _common(make: _Maker) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(name, positional arguments) for both dense ops."""
    none = (None, None, None)
    for b, s, t in ((0, 3, 4), (2, 0, 5), (2, 3, 0), (1, 1, 1)):
        yield f"b{b}_s{s}_t{t}", (*make.operands(b, s, 2, 8, t), *none)
    for h, d in ((1, 16), (2, 32), (3, 7), (9, 96), (16, 64), (5, 192)):
        yield f"h{h}_d{d}", (*make.operands(1, 4, h, d, 19), *none)
    for n in (63, 64, 65):
        yield f"causal_{n}", (*make.operands(1, n, 3, 8, n), None, _causal(n, n), None)
    yield "decode", (*make.operands(2, 1, 4, 16, 37), *none)
    yield "batched_ranges", (
        *make.operands(3, 5, 2, 16, 33), make.ints(-3, 20, 3, 5), make.ints(10, 40, 3, 5), None,
    )  # fmt: skip
    lengths = torch.tensor([[0, -4, 3, 40, 7]], dtype=torch.int32)
    yield "empty_and_negative", (*make.operands(2, 5, 2, 16, 12), None, lengths, None)
    yield "empty_because_reversed", (
        *make.operands(1, 3, 2, 16, 12), torch.tensor([[5, 12, 60]]), torch.tensor([[5, 3, 70]]), None,
    )  # fmt: skip
    keep = make.randn(2, 6, 21) > 0
    keep[0, 2] = False
    yield "mask_bool", (*make.operands(2, 6, 3, 16, 21), None, None, keep)
    yield "mask_bool_broadcast", (*make.operands(2, 6, 3, 16, 21), None, _causal(6, 21), keep[:1, :1])
    added = make.randn(1, 6, 21).masked_fill(make.randn(1, 6, 21) > 0.6, -torch.inf)
    yield "mask_float", (*make.operands(2, 6, 3, 16, 21), None, None, added)
    smallest = torch.finfo(torch.float32).min
    yield "mask_finfo_min", (*make.operands(2, 6, 3, 16, 21), None, None, added.clamp(min=smallest))
    for dtype in (torch.bfloat16, torch.float16, torch.float64, _mqa.FP8, torch.int8, torch.uint8):
        name = str(dtype).removeprefix("torch.")
        yield name, (*make.operands(2, 5, 3, 64, 23, dtype), None, _causal(5, 23), None)
    bf16 = make.operands(1, 5, 3, 64, 23, torch.bfloat16)
    yield "bf16_weights", (*bf16[:4], bf16[4].bfloat16(), *none)
    q, q_sf, kv, kv_sf, weights = make.operands(1, 4, 3, 64, 23, _mqa.FP8)
    yield "fp8_without_scales", (q, None, kv, None, weights, *none)
    yield "fp8_groups", (q, q_sf.repeat(1, 1, 1, 2) * 0.7, kv, kv_sf.repeat(1, 1, 4) * 1.3, weights, *none)
    q4 = make.operands(1, 4, 3, 64, 23, torch.int8)
    yield "fp4_and_fp8", (q4[0], q4[1], kv, kv_sf, weights, *none)
    yield "ties", (*make.integers(2, 4, 2, 3, 50), None, None, None)
    q, kv, weights = make.randn(4, 1, 16, 5), make.randn(1, 16, 23), make.randn(1, 4, 6)
    strided = (q.permute(1, 3, 0, 2), None, kv.transpose(1, 2), None, weights[:, :, ::2])
    yield "strided", (strided[0][:, :4, :3], *strided[1:], *none)


def logits_samples() -> Iterator[Sample]:
    """Calls of ``mqa_logits``."""
    make = _Maker(11)
    plain: dict[str, Any] = {"scale": _SCALE, "max_seqlen_k": 0, "clean": True, "out_dtype": None}
    for name, args in _common(make):
        yield Sample(name, args, plain)
    for columns in (1, 9, 40):
        args = (*make.operands(2, 5, 2, 16, 33), make.ints(-3, 20, 2, 5), make.ints(10, 40, 2, 5), None)
        yield Sample(f"compressed_{columns}", args, {**plain, "max_seqlen_k": columns})
    keep = make.randn(2, 5, 33) > 0
    args = (*make.operands(2, 5, 2, 16, 33), make.ints(0, 20, 1, 5), None, keep)
    yield Sample("compressed_mask", args, {**plain, "max_seqlen_k": 12})
    args = (*make.operands(1, 5, 2, 16, 33, torch.bfloat16), None, None, None)
    yield Sample("out_bf16", args, {**plain, "out_dtype": torch.bfloat16})
    yield Sample("negative_scale", args, {**plain, "scale": -0.8})


def topk_samples() -> Iterator[Sample]:
    """Calls of ``mqa_topk``: every argument set of both, with both orders and both treatments of excluded keys."""
    make = _Maker(12)
    plain: dict[str, Any] = {
        "topk": 7, "scale": _SCALE, "outside": "pad", "sorted": False, "return_scores": True, "index_dtype": None,
    }  # fmt: skip
    for n, (name, args) in enumerate(_common(make)):
        yield Sample(name, args, {**plain, "sorted": n % 2 == 0, "outside": ("pad", "rank_last")[n // 2 % 2]})
    for topk in (0, 1, 4, 5, 6):
        args = (*make.operands(2, 5, 2, 16, 5), None, _causal(5, 5), None)
        for outside in ("pad", "rank_last"):
            yield Sample(f"topk_{topk}_of_5-{outside}", args, {**plain, "topk": topk, "outside": outside})
    for sorted in (False, True):
        for outside in ("pad", "rank_last"):
            args = (*make.integers(2, 4, 2, 3, 50), None, make.ints(-2, 50, 2, 4), make.randn(2, 1, 50) > -1)
            kwargs = {**plain, "topk": 20, "sorted": sorted, "outside": outside}
            yield Sample(f"ties-sorted_{sorted}-{outside}", args, kwargs)
    args = (*make.integers(1, 4, 2, 3, 50), None, None, None)
    yield Sample("ties_int32", args, {**plain, "index_dtype": torch.int32})
    yield Sample("ties_without_scores", args, {**plain, "return_scores": False, "sorted": True})


def _table(make: _Maker, rows: int, columns: int, pages: int) -> Tensor:
    return torch.stack([torch.randperm(pages, generator=make.generator)[:columns] for _ in range(rows)]).int()


def _cache(make: _Maker, fmt: str, pages: int, block: int, depth: int, dtype: torch.dtype, extra: int = 0) -> Tensor:
    keys = make.randn(pages * block, depth)
    if fmt == "plain":
        return keys.to(dtype).view(pages, block, 1, depth)
    scale_bytes = 4 if fmt == "fp8" else depth // _paged_cache.GRAN + extra
    width = _paged_cache.storage_width(fmt, depth)
    data, scales = _paged_cache.quantise(keys, fmt, scale_bytes)
    flat = torch.cat((data.view(pages, -1), scales.view(pages, -1)), 1)
    return flat.view(pages, block, 1, width + scale_bytes)


def paged_samples() -> Iterator[Sample]:
    """Calls of ``paged_mqa_logits``."""
    make = _Maker(13)

    def case(
        name: str,
        *,
        queries: int = 3,
        next_n: int = 1,
        depth: int = 64,
        dtype: torch.dtype = torch.float32,
        fmt: str = "plain",
        block: int = 8,
        lens: Tensor | None = None,
        table: Tensor | None = None,
        indices: Tensor | None = None,
        cache: Tensor | None = None,
        columns: int = 40,
        **changes: Any,
    ) -> Sample:
        q, q_sf, _, _, weights = make.operands(queries, next_n, 3, depth, 1, dtype)
        cache = _cache(make, fmt, 9, block, depth, dtype, extra=1) if cache is None else cache
        lens = make.ints(0, 40, queries, next_n, dtype=torch.int32) if lens is None else lens
        table = _table(make, queries, 5, 9) if table is None else table
        kwargs = {"max_context_len": columns, "scale": _SCALE, "clean": True, "out_dtype": None, "fmt": fmt}
        return Sample(name, (q, q_sf, cache, weights, lens, table, None, indices), {**kwargs, **changes})

    yield case("plain")
    yield case("no_queries", queries=0, table=torch.zeros(0, 5, dtype=torch.int32))
    yield case("next_n_4", next_n=4, lens=torch.tensor([[3, 4, 5, 6], [0, -4, 8, 9], [37, 38, 39, 40]]))
    yield case("bf16", dtype=torch.bfloat16, depth=96)
    yield case("f64_out", dtype=torch.float64, depth=5)
    yield case("f16_out_bf16", dtype=torch.float16, out_dtype=torch.bfloat16)
    for fmt in ("fp8", "fp8_ue8m0", "fp4_ue8m0"):
        yield case(f"cache_{fmt}", fmt=fmt, dtype=torch.bfloat16)
        yield case(f"q_fp8-cache_{fmt}", fmt=fmt, dtype=_mqa.FP8, next_n=2)
    yield case("q_fp4-cache_fp4", fmt="fp4_ue8m0", dtype=torch.uint8)
    yield case("wrong_pages", table=torch.tensor([[3, -1, 2, 9, 4], [0, 1, 2, 3, 4], [8, 7, 6, 1 << 30, -5]]).int())
    yield case("short_table", table=_table(make, 3, 2, 9), lens=torch.tensor([[40], [9], [16]]))
    yield case("long_context", columns=11, lens=torch.tensor([[40], [9], [11]]))
    yield case("indices", queries=4, table=_table(make, 2, 5, 9), indices=torch.tensor([0, 1, 1, 7]))
    wide = torch.cat((make.randn(9, 8, 1, 64), make.randn(9, 3, 1, 64)), 1)[:, :8]
    yield case("pages_apart", cache=wide)
    yield case("page_64", block=64, columns=130, lens=torch.tensor([[65], [129], [130]]), table=_table(make, 3, 3, 9))


def paged_metadata_samples() -> Iterator[Sample]:
    """Calls of ``paged_mqa_logits_metadata``."""
    make = _Maker(14)
    for name, lens, cores in (
        ("plain", make.ints(1, 300, 5, 1, dtype=torch.int32), 7),
        ("next_n", make.ints(-5, 300, 4, 3), 3),
        ("empty", torch.zeros(3, 1, dtype=torch.int32), 4),
        ("no_queries", torch.zeros(0, 2, dtype=torch.int32), 2),
    ):
        yield Sample(name, (lens, None), {"block_kv": 64, "num_heads": 16, "num_cores": cores})
    indices = torch.tensor([0, 0, 1])
    yield Sample("indices", (make.ints(1, 99, 3, 1), indices), {"block_kv": 32, "num_heads": 8, "num_cores": 5})


def paged_write_samples() -> Iterator[Sample]:
    """Calls of ``paged_kv_write_``."""
    make = _Maker(15)
    slots = torch.tensor([5, -1, 71, 72, 0, 1 << 40, 33])
    for fmt in _paged_cache.FORMATS:
        cache = _cache(make, fmt, 9, 8, 64, torch.bfloat16, extra=2)
        yield Sample(fmt, (cache, make.randn(7, 64) * 3, slots), {"fmt": fmt})
    cache = _cache(make, "fp8", 9, 8, 64, torch.float32)
    yield Sample("outliers", (cache, make.randn(7, 64).exp() ** 3, slots), {"fmt": "fp8"})
    yield Sample("zeros", (cache.clone(), make.randn(7, 64) * 0.0, slots), {"fmt": "fp8"})
    plain = _cache(make, "plain", 9, 8, 64, torch.float32)
    yield Sample("no_keys", (plain, make.randn(0, 64), slots[:0]), {"fmt": "plain"})
    yield Sample(
        "pages_apart", (plain[::2], make.randn(7, 64), torch.tensor([5, -1, 39, 40, 0, 1 << 40, 33])), {"fmt": "plain"}
    )


def attention_samples() -> Iterator[Sample]:
    """Calls of ``sparse_mqa_attention``."""
    make = _Maker(16)

    def case(
        name: str,
        *,
        b: int = 2,
        heads: int = 4,
        key_heads: int = 1,
        s: int = 5,
        t: int = 23,
        depth: int = 24,
        value_depth: int = 16,
        k: int = 6,
        dtype: torch.dtype = torch.float32,
        **changes: Any,
    ) -> Sample:
        order = torch.rand(b, s, max(t, k), generator=make.generator).argsort(-1)[:, :, :k]
        idx = torch.where(order < t, order, -1)
        q, key, value = (
            make.randn(*shape).to(dtype)
            for shape in ((b, heads, s, depth), (b, key_heads, t, depth), (b, key_heads, t, value_depth))
        )
        rest = {"idx": idx, "mask": None, "sink": None, "empty": "zero", "fill": -3e38, **changes}
        attributes = {"scale": _SCALE, "empty": rest["empty"], "fill": rest["fill"]}
        return Sample(name, (q, key, value, rest["idx"], rest["mask"], rest["sink"]), attributes)

    yield case("mqa")
    yield case("gqa", key_heads=2)
    yield case("mha", key_heads=4)
    for b, s, t in ((0, 3, 4), (2, 0, 5), (2, 3, 0), (1, 1, 1)):
        yield case(f"b{b}_s{s}_t{t}", b=b, s=s, t=t)
    yield case("more_than_keys", k=40)
    yield case("no_columns", k=0)
    idx = make.ints(0, 23, 2, 5, 1).repeat(1, 1, 4)
    idx[:, :, 1:] = -1
    idx[0, 2] = -1
    yield case("one_key_or_none", idx=idx)
    yield case("out_of_range", idx=torch.stack([torch.tensor([1, 23, 1 << 40, -7])] * 5).expand(2, 5, 4))
    yield case("int32", idx=torch.arange(30).reshape(2, 5, 3).int() % 23)
    keep = make.randn(1, 1, 5, 23) > 0
    keep[:, :, 3] = False
    yield case("mask_bool", mask=keep, key_heads=2)
    added = make.randn(2, 4, 5, 23).masked_fill(make.randn(2, 4, 5, 23) > 0.8, -torch.inf)
    yield case("mask_float_heads", mask=added)
    yield case("mask_float_broadcast", mask=added[:1, :1, :1])
    # opcheck takes NaN for a difference: here every row sees a key.
    seen = keep.clone()
    seen[:, :, 3] = True
    yield case("empty_nan", mask=seen, key_heads=2, empty="nan", k=22)
    yield case("empty_mean", mask=keep, key_heads=4, empty="mean")
    low = -(2.0**101)
    filled = added.masked_fill(make.randn(2, 4, 5, 23) > 0.5, low)
    filled[1, :, 2] = low
    filled[0, 1, 3] = -torch.inf
    filled[0, 2, 4] = filled[0, 2, 4].clamp(max=low)
    yield case("empty_mean_of_the_filled", mask=filled, key_heads=2, empty="mean", fill=low)
    yield case("empty_mean_one_plane", mask=filled[:, 2:3], empty="mean", fill=low)
    yield case("sink", sink=make.randn(4) * 3)
    yield case("sink_empty_rows", sink=make.randn(4) * 3, mask=keep)
    yield case("large_logits", idx=torch.arange(30).reshape(2, 5, 3) % 23, mask=make.randn(2, 1, 5, 23) * 200)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield case(str(dtype).removeprefix("torch."), dtype=dtype, key_heads=2)
