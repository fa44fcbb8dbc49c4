// Storage types as this program understands them: written without a look at the kernels' own conversions, so that the
// two can disagree.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/args.h"

namespace edgeweave::tests {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// Rounds to nearest even with `digits` bits of significand, the hidden one included.
inline double round_to(double value, int digits, int smallest_exponent, double overflow) {
  if (std::isnan(value) || std::isinf(value) || value == 0) return value;
  const int exponent = std::max(std::ilogb(value), smallest_exponent);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, digits - 1 - exponent)), exponent - digits + 1);
  return std::fabs(rounded) >= overflow ? std::copysign(INFINITY, value) : rounded;
}

// Numbers are computed in `Wide`: float64 for floating-point storage, wrapping 64-bit integers for the others.
template <class S>
struct Storage {
  using Wide = int64_t;
  using Acc = S;
  static constexpr DType kType = sizeof(S) == 1   ? (std::is_signed_v<S> ? DType::kI8 : DType::kU8)
                                 : sizeof(S) == 2 ? DType::kI16
                                 : sizeof(S) == 4 ? DType::kI32
                                                  : DType::kI64;
  static constexpr bool kFloating = false;
  static Wide get(S s) { return static_cast<Wide>(s); }
  static S put(Wide v) { return static_cast<S>(v); }
};

template <class T, DType kDType>
struct NativeFloat {
  using Wide = double;
  using Acc = T;
  static constexpr DType kType = kDType;
  static constexpr bool kFloating = true;
  static Wide get(T s) { return static_cast<Wide>(s); }
  static T put(Wide v) { return static_cast<T>(v); }
};
template <>
struct Storage<float> : NativeFloat<float, DType::kF32> {};
template <>
struct Storage<double> : NativeFloat<double, DType::kF64> {};

template <>
struct Storage<Bf16> {
  using Wide = double;
  using Acc = float;
  static constexpr DType kType = DType::kBF16;
  static constexpr bool kFloating = true;
  static Wide get(Bf16 s) {
    const uint32_t bits = static_cast<uint32_t>(s.bits) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof(f));
    return static_cast<double>(f);
  }
  static Bf16 put(Wide v) {
    const auto f = static_cast<float>(round_to(v, 8, -126, std::ldexp(1.0, 128)));
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof(bits));
    return {static_cast<uint16_t>((bits >> 16) | (std::isnan(v) ? 0x40 : 0))};
  }
};

template <>
struct Storage<F16> {
  using Wide = double;
  using Acc = float;
  static constexpr DType kType = DType::kF16;
  static constexpr bool kFloating = true;
  static Wide get(F16 s) {
    static const std::vector<double> values = [] {
      std::vector<double> all;
      for (int bits = 0; bits < 65536; ++bits) all.push_back(decode({static_cast<uint16_t>(bits)}));
      return all;
    }();
    return values[s.bits];
  }
  static Wide decode(F16 s) {
    const int exponent = (s.bits >> 10) & 31;
    const int fraction = s.bits & 1023;
    double v = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) v = fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : INFINITY;
    return (s.bits & 0x8000) != 0 ? -v : v;
  }
  static F16 put(Wide v) {
    const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
    const double r = std::fabs(round_to(v, 11, -14, 65536.0));
    if (std::isnan(r)) return {static_cast<uint16_t>(sign | 0x7e00)};
    if (std::isinf(r)) return {static_cast<uint16_t>(sign | 0x7c00)};
    if (r < std::ldexp(1.0, -14)) return {static_cast<uint16_t>(sign | static_cast<uint16_t>(std::ldexp(r, 24)))};
    const int exponent = std::ilogb(r);
    const auto fraction = static_cast<uint16_t>(std::ldexp(r, 10 - exponent) - 1024);
    return {static_cast<uint16_t>(sign | ((exponent + 15) << 10) | fraction)};
  }
};

// What a value becomes when it is stored and read back.
template <class S>
typename Storage<S>::Wide stored(typename Storage<S>::Wide v) {
  if constexpr (Storage<S>::kFloating) {
    if (std::fabs(v) <= 256 && v == std::trunc(v)) return v;  // eight bits: exact in every type
  }
  return Storage<S>::get(Storage<S>::put(v));
}

template <class W>
bool same(W a, W b) {
  if constexpr (std::is_floating_point_v<W>) return a == b || (std::isnan(a) && std::isnan(b));
  return a == b;
}

}  // namespace edgeweave::tests
