#include "gemm_call.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ascend_deep_cpu {
namespace {

constexpr int64_t kPanel = 48;                     // a multiple of all panel widths
constexpr int64_t kMaxTokens = 10 * kPanel;        // of a product, which are packed together
constexpr int64_t kMaxFloats = int64_t{16} << 20;  // that they are, unless a panel is more
constexpr int64_t kMaxPacked = int64_t{2} << 20;   // floats that are packed at a time, if that is not less than a product
constexpr int64_t kFewRows = 64;                   // up to so many columns of D change places with many rows

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

bool along(const Operand& x) {
  const int64_t unit = x.format == kMatF32 ? 4 : x.format == kMatBF16 ? 2 : 1;
  return x.col == unit && !x.pairs_along_rows;
}

bool across(const Operand& x) {
  const int64_t unit = x.format == kMatF32 ? 4 : x.format == kMatBF16 ? 2 : 1;
  return !along(x) && x.row == unit && (x.format != kMatE2M1 || x.pairs_along_rows);
}

bool coded(const Product& p, const GemmKernels& isa) {
  const Operand& w = p.stream;
  const int64_t step = isa.code_step(w.format);
  if (!step || p.count > kCodedTokens || !along(w)) return false;
  if (w.sf == kSfNone) return true;
  return (w.gran_k % step == 0 || (w.gran_k == 32 && step % 32 == 0)) && w.sf_shift % w.gran_k == 0;
}

// Whether tokens can be packed as codes: their scales are those of whole groups of 32.
bool dots(const Product& p, const GemmKernels& isa) {
  const Operand& x = p.tokens;
  if (!p.coded || !isa.dots_step(isa.code_step(p.stream.format))) return false;
  if (x.format != kMatE4M3 && x.format != kMatE2M1) return false;
  return x.sf == kSfNone || (x.gran_k % 32 == 0 && x.sf_shift % 32 == 0);
}

void plan_tokens(Product& p, const GemmKernels& isa) {
  p.coded = coded(p, isa);
  p.dots = dots(p, isa);
  const int64_t full = p.count / isa.lanes, rest = p.count % isa.lanes;
  // Rows that are next to each other have no product for plain tokens beside panels.
  const int64_t most = across(p.stream) ? (full ? 0 : isa.left_over[0] / 2) : isa.left_over[std::min<int64_t>(full, 2)];
  p.panels = p.coded ? 0 : rest > most ? p.count - rest + isa.lanes : p.count - rest;
  p.plain = std::max<int64_t>(p.count - p.panels, 0);
  const int64_t step = p.coded ? isa.code_step(p.stream.format) : 16;
  p.pitch = round_up(p.depth, step);
  if (p.dots) p.pitch = p.pitch / step * isa.dots_step(step);
}

int64_t packed_size(const Product& p) { return round_up(p.panels * p.depth + p.plain * p.pitch, 16) + 16; }

struct Task {
  const Product* product;
  int64_t n0, n1;
};

// Products whose packed tokens are in memory together.
void run_wave(std::vector<Product>& wave, const GemmKernels& isa) {
  thread_local Workspace space;
  int64_t packed = 0, rows = 0, cost = 0;
  size_t scratch = 0;
  for (const Product& p : wave) {
    packed += packed_size(p);
    rows += p.rows;
    cost += p.rows * p.depth * (p.count + 8);
    scratch = std::max(scratch, isa.scratch(p));
  }
  float* base = static_cast<float*>(space.at_least(packed * sizeof(float)));
  std::vector<Task> tasks, packing;
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), 1 + cost / (1 << 20));
  // Tasks of a product of codes share nothing but a counter; others read all tokens for each task.
  const int64_t wanted = threads == 1 ? 1 : wave.front().coded ? 16 * threads : 8 * threads;
  const int64_t share = std::min(std::max(round_up(rows / wanted, 8), int64_t{8}), kProductRows);
  for (Product& p : wave) {
    p.packed = base;
    base += packed_size(p);
    for (int64_t n = 0; n < p.rows; n += share) tasks.push_back({&p, n, std::min(n + share, p.rows)});
    const int64_t items = p.panels / isa.lanes + p.plain;
    for (int64_t i = 0; i < items; ++i) packing.push_back({&p, i, i + 1});
  }
  std::atomic<size_t> next{0}, next_packing{0};
  // A few tokens are packed by each thread for itself: that takes less time than to fetch them from another's cache.
  if (threads > 1 && tasks.size() > 1 && wave.size() == 1 && wave.front().coded) {
    const size_t own = packed * sizeof(float);
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      char* space_of_thread = static_cast<char*>(thread_scratch(own + scratch));
      Product p = wave.front();
      p.packed = reinterpret_cast<float*>(space_of_thread);
      isa.pack(p, 0, p.plain, space_of_thread + own);
      for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) {
        isa.product(p, tasks[i].n0, tasks[i].n1, space_of_thread + own);
      }
    });
    return;
  }
  const auto pack = [&](int64_t, int64_t) {
    for (size_t i; (i = next_packing.fetch_add(1, std::memory_order_relaxed)) < packing.size();) {
      isa.pack(*packing[i].product, packing[i].n0, packing[i].n1, thread_scratch(scratch));
    }
  };
  if (threads > 1 && packed > (1 << 15)) torch::stable::parallel_for(0, threads, 1, pack);
  else pack(0, 1);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) {
      isa.product(*tasks[i].product, tasks[i].n0, tasks[i].n1, thread_scratch(scratch));
    }
  });
  space.trim(size_t{64} << 20);
}

}  // namespace

#if defined(__x86_64__)
namespace {

// Every CPU with AVX2 has F16C; a virtual machine can hide it. Not all compilers know the name.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1u) != 0;
}

}  // namespace
#endif

const GemmKernels& gemm_kernels() {
#if defined(__x86_64__)
  static const bool half = has_f16c();
  if (&kernels() == &kAvx512Bf16 && half) return kGemmAvx512Bf16;
  if (&kernels() == &kAvx512 && half) return kGemmAvx512;
  if (&kernels() == &kAvx2 && half) return kGemmAvx2;
#endif
  return kGemmPortable;
}

Operand View::at(int64_t batch) const {
  Operand o = x;
  o.base += batch * batch_stride;
  if (o.sf_base) o.sf_base += batch * sf_stride;
  return o;
}

bool is_fp4(ScalarType type) {
  return type == ScalarType::Char || type == ScalarType::Byte || type == ScalarType::Float4_e2m1fn_x2;
}

View view_of(const Tensor& t, const char* what, Dims dims) {
  check_dim(t, what, dims.batch < 0 ? 2 : 3);
  View v;
  const ScalarType type = t.scalar_type();
  const bool fp4 = is_fp4(type);
  STD_TORCH_CHECK(fp4 || type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Float8_e4m3fn,
                  "ascend_deep: ", what, " has dtype ", name_of(type), ", the CPU kernel takes float32, bfloat16, ",
                  "float8_e4m3fn and FP4 pairs.");
  v.x.format = fp4                          ? kMatE2M1
               : type == ScalarType::Float  ? kMatF32
               : type == ScalarType::BFloat16 ? kMatBF16
                                              : kMatE4M3;
  const int64_t unit = fp4 ? 1 : static_cast<int64_t>(t.element_size()), last = t.dim() - 1;
  STD_TORCH_CHECK(!fp4 || dims.batch != last, "ascend_deep: ", what, " has FP4 pairs along its batch dimension.");
  v.x.base = static_cast<const char*>(t.const_data_ptr());
  v.x.pairs_along_rows = fp4 && dims.rows == last;
  v.x.row = t.stride(dims.rows) * unit;
  v.x.col = t.stride(dims.k) * unit;
  v.rows = t.size(dims.rows) * (v.x.pairs_along_rows ? 2 : 1);
  v.depth = t.size(dims.k) * (fp4 && !v.x.pairs_along_rows ? 2 : 1);
  // A dimension of size 1 has no meaningful stride.
  if (t.size(dims.k) <= 1 && !v.x.pairs_along_rows) v.x.col = unit;
  if (dims.batch >= 0) {
    v.batches = t.size(dims.batch);
    v.batch_stride = t.stride(dims.batch) * unit;
  }
  v.x.sf = kSfNone;
  v.x.gran_row = v.x.gran_k = 1;
  return v;
}

void add_scales(View& v, const Tensor& sf, const char* what, Dims dims, int64_t gran_row, int64_t gran_k) {
  check_dim(sf, what, dims.batch < 0 ? 2 : 3);
  const ScalarType type = sf.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Int || type == ScalarType::Short, "ascend_deep: ",
                  what, " has dtype ", name_of(type), ", scales are float32, int32 or int16.");
  STD_TORCH_CHECK(gran_row >= 1 && gran_k >= 1 && (type == ScalarType::Float || gran_row == 1), "ascend_deep: the blocks of ",
                  what, " are [", gran_row, ", ", gran_k, "]; sizes are at least 1, and packed scales have one row each.");
  const int64_t per = type == ScalarType::Float ? 1 : type == ScalarType::Int ? 4 : 2;
  const int64_t rows = (v.rows + gran_row - 1) / gran_row, groups = (v.depth + gran_k - 1) / gran_k;
  const int64_t columns = (groups + per - 1) / per;
  STD_TORCH_CHECK(sf.size(dims.rows) == rows && sf.size(dims.k) == columns &&
                      (dims.batch < 0 || sf.size(dims.batch) == v.batches),
                  "ascend_deep: ", what, " has shape ", shape_of(sf), ", it has to have ", rows, " rows and ", columns,
                  " columns for its operand.");
  const int64_t size = static_cast<int64_t>(sf.element_size());
  v.x.sf = type == ScalarType::Float ? kSfF32 : type == ScalarType::Int ? kSfUe8m0x4 : kSfUe8m0x2;
  v.x.sf_base = static_cast<const char*>(sf.const_data_ptr());
  v.x.sf_row = sf.stride(dims.rows);
  v.x.sf_col = sf.stride(dims.k);
  v.x.gran_row = gran_row;
  v.x.gran_k = gran_k;
  if (dims.batch >= 0) v.sf_stride = sf.stride(dims.batch) * size;
}

Result result_of(Tensor& d, const std::optional<Tensor>& c, Dims dims) {
  check_dim(d, "d", dims.batch < 0 ? 2 : 3);
  Result r{};
  r.dtype = dtype_of(d, "d");
  r.d = d.mutable_data_ptr();
  r.d_row = d.stride(dims.rows), r.d_col = d.stride(dims.k);
  r.d_batch = dims.batch < 0 ? 0 : d.stride(dims.batch);
  if (d.size(dims.k) <= 1) r.d_col = 1;
  if (c) {
    check_dim(*c, "c", d.dim());
    STD_TORCH_CHECK(dtype_of(*c, "c") == r.dtype, "ascend_deep: c has dtype ", name_of(c->scalar_type()),
                    ", it has to be that of the result, ", name_of(d.scalar_type()), ".");
    for (int64_t i = 0; i < d.dim(); ++i) {
      STD_TORCH_CHECK(c->size(i) == d.size(i), "ascend_deep: c has shape ", shape_of(*c), ", the result has ",
                      shape_of(d), ".");
    }
    r.c = c->const_data_ptr();
    r.c_row = c->stride(dims.rows), r.c_col = c->stride(dims.k);
    r.c_batch = dims.batch < 0 ? 0 : c->stride(dims.batch);
  }
  return r;
}

void run_parts(const View& a, const View& b, const Result& r, float alpha, const std::vector<Part>& parts) {
  const GemmKernels& isa = gemm_kernels();
  const int64_t size = r.dtype == kF32 ? 4 : 2;
  std::vector<Product> wave;
  int64_t packed = 0;
  for (const Part& part : parts) {
    const int64_t m = part.m1 - part.m0, n = b.rows;
    if (m <= 0 || n == 0) continue;
    Product p{};
    p.depth = part.k1 - part.k0;
    p.alpha = alpha;
    p.dtype = r.dtype;
    p.index = part.index;
    Operand left = a.at(part.a), right = b.at(part.b);
    for (Operand* x : {&left, &right}) {
      const bool halved = x->format == kMatE2M1 && !x->pairs_along_rows;
      STD_TORCH_CHECK(!halved || part.k0 % 2 == 0, "ascend_deep: a group starts at ", part.k0,
                      ", between the two codes of a byte.");
      x->base += (halved ? part.k0 / 2 : part.k0) * x->col;
      x->sf_shift = part.k0;
    }
    p.d = static_cast<char*>(r.d) + part.d * r.d_batch * size;
    p.c = r.c ? static_cast<const char*>(r.c) + part.d * r.c_batch * size : nullptr;
    // What is long is streamed.
    const bool swap = m > n && n <= kFewRows && !part.index && part.m0 == 0;
    p.stream = swap ? left : right;
    p.tokens = swap ? right : left;
    p.rows = swap ? m : n;
    p.d_token = swap ? r.d_col : r.d_row, p.d_row = swap ? r.d_row : r.d_col;
    p.c_token = swap ? r.c_col : r.c_row, p.c_row = swap ? r.c_row : r.c_col;
    const int64_t tokens = swap ? n : m;
    const int64_t fit = kMaxFloats / std::max<int64_t>(p.depth, 1) / kPanel * kPanel;
    const int64_t most = std::max(std::min(kMaxTokens, fit), kPanel);
    for (int64_t first = 0; first < tokens; first += most) {
      p.first = part.m0 + first;
      p.count = std::min(most, tokens - first);
      plan_tokens(p, isa);
      if (!wave.empty() && packed + packed_size(p) > kMaxPacked) {
        run_wave(wave, isa);
        wave.clear();
        packed = 0;
      }
      packed += packed_size(p);
      wave.push_back(p);
    }
  }
  if (!wave.empty()) run_wave(wave, isa);
}

}  // namespace ascend_deep_cpu
