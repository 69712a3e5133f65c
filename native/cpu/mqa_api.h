// What the generic code and the per-ISA kernels of the indexer share; see api.h for why it is plain data.
#pragma once

#include "api.h"

namespace ascend_deep_cpu {

enum MqaFormat : int32_t { kMqaF32, kMqaBF16, kMqaF16, kMqaE4M3, kMqaE2M1 };
enum MqaScale : int32_t { kNoScale, kFloatScale, kUe8m0 };
enum MqaMask : int32_t { kNoMask, kBoolMask, kF32Mask, kBF16Mask, kF16Mask };

// q [B, S, H, D] or keys [B, T, D]. Strides are in bytes; the last dimension is contiguous.
struct MqaOperand {
  const char* base;
  int64_t stride[3];
  MqaFormat format;
  MqaScale scale;
  const char* scales;
  int64_t scale_stride[3];
  int64_t groups;  // scales per vector of D elements
};

// A paged cache instead of keys [B, T, D]. Row b of the table has the pages of batch entry b.
struct MqaPages {
  int64_t count, block;             // pages, keys per page
  int64_t stride, width, sf_width;  // bytes between pages, per key of data, per key of scales
  const int64_t* table;             // [B, columns]
  int64_t columns;
};

struct Mqa {
  int64_t batch, rows, heads, depth, keys;
  MqaOperand q, kv;
  bool paged;
  MqaPages pages;
  const float* weights;   // [B, S, H]
  const int64_t* start;   // [B, S], in [0, keys]
  const int64_t* end;     // [B, S], in [0, keys]
  MqaMask mask;
  const char* mask_base;
  int64_t mask_stride[2];  // bytes between batch entries and rows, 0 where it broadcasts
  float scale;
  int64_t row_block;  // rows of a task
  const float* e4m3;  // [256]
  const float* e2m1;  // [256][2]: a byte is two codes, low nibble first
  // logits
  void* out;  // [B, S, columns]
  Dtype out_dtype;
  int64_t columns;
  bool compressed;
  // top-k
  int64_t topk;
  bool rank_last;
  int64_t capacity;  // candidates that a row holds between two prunings, and room for one panel more
};

// A candidate is one integer, larger is better: the order key of the score above the complement of the index.
inline constexpr int32_t kMqaExcluded = INT32_MIN;
inline constexpr int32_t kMqaNan = INT32_MIN + 1;

// Keeps the k largest of n candidates, in their order, and returns k; n <= k changes nothing. `spare` has room for n.
int64_t mqa_prune(uint64_t* candidates, int64_t n, int64_t k, uint64_t* spare);
// Sorts candidates that are ascending by index, best first. `spare` has room for n.
void mqa_sort(uint64_t* candidates, int64_t n, uint64_t* spare);

// q [B, Hq, S, D], k [B, Hk, T, D], v [B, Hk, T, Dv]; strides in elements, the last dimension is contiguous.
struct SparseAttention {
  int64_t key_heads, group, rows, keys, depth, value_depth, topk;  // group = Hq / Hk
  Dtype dtype;
  const void *q, *k, *v;
  int64_t q_stride[3], k_stride[3], v_stride[3];
  const int64_t* idx;  // [B, S, K]
  MqaMask mask;
  const char* mask_base;
  int64_t mask_stride[3];  // bytes between batch entries, heads and rows, 0 where it broadcasts
  const float* sink;       // nullptr or [Hq]
  float scale;
  int64_t task_heads;  // query heads of one key head that a task takes, rounded up to 8
  void* out;           // [B, Hq, S, Dv]
  float* lse;          // [B, Hq, S]
};

// One instruction set. `scratch` is per thread, 64-byte aligned.
struct MqaKernels {
  int64_t panel;  // keys in a panel; key ranges of tasks start at multiples of it
  size_t (*logits_scratch)(const Mqa&);
  size_t (*topk_scratch)(const Mqa&);
  // Logits of keys [k0, k1) for rows [s0, s1) of batch entry b.
  void (*logits)(const Mqa&, int64_t b, int64_t s0, int64_t s1, int64_t k0, int64_t k1, void* scratch);
  // The candidates of the same, ascending by index: row s has count[s - s0] <= topk of them at lists + (s - s0) * pitch.
  void (*topk)(const Mqa&, int64_t b, int64_t s0, int64_t s1, int64_t k0, int64_t k1, uint64_t* lists, int64_t pitch,
               int64_t* count, void* scratch);
  size_t (*attention_scratch)(const SparseAttention&);
  // Row s of batch entry b: heads [h0, h1) of the group of key head g.
  void (*attention)(const SparseAttention&, int64_t b, int64_t g, int64_t s, int64_t h0, int64_t h1, void* scratch);
};

extern const MqaKernels kMqaPortable;
#if defined(__x86_64__)
extern const MqaKernels kMqaAvx2;
extern const MqaKernels kMqaAvx512;
#endif

const MqaKernels& mqa_kernels();

}  // namespace ascend_deep_cpu
