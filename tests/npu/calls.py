"""Valid calls of every vendor op that has limits, and for each limit one call on either side of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ascend_deep.native.torch_npu.checks import Spec

F16, BF16, F32, I32, I64 = torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64
FP8 = torch.float8_e4m3fn
Call = dict[str, Any]


def spec(dtype: torch.dtype, *shape: int) -> Spec:
    return Spec(shape, dtype)


def valid(op: str, family: str) -> Call:
    """Arguments by name, away from every limit."""
    new = family.startswith("950")
    if op == "npu_moe_gating_top_k":
        return {"x": spec(F32, 7, 64), "k": 4, "bias": spec(F32, 64), "group_count": 8, "k_group": 3, "norm_type": 1}
    if op == "npu_moe_gating_top_k_softmax_v2":
        return {"x": spec(BF16, 7, 64), "k": 4, "renorm": 1}
    if op == "npu_moe_init_routing_v2":
        counts = {"expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
        experts = {"expert_num": 9, "active_expert_range": [0, 8]}
        return {"x": spec(BF16, 7, 48), "expert_idx": spec(I32, 7, 3), **counts, **experts}
    if op == "npu_moe_finalize_routing":
        none = dict.fromkeys(("skip1", "skip2", "bias", "export_for_source_row"))
        rows = {"expanded_permuted_rows": spec(BF16, 21, 1, 48), "expanded_src_to_dst_row": spec(I32, 21)}
        return {**rows, "scales": spec(F32, 7, 3), **none, "drop_pad_mode": 3}
    if op == "npu_grouped_matmul":
        how = {"split_item": 3, "group_type": 0, "group_list_type": 1}
        operands = {"x": [spec(BF16, 21, 48)], "weight": [spec(BF16, 8, 48, 64)], "bias": [spec(F32, 8, 64)]}
        return {**operands, "group_list": spec(I64, 8), **how}
    if op == "npu_swiglu":
        return {"input": spec(BF16, 21, 64)}
    if op == "npu_swiglu_backward":
        return {"grad_output": spec(BF16, 21, 32), "input": spec(BF16, 21, 64)}
    if op == "npu_clipped_swiglu":
        return {"x": spec(BF16, 21, 64), "limit": 1.7}
    if op == "npu_lightning_indexer":
        tensors = {
            "query": spec(BF16, 2, 5, 32, 128),
            "key": spec(BF16, 2, 300, 1, 128),
            "weights": spec(F32, 2, 5, 32),
        }
        return {**tensors, "sparse_count": 64, "sparse_mode": 0}
    if op == "npu_quant_lightning_indexer":
        tensors = {"query": spec(FP8, 2, 5, 32, 128), "key": spec(FP8, 2, 300, 1, 128), "weights": spec(BF16, 2, 5, 32)}
        scales = {"query_dequant_scale": spec(F32, 2, 5, 32), "key_dequant_scale": spec(F32, 2, 300, 1)}
        modes = {"query_quant_mode": 0, "key_quant_mode": 0, "sparse_count": 64, "sparse_mode": 0}
        return {**tensors, **scales, **modes}
    if op == "npu_sparse_flash_attention":
        kv = {"key": spec(BF16, 2, 300, 1, 512), "value": spec(BF16, 2, 300, 1, 512)}
        rope = {"query_rope": spec(BF16, 2, 5, 16, 64), "key_rope": spec(BF16, 2, 300, 1, 64)}
        how = {"scale_value": 0.07, "sparse_mode": 0, "attention_mode": 2, "sparse_block_size": 1}
        return {"query": spec(BF16, 2, 5, 16, 512), **kv, "sparse_indices": spec(I32, 2, 5, 1, 64), **rope, **how}
    if op == "npu_quant_matmul":
        return {"x1": spec(torch.int8, 8, 64), "x2": spec(torch.int8, 64, 32), "scale": spec(F32, 32)}
    if op == "npu_dynamic_mx_quant":
        return {"input": spec(BF16, 7, 96), "dst_type": 292, "scale_alg": 1}
    group = {"group_ep": "g", "ep_world_size": 16, "ep_rank_id": 3, "moe_expert_num": 64, "global_bs": 128}
    if op == "npu_moe_distribute_combine_v2":
        rows, tail = 16 * 8 * 4, {"expand_scales": spec(F32, 512)} if family == "910b" else {}
        info = {"assist_info_for_combine": spec(I32, rows * 128), "ep_send_counts": spec(I32, 64)}
        return {
            "expand_x": spec(BF16, rows, 7168), "expert_ids": spec(I32, 8, 8), **info,
            "expert_scales": spec(F32, 8, 8), **group, **tail,
        }  # fmt: skip
    if op in ("npu_alltoallv_gmm", "npu_gmm_alltoallv"):
        return fused(8, 4, 128)
    assert op == "npu_moe_distribute_dispatch_v2", (op, new)
    return {"x": spec(BF16, 8, 7168), "expert_ids": spec(I32, 8, 8), **group}


def fused(ranks: int, local: int, each: int, *, columns: int = 2048, dtype: torch.dtype = BF16) -> Call:
    """Rows of ``local`` experts on each of ``ranks``, ``each`` of them for every expert."""
    counts = [each] * (ranks * local)
    rows = {"gmm_x": spec(dtype, sum(counts), columns), "gmm_weight": spec(dtype, local, columns, columns)}
    return {**rows, "hcom": "g", "ep_world_size": ranks, "send_counts": counts, "recv_counts": counts}


def _uneven(rows: int, columns: int = 2048) -> Call:
    """``rows`` rows, all of one expert."""
    counts = [rows, *[0] * 31]
    operands = {"gmm_x": spec(BF16, rows, columns), "gmm_weight": spec(BF16, 4, columns, columns)}
    return {**operands, "send_counts": counts, "recv_counts": counts}


def quantised(op: str, blocks: str, four: bool = False) -> Call:
    """A valid call with FP8 (or FP4) operands on the Ascend 950: x [6, 192], weight [192, 160], or three of them."""
    grouped = op == "npu_grouped_matmul"
    lead = (3,) if grouped else ()
    dtype, k = (torch.uint8, 96) if four else (FP8, 192)
    call: Call = {"x": spec(dtype, 6, k), "weight": Spec((*lead, k, 160), dtype, swapped=True)}
    if blocks == "MX":
        own, scale = spec(torch.uint8, 6, 3, 2), spec(torch.uint8, *lead, 3, 160, 2)
    elif blocks == "K-C":
        own, scale = spec(F32, 6), spec(F32, *lead, 160)
    else:
        own, scale = spec(F32, 1 if blocks == "B-B" else 6, 2), Spec((*lead, 2, 2), F32, swapped=True)
    call |= {"own": own, "scale": scale, "output_dtype": 6}
    if grouped:
        call = {n: [v] if isinstance(v, Spec) else v for n, v in call.items()}
        call |= {"group_list": spec(I64, 3), "split_item": 3, "group_type": 0, "group_list_type": 1}
    else:
        call |= {"group_sizes": {"MX": [1, 1, 32], "G-B": [1, 128, 128], "B-B": [128, 128, 128], "K-C": None}[blocks]}
    names = {"own": "per_token_scale"} if grouped else {"own": "pertoken_scale", "x": "x1", "weight": "x2"}
    if blocks == "MX":
        call |= {"own_dtype": 293, "scale_dtype": 293}
    if four:
        call |= {"x_dtype": 296, "weight_dtype": 296}
    return {next((n.replace(a, b, 1) for a, b in names.items() if n.startswith(a)), n): v for n, v in call.items()}


VARIANTS: list[tuple[str, str, bool]] = [
    ("npu_quant_matmul", "G-B", False),
    ("npu_quant_matmul", "B-B", False),
    ("npu_quant_matmul", "K-C", False),
    ("npu_quant_matmul", "MX", False),
    ("npu_quant_matmul", "MX", True),
    ("npu_grouped_matmul", "G-B", False),
    ("npu_grouped_matmul", "K-C", False),
    ("npu_grouped_matmul", "MX", False),
    ("npu_grouped_matmul", "MX", True),
]


def _gating(experts: int, groups: int = 1) -> Call:
    return {"x": spec(F32, 7, experts), "bias": None, "group_count": groups, "k_group": 1, "k": 1}


def _heads(op: str, heads: int) -> Call:
    call = valid(op, "910b" if op == "npu_lightning_indexer" else "950pr")
    changed: Call = {}
    for name in ("query", "weights", "query_dequant_scale", "query_rope"):
        if name in call:
            shape = list(call[name].shape)
            shape[2] = heads
            changed[name] = Spec(tuple(shape), call[name].dtype)
    return changed


def _depth(op: str, depth: int) -> Call:
    call = valid(op, "910b")
    names = [n for n in ("query", "key", "value") if n in call]
    return {n: Spec((*call[n].shape[:3], depth), call[n].dtype) for n in names}


def _rope(depth: int) -> Call:
    return {"query_rope": spec(BF16, 2, 5, 16, depth), "key_rope": spec(BF16, 2, 300, 1, depth)}


def _matmul(x: torch.dtype, bias: torch.dtype | None, groups: int = 8, inner: int = 48, outer: int = 64) -> Call:
    operands: Call = {"x": [spec(x, 21, inner)], "weight": [spec(x, groups, inner, outer)]}
    operands["bias"] = None if bias is None else [spec(bias, groups, outer)]
    return {**operands, "group_list": spec(I64, groups)}


def _back(dtype: torch.dtype, *shape: int) -> Call:
    return {"grad_output": spec(dtype, *shape[:-1], shape[-1] // 2), "input": spec(dtype, *shape)}


def _final(rows: torch.dtype, scales: torch.dtype) -> Call:
    return {"expanded_permuted_rows": spec(rows, 21, 1, 48), "scales": spec(scales, 7, 3)}


def _indexer(op: str, dtype: torch.dtype, weights: torch.dtype) -> Call:
    call = valid(op, "950pr")
    changed = {n: Spec(call[n].shape, dtype) for n in ("query", "key")}
    return {**changed, "weights": Spec(call["weights"].shape, weights)}


NO_BIAS: Call = {"bias": None}


def _int8(inner: int) -> Call:
    return {"x1": spec(torch.int8, 8, inner), "x2": spec(torch.int8, inner, 32)}


def _other_fp8() -> Call:
    call = quantised("npu_grouped_matmul", "G-B")
    return {**call, "x": [spec(torch.float8_e5m2, 6, 192)]}


def _attention(dtype: torch.dtype) -> Call:
    call = valid("npu_sparse_flash_attention", "910b")
    return {n: Spec(call[n].shape, dtype) for n in ("query", "key", "value", "query_rope", "key_rope")}


LI, QLI, SFA = "npu_lightning_indexer", "npu_quant_lightning_indexer", "npu_sparse_flash_attention"
GATE, GATE2, INIT = "npu_moe_gating_top_k", "npu_moe_gating_top_k_softmax_v2", "npu_moe_init_routing_v2"
FINAL, GMM, CLIP = "npu_moe_finalize_routing", "npu_grouped_matmul", "npu_clipped_swiglu"
BACK, QMM = "npu_swiglu_backward", "npu_quant_matmul"
DISPATCH, COMBINE = "npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"
MXQ = "npu_dynamic_mx_quant"


def _ranks(count: int) -> Call:
    # As many experts as there are ranks: all other limits are far away.
    return {"ep_world_size": count, "moe_expert_num": count, "global_bs": 0}


def _sides(make: Callable[[int], Call], last: int, step: int) -> tuple[Call, Call]:
    return make(last), make(last + step)


def _columns(hidden: int) -> Call:
    return {"x": spec(BF16, 8, hidden)}


def _tokens(count: int) -> Call:
    return {"x": spec(BF16, count, 7168), "expert_ids": spec(I32, count, 8), "global_bs": count * 16}


def _back_columns(hidden: int) -> Call:
    return {"expand_x": spec(BF16, 512, hidden)}


def _back_tokens(count: int) -> Call:
    return {"expert_ids": spec(I32, count, 8), "expert_scales": spec(F32, count, 8), "global_bs": count * 16}


def _masks(family: str) -> tuple[Call, Call]:
    flat, each, more = (spec(torch.bool, *shape) for shape in ((8,), (8, 8), (8, 8, 1)))
    return ({"x_active_mask": flat}, {"x_active_mask": each}) if family == "910b" else (
        {"x_active_mask": each}, {"x_active_mask": more}
    )  # fmt: skip


# (op, limit) -> what to change so that the call is just inside, and just outside. A function gets the processor family.
SIDES: dict[tuple[str, str], Callable[[str], tuple[Call, Call]]] = {
    (GATE, "dtypes"): lambda f: ({"x": spec(BF16, 7, 64), "bias": spec(BF16, 64)}, {"x": spec(I32, 7, 64)}),
    (GATE, "experts_max"): lambda f: (_gating(2048), _gating(2080)),
    (GATE, "group_size_min"): lambda f: (_gating(24, 8), _gating(16, 8)),
    (GATE, "aligned_experts_max"): lambda f: (_gating(64 * 32, 64), _gating(65 * 4, 65)),
    (GATE, "renorm"): lambda f: ({"renorm": 0}, {"renorm": 1}),
    (GATE, "norm_type"): lambda f: ({"norm_type": 0}, {"norm_type": 2}),
    (GATE, "group_select_mode"): lambda f: ({"group_select_mode": 1}, {"group_select_mode": 2}),
    (GATE2, "dtypes"): lambda f: ({"x": spec(F16, 7, 64)}, {"x": spec(torch.float64, 7, 64)}),
    (GATE2, "k_max"): lambda f: ({"x": spec(F32, 7, 4096), "k": 1024}, {"x": spec(F32, 7, 4096), "k": 1025}),
    (GATE2, "renorm"): lambda f: ({"renorm": 0}, {"renorm": 2}),
    (INIT, "dtypes"): lambda f: ({"x": spec(torch.int8, 7, 48)}, {"x": spec(torch.float64, 7, 48)}),
    (INIT, "experts_max"): lambda f: ({"expert_num": 10240}, {"expert_num": 10241}),
    (INIT, "tokens_num_type"): lambda f: ({"expert_tokens_num_type": 2}, {"expert_tokens_num_type": 0}),
    (INIT, "tokens_num_flag"): lambda f: ({"expert_tokens_num_flag": True}, {"expert_tokens_num_flag": False}),
    (INIT, "drop_pad_mode"): lambda f: ({"drop_pad_mode": 0}, {"drop_pad_mode": 1}),
    (INIT, "quant_mode"): lambda f: ({"quant_mode": 1}, {"quant_mode": 0 if f.startswith("950") else 2}),
    (INIT, "row_idx_type"): lambda f: ({"row_idx_type": 1}, {"row_idx_type": 2}),
    (FINAL, "dtypes"): lambda f: (_final(F32, F32), _final(torch.float64, F32)),
    (FINAL, "drop_pad_mode"): lambda f: ({"drop_pad_mode": 1}, {"drop_pad_mode": 4}),
    (FINAL, "scales"): lambda f: (_final(BF16, F32), _final(F16, F32) if f.startswith("910") else _final(F16, I32)),
    (GMM, "dtypes"): lambda f: (_matmul(F32, None), _matmul(I32, None)),
    (GMM, "bias"): lambda f: (_matmul(BF16, F32), _matmul(BF16, BF16 if f.startswith("910") else F16)),
    (GMM, "inner_max"): lambda f: (_matmul(BF16, None, inner=65535), _matmul(BF16, None, inner=65536)),
    (GMM, "groups_min"): lambda f: (_matmul(BF16, None, groups=2), _matmul(BF16, None, groups=1)),
    (GMM, "groups_max"): lambda f: (_matmul(BF16, None, groups=1024), _matmul(BF16, None, groups=1025)),
    (GMM, "group_type"): lambda f: ({"group_type": 0}, {"group_type": 1}),
    (GMM, "split_item"): lambda f: ({"split_item": 2}, {"split_item": 1}),
    (GMM, "group_list_type"): lambda f: ({"group_list_type": 0}, {"group_list_type": 2}),
    (GMM, "act_type"): lambda f: ({"act_type": 0}, {"act_type": 5}),
    ("npu_swiglu", "dtypes"): lambda f: ({"input": spec(F32, 21, 64)}, {"input": spec(I64, 21, 64)}),
    ("npu_swiglu", "rank_max"): lambda f: ({"input": spec(F32, *[2] * 8)}, {"input": spec(F32, *[2] * 9)}),
    (BACK, "dtypes"): lambda f: (_back(F16, 21, 64), _back(torch.float64, 21, 64)),
    (BACK, "rank_max"): lambda f: (_back(BF16, *[2] * 7, 32), _back(BF16, *[2] * 8, 32)),
    (BACK, "row_bytes"): lambda f: (_back(BF16, 21, 96), _back(BF16, 21, 80)),
    (CLIP, "dtypes"): lambda f: ({"x": spec(F32, 21, 64)}, {"x": spec(torch.float64, 21, 64)}),
    (CLIP, "rank_min"): lambda f: ({"x": spec(F32, 2, 64)}, {"x": spec(F32, 64)}),
    (LI, "dtypes"): lambda f: (_indexer(LI, F16, F16), _indexer(LI, F32, F32)),
    (LI, "heads_max"): lambda f: (_heads(LI, 64), _heads(LI, 65)),
    (LI, "depth"): lambda f: (_depth(LI, 128), _depth(LI, 64)),
    (LI, "sparse_count"): lambda f: ({"sparse_count": 2048}, {"sparse_count": 2049}),
    (LI, "sparse_mode"): lambda f: ({"sparse_mode": 3}, {"sparse_mode": 1}),
    (QLI, "dtypes"): lambda f: (_indexer(QLI, FP8, BF16), _indexer(QLI, BF16, BF16)),
    (QLI, "heads"): lambda f: (_heads(QLI, 24), _heads(QLI, 25)),
    (QLI, "depth"): lambda f: (_depth(QLI, 128), _depth(QLI, 64)),
    (QLI, "scales"): lambda f: (_indexer(QLI, FP8, BF16), _indexer(QLI, FP8, F16)),
    (QLI, "sparse_count"): lambda f: ({"sparse_count": 2048}, {"sparse_count": 3072}),
    (QLI, "sparse_mode"): lambda f: ({"sparse_mode": 3}, {"sparse_mode": 2}),
    (SFA, "dtypes"): lambda f: (_attention(F16), _attention(F32)),
    (SFA, "heads"): lambda f: (_heads(SFA, 64), _heads(SFA, 65)),
    (SFA, "depth"): lambda f: (_depth(SFA, 512), _depth(SFA, 256)),
    (SFA, "rope_depth"): lambda f: (_rope(64), _rope(32)),
    (SFA, "sparse_block_size"): lambda f: ({"sparse_block_size": 1}, {"sparse_block_size": 2 if f[0] == "95" else 3}),
    (SFA, "sparse_mode"): lambda f: ({"sparse_mode": 3}, {"sparse_mode": 4}),
    (SFA, "attention_mode"): lambda f: ({"attention_mode": 2}, {"attention_mode": 0}),
    (QMM, "dtypes"): lambda f: ({"scale": spec(F32, 1)}, {"x1": spec(F32, 8, 64), "x2": spec(F32, 64, 32)}),
    (QMM, "scale"): lambda f: ({"scale": spec(BF16, 32)}, {"scale": spec(F16, 32)}),
    (QMM, "inner_max"): lambda f: (_int8(65535), _int8(65536)),
    (QMM, "blocks"): lambda f: (quantised(QMM, "G-B"), {**quantised(QMM, "G-B"), "group_sizes": [1, 64, 64]}),
    (QMM, "outputs"): lambda f: ({"output_dtype": 15}, {"output_dtype": 6 if f.startswith("910") else 24}),
    (GMM, "quantised"): lambda f: (quantised(GMM, "G-B") | NO_BIAS, _other_fp8() | NO_BIAS),
    (GMM, "quantised_outputs"): lambda f: (
        quantised(GMM, "MX") | NO_BIAS | {"output_dtype": 15},
        quantised(GMM, "MX") | NO_BIAS | {"output_dtype": 3},
    ),
    (MXQ, "dtypes"): lambda f: ({"input": spec(F16, 7, 96)}, {"input": spec(torch.float64, 7, 96)}),
    (MXQ, "rank_max"): lambda f: ({"input": spec(BF16, *[2] * 7)}, {"input": spec(BF16, *[2] * 8)}),
    (MXQ, "block_size"): lambda f: ({"block_size": 1024}, {"block_size": 1056}),
    (MXQ, "float32_block_size"): lambda f: ({"input": spec(F32, 7, 96)}, {"input": spec(F32, 7, 96), "block_size": 64}),
    (MXQ, "float32_size_min"): lambda f: ({"input": spec(F32, 7, 32)}, {"input": spec(F32, 7, 31)}),
    (DISPATCH, "dtypes"): lambda f: ({"x": spec(F16, 8, 7168)}, {"x": spec(F32, 8, 7168)}),
    (DISPATCH, "ranks"): lambda f: (_ranks(256), _ranks(512)) if f == "910b" else (_ranks(768), _ranks(769)),
    (DISPATCH, "experts_max"): lambda f: (
        ({"moe_expert_num": 1024, "ep_world_size": 64, "global_bs": 0}, {"moe_expert_num": 1088, "ep_world_size": 64})
    ),
    (DISPATCH, "local_experts_max"): lambda f: ({"moe_expert_num": 384}, {"moe_expert_num": 400}),
    (DISPATCH, "hidden_max"): lambda f: _sides(_columns, 7168 if f == "910b" else 8192, 32),
    (DISPATCH, "hidden_multiple"): lambda f: (_columns(7136), _columns(7152)),
    (DISPATCH, "hidden_min"): lambda f: (_columns(1024), _columns(1008)),
    (DISPATCH, "tokens_max"): lambda f: _sides(_tokens, 256 if f == "910b" else 512, 1),
    (DISPATCH, "topk_max"): lambda f: ({"expert_ids": spec(I32, 8, 16)}, {"expert_ids": spec(I32, 8, 17)}),
    (DISPATCH, "mask_dims"): lambda f: _masks(f),
    (COMBINE, "dtypes"): lambda f: ({"expand_x": spec(F16, 512, 7168)}, {"expand_x": spec(F32, 512, 7168)}),
    (COMBINE, "ranks"): lambda f: _sides(_ranks, {"910b": 384, "910_93": 768}.get(f, 1024), 1),
    (COMBINE, "experts_max"): lambda f: ({"moe_expert_num": 1024}, {"moe_expert_num": 1040}),
    (COMBINE, "hidden_max"): lambda f: _sides(_back_columns, 10240 if f == "910b" else 8192, 32),
    (COMBINE, "hidden_multiple"): lambda f: (_back_columns(7136), _back_columns(7152)),
    (COMBINE, "hidden_min"): lambda f: (_back_columns(1024), _back_columns(1008)),
    (COMBINE, "tokens_max"): lambda f: _sides(_back_tokens, 256 if f == "910b" else 512, 1),
    (COMBINE, "topk_max"): lambda f: (
        {"expert_ids": spec(I32, 8, 16), "expert_scales": spec(F32, 8, 16)},
        {"expert_ids": spec(I32, 8, 17), "expert_scales": spec(F32, 8, 17)},
    ),
    (COMBINE, "mask_dims"): lambda f: _masks(f),
    (COMBINE, "needs_expand_scales"): lambda f: ({"expand_scales": spec(F32, 512)}, {"expand_scales": None}),
}
for _op in ("npu_alltoallv_gmm", "npu_gmm_alltoallv"):
    SIDES |= {
        (_op, "dtypes"): lambda f: (fused(8, 4, 128, dtype=F16), fused(8, 4, 128, dtype=F32)),
        (_op, "ranks"): lambda f: (fused(64, 4, 128), fused(128, 1, 128)),
        (_op, "local_experts_max"): lambda f: (fused(8, 32, 128), fused(8, 33, 128)),
        (_op, "counts_max"): lambda f: (fused(16, 16, 128), fused(16, 17, 128)),
        (_op, "columns_max"): lambda f: (fused(8, 4, 1, columns=65535), fused(8, 4, 1, columns=65536)),
        (_op, "rows_min"): lambda f: (_uneven(512), _uneven(0)),
        (_op, "rows_max"): lambda f: (_uneven(52428799, 64), _uneven(52428800, 64)),
        (_op, "bytes_min"): lambda f: (_uneven(512), _uneven(511)),
    }

# The calls that the vendor's own fakes accept, all but the last: what is wrong, op, arguments.
EIGHT: list[tuple[str, str, Call]] = [
    ("inner size of weight", GMM, {**_matmul(BF16, None), "weight": [spec(BF16, 8, 99, 64)]}),
    ("experts of weight", GMM, {**_matmul(BF16, None), "group_list": spec(I64, 7)}),
    ("bfloat16 for weight", GMM, {**_matmul(BF16, None), "weight": [spec(F32, 8, 48, 64)]}),
    ("even size", "npu_swiglu", {"input": spec(BF16, 8, 65)}),
    ("not int64", "npu_swiglu", {"input": spec(I64, 8, 64)}),
    ("k up to the 24 experts", GATE, {"k": 99}),
    ("head dimension of key", LI, {"key": spec(BF16, 2, 300, 1, 77)}),
    ("divide over the 16 ranks", DISPATCH, {"moe_expert_num": 63}),
    ("rows of x2", QMM, {"x2": spec(torch.int8, 63, 32)}),
]
