// A block of weight rows, and its product with the tokens of an expert.
#pragma once

#include "gemm.h"

namespace {

using ascend_deep_cpu::Experts;
using ascend_deep_cpu::kHiddenBlock;
using ascend_deep_cpu::kOutBlock;

constexpr int64_t kBlockRows = 2 * kHiddenBlock;  // weight rows in a block of the first GEMM, if gated
static_assert(kOutBlock <= kBlockRows, "the scratch is sized for the first GEMM");

// The weight rows of one block, in the order in which the epilogue wants them. Rows behind the end repeat the last one.
template <typename W>
struct Block {
  const W* row[kBlockRows];
  int64_t count;   // a multiple of kTile
  int64_t valid;   // of every kHiddenBlock rows
  int64_t stride;  // along k
  // The same rows as runs of neighbours along n, for weights with stride 1 there; row j is number col[j] of the runs.
  int64_t runs;
  const W* run[2];
  int64_t run_size[2];
  int32_t col[kBlockRows];

  int64_t width() const { return run_size[0] + (runs == 2 ? run_size[1] : 0); }
};

// Hidden units [i0, i0 + n) of the first GEMM: gate rows first, up rows from kHiddenBlock on.
template <typename W>
Block<W> up_block(const Experts& a, int64_t expert, int64_t i0, int64_t n) {
  const bool pairs = a.gated && a.interleaved;
  const W* first = static_cast<const W*>(a.w13.base) + expert * a.w13.se + i0 * (pairs ? 2 : 1) * a.w13.sn;
  const W* second = first + (pairs ? 1 : a.intermediate) * a.w13.sn;
  Block<W> b;
  b.stride = a.w13.sk;
  b.valid = n;
  b.count = a.gated ? kHiddenBlock + round_up(n, kTile) : round_up(n, kTile);
  b.runs = a.gated && !pairs ? 2 : 1;
  b.run[0] = first;
  b.run[1] = second;
  b.run_size[0] = pairs ? 2 * n : n;
  b.run_size[1] = n;
  for (int64_t j = 0; j < b.count; ++j) {
    const int64_t i = min64(j % kHiddenBlock, n - 1);
    const bool up = j >= kHiddenBlock;
    b.row[j] = (up ? second : first) + i * (pairs ? 2 : 1) * a.w13.sn;
    b.col[j] = static_cast<int32_t>(pairs ? 2 * i + up : i + (up ? n : 0));
  }
  return b;
}

template <typename W>
Block<W> down_block(const Experts& a, int64_t expert, int64_t n0, int64_t n) {
  const W* first = static_cast<const W*>(a.w2.base) + expert * a.w2.se + n0 * a.w2.sn;
  Block<W> b;
  b.stride = a.w2.sk;
  b.valid = n;
  b.count = round_up(n, kTile);
  b.runs = 1;
  b.run[0] = b.run[1] = first;
  b.run_size[0] = b.run_size[1] = n;
  for (int64_t j = 0; j < b.count; ++j) {
    b.col[j] = static_cast<int32_t>(min64(j, n - 1));
    b.row[j] = first + b.col[j] * a.w2.sn;
  }
  return b;
}

// The tokens of a product. Panels are those of the rows [from, to) of an expert that has `all` panel rows.
struct Tokens {
  int64_t from, to, all;
  const float* panels;  // of row `from`; a panel that starts at row r is at (r - from) * depth
  const float* rows;    // [plain][depth]
  int64_t plain;
};

// Copies a block with stride 1 along n to `stage`, [depth][width], in float32: its rows are far apart in memory, and
// the product walks over them once per panel.
template <typename W>
void stage_columns(const Block<W>& b, int64_t depth, float* stage) {
  const int64_t width = b.width();
  for (int64_t k = 0; k < depth; ++k) {
    float* s = stage + k * width;
    for (int64_t r = 0; r < b.runs; ++r) {
      const W* p = b.run[r] + k * b.stride;
      const int64_t n = b.run_size[r];
      for (int64_t j = 0; j < n; j += kLanes) store_n(s + j, load_n(p + j, n - j), n - j);
      s += n;
    }
  }
}

// Turns eight bfloat16 rows into float32 rows in `stage`, [kTile][depth].
template <typename W>
void stage_rows(const W* const* rows, int64_t depth, float* stage) {
  for (int64_t j = 0; j < kTile; ++j) {
    for (int64_t k = 0; k < depth; k += kLanes) {
      store_n(stage + j * depth + k, load_n(rows[j] + k, depth - k), depth - k);
    }
  }
}

// What to prefetch while tile t is multiplied: the same rows of the next tile, or, for weights with stride 1 along n,
// a share of the rows of the next block.
template <typename W>
Ahead ahead_of(const Block<W>& b, int64_t t, const Block<W>* next, int64_t depth) {
  constexpr int64_t kLine = 64 / sizeof(W);
  Ahead a;
  if (b.stride == 1) {
    const bool inside = t + kTile < b.count;
    if (!inside && !next) return a;
    for (int64_t j = 0; j < kTile; ++j) {
      a.stream[j] = reinterpret_cast<const char*>(inside ? b.row[t + kTile + j] : next->row[j]);
    }
    a.every = kLine;
    a.last = kTile;
    return a;
  }
  if (!next) return a;
  const int64_t tiles = b.count / kTile, lines = max64(next->width() / kLine, 1);
  const int64_t rows = max64(min64(16 / tiles, kTile / lines), 1);  // of the next block in a step of 16 elements
  for (int64_t j = 0; j < kTile; ++j) {
    const int64_t column = j % lines * kLine;
    const int64_t r = column >= next->run_size[0] && next->runs == 2;
    const W* p = next->run[r] + (column - r * next->run_size[0]) + (depth * (t / kTile) / tiles + j / lines) * b.stride;
    a.stream[j] = reinterpret_cast<const char*>(p);
  }
  a.step = rows * b.stride * static_cast<int64_t>(sizeof(W));
  a.last = min64(rows * lines, kTile);
  return a;
}

// c[row][token] for panels, with ldc = to - from; row_c[token][row], with ld kBlockRows, for plain rows. Weights with
// stride 1 along n do their plain rows elsewhere (axpy).
template <typename W>
void block_product(const Block<W>& b, const Block<W>* next, const Tokens& x, int64_t depth, float* stage, float* c,
                   float* row_c) {
  const bool columns = b.stride != 1;
  const int64_t plain = columns ? 0 : x.plain, ldc = x.to - x.from;
  if (columns && ldc == 0) return;
  if (columns) stage_columns(b, depth, stage);
  // Prefetching is spread over the products in proportion to their time; a plain row costs about two panel rows.
  const int64_t total = ldc + 2 * plain;
  for (int64_t t = 0; t < b.count; t += kTile) {
    if (t % kHiddenBlock >= b.valid) continue;
    const W* const* rows = b.row + t;
    const float* r[kTile];
    for (int64_t j = 0; j < kTile; ++j) r[j] = columns ? stage + b.col[t + j] : stage + j * depth;
    if constexpr (sizeof(W) == 4) {
      if (!columns) std::memcpy(r, rows, sizeof(r));
    } else {
      if (!columns && ldc) stage_rows(rows, depth, stage);
    }
    Ahead ahead = ahead_of(b, t, next, depth);
    const int64_t lines = ahead.last;
    int64_t done = 0;
    const auto share = [&](int64_t rows_done) {
      ahead.first = lines * done / total;
      done += rows_done;
      ahead.last = lines * done / total;
    };
    for (int64_t m = x.from; m < x.to;) {
      const int64_t vectors = split((x.all - m) / kLanes);
      share(vectors * kLanes);
      outer8(r, columns ? b.width() : 1, x.panels + (m - x.from) * depth, vectors, depth, ahead,
             c + t * ldc + (m - x.from), ldc);
      m += vectors * kLanes;
    }
    for (int64_t m = 0; m < plain;) {
      const int64_t step = split(plain - m);
      share(2 * step);
      dot8(rows, x.rows + m * depth, depth, step, depth, ahead, row_c + m * kBlockRows + t, kBlockRows);
      m += step;
    }
  }
}

}  // namespace
