// x86-64 with AVX2 and FMA.
#define ASCEND_DEEP_LANES 8
#define ASCEND_DEEP_TABLE kAvx2
#define ASCEND_DEEP_ISA "avx2"
#include "isa_body.h"
