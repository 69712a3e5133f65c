// Attributes of routing and experts as one number each. Tables are in the order of the enums of api.h.
//
// The number says everything, it is no handle: a compiled graph that holds one may come from another process.
#pragma once

#include "moe_call.h"

namespace ascend_deep_cpu {

// Names and what is allowed are those of the plain ops; RuntimeError otherwise.
int64_t experts_code(const std::string& act, double alpha, std::optional<double> limit, bool interleaved,
                     const std::string& weight_layout, bool weight_on_input, std::optional<ScalarType> out_dtype);
ExpertsAttributes experts_decode(int64_t code, double alpha, double limit, int64_t expert_offset);

// `rounded`: weights are rounded to bfloat16 before the experts see them (moe_layer only).
int64_t route_code(int64_t topk, const std::string& scoring, const std::string& select, const std::string& renorm,
                   int64_t n_group, int64_t topk_group, const std::string& group_score, const std::string& group_fill,
                   bool rounded);
RouteAttributes route_decode(int64_t code, double eps, double scale, bool* rounded);

}  // namespace ascend_deep_cpu
