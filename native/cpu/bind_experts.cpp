// ascend_deep_cpu::moe_experts, and moe_layer, which is moe_route and moe_experts in one call.
#include <algorithm>
#include <cstring>

#include "coded.h"

namespace ascend_deep_cpu {
namespace {

Routing routing(const Tensor& idx, const Tensor& weights) {
  check_dim(idx, "idx", 2);
  check_dim(weights, "weights", 2);
  STD_TORCH_CHECK(weights.size(0) == idx.size(0) && idx.size(1) == weights.size(1), "ascend_deep: idx is ",
                  shape_of(idx), " and weights is ", shape_of(weights), ", both have to be [T, K].");
  STD_TORCH_CHECK(idx.scalar_type() == ScalarType::Long || idx.scalar_type() == ScalarType::Int,
                  "ascend_deep: idx has dtype ", name_of(idx.scalar_type()), ", it has to be int64 or int32.");
  return {idx.size(0),     idx.size(1),    idx.const_data_ptr(),     idx.scalar_type() == ScalarType::Long,
          idx.stride(0),   idx.stride(1),  weights.const_data_ptr(), dtype_of(weights, "weights"),
          weights.stride(0), weights.stride(1)};
}

Tensor moe_experts(const Tensor& x, const Tensor& idx, const Tensor& weights, const Tensor& w13,
                   const std::optional<Tensor>& b13, const Tensor& w2, const std::optional<Tensor>& b2,
                   const std::optional<Tensor>& w3, const std::string& act, double alpha, std::optional<double> limit,
                   bool interleaved, const std::string& weight_layout, bool weight_on_input, int64_t expert_offset,
                   std::optional<ScalarType> out_dtype) {
  return experts({x, w13, b13, w2, b2, w3}, routing(idx, weights),
                 experts_attributes(act, alpha, limit, interleaved, weight_layout, weight_on_input, expert_offset,
                                    out_dtype));
}

Tensor moe_experts_coded(const Tensor& x, const Tensor& idx, const Tensor& weights, const Tensor& w13,
                         const std::optional<Tensor>& b13, const Tensor& w2, const std::optional<Tensor>& b2,
                         const std::optional<Tensor>& w3, int64_t code, double alpha, double limit,
                         int64_t expert_offset) {
  return experts({x, w13, b13, w2, b2, w3}, routing(idx, weights), experts_decode(code, alpha, limit, expert_offset));
}

// To bfloat16 and back, to the nearest, ties to even, as torch converts.
float rounded_to_bf16(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  if (v != v) return v;
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&v, &bits, 4);
  return v;
}

Tensor moe_layer(const Tensor& x, const Tensor& logits, const std::optional<Tensor>& bias, const Tensor& w13,
                 const std::optional<Tensor>& b13, const Tensor& w2, const std::optional<Tensor>& b2,
                 const std::optional<Tensor>& w3, int64_t route, double eps, double scale, int64_t code, double alpha,
                 double limit, int64_t expert_offset) {
  bool rounded;
  RouteCall call = route_call(logits, bias, route_decode(route, eps, scale, &rounded));
  const int64_t tokens = call.a.tokens, topk = call.a.topk, count = tokens * topk;
  // Ids first, which have the larger alignment.
  thread_local Workspace space;
  int64_t* ids = static_cast<int64_t*>(space.at_least(std::max<int64_t>(count, 1) * (sizeof(int64_t) + sizeof(float))));
  float* weights = reinterpret_cast<float*>(ids + count);
  run_route(call, weights, ids);
  if (rounded) {
    for (int64_t i = 0; i < count; ++i) weights[i] = rounded_to_bf16(weights[i]);
  }
  const Tensor out = experts({x, w13, b13, w2, b2, w3}, {tokens, topk, ids, true, topk, 1, weights, kF32, topk, 1},
                             experts_decode(code, alpha, limit, expert_offset));
  space.trim(size_t{64} << 20);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ascend_deep_cpu, m) {
  m.def(
      "moe_experts(Tensor x, Tensor idx, Tensor weights, Tensor w13, Tensor? b13, Tensor w2, Tensor? b2, "
      "Tensor? w3=None, *, str act, float alpha, float? limit, bool interleaved, str weight_layout, "
      "bool weight_on_input, int expert_offset, ScalarType? out_dtype) -> Tensor");
  m.def(
      "moe_experts_coded(Tensor x, Tensor idx, Tensor weights, Tensor w13, Tensor? b13, Tensor w2, Tensor? b2, "
      "Tensor? w3, int code, float alpha, float limit, int expert_offset) -> Tensor");
  m.def(
      "moe_layer(Tensor x, Tensor logits, Tensor? bias, Tensor w13, Tensor? b13, Tensor w2, Tensor? b2, Tensor? w3, "
      "int route, float eps, float scale, int code, float alpha, float limit, int expert_offset) -> Tensor");
  m.def(
      "experts_code(*, str act, float alpha, float? limit, bool interleaved, str weight_layout, bool weight_on_input, "
      "ScalarType? out_dtype) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(ascend_deep_cpu, CPU, m) {
  m.impl("moe_experts", TORCH_BOX(&moe_experts));
  m.impl("moe_experts_coded", TORCH_BOX(&moe_experts_coded));
  m.impl("moe_layer", TORCH_BOX(&moe_layer));
}

STABLE_TORCH_LIBRARY_IMPL(ascend_deep_cpu, CompositeExplicitAutograd, m) {
  m.impl("experts_code", TORCH_BOX(&experts_code));
}

}  // namespace ascend_deep_cpu
