// ascend_deep_cpu::gemm_bf16 and gemm_scaled, the dense products with the schemas of the ops, and gemm_many, on which
// the grouped and batched ones are built.
#include <algorithm>

#include "gemm_call.h"

namespace ascend_deep_cpu {
namespace {

using Optional = std::optional<Tensor>;
using Ints = std::vector<int64_t>;

struct Layout {
  Dims a, b;
};

Layout layout_of(const std::string& layout) {
  STD_TORCH_CHECK(layout == "nt" || layout == "nn" || layout == "tn" || layout == "tt", "ascend_deep: layout is '", layout,
                  "', it has to be 'nt', 'nn', 'tn' or 'tt'.");
  const Dims rows_first{-1, 0, 1}, k_first{-1, 1, 0};
  return {layout[0] == 'n' ? rows_first : k_first, layout[1] == 't' ? rows_first : k_first};
}

void check_same_depth(const View& a, const View& b) {
  STD_TORCH_CHECK(a.depth == b.depth, "ascend_deep: K of b is ", b.depth, ", K of a is ", a.depth, ".");
}

Tensor dense(const View& a, const View& b, const Optional& c, std::optional<ScalarType> out_dtype,
             std::optional<double> alpha) {
  check_same_depth(a, b);
  const ScalarType type = out_dtype ? *out_dtype : c ? c->scalar_type() : ScalarType::BFloat16;
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, "ascend_deep: out_dtype is ", name_of(type),
                  ", the CPU kernel writes float32 and bfloat16.");
  Tensor d = empty_matrix(a.rows, b.rows, type);
  const Result r = result_of(d, c, {-1, 0, 1});
  run_parts(a, b, r, static_cast<float>(alpha.value_or(1.0)), {{0, 0, 0, 0, a.rows, 0, a.depth, nullptr}});
  return d;
}

void check_bf16(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::BFloat16, "ascend_deep: ", what, " has dtype ", name_of(t.scalar_type()),
                  ", it has to be bfloat16.");
}

void check_codes(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(is_fp4(t.scalar_type()) || t.scalar_type() == ScalarType::Float8_e4m3fn, "ascend_deep: ", what,
                  " has dtype ", name_of(t.scalar_type()), ", it has to be float8_e4m3fn or FP4 pairs.");
}

Tensor gemm_bf16(const Tensor& a, const Tensor& b, const Optional& c, const std::string& layout,
                 std::optional<ScalarType> out_dtype, std::optional<double> alpha) {
  const Layout l = layout_of(layout);
  check_bf16(a, "a");
  check_bf16(b, "b");
  return dense(view_of(a, "a", l.a), view_of(b, "b", l.b), c, out_dtype, alpha);
}

void scale(View& v, const Tensor& sf, const char* what, Dims dims, const Ints& recipe) {
  STD_TORCH_CHECK(recipe.size() == 2, "ascend_deep: the blocks of ", what, " are given by ", recipe.size(),
                  " numbers, it has to be two.");
  add_scales(v, sf, what, dims, recipe[0], recipe[1]);
}

Tensor gemm_scaled(const Tensor& a, const Tensor& sfa, const Tensor& b, const Tensor& sfb, const Optional& c,
                   Ints recipe_a, Ints recipe_b, const std::string& layout, std::optional<ScalarType> out_dtype,
                   std::optional<double> alpha) {
  const Layout l = layout_of(layout);
  check_codes(a, "a");
  check_codes(b, "b");
  View va = view_of(a, "a", l.a), vb = view_of(b, "b", l.b);
  scale(va, sfa, "sfa", {-1, 0, 1}, recipe_a);
  scale(vb, sfb, "sfb", {-1, 0, 1}, recipe_b);
  return dense(va, vb, c, out_dtype, alpha);
}

std::vector<int64_t> read_index(const Tensor& t) {
  check_dim(t, "grouped_layout", 1);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long,
                  "ascend_deep: grouped_layout has dtype ", name_of(t.scalar_type()), ", it has to be int32 or int64.");
  std::vector<int64_t> v(t.size(0));
  for (size_t i = 0; i < v.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i) * t.stride(0);
    v[i] = t.scalar_type() == ScalarType::Int ? static_cast<const int32_t*>(t.const_data_ptr())[at]
                                              : static_cast<const int64_t*>(t.const_data_ptr())[at];
  }
  return v;
}

struct Range {
  int64_t start, end;
};

// Groups within `rows` rows, from their ends (psum) or their sizes.
std::vector<Range> ranges(const std::vector<int64_t>& layout, bool sizes, int64_t alignment, int64_t rows) {
  std::vector<Range> found;
  int64_t start = 0;
  for (const int64_t value : layout) {
    const int64_t end = sizes ? start + std::max<int64_t>(value, 0) : value;
    const int64_t first = std::min(start, rows);
    found.push_back({first, std::max(first, std::min(end, rows))});
    start = (std::max<int64_t>(end, 0) + alignment - 1) / alignment * alignment;
  }
  return found;
}

Dims dims_of(const Ints& dims, const char* what) {
  STD_TORCH_CHECK(dims.size() == 3, "ascend_deep: ", what, " has ", dims.size(), " entries, it has to have three.");
  return {dims[0], dims[1], dims[2]};
}

// How the parts of a grouped product follow from `grouped_layout`:
//   "batch"   none: D[g] = A[g] B[g]^T              "masked"  counts: the rows of A[g] and D[g] that are there
//   "psum_m", "labels_m": rows of A and D of group g   "psum_k", "sizes_k": the K of group g
void gemm_many(Tensor d, const Tensor& a, const Optional& sfa, const Tensor& b, const Optional& sfb, const Optional& c,
               const Optional& grouped_layout, const std::string& mode, Ints dims_a, Ints dims_b, Ints dims_d,
               Ints dims_sfa, Ints dims_sfb, Ints recipe_a, Ints recipe_b, int64_t alignment, double alpha) {
  View va = view_of(a, "a", dims_of(dims_a, "dims_a")), vb = view_of(b, "b", dims_of(dims_b, "dims_b"));
  if (sfa) scale(va, *sfa, "sfa", dims_of(dims_sfa, "dims_sfa"), recipe_a);
  if (sfb) scale(vb, *sfb, "sfb", dims_of(dims_sfb, "dims_sfb"), recipe_b);
  check_same_depth(va, vb);
  const Dims where = dims_of(dims_d, "dims_d");
  const Result r = result_of(d, c, where);
  STD_TORCH_CHECK(d.size(where.rows) == va.rows && d.size(where.k) == vb.rows, "ascend_deep: d has shape ", shape_of(d),
                  ", its matrices have to be [", va.rows, ", ", vb.rows, "].");
  STD_TORCH_CHECK(alignment >= 1, "ascend_deep: alignment is ", alignment, ", it has to be at least 1.");
  const int64_t rows = va.rows, depth = va.depth, outputs = where.batch < 0 ? 1 : d.size(where.batch);
  std::vector<int64_t> layout;
  if (grouped_layout) layout = read_index(*grouped_layout);
  std::vector<Part> parts;
  std::vector<int32_t> index;
  const auto entries = [&](int64_t found, int64_t expected, const char* what) {
    STD_TORCH_CHECK(found == expected, "ascend_deep: ", what, " is ", found, ", it has to be ", expected, ".");
  };
  const int64_t groups = static_cast<int64_t>(layout.size());
  if (mode == "batch" || mode == "masked") {
    entries(va.batches, outputs, "the batch of a");
    entries(vb.batches, outputs, "the batch of b");
    if (mode == "masked") entries(groups, outputs, "the size of masked_m");
    for (int64_t g = 0; g < outputs; ++g) {
      const int64_t count = mode == "batch" ? rows : std::min(layout[g], rows);
      parts.push_back({g, g, g, 0, count, 0, depth, nullptr});
    }
  } else if (mode == "psum_m") {
    entries(groups, vb.batches, "the size of grouped_layout");
    const std::vector<Range> found = ranges(layout, false, alignment, rows);
    for (int64_t g = 0; g < groups; ++g) parts.push_back({0, g, 0, found[g].start, found[g].end, 0, depth, nullptr});
  } else if (mode == "labels_m") {
    entries(groups, rows, "the size of grouped_layout");
    // Counting sort: the rows of a group, in order.
    std::vector<int64_t> start(vb.batches + 1, 0);
    for (const int64_t g : layout) {
      if (g >= 0 && g < vb.batches) ++start[g + 1];
    }
    for (int64_t g = 0; g < vb.batches; ++g) start[g + 1] += start[g];
    index.resize(start[vb.batches] + 1);
    std::vector<int64_t> at = start;
    for (int64_t i = 0; i < rows; ++i) {
      if (layout[i] >= 0 && layout[i] < vb.batches) index[at[layout[i]]++] = static_cast<int32_t>(i);
    }
    for (int64_t g = 0; g < vb.batches; ++g) {
      parts.push_back({0, g, 0, 0, start[g + 1] - start[g], 0, depth, index.data() + start[g]});
    }
  } else {
    STD_TORCH_CHECK(mode == "psum_k" || mode == "sizes_k", "ascend_deep: gemm_many has no mode '", mode, "'.");
    entries(groups, outputs, "the size of grouped_layout");
    const std::vector<Range> found = ranges(layout, mode == "sizes_k", alignment, depth);
    for (int64_t g = 0; g < groups; ++g) parts.push_back({0, 0, g, 0, rows, found[g].start, found[g].end, nullptr});
  }
  run_parts(va, vb, r, static_cast<float>(alpha), parts);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ascend_deep_cpu, m) {
  m.def("gemm_bf16(Tensor a, Tensor b, Tensor? c, *, str layout, ScalarType? out_dtype, float? alpha) -> Tensor");
  m.def(
      "gemm_scaled(Tensor a, Tensor sfa, Tensor b, Tensor sfb, Tensor? c, *, int[2] recipe_a, int[2] recipe_b, "
      "str layout, ScalarType? out_dtype, float? alpha) -> Tensor");
  m.def(
      "gemm_many(Tensor(a!) d, Tensor a, Tensor? sfa, Tensor b, Tensor? sfb, Tensor? c, Tensor? grouped_layout, "
      "str mode, int[] dims_a, int[] dims_b, int[] dims_d, int[] dims_sfa, int[] dims_sfb, int[] recipe_a, "
      "int[] recipe_b, int alignment, float alpha) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ascend_deep_cpu, CPU, m) {
  m.impl("gemm_bf16", TORCH_BOX(&gemm_bf16));
  m.impl("gemm_scaled", TORCH_BOX(&gemm_scaled));
  m.impl("gemm_many", TORCH_BOX(&gemm_many));
}

}  // namespace ascend_deep_cpu
