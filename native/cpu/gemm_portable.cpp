// Any CPU; see isa_portable.cpp.
#define ASCEND_DEEP_LANES 4
#define ASCEND_DEEP_GEMM_TABLE kGemmPortable
#include "gemm_body.h"
