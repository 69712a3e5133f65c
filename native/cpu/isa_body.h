// The kernel table of one instruction set. The including file defines ASCEND_DEEP_LANES, ASCEND_DEEP_TABLE (the name
// of the table) and ASCEND_DEEP_ISA (its name as text).
#include "experts.h"
#include "rowwise.h"

namespace ascend_deep_cpu {

const Kernels ASCEND_DEEP_TABLE = {
    ASCEND_DEEP_ISA, kLanes, kHasWordDots, {kLanes * 10 / 16, kLanes * 6 / 16, kLanes * 10 / 16}, scratch_bytes, up_any, down_any, route_scratch_bytes, route, swiglu,
};

}  // namespace ascend_deep_cpu
