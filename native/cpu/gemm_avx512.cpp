// x86-64 with AVX-512 F, BW, DQ and VL.
#define ASCEND_DEEP_LANES 16
#define ASCEND_DEEP_GEMM_TABLE kGemmAvx512
#include "gemm_body.h"
