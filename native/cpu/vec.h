// Vectors of kLanes floats, written with the compiler's vector extensions so that one source serves every ISA.
//
// Everything is in an unnamed namespace on purpose: see api.h. The including file defines ASCEND_DEEP_LANES.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "api.h"

#define AD_INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t kLanes = ASCEND_DEEP_LANES;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float VecU __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HVec __attribute__((vector_size(kLanes * 2)));
typedef uint16_t HVecU __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

AD_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
AD_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
AD_INLINE int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// v - 0 is v for every v, so this is a plain broadcast (0 + v would turn -0 into 0).
AD_INLINE Vec splat(float v) { return v - Vec{}; }
AD_INLINE Vec load(const float* p) { return *reinterpret_cast<const VecU*>(p); }
AD_INLINE void store(float* p, Vec v) { *reinterpret_cast<VecU*>(p) = v; }

AD_INLINE Vec widen(HVec h) { return reinterpret_cast<Vec>(__builtin_convertvector(h, UVec) << 16); }
AD_INLINE Vec load(const bf16* p) { return widen(*reinterpret_cast<const HVecU*>(p)); }

// Round to nearest even; NaN stays NaN.
AD_INLINE UVec bf16_bits(Vec v) {
  const UVec b = reinterpret_cast<UVec>(v);
  const UVec r = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  return (v == v) ? r : ((b >> 16) | 0x40u);
}
AD_INLINE void store(bf16* p, Vec v) {
  *reinterpret_cast<HVecU*>(p) = __builtin_convertvector(bf16_bits(v), HVec);
}

AD_INLINE float to_float(float v) { return v; }
AD_INLINE float to_float(bf16 v) {
  const uint32_t b = static_cast<uint32_t>(v.bits) << 16;
  float f;
  std::memcpy(&f, &b, 4);
  return f;
}
AD_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t mag = h & 0x7fffu;
  float f;
  if (mag >= 0x7c00u) {  // inf, NaN
    const uint32_t b = sign | 0x7f800000u | ((mag & 0x3ffu) << 13);
    std::memcpy(&f, &b, 4);
    return f;
  }
  // Subnormals included: the half's fields, read as a float, are the value times 2^-112.
  const uint32_t b = mag << 13;
  std::memcpy(&f, &b, 4);
  f *= 0x1p112f;
  return sign ? -f : f;
}

// The first n < kLanes elements, zeros behind them; never reads past p[n - 1].
template <typename T>
AD_INLINE Vec load_partial(const T* p, int64_t n) {
  T buf[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) buf[i] = p[i];
  return load(buf);
}
template <typename T>
AD_INLINE void store_partial(T* p, Vec v, int64_t n) {
  T buf[kLanes];
  store(buf, v);
  for (int64_t i = 0; i < n; ++i) p[i] = buf[i];
}
template <typename T>
AD_INLINE Vec load_n(const T* p, int64_t n) {
  return n >= kLanes ? load(p) : load_partial(p, n);
}
template <typename T>
AD_INLINE void store_n(T* p, Vec v, int64_t n) {
  if (n >= kLanes) store(p, v);
  else store_partial(p, v, n);
}

AD_INLINE float load_as_float(const void* p, int64_t i, ascend_deep_cpu::Dtype dtype) {
  switch (dtype) {
    case ascend_deep_cpu::kBF16: return to_float(static_cast<const bf16*>(p)[i]);
    case ascend_deep_cpu::kF16: return half_to_float(static_cast<const uint16_t*>(p)[i]);
    default: return static_cast<const float*>(p)[i];
  }
}

// Sum of the lanes, always as the same tree.
AD_INLINE float lane_sum(Vec v) {
  float buf[kLanes];
  store(buf, v);
  for (int64_t w = kLanes / 2; w > 0; w /= 2) {
    for (int64_t i = 0; i < w; ++i) buf[i] += buf[i + w];
  }
  return buf[0];
}

// One step of lane_sums: every run of kRun lanes of a and of b is folded to half its length; runs of a and b alternate.
template <int kRun, int... I>
AD_INLINE Vec fold(Vec a, Vec b, std::integer_sequence<int, I...>) {
  constexpr int kHalf = kRun / 2, kAll = kLanes;
  return __builtin_shufflevector(a, b, (I % kRun / kHalf * kAll + I / kRun * kRun + I % kHalf)...) +
         __builtin_shufflevector(a, b, (I % kRun / kHalf * kAll + I / kRun * kRun + I % kHalf + kHalf)...);
}

// The last step: adds neighbours, if sums still have two lanes, and stores one lane per sum.
template <int kLeft, int... I>
AD_INLINE void store_sums(Vec v, float* out, std::integer_sequence<int, I...>) {
  typedef float Sums __attribute__((vector_size(sizeof...(I) * 4)));
  typedef float SumsU __attribute__((vector_size(sizeof...(I) * 4), aligned(4), may_alias));
  Sums s = __builtin_shufflevector(v, v, (I * kLeft)...);
  if constexpr (kLeft == 2) s += __builtin_shufflevector(v, v, (I * kLeft + 1)...);
  *reinterpret_cast<SumsU*>(out) = s;
}

// out[i] = sum of the lanes of v[i], always as the same tree. N is a power of two, at most kLanes. Destroys v.
template <int N>
AD_INLINE void lane_sums(Vec* v, float* out) {
  using Lanes = std::make_integer_sequence<int, static_cast<int>(kLanes)>;
  constexpr int kAll = kLanes;
  // With i paired to i + n / 2 in every step, the sums end in order.
  if constexpr (N >= 8) {
    for (int i = 0; i < 4; ++i) v[i] = fold<kAll>(v[i], v[i + 4], Lanes{});
    for (int i = 0; i < 2; ++i) v[i] = fold<kAll / 2>(v[i], v[i + 2], Lanes{});
    v[0] = fold<kAll / 4>(v[0], v[1], Lanes{});
  } else {
    for (int i = 0; i < 2; ++i) v[i] = fold<kAll>(v[i], v[i + 2], Lanes{});
    v[0] = fold<kAll / 2>(v[0], v[1], Lanes{});
  }
  constexpr int kLeft = kAll / N;  // lanes per sum; their pairs are neighbours
  static_assert(N == 4 || N == 8, "dot tiles have four or eight rows");
  static_assert(kLeft == 1 || kLeft == 2, "one more fold at most");
  store_sums<kLeft>(v[0], out, std::make_integer_sequence<int, N>{});
}

// Pairs of floats are moved as 64 bits.
typedef int64_t Pairs __attribute__((vector_size(kLanes * 4)));

// The pair at p in every pair of lanes.
AD_INLINE Vec splat_pair(const float* p) {
  int64_t pair;
  std::memcpy(&pair, p, sizeof(pair));
  return reinterpret_cast<Vec>(Pairs{} + pair);
}

// Sums of neighbouring lanes: those of a, then those of b.
template <int... I>
AD_INLINE Vec pair_sums(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}
AD_INLINE Vec pair_sums(Vec a, Vec b) {
  return pair_sums(a, b, std::make_integer_sequence<int, static_cast<int>(kLanes)>{});
}

// Lanes of a and b in turns: of their first halves (kFrom = 0), or of their second ones (kFrom = kLanes / 2).
template <int kFrom, int... I>
AD_INLINE Vec in_turns(Vec a, Vec b, std::integer_sequence<int, I...>) {
  constexpr int kAll = kLanes;
  return __builtin_shufflevector(a, b, (kFrom + I / 2 + I % 2 * kAll)...);
}
template <int kFrom>
AD_INLINE Vec in_turns(Vec a, Vec b) {
  return in_turns<kFrom>(a, b, std::make_integer_sequence<int, static_cast<int>(kLanes)>{});
}

// Transposes kLanes vectors in place: log2(kLanes) rounds, each pairing rows i and i + half and interleaving them.
AD_INLINE void transpose(Vec (&v)[kLanes]) {
#if ASCEND_DEEP_LANES == 16
  constexpr IVec lo = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  constexpr IVec hi = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#elif ASCEND_DEEP_LANES == 8
  constexpr IVec lo = {0, 8, 1, 9, 2, 10, 3, 11};
  constexpr IVec hi = {4, 12, 5, 13, 6, 14, 7, 15};
#else
  constexpr IVec lo = {0, 4, 1, 5};
  constexpr IVec hi = {2, 6, 3, 7};
#endif
  for (int64_t round = 1; round < kLanes; round *= 2) {
    Vec t[kLanes];
    for (int64_t i = 0; i < kLanes / 2; ++i) {
      t[2 * i] = __builtin_shuffle(v[i], v[i + kLanes / 2], lo);
      t[2 * i + 1] = __builtin_shuffle(v[i], v[i + kLanes / 2], hi);
    }
    for (int64_t i = 0; i < kLanes; ++i) v[i] = t[i];
  }
}

}  // namespace
