// exp, the activations and the normal distribution on vectors. Relative errors are below 4e-7 unless said.
#pragma once

#include "vec.h"

namespace {

using ascend_deep_cpu::Act;
using ascend_deep_cpu::Activation;

AD_INLINE Vec vmin(Vec a, Vec b) { return a < b ? a : b; }
AD_INLINE Vec vabs(Vec a) {
  return reinterpret_cast<Vec>(reinterpret_cast<UVec>(a) & 0x7fffffffu);
}
// As torch.clamp: NaN stays NaN.
AD_INLINE Vec at_most(Vec v, Vec hi) { return v > hi ? hi : v; }
AD_INLINE Vec at_least(Vec v, Vec lo) { return v < lo ? lo : v; }

// exp(x); 0 below -87.3 (where float32 becomes subnormal), infinite above 88.72, NaN stays NaN.
AD_INLINE Vec vexp(Vec x) {
  const Vec c = at_least(at_most(x, splat(88.3f)), splat(-87.3f));
  // x = n ln2 + r with |r| <= ln2 / 2; adding 1.5 * 2^23 rounds to the nearest integer.
  const Vec magic = splat(12582912.0f);
  const Vec shifted = c * 1.44269504088896341f + magic;
  const Vec n = shifted - magic;
  const Vec r = (c - n * 0.693359375f) - n * -2.12194440054690583e-4f;
  // Taylor's series to the 7th power: the first omitted term is below 1e-8 on that interval.
  Vec p = splat(1.0f / 5040.0f);
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // n <= 127, so 2^n is a normal number whose exponent field is n + 127.
  const IVec e = (reinterpret_cast<IVec>(shifted) - 0x4b400000 + 127) << 23;
  const Vec y = p * reinterpret_cast<Vec>(e);
  return x < splat(-87.3f) ? splat(0.0f) : (x > splat(88.72f) ? splat(INFINITY) : y);
}

AD_INLINE Vec vsigmoid(Vec x) { return 1.0f / (1.0f + vexp(-x)); }

// Cumulative normal distribution: erfc(z) = exp(-z^2) t P(t), t = 1 / (1 + 0.3 z), fitted on [0, 9] to 2.4e-8.
AD_INLINE Vec normal_cdf(Vec x) {
  const Vec z = vmin(vabs(x) * 0.70710678118654752f, splat(9.0f));
  const Vec t = 1.0f / (1.0f + 0.3f * z);
  Vec p = splat(-0.13060405f);
  p = p * t + 0.49096314f;
  p = p * t - 0.52378503f;
  p = p * t + 0.56135812f;
  p = p * t - 0.10446477f;
  p = p * t + 0.21930867f;
  p = p * t + 0.14715512f;
  p = p * t + 0.17089193f;
  p = p * t + 0.16917686f;
  const Vec upper = 0.5f * vexp(-z * z) * t * p;  // P(X > |x|)
  return x < splat(0.0f) ? upper : (x == x ? 1.0f - upper : x);
}

// act(gate) for the activations that exist without an up projection.
AD_INLINE Vec activate(Vec g, Act act, float alpha) {
  switch (act) {
    case ascend_deep_cpu::kGelu: return g * normal_cdf(g);
    case ascend_deep_cpu::kGeluTanh:
      // 0.5 g (1 + tanh(u)) = g sigmoid(2 u)
      return g * vsigmoid(1.5957691216057308f * (g + 0.044715f * g * g * g));
    case ascend_deep_cpu::kRelu: return at_least(g, splat(0.0f));
    case ascend_deep_cpu::kRelu2: {
      const Vec r = at_least(g, splat(0.0f));
      return r * r;
    }
    case ascend_deep_cpu::kSigmoid: return vsigmoid(g);
    case ascend_deep_cpu::kSwigluOai: return g * vsigmoid(alpha * g);
    default: return g * vsigmoid(g);
  }
}

AD_INLINE Vec activate_gated(Vec g, Vec u, const Activation& a) {
  const bool late = a.act == ascend_deep_cpu::kSiluClamp;  // the gate is clamped after its activation
  if (a.has_limit) {
    const Vec hi = splat(a.limit);
    if (!late) g = at_most(g, hi);
    u = at_least(at_most(u, hi), -hi);
  }
  Vec y = activate(g, a.act, a.alpha);
  if (late && a.has_limit) y = at_most(y, splat(a.limit));
  if (a.act == ascend_deep_cpu::kSwigluOai) u = u + 1.0f;
  return y * u;
}

AD_INLINE Vec activate_single(Vec g, const Activation& a) {
  const bool late = a.act == ascend_deep_cpu::kSiluClamp;
  if (a.has_limit && !late) g = at_most(g, splat(a.limit));
  Vec y = activate(g, a.act, a.alpha);
  if (late && a.has_limit) y = at_most(y, splat(a.limit));
  return y;
}

}  // namespace
