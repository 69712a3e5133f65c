"""Every call that the ``deep_gemm`` adapter makes, against a stand-in that checks the documented signature.

SM100 and Ascend cannot run here. The stand-in computes the library's documented result from what it is given, after
checking names, dtypes, shapes and strides, so that a wrong packing or a wrong order of arguments is a wrong result.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep.native.deep_gemm import indexer
from ascend_deep.native.deep_gemm.differences import ASCEND, SM90, SM100, Indexer
from ascend_deep.native.deep_gemm.provider import limits_of

_reference = importlib.import_module("ascend_deep.ops.mqa_logits")._reference
FP8 = torch.float8_e4m3fn


class StandIn:
    """The library of one platform; garbage wherever its documentation promises nothing."""

    def __init__(self, row: Indexer) -> None:
        self.row = row
        self.calls = 0
        setattr(self, row.function, getattr(self, f"_{row.platform.split()[-1].lower()}"))

    def _unpack(self, words: Tensor, groups: int) -> Tensor:
        assert words.dtype == self.row.scale_dtype and words.is_contiguous()
        codes = words.view(torch.uint8).to(torch.int32)
        codes = codes.reshape(*words.shape[:-1], -1)
        assert (codes[..., groups:] == 127).all()
        return (codes[..., :groups] << 23).view(torch.float32)

    def _compute(
        self, q: Tensor, q_sf: Tensor | None, kv: Tensor, kv_sf: Tensor, w: Tensor, ks: Tensor, ke: Tensor, columns: int
    ) -> Tensor:
        self.calls += 1
        keys = kv.shape[0]
        for tensor in (q, kv, w, ks, ke):
            assert tensor.is_contiguous()
        assert w.dtype == self.row.weights and ks.dtype == ke.dtype == torch.int32
        assert ks.min() >= 0 and ke.min() >= 0 and ks.max() <= keys and ke.max() <= keys
        exact = _reference(
            q[None], None if q_sf is None else q_sf[None], kv[None], kv_sf[None], w[None].float(), ks[None], ke[None],
            None, scale=1.0, max_seqlen_k=columns, clean=True, out_dtype=self.row.logits,
        )[0]  # fmt: skip
        unit = self.row.row_bytes // self.row.logits.itemsize
        width = exact.shape[1]
        pitch = -(-(width if columns else width + 256) // unit) * unit
        out = torch.full((q.shape[0], pitch), 1234.0, dtype=self.row.logits)[:, :width]
        out.copy_(torch.where(exact.isneginf(), torch.tensor(-77.0, dtype=exact.dtype), exact))
        return out

    def _dense_clean(self, out: Tensor, ks: Tensor, ke: Tensor) -> Tensor:
        at = torch.arange(out.shape[1])
        return out.masked_fill_((at < ks.unsqueeze(1)) | (at >= ke.unsqueeze(1)), -torch.inf)

    def _sm90(
        self, q: Tensor, kv: Any, weights: Tensor, ks: Tensor, ke: Tensor, clean_logits: bool, max_seqlen_k: int
    ) -> Tensor:
        data, sf = kv
        assert sf.dtype == torch.float32 and sf.shape == data.shape[:1] and sf.is_contiguous()
        assert not (clean_logits and max_seqlen_k)
        out = self._compute(q, None, data, sf.unsqueeze(-1), weights, ks, ke, max_seqlen_k)
        return self._dense_clean(out, ks, ke) if clean_logits else out

    def _sm100(
        self,
        q: Any,
        kv: Any,
        weights: Tensor,
        ks: Tensor,
        ke: Tensor,
        clean_logits: bool,
        max_seqlen_k: int,
        logits_dtype: torch.dtype,
    ) -> Tensor:
        (data, words), (kv_data, kv_words) = q, kv
        assert words.shape == data.shape[:2] and kv_words.shape == kv_data.shape[:1]
        assert logits_dtype == torch.bfloat16 and not (clean_logits and max_seqlen_k)
        groups = kv_data.shape[-1] * (2 if kv_data.dtype == torch.int8 else 1) // 32
        q_sf, kv_sf = (self._unpack(w.unsqueeze(-1).contiguous(), groups) for w in (words, kv_words))
        out = self._compute(data, q_sf, kv_data, kv_sf, weights, ks, ke, max_seqlen_k)
        return self._dense_clean(out, ks, ke) if clean_logits else out

    def _ascend(self, q: Any, kv: Any, weights: Tensor, ks: Tensor, ke: Tensor, max_seqlen_k: int) -> Tensor:
        (data, words), (kv_data, kv_words) = q, kv
        queries, heads = data.shape[:2]
        depth = kv_data.shape[-1] * (2 if kv_data.dtype == torch.int8 else 1)
        assert words.shape == (queries * heads, depth // 64) and kv_words.shape == (kv_data.shape[0], depth // 64)
        q_sf = self._unpack(words, depth // 32).reshape(queries, heads, -1)
        return self._compute(data, q_sf, kv_data, self._unpack(kv_words, depth // 32), weights, ks, ke, max_seqlen_k)


def operands(row: Indexer, depth: int, keys: int, fp4: bool) -> tuple[Any, ...]:
    heads, queries = row.heads[len(row.heads) // 2], 5
    if fp4:
        q, kv = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((1, queries, heads, depth // 2),
                                                                         (1, keys, depth // 2)))  # fmt: skip
    else:
        q, kv = torch.randn(1, queries, heads, depth).to(FP8), torch.randn(1, keys, depth).to(FP8)
    if row.mx_scales:
        q_sf, kv_sf = (2.0 ** torch.randint(-3, 3, (*x.shape[:-1], depth // 32)) for x in (q, kv))
    else:
        q_sf, kv_sf = torch.rand(1, queries, heads, 1) + 0.5, torch.rand(1, keys, 1) + 0.5
    return q, q_sf.float(), kv, kv_sf.float(), torch.randn(1, queries, heads).to(row.weights)


CASES = [(SM90, 128, False), (SM90, 32, False), (SM100, 128, False), (SM100, 64, True), (ASCEND, 128, True),
         (ASCEND, 64, False)]  # fmt: skip


@pytest.mark.parametrize("row,depth,fp4", CASES, ids=lambda x: getattr(x, "platform", str(x)))
@pytest.mark.parametrize("bounds", ["none", "ks", "ke", "both"])
@pytest.mark.parametrize("columns", [0, 150])
def test_calls_and_results(row: Indexer, depth: int, fp4: bool, bounds: str, columns: int) -> None:
    for keys in (256, 301):
        q, q_sf, kv, kv_sf, w = operands(row, depth, keys, fp4)
        ks = torch.randint(-9, keys, (1, 5)) if bounds in ("ks", "both") else None
        ke = torch.randint(-9, keys + 9, (1, 5)) if bounds in ("ke", "both") else None
        scale = 0.5  # exact in bfloat16 weights too
        given = {"scale": scale, "max_seqlen_k": columns, "clean": True, "out_dtype": row.logits}
        fast = replace(row, least_queries=1)
        assert limits_of(fast, q, q_sf, kv, kv_sf, w, None, scale=scale, out_dtype=row.logits) is None
        library = StandIn(row)
        got = indexer.logits(library, row, q, q_sf, kv, kv_sf, w, ks, ke, **given)
        want = _reference(q, q_sf, kv, kv_sf, w.float(), ks, ke, None, **given)
        assert library.calls == 1
        assert got.shape == want.shape and got.dtype == want.dtype and got.is_contiguous()
        assert torch.equal(got.isneginf(), want.isneginf())
        tolerance = 1e-5 if row.logits == torch.float32 else 1e-2
        finite = want.isfinite()
        if finite.any():
            assert ((got - want)[finite].abs().max() / want[finite].abs().max()).item() < tolerance


@pytest.mark.parametrize("dtype,groups", [(torch.int32, 4), (torch.int32, 2), (torch.int16, 4), (torch.int16, 3)])
def test_packed_scales_round_trip(dtype: torch.dtype, groups: int) -> None:
    codes = torch.randint(1, 255, (7, groups))
    words = indexer.pack_scales((codes.int() << 23).view(torch.float32), dtype)
    assert words.dtype == dtype and words.shape == (7, -(-groups // dtype.itemsize))
    back = words.view(torch.uint8).reshape(7, -1)
    assert torch.equal(back[:, :groups].long(), codes) and (back[:, groups:] == 127).all()
