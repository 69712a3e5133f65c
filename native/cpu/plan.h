// Checks of arguments that the bindings share, per-thread scratch, and the sharing out of work. Generic code only.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "api.h"

namespace ascend_deep_cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// A buffer that keeps its pages from call to call, since touching fresh ones costs as much as a small product.
class Workspace {
 public:
  void* at_least(size_t bytes) {
    if (bytes > size_) {
      data_.reset();
      size_ = (bytes + 4095) / 4096 * 4096;
      data_.reset(std::aligned_alloc(64, size_));
      if (!data_) size_ = 0;
      STD_TORCH_CHECK(data_, "ascend_deep: no memory for ", bytes, " bytes of scratch");
    }
    return data_.get();
  }
  // Large buffers are given back after the call.
  void trim(size_t keep) {
    if (size_ > keep) {
      data_.reset();
      size_ = 0;
    }
  }

 private:
  std::unique_ptr<void, Free> data_;
  size_t size_ = 0;
};

// Scratch of the running thread.
inline void* thread_scratch(size_t bytes) {
  thread_local Workspace w;
  return w.at_least(bytes);
}

// Rows that are worth a thread of their own, by the cost of one.
inline int64_t grain(int64_t row_cost) { return 1 + 16384 / (row_cost + 1); }

// An uninitialised contiguous matrix of float32, bfloat16 or int64. torch::stable::empty looks its op up by name, which a call
// that finds its code out of the caches feels.
Tensor empty_matrix(int64_t rows, int64_t columns, ScalarType type);
std::string name_of(ScalarType type);
std::string shape_of(const Tensor& t);
// The dtype code of a float32, bfloat16 or float16 tensor; an error that names `what` for any other.
Dtype dtype_of(const Tensor& t, const char* what, bool half_allowed = false);
// A contiguous float32 tensor of the same values; `t` itself if it is one.
Tensor as_float(const Tensor& t);
void check_cpu(const Tensor& t, const char* what);
void check_dim(const Tensor& t, const char* what, int64_t dim);
Activation activation(const std::string& act, double alpha, std::optional<double> limit);

}  // namespace ascend_deep_cpu
