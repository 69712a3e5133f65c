// Products of a few tokens with rows of codes, which are multiplied as they are decoded: the decode step of a model.
//
// A row, or kRunRows of them, runs over the whole of K. The scale of a block is applied to the sum over a step.
#pragma once

#include "gemm_dots.h"

namespace {

using ascend_deep_cpu::Product;

constexpr int64_t kRunRows = 4;                       // multiplied at a time: their sums stay in registers
constexpr int64_t kCodedRows = kLanes == 16 ? 8 : 4;  // whose lanes are added up at a time
static_assert(kCodedRows % kRunRows == 0, "whole runs");
constexpr int64_t kAheadBytes = 6144;

// Whether one token is multiplied row by row, as memory likes best: rows that are long enough to be worth it, as long as
// the token stays in the first cache beside them.
template <typename F>
constexpr bool row_by_row(int64_t tokens, int64_t depth) {
  return tokens == 1 && depth >= F::kRowByRow[0] && depth <= F::kRowByRow[1];
}

// Row `row` of the scales as float32 in `space`, unless it is that where it lies: one for each group.
inline const float* scale_row(const Operand& x, int64_t row, int64_t groups, float* space) {
  using namespace ascend_deep_cpu;
  if (x.sf == kSfF32 && (x.sf_col == 1 || groups == 1)) {
    return reinterpret_cast<const float*>(x.sf_base) + row * x.sf_row + x.sf_shift / x.gran_k;
  }
  const int64_t shift = x.sf_shift / x.gran_k;
  int64_t g = 0;
  if (x.sf == kSfUe8m0x4 && shift == 0) {
    typedef uint8_t Four __attribute__((vector_size(4)));
    typedef uint32_t Words __attribute__((vector_size(16)));
    typedef uint32_t WordsU __attribute__((vector_size(16), aligned(4), may_alias));
    const char* p = x.sf_base + 4 * row * x.sf_row;
    for (; g + 4 <= groups; g += 4, p += 4 * x.sf_col) {
      Four four;
      std::memcpy(&four, p, 4);
      const Words c = __builtin_convertvector(four, Words);
      Words bits = c << 23;
      bits = c == 0u ? Words{} + 0x00400000u : bits;
      bits = c == 255u ? Words{} + 0x7fc00000u : bits;
      *reinterpret_cast<WordsU*>(space + g) = bits;
    }
  }
  for (; g < groups; ++g) space[g] = scale_at(x, row * x.gran_row, g + shift);
  return space;
}

// Which scales belong to a step: one, one for each half of the E4M3 vectors, or one for each part of the lanes.
enum Spread32 { kWhole, kHalves, kParts };

template <typename F>
constexpr Spread32 spread_of_32() {
  if (F::kStep <= 32) return kWhole;
  return !F::kDots && F::kVectors == 4 ? kHalves : kParts;
}

// The scales of the groups of 32 elements of a step, each for as many lanes as it has.
template <typename F>
AD_INLINE Vec part_scales(const float* s) {
#if ASCEND_DEEP_LANES == 16
  if constexpr (F::kStep == 64) {
    double two;
    std::memcpy(&two, s, sizeof(two));
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return reinterpret_cast<Vec>(_mm512_permutevar_ps(_mm512_castpd_ps(_mm512_set1_pd(two)), halves));
  }
  const __m512 four = _mm512_broadcast_f32x4(_mm_loadu_ps(s));
  return reinterpret_cast<Vec>(
      _mm512_permutevar_ps(four, _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)));
#elif ASCEND_DEEP_LANES == 8
  return Vec{s[0], s[0], s[0], s[0], s[1], s[1], s[1], s[1]};
#else
  return splat(s[0]);
#endif
}

// One step of one row onto acc[m], for MB tokens.
template <typename F, int MB, Spread32 kSpread>
AD_INLINE void code_step(BVec codes, const float* s, const float* x, int64_t pitch, Vec* acc, int64_t stride) {
  typename F::Part w[F::kVectors];
  F::decode(codes, w);
#pragma GCC unroll 4
  for (int m = 0; m < MB; ++m) {
    const float* xm = x + m * pitch;
    if constexpr (kSpread == kHalves) {
      const Vec lower = w[0] * load(xm) + w[2] * load(xm + 2 * kLanes);
      const Vec upper = w[1] * load(xm + kLanes) + w[3] * load(xm + 3 * kLanes);
      acc[m * stride] += lower * s[0];
      acc[m * stride] += upper * s[1];
    } else {
      const Vec sum = step_product(w, xm);
      if constexpr (kSpread == kParts) acc[m * stride] += sum * part_scales<F>(s);
      else acc[m * stride] += sum * s[0];
    }
  }
}

// What rows of codes share in a product.
struct CodedRun {
  int64_t every;            // steps that share a scale, if one belongs to a step
  const float* x;           // tokens, `pitch` apart
  int64_t pitch, depth;
  int64_t ahead, sf_ahead;  // what is prefetched: bytes of codes, and scales
};

// R rows times MB tokens: sums of lanes acc[m * stride + j] and NaN seen[j].
template <typename F, int MB, int R, Spread32 kSpread>
AD_INLINE void coded_run(const uint8_t* const* rows, const float* const* scales, const CodedRun& run, Vec* sums,
                         int64_t stride, BVec* had_nan) {
  constexpr int64_t kGroups = kSpread == kWhole ? 1 : F::kStep / 32;  // scales of a step
  constexpr int64_t kPer = F::kStep / kStepBytes;                    // elements of a byte
  Vec acc[MB][R] = {};
  BVec seen[R] = {};
  const uint8_t* r[R];
  const float* s[R];
#pragma GCC unroll 4
  for (int64_t j = 0; j < R; ++j) r[j] = rows[j], s[j] = scales[j];
  const float* x = run.x;
  int64_t k = 0, left = run.every;
  for (; k + F::kStep <= run.depth; k += F::kStep) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < R; ++j) {
      __builtin_prefetch(r[j] + run.ahead, 0, R == 1 ? 3 : 2);
      if constexpr (kGroups > 1) __builtin_prefetch(s[j] + run.sf_ahead, 0, 3);
      const BVec codes = *reinterpret_cast<const BVecU*>(r[j]);
      if constexpr (F::kWatched) watch_nan(codes, seen[j]);
      code_step<F, MB, kSpread>(codes, s[j], x, run.pitch, &acc[0][j], R);
      r[j] += kStepBytes;
      if constexpr (kGroups > 1) s[j] += kGroups;
    }
    x += F::kTokenStep;
    if (kGroups == 1 && --left == 0) {
      left = run.every;
#pragma GCC unroll 4
      for (int64_t j = 0; j < R; ++j) ++s[j];
    }
  }
  if (k < run.depth) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < R; ++j) {
      alignas(64) uint8_t last[kStepBytes] = {};
      float part[4] = {};
      std::memcpy(last, r[j], (run.depth - k + kPer - 1) / kPer);
      for (int64_t g = 0; g < kGroups && (g == 0 || 32 * g < run.depth - k); ++g) part[g] = s[j][g];
      const BVec codes = *reinterpret_cast<const BVecU*>(last);
      if constexpr (F::kWatched) watch_nan(codes, seen[j]);
      code_step<F, MB, kSpread>(codes, part, x, run.pitch, &acc[0][j], R);
    }
  }
  // Indexed by constants only, or the sums would be in memory all along.
#pragma GCC unroll 4
  for (int64_t j = 0; j < R; ++j) {
    had_nan[j] = seen[j];
#pragma GCC unroll 4
    for (int m = 0; m < MB; ++m) sums[m * stride + j] = acc[m][j];
  }
}

// kCodedRows rows of codes times MB tokens; out[m * ldo + j].
template <typename F, int MB, Spread32 kSpread>
void coded_rows(const uint8_t* const* rows, const float* const* scales, const CodedRun& run, float* out, int64_t ldo) {
  constexpr int kSums = static_cast<int>(kCodedRows);
  Vec sums[MB][kSums];
  BVec seen[kCodedRows];
  if (row_by_row<F>(MB, run.depth)) {
    for (int64_t j = 0; j < kCodedRows; ++j) {
      coded_run<F, 1, 1, kSpread>(rows + j, scales + j, run, &sums[0][j], kSums, seen + j);
    }
  } else {
    for (int64_t j = 0; j < kCodedRows; j += kRunRows) {
      coded_run<F, MB, kRunRows, kSpread>(rows + j, scales + j, run, &sums[0][j], kSums, seen + j);
    }
  }
  for (int m = 0; m < MB; ++m) {
    for (int64_t j = 0; j < kCodedRows; ++j) sums[m][j] *= 1.0f / F::kUnit;
    float all[kSums];
    lane_sums<kSums>(sums[m], all);
    std::memcpy(out + m * ldo, all, sizeof(all));
  }
  if constexpr (F::kWatched) {
    BVec any = seen[0];
    for (int64_t j = 1; j < kCodedRows; ++j) any = seen[j] > any ? seen[j] : any;
    if (!saw_nan(any)) return;
    for (int64_t j = 0; j < kCodedRows; ++j) {
      for (int m = 0; m < MB && saw_nan(seen[j]); ++m) out[m * ldo + j] = NAN;
    }
  }
}

template <typename F, Spread32 kSpread>
void coded_tokens(const uint8_t* const* rows, const float* const* scales, const CodedRun& run, int64_t tokens, float* out,
                  int64_t ldo) {
  if (tokens == 3) coded_rows<F, 3, kSpread>(rows, scales, run, out, ldo);
  else if (tokens == 2) coded_rows<F, 2, kSpread>(rows, scales, run, out, ldo);
  else coded_rows<F, 1, kSpread>(rows, scales, run, out, ldo);
}

// Elements of a step if scales of this granularity can be applied to the sum of one, or of parts of one; otherwise 0.
inline int64_t code_step_of(MatFormat f) {
  return f == ascend_deep_cpu::kMatE4M3 ? kStepE4M3 : f == ascend_deep_cpu::kMatE2M1 ? kStepE2M1 : 0;
}

// out[token][n - n0] of stream rows [n0, n1), n1 - n0 <= ldo - kCodedRows. `space`: kCodedRows rows of scales.
template <typename F>
void coded_product(const Product& a, int64_t n0, int64_t n1, float* space, float* out, int64_t ldo) {
  const Operand& w = a.stream;
  const bool scaled = w.sf != ascend_deep_cpu::kSfNone;
  const int64_t gran = scaled ? w.gran_k : F::kStep;
  const int64_t groups = scaled ? (a.depth + gran - 1) / gran : 0;
  const bool fine = gran % F::kStep != 0;
  static const float one[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  const int64_t every = !scaled ? INT64_MAX : fine ? 1 : gran / F::kStep;
  // The row of scales in use, and where the next one begins; a division takes as long as a hundred products.
  int64_t block = n0 / w.gran_row - 1, edge = (block + 1) * w.gran_row;
  const float* current = one;
  // What is prefetched is in the rows that come next, some kilobytes away.
  const bool alone = row_by_row<F>(a.plain, a.depth);
  const int64_t tile = alone ? w.row : kRunRows * w.row, tiles = max64(1, kAheadBytes / max64(tile, 1));
  CodedRun run{every, a.packed, a.pitch, a.depth, tile * tiles, 0};
  if (w.sf == ascend_deep_cpu::kSfF32 && w.sf_col == 1 && w.gran_row == 1) {
    run.sf_ahead = (alone ? 1 : kRunRows) * tiles * w.sf_row;
  }
  for (int64_t n = n0; n < n1; n += kCodedRows) {
    const uint8_t* rows[kCodedRows];
    const float* scales[kCodedRows];
    for (int64_t j = 0; j < kCodedRows; ++j) {
      const int64_t r = min64(n + j, n1 - 1);
      rows[j] = reinterpret_cast<const uint8_t*>(w.base) + r * w.row;
      if (scaled && r >= edge) {
        // Few scales may be in `space` at a time, so rows that share one also share the place.
        ++block;
        current = scale_row(w, block, groups, space + block % (kCodedRows + 1) * groups);
        edge += w.gran_row;
      }
      scales[j] = current;
    }
    if (fine) coded_tokens<F, spread_of_32<F>()>(rows, scales, run, a.plain, out + (n - n0), ldo);
    else coded_tokens<F, kWhole>(rows, scales, run, a.plain, out + (n - n0), ldo);
  }
}

inline void coded_product_any(const Product& a, int64_t n0, int64_t n1, float* space, float* out, int64_t ldo) {
  const bool e4m3_codes = a.stream.format == ascend_deep_cpu::kMatE4M3;
#if ASCEND_DEEP_LANES == 16 && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  if (a.dots && e4m3_codes) return coded_product<E4M3Dots>(a, n0, n1, space, out, ldo);
  if (a.dots) return coded_product<E2M1Dots>(a, n0, n1, space, out, ldo);
#endif
  if (e4m3_codes) coded_product<E4M3>(a, n0, n1, space, out, ldo);
  else coded_product<E2M1>(a, n0, n1, space, out, ldo);
}

}  // namespace
