// Products of float32 on vectors, and dot interactions: small integers, so that every sum is exact.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "cases.h"
#include "dense/dense.h"

namespace edgeweave::tests {
namespace {

float small(Random& random) { return static_cast<float>(random.below(9) - 4); }

void fill(Array<float>& array, Random& random) {
  for (int64_t i = 0; i < array.size(); ++i) array[i] = small(random);
}

void expect_near(const char* what, int64_t row, int64_t column, float got, double expected, double limit) {
  if (!(std::fabs(static_cast<double>(got) - expected) <= limit)) fail_at(what, row, column, got, expected);
  ++num_checks;
}

double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x > 0 ? x : 0;
    case Activation::kGelu:
      return x * std::erfc(-x / std::sqrt(2.0)) / 2;
    case Activation::kGeluTanh:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kSigmoid:
      return 1 / (1 + std::exp(-x));
    case Activation::kTanh:
      return std::tanh(x);
  }
  return 0;
}

// In a grid of two by two workers, as the op shares it.
void product(int64_t count, int64_t inner, int64_t features, Activation activation, Combine combine, bool with_bias,
             Random& random) {
  const FloatKernels& kernels = float_kernels();
  where = {"floats", "", 0, false, features, inner, count, 0, with_bias, combine != Combine::kNone};
  const int64_t panels = (features + kernels.panel - 1) / kernels.panel;
  Array<float> rows(count * inner), weight(features * inner), other(count * features), out(count * features);
  Array<float> packed(panels * kernels.panel * inner), bias(panels * kernels.panel);
  fill(rows, random);
  fill(weight, random);
  fill(other, random);
  for (int64_t i = 0; i < bias.size(); ++i) bias[i] = i < features ? small(random) : 0.0f;
  // As [inner, features].
  kernels.pack(weight.data(), features, inner, 1, features, 0, panels, packed.data());
  FloatProduct p;
  p.rows = rows.data();
  p.weights = packed.data();
  p.bias = with_bias ? bias.data() : nullptr;
  p.inner = inner;
  p.count = count;
  p.features = features;
  p.activation = activation;
  p.combine = combine;
  p.other = combine == Combine::kNone ? nullptr : other.data();
  p.out = out.data();
  const int64_t half = (count + kernels.block - 1) / kernels.block / 2 * kernels.block;
  for (int64_t r = 0; r < 2; ++r)
    for (int64_t c = 0; c < 2; ++c)
      kernels.multiply(p, r == 0 ? 0 : half, r == 0 ? half : count, c == 0 ? 0 : panels / 2,
                       c == 0 ? panels / 2 : panels);
  const bool exact = activation == Activation::kNone || activation == Activation::kRelu;
  const int64_t step = count * features > 4000 ? 7 : 1;
  for (int64_t i = 0; i < count * features; i += step) {
    const int64_t row = i / features;
    const int64_t column = i % features;
    double sum = with_bias ? bias[column] : 0;
    for (int64_t k = 0; k < inner; ++k) sum += double{rows[row * inner + k]} * weight[k * features + column];
    double expected = activated(activation, sum);
    if (combine == Combine::kAdd) expected += other[i];
    if (combine == Combine::kMultiply) expected *= other[i];
    // The fitted functions are within 3e-7 of theirs, or of what they are multiplied with.
    expect_near("product", row, column, out[i], expected, exact ? 0 : 1e-5 * (1 + std::fabs(sum)));
  }
}

void test_products() {
  Random random(11);
  int64_t n = 0;
  for (const int64_t count : {1, 2, 3, 4, 5, 7, 8, 9, 17, 40})
    for (const int64_t inner : {1, 2, 3, 4, 5, 31, 64})
      for (const int64_t features : {1, 3, 4, 5, 8, 9, 12, 13, 16, 17, 24, 25, 33, 48, 49, 97})
        for (int k = 0; k < 3; ++k, ++n)
          product(count, inner, features, static_cast<Activation>(n % kActivations),
                  static_cast<Combine>(n / kActivations % kCombines), n % 2 == 0, random);
  // More than one part of the inner dimension, of the rows, and of both.
  for (const auto& [count, inner] : {std::pair<int64_t, int64_t>{9, 1025}, {300, 1024}, {600, 1030}, {530, 2100}})
    product(count, inner, 50, Activation::kRelu, Combine::kAdd, true, random);
}

template <class S>
void interaction(int64_t slots, int64_t width, bool narrow, Random& random) {
  const PairKernels& kernels = pair_kernels();
  constexpr bool kWide = sizeof(S) == 4;
  where = {"pairs", "", kWide ? 0 : 2, false, width, slots, 0, 0, narrow, false};
  std::deque<Array<S>> arrays;
  std::vector<const void*> rows;
  std::vector<std::vector<float>> values(static_cast<size_t>(slots));
  for (int64_t i = 0; i < slots; ++i) {
    arrays.emplace_back(width, random.below(2));
    for (int64_t k = 0; k < width; ++k) {
      const float value = small(random);
      values[static_cast<size_t>(i)].push_back(value);
      // Small integers are the same in bfloat16, its upper half.
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      if constexpr (kWide)
        arrays.back()[k] = value;
      else
        arrays.back()[k] = static_cast<S>(bits >> 16);
    }
    rows.push_back(arrays.back().data());
  }
  std::vector<PairRun> runs;
  std::vector<std::pair<int64_t, int64_t>> picks;
  const int64_t stride = kernels.stride(slots);
  for (int64_t i = 0; i < slots; ++i) {
    const int64_t first = random.below(2) == 0 ? i : i + random.below(slots - i);
    runs.push_back({i * stride + first, static_cast<int64_t>(picks.size()), slots - first});
    for (int64_t j = first; j < slots; ++j) picks.emplace_back(i, j);
  }
  const auto picked = static_cast<int64_t>(picks.size());
  const bool result_narrow = narrow || !kWide;
  Array<char> scratch(kernels.scratch(slots, width, picked));
  Array<char> out(picked * (result_narrow ? 2 : 4));
  PairInput in;
  in.rows = rows.data();
  in.count = slots;
  in.width = width;
  in.wide = kWide;
  in.narrow = result_narrow;
  in.runs = runs.data();
  in.run_count = static_cast<int64_t>(runs.size());
  in.picked = picked;
  kernels.multiply(in, scratch.data(), out.data());
  for (int64_t k = 0; k < picked; ++k) {
    const auto& [i, j] = picks[static_cast<size_t>(k)];
    double sum = 0;
    for (int64_t d = 0; d < width; ++d)
      sum += double{values[static_cast<size_t>(i)][static_cast<size_t>(d)]} *
             values[static_cast<size_t>(j)][static_cast<size_t>(d)];
    uint32_t bits = 0;
    if (result_narrow) {
      uint16_t upper;
      std::memcpy(&upper, out.data() + 2 * k, 2);
      bits = uint32_t{upper} << 16;
    } else {
      std::memcpy(&bits, out.data() + 4 * k, 4);
    }
    float got;
    std::memcpy(&got, &bits, 4);
    expect_near("interaction", i, j, got, sum, result_narrow ? std::fabs(sum) / 256 : 0);
  }
}

void test_interactions() {
  Random random(12);
  for (const int64_t slots : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 27, 32, 33, 64})
    for (const int64_t width : {0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 130}) {
      interaction<float>(slots, width, false, random);
      interaction<float>(slots, width, true, random);
      interaction<uint16_t>(slots, width, true, random);
    }
}

}  // namespace

void test_dense() {
  test_products();
  test_interactions();
}

}  // namespace edgeweave::tests
