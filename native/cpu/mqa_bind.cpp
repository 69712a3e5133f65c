// ascend_deep_cpu::mqa_logits, mqa_topk and paged_mqa_logits: arguments, and the sharing out of work.
//
// A task is a block of rows of one batch entry and a range of keys. Which thread runs a task, and how many there are,
// changes nothing: scores do not depend on it (see mqa.h), and the choice of keys is by a total order.
#include <algorithm>
#include <atomic>
#include <functional>
#include <vector>

#include "mqa_api.h"
#include "plan.h"

namespace ascend_deep_cpu {
namespace {

constexpr int64_t kMinKeys = 384;  // keys of a task, a multiple of every panel size

using Optional = std::optional<Tensor>;

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

// Keeps what the raw pointers of an Mqa point at.
struct Call {
  Mqa a{};
  std::vector<Tensor> kept;
  std::vector<int64_t> start, end;

  const Tensor& keep(Tensor t) {
    kept.push_back(std::move(t));
    return kept.back();
  }
};

MqaFormat format_of(const std::string& name, const Tensor& t, const char* what) {
  if (name == "fp8") return kMqaE4M3;
  if (name == "fp4") return kMqaE2M1;
  switch (dtype_of(t, what, true)) {
    case kBF16: return kMqaBF16;
    case kF16: return kMqaF16;
    default: return kMqaF32;
  }
}

MqaOperand operand(Call& c, const Tensor& given, const std::string& format, const Optional& sf, const char* what) {
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

void queries(Call& c, const Tensor& q, const std::string& q_format, const Optional& q_sf, const Tensor& weights,
             double scale) {
  check_dim(q, "q", 4);
  check_dim(weights, "weights", 3);
  Mqa& a = c.a;
  a.q = operand(c, q, q_format, q_sf, "q");
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

void keys(Call& c, const Tensor& kv, const std::string& kv_format, const Optional& kv_sf, const Optional& ks,
          const Optional& ke, const Optional& mask) {
  check_dim(kv, "kv", 3);
  Mqa& a = c.a;
  a.kv = operand(c, kv, kv_format, kv_sf, "kv");
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

struct Shares {
  int64_t blocks, splits, keys;  // row blocks of a batch entry; key ranges, and keys in each
  Shares(const Mqa& a, int64_t panel) {
    blocks = (a.rows + a.row_block - 1) / a.row_block;
    const int64_t threads = torch::stable::get_num_threads(), rows = std::max<int64_t>(a.batch * blocks, 1);
    const int64_t wanted = threads > 1 && rows < 2 * threads ? (2 * threads + rows - 1) / rows : 1;
    const int64_t least = (kMinKeys + panel - 1) / panel * panel;
    keys = std::max((a.keys + wanted - 1) / wanted, std::min(least, std::max<int64_t>(a.keys, 1)));
    keys = (keys + panel - 1) / panel * panel;
    splits = std::max<int64_t>((a.keys + keys - 1) / keys, 1);
  }
};

// Runs task(0 .. n), the next one on whichever thread is free.
void run(int64_t n, const std::function<void(int64_t)>& task) {
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(n, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) task(i);
  });
}

void run_logits(Call& c) {
  const Mqa& a = c.a;
  const MqaKernels& isa = mqa_kernels();
  const Shares shares(a, isa.panel);
  const size_t bytes = isa.logits_scratch(a);
  run(a.batch * shares.blocks * shares.splits, [&](int64_t i) {
    const int64_t split = i % shares.splits, block = i / shares.splits % shares.blocks;
    const int64_t s0 = block * a.row_block, k0 = split * shares.keys;
    isa.logits(a, i / shares.splits / shares.blocks, s0, std::min(s0 + a.row_block, a.rows), k0,
               std::min(k0 + shares.keys, a.keys), thread_scratch(bytes));
  });
}

Tensor logits_out(Call& c, const Tensor& like, int64_t columns, std::optional<ScalarType> out_dtype) {
  Mqa& a = c.a;
  const ScalarType type = out_dtype.value_or(ScalarType::Float);
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, "ascend_deep: out_dtype is ", name_of(type),
                  ", the CPU kernel writes float32 and bfloat16.");
  const int64_t shape[3] = {a.batch, a.rows, columns};
  Tensor out = torch::stable::empty({shape, 3}, type, std::nullopt, like.device());
  a.out_dtype = type == ScalarType::Float ? kF32 : kBF16;
  a.out = out.mutable_data_ptr();
  a.columns = columns;
  return out;
}

Tensor mqa_logits(const Tensor& q, const std::string& q_format, const Optional& q_sf, const Tensor& kv,
                  const std::string& kv_format, const Optional& kv_sf, const Tensor& weights, const Optional& ks,
                  const Optional& ke, const Optional& mask, double scale, int64_t max_seqlen_k,
                  std::optional<ScalarType> out_dtype) {
  Call c;
  queries(c, q, q_format, q_sf, weights, scale);
  keys(c, kv, kv_format, kv_sf, ks, ke, mask);
  c.a.compressed = max_seqlen_k > 0;
  const Tensor out = logits_out(c, q, c.a.compressed ? max_seqlen_k : c.a.keys, out_dtype);
  if (out.numel()) run_logits(c);
  return out;
}

Tensor paged_mqa_logits(const Tensor& q, const std::string& q_format, const Optional& q_sf, const Tensor& kv_cache,
                        const Tensor& weights, const Tensor& context_lens, const Tensor& block_table,
                        const Optional& indices, int64_t max_context_len, double scale,
                        std::optional<ScalarType> out_dtype, const std::string& fmt) {
  Call c;
  queries(c, q, q_format, q_sf, weights, scale);
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
  const Tensor table = to_long(block_table);
  a.pages.columns = table.size(1);
  std::vector<int64_t> chosen;
  a.pages.table = static_cast<const int64_t*>(table.const_data_ptr());
  if (indices) {
    const Tensor ids = to_long(*indices);
    const int64_t* row = static_cast<const int64_t*>(ids.const_data_ptr());
    chosen.assign(a.batch * a.pages.columns, -1);
    for (int64_t b = 0; b < a.batch; ++b) {
      if (row[b] < 0 || row[b] >= table.size(0)) continue;
      std::copy_n(a.pages.table + row[b] * a.pages.columns, a.pages.columns, chosen.data() + b * a.pages.columns);
    }
    a.pages.table = chosen.data();
  }
  const Tensor out = logits_out(c, q, max_context_len, out_dtype);
  if (out.numel()) run_logits(c);
  return out;
}

template <typename Index>
void write_row(const std::vector<uint64_t>& chosen, int64_t topk, float* scores, Index* idx) {
  const int64_t n = static_cast<int64_t>(chosen.size());
  for (int64_t i = 0; i < n; ++i) {
    idx[i] = static_cast<Index>(0xffffffffu - static_cast<uint32_t>(chosen[i]));
  }
  std::fill(idx + n, idx + topk, Index{-1});
  if (!scores) return;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t key = static_cast<int32_t>(static_cast<uint32_t>(chosen[i] >> 32) ^ 0x80000000u);
    const int32_t bits = key == kMqaNan ? 0x7fc00000 : key ^ ((key >> 31) & 0x7fffffff);
    std::memcpy(scores + i, &bits, 4);
  }
  std::fill(scores + n, scores + topk, -__builtin_inff());
}

std::tuple<Tensor, Tensor> mqa_topk(const Tensor& q, const std::string& q_format, const Optional& q_sf, const Tensor& kv,
                                    const std::string& kv_format, const Optional& kv_sf, const Tensor& weights,
                                    const Optional& ks, const Optional& ke, const Optional& mask, int64_t topk,
                                    double scale, bool rank_last, bool sorted, bool return_scores, bool int32) {
  Call c;
  queries(c, q, q_format, q_sf, weights, scale);
  keys(c, kv, kv_format, kv_sf, ks, ke, mask);
  Mqa& a = c.a;
  STD_TORCH_CHECK(topk >= 0, "ascend_deep: topk is ", topk, ", it has to be 0 or positive.");
  const int64_t shape[3] = {a.batch, a.rows, topk}, nothing[1] = {0};
  Tensor idx = torch::stable::empty({shape, 3}, int32 ? ScalarType::Int : ScalarType::Long, std::nullopt, q.device());
  Tensor scores = return_scores ? torch::stable::empty({shape, 3}, ScalarType::Float, std::nullopt, q.device())
                                : torch::stable::empty({nothing, 1}, ScalarType::Float, std::nullopt, q.device());
  if (idx.numel() == 0) return {scores, idx};
  const MqaKernels& isa = mqa_kernels();
  const Shares shares(a, isa.panel);
  a.topk = topk;
  a.rank_last = rank_last;
  a.capacity = std::min(std::max(2 * topk, topk + 512), a.keys) + isa.panel;
  const int64_t pitch = std::min(topk, shares.keys), splits = shares.splits, rows = a.batch * a.rows;
  float* scores_at = return_scores ? static_cast<float*>(scores.mutable_data_ptr()) : nullptr;
  void* idx_at = idx.mutable_data_ptr();
  const auto finish = [&](int64_t row, std::vector<uint64_t>& chosen, std::vector<uint64_t>& spare) {
    if (static_cast<int64_t>(chosen.size()) > topk) {
      spare.resize(chosen.size());
      chosen.resize(mqa_prune(chosen.data(), static_cast<int64_t>(chosen.size()), topk, spare.data()));
    }
    if (sorted) std::sort(chosen.begin(), chosen.end(), std::greater<uint64_t>());
    float* to = scores_at ? scores_at + row * topk : nullptr;
    if (int32) write_row(chosen, topk, to, static_cast<int32_t*>(idx_at) + row * topk);
    else write_row(chosen, topk, to, static_cast<int64_t*>(idx_at) + row * topk);
  };
  // With one key range a row is finished where it was scored, otherwise after all ranges are.
  std::vector<uint64_t> lists(splits > 1 ? rows * splits * pitch : 0);
  std::vector<int64_t> counts(splits > 1 ? rows * splits : 0);
  const size_t bytes = isa.topk_scratch(a);
  run(a.batch * shares.blocks * splits, [&](int64_t i) {
    const int64_t split = i % splits, block = i / splits % shares.blocks, b = i / splits / shares.blocks;
    const int64_t s0 = block * a.row_block, s1 = std::min(s0 + a.row_block, a.rows);
    const int64_t k0 = split * shares.keys, k1 = std::min(k0 + shares.keys, a.keys);
    std::vector<uint64_t> own((s1 - s0) * pitch), spare;
    std::vector<int64_t> count(s1 - s0);
    isa.topk(a, b, s0, s1, k0, k1, own.data(), pitch, count.data(), thread_scratch(bytes));
    for (int64_t s = s0; s < s1; ++s) {
      const uint64_t* from = own.data() + (s - s0) * pitch;
      const int64_t row = b * a.rows + s;
      if (splits == 1) {
        std::vector<uint64_t> chosen(from, from + count[s - s0]);
        finish(row, chosen, spare);
      } else {
        counts[row * splits + split] = count[s - s0];
        std::copy_n(from, count[s - s0], lists.data() + (row * splits + split) * pitch);
      }
    }
  });
  if (splits > 1) {
    torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
      std::vector<uint64_t> chosen, spare;
      for (int64_t row = begin; row < end; ++row) {
        chosen.clear();
        for (int64_t n = row * splits; n < (row + 1) * splits; ++n) {
          chosen.insert(chosen.end(), lists.data() + n * pitch, lists.data() + n * pitch + counts[n]);
        }
        finish(row, chosen, spare);
      }
    });
  }
  return {scores, idx};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ascend_deep_cpu, m) {
  m.def(
      "mqa_logits(Tensor q, str q_format, Tensor? q_sf, Tensor kv, str kv_format, Tensor? kv_sf, Tensor weights, "
      "Tensor? ks, Tensor? ke, Tensor? mask, float scale, int max_seqlen_k, ScalarType? out_dtype) -> Tensor");
  m.def(
      "paged_mqa_logits(Tensor q, str q_format, Tensor? q_sf, Tensor kv_cache, Tensor weights, Tensor context_lens, "
      "Tensor block_table, Tensor? indices, int max_context_len, float scale, ScalarType? out_dtype, str fmt) -> Tensor");
  m.def(
      "mqa_topk(Tensor q, str q_format, Tensor? q_sf, Tensor kv, str kv_format, Tensor? kv_sf, Tensor weights, "
      "Tensor? ks, Tensor? ke, Tensor? mask, int topk, float scale, bool rank_last, bool sorted, bool return_scores, "
      "bool int32) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(ascend_deep_cpu, CPU, m) {
  m.impl("mqa_logits", TORCH_BOX(&mqa_logits));
  m.impl("paged_mqa_logits", TORCH_BOX(&paged_mqa_logits));
  m.impl("mqa_topk", TORCH_BOX(&mqa_topk));
}

}  // namespace ascend_deep_cpu
