"""The ops of ascend_deep, one family per file, and the table that registers them.

``ascend_deep.ops.<name>(...)`` are typed wrappers of ``torch.ops.ascend_deep.<name>`` with defaults for the attributes;
the ops themselves have none. Importing this package registers the ops with ``torch.library`` and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ascend_deep.ops._op import NAMESPACE, OpDef, Sample, Tolerance, provider, register, strict
from ascend_deep.ops.activations import ACTIVATIONS
from ascend_deep.ops.alltoallv_gmm import ALLTOALLV_GMM, GMM_ALLTOALLV, alltoallv_gmm, gmm_alltoallv
from ascend_deep.ops.dequant import DEQUANT, dequant
from ascend_deep.ops.einsum_bf16 import EINSUM_BF16, einsum_bf16
from ascend_deep.ops.einsum_scaled import EINSUM_SCALED, einsum_scaled
from ascend_deep.ops.ep_combine import EP_COMBINE, ep_combine
from ascend_deep.ops.ep_dispatch import EP_DISPATCH, Dispatched, ep_dispatch
from ascend_deep.ops.ep_dispatch_cached import EP_DISPATCH_CACHED, ep_dispatch_cached
from ascend_deep.ops.ep_layout import EP_LAYOUT, ep_layout
from ascend_deep.ops.fp8_linear import FP8_LINEAR, fp8_linear
from ascend_deep.ops.gemm_bf16 import (
    GEMM_BF16,
    GEMM_BF16_ACC,
    GEMM_BF16_OUT,
    gemm_bf16,
    gemm_bf16_acc_,
    gemm_bf16_out,
)
from ascend_deep.ops.gemm_scaled import GEMM_SCALED, gemm_scaled
from ascend_deep.ops.gemm_scaled_fp8out import (
    EINSUM_SCALED_FP8OUT,
    GEMM_SCALED_FP8OUT,
    einsum_scaled_fp8out,
    gemm_scaled_fp8out,
)
from ascend_deep.ops.gemm_scaled_out import GEMM_SCALED_ACC, GEMM_SCALED_OUT, gemm_scaled_acc_, gemm_scaled_out
from ascend_deep.ops.hc_prenorm_gemm import HC_PRENORM_GEMM, hc_prenorm_gemm
from ascend_deep.ops.k_grouped_gemm_bf16 import (
    K_GROUPED_GEMM_BF16,
    K_GROUPED_GEMM_BF16_ACC,
    k_grouped_gemm_bf16,
    k_grouped_gemm_bf16_acc_,
)
from ascend_deep.ops.k_grouped_gemm_scaled import (
    K_GROUPED_GEMM_SCALED,
    K_GROUPED_GEMM_SCALED_ACC,
    k_grouped_gemm_scaled,
    k_grouped_gemm_scaled_acc_,
)
from ascend_deep.ops.ll_combine import LL_COMBINE, ll_combine
from ascend_deep.ops.ll_dispatch import LL_DISPATCH, ll_dispatch
from ascend_deep.ops.m_grouped_gemm_bf16 import M_GROUPED_GEMM_BF16, m_grouped_gemm_bf16
from ascend_deep.ops.m_grouped_gemm_bf16_masked import M_GROUPED_GEMM_BF16_MASKED, m_grouped_gemm_bf16_masked
from ascend_deep.ops.m_grouped_gemm_scaled import (
    M_GROUPED_GEMM_SCALED,
    M_GROUPED_GEMM_SCALED_MASKED,
    m_grouped_gemm_scaled,
    m_grouped_gemm_scaled_masked,
)
from ascend_deep.ops.moe_combine import MOE_COMBINE, MOE_COMBINE_BACKWARD, moe_combine
from ascend_deep.ops.moe_experts import MOE_EXPERTS, moe_experts
from ascend_deep.ops.moe_experts_backward import MOE_EXPERTS_BACKWARD, moe_experts_backward
from ascend_deep.ops.moe_permute import MOE_PERMUTE, moe_permute
from ascend_deep.ops.moe_route import MOE_ROUTE, moe_route
from ascend_deep.ops.mqa_logits import MQA_LOGITS, mqa_logits
from ascend_deep.ops.mqa_logits_backward import MQA_LOGITS_BACKWARD, mqa_logits_backward
from ascend_deep.ops.mqa_topk import MQA_TOPK, mqa_topk
from ascend_deep.ops.pack_sf import PACK_SF, pack_sf, unpack_sf
from ascend_deep.ops.paged_kv_write import PAGED_KV_WRITE, paged_kv_write_
from ascend_deep.ops.paged_mqa import (
    PAGED_MQA_LOGITS,
    PAGED_MQA_LOGITS_METADATA,
    paged_mqa_logits,
    paged_mqa_logits_metadata,
)
from ascend_deep.ops.paged_mqa_topk import PAGED_MQA_TOPK, paged_mqa_topk
from ascend_deep.ops.quant_fp4 import QUANT_FP4, quant_fp4
from ascend_deep.ops.quant_fp8 import QUANT_FP8, quant_fp8
from ascend_deep.ops.shadow import register_shadow
from ascend_deep.ops.sparse_mqa_attention import SPARSE_MQA_ATTENTION, sparse_mqa_attention
from ascend_deep.ops.sparse_mqa_attention_backward import (
    SPARSE_MQA_ATTENTION_BACKWARD,
    sparse_mqa_attention_backward,
)
from ascend_deep.ops.swiglu import SWIGLU, swiglu
from ascend_deep.ops.swiglu_quant import SWIGLU_QUANT, swiglu_quant

__all__ = [
    "ACTIVATIONS",
    "NAMESPACE",
    "OPS",
    "Dispatched",
    "OpDef",
    "Sample",
    "Tolerance",
    "alltoallv_gmm",
    "dequant",
    "einsum_bf16",
    "einsum_scaled",
    "einsum_scaled_fp8out",
    "ep_combine",
    "ep_dispatch",
    "ep_dispatch_cached",
    "ep_layout",
    "fp8_linear",
    "gemm_bf16",
    "gemm_bf16_acc_",
    "gemm_bf16_out",
    "gemm_scaled",
    "gemm_scaled_acc_",
    "gemm_scaled_fp8out",
    "gemm_scaled_out",
    "gmm_alltoallv",
    "hc_prenorm_gemm",
    "k_grouped_gemm_bf16",
    "k_grouped_gemm_bf16_acc_",
    "k_grouped_gemm_scaled",
    "k_grouped_gemm_scaled_acc_",
    "ll_combine",
    "ll_dispatch",
    "m_grouped_gemm_bf16",
    "m_grouped_gemm_bf16_masked",
    "m_grouped_gemm_scaled",
    "m_grouped_gemm_scaled_masked",
    "moe_combine",
    "moe_experts",
    "moe_experts_backward",
    "moe_permute",
    "moe_route",
    "mqa_logits",
    "mqa_logits_backward",
    "mqa_topk",
    "op",
    "pack_sf",
    "paged_kv_write_",
    "paged_mqa_logits",
    "paged_mqa_logits_metadata",
    "paged_mqa_topk",
    "provider",
    "quant_fp4",
    "quant_fp8",
    "reference",
    "sparse_mqa_attention",
    "sparse_mqa_attention_backward",
    "strict",
    "swiglu",
    "swiglu_quant",
    "unpack_sf",
]

OPS: Mapping[str, OpDef] = {
    definition.name: definition
    for definition in (
        MOE_ROUTE,
        MOE_PERMUTE,
        MOE_COMBINE,
        MOE_COMBINE_BACKWARD,
        SWIGLU,
        MOE_EXPERTS,
        MOE_EXPERTS_BACKWARD,
        MQA_LOGITS,
        MQA_LOGITS_BACKWARD,
        MQA_TOPK,
        PAGED_MQA_LOGITS,
        PAGED_MQA_LOGITS_METADATA,
        PAGED_MQA_TOPK,
        PAGED_KV_WRITE,
        SPARSE_MQA_ATTENTION,
        SPARSE_MQA_ATTENTION_BACKWARD,
        GEMM_BF16,
        GEMM_BF16_OUT,
        GEMM_BF16_ACC,
        M_GROUPED_GEMM_BF16,
        M_GROUPED_GEMM_BF16_MASKED,
        K_GROUPED_GEMM_BF16,
        K_GROUPED_GEMM_BF16_ACC,
        M_GROUPED_GEMM_SCALED,
        M_GROUPED_GEMM_SCALED_MASKED,
        K_GROUPED_GEMM_SCALED,
        K_GROUPED_GEMM_SCALED_ACC,
        EINSUM_BF16,
        HC_PRENORM_GEMM,
        QUANT_FP8,
        QUANT_FP4,
        DEQUANT,
        PACK_SF,
        SWIGLU_QUANT,
        GEMM_SCALED,
        GEMM_SCALED_FP8OUT,
        GEMM_SCALED_OUT,
        GEMM_SCALED_ACC,
        EINSUM_SCALED,
        EINSUM_SCALED_FP8OUT,
        FP8_LINEAR,
        EP_LAYOUT,
        EP_DISPATCH,
        EP_DISPATCH_CACHED,
        EP_COMBINE,
        LL_DISPATCH,
        LL_COMBINE,
        ALLTOALLV_GMM,
        GMM_ALLTOALLV,
    )
}

for _definition in OPS.values():
    register(_definition)
register_shadow()


def op(name: str) -> OpDef:
    """The definition of an op: schema, reference, tolerance, samples; ``op(name).overload`` is the torch op.

    Raises:
        KeyError: no op of that name; the message lists the ops.
    """
    if name not in OPS:
        raise KeyError(f"ascend_deep has no op {name!r}; the ops are {', '.join(OPS)}.")
    return OPS[name]


def reference(name: str) -> Callable[..., Any]:
    """The plain torch body that defines an op. It takes the arguments of the schema and checks none of them.

    Raises:
        KeyError: no op of that name.
    """
    return op(name).reference
