"""Limits of the vendor ops, as data: one row per limit, with where it is written.

The vendor's own fakes and graph converters accept calls that break these, so they are checked here, before a call is
emitted. A row holds for the processor families it names, from CANN release ``since`` on. Where two documents disagree
the narrower one is taken. Nothing here has been tried on an NPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ascend_deep.native.torch_npu.soc import FAMILIES, Target

__all__ = ["ROWS", "Row", "limit", "sources"]

A2_A3 = ("910b", "910_93")
A5 = ("950pr", "950dt")
A2 = ("910b",)
A3_A5 = ("910_93", *A5)
_PARALLEL = ("910b", "910_93", "950dt")
_F16, _BF16, _F32 = torch.float16, torch.bfloat16, torch.float32
_FLOATS = (_F16, _BF16, _F32)
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Row:
    """One limit of one vendor op.

    Attributes:
        op: name in ``torch.ops.npu``.
        what: which limit; ``checks`` looks it up by this name.
        value: the largest or smallest size, the accepted values, or a mapping.
        source: the document that says so.
        socs: processor families for which it holds.
        since: first CANN release for which it holds, ``""``: the document names none.
    """

    op: str
    what: str
    value: Any
    source: str
    socs: tuple[str, ...] = FAMILIES
    since: str = ""


_GATING = "aclnnMoeGatingTopK, constraints"
_SOFTMAX = "torch_npu 2.13, npu_moe_gating_top_k_softmax_v2"
_INIT = "torch_npu 2.13, npu_moe_init_routing_v2"
_INIT3 = "aclnnMoeInitRoutingV3, differences between products"
_FINAL = "aclnnMoeFinalizeRoutingV2, constraints"
_GMM = "aclnnGroupedMatmulV5, unquantised constraints"
_GMM_TYPES = "aclnnGroupedMatmulV5, groupType table"
_CLIP = "torch_npu 2.13, npu_clipped_swiglu"
_INDEX = "aclnnLightningIndexer, constraints"
_QINDEX = "aclnnQuantLightningIndexer, constraints"
_SFA = "aclnnSparseFlashAttention, constraints"
_GMM_QUANT = "aclnnGroupedMatmulV5, dynamic quantisation on the Ascend 950"
_QMM = "torch_npu 2.13, npu_quant_matmul"
_QMM5 = "aclnnQuantMatmulV5, constraints on the Ascend 950"
_MXQ = "aclnnDynamicMxQuantV3"
_DISPATCH = "aclnnMoeDistributeDispatchV2, constraints"
_DISPATCH_NPU = "torch_npu 2.13, npu_moe_distribute_dispatch_v2"
_COMBINE = "aclnnMoeDistributeCombineV2, constraints"
_FUSED = "aclnnAlltoAllvGroupedMatMul and aclnnGroupedMatMulAlltoAllv, constraints"
_FUSED_NPU = "torch_npu 2.13, npu_alltoallv_gmm and npu_gmm_alltoallv"

ROWS: tuple[Row, ...] = (
    Row("npu_moe_gating_top_k", "products", FAMILIES, "aclnnMoeGatingTopK, supported products"),
    Row("npu_moe_gating_top_k", "dtypes", _FLOATS, _GATING),
    Row("npu_moe_gating_top_k", "experts_max", 2048, _GATING),
    Row("npu_moe_gating_top_k", "group_size_min", 3, "torch_npu 2.13, npu_moe_gating_top_k"),
    Row("npu_moe_gating_top_k", "aligned_experts_max", 2048, _GATING),
    Row("npu_moe_gating_top_k", "renorm", (0,), _GATING),
    Row("npu_moe_gating_top_k", "norm_type", (0, 1), "torch_npu 2.13, npu_moe_gating_top_k"),
    Row("npu_moe_gating_top_k", "group_select_mode", (0, 1), _GATING),
    Row("npu_moe_gating_top_k_softmax_v2", "products", FAMILIES, "aclnnMoeGatingTopKSoftmaxV2, supported products"),
    Row("npu_moe_gating_top_k_softmax_v2", "dtypes", _FLOATS, _SOFTMAX),
    Row("npu_moe_gating_top_k_softmax_v2", "k_max", 1024, _SOFTMAX),
    Row("npu_moe_gating_top_k_softmax_v2", "renorm", (0, 1), _SOFTMAX),
    Row(
        "npu_moe_gating_top_k_softmax_v2",
        "eager_only",
        True,
        "torchair of torch_npu 2.13 passes its op a wrong argument",
    ),
    Row("npu_moe_init_routing_v2", "products", FAMILIES, "aclnnMoeInitRoutingV3, supported products"),
    Row("npu_moe_init_routing_v2", "dtypes", (*_FLOATS, torch.int8), _INIT),
    Row("npu_moe_init_routing_v2", "experts_max", 10240, _INIT),
    Row("npu_moe_init_routing_v2", "tokens_num_type", (1, 2), _INIT),
    Row("npu_moe_init_routing_v2", "tokens_num_flag", (True,), _INIT),
    Row("npu_moe_init_routing_v2", "drop_pad_mode", (0,), _INIT),
    Row("npu_moe_init_routing_v2", "quant_mode", (-1, 0, 1), _INIT3, A2_A3),
    Row("npu_moe_init_routing_v2", "quant_mode", (-1, 1, 2, 3), _INIT3, A5),
    Row("npu_moe_init_routing_v2", "row_idx_type", (0, 1), _INIT),
    Row("npu_moe_finalize_routing", "products", FAMILIES, "aclnnMoeFinalizeRoutingV2, supported products"),
    Row("npu_moe_finalize_routing", "dtypes", _FLOATS, _FINAL),
    Row("npu_moe_finalize_routing", "drop_pad_mode", (0, 1, 2, 3), _FINAL),
    Row("npu_moe_finalize_routing", "scales", {_F16: (_F16,), _BF16: (_BF16, _F32), _F32: (_F32,)}, _FINAL, A2_A3),
    Row("npu_moe_finalize_routing", "scales", {_F16: _FLOATS, _BF16: _FLOATS, _F32: _FLOATS}, _FINAL, A5),
    Row("npu_grouped_matmul", "products", FAMILIES, "aclnnGroupedMatmulV5, supported products"),
    Row("npu_grouped_matmul", "dtypes", _FLOATS, _GMM),
    Row("npu_grouped_matmul", "quantised", (_FP8,), _GMM_QUANT, A5),
    Row("npu_grouped_matmul", "quantised_outputs", _FLOATS, _GMM_QUANT, A5),
    Row("npu_grouped_matmul", "bias", {_F16: (_F16,), _BF16: (_F32,), _F32: (_F32,)}, _GMM, A2_A3),
    Row("npu_grouped_matmul", "bias", {_F16: (_F16, _F32), _BF16: (_BF16, _F32), _F32: (_F32,)}, _GMM, A5),
    Row("npu_grouped_matmul", "inner_max", 65535, "aclnnGroupedMatmulV5, common constraints", A2_A3),
    Row("npu_grouped_matmul", "groups_min", 2, "torch_npu 2.13, npu_grouped_matmul"),
    Row("npu_grouped_matmul", "groups_max", 1024, _GMM_TYPES),
    Row("npu_grouped_matmul", "group_type", (0, 2), _GMM_TYPES),
    Row("npu_grouped_matmul", "split_item", (2, 3), _GMM_TYPES),
    Row("npu_grouped_matmul", "group_list_type", (0, 1), _GMM),
    Row("npu_grouped_matmul", "act_type", (0,), _GMM),
    Row("npu_swiglu", "products", FAMILIES, "aclnnSwiGlu, supported products"),
    Row("npu_swiglu", "dtypes", _FLOATS, "torch_npu 2.13, npu_swiglu"),
    Row("npu_swiglu", "rank_max", 8, "torch_npu 2.13, npu_swiglu"),
    Row("npu_swiglu_backward", "products", FAMILIES, "aclnnSwiGluGrad, supported products"),
    Row("npu_swiglu_backward", "dtypes", _FLOATS, "aclnnSwiGluGrad"),
    Row("npu_swiglu_backward", "rank_max", 8, "aclnnSwiGluGrad"),
    Row("npu_swiglu_backward", "row_bytes", 64, "aclnnSwiGluGrad, as callers of it report"),
    Row("npu_clipped_swiglu", "products", A2_A3, "aclnnClippedSwiglu, supported products"),
    Row("npu_clipped_swiglu", "dtypes", _FLOATS, _CLIP),
    Row("npu_clipped_swiglu", "rank_min", 2, _CLIP),
    Row("npu_lightning_indexer", "products", A2_A3, "aclnnLightningIndexer, supported products"),
    Row("npu_lightning_indexer", "dtypes", (_F16, _BF16), _INDEX),
    Row("npu_lightning_indexer", "heads_max", 64, _INDEX),
    Row("npu_lightning_indexer", "depth", (128,), _INDEX),
    Row("npu_lightning_indexer", "sparse_count", (*range(1, 2049), *range(3072, 8193, 1024)), "aclnnLightningIndexer"),
    Row("npu_lightning_indexer", "sparse_mode", (0, 3), "aclnnLightningIndexer"),
    Row("npu_quant_lightning_indexer", "products", A5, "aclnnQuantLightningIndexer, supported products, for fp8"),
    Row("npu_quant_lightning_indexer", "dtypes", (_FP8,), _QINDEX, A5),
    Row("npu_quant_lightning_indexer", "heads", (8, 16, 24, 32, 64), _QINDEX, A5),
    Row("npu_quant_lightning_indexer", "depth", (128,), _QINDEX, A5),
    Row("npu_quant_lightning_indexer", "scales", {_BF16: (_F32,), _F16: (_F16,)}, _QINDEX, A5),
    Row(
        "npu_quant_lightning_indexer",
        "sparse_count",
        tuple(range(1, 2049)),
        "torch_npu 2.13, npu_quant_lightning_indexer",
    ),
    Row("npu_quant_lightning_indexer", "sparse_mode", (0, 3), "torch_npu 2.13, npu_quant_lightning_indexer"),
    Row("npu_sparse_flash_attention", "products", FAMILIES, "aclnnSparseFlashAttention, supported products"),
    Row("npu_sparse_flash_attention", "dtypes", (_F16, _BF16), _SFA),
    Row("npu_sparse_flash_attention", "heads", (*range(1, 65), 128), _SFA),
    Row("npu_sparse_flash_attention", "depth", (512,), _SFA),
    Row("npu_sparse_flash_attention", "rope_depth", (64,), _SFA),
    Row("npu_sparse_flash_attention", "sparse_block_size", (1,), _SFA, A5),
    Row("npu_sparse_flash_attention", "sparse_block_size", (1, 2, 4, 8, 16, 32, 64, 128), _SFA, A2_A3),
    Row("npu_sparse_flash_attention", "sparse_mode", (0, 3), "aclnnSparseFlashAttention"),
    Row("npu_sparse_flash_attention", "attention_mode", (2,), "aclnnSparseFlashAttention"),
    Row("npu_sparse_flash_attention", "no_value", True, "torch_npu 2.13, the op's fake", since="9.2.0"),
    Row("npu_quant_matmul", "products", FAMILIES, _QMM),
    Row("npu_quant_matmul", "dtypes", (torch.int8,), _QMM, A2_A3),
    Row("npu_quant_matmul", "dtypes", (torch.int8, _FP8), _QMM5, A5),
    Row("npu_quant_matmul", "scale", (_F32, torch.int64, _BF16), _QMM),
    Row("npu_quant_matmul", "inner_max", 65535, _QMM),
    Row("npu_quant_matmul", "blocks", ((1, 128, 128), (128, 128, 128), (1, 1, 32)), _QMM5, A5),
    Row("npu_quant_matmul", "outputs", (torch.int8, torch.int32, _F16, _BF16), _QMM, A2_A3),
    Row("npu_quant_matmul", "outputs", (torch.int8, torch.int32, *_FLOATS), _QMM5, A5),
    Row("npu_dynamic_mx_quant", "products", A5, f"{_MXQ}, supported products"),
    Row("npu_dynamic_mx_quant", "dtypes", _FLOATS, _MXQ, A5),
    Row("npu_dynamic_mx_quant", "rank_max", 7, _MXQ, A5),
    Row("npu_dynamic_mx_quant", "block_size", tuple(range(32, 1025, 32)), _MXQ, A5),
    Row("npu_dynamic_mx_quant", "float32_block_size", (32,), _MXQ, A5),
    Row("npu_dynamic_mx_quant", "float32_size_min", 32, _MXQ, A5),
    # Before it the call runs an older kernel, which ignores the bound and says nothing.
    Row("npu_dynamic_mx_quant", "low_bound", True, f"{_MXQ}, first in ops-nn 9.2.0-beta.1", A5, since="9.2.0.beta1"),
    # An earlier release of these two documents names the 950PR as well, the current one does not.
    Row("npu_moe_distribute_dispatch_v2", "products", _PARALLEL, "aclnnMoeDistributeDispatchV2, supported products"),
    Row("npu_moe_distribute_dispatch_v2", "dtypes", (_F16, _BF16), _DISPATCH),
    Row("npu_moe_distribute_dispatch_v2", "ranks", (16, 32, 64, 128, 256), _DISPATCH_NPU, A2),
    Row("npu_moe_distribute_dispatch_v2", "ranks", tuple(range(2, 769)), _DISPATCH, A3_A5),
    Row("npu_moe_distribute_dispatch_v2", "experts_max", 1024, _DISPATCH),
    Row("npu_moe_distribute_dispatch_v2", "local_experts_max", 24, _DISPATCH_NPU, A2),
    Row("npu_moe_distribute_dispatch_v2", "hidden_max", 7168, _DISPATCH, A2),
    Row("npu_moe_distribute_dispatch_v2", "hidden_multiple", 32, _DISPATCH, A2),
    Row("npu_moe_distribute_dispatch_v2", "hidden_min", 1024, _DISPATCH, A3_A5),
    Row("npu_moe_distribute_dispatch_v2", "hidden_max", 8192, _DISPATCH, A3_A5),
    Row("npu_moe_distribute_dispatch_v2", "tokens_max", 256, _DISPATCH, A2),
    Row("npu_moe_distribute_dispatch_v2", "tokens_max", 512, _DISPATCH, A3_A5),
    Row("npu_moe_distribute_dispatch_v2", "topk_max", 16, _DISPATCH),
    Row("npu_moe_distribute_dispatch_v2", "mask_dims", (1,), _DISPATCH, A2),
    Row("npu_moe_distribute_dispatch_v2", "mask_dims", (1, 2), _DISPATCH, A3_A5),
    Row("npu_moe_distribute_combine_v2", "products", _PARALLEL, "aclnnMoeDistributeCombineV2, supported products"),
    Row("npu_moe_distribute_combine_v2", "dtypes", (_F16, _BF16), _COMBINE),
    Row("npu_moe_distribute_combine_v2", "ranks", (*range(2, 9), 16, 32, 64, 128, 192, 256, 384), _COMBINE, A2),
    Row("npu_moe_distribute_combine_v2", "ranks", tuple(range(2, 769)), _COMBINE, ("910_93",)),
    Row("npu_moe_distribute_combine_v2", "ranks", tuple(range(2, 1025)), _COMBINE, A5),
    Row("npu_moe_distribute_combine_v2", "experts_max", 1024, _COMBINE),
    Row("npu_moe_distribute_combine_v2", "hidden_max", 10240, _COMBINE, A2),
    Row("npu_moe_distribute_combine_v2", "hidden_multiple", 32, _COMBINE, A2),
    Row("npu_moe_distribute_combine_v2", "hidden_min", 1024, _COMBINE, A3_A5),
    Row("npu_moe_distribute_combine_v2", "hidden_max", 8192, _COMBINE, A3_A5),
    Row("npu_moe_distribute_combine_v2", "tokens_max", 256, _COMBINE, A2),
    Row("npu_moe_distribute_combine_v2", "tokens_max", 512, _COMBINE, A3_A5),
    Row("npu_moe_distribute_combine_v2", "topk_max", 16, _COMBINE),
    Row("npu_moe_distribute_combine_v2", "mask_dims", (1,), _COMBINE, A2),
    Row("npu_moe_distribute_combine_v2", "mask_dims", (1, 2), _COMBINE, A3_A5),
    Row("npu_moe_distribute_combine_v2", "needs_expand_scales", True, _COMBINE, A2),
    *(
        row
        for op in ("npu_alltoallv_gmm", "npu_gmm_alltoallv")
        for row in (
            # The documents of the kernels name the 950PR as well, those of torch_npu do not.
            Row(op, "products", ("910_93", "950dt"), f"{_FUSED_NPU}, supported products"),
            Row(op, "dtypes", (_F16, _BF16), _FUSED),
            # Current documents add 128 ranks; those in the wheel do not.
            Row(op, "ranks", (8, 16, 32, 64), _FUSED_NPU, ("910_93",)),
            Row(op, "ranks", (2, 4, 8, 16, 32, 64), _FUSED, A5),
            Row(op, "local_experts_max", 32, _FUSED),
            Row(op, "counts_max", 256, _FUSED),
            Row(op, "columns_max", 65535, _FUSED),
            Row(op, "rows_min", 1, _FUSED),
            Row(op, "rows_max", 52428799, _FUSED),
            Row(op, "bytes_min", 2 * 2**20, _FUSED_NPU, ("910_93",)),
        )
    ),
)

_BY_NAME: Mapping[tuple[str, str], tuple[Row, ...]] = {
    key: tuple(r for r in ROWS if (r.op, r.what) == key) for key in {(r.op, r.what) for r in ROWS}
}


def limit(op: str, what: str, target: Target) -> Row | None:
    """The row that holds for ``target``; ``None``: no such limit there, or the CANN release is too old for it.

    An unknown CANN release counts as too old: a limit with ``since`` allows something.
    """
    for row in _BY_NAME.get((op, what), ()):
        if target.family in row.socs:
            from ascend_deep.native.torch_npu.soc import cann

            first = cann(row.since)
            if first is None or (target.cann is not None and target.cann >= first):
                return row
    return None


def sources() -> list[str]:
    """Every document that a row names, once each."""
    return sorted({row.source for row in ROWS})
