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

void mqa_sort(uint64_t* candidates, int64_t n, uint64_t* spare) {
  if (n < 256) {
    std::sort(candidates, candidates + n, std::greater<uint64_t>());
    return;
  }
  // By digits of the score, lowest first. Every pass is stable, so equal scores keep their ascending indices.
  constexpr int kBits = 11, kPasses = 3, kSize = 1 << kBits;
  int32_t count[kPasses][kSize] = {};
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t score = ~static_cast<uint32_t>(candidates[i] >> 32);  // descending
    for (int p = 0; p < kPasses; ++p) ++count[p][(score >> (kBits * p)) & (kSize - 1)];
  }
  uint64_t *from = candidates, *to = spare;
  for (int p = 0; p < kPasses; ++p) {
    int32_t at = 0;
    for (int d = 0; d < kSize; ++d) {
      const int32_t here = count[p][d];
      count[p][d] = at;
      at += here;
    }
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t score = ~static_cast<uint32_t>(from[i] >> 32);
      to[count[p][(score >> (kBits * p)) & (kSize - 1)]++] = from[i];
    }
    std::swap(from, to);
  }
  std::copy(from, from + n, candidates);
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
