// ascend_deep_cpu::moe_route and swiglu, and the choice of the instruction set.
#include <vector>

#include "dispatch.h"
#include "coded.h"

namespace ascend_deep_cpu {
namespace {

std::tuple<Tensor, Tensor> routed(RouteCall& call) {
  Tensor weights = empty_matrix(call.a.tokens, call.a.topk, ScalarType::Float);
  Tensor ids = empty_matrix(call.a.tokens, call.a.topk, ScalarType::Long);
  run_route(call, static_cast<float*>(weights.mutable_data_ptr()), static_cast<int64_t*>(ids.mutable_data_ptr()));
  return {weights, ids};
}

std::tuple<Tensor, Tensor> moe_route(const Tensor& logits, const std::optional<Tensor>& bias, int64_t topk,
                                     const std::string& scoring, const std::string& select, const std::string& renorm,
                                     double eps, double scale, int64_t n_group, int64_t topk_group,
                                     const std::string& group_score, const std::string& group_fill) {
  RouteCall call = route_call(logits, bias,
                              route_attributes(topk, scoring, select, renorm, eps, scale, n_group, topk_group,
                                               group_score, group_fill));
  return routed(call);
}

std::tuple<Tensor, Tensor> moe_route_coded(const Tensor& logits, const std::optional<Tensor>& bias, int64_t code,
                                           double eps, double scale) {
  bool rounded;
  RouteCall call = route_call(logits, bias, route_decode(code, eps, scale, &rounded));
  STD_TORCH_CHECK(!rounded, "ascend_deep: moe_route returns float32 weights, it does not round them.");
  return routed(call);
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
  m.def("moe_route_coded(Tensor logits, Tensor? bias, int code, float eps, float scale) -> (Tensor, Tensor)");
  m.def(
      "route_code(*, int topk, str scoring, str select, str renorm, int n_group, int topk_group, str group_score, "
      "str group_fill, bool rounded) -> int");
  m.def(
      "swiglu(Tensor h, Tensor? row_weight, *, str act, float alpha, float? limit, bool interleaved) -> Tensor");
  m.def("isa(str name) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(ascend_deep_cpu, CPU, m) {
  m.impl("moe_route", TORCH_BOX(&moe_route));
  m.impl("moe_route_coded", TORCH_BOX(&moe_route_coded));
  m.impl("swiglu", TORCH_BOX(&swiglu));
}

STABLE_TORCH_LIBRARY_IMPL(ascend_deep_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("route_code", TORCH_BOX(&route_code));
}

}  // namespace ascend_deep_cpu
