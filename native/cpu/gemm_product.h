// Packing of tokens, products of staged stream rows with them, and what becomes of the sums.
//
// Tokens are panels, as in experts.h, and plain rows. kTile stream rows at a time are decoded into the first cache for a
// piece of K, and multiplied with all tokens. The sums wait as c[row][token] and row_c[token][row] until K is done, so
// every element is rounded once.
#pragma once

#include "gemm_across.h"
#include "gemm_coded.h"

namespace {

using ascend_deep_cpu::Dtype;
using ascend_deep_cpu::kBF16;

// ---- packing -------------------------------------------------------------------------------------------------------

AD_INLINE int64_t token_row(const Product& a, int64_t i) { return a.index ? a.index[a.first + i] : a.first + i; }

// kLanes tokens from `from` on, for a panel of `width` tokens: to[k * width + token].
inline void pack_vector(const Product& a, int64_t from, int64_t width, float* to, float* space) {
  const Operand& x = a.tokens;
  const int64_t count = min64(kLanes, a.count - from);
  constexpr int64_t kPiece = 256;
  // Pairs of codes begin at even rows.
  if (across(x) && !a.index && (x.format != ascend_deep_cpu::kMatE2M1 || (a.first + from) % 2 == 0)) {
    pack_across_any(x, a.first + from, count, a.depth, width, to);
    for (int64_t i = 0; i < count; ++i) apply_scales(x, a.first + from + i, 0, a.depth, to + i, width);
    return;
  }
  for (int64_t k0 = 0; k0 < a.depth; k0 += kPiece) {
    const int64_t n = min64(kPiece, a.depth - k0);
    for (int64_t i = 0; i < kLanes; ++i) {
      if (i < count) decode_row(x, token_row(a, from + i), k0, n, space + i * kPiece);
      else std::memset(space + i * kPiece, 0, n * sizeof(float));
    }
    for (int64_t k = 0; k < n; k += kLanes) {
      Vec t[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) t[i] = load_n(space + i * kPiece + k, n - k);
      transpose(t);
      for (int64_t i = 0; i < min64(kLanes, n - k); ++i) store(to + (k0 + k + i) * width, t[i]);
    }
  }
}

inline void pack_plain(const Product& a, int64_t i, float* to) {
  if (a.dots) return pack_dots_any(a.tokens, token_row(a, a.panels + i), a.depth, a.stream.format, to);
  decode_row(a.tokens, token_row(a, a.panels + i), 0, a.depth, to);
  for (int64_t k = a.depth; k < a.pitch; ++k) to[k] = 0.0f;
  if (!a.coded) return;
  const int64_t step = code_step_of(a.stream.format);
  float placed[kStepE2M1];
  for (int64_t k = 0; k < a.pitch; k += step) {
    if (a.stream.format == ascend_deep_cpu::kMatE4M3) place_e4m3(to + k, placed);
    else place_e2m1(to + k, placed);
    std::memcpy(to + k, placed, step * sizeof(float));
  }
}

// Vectors of panels, then plain rows.
void pack(const Product& a, int64_t begin, int64_t end, void* scratch) {
  const int64_t vectors = a.panels / kLanes;
  int64_t m = 0;  // of the panel that holds vector i
  for (int64_t i = begin; i < end; ++i) {
    if (i >= vectors) {
      pack_plain(a, i - vectors, a.packed + a.panels * a.depth + (i - vectors) * a.pitch);
      continue;
    }
    int64_t width = split((a.panels - m) / kLanes) * kLanes;
    while (i * kLanes >= m + width) {
      m += width;
      width = split((a.panels - m) / kLanes) * kLanes;
    }
    pack_vector(a, i * kLanes, width, a.packed + m * a.depth + (i * kLanes - m), static_cast<float*>(scratch));
  }
}

// ---- results -------------------------------------------------------------------------------------------------------

template <typename T>
AD_INLINE void finish(const Product& a, int64_t token, int64_t row, Vec v, int64_t n, int64_t d_step, int64_t c_step) {
  const int64_t t = token_row(a, token);
  T* d = static_cast<T*>(a.d) + t * a.d_token + row * a.d_row;
  v *= a.alpha;
  if (a.c) {
    const T* c = static_cast<const T*>(a.c) + t * a.c_token + row * a.c_row;
    if (c_step == 1) {
      v += load_n(c, n);
    } else {
      for (int64_t i = 0; i < min64(n, kLanes); ++i) v[i] += to_float(c[i * c_step]);
    }
  }
  if (d_step == 1) {
    store_n(d, v, n);
  } else {
    T value[kLanes];
    store(value, v);
    for (int64_t i = 0; i < min64(n, kLanes); ++i) d[i * d_step] = value[i];
  }
}

// c[row - n0][token] of the panels to D.
template <typename T>
void finish_panels(const Product& a, int64_t n0, int64_t n1, const float* c) {
  const int64_t ldc = a.panels, count = min64(a.panels, a.count);
  if (a.d_token == 1 && !a.index) {
    for (int64_t n = n0; n < n1; ++n) {
      for (int64_t m = 0; m < count; m += kLanes) {
        finish<T>(a, m, n, load(c + (n - n0) * ldc + m), count - m, 1, a.c_token);
      }
    }
    return;
  }
  for (int64_t m = 0; m < count; m += kLanes) {
    for (int64_t n = n0; n < n1; n += kLanes) {
      Vec t[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) t[i] = n + i < n1 ? load(c + (n + i - n0) * ldc + m) : Vec{};
      transpose(t);
      for (int64_t i = 0; i < min64(kLanes, count - m); ++i) finish<T>(a, m + i, n, t[i], n1 - n, a.d_row, a.c_row);
    }
  }
}

// row_c[token][row - n0] of the plain rows to D; readable up to the next multiple of kLanes.
template <typename T>
void finish_plain(const Product& a, int64_t n0, int64_t n1, const float* c, int64_t ldc) {
  for (int64_t m = 0; m < a.plain; ++m) {
    for (int64_t n = n0; n < n1; n += kLanes) {
      finish<T>(a, a.panels + m, n, load(c + m * ldc + (n - n0)), n1 - n, a.d_row, a.c_row);
    }
  }
}

inline void finish_any(const Product& a, int64_t n0, int64_t n1, const float* c, const float* row_c, int64_t ldr) {
  if (a.dtype == kBF16) {
    finish_panels<bf16>(a, n0, n1, c);
    finish_plain<bf16>(a, n0, n1, row_c, ldr);
  } else {
    finish_panels<float>(a, n0, n1, c);
    finish_plain<float>(a, n0, n1, row_c, ldr);
  }
}

// ---- staged products -----------------------------------------------------------------------------------------------

constexpr int64_t kRowPitch = kProductRows + 64;     // of row_c; kernels write whole vectors
constexpr int64_t kStagePitch = kProductDepth + 16;  // not a power of two: rows would share the sets of the cache

// Per-thread scratch, in floats.
struct ProductLayout {
  int64_t stage, c, row_c, scales, total;
  explicit ProductLayout(const Product& a) {
    stage = 0;
    c = stage + (across(a.stream) ? kAcrossTiles * kAcrossTile : kTile * kStagePitch);
    row_c = c + a.panels * (kProductRows + kLanes);
    scales = row_c + kRowPitch * (a.plain + 1);
    const int64_t groups = a.coded ? a.depth / a.stream.gran_k + 8 : 0;
    total = round_up(max64(scales + (kCodedRows + 1) * groups, kLanes * 256), 16);
  }
};

// Stream rows [n, n + kTile) for elements [k, k + depth), as pointers to floats. Rows behind `end` repeat the last one.
inline void stage_tile(const Operand& w, int64_t n, int64_t end, int64_t k, int64_t depth, float* stage,
                       const float** r) {
  const int64_t height = min64(kTile, end - n);
  const bool direct = along_k(w) && w.format == ascend_deep_cpu::kMatF32 && w.sf == ascend_deep_cpu::kSfNone;
  for (int64_t j = 0; j < kTile; ++j) {
    const int64_t row = n + min64(j, height - 1);
    if (direct) {
      r[j] = reinterpret_cast<const float*>(w.base + row * w.row) + k;
    } else {
      r[j] = stage + min64(j, height - 1) * kStagePitch;
      if (j < height) decode_row(w, row, k, depth, stage + j * kStagePitch);
    }
  }
}

// The lines of the next tile, spread over the products of this one in proportion to their time.
class AheadOf {
 public:
  AheadOf(const Operand& w, int64_t n, int64_t end, int64_t k, int64_t cost) : total_(cost) {
    if (n >= end || !along_k(w)) return;
    const int64_t bytes = w.format == ascend_deep_cpu::kMatE2M1 ? k / 2 : k * unit_bytes(w.format);
    ahead_.base = w.base + n * w.row + bytes;
    ahead_.step = w.row;
    ahead_.every = w.format == ascend_deep_cpu::kMatE2M1 ? 128 : 64 / unit_bytes(w.format);
    lines_ = min64(kTile, end - n);
  }
  const Ahead& take(int64_t cost) {
    ahead_.first = lines_ * done_ / total_;
    done_ += cost;
    ahead_.last = lines_ * done_ / total_;
    return ahead_;
  }

 private:
  Ahead ahead_;
  int64_t lines_ = 0, total_, done_ = 0;
};

template <int SK>
void tile_panels(const Product& a, const float* const* r, int64_t k, int64_t depth, AheadOf& ahead, float* c) {
  for (int64_t m = 0; m < a.panels;) {
    const int64_t vectors = split((a.panels - m) / kLanes), width = vectors * kLanes;
    outer<SK>(r, kTile, a.packed + m * a.depth + k * width, vectors, depth, k > 0, ahead.take(width), c + m, a.panels);
    m += width;
  }
}

inline void tile_plain(const Product& a, const float* const* r, int64_t k, int64_t depth, AheadOf& ahead, float* row_c) {
  const float* x = a.packed + a.panels * a.depth + k;
  for (int64_t m = 0; m < a.plain;) {
    const int64_t step = split(a.plain - m);
    float sums[3 * kTile];
    dot8(r, x + m * a.pitch, a.pitch, step, depth, ahead.take(2 * step), sums, kTile);
    for (int64_t i = 0; i < step; ++i) {
      float* to = row_c + (m + i) * kRowPitch;
      for (int64_t j = 0; j < kTile; ++j) to[j] = k ? to[j] + sums[i * kTile + j] : sums[i * kTile + j];
    }
    m += step;
  }
}

inline void staged_product(const Product& a, int64_t n0, int64_t n1, float* s) {
  const ProductLayout at(a);
  const Operand& w = a.stream;
  const bool wide = across(w);
  float *stage = s + at.stage, *c = s + at.c, *row_c = s + at.row_c;
  if (a.depth == 0) std::memset(c, 0, (at.scales - at.c) * sizeof(float));
  for (int64_t k = 0; k < a.depth; k += kProductDepth) {
    const int64_t depth = min64(kProductDepth, a.depth - k);
    if (wide) stage_across_any(w, n0, n1, k, depth, stage);
    for (int64_t n = n0; n < n1; n += kTile) {
      const float* r[kTile];
      AheadOf ahead(w, n + kTile, n1, k, a.panels + 2 * a.plain);
      if (wide) {
        for (int64_t j = 0; j < kTile; ++j) r[j] = stage + (n - n0) / kTile * kAcrossTile + j;
        tile_panels<kTile>(a, r, k, depth, ahead, c + (n - n0) * a.panels);
        continue;
      }
      stage_tile(w, n, n1, k, depth, stage, r);
      tile_panels<1>(a, r, k, depth, ahead, c + (n - n0) * a.panels);
      if (a.plain) tile_plain(a, r, k, depth, ahead, row_c + (n - n0));
    }
  }
  finish_any(a, n0, n1, c, row_c, kRowPitch);
}

size_t product_scratch(const Product& a) { return ProductLayout(a).total * sizeof(float); }

void product(const Product& a, int64_t n0, int64_t n1, void* scratch) {
  float* s = static_cast<float*>(scratch);
  const ProductLayout at(a);
  for (int64_t n = n0; n < n1; n += kProductRows) {
    const int64_t end = min64(n1, n + kProductRows);
    float* out = s + at.row_c;
    if (!a.coded && across(a.stream) && a.plain) {
      few_across_any(a, n, end, out, kRowPitch);
      finish_any(a, n, end, nullptr, out, kRowPitch);
      continue;
    }
    if (!a.coded) {
      staged_product(a, n, end, s);
      continue;
    }
    coded_product_any(a, n, end, s + at.scales, out, kRowPitch);
    finish_any(a, n, end, nullptr, out, kRowPitch);
  }
}

}  // namespace
