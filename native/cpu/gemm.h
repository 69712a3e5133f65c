// Micro-kernels. dot8 and outer take rows of a weight matrix (pointers to element k = 0); all write float32.
//
//   dot8    c[m][j]   = sum_k x[m][k] * rows[j][k]      vectors along k, few tokens: reads every weight once
//   outer   c[j][m]   = sum_k panel[k][m] * rows[j][k]  vectors along tokens, weights broadcast; needs no packing of
//                                                       weights, which would cost as much as the product itself
//   pairs   as outer, for a vector and a half of tokens: a vector holds two neighbouring k of half as many tokens
//   axpy    c[m][n]   = sum_k x[m][k] * w[k][n]         vectors along n, few tokens, weights with stride 1 along n
//
// Every c element is one chain of fused multiply-adds in ascending k (per lane for dot8, one of even and one of odd k
// for pairs), whatever the tile.
#pragma once

#include "vec.h"

namespace {

constexpr int64_t kTile = ascend_deep_cpu::kTileRows;
constexpr int64_t kAcc = kLanes == 16 ? 8 : 4;  // weight rows held in registers: 32 registers, or 16
// Rows of a tile for panels of two vectors: as many products for each load as with three vectors and eight rows.
constexpr int64_t kTall = kLanes == 16 ? 12 : kTile;

// What to prefetch during a product: one line of each of the streams first .. last every `every` elements of k. Streams
// are `step` bytes apart. A stream is `wrap` neighbouring lines, then as many at a distance of `jump` bytes, and so on.
struct Ahead {
  const char* base = nullptr;
  int64_t step = 0;
  int64_t every = 16;  // elements of k, a power of two, at least 16
  int64_t wrap = INT32_MAX;
  int64_t jump = 0;
  int64_t end = INT32_MAX;  // lines of a stream
  int64_t first = 0, last = 0;
};

// The place of one product in the streams.
class Cursor {
 public:
  AD_INLINE explicit Cursor(const Ahead& a)
      : at_(a.base + a.first * a.step), step_(a.step), mask_(a.every - 1), count_(a.last - a.first),
        left_(count_ ? a.end : 0), run_(a.wrap), wrap_(a.wrap), back_(a.jump - 64 * a.wrap) {}

  // Whether lines are due at k, a multiple of 16.
  AD_INLINE bool due(int64_t k) const { return left_ > 0 && (k & mask_) == 0; }

  // A line of each of the streams [from, from + N) that there are.
  template <int N>
  AD_INLINE void some(int64_t from) const {
    const char* p = at_ + from * step_;
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j, p += step_) {
      if (from + j < count_) __builtin_prefetch(p, 0, 1);  // faster than the hint 2 by 1-8 %, 3 alike
    }
  }

  AD_INLINE void next() {
    --left_;
    at_ += 64;
    if (--run_ == 0) {
      run_ = wrap_;
      at_ += back_;
    }
  }

  AD_INLINE void issue(int64_t k) {
    if (!due(k)) return;
    for (int64_t j = 0; j < count_; j += 4) some<4>(j);
    next();
  }

 private:
  const char* at_;
  int64_t step_, mask_, count_, left_, run_, wrap_, back_;
};

template <int MB, typename W>
AD_INLINE void dot_tile(const W* const* rows, const float* x, int64_t ldx, int64_t depth, const Ahead& ahead, float* c,
                        int64_t ldc) {
  constexpr int64_t kLine = 64 / sizeof(W);  // elements in a cache line
  const W* r[kAcc];
  for (int j = 0; j < kAcc; ++j) r[j] = rows[j];
  Vec acc[MB][kAcc] = {};
  int64_t k = 0;
  Cursor cursor(ahead);
  for (; k + kLine <= depth; k += kLine) {
    cursor.issue(k);
#pragma GCC unroll 8
    for (int64_t u = 0; u < kLine; u += kLanes) {
      Vec xv[MB];
#pragma GCC unroll 8
      for (int m = 0; m < MB; ++m) xv[m] = load(x + m * ldx + k + u);
#pragma GCC unroll 8
      for (int j = 0; j < kAcc; ++j) {
        const Vec w = load(r[j] + k + u);
#pragma GCC unroll 8
        for (int m = 0; m < MB; ++m) acc[m][j] += w * xv[m];
      }
    }
  }
  for (; k < depth; k += kLanes) {
    const int64_t n = min64(kLanes, depth - k);
    for (int j = 0; j < kAcc; ++j) {
      const Vec w = load_n(r[j] + k, n);
      for (int m = 0; m < MB; ++m) acc[m][j] += w * load_n(x + m * ldx + k, n);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MB; ++m) lane_sums<static_cast<int>(kAcc)>(acc[m], c + m * ldc);
}

// Tokens are taken 3, 2 or 1 at a time, never 1 after 3: the same split serves panels of vectors of tokens.
AD_INLINE int64_t split(int64_t left) { return left == 4 ? 2 : left < 3 ? left : 3; }

// `tokens` is 1, 2 or 3.
template <typename W>
void dot8(const W* const* rows, const float* x, int64_t ldx, int64_t tokens, int64_t depth, Ahead ahead, float* c,
          int64_t ldc) {
  for (int64_t j = 0; j < kTile; j += kAcc) {
    if (tokens == 3) dot_tile<3>(rows + j, x, ldx, depth, ahead, c + j, ldc);
    else if (tokens == 2) dot_tile<2>(rows + j, x, ldx, depth, ahead, c + j, ldc);
    else dot_tile<1>(rows + j, x, ldx, depth, ahead, c + j, ldc);
    ahead.last = ahead.first;
  }
}

// Sums of N products, N = R * M, in order; N need not be a multiple of kAcc. Destroys acc.
template <int R, int M>
AD_INLINE void store_dots(Vec* acc, float* c, int64_t ldc) {
  constexpr int kAll = (R * M + kAcc - 1) / kAcc * kAcc;
  float sums[kAll];
#pragma GCC unroll 8
  for (int i = 0; i < kAll; i += kAcc) lane_sums<static_cast<int>(kAcc)>(acc + i, sums + i);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) std::memcpy(c + m * ldc, sums + m * R, R * sizeof(float));
}

template <int R, int M>
AD_INLINE void near_tile(const float* const* rows, const float* x, int64_t ldx, int64_t depth, float* c, int64_t ldc) {
  const float* r[R];
  for (int j = 0; j < R; ++j) r[j] = rows[j];
  Vec acc[(R * M + kAcc - 1) / kAcc * kAcc] = {};
  int64_t k = 0;
#pragma GCC unroll 2
  for (; k + kLanes <= depth; k += kLanes) {
    Vec xv[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) xv[m] = load(x + m * ldx + k);
#pragma GCC unroll 8
    for (int j = 0; j < R; ++j) {
      const Vec w = load(r[j] + k);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m * R + j] += w * xv[m];
    }
  }
  if (k < depth) {
    for (int j = 0; j < R; ++j) {
      const Vec w = load_n(r[j] + k, depth - k);
      for (int m = 0; m < M; ++m) acc[m * R + j] += w * load_n(x + m * ldx + k, depth - k);
    }
  }
  store_dots<R, M>(acc, c, ldc);
}

template <int R>
void near_rows(const float* const* rows, const float* x, int64_t ldx, int64_t tokens, int64_t depth, float* c,
               int64_t ldc) {
  constexpr int64_t kMost = kLanes == 16 ? 4 : 3;  // tokens at a time: R * kMost sums and their factors in registers
  const int64_t parts = (tokens + kMost - 1) / kMost;
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t from = tokens * p / parts, count = tokens * (p + 1) / parts - from;
    const float* xp = x + from * ldx;
    float* cp = c + from * ldc;
    if (count == 4) near_tile<R, kMost>(rows, xp, ldx, depth, cp, ldc);
    else if (count == 3) near_tile<R, 3>(rows, xp, ldx, depth, cp, ldc);
    else if (count == 2) near_tile<R, 2>(rows, xp, ldx, depth, cp, ldc);
    else near_tile<R, 1>(rows, xp, ldx, depth, cp, ldc);
  }
}

// c[m][j] as dot8, to the last bit, of rows that a product with panels has just brought near: nothing is prefetched, and
// more tokens are taken at a time, because the second cache is what they wait for.
inline void dot_near(const float* const* rows, int64_t height, const float* x, int64_t ldx, int64_t tokens,
                     int64_t depth, float* c, int64_t ldc) {
  for (int64_t j = 0; j < height; j += height / 2) {
    if (height == kTile) near_rows<kTile / 2>(rows + j, x, ldx, tokens, depth, c + j, ldc);
    else near_rows<kTall / 2>(rows + j, x, ldx, tokens, depth, c + j, ldc);
  }
}

template <int R, int MV, int SK>
AD_INLINE void outer_tile(const float* const* rows, const float* panel, int64_t depth, bool add, const Ahead& ahead,
                          float* c, int64_t ldc) {
  const float* r[R];
  for (int j = 0; j < R; ++j) r[j] = rows[j];
  Vec acc[R][MV] = {};
  if (add) {
#pragma GCC unroll 12
    for (int j = 0; j < R; ++j) {
#pragma GCC unroll 4
      for (int m = 0; m < MV; ++m) acc[j][m] = load(c + j * ldc + m * kLanes);
    }
  }
  auto step = [&](int64_t kk) __attribute__((always_inline)) {
    Vec xv[MV];
#pragma GCC unroll 4
    for (int m = 0; m < MV; ++m) xv[m] = load(panel + kk * (MV * kLanes) + m * kLanes);
#pragma GCC unroll 12
    for (int j = 0; j < R; ++j) {
      const Vec w = splat(r[j][kk * SK]);
#pragma GCC unroll 4
      for (int m = 0; m < MV; ++m) acc[j][m] += w * xv[m];
    }
  };
  constexpr int64_t kUnroll = 4;
  constexpr int kLines = (kTall + 3) / 4;  // lines of a quarter of 16 steps: all at once, loads would wait for them
  Cursor cursor(ahead);
  for (int64_t k = 0; k + 16 <= depth; k += 16) {
    const bool due = cursor.due(k);
    for (int64_t u = 0; u < 16; u += kUnroll) {
      if (due) cursor.some<kLines>(u / kUnroll * kLines);
#pragma GCC unroll 4
      for (int64_t v = 0; v < kUnroll; ++v) step(k + u + v);
    }
    if (due) cursor.next();
  }
  for (int64_t left = depth % 16; left > 0; --left) step(depth - left);
#pragma GCC unroll 12
  for (int j = 0; j < R; ++j) {
#pragma GCC unroll 4
    for (int m = 0; m < MV; ++m) store(c + j * ldc + m * kLanes, acc[j][m]);
  }
}

// One panel: vectors * kLanes tokens, [depth][vectors * kLanes], times kTile rows, or kTall for up to two vectors. SK
// is the stride of rows along k. `add`: onto c.
template <int SK>
void outer(const float* const* rows, int64_t height, const float* panel, int64_t vectors, int64_t depth, bool add,
           Ahead ahead, float* c, int64_t ldc) {
  if constexpr (kTall > kTile) {
    if (height == kTall && vectors == 2) return outer_tile<kTall, 2, SK>(rows, panel, depth, add, ahead, c, ldc);
    if (height == kTall) return outer_tile<kTall, 1, SK>(rows, panel, depth, add, ahead, c, ldc);
  }
  for (int64_t j = 0; j < kTile; j += kAcc) {
    if (vectors == 3) outer_tile<kAcc, 3, SK>(rows + j, panel, depth, add, ahead, c + j * ldc, ldc);
    else if (vectors == 2) outer_tile<kAcc, 2, SK>(rows + j, panel, depth, add, ahead, c + j * ldc, ldc);
    else outer_tile<kAcc, 1, SK>(rows + j, panel, depth, add, ahead, c + j * ldc, ldc);
    ahead.last = ahead.first;
  }
}

// One panel of kPairRows tokens, [depth / 2][kPairRows][2], depth even, times kTile rows with stride 1 along k.
constexpr int64_t kPairRows = ascend_deep_cpu::pair_rows(kLanes);

template <int R>
AD_INLINE void pair_tile(const float* const* rows, const float* panel, int64_t depth, const Ahead& ahead, float* c,
                         int64_t ldc) {
  const float* r[R];
  for (int j = 0; j < R; ++j) r[j] = rows[j];
  Vec acc[R][3] = {};
  auto step = [&](int64_t k) __attribute__((always_inline)) {
    Vec xv[3];
#pragma GCC unroll 3
    for (int m = 0; m < 3; ++m) xv[m] = load(panel + k * kPairRows + m * kLanes);
#pragma GCC unroll 8
    for (int j = 0; j < R; ++j) {
      const Vec w = splat_pair(r[j] + k);
#pragma GCC unroll 3
      for (int m = 0; m < 3; ++m) acc[j][m] += w * xv[m];
    }
  };
  Cursor cursor(ahead);
  int64_t k = 0;
  for (; k + 16 <= depth; k += 16) {
    const bool due = cursor.due(k);
    for (int64_t u = 0; u < 16; u += 4) {
      if (due) cursor.some<2>(u / 2);
      step(k + u);
      step(k + u + 2);
    }
    if (due) cursor.next();
  }
  for (; k < depth; k += 2) step(k);
#pragma GCC unroll 8
  for (int j = 0; j < R; ++j) {
    float* cj = c + j * ldc;
    const Vec last = pair_sums(acc[j][2], acc[j][2]);
    store(cj, pair_sums(acc[j][0], acc[j][1]));
    std::memcpy(cj + kLanes, &last, sizeof(last) / 2);
  }
}

inline void pairs(const float* const* rows, const float* panel, int64_t depth, Ahead ahead, float* c, int64_t ldc) {
  for (int64_t j = 0; j < kTile; j += kAcc) {
    pair_tile<kAcc>(rows + j, panel, depth, ahead, c + j * ldc, ldc);
    ahead.last = ahead.first;
  }
}

// kDepth rows of w onto c, which is loaded and stored once for them. `more`: as many rows follow.
template <int kDepth, typename W>
AD_INLINE void axpy_rows(const W* w, int64_t ldw, const float* x, int64_t ldx, int64_t tokens, int64_t n, bool more,
                         float* c, int64_t ldc) {
  constexpr int64_t kLine = 64 / sizeof(W);
  for (int64_t j = 0; j < n; j += kLanes) {
    const int64_t left = n - j;
    if (more && j % kLine == 0) {
#pragma GCC unroll 8
      for (int k = 0; k < kDepth; ++k) __builtin_prefetch(w + (k + kDepth) * ldw + j, 0, 2);
    }
    Vec wv[kDepth];
#pragma GCC unroll 8
    for (int k = 0; k < kDepth; ++k) wv[k] = load_n(w + k * ldw + j, left);
    for (int64_t m = 0; m < tokens; ++m) {
      float* cm = c + m * ldc + j;
      Vec acc = load_n(cm, left);
#pragma GCC unroll 8
      for (int k = 0; k < kDepth; ++k) acc += wv[k] * x[m * ldx + k];
      store_n(cm, acc, left);
    }
  }
}

// c[m][0 .. n) for a few tokens; w points at element (k = 0, n = 0) and has stride ldw along k. Reads w along its rows,
// several at a time: a walk down one column strip would open another page of memory with every step.
template <typename W>
void axpy(const W* w, int64_t ldw, const float* x, int64_t ldx, int64_t tokens, int64_t depth, int64_t n, float* c,
          int64_t ldc) {
  for (int64_t m = 0; m < tokens; ++m) std::memset(c + m * ldc, 0, n * sizeof(float));
  int64_t k = 0;
  for (; k + kTile <= depth; k += kTile) {
    axpy_rows<kTile>(w + k * ldw, ldw, x + k, ldx, tokens, n, k + 2 * kTile <= depth, c, ldc);
  }
  for (; k < depth; ++k) axpy_rows<1>(w + k * ldw, ldw, x + k, ldx, tokens, n, false, c, ldc);
}

}  // namespace
