// Products of tokens and weight rows that are both pairs of bfloat16, for CPUs with a fast dot product of such pairs.
//
// A pair is a word of 32 bits and lies in a float. Rows are weights as they are stored; a panel is [depth / 2][token]
// words. Products of two bfloat16 numbers are exact in float32; each word adds two of them to a sum.
#pragma once

#include "gemm.h"

namespace {

#if ASCEND_DEEP_LANES == 16 && defined(__AVX512BF16__)
constexpr bool kHasWordDots = true;

// acc + the two products of `word` with each word of x.
AD_INLINE Vec add_dots(Vec acc, int32_t word, Vec x) {
  const __m512bh w = reinterpret_cast<__m512bh>(_mm512_set1_epi32(word));
  return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), w, reinterpret_cast<__m512bh>(x)));
}
#else
constexpr bool kHasWordDots = false;
AD_INLINE Vec add_dots(Vec acc, int32_t, Vec) { return acc; }
#endif

// Words of even and odd elements, rounded to bfloat16.
AD_INLINE Vec words_of(Vec even, Vec odd) { return reinterpret_cast<Vec>(bf16_bits(even) | (bf16_bits(odd) << 16)); }

template <int R, int MV>
AD_INLINE void dots_tile(const bf16* const* rows, const float* panel, int64_t words, const Ahead& ahead, float* c,
                         int64_t ldc) {
  const bf16* r[R];
  for (int j = 0; j < R; ++j) r[j] = rows[j];
  Vec acc[R][MV] = {};
  auto step = [&](int64_t k) __attribute__((always_inline)) {
    Vec xv[MV];
#pragma GCC unroll 4
    for (int m = 0; m < MV; ++m) xv[m] = load(panel + k * (MV * kLanes) + m * kLanes);
#pragma GCC unroll 12
    for (int j = 0; j < R; ++j) {
      int32_t word;
      std::memcpy(&word, r[j] + 2 * k, sizeof(word));
#pragma GCC unroll 4
      for (int m = 0; m < MV; ++m) acc[j][m] = add_dots(acc[j][m], word, xv[m]);
    }
  };
  constexpr int kLines = (kTall + 3) / 4;
  Cursor cursor(ahead);
  int64_t k = 0;
  for (; k + 16 <= words; k += 16) {
    const bool due = cursor.due(k);
    for (int64_t u = 0; u < 16; u += 4) {
      if (due) cursor.some<kLines>(u / 4 * kLines);
#pragma GCC unroll 4
      for (int64_t v = 0; v < 4; ++v) step(k + u + v);
    }
    if (due) cursor.next();
  }
  for (; k < words; ++k) step(k);
#pragma GCC unroll 12
  for (int j = 0; j < R; ++j) {
#pragma GCC unroll 4
    for (int m = 0; m < MV; ++m) store(c + j * ldc + m * kLanes, acc[j][m]);
  }
}

// As outer<1>: one panel, [words][vectors * kLanes], times kTile rows, or kTall for up to two vectors.
inline void dots(const bf16* const* rows, int64_t height, const float* panel, int64_t vectors, int64_t words,
                 Ahead ahead, float* c, int64_t ldc) {
  if constexpr (kTall > kTile) {
    if (height == kTall && vectors == 2) return dots_tile<kTall, 2>(rows, panel, words, ahead, c, ldc);
    if (height == kTall) return dots_tile<kTall, 1>(rows, panel, words, ahead, c, ldc);
  }
  for (int64_t j = 0; j < kTile; j += kAcc) {
    if (vectors == 3) dots_tile<kAcc, 3>(rows + j, panel, words, ahead, c + j * ldc, ldc);
    else if (vectors == 2) dots_tile<kAcc, 2>(rows + j, panel, words, ahead, c + j * ldc, ldc);
    else dots_tile<kAcc, 1>(rows + j, panel, words, ahead, c + j * ldc, ldc);
    ahead.last = ahead.first;
  }
}

}  // namespace
