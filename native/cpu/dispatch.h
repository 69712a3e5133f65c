// The instruction sets of this CPU, lowest first. Generic code only; see api.h.
#pragma once

#include "api.h"

namespace ascend_deep_cpu {

constexpr int kIsas = 4;

// Writes the usable kernel tables to out[0 .. kIsas) and returns their number.
int available(const Kernels** out);

// Uses the named instruction set from now on; false if this CPU or this build does not have it. For tests.
bool select(const char* name);

}  // namespace ascend_deep_cpu
