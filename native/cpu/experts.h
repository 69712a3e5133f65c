// The fused expert MLP for one instruction set: packing, blocks, epilogues. See bindings.cpp for the plan.
//
// Rows of an expert are split in two: whole vectors of tokens go to outer as "panels" of one to three vectors, laid
// out [k][token], or one and a half to pairs, [k / 2][token][2]; the few that are left go to dot8, dot_near or axpy as
// plain rows. The hidden activations have the same split,
// so the first GEMM writes what the second one reads.
#pragma once

#include "columns.h"
#include "vmath.h"

namespace {

using ascend_deep_cpu::ActiveExpert;
using ascend_deep_cpu::BiasView;
using ascend_deep_cpu::Dtype;
using ascend_deep_cpu::kMaxPanelRows;
using ascend_deep_cpu::WeightView;

// Hidden units, or output columns, for which plain rows are multiplied at a time if weights have stride 1 along n.
constexpr int64_t kSpan = 480;
static_assert(kSpan % kHiddenBlock == 0 && kSpan % kOutBlock == 0 && kSpan * 2 >= kBlockRows, "whole blocks");

// The per-thread scratch, in floats.
struct Layout {
  int64_t panel_cap, panels, rows, stage, c, row_c, total;
  explicit Layout(const Experts& a) {
    // Packed tokens take at most 1 MB, half of a usual second-level cache.
    const int64_t fit = (262144 / max64(a.hidden_size, 1)) / kLanes * kLanes;
    panel_cap = min64(max64(fit, 3 * kLanes), kMaxPanelRows);
    const int64_t depth = round_up(max64(a.hidden_size, a.intermediate), 16);
    const bool columns = a.w13.sk != 1 || a.w2.sk != 1;
    panels = 0;
    rows = panels + round_up(panel_cap * depth, 16);
    stage = rows + kLanes * depth;
    c = stage + max64(kTall * depth, columns ? kStagedColumns : 0);
    row_c = c + (columns ? kWide + 2 * kTile : kBlockRows) * panel_cap;
    total = row_c + kLanes * (columns ? 2 * kSpan : kBlockRows);
  }
};

// ---- packing -------------------------------------------------------------------------------------------------------

// `depth`: of the panel, in elements of T. With bfloat16 tokens and T = float, elements are pairs.
template <typename T>
void pack_panel(const Experts& a, const ActiveExpert& e, int64_t from, int64_t vectors, int64_t depth, float* panel) {
  const char* x = static_cast<const char*>(a.x);
  const int64_t width = vectors * kLanes;
  const int64_t stride = a.x_stride * (a.dtype == ascend_deep_cpu::kBF16 ? 2 : 4);
  for (int64_t v = 0; v < vectors; ++v) {
    const T* src[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t r = from + v * kLanes + i;
      src[i] = r < e.rows ? reinterpret_cast<const T*>(x + a.token[e.first + r] * stride) : nullptr;
    }
    for (int64_t k = 0; k < depth; k += kLanes) {
      const int64_t n = min64(kLanes, depth - k);
      Vec t[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) t[i] = src[i] ? load_n(src[i] + k, n) : Vec{};
      transpose(t);
      for (int64_t i = 0; i < n; ++i) store(panel + (k + i) * width + v * kLanes, t[i]);
    }
  }
}

// The panel of kPairRows tokens that an expert begins with.
template <typename T>
void pack_pairs(const Experts& a, const ActiveExpert& e, float* panel) {
  const T* x = static_cast<const T*>(a.x);
  for (int64_t r = 0; r < kPairRows; ++r) {
    const T* src = r < e.rows ? x + a.token[e.first + r] * a.x_stride : nullptr;
    for (int64_t k = 0; k < a.hidden_size; k += kLanes) {
      const int64_t n = min64(kLanes, a.hidden_size - k);
      float row[kLanes];
      store(row, src ? load_n(src + k, n) : Vec{});
      for (int64_t i = 0; i < n; i += 2) std::memcpy(panel + (k + i) * kPairRows + 2 * r, row + i, 2 * sizeof(float));
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

// Where the epilogue of the first GEMM finds a hidden unit: its gate is number j * step, its up value `up` behind that.
struct Order {
  int64_t step, up;
};

// The activations of kLanes tokens, from row r of the expert on, of the unit whose gate is at c.
AD_INLINE Vec activated(const Experts& a, const float* c, int64_t up, Vec scale, float gate_bias, float up_bias) {
  const Vec g = load(c) * scale + gate_bias;
  return a.gated ? activate_gated(g, load(c + up) * scale + up_bias, a.act) : activate_single(g, a.act);
}

// c[row][token] of units [i0, i0 + n), both even -> hidden panel [i / 2][token][2].
inline void up_epilogue_pairs(const Experts& a, const ActiveExpert& e, int64_t i0, int64_t n, const float* c,
                              Order order) {
  const UpBias bias(a, e.expert, i0, n);
  float* panel = a.hidden + e.hidden_row * a.intermediate + i0 * kPairRows;
  const int64_t up = order.up * kPairRows, step = order.step * kPairRows;
  for (int64_t r = 0; r < kPairRows; r += kLanes) {
    const Vec s = a.weight_on_input ? load_n(a.scale + e.first + r, e.rows - r) : splat(1.0f);
    for (int64_t j = 0; j < n; j += 2) {
      const float* p = c + j * step + r;
      const Vec even = activated(a, p, up, s, bias.gate[j], bias.up[j]);
      const Vec odd = activated(a, p + step, up, s, bias.gate[j + 1], bias.up[j + 1]);
      float* h = panel + j * kPairRows + 2 * r;
      store(h, in_turns<0>(even, odd));
      if (r + kLanes <= kPairRows) store(h + kLanes, in_turns<static_cast<int>(kLanes / 2)>(even, odd));
    }
  }
}

// c[row][token] of units [i0, i0 + n) -> hidden panels [i][token], or of words, [i / 2][token]; i0 and n are even then.
inline void up_epilogue_panels(const Experts& a, const ActiveExpert& e, int64_t i0, int64_t n, const Tokens& x,
                               const float* c, Order order) {
  if (e.panel_rows == kPairRows) return up_epilogue_pairs(a, e, i0, n, c, order);
  const UpBias bias(a, e.expert, i0, n);
  const int64_t ldc = x.to - x.from;
  for (int64_t m = x.from; m < x.to;) {
    const int64_t vectors = split((e.panel_rows - m) / kLanes), width = vectors * kLanes;
    float* panel = a.hidden + (e.hidden_row + m) * a.intermediate;
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t r = m + v * kLanes;
      const Vec s = a.weight_on_input ? load_n(a.scale + e.first + r, e.rows - r) : splat(1.0f);
      for (int64_t j = 0; x.words && j < n; j += 2) {
        const float* p = c + j * order.step * ldc + (r - x.from);
        const Vec even = activated(a, p, order.up * ldc, s, bias.gate[j], bias.up[j]);
        const Vec odd = activated(a, p + order.step * ldc, order.up * ldc, s, bias.gate[j + 1], bias.up[j + 1]);
        store(panel + (i0 + j) / 2 * width + v * kLanes, words_of(even, odd));
      }
      for (int64_t j = 0; !x.words && j < n; ++j) {
        const float* p = c + j * order.step * ldc + (r - x.from);
        store(panel + (i0 + j) * width + v * kLanes,
              activated(a, p, order.up * ldc, s, bias.gate[j], bias.up[j]));
      }
    }
    m += width;
  }
}

// c[token][row] of units [i0, i0 + n) -> plain hidden rows.
inline void up_epilogue_rows(const Experts& a, const ActiveExpert& e, int64_t i0, int64_t n, const float* c, int64_t ldc,
                             Order order) {
  const UpBias bias(a, e.expert, i0, n);
  for (int64_t r = e.panel_rows; r < e.rows; ++r) {
    const Vec s = splat(a.weight_on_input ? a.scale[e.first + r] : 1.0f);
    const float* p = c + (r - e.panel_rows) * ldc;
    float* h = a.hidden + (e.hidden_row + r) * a.intermediate + i0;
    for (int64_t j = 0; j < n; j += kLanes) {
      float gate[kLanes], other[kLanes] = {};
      if (order.step == 1) {
        store(gate, load(p + j));
        if (a.gated) store(other, load(p + j + order.up));
      } else {
        for (int64_t i = 0; i < kLanes; ++i) {
          gate[i] = p[(j + i) * order.step];
          other[i] = p[(j + i) * order.step + order.up];
        }
      }
      const Vec g = load(gate) * s + load(bias.gate + j);
      const Vec y = a.gated ? activate_gated(g, load(other) * s + load(bias.up + j), a.act)
                            : activate_single(g, a.act);
      store_n(h + j, y, n - j);
    }
  }
}

// The plain rows of blocks [b0, b1), for weights with stride 1 along n.
template <typename W>
void up_axpy(const Experts& a, const ActiveExpert& e, int64_t b0, int64_t b1, const float* rows, float* c) {
  const int64_t plain = e.rows - e.panel_rows, depth = a.hidden_size;
  const Order order = a.gated && a.interleaved ? Order{2, 1} : Order{1, kSpan};
  const int64_t end = min64(b1 * kHiddenBlock, a.intermediate);
  for (int64_t from = b0 * kHiddenBlock; from < end; from += kSpan) {
    const int64_t to = min64(end, from + kSpan);
    const Columns<W> b = up_columns<W>(a, e.expert, from, to - from);
    for (int64_t r = 0; r < b.runs; ++r) {
      axpy(b.run[r], b.stride, rows, depth, plain, depth, b.size[r], c + r * kSpan, 2 * kSpan);
    }
    for (int64_t i0 = from; i0 < to; i0 += kHiddenBlock) {
      const float* ci = c + (i0 - from) * order.step;
      up_epilogue_rows(a, e, i0, min64(kHiddenBlock, to - i0), ci, 2 * kSpan, order);
    }
  }
}

// The rows [from, to) of the next packing: whole panels, as many as fit.
inline int64_t panels_end(const ActiveExpert& e, int64_t from, int64_t cap) {
  int64_t to = from;
  while (to < e.panel_rows) {
    const int64_t width = panel_width(e.panel_rows - to);
    if (to + width - from > cap) break;
    to += width;
  }
  return to;
}

// Panels of blocks [b0, b1), for weights with stride 1 along n. `after` is the expert that comes next, if any.
template <typename W>
void up_panels_columns(const Experts& a, const ActiveExpert& e, int64_t b0, int64_t b1, const ActiveExpert* after,
                       const Tokens& x, float* stage, float* c) {
  const bool pairs = a.gated && a.interleaved;
  const int64_t group = a.gated ? kWide / 2 : kWide;
  const int64_t end = min64(b1 * kHiddenBlock, a.intermediate);
  for (int64_t from = b0 * kHiddenBlock; from < end; from += group) {
    const int64_t n = min64(group, end - from);
    const Columns<W> b = up_columns<W>(a, e.expert, from, n);
    Columns<W> next;
    const bool more = from + n < end;
    if (more) next = up_columns<W>(a, e.expert, from + n, min64(group, end - from - n));
    else if (after) next = up_columns<W>(a, after->expert, 0, min64(group, a.intermediate));
    columns_product(b, more || after ? &next : nullptr, x, a.hidden_size, stage, c);
    const Order order = pairs ? Order{2, 1} : Order{1, b.start(1)};
    for (int64_t j = 0; j < n; j += kHiddenBlock) {
      up_epilogue_panels(a, e, from + j, min64(kHiddenBlock, n - j), x, c + j * order.step * (x.to - x.from), order);
    }
  }
}

template <typename W>
void up(const Experts& a, int64_t begin, int64_t end, void* scratch) {
  const Layout at(a);
  float* s = static_cast<float*>(scratch);
  const int64_t depth = a.hidden_size;
  const bool columns = a.w13.sk != 1;
  for (int64_t g = begin; g < end;) {
    const ActiveExpert& e = a.experts[g / a.blocks];
    const int64_t b0 = g % a.blocks, b1 = min64(a.blocks, b0 + (end - g));
    g += b1 - b0;
    const ActiveExpert* after = g < end ? a.experts + g / a.blocks : nullptr;
    const int64_t plain = max64(e.rows - e.panel_rows, 0);
    if (plain) pack_rows<W>(a, e, e.panel_rows, plain, s + at.rows);
    if (plain && columns) up_axpy<W>(a, e, b0, b1, s + at.rows, s + at.row_c);
    Tokens x{0, 0, e.panel_rows, s + at.panels, s + at.rows, columns ? 0 : plain, a.words};
    while (x.from < e.panel_rows || x.plain) {
      x.to = panels_end(e, x.from, at.panel_cap);
      for (int64_t m = x.from; m < x.to;) {
        const int64_t width = panel_width(e.panel_rows - m);
        float* panel = s + at.panels + (m - x.from) * depth;
        if (width == kPairRows) pack_pairs<W>(a, e, panel);
        else if (a.words) pack_panel<float>(a, e, m, width / kLanes, depth / 2, panel);
        else pack_panel<W>(a, e, m, width / kLanes, depth, panel);
        m += width;
      }
      const ActiveExpert* follows = x.to >= e.panel_rows ? after : nullptr;
      if (columns) up_panels_columns<W>(a, e, b0, b1, follows, x, s + at.stage, s + at.c);
      for (int64_t blk = columns ? b1 : b0; blk < b1; ++blk) {
        const int64_t i0 = blk * kHiddenBlock, n = min64(kHiddenBlock, a.intermediate - i0);
        const Block<W> b = up_block<W>(a, e.expert, i0, n);
        Block<W> next;
        const bool more = blk + 1 < b1;
        if (more) next = up_block<W>(a, e.expert, i0 + n, min64(kHiddenBlock, a.intermediate - i0 - n));
        else if (follows) next = up_block<W>(a, follows->expert, 0, min64(kHiddenBlock, a.intermediate));
        block_product(b, more || follows ? &next : nullptr, x, depth, s + at.stage, s + at.c, s + at.row_c);
        const Order order{1, kHiddenBlock};
        up_epilogue_panels(a, e, i0, n, x, s + at.c, order);
        if (x.plain) up_epilogue_rows(a, e, i0, n, s + at.row_c, kBlockRows, order);
      }
      x.plain = 0;
      x.from = x.to;
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

struct DownBias {
  float value[kOutBlock];
  DownBias(const Experts& a, int64_t expert, int64_t n0, int64_t n) {
    for (int64_t j = 0; j < kOutBlock; ++j) value[j] = bias_at(a.b2, expert, n0 + min64(j, n - 1));
  }
};

// Columns [n0, n0 + n), n <= kOutBlock; c[row][token].
inline void down_epilogue_panels(const Experts& a, const ActiveExpert& e, int64_t n0, int64_t n, const Tokens& x,
                                 const float* c) {
  const DownBias bias(a, e.expert, n0, n);
  const int64_t ldc = x.to - x.from;
  for (int64_t m = x.from; m < x.to; m += kLanes) {
    const int64_t rows = min64(kLanes, min64(e.rows, x.to) - m);
    for (int64_t j = 0; j < n; j += kLanes) {
      Vec t[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        t[i] = j + i < round_up(n, kTile) ? load(c + (j + i) * ldc + (m - x.from)) : Vec{};
      }
      transpose(t);
      for (int64_t i = 0; i < rows; ++i) add_row(a, e, m + i, n0 + j, n - j, bias.value + j, t[i]);
    }
  }
}

inline void down_epilogue_rows(const Experts& a, const ActiveExpert& e, int64_t n0, int64_t n, const float* c,
                               int64_t ldc) {
  const DownBias bias(a, e.expert, n0, n);
  for (int64_t r = e.panel_rows; r < e.rows; ++r) {
    for (int64_t j = 0; j < n; j += kLanes) {
      add_row(a, e, r, n0 + j, n - j, bias.value + j, load(c + (r - e.panel_rows) * ldc + j));
    }
  }
}

// The plain rows of columns [begin, end), for weights with stride 1 along n.
template <typename W>
void down_axpy(const Experts& a, const ActiveExpert& e, int64_t begin, int64_t end, const float* rows, float* c) {
  const int64_t depth = a.intermediate;
  for (int64_t from = begin; from < end; from += kSpan) {
    const int64_t to = min64(end, from + kSpan);
    const Columns<W> b = down_columns<W>(a, e.expert, from, to - from);
    axpy(b.run[0], b.stride, rows, depth, e.rows - e.panel_rows, depth, to - from, c, 2 * kSpan);
    for (int64_t n0 = from; n0 < to; n0 += kOutBlock) {
      down_epilogue_rows(a, e, n0, min64(kOutBlock, to - n0), c + (n0 - from), 2 * kSpan);
    }
  }
}

// Panels of columns [begin, end), for weights with stride 1 along n. `after` is the expert that comes next, if any.
template <typename W>
void down_panels_columns(const Experts& a, const ActiveExpert& e, int64_t begin, int64_t end, const ActiveExpert* after,
                         const Tokens& x, float* stage, float* c) {
  for (int64_t from = begin; from < end; from += kWide) {
    const int64_t n = min64(kWide, end - from);
    const Columns<W> b = down_columns<W>(a, e.expert, from, n);
    Columns<W> next;
    const bool more = from + n < end;
    if (more) next = down_columns<W>(a, e.expert, from + n, min64(kWide, end - from - n));
    else if (after) next = down_columns<W>(a, after->expert, begin, min64(kWide, end - begin));
    columns_product(b, more || after ? &next : nullptr, x, a.intermediate, stage, c);
    for (int64_t j = 0; j < n; j += kOutBlock) {
      down_epilogue_panels(a, e, from + j, min64(kOutBlock, n - j), x, c + j * (x.to - x.from));
    }
  }
}

template <typename W>
void down(const Experts& a, int64_t begin, int64_t end, void* scratch) {
  const Layout at(a);
  float* s = static_cast<float*>(scratch);
  const int64_t depth = a.intermediate;
  const bool columns = a.w2.sk != 1;
  for (int64_t index = 0; index < a.active; ++index) {
    const ActiveExpert& e = a.experts[index];
    const ActiveExpert* after = index + 1 < a.active ? &e + 1 : nullptr;
    const float* hidden = a.hidden + e.hidden_row * depth;
    const float* rows = hidden + e.panel_rows * depth;
    const int64_t plain = max64(e.rows - e.panel_rows, 0);
    if (plain && columns) down_axpy<W>(a, e, begin, end, rows, s + at.row_c);
    Tokens x{0, 0, e.panel_rows, hidden, rows, columns ? 0 : plain, a.words};
    while (x.from < e.panel_rows || x.plain) {
      x.to = panels_end(e, x.from, at.panel_cap);
      x.panels = hidden + x.from * depth;
      const ActiveExpert* follows = x.to >= e.panel_rows ? after : nullptr;
      if (columns) down_panels_columns<W>(a, e, begin, end, follows, x, s + at.stage, s + at.c);
      for (int64_t n0 = columns ? end : begin; n0 < end; n0 += kOutBlock) {
        const int64_t n = min64(kOutBlock, end - n0);
        const Block<W> b = down_block<W>(a, e.expert, n0, n);
        Block<W> next;
        const bool more = n0 + n < end;
        if (more) next = down_block<W>(a, e.expert, n0 + n, min64(kOutBlock, end - n0 - n));
        else if (follows) next = down_block<W>(a, follows->expert, begin, min64(kOutBlock, end - begin));
        block_product(b, more || follows ? &next : nullptr, x, depth, s + at.stage, s + at.c, s + at.row_c);
        down_epilogue_panels(a, e, n0, n, x, s + at.c);
        if (x.plain) down_epilogue_rows(a, e, n0, n, s + at.row_c, kBlockRows);
      }
      x.plain = 0;
      x.from = x.to;
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
