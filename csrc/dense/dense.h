// What dense products have in common, and those on vectors of float.
//
// A product in float is bound by the multipliers, or for few rows by the memory that its weights come from. Weights are
// packed once, in panels of columns that are read from front to back, and the next panel is fetched while one is
// multiplied; what follows the product happens to the sums while they are in the first cache. Layout:
//   weights  [features / panel][inner][panel]  padded with zeros to whole panels
#pragma once

#include <cstdint>

namespace edgeweave {

enum class Activation : int64_t { kNone, kRelu, kGelu, kGeluTanh, kSilu, kSigmoid, kTanh };
constexpr int64_t kActivations = 7;
enum class Combine : int64_t { kNone, kAdd, kMultiply };
constexpr int64_t kCombines = 3;

struct FloatProduct {
  const float* rows = nullptr;     // [count, inner]
  const float* weights = nullptr;  // packed
  const float* bias = nullptr;     // padded to whole panels, or null
  int64_t inner = 0;
  int64_t count = 0;
  int64_t features = 0;  // columns of the result
  Activation activation = Activation::kNone;
  Combine combine = Combine::kNone;
  const float* other = nullptr;  // [count, features], what is added or multiplied at the end
  float* out = nullptr;          // [count, features]
};

struct FloatKernels {
  int64_t panel;  // columns that are packed together
  int64_t block;  // rows that are multiplied together
  // Panels [begin, end) of packed weights, from [features, inner] with strides.
  void (*pack)(const float* weight, int64_t features, int64_t inner, int64_t feature_stride, int64_t inner_stride,
               int64_t begin, int64_t end, float* packed);
  // The part of the result in rows [row_begin, row_end) and panels [begin, end).
  void (*multiply)(const FloatProduct& product, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end);
};

// A stretch of products that are neighbours both in their matrix and among those that are picked.
struct PairRun {
  int64_t from;
  int64_t to;
  int64_t length;
};

// Products of each of a few rows with each other, of which some are picked: what recommendation models call the dot
// interaction of an example's features. Runs are in the order of `to` and leave no gap.
struct PairInput {
  const void* const* rows = nullptr;  // [width] each, of float or bfloat16
  int64_t count = 0;                  // of rows
  int64_t width = 0;
  bool wide = false;    // float rather than bfloat16
  bool narrow = false;  // rounded to bfloat16, as the products are; always if not wide
  const PairRun* runs = nullptr;
  int64_t run_count = 0;
  int64_t picked = 0;  // products
};

struct PairKernels {
  // Numbers from one row of the matrix of products to the next. Its upper triangle is there.
  int64_t (*stride)(int64_t count);
  // Bytes of scratch for one example at a time.
  int64_t (*scratch)(int64_t count, int64_t width, int64_t picked);
  void (*multiply)(const PairInput& in, void* scratch, void* out);
};

}  // namespace edgeweave
