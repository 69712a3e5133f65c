// What the generic code and the per-ISA kernels share.
//
// This header is included by translation units that are compiled with different -m flags, so it holds plain data
// and function pointers only: an inline function or a template with external linkage would be merged by the linker,
// and code for a newer CPU could end up on the path of an older one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ascend_deep_cpu {

enum Dtype : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// The activation table; the names are those of the op schema.
enum Act : int32_t { kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kSigmoid, kSwigluOai, kSiluClamp };

struct Activation {
  Act act;
  float alpha;
  float limit;
  bool has_limit;
};

// Blocks of work. A block never straddles two threads, and tiles are counted from the start of a block, so the
// arithmetic of an output element does not depend on the number of threads.
constexpr int64_t kHiddenBlock = 48;  // hidden units (gate/up pairs) in a block of the first GEMM
constexpr int64_t kOutBlock = 48;     // columns in a block of the second GEMM
constexpr int64_t kTileRows = 8;      // weight rows in a tile
constexpr int64_t kMaxPanelRows = 256;  // token rows that are packed at a time

// One expert weight tensor: element (e, n, k) is at base + (e * se + n * sn + k * sk), in elements.
// Exactly one of sn, sk has to be 1.
struct WeightView {
  const void* base;
  int64_t se, sn, sk;
};

struct BiasView {
  const void* base;  // nullptr: no bias
  int64_t se, sn;
  Dtype dtype;
};

// One expert that has rows. Rows are (token, k) pairs sorted by expert; `first` indexes `token` and `scale`.
// Rows of a panel in which a vector holds two neighbouring elements of half as many rows.
constexpr int64_t pair_rows(int64_t lanes) { return lanes * 3 / 2; }

struct ActiveExpert {
  int64_t expert;
  int64_t first;
  int64_t rows;
  int64_t panel_rows;  // rows handled by the outer-product kernels, a multiple of the vector length (zero padded), or
                       // pair_rows of it
  int64_t hidden_row;  // where this expert's rows start in the hidden buffer
  int64_t cost;        // of one block of the first GEMM, to share out the work
};

struct Experts {
  int64_t tokens, hidden_size, intermediate;  // T, H, I
  int64_t blocks;                             // ceil(I / kHiddenBlock)
  Dtype dtype;                                // of x, w13 and w2
  const void* x;
  int64_t x_stride;  // between rows, in elements; the last dimension has stride 1
  WeightView w13, w2;
  // The up half, if w13 is the gate alone: base (else nullptr) and stride between experts; otherwise as w13.
  const void* w3;
  int64_t w3_se;
  BiasView b13, b2;
  Activation act;
  bool gated, interleaved, weight_on_input;
  bool words;  // panels hold pairs of bfloat16; no expert has plain rows next to them
  int64_t active;
  const ActiveExpert* experts;
  const int32_t* token;  // row -> token
  const float* scale;    // row -> routing weight
  float* hidden;         // activations between the two GEMMs
  float* sum;            // [T, H] float32 accumulator (the output itself where that is float32)
  void* out;             // [T, H]
  Dtype out_dtype;
};

struct Route {
  int64_t tokens, experts, topk;
  const void* logits;
  int64_t logits_stride;
  Dtype dtype;
  const float* bias;  // nullptr or [E]
  int32_t scoring;    // 0 softmax, 1 sigmoid, 2 sqrtsoftplus
  bool select_logits;
  int32_t renorm;  // 0 none, 1 sum, 2 clamp
  float eps, scale;
  int64_t groups, topk_group;
  bool group_max;   // else the sum of the two largest
  bool group_zero;  // else -inf
  float* weights;
  int64_t* ids;
};

struct Swiglu {
  int64_t rows, width;  // h is [rows, 2 * width]
  const void* h;
  int64_t h_stride;
  const float* row_weight;  // nullptr or [rows]
  Dtype dtype;
  Activation act;
  bool interleaved;
  void* out;  // [rows, width]
};

// One instruction set. `scratch` is per thread, 64-byte aligned, of at least scratch_bytes().
struct Kernels {
  const char* name;
  int64_t lanes;       // float lanes of a vector
  bool dots;           // bfloat16 panels are multiplied as pairs, if weights have stride 1 along k and even sizes
  // Rows that do not fill a vector go to the dot kernels, if there are at most left_over[v] of them next to v full
  // vectors (v >= 2: left_over[2]); more are padded to a panel, which is faster then.
  int64_t left_over[3];
  size_t (*scratch_bytes)(const Experts&);
  // Hidden activations of the flattened blocks [begin, end), where block g is block g % blocks of expert g / blocks.
  void (*up)(const Experts&, int64_t begin, int64_t end, void* scratch);
  // Output columns [begin, end), all experts, in ascending order of experts.
  void (*down)(const Experts&, int64_t begin, int64_t end, void* scratch);
  size_t (*route_scratch_bytes)(const Route&);
  void (*route)(const Route&, int64_t begin, int64_t end, void* scratch);
  void (*swiglu)(const Swiglu&, int64_t begin, int64_t end);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
// For CPUs whose bfloat16 dot products are worth using.
extern const Kernels kAvx512Bf16;
#endif

// The instruction set in use: the best one the CPU has, or what ASCEND_DEEP_CPU_ISA names.
const Kernels& kernels();

}  // namespace ascend_deep_cpu
