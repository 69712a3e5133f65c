// Tensors as operands of matrix products, and how a list of products runs. Generic code only.
//
// Every product is D[g] = C[g] + alpha * A[g] B[g]^T of "views": a tensor and which of its dimensions are the batch, the
// rows and K. That covers the layouts of dense products, grouped ones and einsums without a copy.
#pragma once

#include <string>
#include <vector>

#include "gemm_api.h"
#include "plan.h"

namespace ascend_deep_cpu {

// Positions of (batch, rows, K) among the dimensions of a tensor; -1: there is no batch.
struct Dims {
  int64_t batch, rows, k;
};

struct View {
  Operand x{};
  int64_t batch_stride = 0, sf_stride = 0;  // bytes
  int64_t batches = 1, rows = 0, depth = 0;

  Operand at(int64_t batch) const;
};

bool is_fp4(ScalarType type);

// A matrix, or a batch of them. FP4 pairs lie along the last dimension of the tensor.
View view_of(const Tensor& t, const char* what, Dims dims);
// Its scales, f32 or packed, of shape [ceil(rows / gran_row), ceil(K / gran_k)] with a batch in front if the view has one.
void add_scales(View& view, const Tensor& sf, const char* what, Dims dims, int64_t gran_row, int64_t gran_k);

// Where the result goes, and what is added to it: D [batch, M, N].
struct Result {
  void* d;
  const void* c;
  Dtype dtype;
  int64_t d_batch, d_row, d_col, c_batch, c_row, c_col;  // strides in elements
};

Result result_of(Tensor& d, const std::optional<Tensor>& c, Dims dims);

// A range of rows [m0, m1) of A and D, of K [k0, k1), in batch entries a, b and d. `index`: rows of A and D instead.
struct Part {
  int64_t a, b, d, m0, m1, k0, k1;
  const int32_t* index;
};

// Runs products that write different elements.
void run_parts(const View& a, const View& b, const Result& r, float alpha, const std::vector<Part>& parts);

}  // namespace ascend_deep_cpu
