// Attention over selected keys for one instruction set: a row at a time, for the query heads of one key head.
//
//   1. the keys of the row that some head sees, in the order of the list
//   2. logits [head][key]: by panels as in mqa.h for many heads, by dot products for few
//   3. softmax over the list, in float32
//   4. sums of values, a block of keys at a time, so that their rows stay in the second-level cache
#pragma once

#include "mqa.h"
#include "vmath.h"

namespace {

using ascend_deep_cpu::SparseAttention;

constexpr int64_t kFewHeads = 4;      // below that many heads a panel is not worth its packing
constexpr int64_t kValueBlock = 64;   // keys in a block of step 4
constexpr int64_t kValueVectors = kLanes == 16 ? 3 : 2;

struct AttentionLayout {
  int64_t keys, query, panel, stage, logits, sums, list, total;  // floats; `keys` is K rounded up
  explicit AttentionLayout(const SparseAttention& a) {
    const int64_t wide = round_up(a.depth, kLanes);
    keys = round_up(a.topk, kPanel);
    query = 0;
    panel = round_up(a.task_heads * wide, 16);
    stage = panel + wide * kPanel;
    logits = stage + kLanes * wide;
    sums = logits + a.task_heads * keys;
    list = sums + a.task_heads * round_up(a.value_depth, kLanes);
    total = round_up(list + 2 * a.topk, 16);
  }
};

size_t sparse_attention_scratch(const SparseAttention& a) { return AttentionLayout(a).total * sizeof(float); }

AD_INLINE bool hides(const SparseAttention& a, const char* mask, int64_t key) {
  using namespace ascend_deep_cpu;
  if (a.mask == kBoolMask) return mask[key] == 0;
  if (a.mask == kF32Mask) return reinterpret_cast<const float*>(mask)[key] == -INFINITY;
  return reinterpret_cast<const uint16_t*>(mask)[key] == (a.mask == kBF16Mask ? 0xff80u : 0xfc00u);
}

template <typename T>
AD_INLINE float dot(const float* q, const T* k, int64_t depth) {
  Vec sum = {};
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) sum += load(q + d) * load(k + d);
  if (d < depth) sum += load_partial(q + d, depth - d) * load_partial(k + d, depth - d);
  return lane_sum(sum);
}

template <int MH>
AD_INLINE void product_tile(const float* q, const float* panel, int64_t depth, float scale, float* out, int64_t ld) {
  Vec acc[MH][kVectors] = {};
  for (int64_t d = 0; d < depth; ++d) {
    Vec k[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) k[v] = load(panel + d * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int j = 0; j < MH; ++j) {
      const Vec x = splat(q[d * MH + j]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[j][v] += x * k[v];
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < MH; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(out + j * ld + v * kLanes, acc[j][v] * scale);
  }
}

// out[h][column ..] += sum_j p[h][j] * value row j, for MH heads and NV vectors of columns, `left` columns in all.
template <int MH, int NV, typename T>
AD_INLINE void value_tile(const T* const* rows, int64_t keys, int64_t column, int64_t left, const float* p, int64_t ldp,
                          float* out, int64_t ldo) {
  Vec acc[MH][NV];
#pragma GCC unroll 8
  for (int j = 0; j < MH; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[j][v] = load(out + j * ldo + column + v * kLanes);
  }
  const bool whole = left >= NV * kLanes;
  for (int64_t i = 0; i < keys; ++i) {
    Vec x[NV];
    if (whole) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) x[v] = load(rows[i] + column + v * kLanes);
    } else {
      for (int v = 0; v < NV; ++v) x[v] = left > v * kLanes ? load_n(rows[i] + column + v * kLanes, left - v * kLanes) : Vec{};
    }
#pragma GCC unroll 8
    for (int j = 0; j < MH; ++j) {
      const Vec w = splat(p[j * ldp + i]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[j][v] += w * x[v];
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < MH; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(out + j * ldo + column + v * kLanes, acc[j][v]);
  }
}

template <int MH, typename T>
inline void value_heads(const T* const* rows, int64_t keys, int64_t width, const float* p, int64_t ldp, float* out,
                        int64_t ldo) {
  int64_t c = 0;
  for (; c + (kValueVectors - 1) * kLanes < width; c += kValueVectors * kLanes) {
    value_tile<MH, kValueVectors>(rows, keys, c, width - c, p, ldp, out, ldo);
  }
  for (; c < width; c += kLanes) value_tile<MH, 1>(rows, keys, c, width - c, p, ldp, out, ldo);
}

// Softmax of one head in place, zeros for keys that it does not see; returns the logarithm of the sum.
inline float softmax_row(const SparseAttention& a, const char* mask, bool some_hidden, const float* sink,
                         const int32_t* list, int64_t n, float* x) {
  using namespace ascend_deep_cpu;
  if (mask) {
    const Dtype dtype = a.mask == kF32Mask ? kF32 : a.mask == kBF16Mask ? kBF16 : kF16;
    for (int64_t i = 0; i < n; ++i) {
      if (some_hidden && hides(a, mask, list[i])) x[i] = -INFINITY;
      else if (a.mask != kBoolMask) x[i] += load_as_float(mask, list[i], dtype);
    }
  }
  for (int64_t i = n; i < round_up(n, kLanes); ++i) x[i] = -INFINITY;
  Vec tops = splat(-INFINITY);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load(x + i);
    tops = v > tops ? v : tops;
  }
  float top = sink ? *sink : -INFINITY;
  for (int64_t i = 0; i < kLanes; ++i) top = tops[i] > top ? tops[i] : top;
  if (top == -INFINITY) {  // nothing is seen, or all that is is NaN
    bool nan = false;
    for (int64_t i = 0; i < n; ++i) {
      nan |= x[i] != x[i];
      x[i] = x[i] != x[i] ? x[i] : 0.0f;
    }
    return nan ? NAN : -INFINITY;
  }
  Vec sums = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec e = vexp(load(x + i) - top);
    store(x + i, e);
    sums += e;
  }
  const float sum = lane_sum(sums) + (sink ? ::expf(*sink - top) : 0.0f);
  const float by = 1.0f / sum;
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) * by);
  return top + ::logf(sum);
}

template <typename T>
void sparse_attention_row(const SparseAttention& a, int64_t b, int64_t g, int64_t s, int64_t h0, int64_t h1,
                          float* scratch) {
  const AttentionLayout at(a);
  const int64_t heads = h1 - h0, first = g * a.group + h0;  // `first` counts all query heads
  float* logits = scratch + at.logits;
  float* sums = scratch + at.sums;
  int32_t* list = reinterpret_cast<int32_t*>(scratch + at.list);
  const char* masks = a.mask == ascend_deep_cpu::kNoMask
                          ? nullptr
                          : a.mask_base + b * a.mask_stride[0] + s * a.mask_stride[2] + first * a.mask_stride[1];
  const int64_t planes = masks && a.mask_stride[1] ? heads : 1;

  int64_t n = 0;
  for (int64_t j = 0; j < a.topk; ++j) {
    const int64_t key = a.idx[(b * a.rows + s) * a.topk + j];
    if (key < 0 || key >= a.keys) continue;
    bool seen = !masks;
    for (int64_t m = 0; m < planes && !seen; ++m) seen = !hides(a, masks + m * a.mask_stride[1], key);
    list[n] = static_cast<int32_t>(key);
    n += seen;
  }

  const T* keys = reinterpret_cast<const T*>(a.k) + b * a.k_stride[0] + g * a.k_stride[1];
  const T* queries = reinterpret_cast<const T*>(a.q) + b * a.q_stride[0] + first * a.q_stride[1] + s * a.q_stride[2];
  const int64_t wide = round_up(a.depth, kLanes);
  float* query = scratch + at.query;
  float* stage = scratch + at.stage;
  if (heads < kFewHeads) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t d = 0; d < a.depth; d += kLanes) {
        store_n(query + h * wide + d, load_n(queries + h * a.q_stride[1] + d, a.depth - d), a.depth - d);
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      const T* k = keys + list[i] * a.k_stride[2];
      if (i + 4 < n) __builtin_prefetch(keys + list[i + 4] * a.k_stride[2]);
      for (int64_t h = 0; h < heads; ++h) logits[h * at.keys + i] = dot(query + h * wide, k, a.depth) * a.scale;
    }
  } else {
    // Queries as [tile][d][head], as in mqa.h; a last tile of fewer heads is padded with zeros.
    for (int64_t h = 0; h < heads; h += kHeads) {
      float* to = query + h * a.depth;
      for (int64_t j = 0; j < kHeads; ++j) {
        const bool real = h + j < heads;
        if (real) {
          const T* from = queries + (h + j) * a.q_stride[1];
          for (int64_t d = 0; d < a.depth; d += kLanes) store_n(stage + d, load_n(from + d, a.depth - d), a.depth - d);
        }
        for (int64_t d = 0; d < a.depth; ++d) to[d * kHeads + j] = real ? stage[d] : 0.0f;
      }
    }
    float* panel = scratch + at.panel;
    for (int64_t i = 0; i < n; i += kPanel) {
      for (int64_t v = 0; v < kVectors; ++v) {
        const T* src[kLanes];
        for (int64_t l = 0; l < kLanes; ++l) {
          const int64_t at_key = i + v * kLanes + l;
          src[l] = at_key < n ? keys + list[at_key] * a.k_stride[2] : nullptr;
        }
        for (int64_t d = 0; d < a.depth; d += kLanes) {
          const int64_t left = min64(kLanes, a.depth - d);
          Vec x[kLanes];
          for (int64_t l = 0; l < kLanes; ++l) x[l] = src[l] ? load_n(src[l] + d, left) : Vec{};
          transpose(x);
          for (int64_t l = 0; l < left; ++l) store(panel + (d + l) * kPanel + v * kLanes, x[l]);
        }
      }
      for (int64_t h = 0; h < heads; h += kHeads) {
        product_tile<kHeads>(query + h * a.depth, panel, a.depth, a.scale, logits + h * at.keys + i, at.keys);
      }
    }
  }

  const int64_t value_wide = round_up(a.value_depth, kLanes);
  for (int64_t h = 0; h < heads; ++h) {
    const float* sink = a.sink ? a.sink + first + h : nullptr;
    const char* mask = masks ? masks + h * a.mask_stride[1] : nullptr;
    const float lse = softmax_row(a, mask, planes > 1, sink, list, n, logits + h * at.keys);
    a.lse[(b * a.group * a.key_heads + first + h) * a.rows + s] = lse;
  }
  for (int64_t i = 0; i < heads * value_wide; ++i) sums[i] = 0.0f;
  const T* values = reinterpret_cast<const T*>(a.v) + b * a.v_stride[0] + g * a.v_stride[1];
  for (int64_t i = 0; i < n; i += kValueBlock) {
    const int64_t count = min64(kValueBlock, n - i);
    const T* rows[kValueBlock];
    for (int64_t j = 0; j < count; ++j) rows[j] = values + list[i + j] * a.v_stride[2];
    int64_t h = 0;
    for (; h + kHeads <= heads; h += kHeads) {
      value_heads<kHeads>(rows, count, a.value_depth, logits + h * at.keys + i, at.keys, sums + h * value_wide, value_wide);
    }
    for (; h < heads; ++h) {
      value_heads<1>(rows, count, a.value_depth, logits + h * at.keys + i, at.keys, sums + h * value_wide, value_wide);
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    T* out = static_cast<T*>(a.out) + ((b * a.group * a.key_heads + first + h) * a.rows + s) * a.value_depth;
    for (int64_t d = 0; d < a.value_depth; d += kLanes) {
      store_n(out + d, load(sums + h * value_wide + d), a.value_depth - d);
    }
  }
}

void sparse_attention(const SparseAttention& a, int64_t b, int64_t g, int64_t s, int64_t h0, int64_t h1, void* scratch) {
  if (a.dtype == ascend_deep_cpu::kBF16) sparse_attention_row<bf16>(a, b, g, s, h0, h1, static_cast<float*>(scratch));
  else sparse_attention_row<float>(a, b, g, s, h0, h1, static_cast<float*>(scratch));
}

}  // namespace
