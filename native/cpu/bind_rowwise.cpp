// ascend_deep_cpu::moe_route and swiglu, and the choice of the instruction set.
#include <vector>

#include "dispatch.h"
#include "plan.h"

namespace ascend_deep_cpu {
namespace {

// Rows that are worth a thread of their own.
int64_t grain(int64_t row_cost) { return 1 + 16384 / (row_cost + 1); }

int32_t choice(const std::string& value, const char* what, std::initializer_list<const char*> names) {
  int32_t i = 0;
  std::string all;
  for (const char* name : names) {
    if (value == name) return i;
    all += std::string(i++ ? ", '" : "'") + name + "'";
  }
  STD_TORCH_CHECK(false, "ascend_deep: ", what, " is '", value, "', it has to be one of ", all, ".");
}

void check_floating(const Tensor& t, const char* what) {
  if (t.scalar_type() != ScalarType::Double) dtype_of(t, what, true);
}

Tensor as_float(const Tensor& t) {
  const Tensor f = t.scalar_type() == ScalarType::Float ? t : torch::stable::to(t, ScalarType::Float);
  return torch::stable::contiguous(f);
}

std::tuple<Tensor, Tensor> moe_route(const Tensor& logits_in, const std::optional<Tensor>& bias, int64_t topk,
                                     const std::string& scoring, const std::string& select, const std::string& renorm,
                                     double eps, double scale, int64_t n_group, int64_t topk_group,
                                     const std::string& group_score, const std::string& group_fill) {
  check_dim(logits_in, "logits", 2);
  Route a{};
  a.dtype = dtype_of(logits_in, "logits", true);
  const Tensor logits = logits_in.size(1) > 1 && logits_in.stride(1) != 1 ? torch::stable::contiguous(logits_in) : logits_in;
  a.tokens = logits.size(0);
  a.experts = logits.size(1);
  a.topk = topk;
  STD_TORCH_CHECK(topk >= 1 && topk <= a.experts, "ascend_deep: topk is ", topk, ", logits has ", a.experts, " experts.");
  a.groups = n_group;
  a.topk_group = topk_group;
  STD_TORCH_CHECK(n_group >= 1 && (n_group == 1 || a.experts % n_group == 0), "ascend_deep: n_group is ", n_group,
                  ", it has to divide the number of experts, ", a.experts, ".");
  STD_TORCH_CHECK(n_group == 1 || (topk_group >= 1 && topk_group <= n_group), "ascend_deep: topk_group is ", topk_group,
                  ", it has to be between 1 and n_group, ", n_group, ".");
  a.scoring = choice(scoring, "scoring", {"softmax", "sigmoid", "sqrtsoftplus"});
  a.select_logits = choice(select, "select", {"scores", "logits"}) == 1;
  a.renorm = choice(renorm, "renorm", {"none", "sum", "clamp"});
  a.group_max = choice(group_score, "group_score", {"top2", "max"}) == 1;
  a.group_zero = choice(group_fill, "group_fill", {"neg_inf", "zero"}) == 1;
  a.eps = static_cast<float>(eps);
  a.scale = static_cast<float>(scale);
  std::optional<Tensor> bias_f;
  if (bias) {
    check_dim(*bias, "bias", 1);
    check_floating(*bias, "bias");
    STD_TORCH_CHECK(bias->size(0) == a.experts, "ascend_deep: bias has ", bias->size(0), " elements, logits has ",
                    a.experts, " experts.");
    bias_f = as_float(*bias);
    a.bias = static_cast<const float*>(bias_f->const_data_ptr());
  }
  const int64_t shape[2] = {a.tokens, topk};
  Tensor weights = torch::stable::empty({shape, 2}, ScalarType::Float, std::nullopt, logits.device());
  Tensor ids = torch::stable::empty({shape, 2}, ScalarType::Long, std::nullopt, logits.device());
  if (a.tokens == 0) return {weights, ids};
  a.logits = logits.const_data_ptr();
  a.logits_stride = logits.stride(0);
  a.weights = static_cast<float*>(weights.mutable_data_ptr());
  a.ids = static_cast<int64_t*>(ids.mutable_data_ptr());
  const Kernels& isa = kernels();
  const size_t scratch = isa.route_scratch_bytes(a);
  torch::stable::parallel_for(0, a.tokens, grain(a.experts * (4 + topk) / 8), [&](int64_t begin, int64_t end) {
    isa.route(a, begin, end, thread_scratch(scratch));
  });
  return {weights, ids};
}

Tensor swiglu(const Tensor& h_in, const std::optional<Tensor>& row_weight, const std::string& act, double alpha,
              std::optional<double> limit, bool interleaved) {
  check_cpu(h_in, "h");
  STD_TORCH_CHECK(h_in.dim() >= 1 && h_in.size(h_in.dim() - 1) % 2 == 0, "ascend_deep: h has shape ", shape_of(h_in),
                  ", its last dimension has to be even.");
  Swiglu a{};
  a.dtype = dtype_of(h_in, "h");
  a.act = activation(act, alpha, limit);
  a.interleaved = interleaved;
  a.width = h_in.size(h_in.dim() - 1) / 2;
  std::vector<int64_t> shape;
  a.rows = 1;
  for (int64_t i = 0; i + 1 < h_in.dim(); ++i) {
    shape.push_back(h_in.size(i));
    a.rows *= h_in.size(i);
  }
  std::optional<Tensor> weight_f;
  if (row_weight) {
    check_cpu(*row_weight, "row_weight");
    STD_TORCH_CHECK(row_weight->scalar_type() == ScalarType::Float || row_weight->scalar_type() == h_in.scalar_type(),
                    "ascend_deep: row_weight has dtype ", name_of(row_weight->scalar_type()),
                    ", it has to be float32 or the dtype of h.");
    bool same = row_weight->dim() + 1 == h_in.dim();
    for (int64_t i = 0; same && i < row_weight->dim(); ++i) same = row_weight->size(i) == h_in.size(i);
    STD_TORCH_CHECK(same, "ascend_deep: row_weight has shape ", shape_of(*row_weight), ", h has ", shape_of(h_in),
                    ": it has to be that of h without the last dimension.");
    weight_f = as_float(*row_weight);
    a.row_weight = static_cast<const float*>(weight_f->const_data_ptr());
  }
  shape.push_back(a.width);
  Tensor out = torch::stable::empty({shape.data(), shape.size()}, h_in.scalar_type(), std::nullopt, h_in.device());
  if (out.numel() == 0) return out;
  // Rows of a matrix may have any distance; other layouts are copied.
  const bool in_place = h_in.dim() == 2 && (h_in.stride(1) == 1 || h_in.size(1) == 1);
  const Tensor h = in_place ? h_in : torch::stable::contiguous(h_in);
  a.h = h.const_data_ptr();
  a.h_stride = in_place ? h.stride(0) : 2 * a.width;
  a.out = out.mutable_data_ptr();
  const Kernels& isa = kernels();
  torch::stable::parallel_for(0, a.rows, grain(a.width), [&](int64_t begin, int64_t end) { isa.swiglu(a, begin, end); });
  return out;
}

// "" only reports. Returns the instruction sets of this CPU, lowest first, the one in use with a star.
std::string isa(const std::string& name) {
  const Kernels* all[kIsas];
  const int n = available(all);
  STD_TORCH_CHECK(name.empty() || select(name.c_str()), "ascend_deep: this CPU does not have the instruction set '", name,
                  "'.");
  std::string text;
  for (int i = 0; i < n; ++i) text += std::string(i ? " " : "") + all[i]->name + (all[i] == &kernels() ? "*" : "");
  return text;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ascend_deep_cpu, m) {
  m.def(
      "moe_route(Tensor logits, Tensor? bias, *, int topk, str scoring, str select, str renorm, float eps, float scale, "
      "int n_group, int topk_group, str group_score, str group_fill) -> (Tensor, Tensor)");
  m.def(
      "swiglu(Tensor h, Tensor? row_weight, *, str act, float alpha, float? limit, bool interleaved) -> Tensor");
  m.def("isa(str name) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(ascend_deep_cpu, CPU, m) {
  m.impl("moe_route", TORCH_BOX(&moe_route));
  m.impl("swiglu", TORCH_BOX(&swiglu));
}

STABLE_TORCH_LIBRARY_IMPL(ascend_deep_cpu, CompositeExplicitAutograd, m) { m.impl("isa", TORCH_BOX(&isa)); }

}  // namespace ascend_deep_cpu
