// ascend_deep_cpu::quantise, swiglu_quantise and dequantise, on which quant_fp8, quant_fp4, swiglu_quant and dequant are
// built, and row_squares for hc_prenorm_gemm.
#include <algorithm>

#include "gemm_call.h"

namespace ascend_deep_cpu {
namespace {

using Optional = std::optional<Tensor>;
using Ints = std::vector<int64_t>;

int64_t grain(int64_t row_cost) { return 1 + 16384 / (row_cost + 1); }

SfFormat format_of(const Tensor& sf) {
  const ScalarType type = sf.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Int || type == ScalarType::Short,
                  "ascend_deep: scales have dtype ", name_of(type), ", they have to be float32, int32 or int16.");
  return type == ScalarType::Float ? kSfF32 : type == ScalarType::Int ? kSfUe8m0x4 : kSfUe8m0x2;
}

void run_quantise(Quantise& a, Tensor& data, Tensor& sf, int64_t gran_row, int64_t gran_k, bool fp4, bool ue8m0) {
  a.fp4 = fp4;
  a.ue8m0 = ue8m0;
  a.gran_row = gran_row;
  a.gran_k = gran_k;
  check_dim(data, "data", 2);
  check_dim(sf, "the scales", 2);
  STD_TORCH_CHECK(gran_row >= 1 && gran_k >= 1, "ascend_deep: blocks are [", gran_row, ", ", gran_k, "]; sizes are at ",
                  "least 1.");
  const int64_t width = fp4 ? a.columns / 2 : a.columns;
  STD_TORCH_CHECK(data.size(0) == a.rows && data.size(1) == width && data.element_size() == 1 &&
                      (data.numel() == 0 || ((data.stride(1) == 1 || width == 1) && (data.stride(0) == width || a.rows == 1))),
                  "ascend_deep: data has shape ", shape_of(data), ", it has to be a contiguous [", a.rows, ", ", width,
                  "] of bytes.");
  a.sf = format_of(sf);
  STD_TORCH_CHECK(a.sf == kSfF32 || (ue8m0 && gran_row == 1), "ascend_deep: packed scales hold powers of two, one per row.");
  const int64_t per = a.sf == kSfF32 ? 1 : a.sf == kSfUe8m0x4 ? 4 : 2;
  const int64_t blocks = (a.rows + gran_row - 1) / gran_row, groups = (a.columns + gran_k - 1) / gran_k;
  STD_TORCH_CHECK(sf.size(0) == blocks && sf.size(1) == (groups + per - 1) / per, "ascend_deep: the scales have shape ",
                  shape_of(sf), ", they have to have ", blocks, " rows and one column for each ", per, " of ", groups,
                  " groups.");
  a.data = static_cast<uint8_t*>(data.mutable_data_ptr());
  a.scales = sf.mutable_data_ptr();
  a.sf_row = sf.stride(0), a.sf_col = sf.stride(1);
  if (a.rows == 0 || a.columns == 0) return;
  const GemmKernels& isa = gemm_kernels();
  const size_t scratch = isa.quantise_scratch(a);
  torch::stable::parallel_for(0, blocks, grain(a.columns * std::min(gran_row, a.rows)), [&](int64_t begin, int64_t end) {
    isa.quantise(a, begin, end, thread_scratch(scratch));
  });
}

void quantise(Tensor data, Tensor sf, const Tensor& x, Ints gran, bool fp4, bool ue8m0) {
  check_dim(x, "x", 2);
  STD_TORCH_CHECK(gran.size() == 2, "ascend_deep: gran has ", gran.size(), " entries, it has to have two.");
  Quantise a{};
  a.dtype = dtype_of(x, "x", true);
  a.rows = x.size(0), a.columns = x.size(1);
  STD_TORCH_CHECK(!fp4 || a.columns % 2 == 0, "ascend_deep: x has ", a.columns, " columns, FP4 needs an even number.");
  const int64_t size = static_cast<int64_t>(x.element_size());
  a.x = static_cast<const char*>(x.const_data_ptr());
  a.x_row = x.stride(0) * size, a.x_col = a.columns <= 1 ? size : x.stride(1) * size;
  run_quantise(a, data, sf, gran[0], gran[1], fp4, ue8m0);
}

void swiglu_quantise(Tensor data, Tensor sf, const Tensor& h, const Optional& row_weight, const std::string& act,
                     double alpha, std::optional<double> limit, bool interleaved, int64_t gran_k, bool ue8m0) {
  check_dim(h, "h", 2);
  Quantise a{};
  a.dtype = dtype_of(h, "h");
  STD_TORCH_CHECK(h.size(1) % 2 == 0 && (h.stride(1) == 1 || h.size(1) == 0), "ascend_deep: h has shape ", shape_of(h),
                  " and stride ", h.stride(1), ", its columns have to be an even number next to each other.");
  a.rows = h.size(0), a.columns = h.size(1) / 2;
  a.x = static_cast<const char*>(h.const_data_ptr());
  a.x_row = h.stride(0) * static_cast<int64_t>(h.element_size());
  a.x_col = static_cast<int64_t>(h.element_size());
  a.gated = true;
  a.interleaved = interleaved;
  a.act = activation(act, alpha, limit);
  if (row_weight) {
    check_dim(*row_weight, "row_weight", 1);
    STD_TORCH_CHECK(row_weight->scalar_type() == ScalarType::Float && row_weight->size(0) == a.rows &&
                        (row_weight->stride(0) == 1 || a.rows <= 1),
                    "ascend_deep: row_weight has shape ", shape_of(*row_weight), ", it has to be a contiguous float32 [",
                    a.rows, "].");
    a.row_weight = static_cast<const float*>(row_weight->const_data_ptr());
  }
  run_quantise(a, data, sf, 1, gran_k, false, ue8m0);
}

void dequantise(Tensor out, const Tensor& x, const Tensor& sf, Ints gran) {
  STD_TORCH_CHECK(gran.size() == 2, "ascend_deep: gran has ", gran.size(), " entries, it has to have two.");
  View v = view_of(x, "x", {-1, 0, 1});
  add_scales(v, sf, "sf", {-1, 0, 1}, gran[0], gran[1]);
  Dequantise a{};
  a.rows = v.rows, a.columns = v.depth, a.x = v.x;
  check_dim(out, "out", 2);
  a.dtype = dtype_of(out, "out");
  STD_TORCH_CHECK(out.size(0) == a.rows && out.size(1) == a.columns &&
                      (out.numel() == 0 || ((out.stride(1) == 1 || a.columns == 1) &&
                                            (out.stride(0) == a.columns || a.rows == 1))),
                  "ascend_deep: out has shape ", shape_of(out), ", it has to be a contiguous [", a.rows, ", ", a.columns,
                  "].");
  a.out = out.mutable_data_ptr();
  const GemmKernels& isa = gemm_kernels();
  torch::stable::parallel_for(0, a.rows, grain(a.columns), [&](int64_t begin, int64_t end) { isa.dequantise(a, begin, end); });
}

// out[s][r] = sum of the squares of columns [s * width, (s + 1) * width) of row r.
void row_squares(Tensor out, const Tensor& x, int64_t width) {
  const View v = view_of(x, "x", {-1, 0, 1});
  check_dim(out, "out", 2);
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float && out.size(1) == v.rows && width >= 1 &&
                      (out.stride(1) == 1 || v.rows <= 1),
                  "ascend_deep: out has shape ", shape_of(out), ", it has to be a float32 [splits, ", v.rows, "].");
  float* to = static_cast<float*>(out.mutable_data_ptr());
  const GemmKernels& isa = gemm_kernels();
  torch::stable::parallel_for(0, v.rows, grain(v.depth), [&](int64_t begin, int64_t end) {
    for (int64_t s = 0; s < out.size(0); ++s) {
      const int64_t k0 = std::min(s * width, v.depth), k1 = std::min(k0 + width, v.depth);
      isa.squares(v.x, begin, end, k0, k1, to + s * out.stride(0));
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ascend_deep_cpu, m) {
  m.def("quantise(Tensor(a!) data, Tensor(b!) sf, Tensor x, int[] gran, bool fp4, bool ue8m0) -> ()");
  m.def(
      "swiglu_quantise(Tensor(a!) data, Tensor(b!) sf, Tensor h, Tensor? row_weight, str act, float alpha, float? limit, "
      "bool interleaved, int gran_k, bool ue8m0) -> ()");
  m.def("dequantise(Tensor(a!) out, Tensor x, Tensor sf, int[] gran) -> ()");
  m.def("row_squares(Tensor(a!) out, Tensor x, int width) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ascend_deep_cpu, CPU, m) {
  m.impl("quantise", TORCH_BOX(&quantise));
  m.impl("swiglu_quantise", TORCH_BOX(&swiglu_quantise));
  m.impl("dequantise", TORCH_BOX(&dequantise));
  m.impl("row_squares", TORCH_BOX(&row_squares));
}

}  // namespace ascend_deep_cpu
