// Indexer scores for one instruction set: panels of keys, packed queries, ReLU and head weights in registers.
//
//   score[s][t] = sum_h weights[s][h] * relu(scale * sum_d q[s][h][d] * key[t][d])
//
// A panel is kVectors vectors of keys, transposed to [d][key] float32, so that lanes are keys. A tile of heads of one
// query goes over a panel with all its products in registers; only the sums over heads are stored. Every product is one
// chain of multiply-adds in ascending d and every score one in ascending h, whatever the tile, the panel or the thread.
#pragma once

#include "mqa_api.h"
#include "vec.h"

namespace {

using ascend_deep_cpu::Mqa;
using ascend_deep_cpu::MqaOperand;

constexpr int64_t kVectors = 3;
constexpr int64_t kPanel = kVectors * kLanes;
constexpr int64_t kHeads = kLanes == 16 ? 8 : 4;  // heads of a tile: kHeads * kVectors sums, in 32 registers or in 16

// ---- operands as float32 -------------------------------------------------------------------------------------------

AD_INLINE Vec widen_half(HVec h) {
  const UVec u = __builtin_convertvector(h, UVec);
  const UVec sign = (u & 0x8000u) << 16, mag = u & 0x7fffu;
  // Subnormals included: the fields of a half, read as a float, are the value times 2^-112.
  const UVec finite = reinterpret_cast<UVec>(reinterpret_cast<Vec>(mag << 13) * 0x1p112f);
  const UVec special = 0x7f800000u | ((mag & 0x3ffu) << 13);
  return reinterpret_cast<Vec>(sign | (mag >= 0x7c00u ? special : finite));
}

AD_INLINE float ue8m0(uint8_t code) {
  const uint32_t bits = code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : static_cast<uint32_t>(code) << 23;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// D elements of any format, scaled; `to` has room for a multiple of kLanes, zeros behind D.
inline void decode(const Mqa& a, const MqaOperand& x, const char* from, const char* scales, float* to) {
  using namespace ascend_deep_cpu;
  const int64_t depth = a.depth;
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(from);
  switch (x.format) {
    case kMqaBF16:
      for (int64_t d = 0; d < depth; d += kLanes) store(to + d, load_n(reinterpret_cast<const bf16*>(from) + d, depth - d));
      break;
    case kMqaF16:
      for (int64_t d = 0; d < depth; d += kLanes) {
        HVec h = {};
        std::memcpy(&h, from + 2 * d, 2 * min64(kLanes, depth - d));
        store(to + d, widen_half(h));
      }
      break;
    case kMqaE4M3:
      for (int64_t d = 0; d < depth; ++d) to[d] = a.e4m3[bytes[d]];
      break;
    case kMqaE2M1:
      for (int64_t d = 0; d < depth; d += 2) {
        to[d] = a.e2m1[2 * bytes[d / 2]];
        to[d + 1] = a.e2m1[2 * bytes[d / 2] + 1];
      }
      break;
    default:
      for (int64_t d = 0; d < depth; d += kLanes) store(to + d, load_n(reinterpret_cast<const float*>(from) + d, depth - d));
  }
  if (x.scale != kNoScale) {
    const int64_t size = depth / x.groups;
    for (int64_t g = 0; g < x.groups; ++g) {
      float s;
      if (x.scale == kUe8m0) s = ue8m0(static_cast<uint8_t>(scales[g]));
      else std::memcpy(&s, scales + 4 * g, 4);
      for (int64_t d = g * size; d < (g + 1) * size; ++d) to[d] *= s;
    }
  }
  for (int64_t d = depth; d < round_up(depth, kLanes); ++d) to[d] = 0.0f;
}

struct Layout {
  int64_t wide, query, panel, stage, total;  // floats; `query` is the size of one packed query
  explicit Layout(const Mqa& a) {
    wide = round_up(a.depth, kLanes);
    query = round_up(a.heads * a.depth, 16);
    panel = a.row_block * query;
    stage = panel + wide * kPanel;
    total = round_up(stage + kLanes * wide, 16);
  }
};

// Queries as [tile][d][head of the tile], tiles of kHeads heads and then halves of that.
inline void pack_queries(const Mqa& a, const Layout& at, int64_t b, int64_t s0, int64_t s1, float* scratch) {
  float* row = scratch + at.stage;
  const MqaOperand& q = a.q;
  for (int64_t s = s0; s < s1; ++s) {
    float* to = scratch + (s - s0) * at.query;
    int64_t h = 0;
    for (int64_t tile = kHeads; tile; tile /= 2) {
      for (; h + tile <= a.heads; h += tile) {
        for (int64_t j = 0; j < tile; ++j) {
          const char* scales = q.scales + b * q.scale_stride[0] + s * q.scale_stride[1] + (h + j) * q.scale_stride[2];
          decode(a, q, q.base + b * q.stride[0] + s * q.stride[1] + (h + j) * q.stride[2], scales, row);
          for (int64_t d = 0; d < a.depth; ++d) to[d * tile + j] = row[d];
        }
        to += tile * a.depth;
      }
    }
  }
}

// Keys [t, t + n) as a panel; `present` says which keys exist (pages may not).
inline void pack_panel(const Mqa& a, const Layout& at, int64_t b, int64_t t, int64_t n, float* scratch, bool* present) {
  using namespace ascend_deep_cpu;
  float* panel = scratch + at.panel;
  float* stage = scratch + at.stage;
  const MqaOperand& kv = a.kv;
  const bool direct = kv.format == kMqaF32 && kv.scale == kNoScale;
  for (int64_t v = 0; v * kLanes < n; ++v) {
    const float* src[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      src[i] = nullptr;
      const int64_t key = t + v * kLanes + i;
      if (v * kLanes + i >= n) continue;
      const char *data, *scales;
      present[v * kLanes + i] = true;
      if (a.paged) {
        const int64_t column = key / a.pages.block, slot = key % a.pages.block;
        const int64_t page = column < a.pages.columns ? a.pages.table[b * a.pages.columns + column] : -1;
        if (page < 0 || page >= a.pages.count) {
          present[v * kLanes + i] = false;
          continue;
        }
        data = kv.base + page * a.pages.stride + slot * a.pages.width;
        scales = kv.base + page * a.pages.stride + a.pages.block * a.pages.width + slot * a.pages.sf_width;
      } else {
        data = kv.base + b * kv.stride[0] + key * kv.stride[1];
        scales = kv.scales + b * kv.scale_stride[0] + key * kv.scale_stride[1];
      }
      if (direct) {
        src[i] = reinterpret_cast<const float*>(data);
      } else {
        decode(a, kv, data, scales, stage + i * at.wide);
        src[i] = stage + i * at.wide;
      }
    }
    for (int64_t d = 0; d < a.depth; d += kLanes) {
      const int64_t left = min64(kLanes, a.depth - d);
      Vec x[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) x[i] = src[i] ? load_n(src[i] + d, left) : Vec{};
      transpose(x);
      for (int64_t i = 0; i < left; ++i) store(panel + (d + i) * kPanel + v * kLanes, x[i]);
    }
  }
}

// ---- scores --------------------------------------------------------------------------------------------------------

template <int MH, int NV>
AD_INLINE void score_tile(const float* q, const float* panel, int64_t depth, const float* weights, float scale,
                          Vec (&total)[NV]) {
  Vec acc[MH][NV] = {};
#pragma GCC unroll 2
  for (int64_t d = 0; d < depth; ++d) {
    Vec k[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) k[v] = load(panel + d * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int j = 0; j < MH; ++j) {
      const Vec x = splat(q[d * MH + j]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[j][v] += x * k[v];
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < MH; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const Vec p = acc[j][v] * scale;
      total[v] += weights[j] * (p < splat(0.0f) ? splat(0.0f) : p);  // NaN stays NaN
    }
  }
}

template <int NV>
inline void score_query(const float* q, const float* panel, int64_t heads, int64_t depth, const float* weights,
                        float scale, float* out) {
  Vec total[NV] = {};
  int64_t h = 0;
  for (; h + kHeads <= heads; h += kHeads) score_tile<kHeads, NV>(q + h * depth, panel, depth, weights + h, scale, total);
  if constexpr (kHeads == 8) {
    if (h + 4 <= heads) {
      score_tile<4, NV>(q + h * depth, panel, depth, weights + h, scale, total);
      h += 4;
    }
  }
  if (h + 2 <= heads) {
    score_tile<2, NV>(q + h * depth, panel, depth, weights + h, scale, total);
    h += 2;
  }
  if (h < heads) score_tile<1, NV>(q + h * depth, panel, depth, weights + h, scale, total);
  for (int v = 0; v < NV; ++v) store(out + v * kLanes, total[v]);
}

// The keys of [t, t + n) that count for a row, before pages are looked at; false: none.
inline bool visible(const Mqa& a, int64_t b, int64_t s, int64_t t, int64_t n, bool* ok) {
  using namespace ascend_deep_cpu;
  const int64_t lo = max64(a.start[b * a.rows + s] - t, 0), hi = min64(a.end[b * a.rows + s] - t, n);
  if (lo >= hi) return false;
  for (int64_t i = 0; i < n; ++i) ok[i] = i >= lo && i < hi;
  if (a.mask == kNoMask) return true;
  const char* m = a.mask_base + b * a.mask_stride[0] + s * a.mask_stride[1];
  bool any = false;
  for (int64_t i = lo; i < hi; ++i) {
    bool keep;
    if (a.mask == kBoolMask) keep = m[t + i] != 0;
    else if (a.mask == kF32Mask) keep = reinterpret_cast<const float*>(m)[t + i] != -INFINITY;
    else keep = reinterpret_cast<const uint16_t*>(m)[t + i] != (a.mask == kBF16Mask ? 0xff80u : 0xfc00u);
    ok[i] = keep;
    any |= keep;
  }
  return any;
}

inline void add_mask(const Mqa& a, int64_t b, int64_t s, int64_t t, int64_t n, float* score) {
  using namespace ascend_deep_cpu;
  if (a.mask == kNoMask || a.mask == kBoolMask) return;
  const Dtype dtype = a.mask == kF32Mask ? kF32 : a.mask == kBF16Mask ? kBF16 : kF16;
  const char* m = a.mask_base + b * a.mask_stride[0] + s * a.mask_stride[1];
  for (int64_t i = 0; i < n; ++i) score[i] += load_as_float(m, t + i, dtype);
}

// Calls use(s, t, n, score, ok) for every row and panel, in ascending t for each row; ok = nullptr: no key counts.
template <typename Use>
inline void for_scores(const Mqa& a, int64_t b, int64_t s0, int64_t s1, int64_t k0, int64_t k1, float* scratch,
                       const Use& use) {
  const Layout at(a);
  pack_queries(a, at, b, s0, s1, scratch);
  const float* panel = scratch + at.panel;
  for (int64_t t = k0; t < k1; t += kPanel) {
    const int64_t n = min64(kPanel, k1 - t);
    bool packed = false;
    bool present[kPanel];
    for (int64_t s = s0; s < s1; ++s) {
      bool ok[kPanel];
      if (!visible(a, b, s, t, n, ok)) {
        use(s, t, n, static_cast<const float*>(nullptr), static_cast<const bool*>(nullptr));
        continue;
      }
      if (!packed) pack_panel(a, at, b, t, n, scratch, present);
      packed = true;
      const float* q = scratch + (s - s0) * at.query;
      const float* weights = a.weights + (b * a.rows + s) * a.heads;
      alignas(64) float score[kPanel];
      if (n > 2 * kLanes) score_query<3>(q, panel, a.heads, a.depth, weights, a.scale, score);
      else if (n > kLanes) score_query<2>(q, panel, a.heads, a.depth, weights, a.scale, score);
      else score_query<1>(q, panel, a.heads, a.depth, weights, a.scale, score);
      add_mask(a, b, s, t, n, score);
      if (a.paged) {
        for (int64_t i = 0; i < n; ++i) ok[i] &= present[i];
      }
      use(s, t, n, static_cast<const float*>(score), static_cast<const bool*>(ok));
    }
  }
}

// ---- what is done with them ----------------------------------------------------------------------------------------

size_t mqa_logits_scratch(const Mqa& a) { return Layout(a).total * sizeof(float); }

template <typename T>
AD_INLINE void put(T* out, int64_t n, const float* values) {
  for (int64_t i = 0; i < n; i += kLanes) store_n(out + i, load_n(values + i, n - i), n - i);
}

template <typename T>
void mqa_logits_of(const Mqa& a, int64_t b, int64_t s0, int64_t s1, int64_t k0, int64_t k1, void* scratch) {
  T* out = static_cast<T*>(a.out) + b * a.rows * a.columns;
  alignas(64) float hidden[kPanel];
  for (int64_t i = 0; i < kPanel; ++i) hidden[i] = -INFINITY;
  if (a.compressed && k0 == 0) {  // what lies behind the ranges belongs to the first task of a row
    for (int64_t s = s0; s < s1; ++s) {
      const int64_t r = b * a.rows + s, used = max64(a.end[r] - a.start[r], 0);
      for (int64_t c = used; c < a.columns; c += kPanel) put(out + s * a.columns + c, min64(kPanel, a.columns - c), hidden);
    }
  }
  for_scores(a, b, s0, s1, k0, k1, static_cast<float*>(scratch),
             [&](int64_t s, int64_t t, int64_t n, const float* score, const bool* ok) {
               alignas(64) float x[kPanel];
               for (int64_t i = 0; i < n; ++i) x[i] = ok && ok[i] ? score[i] : -INFINITY;
               const int64_t r = b * a.rows + s;
               // Columns [c, c + n) are keys [t, t + n); of a compressed row only those inside the range exist.
               int64_t from = 0, to = n, c = t;
               if (a.compressed) {
                 from = max64(a.start[r] - t, 0);
                 c = t - a.start[r];
                 to = min64(n, min64(a.end[r], a.start[r] + a.columns) - t);
               } else {
                 to = min64(n, a.columns - t);
               }
               if (from < to) put(out + s * a.columns + c + from, to - from, x + from);
             });
}

void mqa_logits(const Mqa& a, int64_t b, int64_t s0, int64_t s1, int64_t k0, int64_t k1, void* scratch) {
  if (a.out_dtype == ascend_deep_cpu::kBF16) mqa_logits_of<bf16>(a, b, s0, s1, k0, k1, scratch);
  else mqa_logits_of<float>(a, b, s0, s1, k0, k1, scratch);
}

struct TopkLayout {
  int64_t lists, spare, states, total;  // bytes
  explicit TopkLayout(const Mqa& a) {
    lists = Layout(a).total * 4;
    spare = lists + a.row_block * a.capacity * 8;
    states = spare + a.capacity * 8;
    total = round_up(states + a.row_block * 16, 64);
  }
};

size_t mqa_topk_scratch(const Mqa& a) { return TopkLayout(a).total; }

struct RowState {
  int64_t count;
  int64_t least;  // only keys above this can still be chosen
};

void mqa_topk(const Mqa& a, int64_t b, int64_t s0, int64_t s1, int64_t k0, int64_t k1, uint64_t* lists, int64_t pitch,
              int64_t* count, void* scratch) {
  using namespace ascend_deep_cpu;
  const TopkLayout at(a);
  char* bytes = static_cast<char*>(scratch);
  uint64_t* held = reinterpret_cast<uint64_t*>(bytes + at.lists);
  uint64_t* spare = reinterpret_cast<uint64_t*>(bytes + at.spare);
  RowState* states = reinterpret_cast<RowState*>(bytes + at.states);
  for (int64_t s = 0; s < s1 - s0; ++s) states[s] = {0, kMqaExcluded};
  const auto prune = [&](uint64_t* row, RowState& state) {
    if (state.count <= a.topk) return;
    state.count = mqa_prune(row, state.count, a.topk, spare);
    uint64_t least = row[0];
    for (int64_t i = 1; i < state.count; ++i) least = row[i] < least ? row[i] : least;
    // Keys come in ascending order, so a later key with the score of the worst one held loses to it.
    state.least = static_cast<int32_t>(static_cast<uint32_t>(least >> 32) ^ 0x80000000u);
  };
  const int32_t outside = a.rank_last ? static_cast<int32_t>(0x807fffff) : kMqaExcluded;  // the key of -inf
  for_scores(a, b, s0, s1, k0, k1, static_cast<float*>(scratch),
             [&](int64_t s, int64_t t, int64_t n, const float* score, const bool* ok) {
               RowState& state = states[s - s0];
               if (!ok && outside <= state.least) return;
               uint64_t* row = held + (s - s0) * a.capacity;
               if (state.count + n > a.capacity) {
                 prune(row, state);
                 if (!ok && outside <= state.least) return;
               }
               alignas(64) int32_t keys[kPanel];
               for (int64_t i = 0; i < kPanel; ++i) keys[i] = outside;
               if (ok) {
                 for (int64_t i = 0; i < n; ++i) {
                   const float x = score[i] + 0.0f;  // -0 becomes 0
                   int32_t bits;
                   std::memcpy(&bits, &x, 4);
                   const int32_t key = x == x ? bits ^ ((bits >> 31) & 0x7fffffff) : kMqaNan;
                   keys[i] = ok[i] ? key : outside;
                 }
               }
               int64_t at_end = state.count;
               for (int64_t i = 0; i < n; ++i) {
                 const uint64_t high = static_cast<uint32_t>(keys[i]) ^ 0x80000000u;
                 row[at_end] = (high << 32) | (0xffffffffu - static_cast<uint32_t>(t + i));
                 at_end += keys[i] > state.least;
               }
               state.count = at_end;
             });
  for (int64_t s = s0; s < s1; ++s) {
    uint64_t* row = held + (s - s0) * a.capacity;
    prune(row, states[s - s0]);
    count[s - s0] = states[s - s0].count;
    std::memcpy(lists + (s - s0) * pitch, row, states[s - s0].count * 8);
  }
}

}  // namespace
