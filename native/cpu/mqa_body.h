// The indexer kernels of one instruction set. The including file defines ASCEND_DEEP_LANES and ASCEND_DEEP_MQA_TABLE.
#include "mqa_attention.h"

namespace ascend_deep_cpu {

const MqaKernels ASCEND_DEEP_MQA_TABLE = {
    kPanel, mqa_logits_scratch, mqa_topk_scratch, mqa_logits, mqa_topk, sparse_attention_scratch, sparse_attention,
};

}  // namespace ascend_deep_cpu
