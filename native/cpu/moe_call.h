// Routing and experts as functions that the plain ops and their coded forms share. Generic code only.
//
// A coded op takes its attributes as numbers rather than names. In a decode step every call finds its code and data
// out of the caches, since gigabytes of weights went through them: sixteen named attributes then cost as much time as
// half a megabyte of weights.
#pragma once

#include <optional>
#include <string>

#include "plan.h"

namespace ascend_deep_cpu {

struct ExpertsAttributes {
  Activation act;
  bool interleaved, kn, weight_on_input;
  std::optional<ScalarType> out_dtype;
  int64_t expert_offset;
};

// Checks names and numbers, but nothing that depends on tensors.
ExpertsAttributes experts_attributes(const std::string& act, double alpha, std::optional<double> limit, bool interleaved,
                                     const std::string& weight_layout, bool weight_on_input, int64_t expert_offset,
                                     std::optional<ScalarType> out_dtype);

// Ids and weights [tokens, topk] with their strides.
struct Routing {
  int64_t tokens, topk;
  const void* ids;
  bool wide;  // int64, else int32
  int64_t ids_t, ids_k;
  const void* weights;
  Dtype dtype;
  int64_t weights_t, weights_k;
};

struct ExpertsTensors {
  const Tensor& x;
  const Tensor& w13;
  const std::optional<Tensor>& b13;
  const Tensor& w2;
  const std::optional<Tensor>& b2;
  const std::optional<Tensor>& w3;
};

// What moe_experts computes. Checks the tensors; `r` has been checked but for its number of tokens.
Tensor experts(const ExpertsTensors& t, const Routing& r, const ExpertsAttributes& attributes);

struct RouteAttributes {
  int64_t topk;
  int32_t scoring;  // as in Route
  bool select_logits;
  int32_t renorm;
  double eps, scale;
  int64_t n_group, topk_group;
  bool group_max, group_zero;
};

RouteAttributes route_attributes(int64_t topk, const std::string& scoring, const std::string& select,
                                 const std::string& renorm, double eps, double scale, int64_t n_group,
                                 int64_t topk_group, const std::string& group_score, const std::string& group_fill);

// A call of moe_route whose arguments have been checked, with the copies that it reads.
struct RouteCall {
  Route a;
  Tensor logits;
  std::optional<Tensor> bias;
};

RouteCall route_call(const Tensor& logits, const std::optional<Tensor>& bias, const RouteAttributes& attributes);
// Weights float32 and ids int64, both [tokens, topk] and contiguous.
void run_route(RouteCall& call, float* weights, int64_t* ids);

}  // namespace ascend_deep_cpu
