// Routing and the gated activation, row by row. The contract is that of the ops moe_route and swiglu.
#pragma once

#include "vmath.h"

namespace {

using ascend_deep_cpu::Route;
using ascend_deep_cpu::Swiglu;

// A key that orders like the choice score: -0 equals +0, NaN ranks below -inf, experts of dropped groups below NaN, and
// those that were taken already below everything.
constexpr int32_t kTaken = INT32_MIN;
constexpr int32_t kDropped = INT32_MIN + 1;
constexpr int32_t kNan = INT32_MIN + 2;

AD_INLINE IVec order_keys(Vec v) {
  const IVec b = reinterpret_cast<IVec>(v + 0.0f);
  const IVec key = b ^ ((b >> 31) & 0x7fffffff);
  return (v == v) ? key : (IVec{} + kNan);
}

// Index of the largest key, the lowest one if there are several. n is a multiple of kLanes.
AD_INLINE int64_t first_largest(const int32_t* keys, int64_t n) {
  IVec best = *reinterpret_cast<const IVec*>(keys);
  for (int64_t i = kLanes; i < n; i += kLanes) {
    const IVec k = *reinterpret_cast<const IVec*>(keys + i);
    best = k > best ? k : best;
  }
  int32_t top = best[0];
  for (int64_t i = 1; i < kLanes; ++i) top = best[i] > top ? best[i] : top;
  int64_t i = 0;
  while (keys[i] != top) ++i;
  return i;
}

AD_INLINE float sum_of(const float* p, int64_t n) {
  float s = 0.0f;
  for (int64_t i = 0; i < n; ++i) s += p[i];
  return s;
}

// softmax of p[0 .. n) in place; n is a multiple of kLanes padded with -inf behind `valid`.
AD_INLINE void softmax(float* p, int64_t n, int64_t valid) {
  float top = -INFINITY;
  bool nan = false;
  for (int64_t i = 0; i < valid; ++i) {
    nan |= p[i] != p[i];
    top = p[i] > top ? p[i] : top;
  }
  if (nan) {
    for (int64_t i = 0; i < n; ++i) p[i] = NAN;
    return;
  }
  Vec total = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec y = vexp(load(p + i) - top);  // a row of -inf, or with +inf, gives NaN as torch.softmax does
    store(p + i, y);
    total += y;
  }
  const float sum = lane_sum(total);
  for (int64_t i = 0; i < n; i += kLanes) store(p + i, load(p + i) / sum);
}

AD_INLINE float sqrt_softplus(float v) {
  // torch.nn.functional.softplus is the identity above 20.
  return ::sqrtf(v > 20.0f ? v : ::log1pf(::expf(v)));
}

AD_INLINE void score(float* p, int64_t n, int64_t valid, int32_t scoring) {
  if (scoring == 0) {
    softmax(p, n, valid);
  } else if (scoring == 1) {
    for (int64_t i = 0; i < n; i += kLanes) store(p + i, vsigmoid(load(p + i)));
  } else {
    for (int64_t i = 0; i < valid; ++i) p[i] = sqrt_softplus(p[i]);
  }
}

// Keys of the groups, kTaken for those that are kept. A NaN inside a group counts as -inf.
AD_INLINE void choose_groups(const Route& a, const float* choice, float* score, int32_t* keys) {
  const int64_t size = a.experts / a.groups, pad = round_up(a.groups, kLanes);
  for (int64_t g = 0; g < pad; ++g) score[g] = -INFINITY;
  for (int64_t g = 0; g < a.groups; ++g) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) {
      if (choice[i] > first) {
        second = first;
        first = choice[i];
      } else if (choice[i] > second) {
        second = choice[i];
      }
    }
    score[g] = a.group_max || size == 1 ? first : first + second;
  }
  for (int64_t g = 0; g < pad; g += kLanes) *reinterpret_cast<IVec*>(keys + g) = order_keys(load(score + g));
  for (int64_t g = a.groups; g < pad; ++g) keys[g] = kTaken;
  for (int64_t k = 0; k < a.topk_group; ++k) keys[first_largest(keys, pad)] = kTaken;
}

struct RouteLayout {
  int64_t pad, k_pad;
  explicit RouteLayout(const Route& a) : pad(round_up(a.experts, kLanes)), k_pad(round_up(a.topk, kLanes)) {}
  int64_t total() const { return 5 * pad + k_pad; }
};

size_t route_scratch_bytes(const Route& a) { return RouteLayout(a).total() * 4; }

void route(const Route& a, int64_t begin, int64_t end, void* scratch) {
  const RouteLayout at(a);
  float* scores = static_cast<float*>(scratch);
  float* choice = scores + at.pad;
  float* group = choice + at.pad;
  int32_t* keys = reinterpret_cast<int32_t*>(group + at.pad);
  int32_t* group_keys = keys + at.pad;
  float* chosen = group + 3 * at.pad;
  const int64_t size = a.experts / a.groups;
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t i = 0; i < at.pad; ++i) {
      scores[i] = i < a.experts ? load_as_float(a.logits, t * a.logits_stride + i, a.dtype) : -INFINITY;
    }
    if (!a.select_logits) score(scores, at.pad, a.experts, a.scoring);
    for (int64_t i = 0; i < at.pad; ++i) choice[i] = scores[i];
    if (a.bias) {
      for (int64_t i = 0; i < a.experts; ++i) choice[i] += a.bias[i];
    }
    for (int64_t i = 0; i < at.pad; i += kLanes) {
      *reinterpret_cast<IVec*>(keys + i) = order_keys(load(choice + i));
    }
    if (a.groups > 1) {
      choose_groups(a, choice, group, group_keys);
      for (int64_t g = 0; g < a.groups; ++g) {
        if (group_keys[g] == kTaken) continue;
        for (int64_t i = g * size; i < (g + 1) * size; ++i) keys[i] = a.group_zero ? 0 : kDropped;
      }
    }
    for (int64_t i = a.experts; i < at.pad; ++i) keys[i] = kTaken;
    int64_t* ids = a.ids + t * a.topk;
    for (int64_t k = 0; k < at.k_pad; ++k) chosen[k] = -INFINITY;
    for (int64_t k = 0; k < a.topk; ++k) {
      ids[k] = first_largest(keys, at.pad);
      keys[ids[k]] = kTaken;
      chosen[k] = scores[ids[k]];
    }
    if (a.select_logits) score(chosen, at.k_pad, a.topk, a.scoring);
    if (a.renorm) {
      const float sum = sum_of(chosen, a.topk);
      const float by = a.renorm == 1 ? sum + a.eps : (sum < a.eps ? a.eps : sum);
      for (int64_t k = 0; k < a.topk; ++k) chosen[k] /= by;
    }
    for (int64_t k = 0; k < a.topk; ++k) a.weights[t * a.topk + k] = chosen[k] * a.scale;
  }
}

template <typename T>
void swiglu_rows(const Swiglu& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* h = static_cast<const T*>(a.h) + r * a.h_stride;
    T* out = static_cast<T*>(a.out) + r * a.width;
    const Vec s = splat(a.row_weight ? a.row_weight[r] : 1.0f);
    for (int64_t j = 0; j < a.width; j += kLanes) {
      const int64_t n = min64(kLanes, a.width - j);
      Vec g, u;
      if (a.interleaved) {
        float gate[kLanes] = {}, up[kLanes] = {};
        for (int64_t i = 0; i < n; ++i) {
          gate[i] = to_float(h[2 * (j + i)]);
          up[i] = to_float(h[2 * (j + i) + 1]);
        }
        g = load(gate);
        u = load(up);
      } else {
        g = load_n(h + j, n);
        u = load_n(h + a.width + j, n);
      }
      store_n(out + j, activate_gated(g, u, a.act) * s, n);
    }
  }
}

void swiglu(const Swiglu& a, int64_t begin, int64_t end) {
  if (a.dtype == ascend_deep_cpu::kBF16) swiglu_rows<bf16>(a, begin, end);
  else swiglu_rows<float>(a, begin, end);
}

}  // namespace
