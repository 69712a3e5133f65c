// x86-64 with AVX2, FMA and F16C.
#define ASCEND_DEEP_LANES 8
#define ASCEND_DEEP_GEMM_TABLE kGemmAvx2
#include "gemm_body.h"
