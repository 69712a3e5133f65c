// E4M3 and E2M1 codes, and their scales, as float32.
//
// E4M3 goes through float16: the fields of a code, shifted into those of a half, are the value times 2^-8, subnormals
// included. The one NaN, 0x7f with any sign, is not representable in that way and is looked for separately.
//
// A *step* is what one vector load of codes holds, in the order in which decoding is cheapest: E4M3 codes are taken as
// pairs in 16-bit words, low bytes first; E2M1 codes as eight in a 32-bit word, so that a shift and a look-up decode a
// vector. Whoever multiplies a step has its other operand in the same order (see place_*).
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "gemm_api.h"
#include "vec.h"

namespace {

using ascend_deep_cpu::MatFormat;
using ascend_deep_cpu::Operand;

typedef uint8_t BVec __attribute__((vector_size(kLanes * 4)));
typedef int16_t SVec __attribute__((vector_size(kLanes * 4)));
typedef uint8_t BVecU __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
typedef uint8_t Codes __attribute__((vector_size(kLanes)));
typedef uint8_t CodesU __attribute__((vector_size(kLanes), aligned(1), may_alias));

constexpr int64_t kStepBytes = 4 * kLanes;
constexpr int64_t kStepE4M3 = 4 * kLanes;
constexpr int64_t kStepE2M1 = 8 * kLanes;

AD_INLINE float e2m1_value(uint32_t code) {
  constexpr float kGrid[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float v = kGrid[code & 7];
  return code & 8 ? -v : v;
}

AD_INLINE float e4m3_value(uint8_t code) {
  const uint32_t mag = code & 0x7f;
  float v;
  if (mag == 0x7f) {
    v = NAN;
  } else if (mag < 8) {
    v = static_cast<float>(mag) * 0x1p-9f;
  } else {
    const uint32_t bits = (mag << 20) + (120u << 23);
    std::memcpy(&v, &bits, 4);
  }
  return code & 0x80 ? -v : v;
}

AD_INLINE float ue8m0_value(uint8_t code) {
  const uint32_t bits = code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : static_cast<uint32_t>(code) << 23;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Codes in the low bytes of `c`, without the NaN: 480 in its place.
AD_INLINE Vec e4m3_finite(UVec c) {
  const UVec mag = c & 0x7fu, sign = (c & 0x80u) << 24;
  const Vec small = __builtin_convertvector(reinterpret_cast<IVec>(mag), Vec) * 0x1p-9f;
  const UVec bits = mag < 8u ? reinterpret_cast<UVec>(small) : (mag << 20) + (120u << 23);
  return reinterpret_cast<Vec>(bits | sign);
}

// kLanes codes in their order, 480 for NaN; `seen` gathers whether there was one, see watch_nan.
AD_INLINE Vec e4m3_watched(const uint8_t* p, Codes& seen) {
  const Codes codes = *reinterpret_cast<const CodesU*>(p);
  const Codes c = codes | 0x80;
  seen = c > seen ? c : seen;
#if defined(__F16C__)
  typedef int8_t Signed __attribute__((vector_size(kLanes)));
  typedef int16_t Words __attribute__((vector_size(kLanes * 2)));
  const Words half = (__builtin_convertvector(reinterpret_cast<Signed>(codes), Words) << 7) & static_cast<int16_t>(0xbf80);
#if ASCEND_DEEP_LANES == 16
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(half))) * 256.0f;
#else
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(half))) * 256.0f;
#endif
#else
  return e4m3_finite(__builtin_convertvector(codes, UVec));
#endif
}

AD_INLINE Vec e4m3(const uint8_t* p) {
  Codes none = {};
  const UVec c = __builtin_convertvector(*reinterpret_cast<const CodesU*>(p), UVec);
  const UVec nan = (c & 0x7fu) == 0x7fu ? UVec{} + 0x7fc00000u : UVec{};
  return reinterpret_cast<Vec>(reinterpret_cast<UVec>(e4m3_watched(p, none)) | nan);
}

// The low nibbles of a vector of words as numbers; whatever else the words hold is ignored.
AD_INLINE Vec e2m1_low(UVec w) {
#if ASCEND_DEEP_LANES == 16
  const __m512 grid = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                     -3.0f, -4.0f, -6.0f);
  return reinterpret_cast<Vec>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(w), grid));
#elif defined(__AVX2__)
  const __m256 grid = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256 v = _mm256_permutevar8x32_ps(grid, reinterpret_cast<__m256i>(w));
  return reinterpret_cast<Vec>(reinterpret_cast<UVec>(v) ^ ((w << 28) & 0x80000000u));
#else
  // 2^(e - 1) (1 + m / 2), and m / 2 for e = 0.
  const UVec mag = w & 7u, sign = (w << 28) & 0x80000000u;
  const Vec small = __builtin_convertvector(reinterpret_cast<IVec>(mag), Vec) * 0.5f;
  const UVec bits = mag < 2u ? reinterpret_cast<UVec>(small) : (mag << 22) + (126u << 23);
  return reinterpret_cast<Vec>(bits | sign);
#endif
}

// kLanes codes in their order, the first one in the low nibble.
AD_INLINE Vec e2m1(const uint8_t* p) {
#if ASCEND_DEEP_LANES == 16
  constexpr IVec twice = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  constexpr UVec by = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
  uint64_t word;
  std::memcpy(&word, p, 8);
  const UVec w = reinterpret_cast<UVec>(_mm512_set1_epi64(static_cast<int64_t>(word)));
  return e2m1_low(__builtin_shuffle(w, twice) >> by);
#elif ASCEND_DEEP_LANES == 8
  constexpr UVec by = {0, 4, 8, 12, 16, 20, 24, 28};
  uint32_t word;
  std::memcpy(&word, p, 4);
  return e2m1_low((UVec{} + word) >> by);
#else
  constexpr UVec by = {0, 4, 8, 12};
  uint16_t word;
  std::memcpy(&word, p, 2);
  return e2m1_low((UVec{} + word) >> by);
#endif
}

// ---- steps ---------------------------------------------------------------------------------------------------------

// A step of numbers in the order of codes: E4M3 has the even elements first, E2M1 every eighth.
inline void place_e4m3(const float* from, float* to) {
  for (int64_t i = 0; i < 2 * kLanes; ++i) to[i] = from[2 * i];
  for (int64_t i = 0; i < 2 * kLanes; ++i) to[2 * kLanes + i] = from[2 * i + 1];
}
inline void place_e2m1(const float* from, float* to) {
  for (int64_t i = 0; i < 8; ++i) {
    for (int64_t l = 0; l < kLanes; ++l) to[i * kLanes + l] = from[8 * l + i];
  }
}

// Gathers whether there was a NaN.
AD_INLINE void watch_nan(BVec codes, BVec& seen) {
  const BVec c = codes | 0x80;
  seen = c > seen ? c : seen;
}
AD_INLINE bool saw_nan(BVec seen) {
  const BVec all = reinterpret_cast<BVec>(seen == 0xff);
  uint64_t words[kStepBytes / 8], any = 0;
  std::memcpy(words, &all, kStepBytes);
  for (int64_t i = 0; i < kStepBytes / 8; ++i) any |= words[i];
  return any != 0;
}

// The values times kUnit; 480 kUnit for NaN.
struct E4M3 {
  typedef Vec Part;
  static constexpr int64_t kStep = kStepE4M3;
  static constexpr int64_t kTokenStep = kStep;
  static constexpr int kVectors = 4;
  static constexpr bool kDots = false, kWatched = true;
  static constexpr int64_t kRowByRow[2] = {1, 0};  // decoding takes longer than memory
#if defined(__F16C__)
  static constexpr float kUnit = 0x1p-8f;
#else
  static constexpr float kUnit = 1.0f;
#endif

  AD_INLINE static void decode(BVec codes, Vec (&v)[kVectors]) {
#if defined(__F16C__)
    const SVec w = reinterpret_cast<SVec>(codes);
    alignas(64) SVec half[2];
    half[0] = ((w << 8) >> 1) & static_cast<int16_t>(0xbf80);
    half[1] = (w >> 1) & static_cast<int16_t>(0xbf80);
    const char* p = reinterpret_cast<const char*>(half);
    // Conversions that read memory need no shuffle, and those share a port with half of the multiply-adds.
    asm volatile("" : "+m"(half));
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
#if ASCEND_DEEP_LANES == 16
      v[i] = reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p) + i)));
#else
      v[i] = reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p) + i)));
#endif
    }
#else
    const UVec w = reinterpret_cast<UVec>(codes);
    // The same order of elements: words of two codes, the lower half of the vector first.
    typedef uint16_t Words __attribute__((vector_size(kLanes * 4)));
    const Words all = reinterpret_cast<Words>(w);
#pragma GCC unroll 4
    for (int i = 0; i < 2; ++i) {
      HVec part;
      for (int64_t l = 0; l < kLanes; ++l) part[l] = all[i * kLanes + l];
      const UVec c = __builtin_convertvector(part, UVec);
      v[i] = e4m3_finite(c & 0xffu);
      v[2 + i] = e4m3_finite(c >> 8);
    }
#endif
  }
};

struct E2M1 {
  typedef Vec Part;
  static constexpr int64_t kStep = kStepE2M1;
  static constexpr int64_t kTokenStep = kStep;
  static constexpr int kVectors = 8;
  static constexpr bool kDots = false, kWatched = false;
  static constexpr int64_t kRowByRow[2] = {1024, 8192};
  static constexpr float kUnit = 1.0f;

  AD_INLINE static void decode(BVec codes, Vec (&v)[kVectors]) {
    const UVec w = reinterpret_cast<UVec>(codes);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) v[i] = e2m1_low(w >> (4 * i));
  }
};

// The sums of a step of numbers times one of a token.
template <int N>
AD_INLINE Vec step_product(const Vec (&w)[N], const float* x) {
  Vec sum = w[0] * load(x);
#pragma GCC unroll 8
  for (int i = 1; i < N; ++i) sum += w[i] * load(x + i * kLanes);
  return sum;
}

// ---- rows ----------------------------------------------------------------------------------------------------------

AD_INLINE float scale_at(const Operand& x, int64_t r, int64_t group) {
  const int64_t row = r / x.gran_row;
  switch (x.sf) {
    case ascend_deep_cpu::kSfNone: return 1.0f;
    case ascend_deep_cpu::kSfF32: {
      float f;
      std::memcpy(&f, x.sf_base + 4 * (row * x.sf_row + group * x.sf_col), 4);
      return f;
    }
    case ascend_deep_cpu::kSfUe8m0x4:
      return ue8m0_value(static_cast<uint8_t>(x.sf_base[4 * (row * x.sf_row + group / 4 * x.sf_col) + group % 4]));
    default:
      return ue8m0_value(static_cast<uint8_t>(x.sf_base[2 * (row * x.sf_row + group / 2 * x.sf_col) + group % 2]));
  }
}

// Element (r, k) without its scale, wherever it lies.
AD_INLINE float value_at(const Operand& x, int64_t r, int64_t k) {
  using namespace ascend_deep_cpu;
  switch (x.format) {
    case kMatF32: {
      float f;
      std::memcpy(&f, x.base + r * x.row + k * x.col, 4);
      return f;
    }
    case kMatBF16: {
      bf16 h;
      std::memcpy(&h, x.base + r * x.row + k * x.col, 2);
      return to_float(h);
    }
    case kMatE4M3: return e4m3_value(static_cast<uint8_t>(x.base[r * x.row + k * x.col]));
    default: {
      const int64_t pair = x.pairs_along_rows ? r : k;
      const int64_t at = x.pairs_along_rows ? r / 2 * x.row + k * x.col : r * x.row + k / 2 * x.col;
      const uint8_t byte = static_cast<uint8_t>(x.base[at]);
      return e2m1_value(pair % 2 ? byte >> 4 : byte & 15);
    }
  }
}

// Bytes of one element; of two for E2M1.
AD_INLINE int64_t unit_bytes(MatFormat f) {
  return f == ascend_deep_cpu::kMatF32 ? 4 : f == ascend_deep_cpu::kMatBF16 ? 2 : 1;
}

// Whether elements of a row are next to each other.
AD_INLINE bool along_k(const Operand& x) { return x.col == unit_bytes(x.format) && !x.pairs_along_rows; }

// Elements [k, k + n) of a row whose elements are next to each other, without scales. k is even for E2M1, and so is n
// or nothing follows.
inline void decode_along(const Operand& x, const char* row, int64_t k, int64_t n, float* to) {
  using namespace ascend_deep_cpu;
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(row);
  int64_t i = 0;
  switch (x.format) {
    case kMatF32:
      std::memcpy(to, row + 4 * k, 4 * n);
      return;
    case kMatBF16:
      for (; i < n; i += kLanes) store_n(to + i, load_n(reinterpret_cast<const bf16*>(row) + k + i, n - i), n - i);
      return;
    case kMatE4M3:
      for (; i + kLanes <= n; i += kLanes) store(to + i, e4m3(bytes + k + i));
      for (; i < n; ++i) to[i] = e4m3_value(bytes[k + i]);
      return;
    default:
      for (; i + kLanes <= n; i += kLanes) store(to + i, e2m1(bytes + (k + i) / 2));
      for (; i < n; ++i) to[i] = e2m1_value(i % 2 ? bytes[(k + i) / 2] >> 4 : bytes[(k + i) / 2] & 15);
  }
}

// to[i * step] *= the scale of (r, k + i)
inline void apply_scales(const Operand& x, int64_t r, int64_t k, int64_t n, float* to, int64_t step) {
  if (x.sf == ascend_deep_cpu::kSfNone) return;
  for (int64_t i = 0; i < n;) {
    const int64_t group = (k + i + x.sf_shift) / x.gran_k;
    const int64_t end = min64(n, (group + 1) * x.gran_k - x.sf_shift - k);
    const float s = scale_at(x, r, group);
    if (step == 1) {
      for (; i + kLanes <= end; i += kLanes) store(to + i, load(to + i) * s);
    }
    for (; i < end; ++i) to[i * step] *= s;
  }
}

// As decode_along with the scales of row r, in one pass, for codes. `k` is even for E2M1.
inline void decode_scaled(const Operand& x, int64_t r, int64_t k, int64_t n, float* to) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(x.base + r * x.row);
  const bool e2m1_codes = x.format == ascend_deep_cpu::kMatE2M1;
  Codes seen = {};
  int64_t group = (k + x.sf_shift) / x.gran_k, end = (group + 1) * x.gran_k - x.sf_shift - k;
  for (int64_t i = 0; i < n; ++group, end += x.gran_k) {
    const int64_t stop = min64(n, end);
    const float scale = scale_at(x, r, group);
    const Vec s = splat(scale);
    if (!e2m1_codes) {
      for (; i + kLanes <= stop; i += kLanes) store(to + i, e4m3_watched(bytes + k + i, seen) * s);
    } else if (i % 2 == 0) {
      for (; i + kLanes <= stop; i += kLanes) store(to + i, e2m1(bytes + (k + i) / 2) * s);
    }
    for (; i < stop; ++i) to[i] = value_at(x, r, k + i) * scale;
  }
  bool nan = false;
  for (int64_t i = 0; i < kLanes; ++i) nan |= seen[i] == 0xff;
  for (int64_t i = 0; nan && i < n; ++i) to[i] = (bytes[k + i] & 0x7f) == 0x7f ? NAN : to[i];
}

// Elements [k, k + n) of row r as float32.
inline void decode_row(const Operand& x, int64_t r, int64_t k, int64_t n, float* to) {
  const bool split = x.format == ascend_deep_cpu::kMatE2M1 && k % 2;
  if (!along_k(x) || split) {
    for (int64_t i = 0; i < n; ++i) to[i] = value_at(x, r, k + i);
  } else if (x.sf != ascend_deep_cpu::kSfNone && x.format >= ascend_deep_cpu::kMatE4M3) {
    decode_scaled(x, r, k, n, to);
    return;
  } else {
    decode_along(x, x.base + r * x.row, k, n, to);
  }
  apply_scales(x, r, k, n, to, 1);
}

}  // namespace
