// x86-64 with AVX-512 F, BW, DQ and VL.
#define ASCEND_DEEP_LANES 16
#define ASCEND_DEEP_TABLE kAvx512
#define ASCEND_DEEP_ISA "avx512"
#include "isa_body.h"
