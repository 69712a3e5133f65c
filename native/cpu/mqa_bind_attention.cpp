// ascend_deep_cpu::sparse_mqa_attention: arguments, and the sharing out of rows and heads.
#include <algorithm>
#include <atomic>

#include "mqa_api.h"
#include "plan.h"

namespace ascend_deep_cpu {
namespace {

using Optional = std::optional<Tensor>;

Tensor inner_contiguous(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.size(last) > 1 && t.stride(last) != 1 ? torch::stable::contiguous(t) : t;
}

const void* view(const Tensor& t, int64_t (&strides)[3]) {
  for (int64_t i = 0; i < 3; ++i) strides[i] = t.stride(i);
  return t.const_data_ptr();
}

std::tuple<Tensor, Tensor> sparse_mqa_attention(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                                const Tensor& idx_in, const Optional& mask_in, const Optional& sink_in,
                                                double scale) {
  check_dim(q_in, "q", 4);
  check_dim(k_in, "k", 4);
  check_dim(v_in, "v", 4);
  check_dim(idx_in, "idx", 3);
  SparseAttention a{};
  a.dtype = dtype_of(q_in, "q");
  STD_TORCH_CHECK(k_in.scalar_type() == q_in.scalar_type() && v_in.scalar_type() == q_in.scalar_type(),
                  "ascend_deep: q, k and v have to have one dtype.");
  const int64_t batch = q_in.size(0), heads = q_in.size(1);
  a.key_heads = k_in.size(1);
  a.rows = q_in.size(2);
  a.keys = k_in.size(2);
  a.depth = q_in.size(3);
  a.value_depth = v_in.size(3);
  a.topk = idx_in.size(2);
  STD_TORCH_CHECK(a.key_heads > 0 && heads % a.key_heads == 0 && k_in.size(3) == a.depth && k_in.size(0) == batch &&
                      v_in.size(0) == batch && v_in.size(1) == a.key_heads && v_in.size(2) == a.keys &&
                      idx_in.size(0) == batch && idx_in.size(1) == a.rows,
                  "ascend_deep: q ", shape_of(q_in), ", k ", shape_of(k_in), ", v ", shape_of(v_in), " and idx ",
                  shape_of(idx_in), " do not go together.");
  STD_TORCH_CHECK(a.keys <= INT32_MAX, "ascend_deep: k has ", a.keys, " keys, the CPU kernel takes up to 2^31 - 1.");
  a.group = heads / a.key_heads;
  a.scale = static_cast<float>(scale);
  const Tensor q = inner_contiguous(q_in), k = inner_contiguous(k_in), v = inner_contiguous(v_in);
  a.q = view(q, a.q_stride);
  a.k = view(k, a.k_stride);
  a.v = view(v, a.v_stride);
  const Tensor idx = torch::stable::contiguous(
      idx_in.scalar_type() == ScalarType::Long ? idx_in : torch::stable::to(idx_in, ScalarType::Long));
  a.idx = static_cast<const int64_t*>(idx.const_data_ptr());
  Optional mask, sink;
  if (mask_in) {
    check_dim(*mask_in, "mask", 4);
    mask = inner_contiguous(*mask_in);
    const int64_t sizes[3] = {batch, heads, a.rows};
    for (int64_t i = 0; i < 3; ++i) {
      STD_TORCH_CHECK(mask->size(i) == 1 || mask->size(i) == sizes[i], "ascend_deep: mask has shape ", shape_of(*mask),
                      ", it has to be [", batch, " or 1, ", heads, " or 1, ", a.rows, " or 1, ", a.keys, "].");
      a.mask_stride[i] = mask->size(i) == 1 ? 0 : mask->stride(i) * static_cast<int64_t>(mask->element_size());
    }
    STD_TORCH_CHECK(mask->size(3) == a.keys, "ascend_deep: mask has ", mask->size(3), " columns, k has ", a.keys, " keys.");
    if (mask->scalar_type() == ScalarType::Bool) {
      a.mask = kBoolMask;
    } else {
      const Dtype dtype = dtype_of(*mask, "mask", true);
      a.mask = dtype == kF32 ? kF32Mask : dtype == kBF16 ? kBF16Mask : kF16Mask;
    }
    a.mask_base = static_cast<const char*>(mask->const_data_ptr());
  }
  if (sink_in) {
    check_dim(*sink_in, "sink", 1);
    STD_TORCH_CHECK(sink_in->size(0) == heads, "ascend_deep: sink has ", sink_in->size(0), " elements, q has ", heads,
                    " heads.");
    sink = torch::stable::contiguous(
        sink_in->scalar_type() == ScalarType::Float ? *sink_in : torch::stable::to(*sink_in, ScalarType::Float));
    a.sink = static_cast<const float*>(sink->const_data_ptr());
  }
  const int64_t shape[4] = {batch, heads, a.rows, a.value_depth};
  Tensor out = torch::stable::empty({shape, 4}, q.scalar_type(), std::nullopt, q.device());
  Tensor lse = torch::stable::empty({shape, 3}, ScalarType::Float, std::nullopt, q.device());
  if (lse.numel() == 0) return {out, lse};
  a.out = out.mutable_data_ptr();
  a.lse = static_cast<float*>(lse.mutable_data_ptr());

  // Few rows: their heads are shared out too, in whole tiles.
  const int64_t rows = batch * a.key_heads * a.rows, threads = torch::stable::get_num_threads();
  const int64_t parts = rows < 2 * threads ? std::min((2 * threads + rows - 1) / rows, (a.group + 7) / 8) : 1;
  const int64_t per_task = threads > 1 ? ((a.group + parts - 1) / parts + 7) / 8 * 8 : a.group;
  const int64_t pieces = (a.group + per_task - 1) / per_task;
  a.task_heads = (per_task + 7) / 8 * 8;
  const MqaKernels& isa = mqa_kernels();
  const size_t bytes = isa.attention_scratch(a);
  std::atomic<int64_t> next{0};
  const int64_t tasks = rows * pieces;
  torch::stable::parallel_for(0, std::min(tasks, threads), 1, [&](int64_t, int64_t) {
    void* scratch = thread_scratch(bytes);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      const int64_t h0 = i % pieces * per_task, row = i / pieces;
      const int64_t s = row % a.rows, g = row / a.rows % a.key_heads;
      isa.attention(a, row / a.rows / a.key_heads, g, s, h0, std::min(h0 + per_task, a.group), scratch);
    }
  });
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ascend_deep_cpu, m) {
  m.def(
      "sparse_mqa_attention(Tensor q, Tensor k, Tensor v, Tensor idx, Tensor? mask, Tensor? sink, float scale) "
      "-> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(ascend_deep_cpu, CPU, m) { m.impl("sparse_mqa_attention", TORCH_BOX(&sparse_mqa_attention)); }

}  // namespace ascend_deep_cpu
