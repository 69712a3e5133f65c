// The matrix products of one instruction set. The including file defines ASCEND_DEEP_LANES and ASCEND_DEEP_GEMM_TABLE.
#include "gemm_product.h"
#include "gemm_quant.h"

namespace ascend_deep_cpu {

const GemmKernels ASCEND_DEEP_GEMM_TABLE = {
    kLanes,  {kLanes * 10 / 16, kLanes * 5 / 16, kLanes / 2},
    code_step_of, token_dots_step, pack, product_scratch, product, quantise_scratch, quantise, dequantise, squares,
};

}  // namespace ascend_deep_cpu
