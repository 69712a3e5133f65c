// Quantisation to E4M3 and E2M1 with a scale for every block, and back. The rule is that of ops/_quant.py.
#pragma once

#include "gemm_codes.h"
#include "vmath.h"

namespace {

using ascend_deep_cpu::Dequantise;
using ascend_deep_cpu::Quantise;

// To nearest even, saturating at 448; NaN is 0x7f with its sign.
AD_INLINE UVec e4m3_code(Vec v) {
  const UVec sign = (reinterpret_cast<UVec>(v) >> 24) & 0x80u;
  const Vec a = at_most(vabs(v), splat(448.0f));
  const UVec bits = reinterpret_cast<UVec>(a);
  const UVec normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 a code is a multiple of 2^-9; adding 1.5 * 2^23 rounds to the nearest integer.
  const UVec small = reinterpret_cast<UVec>(a * 0x1p9f + 12582912.0f) - 0x4b400000u;
  const UVec code = a < splat(0x1p-6f) ? small : normal;
  return (v == v ? code : UVec{} + 0x7fu) | sign;
}

// To nearest, ties to the even code, saturating at 6; -0 is +0, NaN is 6.
AD_INLINE UVec e2m1_code(Vec v) {
  const Vec a = vabs(v);
  IVec code = IVec{} + 7;
  // A comparison gives -1 where it holds: the midpoints that a is not above, one by one.
  code += a <= splat(0.25f);
  code += a < splat(0.75f);
  code += a <= splat(1.25f);
  code += a < splat(1.75f);
  code += a <= splat(2.5f);
  code += a < splat(3.5f);
  code += a <= splat(5.0f);
  const IVec sign = ((v < splat(0.0f)) & (code > 0)) & 8;
  return reinterpret_cast<UVec>(code | sign);
}

AD_INLINE Vec load_any(const char* p, Dtype dtype, int64_t n) {
  if (dtype == ascend_deep_cpu::kBF16) return load_n(reinterpret_cast<const bf16*>(p), n);
  return load_n(reinterpret_cast<const float*>(p), n);
}

AD_INLINE float float_at(const char* p, Dtype dtype) {
  return load_as_float(p, 0, dtype);
}

// Columns [k, k + n) of row r of what is quantised.
inline void source_row(const Quantise& a, int64_t r, int64_t k, int64_t n, float* to) {
  const int64_t size = a.dtype == ascend_deep_cpu::kF32 ? 4 : 2;
  const char* row = a.x + r * a.x_row;
  if (!a.gated) {
    if (a.x_col == size && a.dtype != ascend_deep_cpu::kF16) {
      for (int64_t i = 0; i < n; i += kLanes) store_n(to + i, load_any(row + (k + i) * size, a.dtype, n - i), n - i);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = float_at(row + (k + i) * a.x_col, a.dtype);
    }
    return;
  }
  const Vec weight = splat(a.row_weight ? a.row_weight[r] : 1.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t left = min64(kLanes, n - i), at = k + i;
    float gate[kLanes] = {}, up[kLanes] = {};
    if (a.interleaved) {
      for (int64_t j = 0; j < left; ++j) {
        gate[j] = float_at(row + 2 * (at + j) * size, a.dtype);
        up[j] = float_at(row + (2 * (at + j) + 1) * size, a.dtype);
      }
    } else {
      store(gate, load_any(row + at * size, a.dtype, left));
      store(up, load_any(row + (a.columns + at) * size, a.dtype, left));
    }
    store_n(to + i, activate_gated(load(gate), load(up), a.act) * weight, left);
  }
}

inline float block_scale(const Quantise& a, float largest) {
  const float least = 1e-4f;
  float s = (largest < least ? least : largest) / (a.fp4 ? 6.0f : 448.0f);  // NaN stays NaN
  if (!a.ue8m0) return s;
  uint32_t bits;
  std::memcpy(&bits, &s, 4);
  const int64_t e = ((bits >> 23) & 255) + ((bits & 0x7fffff) != 0);
  bits = static_cast<uint32_t>(max64(1, min64(e, 254))) << 23;
  std::memcpy(&s, &bits, 4);
  return s;
}

inline void write_scale(const Quantise& a, int64_t row, int64_t group, float s) {
  if (a.sf == ascend_deep_cpu::kSfF32) {
    static_cast<float*>(a.scales)[row * a.sf_row + group * a.sf_col] = s;
    return;
  }
  const int64_t per = a.sf == ascend_deep_cpu::kSfUe8m0x4 ? 4 : 2;
  uint32_t bits;
  std::memcpy(&bits, &s, 4);
  uint8_t* word = static_cast<uint8_t*>(a.scales) + per * (row * a.sf_row + group / per * a.sf_col);
  word[group % per] = static_cast<uint8_t>(bits >> 23);
}

inline void write_codes(const Quantise& a, int64_t r, int64_t k, int64_t n, const float* v, float by) {
  uint8_t codes[kLanes];
  if (!a.fp4) {
    uint8_t* to = a.data + r * a.columns + k;
    for (int64_t i = 0; i < n; i += kLanes) {
      const int64_t left = min64(kLanes, n - i);
      *reinterpret_cast<CodesU*>(codes) = __builtin_convertvector(e4m3_code(load_n(v + i, left) * by), Codes);
      std::memcpy(to + i, codes, left);
    }
    return;
  }
  // Pairs begin at even columns; a block may not.
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t left = min64(kLanes, n - i);
    *reinterpret_cast<CodesU*>(codes) = __builtin_convertvector(e2m1_code(load_n(v + i, left) * by), Codes);
    for (int64_t j = 0; j < left; ++j) {
      uint8_t* to = a.data + (r * a.columns + k + i + j) / 2;
      if ((k + i + j) % 2) *to = static_cast<uint8_t>((*to & 15) | codes[j] << 4);
      else *to = codes[j];
    }
  }
}

size_t quantise_scratch(const Quantise& a) {
  return static_cast<size_t>(min64(a.gran_row, a.rows)) * round_up(min64(a.gran_k, a.columns), kLanes) * sizeof(float);
}

void quantise(const Quantise& a, int64_t begin, int64_t end, void* scratch) {
  float* block = static_cast<float*>(scratch);
  const int64_t pitch = round_up(min64(a.gran_k, a.columns), kLanes);
  for (int64_t b = begin; b < end; ++b) {
    const int64_t r0 = b * a.gran_row, r1 = min64(r0 + a.gran_row, a.rows);
    for (int64_t k = 0, group = 0; k < a.columns; k += a.gran_k, ++group) {
      const int64_t n = min64(a.gran_k, a.columns - k);
      // Magnitudes compare like their bits, and NaN above all.
      UVec top = {};
      for (int64_t r = r0; r < r1; ++r) {
        float* row = block + (r - r0) * pitch;
        source_row(a, r, k, n, row);
        for (int64_t i = 0; i < n; i += kLanes) {
          const UVec bits = reinterpret_cast<UVec>(load_n(row + i, n - i)) & 0x7fffffffu;
          top = bits > top ? bits : top;
        }
      }
      uint32_t most = 0;
      for (int64_t i = 0; i < kLanes; ++i) most = top[i] > most ? top[i] : most;
      float largest;
      std::memcpy(&largest, &most, 4);
      const float s = block_scale(a, largest);
      write_scale(a, b, group, s);
      for (int64_t r = r0; r < r1; ++r) write_codes(a, r, k, n, block + (r - r0) * pitch, 1.0f / s);
    }
  }
}

void dequantise(const Dequantise& a, int64_t begin, int64_t end) {
  constexpr int64_t kPiece = 1024;
  float row[kPiece];
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t k = 0; k < a.columns; k += kPiece) {
      const int64_t n = min64(kPiece, a.columns - k);
      const int64_t at = r * a.columns + k;
      decode_row(a.x, r, k, n, row);
      if (a.dtype == ascend_deep_cpu::kF32) {
        std::memcpy(static_cast<float*>(a.out) + at, row, n * sizeof(float));
      } else {
        for (int64_t i = 0; i < n; i += kLanes) store_n(static_cast<bf16*>(a.out) + at + i, load_n(row + i, n - i), n - i);
      }
    }
  }
}

// out[r] = sum of the squares of elements [k0, k1) of row r
void squares(const Operand& x, int64_t begin, int64_t end, int64_t k0, int64_t k1, float* out) {
  constexpr int64_t kPiece = 1024;
  float row[kPiece];
  for (int64_t r = begin; r < end; ++r) {
    Vec sum = {};
    for (int64_t k = k0; k < k1; k += kPiece) {
      const int64_t n = min64(kPiece, k1 - k);
      decode_row(x, r, k, n, row);
      for (int64_t i = 0; i < n; i += kLanes) {
        const Vec v = load_n(row + i, n - i);
        sum += v * v;
      }
    }
    out[r] = lane_sum(sum);
  }
}

}  // namespace
