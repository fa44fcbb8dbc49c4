// exp for vectors of float and double, the same on every ISA but for contraction into FMA.
//
// exp(x) = 2^n * exp(r) with n = round(x / ln 2) and |r| <= ln(2) / 2: a Taylor polynomial of degree 7 (13 for double)
// of r leaves a relative error of r^8 / 8! = 5e-9 (r^14 / 14! = 5e-18), below a tenth of a unit in the last place; the
// roundings of Horner's scheme and of r add up to less than 1.5 ulp (2 without FMA). ln 2 is split in two so that n *
// high part is exact. 2^n is multiplied in as two factors, so that results down to the smallest denormal are rounded
// once and overflow gives infinity. NaN stays NaN.
#pragma once

#include "vec-inl.h"

namespace edgeweave::EW_ISA {

template <int N>
EW_INLINE Vec<float, N> exp_of(Vec<float, N> x) {
  using V = Vec<float, N>;
  using U = Vec<uint32_t, N>;
  using I = Vec<int32_t, N>;
  // Beyond these all results are 0 or infinity; the second operand is the one that keeps a NaN.
  V c = max_or_second<float, N>(splat<float, N>(-104.0f), x);
  c = min_or_second<float, N>(splat<float, N>(89.0f), c);
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  const V t = c * 0x1.715476p+0f + kRound;
  const V n = t - kRound;
  V r = c - n * 0x1.63p-1f;
  r = r - n * -0x1.bd0106p-13f;
  V p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const I k = bit_cast<I>(bit_cast<U>(t) - 0x4b400000u);
  const I half = k >> 1;
  const V low = bit_cast<V>((bit_cast<U>(half) + 127u) << 23);
  const V high = bit_cast<V>((bit_cast<U>(k - half) + 127u) << 23);
  return p * low * high;
}

template <int N>
EW_INLINE Vec<double, N> exp_of(Vec<double, N> x) {
  using V = Vec<double, N>;
  using U = Vec<uint64_t, N>;
  using I = Vec<int64_t, N>;
  V c = max_or_second<double, N>(splat<double, N>(-746.0), x);
  c = min_or_second<double, N>(splat<double, N>(710.0), c);
  constexpr double kRound = 0x1.8p52;
  const V t = c * 0x1.71547652b82fep+0 + kRound;
  const V n = t - kRound;
  V r = c - n * 0x1.62e42feep-1;
  r = r - n * 0x1.a39ef35793c76p-33;
  V p = r * (1.0 / 6227020800) + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const I k = bit_cast<I>(bit_cast<U>(t) - 0x4338000000000000u);
  const I half = k >> 1;
  const V low = bit_cast<V>((bit_cast<U>(half) + 1023u) << 52);
  const V high = bit_cast<V>((bit_cast<U>(k - half) + 1023u) << 52);
  return p * low * high;
}

}  // namespace edgeweave::EW_ISA
