// Any CPU: 128-bit vectors.
#define ASCEND_DEEP_LANES 4
#define ASCEND_DEEP_MQA_TABLE kMqaPortable
#include "mqa_body.h"
