// Matrix products of bfloat16 on AMX tiles, with weights packed once and what follows a product done on its tiles.
//
// For a server that answers single requests the weights of a layer come from memory each time, so the product is as
// fast as they stream in and the tiles keep up: the next columns are fetched while these are multiplied. Layouts:
//   rows     [rows / 32][inner / 32][2][16][32]  two tiles of 16 rows for each 32 inner elements, converted and padded
//   weights  [features / 32][inner / 32][2][16][16][2]  two tiles of 16 columns, pairs of inner elements together
#pragma once

#include <cstddef>
#include <cstdint>

#include "dense.h"

namespace edgeweave {

constexpr int64_t kAmxBlock = 32;  // rows, columns and inner elements that are handled together

inline int64_t amx_blocks(int64_t count) { return (count + kAmxBlock - 1) / kAmxBlock; }

// A matrix of float or bfloat16 whose rows are contiguous.
struct DenseRows {
  const void* data = nullptr;
  int64_t stride = 0;  // elements from one row to the next
  bool wide = false;   // float rather than bfloat16
};

// Blocks of rows that stay in L2 while weights stream past. Fewer leave the result more of it, and the lines that the
// next rows come in; but the weights are read again for each group.
inline int64_t amx_resident(int64_t inner) {
  constexpr int64_t kBytes = 768 << 10, kLeast = 4, kMost = 8;
  const int64_t row_bytes = amx_blocks(inner) * kAmxBlock * kAmxBlock * 2;
  const int64_t fit = kBytes / row_bytes;
  return fit < kLeast ? kLeast : fit > kMost ? kMost : fit;
}

struct AmxProduct {
  const uint16_t* rows = nullptr;  // packed; or null, and each worker packs those of `x` that it multiplies
  DenseRows x;
  const uint16_t* weights = nullptr;  // packed
  const float* bias = nullptr;        // padded to whole blocks, or null
  int64_t inner = 0;
  int64_t count = 0;     // of rows
  int64_t features = 0;  // columns of the result
  Activation activation = Activation::kNone;
  Combine combine = Combine::kNone;
  DenseRows other;  // what is added or multiplied at the end, [count, features]
  DenseRows out;    // [count, features]; written
};

// What is added to the scores of attention before their softmax: nothing, or a value for each query and key; a bool
// that is false takes the key out.
enum class Mask : int64_t { kNone, kBool, kFloat, kBFloat16 };

// Attention of bfloat16 values: softmax(scale * q k' + mask) v for each head of each batch. The last dimension of each
// matrix is contiguous; strides are in elements.
struct AmxAttention {
  struct Heads {
    const uint16_t* data = nullptr;
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
    int64_t row_stride = 0;
  };
  Heads q, k, v;
  Heads out;  // written
  int64_t heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t width = 0;
  float scale = 1;
  bool causal = false;  // a query sees the keys up to its own position
  Mask mask = Mask::kNone;
  const void* mask_data = nullptr;
  int64_t mask_strides[4] = {};  // batch, head, query, key

  // Bytes of scratch that a worker needs.
  size_t scratch() const {
    const int64_t key_blocks = amx_blocks(keys);
    const int64_t pairs =
        2 * key_blocks * amx_blocks(width) + amx_blocks(width) + key_blocks;  // k, v, queries, weights
    const int64_t floats = kAmxBlock * key_blocks * kAmxBlock + kAmxBlock * kAmxBlock +
                           key_blocks * kAmxBlock;  // scores, sums, what the mask adds
    return static_cast<size_t>(pairs * kAmxBlock * kAmxBlock * 2 + floats * 4);
  }
};

// Layer normalisation over rows.
struct AmxNorm {
  DenseRows x;
  DenseRows out;                  // written
  const float* weight = nullptr;  // or null
  const float* bias = nullptr;    // or null
  int64_t width = 0;
  float epsilon = 0;
};

struct AmxKernels {
  // Elements [begin, end), in place.
  void (*activate)(void* data, bool wide, Activation activation, int64_t begin, int64_t end);
  // Rows [begin, end).
  void (*normalise)(const AmxNorm& norm, int64_t begin, int64_t end);
  // Blocks [begin, end) of the queries of one head. `next`, batch * heads + head, is fetched meanwhile, if not
  // negative.
  void (*attend)(const AmxAttention& attention, int64_t batch, int64_t head, int64_t begin, int64_t end, int64_t next,
                 void* scratch);
  // Blocks [begin, end) of rows, to `packed`.
  void (*pack_rows)(const DenseRows& x, int64_t count, int64_t inner, int64_t begin, int64_t end, uint16_t* packed);
  // Blocks [begin, end) of packed weights, from [features, inner] with strides.
  void (*pack_weights)(const uint16_t* weight, int64_t features, int64_t inner, int64_t feature_stride,
                       int64_t inner_stride, int64_t begin, int64_t end, uint16_t* packed);
  // The part of the result in blocks [row_begin, row_end) x [begin, end). If rows are not packed, `room` is for
  // amx_resident of their blocks.
  void (*multiply)(const AmxProduct& product, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
                   uint16_t* room);
};

// Null where the processor has no AMX, the kernel does not permit it, or the compiler did not know it.
const AmxKernels* amx_kernels();

}  // namespace edgeweave
