#include "activate-inl.h"

namespace edgeweave::EW_ISA {
namespace {

constexpr int kLanes = kVectorBytes / 4;
// Sums of a block are kRowsOf * kWide vectors; with the weights of a step and one factor they fill the registers.
constexpr int kWide = 3;
constexpr int kRowsOf = kRegisters == 32 ? 8 : 4;
constexpr int64_t kPanelColumns = kWide * kLanes;
constexpr int64_t kLongest = 1024;      // steps along the inner dimension whose weights stay in L2 with the rows
constexpr int64_t kRowBytes = 1 << 20;  // of the rows that stay in L2 while panels stream past
constexpr int64_t kStride = 4;          // steps between fetches of the panel after

EW_INLINE int64_t shorter(int64_t a, int64_t b) { return a < b ? a : b; }

// Adds to the sums of kRows rows and kColumns vectors of a panel. `lines` cache lines are fetched every kStride steps.
template <int kRows, int kColumns>
void multiply_block(const float* a, int64_t row_stride, const float* b, int64_t steps, float* sums, const char* ahead,
                    int64_t lines) {
  using V = Vec<float, kLanes>;
  V sum[kRows][kColumns];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int c = 0; c < kColumns; ++c) sum[r][c] = load<float, kLanes>(sums + r * kPanelColumns + c * kLanes);
  }
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    V weights[kColumns];
#pragma GCC unroll 3
    for (int c = 0; c < kColumns; ++c) weights[c] = load<float, kLanes>(b + k * kPanelColumns + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      V x = splat<float, kLanes>(load_scalar(a + r * row_stride + k));
#if defined(__AVX512F__)
      asm("" : "+v"(x));  // read once, not by each of its products
#endif
#pragma GCC unroll 3
      for (int c = 0; c < kColumns; ++c) sum[r][c] += x * weights[c];
    }
  };
  int64_t k = 0;
  for (; k + kStride <= steps; k += kStride) {
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(ahead + 64 * i, 0, 2);
    ahead += 64 * lines;
#pragma GCC unroll 4
    for (int64_t i = 0; i < kStride; ++i) step(k + i);
  }
  for (; k < steps; ++k) step(k);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int c = 0; c < kColumns; ++c) store<float, kLanes>(sums + r * kPanelColumns + c * kLanes, sum[r][c]);
  }
}

using MultiplyBlock = void (*)(const float*, int64_t, const float*, int64_t, float*, const char*, int64_t);

template <int kRows>
MultiplyBlock find_block(int64_t columns) {
  if (columns <= kLanes) return multiply_block<kRows, 1>;
  if (columns <= 2 * kLanes) return multiply_block<kRows, 2>;
  return multiply_block<kRows, 3>;
}

MultiplyBlock find_block(int64_t rows, int64_t columns) {
  switch (rows) {
    case 1:
      return find_block<1>(columns);
    case 2:
      return find_block<2>(columns);
    case 3:
      return find_block<3>(columns);
    case 4:
      return find_block<4>(columns);
#if !defined(__x86_64__) || defined(__AVX512F__)
    case 5:
      return find_block<5>(columns);
    case 6:
      return find_block<6>(columns);
    case 7:
      return find_block<7>(columns);
    default:
      return find_block<8>(columns);
#else
    default:
      return find_block<4>(columns);
#endif
  }
}

// A block of the result, of which `width` columns are there.
struct Place {
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t width;
};

template <Activation kActivation, Combine kCombine>
void finish_block(const FloatProduct& p, const Place& at, const float* sums) {
  using V = Vec<float, kLanes>;
  const int64_t stride = p.features;
  const int64_t width = at.width;
  float* out = p.out + at.row * stride + at.column;
  const float* other = kCombine == Combine::kNone ? nullptr : p.other + at.row * stride + at.column;
  for (int64_t r = 0; r < at.rows; ++r) {
    for (int64_t c = 0; c < width; c += kLanes) {
      V x = activate<kActivation, kLanes>(load<float, kLanes>(sums + r * kPanelColumns + c));
      const int64_t left = width - c;
      if constexpr (kCombine != Combine::kNone) {
        const float* from = other + r * stride + c;
        const V y = left >= kLanes ? load<float, kLanes>(from) : load_partial<float, kLanes>(from, left);
        x = kCombine == Combine::kAdd ? x + y : x * y;
      }
      if (left >= kLanes)
        store<float, kLanes>(out + r * stride + c, x);
      else
        __builtin_memcpy(out + r * stride + c, &x, static_cast<size_t>(4 * left));
    }
  }
}

using FinishBlock = void (*)(const FloatProduct&, const Place&, const float*);

struct PickFinish {
  Combine combine;
  template <Activation kActivation>
  FinishBlock of() const {
    switch (combine) {
      case Combine::kAdd:
        return finish_block<kActivation, Combine::kAdd>;
      case Combine::kMultiply:
        return finish_block<kActivation, Combine::kMultiply>;
      case Combine::kNone:
        break;
    }
    return finish_block<kActivation, Combine::kNone>;
  }
};

// Sums begin with the bias, or where the steps before left them in the result.
void begin_block(const FloatProduct& p, const Place& at, bool first, float* sums) {
  const auto bytes = static_cast<size_t>(4 * at.width);
  for (int64_t r = 0; r < at.rows; ++r) {
    float* to = sums + r * kPanelColumns;
    if (!first)
      __builtin_memcpy(to, p.out + (at.row + r) * p.features + at.column, bytes);
    else if (p.bias != nullptr)
      __builtin_memcpy(to, p.bias + at.column, sizeof(float) * kPanelColumns);
    else
      __builtin_memset(to, 0, sizeof(float) * kPanelColumns);
  }
}

void multiply_floats(const FloatProduct& p, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
  if (row_begin >= row_end) return;
  const int64_t inner_parts = p.inner <= kLongest ? 1 : (p.inner + kLongest - 1) / kLongest;
  const int64_t steps_most = p.inner / inner_parts + 1;
  int64_t resident = kRowBytes / (4 * steps_most);
  if (resident < kRowsOf) resident = kRowsOf;
  const int64_t row_parts = (row_end - row_begin + resident - 1) / resident;
  const FinishBlock finish = for_activation(p.activation, PickFinish{p.combine});
  alignas(64) float sums[kRowsOf * kPanelColumns] = {};
  for (int64_t part = 0; part < row_parts; ++part) {
    const int64_t first_row = row_begin + (row_end - row_begin) * part / row_parts;
    const int64_t rows = row_begin + (row_end - row_begin) * (part + 1) / row_parts - first_row;
    const int64_t blocks = (rows + kRowsOf - 1) / kRowsOf;
    // The lines of a step of the panel after this one, spread over the blocks of rows.
    constexpr int64_t kLines = kStride * kPanelColumns * 4 / 64;
    const int64_t lines = (kLines + blocks - 1) / blocks;
    for (int64_t inner = 0; inner < inner_parts; ++inner) {
      const int64_t k = p.inner * inner / inner_parts;
      const int64_t steps = p.inner * (inner + 1) / inner_parts - k;
      for (int64_t n = begin; n < end; ++n) {
        const float* weights = p.weights + (n * p.inner + k) * kPanelColumns;
        const char* ahead = reinterpret_cast<const char*>(weights + p.inner * kPanelColumns);
        Place at{0, 0, n * kPanelColumns, shorter(kPanelColumns, p.features - n * kPanelColumns)};
        for (int64_t block = 0; block < blocks; ++block) {
          at.row = first_row + rows * block / blocks;
          at.rows = first_row + rows * (block + 1) / blocks - at.row;
          // So that stores do not wait for these lines one by one.
          for (int64_t r = 0; r < at.rows; ++r) {
            const float* line = p.out + (at.row + r) * p.features + at.column;
            for (int64_t c = 0; c < at.width; c += 16) __builtin_prefetch(line + c, 1);
          }
          begin_block(p, at, inner == 0, sums);
          const int64_t fetched = n + 1 < end && block * lines < kLines ? lines : 0;
          find_block(at.rows, at.width)(p.rows + at.row * p.inner + k, p.inner, weights, steps, sums, ahead, fetched);
          ahead += steps / kStride * fetched * 64;
          if (inner + 1 == inner_parts)
            finish(p, at, sums);
          else
            for (int64_t r = 0; r < at.rows; ++r)
              __builtin_memcpy(p.out + (at.row + r) * p.features + at.column, sums + r * kPanelColumns,
                               static_cast<size_t>(4 * at.width));
        }
      }
    }
  }
}

void pack_floats(const float* weight, int64_t features, int64_t inner, int64_t feature_stride, int64_t inner_stride,
                 int64_t begin, int64_t end, float* packed) {
  for (int64_t n = begin; n < end; ++n) {
    float* to = packed + n * inner * kPanelColumns;
    const float* from = weight + n * kPanelColumns * feature_stride;
    const int64_t width = shorter(kPanelColumns, features - n * kPanelColumns);
    for (int64_t k = 0; k < inner; ++k, to += kPanelColumns, from += inner_stride) {
      for (int64_t c = 0; c < width; ++c) to[c] = load_scalar(from + c * feature_stride);
      for (int64_t c = width; c < kPanelColumns; ++c) to[c] = 0.0f;
    }
  }
}

}  // namespace

FloatKernels float_kernels() { return {kPanelColumns, kRowsOf, pack_floats, multiply_floats}; }

}  // namespace edgeweave::EW_ISA
