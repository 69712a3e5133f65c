// Any CPU: 128-bit vectors, which is SSE2 on x86-64 and NEON on aarch64.
#define ASCEND_DEEP_LANES 4
#define ASCEND_DEEP_TABLE kPortable
#define ASCEND_DEEP_ISA "portable"
#include "isa_body.h"
