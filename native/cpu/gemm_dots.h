// Codes as bfloat16, multiplied by dot products of pairs: for CPUs with AVX-512's bfloat16 dot product and VBMI.
//
// Every code is a bfloat16 number, so all products are exact, and a sum is rounded as one of float32 is. Tokens are
// codes as well: they are packed as bfloat16 without their scales, which are applied, lane by lane, to the sum over a
// step before those of the stream. Decoding is one look-up for each vector of pairs (E2M1), or two (E4M3, NaN included).
//
// The operands of a step are in the order of its decoded words. A lane has 4 (E4M3) or 8 (E2M1) neighbouring elements,
// so all elements of a lane are in one group of 32.
#pragma once

#include "gemm_codes.h"

namespace {

// Floats of a packed step of a token: the scale of each lane, and two elements in each float.
constexpr int64_t dots_step(int64_t step) { return kLanes + step / 2; }

#if ASCEND_DEEP_LANES == 16 && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
constexpr bool kHasDots = true;

// The bfloat16 bits of 128 positive E4M3 codes: bytes kByte of the words, 0 the lower.
template <int kByte>
AD_INLINE __m512i e4m3_bytes(bool upper) {
  alignas(64) static constexpr auto kTable = [] {
    struct { uint8_t at[128]; } t{};
    for (int c = 0; c < 128; ++c) {
      // 2^(e - 7) (1 + m / 8); a subnormal m / 8 * 2^-6 has its leading one at bit 2, 1 or 0 of m.
      int e = c >> 3, m = c & 7;
      uint32_t bits = static_cast<uint32_t>((e + 120) << 7 | m << 4);
      if (e == 0) {
        const int lead = m >= 4 ? 2 : m >= 2 ? 1 : 0;
        bits = m == 0 ? 0u : static_cast<uint32_t>((118 + lead) << 7 | ((m << (3 - lead)) & 7) << 4);
      }
      if (c == 0x7f) bits = 0x7fc0;
      t.at[c] = static_cast<uint8_t>(bits >> (8 * kByte));
    }
    return t;
  }();
  return _mm512_load_si512(kTable.at + (upper ? 64 : 0));
}

struct E4M3Dots {
  typedef __m512bh Part;
  static constexpr int64_t kStep = kStepE4M3;
  static constexpr int64_t kTokenStep = dots_step(kStep);
  static constexpr int kVectors = 2;
  static constexpr bool kDots = true, kWatched = false;
  static constexpr int64_t kRowByRow[2] = {256, 4096};
  static constexpr float kUnit = 1.0f;

  AD_INLINE static void decode(BVec codes, __m512bh (&v)[kVectors]) {
    const __m512i c = reinterpret_cast<__m512i>(codes);
    const __m512i low = _mm512_permutex2var_epi8(e4m3_bytes<0>(false), c, e4m3_bytes<0>(true));
    const __m512i high = _mm512_permutex2var_epi8(e4m3_bytes<1>(false), c, e4m3_bytes<1>(true));
    // high | (c & 0x80)
    const __m512i sign = _mm512_ternarylogic_epi32(high, c, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    v[0] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi8(low, sign));
    v[1] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi8(low, sign));
  }

  // Words of a step in their order to that of decode, where each 128 bits have the halves of 16 elements.
  static void place(const uint16_t* from, uint16_t* to) {
    for (int64_t q = 0; q < 4; ++q) {
      std::memcpy(to + 8 * q, from + 16 * q, 16);
      std::memcpy(to + 32 + 8 * q, from + 16 * q + 8, 16);
    }
  }
};

struct E2M1Dots {
  typedef __m512bh Part;
  static constexpr int64_t kStep = kStepE2M1;
  static constexpr int64_t kTokenStep = dots_step(kStep);
  static constexpr int kVectors = 4;
  static constexpr bool kDots = true, kWatched = false;
  static constexpr int64_t kRowByRow[2] = {256, 4096};
  static constexpr float kUnit = 1.0f;

  AD_INLINE static void decode(BVec codes, __m512bh (&v)[kVectors]) {
    // The look-up takes the lowest five bits of a word; the fifth does not matter.
    alignas(64) static constexpr uint16_t kGrid[32] = {
        0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
        0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
        0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    const __m512i grid = _mm512_load_si512(kGrid);
    const __m512i c = reinterpret_cast<__m512i>(codes);
    v[0] = reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(c, grid));
    v[1] = reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(_mm512_srli_epi16(c, 4), grid));
    v[2] = reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(_mm512_srli_epi16(c, 8), grid));
    v[3] = reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(_mm512_srli_epi16(c, 12), grid));
  }

  // Every fourth element.
  static void place(const uint16_t* from, uint16_t* to) {
    for (int64_t i = 0; i < 4; ++i) {
      for (int64_t l = 0; l < 32; ++l) to[32 * i + l] = from[4 * l + i];
    }
  }
};

// The sums of a step of words times one of a packed token, with the token's scales.
template <int N>
AD_INLINE Vec step_product(const __m512bh (&w)[N], const float* x) {
  __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    sum = _mm512_dpbf16_ps(sum, w[i], reinterpret_cast<__m512bh>(_mm512_loadu_ps(x + kLanes * (1 + i))));
  }
  return reinterpret_cast<Vec>(sum) * load(x);
}

// Row r of codes, `depth` elements of it. A scale that is not finite does not commute with a sum, so it is multiplied in.
template <typename F>
void pack_dots(const Operand& x, int64_t r, int64_t depth, float* to) {
  constexpr int64_t kPart = 32 * kLanes / F::kStep;  // lanes of a group of 32
  const bool scaled = x.sf != ascend_deep_cpu::kSfNone;
  int64_t edge = 0;  // where the next scale begins
  float scale = 1.0f;
  for (int64_t k = 0; k < depth; k += F::kStep, to += F::kTokenStep) {
    const int64_t n = min64(F::kStep, depth - k);
    alignas(64) float v[F::kStep] = {};
    if (along_k(x)) {
      decode_along(x, x.base + r * x.row, k, n, v);
    } else {
      for (int64_t i = 0; i < n; ++i) v[i] = value_at(x, r, k + i);
    }
    for (int64_t i = 0, lane = 0; i < F::kStep; i += 32, lane += kPart) {
      if (scaled && i < n && k + i >= edge) {
        const int64_t group = (k + i + x.sf_shift) / x.gran_k;
        scale = scale_at(x, r, group);
        edge = (group + 1) * x.gran_k - x.sf_shift;
      }
      const bool finite = std::isfinite(scale);
      for (int64_t l = 0; l < kPart; ++l) to[lane + l] = finite ? scale : 1.0f;
      for (int64_t l = 0; l < 32 && !finite; ++l) v[i + l] *= i + l < n ? scale : 0.0f;
    }
    alignas(64) uint16_t words[F::kStep], placed[F::kStep];
    for (int64_t i = 0; i < F::kStep; i += kLanes) {
      const UVec bits = reinterpret_cast<UVec>(load(v + i));
      *reinterpret_cast<HVecU*>(words + i) = __builtin_convertvector(bits >> 16, HVec);
    }
    F::place(words, placed);
    std::memcpy(to + kLanes, placed, sizeof(placed));
  }
}
#else
constexpr bool kHasDots = false;
#endif

int64_t token_dots_step(int64_t step) { return kHasDots ? dots_step(step) : 0; }

// `format`: of the stream.
inline void pack_dots_any(const Operand& x, int64_t r, int64_t depth, MatFormat format, float* to) {
#if ASCEND_DEEP_LANES == 16 && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  if (format == ascend_deep_cpu::kMatE4M3) pack_dots<E4M3Dots>(x, r, depth, to);
  else pack_dots<E2M1Dots>(x, r, depth, to);
#endif
}

}  // namespace
