// Operands whose rows, rather than the elements of a row, are next to each other in memory: vectors hold rows then.
//
// Neighbours along k are far apart, so a piece of K and some rows is decoded as it lies, into tiles that outer reads one
// after another; or, for a few tokens, multiplied at once with all its sums in registers.
#pragma once

#include "gemm.h"
#include "gemm_codes.h"

namespace {

using ascend_deep_cpu::kProductDepth;
using ascend_deep_cpu::kProductRows;
using ascend_deep_cpu::Product;

constexpr int64_t kAcrossTile = kProductDepth * kTile + 16;  // floats of a staged tile, [k][kTile]
constexpr int64_t kAcrossTiles = kProductRows / kTile + 2;
constexpr int64_t kAcrossVectors = 4;  // of rows, for a few tokens

inline bool across(const Operand& w) {
  if (along_k(w)) return false;
  return w.row == unit_bytes(w.format) && (w.format != ascend_deep_cpu::kMatE2M1 || w.pairs_along_rows);
}

// Bytes of n neighbouring rows at one k; n is even for E2M1.
template <MatFormat F>
constexpr int64_t rows_bytes(int64_t n) {
  return F == ascend_deep_cpu::kMatF32 ? 4 * n : F == ascend_deep_cpu::kMatBF16 ? 2 * n : F == ascend_deep_cpu::kMatE4M3 ? n : n / 2;
}

template <MatFormat F>
AD_INLINE Vec load_rows(const char* p) {
  if constexpr (F == ascend_deep_cpu::kMatF32) return load(reinterpret_cast<const float*>(p));
  else if constexpr (F == ascend_deep_cpu::kMatBF16) return load(reinterpret_cast<const bf16*>(p));
  else if constexpr (F == ascend_deep_cpu::kMatE4M3) return e4m3(reinterpret_cast<const uint8_t*>(p));
  else return e2m1(reinterpret_cast<const uint8_t*>(p));
}

// The first n of them, zeros behind; reads nothing else.
template <MatFormat F>
AD_INLINE Vec load_rows(const char* p, int64_t n) {
  if (n >= kLanes) return load_rows<F>(p);
  char some[rows_bytes<F>(kLanes)] = {};
  if (n > 0) std::memcpy(some, p, rows_bytes<F>(n + (F == ascend_deep_cpu::kMatE2M1 ? n % 2 : 0)));
  const Vec v = load_rows<F>(some);
  Vec out = {};
  for (int64_t i = 0; i < n; ++i) out[i] = v[i];
  return out;
}

// Scales of rows [n, n + count) in one group of K.
inline void scales_across(const Operand& w, int64_t n, int64_t count, int64_t group, float* s) {
  for (int64_t i = 0; i < count;) {
    const float scale = scale_at(w, n + i, group);
    const int64_t end = min64(count, ((n + i) / w.gran_row + 1) * w.gran_row - n);
    for (; i < end; ++i) s[i] = scale;
  }
}

// Calls run(k0, k1, group) for the pieces of [k, end) that have one group of scales each.
template <typename Run>
AD_INLINE void each_group(const Operand& w, int64_t k, int64_t end, Run run) {
  if (w.sf == ascend_deep_cpu::kSfNone) return run(k, end, 0);
  int64_t group = (k + w.sf_shift) / w.gran_k;
  for (; k < end; ++group) {
    const int64_t stop = min64(end, (group + 1) * w.gran_k - w.sf_shift);
    run(k, stop, group);
    k = stop;
  }
}

// Rows [n0, n1), at most kProductRows, for elements [k0, k0 + depth): tile t begins at stage + t * kAcrossTile.
template <MatFormat F>
void stage_across(const Operand& w, int64_t n0, int64_t n1, int64_t k0, int64_t depth, float* stage) {
  float s[kProductRows + kLanes];
  const int64_t count = n1 - n0;
  const bool scaled = w.sf != ascend_deep_cpu::kSfNone;
  each_group(w, k0, k0 + depth, [&](int64_t from, int64_t to, int64_t group) {
    for (int64_t i = 0; i < count + kLanes; ++i) s[i] = 1.0f;
    if (scaled) scales_across(w, n0, count, group, s);
    for (int64_t k = from; k < to; ++k) {
      const char* p = w.base + k * w.col + rows_bytes<F>(n0);
      for (int64_t n = 0; n < count; n += kLanes) {
        Vec v = load_rows<F>(p + rows_bytes<F>(n), count - n);
        if (scaled) v *= load(s + n);
        constexpr int64_t kPart = kLanes < kTile ? kLanes : kTile;
        for (int64_t i = 0; i < kLanes; i += kPart) {
          float* at = stage + (n + i) / kTile * kAcrossTile + (k - k0) * kTile + (n + i) % kTile;
          std::memcpy(at, reinterpret_cast<const char*>(&v) + i * sizeof(float), kPart * sizeof(float));
        }
      }
    }
  });
}

inline void stage_across_any(const Operand& w, int64_t n0, int64_t n1, int64_t k0, int64_t depth, float* stage) {
  using namespace ascend_deep_cpu;
  switch (w.format) {
    case kMatF32: return stage_across<kMatF32>(w, n0, n1, k0, depth, stage);
    case kMatBF16: return stage_across<kMatBF16>(w, n0, n1, k0, depth, stage);
    case kMatE4M3: return stage_across<kMatE4M3>(w, n0, n1, k0, depth, stage);
    default: return stage_across<kMatE2M1>(w, n0, n1, k0, depth, stage);
  }
}

// out[m * ldo + i] for rows [n, n + count), count <= kAcrossVectors * kLanes, and tokens [m0, m0 + MB).
template <MatFormat F, int MB>
void few_across(const Product& a, int64_t m0, int64_t n, int64_t count, float* out, int64_t ldo) {
  constexpr int64_t kAll = kAcrossVectors * kLanes;
  const Operand& w = a.stream;
  const float* x = a.packed + m0 * a.pitch;
  Vec acc[MB][kAcrossVectors] = {};
  each_group(w, 0, a.depth, [&](int64_t from, int64_t to, int64_t group) __attribute__((always_inline)) {
    Vec sum[MB][kAcrossVectors] = {};
    for (int64_t k = from; k < to; ++k) {
      const char* p = w.base + k * w.col + rows_bytes<F>(n);
      for (int64_t b = 0; b < rows_bytes<F>(kAll); b += 64) __builtin_prefetch(p + 16 * w.col + b, 0, 2);
#pragma GCC unroll 4
      for (int64_t v = 0; v < kAcrossVectors; ++v) {
        const Vec wv = load_rows<F>(p + rows_bytes<F>(v * kLanes), count - v * kLanes);
#pragma GCC unroll 4
        for (int m = 0; m < MB; ++m) sum[m][v] += wv * x[m * a.pitch + k];
      }
    }
    float s[kAll];
    for (int64_t i = 0; i < kAll; ++i) s[i] = 1.0f;
    if (w.sf != ascend_deep_cpu::kSfNone) scales_across(w, n, count, group, s);
#pragma GCC unroll 4
    for (int64_t v = 0; v < kAcrossVectors; ++v) {
#pragma GCC unroll 4
      for (int m = 0; m < MB; ++m) acc[m][v] += sum[m][v] * load(s + v * kLanes);
    }
  });
#pragma GCC unroll 4
  for (int m = 0; m < MB; ++m) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kAcrossVectors; ++v) store(out + (m0 + m) * ldo + v * kLanes, acc[m][v]);
  }
}

// Stream rows [n0, n1) times all tokens, which are plain: out[m * ldo + n - n0]. Writes up to the next whole piece.
template <MatFormat F>
void few_across_all(const Product& a, int64_t n0, int64_t n1, float* out, int64_t ldo) {
  constexpr int64_t kAll = kAcrossVectors * kLanes;
  for (int64_t n = n0; n < n1; n += kAll) {
    const int64_t count = min64(kAll, n1 - n);
    int64_t m = 0;
    for (; m + 2 <= a.plain; m += 2) few_across<F, 2>(a, m, n, count, out + (n - n0), ldo);
    if (m < a.plain) few_across<F, 1>(a, m, n, count, out + (n - n0), ldo);
  }
}

inline void few_across_any(const Product& a, int64_t n0, int64_t n1, float* out, int64_t ldo) {
  using namespace ascend_deep_cpu;
  switch (a.stream.format) {
    case kMatF32: return few_across_all<kMatF32>(a, n0, n1, out, ldo);
    case kMatBF16: return few_across_all<kMatBF16>(a, n0, n1, out, ldo);
    case kMatE4M3: return few_across_all<kMatE4M3>(a, n0, n1, out, ldo);
    default: return few_across_all<kMatE2M1>(a, n0, n1, out, ldo);
  }
}

// to[k * width + i] = element k of row n + i, for count <= kLanes rows, zeros behind them, without scales.
template <MatFormat F>
void pack_across(const Operand& x, int64_t n, int64_t count, int64_t depth, int64_t width, float* to) {
  const char* p = x.base + rows_bytes<F>(n);
  for (int64_t k = 0; k < depth; ++k) store(to + k * width, load_rows<F>(p + k * x.col, count));
}

inline void pack_across_any(const Operand& x, int64_t n, int64_t count, int64_t depth, int64_t width, float* to) {
  using namespace ascend_deep_cpu;
  switch (x.format) {
    case kMatF32: return pack_across<kMatF32>(x, n, count, depth, width, to);
    case kMatBF16: return pack_across<kMatBF16>(x, n, count, depth, width, to);
    case kMatE4M3: return pack_across<kMatE4M3>(x, n, count, depth, width, to);
    default: return pack_across<kMatE2M1>(x, n, count, depth, width, to);
  }
}

}  // namespace
