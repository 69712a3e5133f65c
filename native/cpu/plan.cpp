#include "plan.h"

namespace ascend_deep_cpu {

Tensor empty_matrix(int64_t rows, int64_t columns, ScalarType type) {
  const int64_t sizes[2] = {rows, columns}, strides[2] = {columns > 1 ? columns : 1, 1};
  int32_t dtype;
  switch (type) {
    case ScalarType::Float: dtype = aoti_torch_dtype_float32(); break;
    case ScalarType::BFloat16: dtype = aoti_torch_dtype_bfloat16(); break;
    case ScalarType::Long: dtype = aoti_torch_dtype_int64(); break;
    default: STD_TORCH_CHECK(false, "empty_matrix: ", name_of(type));
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(2, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

std::string name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    case ScalarType::Long: return "int64";
    case ScalarType::Int: return "int32";
    case ScalarType::Bool: return "bool";
    default: return "ScalarType " + std::to_string(static_cast<int>(type));
  }
}

std::string shape_of(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

Dtype dtype_of(const Tensor& t, const char* what, bool half_allowed) {
  const ScalarType type = t.scalar_type();
  if (type == ScalarType::Float) return kF32;
  if (type == ScalarType::BFloat16) return kBF16;
  if (type == ScalarType::Half && half_allowed) return kF16;
  STD_TORCH_CHECK(false, "ascend_deep: ", what, " has dtype ", name_of(type), ", the CPU kernel takes float32",
                  half_allowed ? ", bfloat16 and float16." : " and bfloat16.");
}

Tensor as_float(const Tensor& t) {
  const Tensor f = t.scalar_type() == ScalarType::Float ? t : torch::stable::to(t, ScalarType::Float);
  return f.is_contiguous() ? f : torch::stable::contiguous(f);
}

void check_cpu(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(t.is_cpu(), "ascend_deep: ", what, " is not on the CPU, all arguments of the CPU kernel have to be.");
}

void check_dim(const Tensor& t, const char* what, int64_t dim) {
  check_cpu(t, what);
  STD_TORCH_CHECK(t.dim() == dim, "ascend_deep: ", what, " has shape ", shape_of(t), ", it has to have ", dim,
                  " dimensions.");
}

Activation activation(const std::string& act, double alpha, std::optional<double> limit) {
  static constexpr struct {
    const char* name;
    Act act;
  } kTable[] = {{"silu", kSilu},   {"gelu", kGelu},       {"gelu_tanh", kGeluTanh},    {"relu", kRelu},
                {"relu2", kRelu2}, {"sigmoid", kSigmoid}, {"swiglu_oai", kSwigluOai}, {"silu_clamp", kSiluClamp}};
  for (const auto& row : kTable) {
    if (act == row.name) {
      STD_TORCH_CHECK(row.act == kSwigluOai || alpha == 1.0, "ascend_deep: act '", act, "' does not use alpha, which is ",
                      alpha, ".");
      STD_TORCH_CHECK(!limit || *limit > 0, "ascend_deep: limit is ", limit.value_or(0.0), ", it has to be positive.");
      return {row.act, static_cast<float>(alpha), static_cast<float>(limit.value_or(0.0)), limit.has_value()};
    }
  }
  STD_TORCH_CHECK(false, "ascend_deep: act is '", act, "', the CPU kernel has silu, gelu, gelu_tanh, relu, relu2, ",
                  "sigmoid, swiglu_oai and silu_clamp.");
}

}  // namespace ascend_deep_cpu
