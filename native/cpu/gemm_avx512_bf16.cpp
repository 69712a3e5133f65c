// As gemm_avx512.cpp, with VBMI's look-ups and AVX-512's bfloat16 dot product.
#define ASCEND_DEEP_LANES 16
#define ASCEND_DEEP_GEMM_TABLE kGemmAvx512Bf16
#include "gemm_body.h"
