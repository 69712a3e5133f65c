#include "coded.h"

namespace ascend_deep_cpu {
namespace {

// Fields from the lowest bit on.
class Writer {
 public:
  void field(uint64_t value, int bits, const char* what) {
    STD_TORCH_CHECK(value < (uint64_t{1} << bits), "ascend_deep: ", what, " is ", value, ", a coded call takes up to ",
                    (uint64_t{1} << bits) - 1, ".");
    code_ |= value << at_;
    at_ += bits;
  }
  int64_t code() const { return static_cast<int64_t>(code_); }

 private:
  uint64_t code_ = 0;
  int at_ = 0;
};

class Reader {
 public:
  explicit Reader(int64_t code) : left_(static_cast<uint64_t>(code)) {}
  int64_t field(int bits) {
    const uint64_t value = left_ & ((uint64_t{1} << bits) - 1);
    left_ >>= bits;
    return static_cast<int64_t>(value);
  }
  bool empty() const { return left_ == 0; }

 private:
  uint64_t left_;
};

}  // namespace

int64_t experts_code(const std::string& act, double alpha, std::optional<double> limit, bool interleaved,
                     const std::string& weight_layout, bool weight_on_input, std::optional<ScalarType> out_dtype) {
  const ExpertsAttributes a =
      experts_attributes(act, alpha, limit, interleaved, weight_layout, weight_on_input, 0, out_dtype);
  STD_TORCH_CHECK(!out_dtype || *out_dtype == ScalarType::Float || *out_dtype == ScalarType::BFloat16,
                  "ascend_deep: out_dtype is ", name_of(out_dtype.value_or(ScalarType::Float)),
                  ", the CPU kernel writes float32 and bfloat16.");
  Writer w;
  w.field(a.act.act, 4, "act");
  w.field(a.act.has_limit, 1, "limit");
  w.field(a.interleaved, 1, "interleaved");
  w.field(a.kn, 1, "weight_layout");
  w.field(a.weight_on_input, 1, "weight_on_input");
  w.field(!out_dtype ? 0 : *out_dtype == ScalarType::Float ? 1 : 2, 2, "out_dtype");
  return w.code();
}

ExpertsAttributes experts_decode(int64_t code, double alpha, double limit, int64_t expert_offset) {
  Reader r(code);
  const int64_t act = r.field(4);
  const bool has_limit = r.field(1), interleaved = r.field(1), kn = r.field(1), weight_on_input = r.field(1);
  const int64_t out = r.field(2);
  STD_TORCH_CHECK(r.empty() && act <= kSiluClamp && out <= 2, "ascend_deep: ", code, " is not a code of experts.");
  ExpertsAttributes a{{static_cast<Act>(act), static_cast<float>(alpha), static_cast<float>(limit), has_limit},
                      interleaved, kn, weight_on_input, std::nullopt, expert_offset};
  if (out) a.out_dtype = out == 1 ? ScalarType::Float : ScalarType::BFloat16;
  return a;
}

int64_t route_code(int64_t topk, const std::string& scoring, const std::string& select, const std::string& renorm,
                   int64_t n_group, int64_t topk_group, const std::string& group_score, const std::string& group_fill,
                   bool rounded) {
  const RouteAttributes a =
      route_attributes(topk, scoring, select, renorm, 0.0, 1.0, n_group, topk_group, group_score, group_fill);
  Writer w;
  w.field(a.scoring, 2, "scoring");
  w.field(a.select_logits, 1, "select");
  w.field(a.renorm, 2, "renorm");
  w.field(a.group_max, 1, "group_score");
  w.field(a.group_zero, 1, "group_fill");
  w.field(rounded, 1, "rounded");
  w.field(a.topk, 16, "topk");
  w.field(a.n_group, 16, "n_group");
  w.field(a.n_group == 1 ? 1 : a.topk_group, 16, "topk_group");  // not used without groups
  return w.code();
}

RouteAttributes route_decode(int64_t code, double eps, double scale, bool* rounded) {
  Reader r(code);
  RouteAttributes a{};
  a.scoring = static_cast<int32_t>(r.field(2));
  a.select_logits = r.field(1);
  a.renorm = static_cast<int32_t>(r.field(2));
  a.group_max = r.field(1);
  a.group_zero = r.field(1);
  *rounded = r.field(1);
  a.topk = r.field(16);
  a.n_group = r.field(16);
  a.topk_group = r.field(16);
  STD_TORCH_CHECK(r.empty() && a.scoring <= 2 && a.renorm <= 2 && a.topk >= 1 && a.n_group >= 1 && a.topk_group >= 1 &&
                      a.topk_group <= a.n_group,
                  "ascend_deep: ", code, " is not a code of routing.");
  a.eps = eps;
  a.scale = scale;
  return a;
}

}  // namespace ascend_deep_cpu
