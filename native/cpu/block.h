// A block of weight rows with stride 1 along k, and its product with the tokens of an expert.
#pragma once

#include "dots.h"

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
  int64_t count;  // a multiple of kTile
  int64_t valid;  // of every kHiddenBlock rows
  int64_t step;   // bytes between neighbours
};

// Hidden units [i0, i0 + n) of the first GEMM: gate rows first, up rows from kHiddenBlock on.
template <typename W>
Block<W> up_block(const Experts& a, int64_t expert, int64_t i0, int64_t n) {
  const bool pairs = a.gated && a.interleaved;
  const W* gate = static_cast<const W*>(a.w13.base) + expert * a.w13.se + i0 * (pairs ? 2 : 1) * a.w13.sn;
  const W* up = a.w3 ? static_cast<const W*>(a.w3) + expert * a.w3_se + i0 * a.w13.sn
                     : gate + (pairs ? 1 : a.intermediate) * a.w13.sn;
  Block<W> b;
  b.valid = n;
  b.step = (pairs ? 2 : 1) * a.w13.sn * static_cast<int64_t>(sizeof(W));
  b.count = a.gated ? kHiddenBlock + round_up(n, kTile) : round_up(n, kTile);
  for (int64_t j = 0; j < b.count; ++j) {
    const int64_t i = min64(j % kHiddenBlock, n - 1);
    b.row[j] = (j >= kHiddenBlock ? up : gate) + i * (pairs ? 2 : 1) * a.w13.sn;
  }
  return b;
}

template <typename W>
Block<W> down_block(const Experts& a, int64_t expert, int64_t n0, int64_t n) {
  const W* first = static_cast<const W*>(a.w2.base) + expert * a.w2.se + n0 * a.w2.sn;
  Block<W> b;
  b.valid = n;
  b.step = a.w2.sn * static_cast<int64_t>(sizeof(W));
  b.count = round_up(n, kTile);
  for (int64_t j = 0; j < b.count; ++j) b.row[j] = first + min64(j, n - 1) * a.w2.sn;
  return b;
}

// The tokens of a product. Panels are those of the rows [from, to) of an expert that has `all` panel rows.
struct Tokens {
  int64_t from, to, all;
  const float* panels;  // of row `from`; a panel that starts at row r is at (r - from) * depth
  const float* rows;    // [plain][depth]
  int64_t plain;        // 0 next to panels of words
  bool words;           // panels hold pairs of bfloat16, as dots.h has them
};

// Turns bfloat16 rows into float32 rows in `stage`, [height][depth].
template <typename W>
void stage_rows(const W* const* rows, int64_t height, int64_t depth, float* stage) {
  for (int64_t j = 0; j < height; ++j) {
    for (int64_t k = 0; k < depth; k += kLanes) {
      store_n(stage + j * depth + k, load_n(rows[j] + k, depth - k), depth - k);
    }
  }
}

// Shares out the lines of `ahead` over the products of a tile in proportion to their time.
struct Spread {
  Ahead ahead;
  int64_t lines, total, done = 0;
  Spread(const Ahead& a, int64_t total_cost) : ahead(a), lines(a.last), total(total_cost) {}
  const Ahead& take(int64_t cost) {
    ahead.first = lines * done / total;
    done += cost;
    ahead.last = lines * done / total;
    return ahead;
  }
};

// Rows of the tile that begins at row t of a block: kTall where they go without a rest, if `tall`, else kTile.
template <typename W>
int64_t tile_height(const Block<W>& b, int64_t t, bool tall) {
  const int64_t left = round_up(b.valid, kTile) - t % kHiddenBlock;
  return tall && left >= kTall && left != 2 * kTile ? kTall : kTile;
}

// The tile behind the one that ends before row t, or the first one of `next`: what to prefetch.
template <typename W>
Ahead ahead_of(const Block<W>& b, const Block<W>* next, int64_t t, bool tall, int64_t every) {
  if (t < b.count && t % kHiddenBlock >= b.valid) t = round_up(t, kHiddenBlock);
  const Block<W>* block = t < b.count ? &b : next;
  Ahead ahead;
  if (block) {
    const int64_t row = block == &b ? t : 0;
    ahead.base = reinterpret_cast<const char*>(block->row[row]);
    ahead.step = block->step;
    ahead.every = every;
    ahead.last = tile_height(*block, row, tall);
  }
  return ahead;
}

// The width of the panel that begins `left` rows before the end of an expert's panels.
AD_INLINE int64_t panel_width(int64_t left) { return left == kPairRows ? left : split(left / kLanes) * kLanes; }

// The plain rows times a tile of kTile rows.
template <typename W>
void plain_rows(const W* const* rows, const Tokens& x, int64_t depth, Spread& spread, float* row_c) {
  for (int64_t m = 0; m < x.plain;) {
    const int64_t step = split(x.plain - m);
    dot8(rows, x.rows + m * depth, depth, step, depth, spread.take(2 * step), row_c + m * kBlockRows, kBlockRows);
    m += step;
  }
}

// c[row][token] for panels, with ldc = to - from; row_c[token][row], with ld kBlockRows, for plain rows. Meanwhile the
// rows of the next tile are prefetched, those of `next` at the end.
template <typename W>
void block_product(const Block<W>& b, const Block<W>* next, const Tokens& x, int64_t depth, float* stage, float* c,
                   float* row_c) {
  const int64_t ldc = x.to - x.from;
  const bool tall = ldc == 2 * kLanes || (ldc == kLanes && x.plain);
  for (int64_t t = 0, height; t < b.count; t += height) {
    height = tile_height(b, t, tall);
    if (t % kHiddenBlock >= b.valid) continue;
    const W* const* rows = b.row + t;
    const bool words = x.words && ldc;
    Spread spread(ahead_of(b, next, t + height, tall, words ? 16 : 64 / sizeof(W)), ldc ? ldc : 2 * x.plain);
    const float* r[kTall];
    if constexpr (sizeof(W) == 4) {
      std::memcpy(r, rows, height * sizeof(r[0]));
    } else {
      if (ldc && !words) stage_rows(rows, height, depth, stage);
      for (int64_t j = 0; j < height; ++j) r[j] = stage + j * depth;
    }
    for (int64_t m = x.from; m < x.to;) {
      const int64_t width = panel_width(x.all - m);
      const float* panel = x.panels + (m - x.from) * depth;
      const Ahead& ahead = spread.take(width);
      if constexpr (kHasWordDots && sizeof(W) == 2) {
        if (words) {
          dots(rows, height, panel, width / kLanes, depth / 2, ahead, c + t * ldc + (m - x.from), ldc);
          m += width;
          continue;
        }
      }
      if (width == kPairRows) pairs(r, panel, depth, ahead, c + t * ldc, ldc);
      else outer<1>(r, height, panel, width / kLanes, depth, false, ahead, c + t * ldc + (m - x.from), ldc);
      m += width;
    }
    if (!ldc) plain_rows(rows, x, depth, spread, row_c + t);
    else if (x.plain) dot_near(r, height, x.rows, depth, x.plain, depth, row_c + t, kBlockRows);
  }
}

}  // namespace
