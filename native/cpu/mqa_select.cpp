// The choice of candidates, and of the kernel table. Generic code: what std templates make here must not be merged with
// the same templates compiled for a newer CPU (see api.h).
#include <algorithm>
#include <cstring>
#include <functional>

#include "mqa_api.h"

namespace ascend_deep_cpu {

int64_t mqa_prune(uint64_t* candidates, int64_t n, int64_t k, uint64_t* spare) {
  if (n <= k) return n;
  std::copy(candidates, candidates + n, spare);
  std::nth_element(spare, spare + (k - 1), spare + n, std::greater<uint64_t>());
  const uint64_t least = spare[k - 1];
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {  // candidates differ from each other, so exactly k pass
    candidates[kept] = candidates[i];
    kept += candidates[i] >= least;
  }
  return k;
}

const MqaKernels& mqa_kernels() {
#if defined(__x86_64__)
  const char* name = kernels().name;
  if (std::strncmp(name, "avx512", 6) == 0) return kMqaAvx512;
  if (std::strcmp(name, "avx2") == 0) return kMqaAvx2;
#endif
  return kMqaPortable;
}

}  // namespace ascend_deep_cpu
