// ascend_deep_cpu::mqa_logits and paged_mqa_logits.
#include "mqa_call.h"

namespace ascend_deep_cpu {
namespace {

void run_logits(MqaCall& c) {
  const Mqa& a = c.a;
  const MqaKernels& isa = mqa_kernels();
  const size_t bytes = isa.logits_scratch(a);
  mqa_run(a, MqaShares(a, isa.panel), [&](const MqaTask& t) {
    isa.logits(a, t.batch, t.s0, t.s1, t.k0, t.k1, thread_scratch(bytes));
  });
}

Tensor logits_out(MqaCall& c, const Tensor& like, int64_t columns, std::optional<ScalarType> out_dtype) {
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
  MqaCall c;
  mqa_queries(c, q, q_format, q_sf, weights, scale);
  mqa_keys(c, kv, kv_format, kv_sf, ks, ke, mask);
  c.a.compressed = max_seqlen_k > 0;
  const Tensor out = logits_out(c, q, c.a.compressed ? max_seqlen_k : c.a.keys, out_dtype);
  if (out.numel()) run_logits(c);
  return out;
}

Tensor paged_mqa_logits(const Tensor& q, const std::string& q_format, const Optional& q_sf, const Tensor& kv_cache,
                        const Tensor& weights, const Tensor& context_lens, const Tensor& block_table,
                        const Optional& indices, int64_t max_context_len, double scale,
                        std::optional<ScalarType> out_dtype, const std::string& fmt) {
  MqaCall c;
  mqa_queries(c, q, q_format, q_sf, weights, scale);
  mqa_pages(c, kv_cache, fmt, context_lens, block_table, indices, max_context_len);
  const Tensor out = logits_out(c, q, max_context_len, out_dtype);
  if (out.numel()) run_logits(c);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ascend_deep_cpu, m) {
  m.def(
      "mqa_logits(Tensor q, str q_format, Tensor? q_sf, Tensor kv, str kv_format, Tensor? kv_sf, Tensor weights, "
      "Tensor? ks, Tensor? ke, Tensor? mask, float scale, int max_seqlen_k, ScalarType? out_dtype) -> Tensor");
  m.def(
      "paged_mqa_logits(Tensor q, str q_format, Tensor? q_sf, Tensor kv_cache, Tensor weights, Tensor context_lens, "
      "Tensor block_table, Tensor? indices, int max_context_len, float scale, ScalarType? out_dtype, str fmt) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ascend_deep_cpu, CPU, m) {
  m.impl("mqa_logits", TORCH_BOX(&mqa_logits));
  m.impl("paged_mqa_logits", TORCH_BOX(&paged_mqa_logits));
}

}  // namespace ascend_deep_cpu
