// The arguments of the indexer kernels; see mqa_call.h.
#include "mqa_call.h"

#include <algorithm>
#include <atomic>

namespace ascend_deep_cpu {
namespace {

constexpr int64_t kMinKeys = 384;  // keys of a task, a multiple of every panel size

struct Tables {
  float e4m3[256], e2m1[512];
  Tables() {
    for (int i = 0; i < 256; ++i) {
      const int e = (i >> 3) & 15, m = i & 7;
      float v = e == 0 ? m * 0x1p-9f : (8 + m) * 0x1p-10f;
      for (int n = e; n > 0; --n) v *= 2.0f;
      if (e == 15 && m == 7) v = __builtin_nanf("");
      e4m3[i] = i & 128 ? -v : v;
      static constexpr float kGrid[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
      for (int half = 0; half < 2; ++half) {
        const int code = (i >> (4 * half)) & 15;
        e2m1[2 * i + half] = code & 8 ? -kGrid[code & 7] : kGrid[code & 7];
      }
    }
  }
};

const Tables& tables() {
  static const Tables t;
  return t;
}

Tensor to_float(const Tensor& t) {
  const Tensor f = t.scalar_type() == ScalarType::Float ? t : torch::stable::to(t, ScalarType::Float);
  return torch::stable::contiguous(f);
}

Tensor to_long(const Tensor& t) {
  const Tensor l = t.scalar_type() == ScalarType::Long ? t : torch::stable::to(t, ScalarType::Long);
  return torch::stable::contiguous(l);
}

MqaFormat format_of(const std::string& name, const Tensor& t, const char* what) {
  if (name == "fp8") return kMqaE4M3;
  if (name == "fp4") return kMqaE2M1;
  switch (dtype_of(t, what, true)) {
    case kBF16: return kMqaBF16;
    case kF16: return kMqaF16;
    default: return kMqaF32;
  }
}

MqaOperand operand(MqaCall& c, const Tensor& given, const std::string& format, const Optional& sf, const char* what) {
  check_cpu(given, what);
  const int64_t last = given.dim() - 1;
  const Tensor& t = c.keep(given.size(last) > 1 && given.stride(last) != 1 ? torch::stable::contiguous(given) : given);
  MqaOperand o{};
  o.format = format_of(format, t, what);
  o.base = static_cast<const char*>(t.const_data_ptr());
  for (int64_t i = 0; i < last; ++i) o.stride[i] = t.stride(i) * static_cast<int64_t>(t.element_size());
  if (sf) {
    const Tensor& s = c.keep(to_float(*sf));
    o.scale = kFloatScale;
    o.scales = static_cast<const char*>(s.const_data_ptr());
    for (int64_t i = 0; i < last; ++i) o.scale_stride[i] = s.stride(i) * 4;
    o.groups = s.size(last);
  }
  return o;
}

// Bounds [B or 1, S], clamped, or the constant `absent`.
void bound(std::vector<int64_t>& to, const Mqa& a, const Optional& given, int64_t absent, const char* what) {
  to.assign(a.batch * a.rows, absent);
  if (!given) return;
  check_dim(*given, what, 2);
  STD_TORCH_CHECK((given->size(0) == a.batch || given->size(0) == 1) && given->size(1) == a.rows, "ascend_deep: ", what,
                  " has shape ", shape_of(*given), ", it has to be [", a.batch, " or 1, ", a.rows, "].");
  const Tensor t = to_long(*given);
  const int64_t* p = static_cast<const int64_t*>(t.const_data_ptr());
  for (int64_t i = 0; i < a.batch * a.rows; ++i) {
    to[i] = std::min(std::max<int64_t>(p[t.size(0) == 1 ? i % a.rows : i], 0), a.keys);
  }
}

}  // namespace

void mqa_queries(MqaCall& c, const Tensor& q, const std::string& format, const Optional& sf, const Tensor& weights,
             double scale) {
  check_dim(q, "q", 4);
  check_dim(weights, "weights", 3);
  Mqa& a = c.a;
  a.q = operand(c, q, format, sf, "q");
  a.batch = q.size(0);
  a.rows = q.size(1);
  a.heads = q.size(2);
  a.depth = q.size(3) * (a.q.format == kMqaE2M1 ? 2 : 1);
  STD_TORCH_CHECK(weights.size(0) == a.batch && weights.size(1) == a.rows && weights.size(2) == a.heads,
                  "ascend_deep: weights has shape ", shape_of(weights), ", q has ", shape_of(q), ".");
  a.weights = static_cast<const float*>(c.keep(to_float(weights)).const_data_ptr());
  a.scale = static_cast<float>(scale);
  a.e4m3 = tables().e4m3;
  a.e2m1 = tables().e2m1;
  const int64_t bytes = std::max<int64_t>(4 * a.heads * a.depth, 1);
  a.row_block = std::min(std::max<int64_t>((int64_t{1} << 18) / bytes, 4), std::min<int64_t>(std::max<int64_t>(a.rows, 1), 64));
}

void mqa_keys(MqaCall& c, const Tensor& kv, const std::string& format, const Optional& sf, const Optional& ks,
          const Optional& ke, const Optional& mask) {
  check_dim(kv, "kv", 3);
  Mqa& a = c.a;
  a.kv = operand(c, kv, format, sf, "kv");
  a.keys = kv.size(1);
  STD_TORCH_CHECK(kv.size(0) == a.batch && kv.size(2) * (a.kv.format == kMqaE2M1 ? 2 : 1) == a.depth,
                  "ascend_deep: kv has shape ", shape_of(kv), ", it does not go with B = ", a.batch, " and D = ", a.depth,
                  " of q.");
  STD_TORCH_CHECK(a.keys < INT32_MAX, "ascend_deep: kv has ", a.keys, " keys, the CPU kernel takes less than 2^31 - 1.");
  bound(c.start, a, ks, 0, "ks");
  bound(c.end, a, ke, a.keys, "ke");
  a.start = c.start.data();
  a.end = c.end.data();
  if (!mask) return;
  check_dim(*mask, "mask", 3);
  STD_TORCH_CHECK((mask->size(0) == a.batch || mask->size(0) == 1) && (mask->size(1) == a.rows || mask->size(1) == 1) &&
                      mask->size(2) == a.keys,
                  "ascend_deep: mask has shape ", shape_of(*mask), ", it has to be [", a.batch, " or 1, ", a.rows,
                  " or 1, ", a.keys, "].");
  const Tensor& m = c.keep(a.keys > 1 && mask->stride(2) != 1 ? torch::stable::contiguous(*mask) : *mask);
  if (m.scalar_type() == ScalarType::Bool) {
    a.mask = kBoolMask;
  } else {
    const Dtype dtype = dtype_of(m, "mask", true);
    a.mask = dtype == kF32 ? kF32Mask : dtype == kBF16 ? kBF16Mask : kF16Mask;
  }
  a.mask_base = static_cast<const char*>(m.const_data_ptr());
  for (int64_t i = 0; i < 2; ++i) {
    a.mask_stride[i] = m.size(i) == 1 ? 0 : m.stride(i) * static_cast<int64_t>(m.element_size());
  }
}

void mqa_pages(MqaCall& c, const Tensor& kv_cache, const std::string& fmt, const Tensor& context_lens,
               const Tensor& block_table, const Optional& indices, int64_t max_context_len) {
  check_dim(kv_cache, "kv_cache", 4);
  check_dim(block_table, "block_table", 2);
  Mqa& a = c.a;
  const bool fp4 = fmt == "fp4_ue8m0";
  const int64_t element = static_cast<int64_t>(kv_cache.element_size());
  a.kv.base = static_cast<const char*>(kv_cache.const_data_ptr());
  a.kv.format = format_of(fp4 ? "fp4" : fmt == "plain" ? "" : "fp8", kv_cache, "kv_cache");
  a.kv.scale = fmt == "plain" ? kNoScale : fmt == "fp8" ? kFloatScale : kUe8m0;
  a.kv.groups = fmt == "fp8" ? 1 : a.depth / 32;
  a.paged = true;
  a.pages.count = kv_cache.size(0);
  a.pages.block = kv_cache.size(1);
  STD_TORCH_CHECK(a.pages.block > 0 || a.pages.count == 0, "ascend_deep: the pages of kv_cache hold no keys.");
  a.pages.block = std::max<int64_t>(a.pages.block, 1);
  a.pages.stride = kv_cache.stride(0) * element;
  if (fmt == "plain") {
    a.pages.width = kv_cache.stride(1) * element;
  } else {
    a.pages.width = fp4 ? a.depth / 2 : a.depth;
    a.pages.sf_width = kv_cache.size(3) - a.pages.width;
  }
  STD_TORCH_CHECK(fmt != "plain" || a.depth == kv_cache.size(3), "ascend_deep: kv_cache has shape ", shape_of(kv_cache),
                  ", D of q is ", a.depth, ".");
  a.keys = max_context_len;
  bound(c.end, a, context_lens, 0, "context_lens");
  c.start.assign(a.batch * a.rows, 0);
  a.start = c.start.data();
  a.end = c.end.data();
  // The page ids of every batch entry, rows that do not exist as pages that do not.
  const Tensor& table = c.keep(to_long(block_table));
  a.pages.columns = table.size(1);
  a.pages.table = static_cast<const int64_t*>(table.const_data_ptr());
  if (indices) {
    const Tensor ids = to_long(*indices);
    const int64_t* row = static_cast<const int64_t*>(ids.const_data_ptr());
    c.table.assign(a.batch * a.pages.columns, -1);
    for (int64_t b = 0; b < a.batch; ++b) {
      if (row[b] < 0 || row[b] >= table.size(0)) continue;
      std::copy_n(a.pages.table + row[b] * a.pages.columns, a.pages.columns, c.table.data() + b * a.pages.columns);
    }
    a.pages.table = c.table.data();
  }
}

MqaShares::MqaShares(const Mqa& a, int64_t panel) {
  blocks = (a.rows + a.row_block - 1) / a.row_block;
  const int64_t threads = torch::stable::get_num_threads(), rows = std::max<int64_t>(a.batch * blocks, 1);
  const int64_t wanted = threads > 1 && rows < 2 * threads ? (2 * threads + rows - 1) / rows : 1;
  const int64_t least = (kMinKeys + panel - 1) / panel * panel;
  keys = std::max((a.keys + wanted - 1) / wanted, std::min(least, std::max<int64_t>(a.keys, 1)));
  keys = (keys + panel - 1) / panel * panel;
  splits = std::max<int64_t>((a.keys + keys - 1) / keys, 1);
}

void mqa_run(const Mqa& a, const MqaShares& shares, const std::function<void(const MqaTask&)>& run) {
  std::atomic<int64_t> next{0};
  const int64_t n = shares.tasks(a);
  torch::stable::parallel_for(0, std::min<int64_t>(n, torch::stable::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
      MqaTask t{};
      t.split = i % shares.splits;
      t.batch = i / shares.splits / shares.blocks;
      t.s0 = i / shares.splits % shares.blocks * a.row_block;
      t.s1 = std::min(t.s0 + a.row_block, a.rows);
      t.k0 = t.split * shares.keys;
      t.k1 = std::min(t.k0 + shares.keys, a.keys);
      run(t);
    }
  });
}

}  // namespace ascend_deep_cpu
