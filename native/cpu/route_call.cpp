// The arguments of moe_route, checked, and its run over torch's threads.
#include "moe_call.h"

namespace ascend_deep_cpu {
namespace {

int32_t choice(const std::string& value, const char* what, std::initializer_list<const char*> names) {
  int32_t i = 0;
  std::string all;
  for (const char* name : names) {
    if (value == name) return i;
    all += std::string(i++ ? ", '" : "'") + name + "'";
  }
  STD_TORCH_CHECK(false, "ascend_deep: ", what, " is '", value, "', it has to be one of ", all, ".");
}

}  // namespace

RouteAttributes route_attributes(int64_t topk, const std::string& scoring, const std::string& select,
                                 const std::string& renorm, double eps, double scale, int64_t n_group,
                                 int64_t topk_group, const std::string& group_score, const std::string& group_fill) {
  STD_TORCH_CHECK(topk >= 1, "ascend_deep: topk is ", topk, ", it has to be at least 1.");
  STD_TORCH_CHECK(n_group >= 1, "ascend_deep: n_group is ", n_group, ", it has to be at least 1.");
  STD_TORCH_CHECK(n_group == 1 || (topk_group >= 1 && topk_group <= n_group), "ascend_deep: topk_group is ", topk_group,
                  ", it has to be between 1 and n_group, ", n_group, ".");
  return {topk,
          choice(scoring, "scoring", {"softmax", "sigmoid", "sqrtsoftplus"}),
          choice(select, "select", {"scores", "logits"}) == 1,
          choice(renorm, "renorm", {"none", "sum", "clamp"}),
          eps,
          scale,
          n_group,
          topk_group,
          choice(group_score, "group_score", {"top2", "max"}) == 1,
          choice(group_fill, "group_fill", {"neg_inf", "zero"}) == 1};
}

RouteCall route_call(const Tensor& logits, const std::optional<Tensor>& bias, const RouteAttributes& attributes) {
  check_dim(logits, "logits", 2);
  RouteCall call{{}, logits, std::nullopt};
  Route& a = call.a;
  a.dtype = dtype_of(logits, "logits", true);
  a.tokens = logits.size(0);
  a.experts = logits.size(1);
  if (a.experts > 1 && logits.stride(1) != 1) call.logits = torch::stable::contiguous(logits);
  a.topk = attributes.topk;
  STD_TORCH_CHECK(a.topk <= a.experts, "ascend_deep: topk is ", a.topk, ", logits has ", a.experts, " experts.");
  a.groups = attributes.n_group;
  a.topk_group = attributes.topk_group;
  STD_TORCH_CHECK(a.groups == 1 || a.experts % a.groups == 0, "ascend_deep: n_group is ", a.groups,
                  ", it has to divide the number of experts, ", a.experts, ".");
  a.scoring = attributes.scoring;
  a.select_logits = attributes.select_logits;
  a.renorm = attributes.renorm;
  a.group_max = attributes.group_max;
  a.group_zero = attributes.group_zero;
  a.eps = static_cast<float>(attributes.eps);
  a.scale = static_cast<float>(attributes.scale);
  if (bias) {
    check_dim(*bias, "bias", 1);
    if (bias->scalar_type() != ScalarType::Double) dtype_of(*bias, "bias", true);
    STD_TORCH_CHECK(bias->size(0) == a.experts, "ascend_deep: bias has ", bias->size(0), " elements, logits has ",
                    a.experts, " experts.");
    call.bias = as_float(*bias);
    a.bias = static_cast<const float*>(call.bias->const_data_ptr());
  }
  a.logits = call.logits.const_data_ptr();
  a.logits_stride = call.logits.stride(0);
  return call;
}

void run_route(RouteCall& call, float* weights, int64_t* ids) {
  Route& a = call.a;
  a.weights = weights;
  a.ids = ids;
  if (a.tokens == 0) return;
  const Kernels& isa = kernels();
  const size_t scratch = isa.route_scratch_bytes(a);
  const int64_t rows = grain(a.experts * (4 + a.topk) / 8);
  if (a.tokens <= rows) return isa.route(a, 0, a.tokens, thread_scratch(scratch));
  torch::stable::parallel_for(0, a.tokens, rows, [&](int64_t begin, int64_t end) {
    isa.route(a, begin, end, thread_scratch(scratch));
  });
}

}  // namespace ascend_deep_cpu
