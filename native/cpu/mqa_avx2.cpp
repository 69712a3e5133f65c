// x86-64 with AVX2 and FMA.
#define ASCEND_DEEP_LANES 8
#define ASCEND_DEEP_MQA_TABLE kMqaAvx2
#include "mqa_body.h"
