// Weights with stride 1 along n: a group of columns, and its product with the panels of an expert.
//
// Neighbours along k are a row of the matrix apart, often a page of memory, so a product that walked down a few columns
// would wait for address translation. A piece of kDeep rows and up to kWide columns is copied first, along its rows,
// into tiles that outer reads one after another.
#pragma once

#include "block.h"

namespace {

constexpr int64_t kWide = 256;
constexpr int64_t kDeep = 256;
// Tiles are [kDeep][kTile]; the distance is not a multiple of a page, so that one row of all tiles fits the first cache.
constexpr int64_t kTileStride = kDeep * kTile + 16;
constexpr int64_t kStagedColumns = (kWide / kTile + 1) * kTileStride;  // floats; two runs may end in a broken tile each

typedef float Oct __attribute__((vector_size(32)));
typedef float OctU __attribute__((vector_size(32), aligned(4), may_alias));
static_assert(kTile == 8, "a tile row is one Oct");

AD_INLINE Oct load_oct(const float* p) { return *reinterpret_cast<const OctU*>(p); }
AD_INLINE Oct load_oct(const bf16* p) {
  typedef uint16_t Half __attribute__((vector_size(16), aligned(2), may_alias));
  typedef uint16_t HalfV __attribute__((vector_size(16)));
  typedef uint32_t Word __attribute__((vector_size(32)));
  const HalfV h = *reinterpret_cast<const Half*>(p);
  return reinterpret_cast<Oct>(__builtin_convertvector(h, Word) << 16);
}

// One or two runs of neighbouring columns. In products, run r starts at column start(r), a multiple of kTile.
template <typename W>
struct Columns {
  const W* run[2];
  int64_t size[2];
  int64_t runs;
  int64_t stride;  // along k

  int64_t start(int64_t r) const { return r ? round_up(size[0], kTile) : 0; }
  int64_t width() const { return start(runs - 1) + round_up(size[runs - 1], kTile); }
};

// Hidden units [i0, i0 + n): one run of pairs, or gates and ups.
template <typename W>
Columns<W> up_columns(const Experts& a, int64_t expert, int64_t i0, int64_t n) {
  const bool pairs = a.gated && a.interleaved;
  const W* first = static_cast<const W*>(a.w13.base) + expert * a.w13.se + i0 * (pairs ? 2 : 1);
  const W* second = a.w3 ? static_cast<const W*>(a.w3) + expert * a.w3_se + i0 : first + a.intermediate;
  return {{first, second}, {pairs ? 2 * n : n, n}, a.gated && !pairs ? 2 : 1, a.w13.sk};
}

template <typename W>
Columns<W> down_columns(const Experts& a, int64_t expert, int64_t n0, int64_t n) {
  const W* first = static_cast<const W*>(a.w2.base) + expert * a.w2.se + n0;
  return {{first, first}, {n, n}, 1, a.w2.sk};
}

// Rows [k0, k0 + depth) of the columns, as tiles; columns behind the end of a run are zero.
template <typename W>
void stage_columns(const Columns<W>& b, int64_t k0, int64_t depth, float* stage) {
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t r = 0; r < b.runs; ++r) {
      const W* p = b.run[r] + (k0 + k) * b.stride;
      float* s = stage + b.start(r) / kTile * kTileStride + k * kTile;
      int64_t j = 0;
      for (; j + kTile <= b.size[r]; j += kTile, s += kTileStride) *reinterpret_cast<Oct*>(s) = load_oct(p + j);
      if (j < b.size[r]) {
        W last[kTile] = {};
        for (int64_t i = 0; j + i < b.size[r]; ++i) last[i] = p[j + i];
        *reinterpret_cast<Oct*>(s) = load_oct(last);
      }
    }
  }
}

// During tile t of `tiles`, its share of the rows [k0, k0 + depth) of b.
template <typename W>
Ahead ahead_of(const Columns<W>& b, int64_t k0, int64_t depth, int64_t t, int64_t tiles) {
  Ahead a;
  const int64_t all = b.runs * depth;  // rows of runs
  const int64_t from = all * t / tiles / kTile * kTile, to = all * (t + 1) / tiles / kTile * kTile;
  const int64_t lines = (b.size[0] * static_cast<int64_t>(sizeof(W)) + 63) / 64;
  const int64_t row = min64(from, all - 1);
  a.base = reinterpret_cast<const char*>(b.run[row / depth] + (k0 + row % depth) * b.stride);
  a.step = b.stride * static_cast<int64_t>(sizeof(W));
  a.wrap = lines;
  a.jump = kTile * b.stride * static_cast<int64_t>(sizeof(W));
  a.end = (to - from) / kTile * lines;
  a.last = kTile;
  return a;
}

// c[column][token] for panels, with ldc = to - from. `next` is prefetched at the end.
template <typename W>
void columns_product(const Columns<W>& b, const Columns<W>* next, const Tokens& x, int64_t depth, float* stage,
                     float* c) {
  const int64_t ldc = x.to - x.from, tiles = b.width() / kTile;
  for (int64_t k0 = 0; k0 < depth; k0 += kDeep) {
    const int64_t n = min64(kDeep, depth - k0), k1 = k0 + n;
    stage_columns(b, k0, n, stage);
    for (int64_t t = 0; t < tiles; ++t) {
      Ahead ahead;
      if (k1 < depth) ahead = ahead_of(b, k1, min64(kDeep, depth - k1), t, tiles);
      else if (next) ahead = ahead_of(*next, 0, min64(kDeep, depth), t, tiles);
      Spread spread(ahead, ldc);
      const float* r[kTile];
      for (int64_t j = 0; j < kTile; ++j) r[j] = stage + t * kTileStride + j;
      for (int64_t m = x.from; m < x.to;) {
        const int64_t vectors = split((x.all - m) / kLanes), width = vectors * kLanes;
        outer<kTile>(r, kTile, x.panels + (m - x.from) * depth + k0 * width, vectors, n, k0 > 0, spread.take(width),
                     c + t * kTile * ldc + (m - x.from), ldc);
        m += width;
      }
    }
  }
}

}  // namespace
