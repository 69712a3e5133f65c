// The experts of a layer: checks, the plan (counting sort of the rows by expert), and the two parallel phases.
#include <algorithm>
#include <cstring>
#include <vector>

#include "moe_call.h"

namespace ascend_deep_cpu {
namespace {

WeightView view(const Tensor& w, const char* what, bool kn) {
  // `kn`: dimensions are [E, K, N] rather than [E, N, K]. A dimension of size 1 has no meaningful stride.
  const int64_t nd = kn ? 2 : 1, kd = kn ? 1 : 2;
  WeightView v{w.const_data_ptr(), w.stride(0), w.stride(nd), w.stride(kd)};
  if (w.size(kd) <= 1) v.sk = 1;
  else if (w.size(nd) <= 1 && v.sk != 1) v.sn = 1;
  STD_TORCH_CHECK(v.sk == 1 || v.sn == 1, "ascend_deep: ", what, " has strides [", w.stride(0), ", ", w.stride(1), ", ",
                  w.stride(2), "], one of the last two has to be 1.");
  return v;
}

BiasView bias(const std::optional<Tensor>& b, const char* what, int64_t experts, int64_t n) {
  if (!b) return {nullptr, 0, 0, kF32};
  check_dim(*b, what, 2);
  STD_TORCH_CHECK(b->size(0) == experts && b->size(1) == n, "ascend_deep: ", what, " has shape ", shape_of(*b),
                  ", the weights ask for [", experts, ", ", n, "].");
  return {b->const_data_ptr(), b->stride(0), b->stride(1), dtype_of(*b, what)};
}

// Kept from call to call, as Workspace is.
struct Rows {
  std::vector<int64_t> start;
  std::vector<int32_t> token;
  std::vector<float> scale;
  std::vector<ActiveExpert> experts;
  int64_t hidden_rows;

  void trim(size_t keep) {
    if (token.capacity() > keep) token = {}, scale = {};
  }
};

float weight_at(const void* p, int64_t i, Dtype dtype) {
  if (dtype == kF32) return static_cast<const float*>(p)[i];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(p)[i]) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// The local expert of an id; not below the number of experts if it is none of them, whatever the id.
uint64_t local_at(const void* p, int64_t i, bool wide, int64_t offset) {
  const int64_t id = wide ? static_cast<const int64_t*>(p)[i] : static_cast<const int32_t*>(p)[i];
  return static_cast<uint64_t>(id) - static_cast<uint64_t>(offset);
}

// Counting sort by expert; stable, so rows of an expert are in order of (token, k).
// `pairs`: panels of pair_rows are possible. `words`: panels hold pairs of bfloat16.
void sort_rows(Rows& r, const Routing& from, int64_t expert_offset, int64_t experts, bool columns, bool pairs,
               bool words, const Kernels& isa) {
  std::vector<int64_t>& start = r.start;
  start.assign(experts + 1, 0);
  for (int64_t t = 0; t < from.tokens; ++t) {
    for (int64_t k = 0; k < from.topk; ++k) {
      const uint64_t e = local_at(from.ids, t * from.ids_t + k * from.ids_k, from.wide, expert_offset);
      if (e < static_cast<uint64_t>(experts)) ++start[e + 1];
    }
  }
  r.experts.clear();
  r.hidden_rows = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t rows = start[e + 1];
    start[e + 1] += start[e];
    if (!rows) continue;
    const int64_t rest = rows % isa.lanes, full = rows / isa.lanes;
    // Weights with stride 1 along n, and panels of words, have no product for plain rows next to panels.
    const int64_t most = (columns || words) && full ? 0 : isa.left_over[std::min<int64_t>(full, 2)];
    int64_t panels = rest > most ? rows + isa.lanes - rest : rows - rest;
    // A vector and a half, with up to a quarter of a vector of plain rows, is faster than two vectors.
    if (pairs && full == 1 && 4 * rest >= isa.lanes && 4 * rest <= 3 * isa.lanes) panels = pair_rows(isa.lanes);
    // Without panels next to it a plain row takes as long as two rows of a panel; reading a weight as long as about 24
    // products with it.
    const int64_t products = panels + (panels ? 1 : 2) * std::max<int64_t>(rows - panels, 0);
    r.experts.push_back({e, start[e], rows, panels, r.hidden_rows, std::max<int64_t>(products, 24)});
    r.hidden_rows += std::max(rows, panels);
  }
  r.token.resize(start[experts]);
  r.scale.resize(start[experts]);
  for (int64_t t = 0; t < from.tokens; ++t) {
    for (int64_t k = 0; k < from.topk; ++k) {
      const uint64_t e = local_at(from.ids, t * from.ids_t + k * from.ids_k, from.wide, expert_offset);
      if (e >= static_cast<uint64_t>(experts)) continue;
      const int64_t at = start[e]++;
      r.token[at] = static_cast<int32_t>(t);
      r.scale[at] = weight_at(from.weights, t * from.weights_t + k * from.weights_k, from.dtype);
    }
  }
}

// The first block of the `part`-th of `parts` equal shares of the cost; blocks are numbered as in Kernels::up.
int64_t share(const Experts& a, int64_t total, int64_t part, int64_t parts) {
  int64_t left = total / parts * part + total % parts * part / parts;
  for (int64_t i = 0; i < a.active; ++i) {
    const int64_t cost = a.experts[i].cost * a.blocks;
    if (left < cost) return i * a.blocks + left / a.experts[i].cost;
    left -= cost;
  }
  return a.active * a.blocks;
}

// Whole cache lines of the result, and whole tiles.
constexpr int64_t kFewColumns = 16;
static_assert(kFewColumns % kTileRows == 0, "whole tiles");

void run(const Experts& a, const Kernels& isa) {
  const int64_t threads = torch::stable::get_num_threads();
  const size_t scratch = isa.scratch_bytes(a);
  int64_t total = 0;
  for (int64_t i = 0; i < a.active; ++i) total += a.experts[i].cost * a.blocks;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t t0 = a.tokens * p / threads, t1 = a.tokens * (p + 1) / threads;
      if (t1 > t0) std::memset(a.sum + t0 * a.hidden_size, 0, (t1 - t0) * a.hidden_size * sizeof(float));
      const int64_t g0 = share(a, total, p, threads), g1 = share(a, total, p + 1, threads);
      if (g1 > g0) isa.up(a, g0, g1, thread_scratch(scratch));
    }
  });
  // Products of plain rows along k are the same in any tile, so that such columns need not be shared out in whole blocks.
  bool plain = a.w2.sk == 1;
  for (int64_t i = 0; plain && i < a.active; ++i) plain = a.experts[i].panel_rows == 0;
  const int64_t unit = plain ? kFewColumns : kOutBlock, blocks = (a.hidden_size + unit - 1) / unit;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t c0 = blocks * p / threads * unit, c1 = std::min(blocks * (p + 1) / threads * unit, a.hidden_size);
      if (c1 > c0) isa.down(a, c0, c1, thread_scratch(scratch));
    }
  });
}

}  // namespace

Tensor experts(const ExpertsTensors& t, const Routing& r, const ExpertsAttributes& attributes) {
  const Tensor &x_in = t.x, &w13 = t.w13, &w2 = t.w2;
  const std::optional<Tensor>&b13 = t.b13, &b2 = t.b2, &w3 = t.w3;
  check_dim(x_in, "x", 2);
  check_dim(w13, "w13", 3);
  check_dim(w2, "w2", 3);
  const bool kn = attributes.kn;
  const int64_t tokens = x_in.size(0), hidden = x_in.size(1), experts = w13.size(0);
  const int64_t n13 = w13.size(kn ? 2 : 1), k13 = w13.size(kn ? 1 : 2);
  const int64_t n2 = w2.size(kn ? 2 : 1), inter = w2.size(kn ? 1 : 2);
  STD_TORCH_CHECK(k13 == hidden && n2 == hidden, "ascend_deep: x has ", hidden, " columns, but w13 is ", shape_of(w13),
                  " and w2 is ", shape_of(w2), " with weight_layout '", kn ? "ekn" : "enk", "'.");
  STD_TORCH_CHECK(w2.size(0) == experts, "ascend_deep: w13 has ", experts, " experts and w2 has ", w2.size(0), ".");
  if (w3) {
    check_dim(*w3, "w3", 3);
    STD_TORCH_CHECK(n13 == inter, "ascend_deep: with w3, w13 is the gate alone and gives as many values as w2 takes, ",
                    inter, "; it gives ", n13, ".");
    STD_TORCH_CHECK(w3->size(0) == experts && w3->size(1) == w13.size(1) && w3->size(2) == w13.size(2), "ascend_deep: w3 is ", shape_of(*w3), ", it has to be ",
                    shape_of(w13), " as w13.");
    STD_TORCH_CHECK(w3->scalar_type() == w13.scalar_type(), "ascend_deep: w3 has dtype ", name_of(w3->scalar_type()),
                    " and w13 ", name_of(w13.scalar_type()), ", they have to be the same.");
    STD_TORCH_CHECK(!attributes.interleaved, "ascend_deep: interleaved is True, but gate and up are two tensors, w13 and w3.");
    STD_TORCH_CHECK(w3->stride(1) == w13.stride(1) && w3->stride(2) == w13.stride(2), "ascend_deep: w3 has strides [",
                    w3->stride(0), ", ", w3->stride(1), ", ", w3->stride(2), "], the last two have to be those of w13.");
  }
  STD_TORCH_CHECK(n13 == 2 * inter || n13 == inter, "ascend_deep: w13 gives ", n13, " values per token, w2 takes ", inter,
                  ": the first has to be twice the second (gated) or equal to it.");
  STD_TORCH_CHECK(r.tokens == tokens, "ascend_deep: the routing is of ", r.tokens, " tokens, x has ", tokens, " rows.");
  STD_TORCH_CHECK(tokens <= INT32_MAX, "ascend_deep: x has ", tokens, " rows, the CPU kernel takes up to 2^31 - 1.");
  Experts a{};
  a.dtype = dtype_of(x_in, "x");
  STD_TORCH_CHECK(dtype_of(w13, "w13") == a.dtype && dtype_of(w2, "w2") == a.dtype, "ascend_deep: x has dtype ",
                  name_of(x_in.scalar_type()), ", w13 ", name_of(w13.scalar_type()), " and w2 ",
                  name_of(w2.scalar_type()), ", they have to be the same.");
  const ScalarType out_type = attributes.out_dtype.value_or(x_in.scalar_type());
  STD_TORCH_CHECK(out_type == ScalarType::Float || out_type == ScalarType::BFloat16, "ascend_deep: out_dtype is ",
                  name_of(out_type), ", the CPU kernel writes float32 and bfloat16.");
  const Tensor x = hidden > 1 && x_in.stride(1) != 1 ? torch::stable::contiguous(x_in) : x_in;

  a.tokens = tokens;
  a.hidden_size = hidden;
  a.intermediate = inter;
  a.blocks = (inter + kHiddenBlock - 1) / kHiddenBlock;
  a.x = x.const_data_ptr();
  a.x_stride = x.stride(0);
  a.w13 = view(w13, "w13", kn);
  a.w2 = view(w2, "w2", kn);
  if (w3) {
    a.w3 = w3->const_data_ptr();
    a.w3_se = w3->stride(0);
  }
  a.b13 = bias(b13, "b13", experts, w3 ? 2 * n13 : n13);
  a.b2 = bias(b2, "b2", experts, hidden);
  a.act = attributes.act;
  a.gated = w3 || n13 != inter;
  a.interleaved = attributes.interleaved;
  // The rest of what the op refuses: callers may come here first, see ops/_eager.py.
  STD_TORCH_CHECK(a.gated || !(attributes.interleaved || a.act.act == kSwigluOai), "ascend_deep: interleaved halves and act ",
                  "'swiglu_oai' need a gate and an up half, but w13 has as many rows as w2 has columns.");
  for (const auto& b : {b13, b2}) {
    STD_TORCH_CHECK(!b || b->scalar_type() == x_in.scalar_type(), "ascend_deep: a bias has dtype ",
                    name_of(b ? b->scalar_type() : x_in.scalar_type()), ", x ", name_of(x_in.scalar_type()), ".");
  }
  a.weight_on_input = attributes.weight_on_input;
  a.out_dtype = out_type == ScalarType::Float ? kF32 : kBF16;

  Tensor out = empty_matrix(tokens, hidden, out_type);
  if (tokens == 0 || hidden == 0) return out;
  const Kernels& isa = kernels();
  thread_local Rows rows;
  const bool columns = a.w13.sk != 1 || a.w2.sk != 1, even = !columns && hidden % 2 == 0 && inter % 2 == 0;
  a.words = even && isa.dots && a.dtype == kBF16;
  sort_rows(rows, r, attributes.expert_offset, experts, columns, even && !a.words, a.words, isa);
  a.active = static_cast<int64_t>(rows.experts.size());
  a.experts = rows.experts.data();
  a.token = rows.token.data();
  a.scale = rows.scale.data();
  a.out = out.mutable_data_ptr();
  thread_local Workspace hidden_space, sum_space;
  a.hidden = static_cast<float*>(hidden_space.at_least(std::max<int64_t>(rows.hidden_rows * inter, 1) * sizeof(float)));
  a.sum = a.out_dtype == kF32 ? static_cast<float*>(a.out)
                              : static_cast<float*>(sum_space.at_least(tokens * hidden * sizeof(float)));
  run(a, isa);
  constexpr size_t kKeep = size_t{64} << 20;
  hidden_space.trim(kKeep);
  sum_space.trim(kKeep);
  rows.trim(kKeep / sizeof(float));
  return out;
}


ExpertsAttributes experts_attributes(const std::string& act, double alpha, std::optional<double> limit, bool interleaved,
                                     const std::string& weight_layout, bool weight_on_input, int64_t expert_offset,
                                     std::optional<ScalarType> out_dtype) {
  STD_TORCH_CHECK(weight_layout == "enk" || weight_layout == "ekn", "ascend_deep: weight_layout is '", weight_layout,
                  "', it has to be 'enk' or 'ekn'.");
  return {activation(act, alpha, limit), interleaved, weight_layout == "ekn", weight_on_input, out_dtype, expert_offset};
}

}  // namespace ascend_deep_cpu
