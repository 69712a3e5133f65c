// Micro-kernels. All take eight rows of one weight matrix ("rows", pointers to element k = 0) and write float32.
//
//   dot8    c[m][j]  = sum_k x[m][k] * rows[j][k]      vectors along k, few tokens: reads every weight once
//   outer8  c[j][m]  = sum_k panel[k][m] * rows[j][k]  vectors along tokens, weights broadcast; needs no packing of
//                                                      weights, which would cost as much as the product itself
//   axpy    c[m][n]  = sum_k x[m][k] * w[k][n]         vectors along n, few tokens, weights with stride 1 along n
//
// `ahead` is the distance in elements from these rows to the ones that come next; they are prefetched meanwhile.
// Every c element is one chain of fused multiply-adds in ascending k (per lane for dot8), whatever the tile.
#pragma once

#include "vec.h"

namespace {

constexpr int64_t kTile = ascend_deep_cpu::kTileRows;
constexpr int64_t kAcc = kLanes == 16 ? 8 : 4;  // weight rows held in registers: 32 registers, or 16

template <typename W>
AD_INLINE void prefetch(const W* p) { __builtin_prefetch(p, 0, 2); }

template <int MB, typename W>
AD_INLINE void dot_tile(const W* const* rows, const float* x, int64_t ldx, int64_t depth, int64_t ahead, float* c,
                        int64_t ldc) {
  constexpr int64_t kLine = 64 / sizeof(W);  // elements in a cache line
  const W* r[kAcc];
  for (int j = 0; j < kAcc; ++j) r[j] = rows[j];
  Vec acc[MB][kAcc] = {};
  int64_t k = 0;
  for (; k + kLine <= depth; k += kLine) {
    if (ahead) {
#pragma GCC unroll 8
      for (int j = 0; j < kAcc; ++j) prefetch(r[j] + k + ahead);
    }
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
  for (int m = 0; m < MB; ++m) {
#pragma GCC unroll 8
    for (int j = 0; j < kAcc; ++j) c[m * ldc + j] = lane_sum(acc[m][j]);
  }
}

// Tokens are taken 3, 2 or 1 at a time, never 1 after 3: the same split serves panels of vectors of tokens.
AD_INLINE int64_t split(int64_t left) { return left == 4 ? 2 : left < 3 ? left : 3; }

template <typename W>
void dot8(const W* const* rows, const float* x, int64_t ldx, int64_t tokens, int64_t depth, int64_t ahead, float* c,
          int64_t ldc) {
  for (int64_t m = 0; m < tokens;) {
    const int64_t step = split(tokens - m);
    for (int64_t j = 0; j < kTile; j += kAcc) {
      const float* xm = x + m * ldx;
      float* cm = c + m * ldc + j;
      if (step == 3) dot_tile<3>(rows + j, xm, ldx, depth, ahead, cm, ldc);
      else if (step == 2) dot_tile<2>(rows + j, xm, ldx, depth, ahead, cm, ldc);
      else dot_tile<1>(rows + j, xm, ldx, depth, ahead, cm, ldc);
    }
    ahead = 0;
    m += step;
  }
}

template <int MV>
AD_INLINE void outer_tile(const float* const* rows, int64_t sk, const float* panel, int64_t depth, int64_t ahead,
                          float* c, int64_t ldc) {
  const float* r[kAcc];
  for (int j = 0; j < kAcc; ++j) r[j] = rows[j];
  Vec acc[kAcc][MV] = {};
  int64_t k = 0;
  auto step = [&](int64_t kk) __attribute__((always_inline)) {
    Vec xv[MV];
#pragma GCC unroll 8
    for (int m = 0; m < MV; ++m) xv[m] = load(panel + kk * (MV * kLanes) + m * kLanes);
#pragma GCC unroll 8
    for (int j = 0; j < kAcc; ++j) {
      const Vec w = splat(r[j][kk * sk]);
#pragma GCC unroll 8
      for (int m = 0; m < MV; ++m) acc[j][m] += w * xv[m];
    }
  };
  constexpr int64_t kUnroll = 4;
  for (; k + 16 <= depth; k += 16) {
    if (ahead) {
#pragma GCC unroll 8
      for (int j = 0; j < kAcc; ++j) prefetch(r[j] + k * sk + ahead);
    }
    for (int64_t u = 0; u < 16; u += kUnroll) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kUnroll; ++v) step(k + u + v);
    }
  }
  for (; k < depth; ++k) step(k);
#pragma GCC unroll 8
  for (int j = 0; j < kAcc; ++j) {
#pragma GCC unroll 8
    for (int m = 0; m < MV; ++m) store(c + j * ldc + m * kLanes, acc[j][m]);
  }
}

// One panel: vectors * kLanes tokens, [depth][vectors * kLanes]. sk is the stride of rows along k.
inline void outer8(const float* const* rows, int64_t sk, const float* panel, int64_t vectors, int64_t depth,
                   int64_t ahead, float* c, int64_t ldc) {
  for (int64_t j = 0; j < kTile; j += kAcc) {
    float* cj = c + j * ldc;
    if (sk == 1) {
      if (vectors == 3) outer_tile<3>(rows + j, 1, panel, depth, ahead, cj, ldc);
      else if (vectors == 2) outer_tile<2>(rows + j, 1, panel, depth, ahead, cj, ldc);
      else outer_tile<1>(rows + j, 1, panel, depth, ahead, cj, ldc);
    } else {
      if (vectors == 3) outer_tile<3>(rows + j, sk, panel, depth, ahead, cj, ldc);
      else if (vectors == 2) outer_tile<2>(rows + j, sk, panel, depth, ahead, cj, ldc);
      else outer_tile<1>(rows + j, sk, panel, depth, ahead, cj, ldc);
    }
  }
}

template <int MB, int NV, typename W>
AD_INLINE void axpy_tile(const W* w, int64_t ldw, const float* x, int64_t ldx, int64_t depth, int64_t n, float* c,
                         int64_t ldc) {
  constexpr int64_t kAhead = 12;  // rows of w: far enough for memory, close enough to stay in the first cache
  Vec acc[MB][NV] = {};
  const bool whole = n >= NV * kLanes;
  for (int64_t k = 0; k < depth; ++k) {
    const W* wk = w + k * ldw;
    if (k + kAhead < depth) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) __builtin_prefetch(wk + kAhead * ldw + v * kLanes, 0, 3);
    }
    Vec wv[NV];
    if (whole) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) wv[v] = load(wk + v * kLanes);
    } else {
      for (int v = 0; v < NV; ++v) {
        const int64_t left = n - v * kLanes;
        wv[v] = left > 0 ? load_n(wk + v * kLanes, left) : Vec{};
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MB; ++m) {
      const Vec xm = splat(x[m * ldx + k]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[m][v] += wv[v] * xm;
    }
  }
  for (int m = 0; m < MB; ++m) {
    for (int v = 0; v < NV; ++v) {
      const int64_t left = n - v * kLanes;
      if (left > 0) store_n(c + m * ldc + v * kLanes, acc[m][v], left);
    }
  }
}

// c[m][0 .. n) for all tokens; w points at element (k = 0, n = 0) and has stride ldw along k.
template <typename W>
void axpy(const W* w, int64_t ldw, const float* x, int64_t ldx, int64_t tokens, int64_t depth, int64_t n, float* c,
          int64_t ldc) {
  constexpr int NV = kLanes == 16 ? 4 : 2;
  for (int64_t j = 0; j < n; j += NV * kLanes) {
    const int64_t left = n - j;
    for (int64_t m = 0; m < tokens;) {
      const int64_t step = min64(4, tokens - m);
      const float* xm = x + m * ldx;
      float* cm = c + m * ldc + j;
      if (step == 4) axpy_tile<4, NV>(w + j, ldw, xm, ldx, depth, left, cm, ldc);
      else if (step == 3) axpy_tile<3, NV>(w + j, ldw, xm, ldx, depth, left, cm, ldc);
      else if (step == 2) axpy_tile<2, NV>(w + j, ldw, xm, ldx, depth, left, cm, ldc);
      else axpy_tile<1, NV>(w + j, ldw, xm, ldx, depth, left, cm, ldc);
      m += step;
    }
  }
}

}  // namespace
