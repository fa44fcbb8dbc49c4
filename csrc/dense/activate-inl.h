// Activations of vectors of float. All keep NaN.
#pragma once

#include "../kernels/exp-inl.h"
#include "dense.h"

namespace edgeweave::EW_ISA {

// The normal distribution function, (1 + erf(x / sqrt 2)) / 2: an odd polynomial fitted to it on [-5.5, 5.5] (least
// squares in Chebyshev nodes of x^2, weighted by x), within 1.3e-7; 0 and 1 beyond. An exp would cost three times that.
template <int N>
EW_INLINE Vec<float, N> normal_cdf(Vec<float, N> x) {
  using V = Vec<float, N>;
  constexpr float kEnd = 5.5f;
  const V u = x * x * (2.0f / (kEnd * kEnd)) - 1.0f;
  V p = u * -0.000228787787f + 0.000628634065f;
  p = p * u - 0.000556633458f;
  p = p * u + 0.000729936408f;
  p = p * u - 0.00237920089f;
  p = p * u + 0.00460888352f;
  p = p * u - 0.00684855878f;
  p = p * u + 0.010236158f;
  p = p * u - 0.0149880117f;
  p = p * u + 0.0203618277f;
  p = p * u - 0.0260504372f;
  p = p * u + 0.0320706852f;
  p = p * u - 0.038792599f;
  p = p * u + 0.0477376021f;
  p = p * u - 0.0641723424f;
  p = p * u + 0.12855193f;
  // Not below zero: what it is multiplied with keeps its sign.
  const V inside = max_or_second<float, N>(V{}, x * p + 0.5f);
  const V bounded = x > splat<float, N>(kEnd) ? splat<float, N>(1.0f) : inside;
  return x < splat<float, N>(-kEnd) ? V{} : bounded;
}

// tanh(x): by exp, and near zero, where that cancels, by its series.
template <int N>
EW_INLINE Vec<float, N> tanh_of(Vec<float, N> x) {
  using V = Vec<float, N>;
  const V square = x * x;
  const V series = x * (square * (square * (2.0f / 15) - 1.0f / 3) + 1.0f);
  const V full = 1.0f - 2.0f / (exp_of<N>(x + x) + 1.0f);
  return square < splat<float, N>(0.01f) ? series : full;
}

template <Activation kActivation, int N>
EW_INLINE Vec<float, N> activate(Vec<float, N> x) {
  using V = Vec<float, N>;
  if constexpr (kActivation == Activation::kRelu) return max_or_second<float, N>(V{}, x);
  if constexpr (kActivation == Activation::kGelu) return x * normal_cdf<N>(x);
  if constexpr (kActivation == Activation::kGeluTanh) {
    const V inner = x * (x * x * 0.044715f + 1.0f) * 0.79788456f;
    // 0.5 * (1 + tanh(y)) = 1 - 1 / (exp(2 y) + 1)
    return x * (1.0f - 1.0f / (exp_of<N>(inner + inner) + 1.0f));
  }
  if constexpr (kActivation == Activation::kSilu) return x / (exp_of<N>(-x) + 1.0f);
  if constexpr (kActivation == Activation::kSigmoid) return 1.0f / (exp_of<N>(-x) + 1.0f);
  if constexpr (kActivation == Activation::kTanh) return tanh_of<N>(x);
  return x;
}

// `pick.template of<activation>()` for an activation that is known at run time.
template <class Pick>
auto for_activation(Activation activation, const Pick& pick) {
  switch (activation) {
    case Activation::kRelu:
      return pick.template of<Activation::kRelu>();
    case Activation::kGelu:
      return pick.template of<Activation::kGelu>();
    case Activation::kGeluTanh:
      return pick.template of<Activation::kGeluTanh>();
    case Activation::kSilu:
      return pick.template of<Activation::kSilu>();
    case Activation::kSigmoid:
      return pick.template of<Activation::kSigmoid>();
    case Activation::kTanh:
      return pick.template of<Activation::kTanh>();
    case Activation::kNone:
      break;
  }
  return pick.template of<Activation::kNone>();
}

}  // namespace edgeweave::EW_ISA
