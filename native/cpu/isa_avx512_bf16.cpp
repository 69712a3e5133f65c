// x86-64 with AVX-512 and its bfloat16 dot product.
#define ASCEND_DEEP_LANES 16
#define ASCEND_DEEP_TABLE kAvx512Bf16
#define ASCEND_DEEP_ISA "avx512_bf16"
#include "isa_body.h"
