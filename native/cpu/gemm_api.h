// What the generic code and the per-ISA kernels of the matrix products share; see api.h for why it is plain data.
#pragma once

#include "api.h"

namespace ascend_deep_cpu {

enum MatFormat : int32_t { kMatF32, kMatBF16, kMatE4M3, kMatE2M1 };
enum SfFormat : int32_t { kSfNone, kSfF32, kSfUe8m0x4, kSfUe8m0x2 };

// A matrix [rows, K]. Element (r, k) is at base + r * row + k * col bytes. E2M1 has two codes in a byte, the low nibble
// first: along k (then k / 2 takes the place of k), or along the rows (then r / 2 takes that of r).
struct Operand {
  const char* base;
  MatFormat format;
  int64_t row, col;
  bool pairs_along_rows;
  // Scale of (r, k): row r / gran_row, group (k + sf_shift) / gran_k; strides in elements (words, if packed).
  SfFormat sf;
  const char* sf_base;
  int64_t sf_row, sf_col, gran_row, gran_k, sf_shift;
};

// One product: D[token][row] = C + alpha * sum_k tokens[token][k] * stream[row][k].
//
// `stream` is read from where it lies, by every thread some rows, and decoded on the way; `tokens` is packed first, as
// float32. Stream rows are what is long: the weights, as a rule.
struct Product {
  Operand stream, tokens;
  int64_t rows, count, depth;
  const int32_t* index;  // token -> row of `tokens` and of D, or nullptr
  int64_t first;         // the first token of this part
  // How tokens are packed: `panels` of them as panels (a multiple of the lanes, zero behind `count`), then `plain` rows
  // of `pitch` floats. `coded`: plain rows in the order of the codes of the stream.
  float* packed;
  int64_t panels, plain, pitch;
  bool coded;
  bool dots;  // `coded`, and plain rows as bfloat16 with their scales, see gemm_dots.h
  void* d;
  const void* c;  // nullptr, or of the dtype of d
  Dtype dtype;
  int64_t d_token, d_row, c_token, c_row;  // strides in elements
  float alpha;
};

constexpr int64_t kProductRows = 128;  // stream rows of a task, at most; but any number if coded
constexpr int64_t kProductDepth = 512;  // of the pieces of K in which rows are staged
constexpr int64_t kCodedTokens = 3;     // up to so many tokens, codes are multiplied as they are decoded

// Rows of x are quantised, or of a gated activation of h.
struct Quantise {
  int64_t rows, columns;  // of the result
  const char* x;
  int64_t x_row, x_col;  // bytes
  Dtype dtype;
  bool gated;  // x is h [rows, 2 * columns] with x_col one element
  bool interleaved;
  Activation act;
  const float* row_weight;
  bool fp4, ue8m0;
  int64_t gran_row, gran_k;
  uint8_t* data;  // [rows, columns], or [rows, columns / 2]
  SfFormat sf;
  void* scales;
  int64_t sf_row, sf_col;  // in words
};

struct Dequantise {
  int64_t rows, columns;
  Operand x;
  void* out;  // [rows, columns]
  Dtype dtype;
};

struct GemmKernels {
  int64_t lanes;
  int64_t left_over[3];  // as Kernels::left_over
  // Elements of a step of coded products, by format; 0: it has none.
  int64_t (*code_step)(MatFormat);
  // Floats of such a step of a token that is packed as bfloat16; 0: tokens are not.
  int64_t (*dots_step)(int64_t step);
  // Packs panels [begin, end) and plain rows [begin, end), both counted in one sequence, panels first.
  void (*pack)(const Product&, int64_t begin, int64_t end, void* scratch);
  size_t (*scratch)(const Product&);
  // Stream rows [n0, n1).
  void (*product)(const Product&, int64_t n0, int64_t n1, void* scratch);
  // Blocks of gran_row rows [begin, end).
  size_t (*quantise_scratch)(const Quantise&);
  void (*quantise)(const Quantise&, int64_t begin, int64_t end, void* scratch);
  void (*dequantise)(const Dequantise&, int64_t begin, int64_t end);
  void (*squares)(const Operand&, int64_t begin, int64_t end, int64_t k0, int64_t k1, float* out);
};


extern const GemmKernels kGemmPortable;
#if defined(__x86_64__)
extern const GemmKernels kGemmAvx2;
extern const GemmKernels kGemmAvx512;
extern const GemmKernels kGemmAvx512Bf16;
#endif

// The table for the instruction set in use.
const GemmKernels& gemm_kernels();

}  // namespace ascend_deep_cpu
