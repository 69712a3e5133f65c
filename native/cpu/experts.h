// The fused expert MLP for one instruction set: packing, blocks, epilogues. See bindings.cpp for the plan.
//
// Rows of an expert are split in two: whole vectors of tokens go to outer8 as "panels" of one to three vectors, laid
// out [k][token]; the few that are left go to dot8 or axpy as plain rows. The hidden activations have the same split,
// so the first GEMM writes what the second one reads.
#pragma once

#include "block.h"
#include "vmath.h"

namespace {

using ascend_deep_cpu::ActiveExpert;
using ascend_deep_cpu::BiasView;
using ascend_deep_cpu::Dtype;
using ascend_deep_cpu::kMaxPanelRows;
using ascend_deep_cpu::WeightView;

// Hidden units, or output columns, for which plain rows are multiplied at a time if weights have stride 1 along n.
constexpr int64_t kSpan = 512;
static_assert(kSpan % kHiddenBlock == 0 && kSpan % kOutBlock == 0 && kSpan * 2 >= kBlockRows, "whole blocks");

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
    total = row_c + kLanes * 2 * kSpan;
  }
};

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

// Plain rows to hidden rows: unit i0 + j has its gate at c[token][j * step] and its up value `up` behind that.
inline void up_epilogue_rows(const Experts& a, const ActiveExpert& e, const UpBias& bias, int64_t i0, int64_t n,
                             const float* c, int64_t ldc, int64_t step, int64_t up) {
  for (int64_t r = e.panel_rows; r < e.rows; ++r) {
    const Vec s = splat(a.weight_on_input ? a.scale[e.first + r] : 1.0f);
    const float* p = c + (r - e.panel_rows) * ldc;
    float* h = a.hidden + (e.hidden_row + r) * a.intermediate + i0;
    for (int64_t j = 0; j < n; j += kLanes) {
      float gate[kLanes], other[kLanes] = {};
      if (step == 1) {
        store(gate, load(p + j));
        if (a.gated) store(other, load(p + j + up));
      } else {
        for (int64_t i = 0; i < kLanes; ++i) {
          gate[i] = p[(j + i) * step];
          other[i] = p[(j + i) * step + up];
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
void up_columns(const Experts& a, const ActiveExpert& e, int64_t b0, int64_t b1, const float* rows, float* c) {
  const int64_t plain = e.rows - e.panel_rows;
  const bool pairs = a.gated && a.interleaved;
  for (; b0 < b1; b0 += kSpan / kHiddenBlock) {
    const int64_t from = b0 * kHiddenBlock, to = min64(min64(b1 * kHiddenBlock, a.intermediate), from + kSpan);
    const Block<W> b = up_block<W>(a, e.expert, from, kHiddenBlock);
    axpy(b.run[0], b.stride, rows, a.hidden_size, plain, a.hidden_size, (to - from) * (pairs ? 2 : 1), c, 2 * kSpan);
    if (b.runs == 2) {
      axpy(b.run[1], b.stride, rows, a.hidden_size, plain, a.hidden_size, to - from, c + kSpan, 2 * kSpan);
    }
    for (int64_t i0 = from; i0 < to; i0 += kHiddenBlock) {
      const int64_t n = min64(kHiddenBlock, to - i0);
      const float* ci = c + (i0 - from) * (pairs ? 2 : 1);
      up_epilogue_rows(a, e, UpBias(a, e.expert, i0, n), i0, n, ci, 2 * kSpan, pairs ? 2 : 1, pairs ? 1 : kSpan);
    }
  }
}

// The rows [from, to) of the next packing: whole panels, as many as fit.
inline int64_t panels_end(const ActiveExpert& e, int64_t from, int64_t cap) {
  int64_t to = from;
  while (to < e.panel_rows) {
    const int64_t width = split((e.panel_rows - to) / kLanes) * kLanes;
    if (to + width - from > cap) break;
    to += width;
  }
  return to;
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
    const int64_t plain = max64(e.rows - e.panel_rows, 0);
    if (plain) pack_rows<W>(a, e, e.panel_rows, plain, s + at.rows);
    if (plain && a.w13.sk != 1) up_columns<W>(a, e, b0, b1, s + at.rows, s + at.row_c);
    Tokens x{0, 0, e.panel_rows, s + at.panels, s + at.rows, a.w13.sk == 1 ? plain : 0};
    do {
      x.to = panels_end(e, x.from, at.panel_cap);
      for (int64_t m = x.from; m < x.to;) {
        const int64_t vectors = split((e.panel_rows - m) / kLanes);
        pack_panel<W>(a, e, m, vectors, s + at.panels + (m - x.from) * depth);
        m += vectors * kLanes;
      }
      for (int64_t blk = b0; blk < b1; ++blk) {
        const int64_t i0 = blk * kHiddenBlock, n = min64(kHiddenBlock, a.intermediate - i0);
        const Block<W> b = up_block<W>(a, e.expert, i0, n);
        Block<W> next;
        const bool more = blk + 1 < b1, expert_follows = !more && g < end && x.to >= e.panel_rows;
        if (more) next = up_block<W>(a, e.expert, i0 + n, min64(kHiddenBlock, a.intermediate - i0 - n));
        if (expert_follows) next = up_block<W>(a, a.experts[g / a.blocks].expert, 0, min64(kHiddenBlock, a.intermediate));
        block_product(b, more || expert_follows ? &next : nullptr, x, depth, s + at.stage, s + at.c, s + at.row_c);
        const UpBias bias(a, e.expert, i0, n);
        up_epilogue_panels(a, e, bias, i0, n, x.from, x.to, s + at.c, x.to - x.from);
        if (x.plain) {
          up_epilogue_rows(a, e, bias, i0, n, s + at.row_c, kBlockRows, 1, kHiddenBlock);
        }
      }
      x.plain = 0;
      x.from = x.to;
    } while (x.from < e.panel_rows);
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

inline void down_epilogue_rows(const Experts& a, const ActiveExpert& e, const float* bias, int64_t n0, int64_t n,
                               const float* c, int64_t ldc) {
  for (int64_t r = e.panel_rows; r < e.rows; ++r) {
    for (int64_t j = 0; j < n; j += kLanes) {
      add_row(a, e, r, n0 + j, n - j, bias + j, load(c + (r - e.panel_rows) * ldc + j));
    }
  }
}

struct DownBias {
  float value[kOutBlock];
  DownBias(const Experts& a, int64_t expert, int64_t n0, int64_t n) {
    for (int64_t j = 0; j < kOutBlock; ++j) value[j] = bias_at(a.b2, expert, n0 + min64(j, n - 1));
  }
};

// The plain rows of columns [begin, end), for weights with stride 1 along n.
template <typename W>
void down_columns(const Experts& a, const ActiveExpert& e, int64_t begin, int64_t end, const float* rows, float* c) {
  for (int64_t from = begin; from < end; from += kSpan) {
    const int64_t to = min64(end, from + kSpan);
    const Block<W> b = down_block<W>(a, e.expert, from, kOutBlock);
    axpy(b.run[0], b.stride, rows, a.intermediate, e.rows - e.panel_rows, a.intermediate, to - from, c, 2 * kSpan);
    for (int64_t n0 = from; n0 < to; n0 += kOutBlock) {
      const int64_t n = min64(kOutBlock, to - n0);
      down_epilogue_rows(a, e, DownBias(a, e.expert, n0, n).value, n0, n, c + (n0 - from), 2 * kSpan);
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
    const float* rows = hidden + e.panel_rows * depth;
    const int64_t plain = max64(e.rows - e.panel_rows, 0);
    if (plain && a.w2.sk != 1) down_columns<W>(a, e, begin, end, rows, s + at.row_c);
    Tokens x{0, 0, e.panel_rows, hidden, rows, a.w2.sk == 1 ? plain : 0};
    do {
      x.to = panels_end(e, x.from, at.panel_cap);
      x.panels = hidden + x.from * depth;
      for (int64_t n0 = begin; n0 < end; n0 += kOutBlock) {
        const int64_t n = min64(kOutBlock, end - n0);
        const Block<W> b = down_block<W>(a, e.expert, n0, n);
        Block<W> next;
        const bool more = n0 + n < end, expert_follows = !more && index + 1 < a.active && x.to >= e.panel_rows;
        if (more) next = down_block<W>(a, e.expert, n0 + n, min64(kOutBlock, end - n0 - n));
        if (expert_follows) next = down_block<W>(a, a.experts[index + 1].expert, begin, min64(kOutBlock, end - begin));
        block_product(b, more || expert_follows ? &next : nullptr, x, depth, s + at.stage, s + at.c, s + at.row_c);
        const DownBias bias(a, e.expert, n0, n);
        down_epilogue_panels(a, e, bias.value, n0, n, x.from, x.to, s + at.c, x.to - x.from);
        if (x.plain) down_epilogue_rows(a, e, bias.value, n0, n, s + at.row_c, kBlockRows);
      }
      x.plain = 0;
      x.from = x.to;
    } while (x.from < e.panel_rows);
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
