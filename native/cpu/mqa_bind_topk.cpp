// ascend_deep_cpu::mqa_topk and paged_mqa_topk.
#include <algorithm>
#include <cstring>

#include "mqa_call.h"

namespace ascend_deep_cpu {
namespace {

struct Choice {
  int64_t topk;
  bool rank_last, sorted, return_scores, int32;
};

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

std::tuple<Tensor, Tensor> choose(MqaCall& c, const Tensor& like, const Choice& choice) {
  Mqa& a = c.a;
  const int64_t topk = choice.topk;
  STD_TORCH_CHECK(topk >= 0, "ascend_deep: topk is ", topk, ", it has to be 0 or positive.");
  const int64_t shape[3] = {a.batch, a.rows, topk}, nothing[1] = {0};
  const auto device = like.device();
  Tensor idx = torch::stable::empty({shape, 3}, choice.int32 ? ScalarType::Int : ScalarType::Long, std::nullopt, device);
  Tensor scores = choice.return_scores ? torch::stable::empty({shape, 3}, ScalarType::Float, std::nullopt, device)
                                       : torch::stable::empty({nothing, 1}, ScalarType::Float, std::nullopt, device);
  if (idx.numel() == 0) return {scores, idx};
  const MqaKernels& isa = mqa_kernels();
  const MqaShares shares(a, isa.panel);
  a.topk = topk;
  a.rank_last = choice.rank_last;
  a.capacity = std::min(std::max(2 * topk, topk + 512), a.keys) + isa.panel;
  const int64_t pitch = std::min(topk, shares.keys), splits = shares.splits, rows = a.batch * a.rows;
  float* scores_at = choice.return_scores ? static_cast<float*>(scores.mutable_data_ptr()) : nullptr;
  void* idx_at = idx.mutable_data_ptr();
  // `chosen` is ascending by index.
  const auto finish = [&](int64_t row, std::vector<uint64_t>& chosen, std::vector<uint64_t>& spare) {
    spare.resize(chosen.size());
    chosen.resize(mqa_prune(chosen.data(), static_cast<int64_t>(chosen.size()), topk, spare.data()));
    if (choice.sorted) mqa_sort(chosen.data(), static_cast<int64_t>(chosen.size()), spare.data());
    float* to = scores_at ? scores_at + row * topk : nullptr;
    if (choice.int32) write_row(chosen, topk, to, static_cast<int32_t*>(idx_at) + row * topk);
    else write_row(chosen, topk, to, static_cast<int64_t*>(idx_at) + row * topk);
  };
  // With one key range a row is finished where it was scored, otherwise after all ranges are.
  std::vector<uint64_t> lists(splits > 1 ? rows * splits * pitch : 0);
  std::vector<int64_t> counts(splits > 1 ? rows * splits : 0);
  const size_t bytes = isa.topk_scratch(a);
  mqa_run(a, shares, [&](const MqaTask& t) {
    std::vector<uint64_t> own((t.s1 - t.s0) * pitch), chosen, spare;
    std::vector<int64_t> count(t.s1 - t.s0);
    isa.topk(a, t.batch, t.s0, t.s1, t.k0, t.k1, own.data(), pitch, count.data(), thread_scratch(bytes));
    for (int64_t s = t.s0; s < t.s1; ++s) {
      const uint64_t* from = own.data() + (s - t.s0) * pitch;
      const int64_t row = t.batch * a.rows + s, n = count[s - t.s0];
      if (splits == 1) {
        chosen.assign(from, from + n);
        finish(row, chosen, spare);
      } else {
        counts[row * splits + t.split] = n;
        std::copy_n(from, n, lists.data() + (row * splits + t.split) * pitch);
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

std::tuple<Tensor, Tensor> mqa_topk(const Tensor& q, const std::string& q_format, const Optional& q_sf, const Tensor& kv,
                                    const std::string& kv_format, const Optional& kv_sf, const Tensor& weights,
                                    const Optional& ks, const Optional& ke, const Optional& mask, int64_t topk,
                                    double scale, bool rank_last, bool sorted, bool return_scores, bool int32) {
  MqaCall c;
  mqa_queries(c, q, q_format, q_sf, weights, scale);
  mqa_keys(c, kv, kv_format, kv_sf, ks, ke, mask);
  return choose(c, q, {topk, rank_last, sorted, return_scores, int32});
}

std::tuple<Tensor, Tensor> paged_mqa_topk(const Tensor& q, const std::string& q_format, const Optional& q_sf,
                                          const Tensor& kv_cache, const Tensor& weights, const Tensor& context_lens,
                                          const Tensor& block_table, const Optional& indices, int64_t topk,
                                          int64_t max_context_len, double scale, bool sorted, bool return_scores,
                                          bool int32, const std::string& fmt) {
  MqaCall c;
  mqa_queries(c, q, q_format, q_sf, weights, scale);
  mqa_pages(c, kv_cache, fmt, context_lens, block_table, indices, max_context_len);
  return choose(c, q, {topk, false, sorted, return_scores, int32});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ascend_deep_cpu, m) {
  m.def(
      "mqa_topk(Tensor q, str q_format, Tensor? q_sf, Tensor kv, str kv_format, Tensor? kv_sf, Tensor weights, "
      "Tensor? ks, Tensor? ke, Tensor? mask, int topk, float scale, bool rank_last, bool sorted, bool return_scores, "
      "bool int32) -> (Tensor, Tensor)");
  m.def(
      "paged_mqa_topk(Tensor q, str q_format, Tensor? q_sf, Tensor kv_cache, Tensor weights, Tensor context_lens, "
      "Tensor block_table, Tensor? indices, int topk, int max_context_len, float scale, bool sorted, "
      "bool return_scores, bool int32, str fmt) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(ascend_deep_cpu, CPU, m) {
  m.impl("mqa_topk", TORCH_BOX(&mqa_topk));
  m.impl("paged_mqa_topk", TORCH_BOX(&paged_mqa_topk));
}

}  // namespace ascend_deep_cpu
