// The fused expert MLP for one instruction set: packing, blocks, epilogues. See bindings.cpp for the plan.
//
// Rows of an expert are split in two: whole vectors of tokens go to outer8 as "panels" of one to three vectors, laid
// out [k][token]; the few that are left go to dot8 or axpy as plain rows. The hidden activations have the same split,
// so the first GEMM writes what the second one reads.
#pragma once

#include "gemm.h"
#include "vmath.h"

namespace {

using ascend_deep_cpu::ActiveExpert;
using ascend_deep_cpu::BiasView;
using ascend_deep_cpu::Dtype;
using ascend_deep_cpu::Experts;
using ascend_deep_cpu::kHiddenBlock;
using ascend_deep_cpu::kMaxPanelRows;
using ascend_deep_cpu::kOutBlock;
using ascend_deep_cpu::WeightView;

constexpr int64_t kBlockRows = 2 * kHiddenBlock;  // weight rows in a block of the first GEMM, if gated
static_assert(kOutBlock <= kBlockRows, "the scratch is sized for the first GEMM");

// The per-thread scratch, in floats.
struct Layout {
  int64_t panel_cap, panels, rows, stage, c, row_c, total;
  explicit Layout(const Experts& a) {
    // Packed tokens take at most 1 MB, half of a usual second-level cache.
    const int64_t fit = (262144 / max64(a.hidden_size, 1)) / kLanes * kLanes;
    panel_cap = min64(max64(fit, 3 * kLanes), kMaxPanelRows);
    const int64_t depth = round_up(max64(a.hidden_size, a.intermediate), 16);
    panels = 0;
    rows = panels + round_up(panel_cap * depth, 16);
    stage = rows + kLanes * depth;
    c = stage + kBlockRows * depth;
    row_c = c + kBlockRows * panel_cap;
    total = row_c + kLanes * kBlockRows;
  }
};

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

// Copies a block with stride 1 along n to `stage`, [depth][width], in float32: its rows are far apart in memory, and
// the product walks over them once per panel.
template <typename W>
void stage_columns(const Block<W>& b, int64_t depth, float* stage) {
  constexpr int64_t kAhead = 16;
  constexpr int64_t kLine = 64 / sizeof(W);
  const int64_t width = b.width();
  for (int64_t k = 0; k < depth; ++k) {
    float* s = stage + k * width;
    for (int64_t r = 0; r < b.runs; ++r) {
      const W* p = b.run[r] + k * b.stride;
      const int64_t n = b.run_size[r];
      for (int64_t j = 0; j < n; j += kLine) prefetch(p + kAhead * b.stride + j);
      for (int64_t j = 0; j < n; j += kLanes) store_n(s + j, load_n(p + j, n - j), n - j);
      s += n;
    }
  }
}

// Turns eight rows into float32 rows in `stage`, [kTile][depth]; the rows `ahead` are prefetched.
template <typename W>
void stage_rows(const W* const* rows, int64_t depth, int64_t ahead, float* stage) {
  for (int64_t j = 0; j < kTile; ++j) {
    const W* p = rows[j];
    float* s = stage + j * depth;
    for (int64_t k = 0; k < depth; k += kLanes) {
      if (k % 32 == 0) prefetch(p + k + ahead);
      store_n(s + k, load_n(p + k, depth - k), depth - k);
    }
  }
}

// c[row][token] for the panels [from, to) of packed tokens. `panel(r)` is the data of the panel that starts at row r.
template <typename W, typename Panel>
void outer_block(const Block<W>& b, const W* next, Panel panel, int64_t from, int64_t to, int64_t all, int64_t depth,
                 float* stage, float* c, int64_t ldc) {
  const bool columns = b.stride != 1;
  if (columns) stage_columns(b, depth, stage);
  for (int64_t t = 0; t < b.count; t += kTile) {
    if (t % kHiddenBlock >= b.valid) continue;
    const W* const* rows = b.row + t;
    int64_t ahead = (t + kTile < b.count ? b.row[t + kTile] : next) - rows[0];
    const float* r[kTile];
    if (columns) {
      for (int64_t j = 0; j < kTile; ++j) r[j] = stage + b.col[t + j];
      ahead = 0;
    } else if constexpr (sizeof(W) == 2) {
      stage_rows(rows, depth, ahead, stage);
      for (int64_t j = 0; j < kTile; ++j) r[j] = stage + j * depth;
      ahead = 0;
    } else {
      for (int64_t j = 0; j < kTile; ++j) r[j] = rows[j];
    }
    for (int64_t m = from; m < to;) {
      const int64_t vectors = split((all - m) / kLanes);
      outer8(r, columns ? b.width() : 1, panel(m), vectors, depth, m == from ? ahead : 0, c + t * ldc + (m - from), ldc);
      m += vectors * kLanes;
    }
  }
}

// c[token][row] for a few plain rows.
template <typename W>
void rows_block(const Block<W>& b, const W* next, const float* x, int64_t ldx, int64_t tokens, int64_t depth,
                float* c, int64_t ldc) {
  if (b.stride == 1) {
    for (int64_t t = 0; t < b.count; t += kTile) {
      if (t % kHiddenBlock >= b.valid) continue;
      const W* after = t + kTile < b.count ? b.row[t + kTile] : next;
      dot8(b.row + t, x, ldx, tokens, depth, after - b.row[t], c + t, ldc);
    }
    return;
  }
  float runs[kLanes * kBlockRows];
  int64_t at = 0;
  for (int64_t r = 0; r < b.runs; ++r) {
    axpy(b.run[r], b.stride, x, ldx, tokens, depth, b.run_size[r], runs + at, kBlockRows);
    at += b.run_size[r];
  }
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t j = 0; j < b.count; ++j) c[m * ldc + j] = runs[m * kBlockRows + b.col[j]];
  }
}

// ---- packing -------------------------------------------------------------------------------------------------------

template <typename T>
void pack_panel(const Experts& a, const ActiveExpert& e, int64_t from, int64_t vectors, float* panel) {
  const T* x = static_cast<const T*>(a.x);
  const int64_t width = vectors * kLanes;
  for (int64_t v = 0; v < vectors; ++v) {
    const T* src[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t r = from + v * kLanes + i;
      src[i] = r < e.rows ? x + a.token[e.first + r] * a.x_stride : nullptr;
    }
    for (int64_t k = 0; k < a.hidden_size; k += kLanes) {
      const int64_t n = min64(kLanes, a.hidden_size - k);
      Vec t[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) t[i] = src[i] ? load_n(src[i] + k, n) : Vec{};
      transpose(t);
      for (int64_t i = 0; i < n; ++i) store(panel + (k + i) * width + v * kLanes, t[i]);
    }
  }
}

template <typename T>
void pack_rows(const Experts& a, const ActiveExpert& e, int64_t from, int64_t count, float* rows) {
  for (int64_t r = 0; r < count; ++r) {
    const T* src = static_cast<const T*>(a.x) + a.token[e.first + from + r] * a.x_stride;
    for (int64_t k = 0; k < a.hidden_size; k += kLanes) {
      const int64_t left = a.hidden_size - k;
      store_n(rows + r * a.hidden_size + k, load_n(src + k, left), left);
    }
  }
}

AD_INLINE float bias_at(const BiasView& b, int64_t expert, int64_t n) {
  return b.base ? load_as_float(b.base, expert * b.se + n * b.sn, b.dtype) : 0.0f;
}

// ---- first GEMM and activation -------------------------------------------------------------------------------------

struct UpBias {
  float gate[kHiddenBlock], up[kHiddenBlock];
  UpBias(const Experts& a, int64_t expert, int64_t i0, int64_t n) {
    const int64_t step = a.gated && a.interleaved ? 2 : 1;
    const int64_t shift = a.interleaved ? 1 : a.intermediate;
    for (int64_t j = 0; j < kHiddenBlock; ++j) {
      const int64_t i = i0 + min64(j, n - 1);
      gate[j] = bias_at(a.b13, expert, i * step);
      up[j] = a.gated ? bias_at(a.b13, expert, i * step + shift) : 0.0f;
    }
  }
};

// c[row][token] -> hidden panels [i][token].
inline void up_epilogue_panels(const Experts& a, const ActiveExpert& e, const UpBias& bias, int64_t i0, int64_t n,
                               int64_t from, int64_t to, const float* c, int64_t ldc) {
  for (int64_t m = from; m < to;) {
    const int64_t vectors = split((e.panel_rows - m) / kLanes), width = vectors * kLanes;
    float* panel = a.hidden + (e.hidden_row + m) * a.intermediate;
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t r = m + v * kLanes;
      const Vec s = a.weight_on_input ? load_n(a.scale + e.first + r, e.rows - r) : splat(1.0f);
      for (int64_t j = 0; j < n; ++j) {
        const float* p = c + j * ldc + (r - from);
        const Vec g = load(p) * s + bias.gate[j];
        const Vec y = a.gated ? activate_gated(g, load(p + kHiddenBlock * ldc) * s + bias.up[j], a.act)
                              : activate_single(g, a.act);
        store(panel + (i0 + j) * width + v * kLanes, y);
      }
    }
    m += width;
  }
}

// c[token][row] -> plain hidden rows.
inline void up_epilogue_rows(const Experts& a, const ActiveExpert& e, const UpBias& bias, int64_t i0, int64_t n,
                             const float* c, int64_t ldc) {
  for (int64_t r = e.panel_rows; r < e.rows; ++r) {
    const Vec s = splat(a.weight_on_input ? a.scale[e.first + r] : 1.0f);
    const float* p = c + (r - e.panel_rows) * ldc;
    float* h = a.hidden + (e.hidden_row + r) * a.intermediate + i0;
    for (int64_t j = 0; j < n; j += kLanes) {
      const Vec g = load(p + j) * s + load(bias.gate + j);
      const Vec y = a.gated ? activate_gated(g, load(p + kHiddenBlock + j) * s + load(bias.up + j), a.act)
                            : activate_single(g, a.act);
      store_n(h + j, y, n - j);
    }
  }
}

template <typename W>
void up(const Experts& a, int64_t begin, int64_t end, void* scratch) {
  const Layout at(a);
  float* s = static_cast<float*>(scratch);
  const int64_t depth = a.hidden_size;
  for (int64_t g = begin; g < end;) {
    const ActiveExpert& e = a.experts[g / a.blocks];
    const int64_t b0 = g % a.blocks, b1 = min64(a.blocks, b0 + (end - g));
    g += b1 - b0;
    const bool last = g >= end;
    const int64_t plain = max64(e.rows - e.panel_rows, 0);
    if (plain) pack_rows<W>(a, e, e.panel_rows, plain, s + at.rows);
    for (int64_t m0 = 0; m0 < max64(e.panel_rows, 1);) {
      int64_t m1 = m0;
      while (m1 < e.panel_rows) {
        const int64_t vectors = split((e.panel_rows - m1) / kLanes);
        if (m1 + vectors * kLanes - m0 > at.panel_cap) break;
        pack_panel<W>(a, e, m1, vectors, s + at.panels + (m1 - m0) * depth);
        m1 += vectors * kLanes;
      }
      const float* panels = s + at.panels;
      for (int64_t blk = b0; blk < b1; ++blk) {
        const int64_t i0 = blk * kHiddenBlock, n = min64(kHiddenBlock, a.intermediate - i0);
        const Block<W> b = up_block<W>(a, e.expert, i0, n);
        const UpBias bias(a, e.expert, i0, n);
        const W* next = b.row[0];
        if (blk + 1 < b1) next = up_block<W>(a, e.expert, i0 + kHiddenBlock, 1).row[0];
        else if (!last) next = up_block<W>(a, a.experts[g / a.blocks].expert, 0, 1).row[0];
        if (m1 > m0) {
          const int64_t ldc = m1 - m0;
          outer_block(b, next, [=](int64_t m) { return panels + (m - m0) * depth; }, m0, m1, e.panel_rows, depth,
                      s + at.stage, s + at.c, ldc);
          up_epilogue_panels(a, e, bias, i0, n, m0, m1, s + at.c, ldc);
        }
        if (plain && m0 == 0) {
          rows_block(b, next, s + at.rows, depth, plain, depth, s + at.row_c, kBlockRows);
          up_epilogue_rows(a, e, bias, i0, n, s + at.row_c, kBlockRows);
        }
      }
      m0 = max64(m1, 1);
    }
  }
}

// ---- second GEMM and sum -------------------------------------------------------------------------------------------

// sum[token][n0 + j] += scale * (c + b2)
inline void add_row(const Experts& a, const ActiveExpert& e, int64_t r, int64_t n0, int64_t n, const float* bias,
                    Vec v) {
  const float scale = a.weight_on_input ? 1.0f : a.scale[e.first + r];
  float* out = a.sum + a.token[e.first + r] * a.hidden_size + n0;
  store_n(out, load_n(out, n) + scale * (v + load(bias)), n);
}

inline void down_epilogue_panels(const Experts& a, const ActiveExpert& e, const float* bias, int64_t n0, int64_t n,
                                 int64_t from, int64_t to, const float* c, int64_t ldc) {
  for (int64_t m = from; m < to; m += kLanes) {
    const int64_t rows = min64(kLanes, e.rows - m);
    for (int64_t j = 0; j < n; j += kLanes) {
      Vec t[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        t[i] = j + i < round_up(n, kTile) ? load(c + (j + i) * ldc + (m - from)) : Vec{};
      }
      transpose(t);
      for (int64_t i = 0; i < rows; ++i) add_row(a, e, m + i, n0 + j, n - j, bias + j, t[i]);
    }
  }
}

template <typename W>
void down(const Experts& a, int64_t begin, int64_t end, void* scratch) {
  const Layout at(a);
  float* s = static_cast<float*>(scratch);
  const int64_t depth = a.intermediate;
  for (int64_t index = 0; index < a.active; ++index) {
    const ActiveExpert& e = a.experts[index];
    const float* hidden = a.hidden + e.hidden_row * depth;
    const int64_t plain = max64(e.rows - e.panel_rows, 0);
    for (int64_t m0 = 0; m0 < max64(e.panel_rows, 1);) {
      int64_t m1 = m0;
      while (m1 < e.panel_rows) {
        const int64_t vectors = split((e.panel_rows - m1) / kLanes);
        if (m1 + vectors * kLanes - m0 > at.panel_cap) break;
        m1 += vectors * kLanes;
      }
      for (int64_t n0 = begin; n0 < end; n0 += kOutBlock) {
        const int64_t n = min64(kOutBlock, end - n0);
        const Block<W> b = down_block<W>(a, e.expert, n0, n);
        const W* next = b.row[0];
        if (n0 + kOutBlock < end) next = down_block<W>(a, e.expert, n0 + kOutBlock, 1).row[0];
        else if (index + 1 < a.active) next = down_block<W>(a, a.experts[index + 1].expert, begin, 1).row[0];
        float bias[kOutBlock];
        for (int64_t j = 0; j < kOutBlock; ++j) bias[j] = bias_at(a.b2, e.expert, n0 + min64(j, n - 1));
        if (m1 > m0) {
          const int64_t ldc = m1 - m0;
          outer_block(b, next, [=](int64_t m) { return hidden + m * depth; }, m0, m1, e.panel_rows, depth,
                      s + at.stage, s + at.c, ldc);
          down_epilogue_panels(a, e, bias, n0, n, m0, m1, s + at.c, ldc);
        }
        if (plain && m0 == 0) {
          rows_block(b, next, hidden + e.panel_rows * depth, depth, plain, depth, s + at.row_c, kBlockRows);
          for (int64_t r = 0; r < plain; ++r) {
            for (int64_t j = 0; j < n; j += kLanes) {
              const Vec v = load(s + at.row_c + r * kBlockRows + j);
              add_row(a, e, e.panel_rows + r, n0 + j, n - j, bias + j, v);
            }
          }
        }
      }
      m0 = max64(m1, 1);
    }
  }
  // Whoever summed these columns also rounds them.
  if (static_cast<const void*>(a.sum) == a.out) return;
  for (int64_t t = 0; t < a.tokens; ++t) {
    const float* src = a.sum + t * a.hidden_size;
    bf16* dst = static_cast<bf16*>(a.out) + t * a.hidden_size;
    for (int64_t n = begin; n < end; n += kLanes) store_n(dst + n, load_n(src + n, end - n), end - n);
  }
}

size_t scratch_bytes(const Experts& a) { return Layout(a).total * sizeof(float); }

void up_any(const Experts& a, int64_t begin, int64_t end, void* scratch) {
  if (a.dtype == ascend_deep_cpu::kBF16) up<bf16>(a, begin, end, scratch);
  else up<float>(a, begin, end, scratch);
}

void down_any(const Experts& a, int64_t begin, int64_t end, void* scratch) {
  if (a.dtype == ascend_deep_cpu::kBF16) down<bf16>(a, begin, end, scratch);
  else down<float>(a, begin, end, scratch);
}

}  // namespace
