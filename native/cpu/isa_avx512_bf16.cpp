// As isa_avx512.cpp, with AVX-512's bfloat16 dot product.
#include <immintrin.h>
#define ASCEND_DEEP_LANES 16
#define ASCEND_DEEP_TABLE kAvx512Bf16
#define ASCEND_DEEP_ISA "avx512_bf16"
#include "isa_body.h"
