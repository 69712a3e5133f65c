// Chooses the instruction set once per process. ASCEND_DEEP_CPU_ISA asks for a lower one than the CPU has.
//
// AVX-512's bfloat16 dot product is used on AMD's CPUs only: on Sapphire and Emerald Rapids vdpbf16ps runs at a quarter of
// the rate of a float32 multiply-add (1.35 against 5.5 per ns measured), so it does half the work in the same time. With
// few tokens bfloat16 weights are converted in registers, which costs nothing where memory is the limit.
#include <cstdlib>
#include <cstring>

#include "api.h"
#include "dispatch.h"

namespace ascend_deep_cpu {
namespace {

const Kernels* find(const char* name) {
  const Kernels* all[kIsas];
  const int n = available(all);
  for (int i = 0; i < n; ++i) {
    if (std::strcmp(all[i]->name, name) == 0) return all[i];
  }
  return nullptr;
}

const Kernels* initial() {
  const Kernels* all[kIsas];
  const int n = available(all);
  const char* name = std::getenv("ASCEND_DEEP_CPU_ISA");
  const Kernels* forced = name ? find(name) : nullptr;
  return forced ? forced : all[n - 1];
}

const Kernels*& current() {
  static const Kernels* k = initial();
  return k;
}

}  // namespace

int available(const Kernels** out) {
  int n = 0;
  out[n++] = &kPortable;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) out[n++] = &kAvx2;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    out[n++] = &kAvx512;
    if (__builtin_cpu_is("amd") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) {
      out[n++] = &kAvx512Bf16;
    }
  }
#endif
  return n;
}

const Kernels& kernels() { return *current(); }

bool select(const char* name) {
  const Kernels* k = find(name);
  if (k) current() = k;
  return k != nullptr;
}

}  // namespace ascend_deep_cpu
